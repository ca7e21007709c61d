// Attention over a paged cache against softmax in double precision, and what it stores there.

#include "attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "check.h"
#include "half.h"

extern "C" {
int quire_attend_qkv(const quire::QKVCall* qkv_call, const quire::WriteCall* write,
                       const quire::AttentionCall* call);
}

namespace check {
namespace {

struct Request {
  int queries, context;
};

struct Case {
  std::vector<Request> requests;
  int heads, kv_heads, head_dim, block_size, window;
  quire::Stored stored = quire::Stored::kFloat32;
};

constexpr quire::Stored kStored[] = {quire::Stored::kFloat32, quire::Stored::kFloat16};

// Keys or values in memory, in either type.
class Stored {
 public:
  Stored() = default;
  Stored(quire::Stored type, size_t count, float value) : type_(type) {
    if (type == quire::Stored::kFloat16)
      halves_.assign(count, quire::float_to_half(value));
    else
      floats_.assign(count, value);
  }
  void* data() {
    return type_ == quire::Stored::kFloat16 ? static_cast<void*>(halves_.data()) : floats_.data();
  }
  float operator[](size_t i) const {
    return type_ == quire::Stored::kFloat16 ? quire::half_to_float(halves_[i]) : floats_[i];
  }
  void set(size_t i, float value) {
    if (type_ == quire::Stored::kFloat16)
      halves_[i] = quire::float_to_half(value);
    else
      floats_[i] = value;
  }
  // How far a number may be from one that was stored: half of the last place.
  double error(double value) const {
    return type_ == quire::Stored::kFloat16 ? std::abs(value) / 2048 + 1e-7 : 0.0;
  }

 private:
  quire::Stored type_ = quire::Stored::kFloat32;
  Floats floats_;
  std::vector<uint16_t> halves_;
};

constexpr int kNoWindow = 1 << 30;

size_t size(int64_t count) { return static_cast<size_t>(count); }

// Blocks of all requests in one cache, in random order; what no request may see is NaN.
struct Cache {
  Stored keys, values;
  std::vector<int32_t> tables;
  int64_t table_stride = 1, token_stride, head_stride, block_stride;
  int block_size;

  Cache(const Case& c, Random& random)
      : token_stride(c.head_dim),
        head_stride(token_stride * c.block_size),
        block_stride(head_stride * c.kv_heads),
        block_size(c.block_size) {
    int total = 0;
    for (const Request& request : c.requests) {
      const int blocks = (request.context + block_size - 1) / block_size;
      table_stride = std::max<int64_t>(table_stride, blocks);
      total += blocks;
    }
    std::vector<int32_t> order(size(total));
    for (int i = 0; i < total; ++i) order[size(i)] = i;
    for (int i = total - 1; i > 0; --i) std::swap(order[size(i)], order[size(random.integer(0, i))]);
    keys = Stored(c.stored, size(total * block_stride), std::numeric_limits<float>::quiet_NaN());
    values = keys;
    tables.assign(c.requests.size() * size(table_stride), -1);
    for (size_t r = 0, next = 0; r < c.requests.size(); ++r) {
      for (int i = 0; i < c.requests[r].context; i += block_size)
        tables[r * size(table_stride) + size(i / block_size)] = order[next++];
      for (int head = 0; head < c.kv_heads; ++head)
        for (int i = 0; i < c.requests[r].context; ++i)
          for (int d = 0; d < c.head_dim; ++d) {
            keys.set(at(r, head, i) + size(d), random.normal());
            values.set(at(r, head, i) + size(d), random.normal());
          }
    }
  }

