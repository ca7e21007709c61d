// The entry point for the experts of a layer. Pairs of a token and an expert are put in the order of
// experts; then all threads share the work of all experts in use, so that a few experts with a few
// rows each keep them as busy as one large matrix.

#include "experts.h"

#include <cstdlib>
#include <cstring>

#include "dispatch.h"
#include "linear_layer.h"
#include "pointwise.h"

namespace quire {
namespace {

// Tokens are taken in batches of about this many pairs, which bounds the working space.
constexpr int64_t kMostPairs = 8192;
// Numbers that one thread prepares, or sums up, without asking others to help.
constexpr int64_t kNumbersAtOnce = 4096;

// One of the two products of an expert: how it is cut, and where its cuts are among those of all.
struct Share {
  Pieces pieces;
  int64_t first_piece, first_tile;
  int64_t tile_tokens;
  size_t laid;  // where its rounded inputs begin
};

// An expert in use.
struct Part {
  int32_t expert;
  int64_t first, count;  // of its pairs, in the order of experts
  Share widen, narrow;
};

// What one of the products takes, of all experts.
struct Totals {
  int64_t pieces = 0, tiles = 0;
  size_t laid_bytes = 0;
};

// What threads do with the pairs of some tokens.
struct Job {
  const ExpertsCall& call;
  const Pointwise& pointwise;
  const float* x;
  const float* weights;
  float* out;
  const Part* parts;
  int64_t num_parts;
  const int32_t* order;   // the pair, in the order of tokens, in each place of the order of experts
  const int32_t* places;  // the place of each pair, or -1 if its expert has no matrix here
  float* rows;            // [places, hidden]: the inputs, later the results
  float* wide;            // [places, 2 * width]: gates and values, then the products of both
  uint8_t* laid;
  Phase gathering, widening, gating, narrowing, summing;

  int32_t hidden() const { return call.gate_up->num_inputs; }
  int32_t outputs() const { return call.gate_up->num_outputs; }

  // The expert that one of the cuts belongs to.
  const Part& part_of(int64_t cut, Share Part::*share, int64_t Share::*first) const {
    int64_t low = 0;
    for (int64_t high = num_parts; high - low > 1;) {
      const int64_t middle = (low + high) / 2;
      (parts[middle].*share.*first <= cut ? low : high) = middle;
    }
    return parts[low];
  }

  template <typename Work>
  void with_widening(const Part& part, Work work) const {
    const float* bias = call.gate_up_bias ? call.gate_up_bias + int64_t{part.expert} * outputs() : nullptr;
    with_product(call.gate_up[part.expert], bias, part.count, [&](auto product) {
      product.set_inputs(rows + part.first * hidden(), hidden(), laid + part.widen.laid);
      work(product);
    });
  }

  template <typename Work>
  void with_narrowing(const Part& part, Work work) const {
    const float* bias = call.down_bias ? call.down_bias + int64_t{part.expert} * hidden() : nullptr;
    with_product(call.down[part.expert], bias, part.count, [&](auto product) {
      product.set_inputs(wide + part.first * outputs(), outputs(), laid + part.narrow.laid);
      work(product);
    });
  }

  void gather(int64_t tile) const {
    const Part& part = part_of(tile, &Part::widen, &Share::first_tile);
    const int64_t first = (tile - part.widen.first_tile) * part.widen.tile_tokens;
    const int64_t end = least(first + part.widen.tile_tokens, part.count);
    for (int64_t i = part.first + first; i < part.first + end; ++i)
      std::memcpy(rows + i * hidden(), x + order[i] / call.top_k * call.x_stride,
                  sizeof(float) * static_cast<size_t>(hidden()));
    with_widening(part, [&](const auto& product) { product.lay(first, end); });
  }

  void widen(int64_t piece) const {
    const Part& part = part_of(piece, &Part::widen, &Share::first_piece);
    with_widening(part, [&](const auto& product) {
      multiply(product, part.widen, piece, wide + part.first * outputs(), outputs());
    });
  }

  void gate(int64_t tile) const {
    const Part& part = part_of(tile, &Part::narrow, &Share::first_tile);
    const int64_t first = (tile - part.narrow.first_tile) * part.narrow.tile_tokens;
    const int64_t end = least(first + part.narrow.tile_tokens, part.count);
    const int32_t width = outputs() / 2;
    for (int64_t i = part.first + first; i < part.first + end; ++i) {
      float* gates = wide + i * outputs();
      if (call.limit > 0.0f)
        pointwise.limited_gate(gates, gates + width, call.limit, call.slope, width, gates);
      else
        pointwise.silu_and_mul(gates, gates + width, width, gates);
    }
    with_narrowing(part, [&](const auto& product) { product.lay(first, end); });
  }

