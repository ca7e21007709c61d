// Linear layers from packed weights for the instruction set this file is compiled for.
#pragma once

#include "activations.h"

namespace quire {
namespace {

constexpr int kVectors = kRows / kLanes;  // of rows in a group
// How far ahead of their use weights are asked for where all tokens fit one tile, in bytes.
constexpr size_t kAhead = 1024;
constexpr int kTilesAtOnce = 8;

constexpr int bits_of(Kind kind) {
  if (kind == Kind::kQ8_0 || kind == Kind::kGrouped8) return 8;
  return kind == Kind::kQ6_K || kind == Kind::kGroupedE2M1 ? 6 : 4;
}

// The numbers of quad q of a block, for the rows of one vector.
template <Kind K>
QUIRE_INLINE Bytes load_quad(const uint8_t* numbers, int q) {
  if constexpr (bits_of(K) == 8) return load_bytes(numbers + q * kLine);
  const Bytes line = load_bytes(numbers + q % 4 * kLine);
  const Bytes low = q < 4 ? line & 15 : line >> 4;
  if constexpr (K == Kind::kGroupedE2M1) return look_up(kE2M1, low);
  if constexpr (K != Kind::kQ6_K) return low;
  const Bytes high = load_bytes(numbers + (4 + q / 4) * kLine) >> (q % 4 * 2);
  return low | (high & 3) << 4;
}

// Of a block, for the rows of one vector.
struct Scales {
  Floats scales[2];  // of its parts
  Floats minima;
};

// `scales` are those of the block, or of the blocks in which this one is number `inner`.
template <Kind K>
QUIRE_INLINE Scales load_scales(const uint8_t* scales, int inner, bool has_zeros, int vector) {
  const int row = vector * kLanes;
  Scales result = {};
  if constexpr (is_grouped(K)) {
    result.scales[0] = load(reinterpret_cast<const float*>(scales) + row);
    if (has_zeros) result.minima = -result.scales[0] * load_signed(scales + 4 * kRows + row);
    return result;
  }
  result.scales[0] = load_halves(scales + 2 * row);
  if constexpr (K == Kind::kQ4_1) result.minima = load_halves(scales + kHalves + 2 * row);
  if constexpr (K == Kind::kQ4_K) {
    const uint8_t* factors = scales + 2 * kHalves + inner * 2 * kRows + row;
    result.scales[0] *= load_unsigned(factors);
    result.minima = -load_halves(scales + kHalves + 2 * row) * load_unsigned(factors + kRows);
  }
  if constexpr (K == Kind::kQ6_K) {
    const uint8_t* factors = scales + kHalves + inner * 2 * kRows + row;
    result.scales[1] = result.scales[0] * load_signed(factors + kRows);
    result.scales[0] *= load_signed(factors);
  }
  return result;
}

// Adds the products of a block with the T tokens of a tile.
template <Kind K, int PLANES, int T>
QUIRE_INLINE void add_block(const uint8_t* numbers, const uint8_t* scales, int inner,
                            bool has_zeros, const uint8_t* x, Floats (&sums)[kVectors][T]) {
  constexpr Layout kLayout = layout_of(K);
  constexpr int kPartQuads = kQuads / kLayout.parts;
  // The table that numbers are looked up in would take registers from the sums of many tokens.
  constexpr bool kIsWidened = K == Kind::kGroupedE2M1 && T > 2;
  uint8_t wide[kIsWidened ? kQuads * kLine : 1];
  const uint8_t* widened = wide;
  if constexpr (kIsWidened) {
    for (int q = 0; q < kQuads; ++q)
      for (int at = 0; at < kLine; at += 4 * kLanes)
        store_bytes(wide + q * kLine + at, load_quad<K>(numbers + at, q));
    QUIRE_KEEP_STORES(widened);
  }
  for (int first = 0; first < kVectors; first += kTogether) {
    QUIRE_KEEP_POINTER(x);
    const uint8_t* x_scales = x + PLANES * kBlock * T;
    const uint8_t* corrections = x_scales + 4 * T;
    Scales factors[kTogether];
    QUIRE_UNROLL
    for (int v = 0; v < kTogether; ++v)
      factors[v] = load_scales<K>(scales, inner, has_zeros, first + v);
    QUIRE_UNROLL
    for (int part = 0; part < kLayout.parts; ++part) {
      Ints products[kTogether][T];
      const auto weights = [&](int v, int q) __attribute__((always_inline)) {
        const int at = (first + v) * 4 * kLanes;
        if constexpr (kIsWidened) return load_bytes(widened + q * kLine + at);
        return load_quad<K>(numbers + at, part * kPartQuads + q);
      };
      const uint8_t* inputs = x + part * kPartQuads * 4 * T;
      const uint8_t* start = kLayout.offset ? corrections + 4 * part * T : nullptr;
      if constexpr (PLANES == 1) {
        dot<bits_of(K), kPartQuads, 0>(weights, inputs, start, products);
      } else {
        dot<bits_of(K), kPartQuads, 0>(weights, inputs, nullptr, products);
        dot<bits_of(K), kPartQuads, kLowBits>(weights, inputs + kBlock * T, start, products);
      }
      QUIRE_UNROLL
      for (int t = 0; t < T; ++t)
        QUIRE_UNROLL
        for (int v = 0; v < kTogether; ++v)
          sums[first + v][t] =
              fma(to_floats(products[v][t]),
                  factors[v].scales[part] * load_float(x_scales + 4 * t), sums[first + v][t]);
    }
    if constexpr (kLayout.has_minima)
      if (!is_grouped(K) || has_zeros) {
        const uint8_t* totals = corrections + (kLayout.offset ? 4 * T : 0);
        QUIRE_UNROLL
        for (int t = 0; t < T; ++t)
          QUIRE_UNROLL
          for (int v = 0; v < kTogether; ++v)
            sums[first + v][t] =
                fma(factors[v].minima, splat(load_float(totals + 4 * t)), sums[first + v][t]);
      }
  }
}

inline void store_rows(const LinearCall& call, int64_t row, const Floats* values, float* out) {
  const int64_t left = call.matrix.num_outputs - row;
  if (left >= kRows) {
    for (int v = 0; v < kVectors; ++v) {
      const Floats bias = call.bias ? load(call.bias + row + v * kLanes) : Floats{};
      store(out + row + v * kLanes, values[v] + bias);
    }
    return;
  }
  for (int64_t i = 0; i < left; ++i)
    out[row + i] = values[i / kLanes][i % kLanes] + (call.bias ? call.bias[row + i] : 0.0f);
}

// One group of rows times one tile of T tokens. Weights that lie `ahead` of those in use are asked
// for, if it is not 0.
template <Kind K, int PLANES, int T>
void multiply_tile(const LinearCall& call, int64_t group, int64_t first_token, size_t ahead) {
  constexpr Layout kLayout = layout_of(K);
  const Layout layout = layout_of(K, call.matrix);
  const bool has_zeros = call.matrix.has_zeros;
  const int num_blocks = call.matrix.num_blocks();
  const uint8_t* numbers =
      call.matrix.data + static_cast<size_t>(group) * layout.group_bytes(num_blocks);
  const uint8_t* scales = numbers + layout.scales_at(num_blocks);
  constexpr int kBytes = activation_bytes(K, PLANES);
  const uint8_t* x = call.activations + first_token * num_blocks * kBytes;
  Floats sums[kVectors][T] = {};
  for (int block = 0, inner = 0; block < num_blocks; ++block) {
    if (ahead) {
      QUIRE_UNROLL
      for (int i = 0; i < kLayout.number_bytes; i += 64)
        __builtin_prefetch(numbers + ahead + i);
    }
    add_block<K, PLANES, T>(numbers, scales, inner, has_zeros, x, sums);
    numbers += kLayout.number_bytes;
    x += T * kBytes;
    if (++inner == layout.scale_blocks) {
      inner = 0;
      scales += layout.scale_bytes;
    }
  }
  for (int t = 0; t < T; ++t) {
    Floats values[kVectors];
    for (int v = 0; v < kVectors; ++v) values[v] = sums[v][t];
    store_rows(call, group * kRows, values, call.out + (first_token + t) * call.out_stride);
  }
}

// Calls the kernel that was compiled for the number of tokens.
template <Kind K, int PLANES, int T = kTile>
void multiply_tokens(const LinearCall& call, int64_t group, int64_t first, size_t ahead) {
  if constexpr (T > 1)
    if (call.num_tokens - first < T)
      return multiply_tokens<K, PLANES, T - 1>(call, group, first, ahead);
  multiply_tile<K, PLANES, T>(call, group, first, ahead);
}

template <Kind K, int PLANES>
void multiply_groups(const LinearCall& call, int64_t first_group, int64_t end_group,
                     int64_t first_tile, int64_t end_tile) {
  const size_t group_bytes = layout_of(K, call.matrix).group_bytes(call.matrix.num_blocks());
  // A group's weights stay in the cache while some tokens go by; not all at once, because their
  // outputs lie on a page each.
  for (int64_t start = first_tile; start < end_tile; start += kTilesAtOnce) {
    const int64_t end = start + kTilesAtOnce < end_tile ? start + kTilesAtOnce : end_tile;
    for (int64_t group = first_group; group < end_group; ++group) {
      // Weights come from memory while earlier ones are worked with: those of the next group if there
      // is more than one tile to do it in.
      size_t ahead = kAhead;
      if (end - start > 1)
        ahead = group + 1 < end_group ? group_bytes : 0;
      for (int64_t tile = start; tile < end; ++tile)
        multiply_tokens<K, PLANES>(call, group, tile * kTile, tile == first_tile ? ahead : 0);
    }
  }
}

template <Kind K>
struct KindConstant {
  static constexpr Kind value = K;
};

// Calls `work` with the kind of the weights as a constant.
template <typename Work>
void with_kind(Kind kind, Work work) {
  switch (kind) {
    case Kind::kQ8_0: return work(KindConstant<Kind::kQ8_0>());
    case Kind::kQ4_0: return work(KindConstant<Kind::kQ4_0>());
    case Kind::kQ4_1: return work(KindConstant<Kind::kQ4_1>());
    case Kind::kQ4_K: return work(KindConstant<Kind::kQ4_K>());
    case Kind::kQ6_K: return work(KindConstant<Kind::kQ6_K>());
    case Kind::kGrouped8: return work(KindConstant<Kind::kGrouped8>());
    case Kind::kGrouped4: return work(KindConstant<Kind::kGrouped4>());
    case Kind::kGroupedE2M1: return work(KindConstant<Kind::kGroupedE2M1>());
  }
}

void round_inputs(const LinearCall& call, int64_t first_tile, int64_t end_tile) {
  with_kind(call.matrix.kind, [&](auto kind) {
    if (call.matrix.input_planes == 1)
      round_tiles<kind.value, 1>(call, first_tile, end_tile);
    else
      round_tiles<kind.value, 2>(call, first_tile, end_tile);
  });
}

void multiply(const LinearCall& call, int64_t first_group, int64_t end_group, int64_t first_tile,
              int64_t end_tile) {
  with_kind(call.matrix.kind, [&](auto kind) {
    if (call.matrix.input_planes == 1)
      multiply_groups<kind.value, 1>(call, first_group, end_group, first_tile, end_tile);
    else
      multiply_groups<kind.value, 2>(call, first_group, end_group, first_tile, end_tile);
  });
}

constexpr LinearKernel kLinear = {kTile, round_inputs, multiply};

}  // namespace
}  // namespace quire