  size_t at(size_t request, int head, int position) const {
    const int64_t block = tables[request * size(table_stride) + size(position / block_size)];
    return size(block * block_stride + head * head_stride + position % block_size * token_stride);
  }
};

double dot(const float* a, const Stored& b, size_t first, int count) {
  double sum = 0;
  for (int i = 0; i < count; ++i) sum += static_cast<double>(a[i]) * b[first + size(i)];
  return sum;
}

// The result of one query and head; `sink` is a score without a value, or null.
std::vector<double> expected(const Case& c, const Cache& cache, const float* q, float scale,
                             size_t request, int kv_head, int position, const float* sink) {
  const int first = std::max(0, position - c.window + 1);
  std::vector<double> scores, out(size(c.head_dim), 0.0);
  for (int i = first; i <= position; ++i)
    scores.push_back(scale * dot(q, cache.keys, cache.at(request, kv_head, i), c.head_dim));
  const double largest = *std::max_element(scores.begin(), scores.end());
  double total = 0;
  for (int i = first; i <= position; ++i) {
    const double weight = std::exp(scores[size(i - first)] - largest);
    const size_t value = cache.at(request, kv_head, i);
    for (int d = 0; d < c.head_dim; ++d) out[size(d)] += weight * cache.values[value + size(d)];
    total += weight;
  }
  if (sink) total += std::exp(*sink - largest);
  for (double& element : out) element /= total;
  return out;
}

// New keys and values that are not in the cache yet, and what is to be done to them and to queries.
struct NewHeads {
  static constexpr float kEpsilon = 1e-5f;
  const Case& c;
  Floats k, v, cos, sin, q_norm, k_norm;
  std::vector<int64_t> slots, positions;

  NewHeads(const Case& c, const Cache& cache, Random& random) : c(c) {
    for (size_t r = 0; r < c.requests.size(); ++r)
      for (int i = 0; i < c.requests[r].queries; ++i) {
        const int position = c.requests[r].context - c.requests[r].queries + i;
        positions.push_back(position);
        const size_t block = cache.at(r, 0, position) / size(cache.block_stride);
        slots.push_back(static_cast<int64_t>(block) * c.block_size + position % c.block_size);
      }
    k = random.normals(positions.size() * size(c.kv_heads) * size(c.head_dim));
    v = random.normals(k.size());
    q_norm = random.normals(size(c.head_dim));
    k_norm = random.normals(size(c.head_dim));
    for (int i = 0; i < 512 * c.head_dim / 2; ++i) {
      const float angle = random.normal();
      cos.push_back(std::cos(angle));
      sin.push_back(std::sin(angle));
    }
  }

  std::vector<double> prepared(const float* x, const Floats& norm, size_t token) const {
    double squares = 0;
    for (int i = 0; i < c.head_dim; ++i) squares += double{x[i]} * x[i];
    const double scale = 1 / std::sqrt(squares / c.head_dim + kEpsilon);
    const int half = c.head_dim / 2;
    std::vector<double> out(size(c.head_dim));
    for (int i = 0; i < half; ++i) {
      const size_t at = size(positions[token] * half + i);
      const double a = x[i] * scale * norm[size(i)], b = x[i + half] * scale * norm[size(i + half)];
      out[size(i)] = a * cos[at] - b * sin[at];
      out[size(i + half)] = b * cos[at] + a * sin[at];
    }
    return out;
  }