  void narrow(int64_t piece) const {
    const Part& part = part_of(piece, &Part::narrow, &Share::first_piece);
    with_narrowing(part, [&](const auto& product) {
      multiply(product, part.narrow, piece, rows + part.first * hidden(), hidden());
    });
  }

  template <typename Product>
  static void multiply(const Product& product, const Share& share, int64_t piece, float* out,
                       int64_t stride) {
    const auto [group, end_group, token, end_token] = share.pieces.at(piece - share.first_piece);
    product.multiply(group, end_group, token, end_token,
                     out + token * stride + group * Product::kGroupRows, stride);
  }

  // Adds in the order of the token's own list, whatever else is in the batch.
  void sum(int64_t token) const {
    float* to = out + token * hidden();
    std::memset(to, 0, sizeof(float) * static_cast<size_t>(hidden()));
    for (int64_t pair = token * call.top_k; pair < (token + 1) * call.top_k; ++pair)
      if (places[pair] >= 0)
        pointwise.add_scaled(rows + int64_t{places[pair]} * hidden(), weights[pair], hidden(), to);
  }
};

template <typename One>
void run_phase(Phase& phase, One one) {
  phase.run([&](int64_t first, int64_t end) {
    for (int64_t i = first; i < end; ++i) one(i);
  });
}

void work(void* data) {
  Job& job = *static_cast<Job*>(data);
  run_phase(job.gathering, [&](int64_t tile) { job.gather(tile); });
  job.gathering.wait();
  run_phase(job.widening, [&](int64_t piece) { job.widen(piece); });
  job.widening.wait();
  run_phase(job.gating, [&](int64_t tile) { job.gate(tile); });
  job.gating.wait();
  run_phase(job.narrowing, [&](int64_t piece) { job.narrow(piece); });
  job.narrowing.wait();
  run_phase(job.summing, [&](int64_t token) { job.sum(token); });
}

// Puts the pairs of some tokens in order, shares the work out, and has it done.
class Mixture {
 public:
  Mixture(const ExpertsCall& call, int64_t first_token, int64_t num_tokens)
      : call_(call),
        num_tokens_(num_tokens),
        num_pairs_(num_tokens * call.top_k),
        chosen_(call.chosen + first_token * call.top_k),
        first_token_(first_token) {}

  // `numbers` has room for two numbers of each pair and one of each expert, `parts` for one of each
  // expert. Returns 0, or -1 if there is no memory.
  int run(int32_t* numbers, Part* parts) {
    int32_t *order = numbers, *places = numbers + num_pairs_, *experts = places + num_pairs_;
    sort(order, places, experts);
    divide(experts, parts);
    const int64_t hidden = call_.gate_up->num_inputs, outputs = call_.gate_up->num_outputs;
    Space space;
    const size_t rows = space.add(sizeof(float) * static_cast<size_t>(num_sorted_ * hidden));
    const size_t wide = space.add(sizeof(float) * static_cast<size_t>(num_sorted_ * outputs));
    const size_t most_laid = widen_.laid_bytes > narrow_.laid_bytes ? widen_.laid_bytes : narrow_.laid_bytes;
    const size_t laid = space.add(most_laid);
    void* memory = nullptr;
    if (space.bytes && posix_memalign(&memory, 64, space.bytes) != 0) return -1;
    char* at = static_cast<char*>(memory);
    const int64_t row_tiles = at_once(widen_.tiles, num_sorted_ * hidden);
    const int64_t wide_tiles = at_once(narrow_.tiles, num_sorted_ * outputs);
    Job job = {call_,
               chosen_pointwise(),
               call_.x + first_token_ * call_.x_stride,
               call_.weights + first_token_ * call_.top_k,
               call_.out + first_token_ * hidden,
               parts,
               num_parts_,
               order,
               places,
               reinterpret_cast<float*>(at + rows),
               reinterpret_cast<float*>(at + wide),
               reinterpret_cast<uint8_t*>(at + laid),
               Phase(widen_.tiles, row_tiles),
               Phase(widen_.pieces, 1),
               Phase(narrow_.tiles, wide_tiles),
               Phase(narrow_.pieces, 1),
               Phase(num_tokens_, at_once(num_tokens_, num_pairs_ * hidden))};
    run_parallel(work, &job, threads());
    std::free(memory);
    return 0;
  }

 private:
  // How many of `count` items with so many numbers together are taken at a time.
  static int64_t at_once(int64_t count, int64_t numbers) {
    return numbers ? count * kNumbersAtOnce / numbers : 1;
  }

  int32_t threads() const {
    const int64_t inner = call_.down->num_inputs, hidden = call_.gate_up->num_inputs;
    const bool is_small = 3 * num_sorted_ * inner * hidden < kSerialProducts;
    return is_small || call_.num_threads < 1 ? 1 : call_.num_threads;
  }

  // Counts the pairs of each expert into `experts`; the pairs of an expert stay in the order of tokens.
  void sort(int32_t* order, int32_t* places, int32_t* experts) {
    std::memset(experts, 0, sizeof(int32_t) * static_cast<size_t>(call_.num_experts));
    for (int64_t pair = 0; pair < num_pairs_; ++pair)
      if (const int32_t expert = here(pair); expert >= 0) ++experts[expert];
    int32_t place = 0;
    for (int32_t expert = 0; expert < call_.num_experts; ++expert) {
      const int32_t count = experts[expert];
      experts[expert] = place;
      place += count;
    }
    num_sorted_ = place;
    for (int64_t pair = 0; pair < num_pairs_; ++pair) {
      const int32_t expert = here(pair);
      places[pair] = expert < 0 ? -1 : experts[expert]++;
      if (expert >= 0) order[places[pair]] = static_cast<int32_t>(pair);
    }
    // They are the ends of the experts' pairs now, and become counts again.
    for (int32_t expert = call_.num_experts - 1; expert > 0; --expert) experts[expert] -= experts[expert - 1];
  }

  // The matrix of a pair, or -1.
  int32_t here(int64_t pair) const {
    const int32_t expert = chosen_[pair] - call_.first_expert;
    return expert >= 0 && expert < call_.num_experts ? expert : -1;
  }

  void divide(const int32_t* counts, Part* parts) {
    int64_t first = 0;
    for (int32_t expert = 0; expert < call_.num_experts; ++expert) {
      const int64_t count = counts[expert];
      if (count == 0) continue;
      parts[num_parts_++] = {expert, first, count, share(call_.gate_up[expert], count, widen_),
                             share(call_.down[expert], count, narrow_)};
      first += count;
    }
  }

  // An expert has a share of the pieces that goes by its pairs.
  Share share(const PackedMatrix& matrix, int64_t count, Totals& totals) const {
    const int64_t wanted = divide_up(kPieces * threads() * count, num_sorted_);
    return with_product(matrix, nullptr, count, [&](const auto& product) {
      constexpr int64_t kGroupRows = product.kGroupRows, kTogether = product.kTogether;
      const int64_t tile = product.tile_tokens();
      const Pieces pieces(divide_up(matrix.num_outputs, kGroupRows), count, kTogether, tile, wanted);
      const Share share = {pieces, totals.pieces, totals.tiles, tile, totals.laid_bytes};
      totals.pieces += pieces.count();
      totals.tiles += divide_up(count, tile);
      totals.laid_bytes += (product.laid_bytes() + 63) / 64 * 64;
      return share;
    });
  }

  const ExpertsCall& call_;
  const int64_t num_tokens_, num_pairs_;
  const int32_t* chosen_;
  const int64_t first_token_;
  int64_t num_sorted_ = 0, num_parts_ = 0;
  Totals widen_, narrow_;
};

}  // namespace
}  // namespace quire

#pragma GCC visibility push(default)
extern "C" {

// out[t] = the sum over k of weights[t, k] * expert chosen[t, k] of x[t]. Returns 0, or -1 if there is
// no memory.
int quire_experts(const quire::ExpertsCall* call) {
  using namespace quire;
  const int64_t step = kMostPairs / call->top_k > 0 ? kMostPairs / call->top_k : 1;
  const int64_t most_pairs = least(step, call->num_tokens) * call->top_k;
  Space space;
  const size_t parts = space.add(sizeof(Part) * static_cast<size_t>(call->num_experts));
  const size_t numbers =
      space.add(sizeof(int32_t) * static_cast<size_t>(2 * most_pairs + call->num_experts));
  void* memory = nullptr;
  if (posix_memalign(&memory, 64, space.bytes) != 0) return -1;
  char* at = static_cast<char*>(memory);
  int status = 0;
  for (int64_t token = 0; token < call->num_tokens && status == 0; token += step)
    status = Mixture(*call, token, least(step, call->num_tokens - token))
                 .run(reinterpret_cast<int32_t*>(at + numbers), reinterpret_cast<Part*>(at + parts));
  std::free(memory);
  return status;
}

}  // extern "C"
#pragma GCC visibility pop