  // Attends with `call`, whose queries are `q`, and checks what became of them and of the cache.
  void attend(quire::AttentionCall& call, Cache& cache, Floats& q) const {
    const int64_t stride = int64_t{c.kv_heads} * c.head_dim;
    const Floats raw = q;
    const quire::QKVCall qkv_call = {q.data(),        call.q_stride, cos.data(),    sin.data(),
                                    positions.data(), q_norm.data(), k_norm.data(), c.heads,
                                    c.head_dim, 0, kEpsilon};
    const quire::WriteCall write = {
        k.data(), v.data(), cache.keys.data(), cache.values.data(), slots.data(), stride, stride,
        cache.block_stride, cache.head_stride, cache.token_stride,
        static_cast<int64_t>(positions.size()), c.kv_heads, c.head_dim, c.block_size, num_threads,
        c.stored};
    equal("quire_attend_qkv", quire_attend_qkv(&qkv_call, &write, &call), 0);
    for (size_t token = 0; token < positions.size(); ++token) {
      for (int head = 0; head < c.heads; ++head) {
        const size_t at = token * size(call.q_stride) + size(head * c.head_dim);
        const auto wanted = prepared(&raw[at], q_norm, token);
        for (int d = 0; d < c.head_dim; ++d) near("a query", q[at + size(d)], wanted[size(d)], 1e-5);
      }
      for (int head = 0; head < c.kv_heads; ++head) {
        const size_t at = token * size(stride) + size(head * c.head_dim);
        const size_t to = size(slots[token] / c.block_size * cache.block_stride +
                               head * cache.head_stride +
                               slots[token] % c.block_size * cache.token_stride);
        const auto wanted = prepared(&k[at], k_norm, token);
        for (int d = 0; d < c.head_dim; ++d) {
          const double key = wanted[size(d)], value = v[at + size(d)];
          near("a key", cache.keys[to + size(d)], key, 1e-5 + cache.keys.error(key));
          near("a value", cache.values[to + size(d)], value, cache.values.error(value));
        }
      }
    }
  }
};

void run(const Case& c, Random& random, bool has_new_heads = false) {
  Cache cache(c, random);
  std::vector<int32_t> query_start = {0}, context_lens;
  for (const Request& request : c.requests) {
    query_start.push_back(query_start.back() + request.queries);
    context_lens.push_back(request.context);
  }
  const int64_t width = int64_t{c.heads} * c.head_dim;
  Floats q = random.normals(size(query_start.back() * width));
  Floats out(q.size(), std::numeric_limits<float>::quiet_NaN());
  const bool has_sinks = c.head_dim != 64;
  Floats sinks = random.normals(size(c.heads));
  for (float& sink : sinks) sink *= 5.0f;
  quire::AttentionCall call = {};
  call.q = q.data();
  call.keys = cache.keys.data();
  call.values = cache.values.data();
  call.out = out.data();
  call.query_start = query_start.data();
  call.context_lens = context_lens.data();
  call.block_tables = cache.tables.data();
  call.q_stride = call.out_stride = width;
  call.block_stride = cache.block_stride;
  call.head_stride = cache.head_stride;
  call.token_stride = cache.token_stride;
  call.table_stride = cache.table_stride;
  call.num_requests = static_cast<int32_t>(c.requests.size());
  call.num_heads = c.heads;
  call.num_kv_heads = c.kv_heads;
  call.head_dim = c.head_dim;
  call.block_size = c.block_size;
  call.window = c.window;
  call.scale = 1.0f / std::sqrt(static_cast<float>(c.head_dim));
  call.num_threads = num_threads;
  call.stored = c.stored;
  call.sinks = has_sinks ? sinks.data() : nullptr;
  if (has_new_heads) {
    NewHeads(c, cache, random).attend(call, cache, q);
  } else {
    const quire::QKVCall qkv_call = {};
    const quire::WriteCall write = {};  // of no tokens: all keys and values are there
    equal("quire_attend_qkv", quire_attend_qkv(&qkv_call, &write, &call), 0);
  }
  const int group = c.heads / c.kv_heads;
  for (size_t r = 0; r < c.requests.size(); ++r)
    for (int i = 0; i < c.requests[r].queries; ++i)
      for (int head = 0; head < c.heads; ++head) {
        const size_t row = size((query_start[r] + i) * width + int64_t{head} * c.head_dim);
        const int position = c.requests[r].context - c.requests[r].queries + i;
        const float* sink = has_sinks ? &sinks[size(head)] : nullptr;
        const auto wanted =
            expected(c, cache, &q[row], call.scale, r, head / group, position, sink);
        for (int d = 0; d < c.head_dim; ++d)
          near("an element", out[row + size(d)], wanted[size(d)], 3e-6);
      }
}

}  // namespace

void test_attention() {
  Random random(static_cast<uint32_t>(num_threads));
  for (const quire::Stored stored : kStored) {
    run({{{1, 1}, {1, 37}, {0, 5}, {1, 300}}, 9, 3, 64, 16, kNoWindow, stored}, random);
    run({{{7, 7}, {33, 60}, {1, 130}}, 4, 4, 18, 4, kNoWindow, stored}, random);
    run({{{70, 90}, {2, 150}}, 8, 2, 33, 32, 40, stored}, random);
    run({{{1, 9}, {12, 12}, {5, 70}}, 6, 1, 80, 8, 5, stored}, random);
    run({{{40, 64}}, 2, 1, 128, 64, 1, stored}, random);
  }
}

void test_attend_qkv() {
  Random random(static_cast<uint32_t>(num_threads));
  for (const quire::Stored stored : kStored) {
    run({{{1, 1}, {1, 37}, {0, 5}, {1, 300}}, 9, 3, 64, 16, kNoWindow, stored}, random, true);
    run({{{7, 7}, {33, 60}, {1, 130}}, 4, 4, 18, 4, kNoWindow, stored}, random, true);
    run({{{70, 90}, {2, 150}}, 8, 2, 80, 32, 40, stored}, random, true);
  }
}

}  // namespace check
