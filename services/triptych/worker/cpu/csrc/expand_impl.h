// From principal components back to keys and values, a few tokens at a time.
#pragma once

#include "kernels.h"
#include "vec.h"

namespace triptych {
namespace TRIPTYCH_ISA {

template <class T>
static void widen_row(const T* from, int n, float* to) {
  int i = 0;
  for (; i + 16 <= n; i += 16) store(to + i, load16(from + i));
  if (i < n) {
    T rest[16] = {};
    __builtin_memcpy(rest, from + i, sizeof(T) * (n - i));
    store(to + i, load16(rest));
  }
}

// Elements [first, first + n) of a row of coefficients as floats; up to 15 more are written.
static void widen_row(CacheType type, const void* from, size_t first, int n, float* to) {
  if (type == CacheType::kF32) widen_row(static_cast<const float*>(from) + first, n, to);
  if (type == CacheType::kBf16) widen_row(static_cast<const Bf16*>(from) + first, n, to);
  if (type == CacheType::kFp16) widen_row(static_cast<const Fp16*>(from) + first, n, to);
}

// kTokens rows of one head: mean + coefficients * vectors.
template <int V, int kTokens>
static void expand_rows(const float (*coefficients)[kMaxRank], const float* vectors, const float* mean, int rank,
                        float* to, size_t ld) {
  F16 a[kTokens][V];
#pragma GCC unroll 16
  for (int t = 0; t < kTokens; ++t)
#pragma GCC unroll 16
    for (int i = 0; i < V; ++i) a[t][i] = load<F16>(mean + 16 * i);
  for (int j = 0; j < rank; ++j) {
    const float* vector = vectors + size_t(j) * 16 * V;
#pragma GCC unroll 16
    for (int i = 0; i < V; ++i) {
      const F16 part = load<F16>(vector + 16 * i);
#pragma GCC unroll 16
      for (int t = 0; t < kTokens; ++t) a[t][i] += splat(coefficients[t][j]) * part;
    }
  }
#pragma GCC unroll 16
  for (int t = 0; t < kTokens; ++t)
#pragma GCC unroll 16
    for (int i = 0; i < V; ++i) store(to + t * ld + 16 * i, a[t][i]);
}

template <int V>
static void expand_of(const AttentionShape& shape, const void* coefficients, const Basis& basis, const KeyRange& range,
                      float* to) {
  constexpr int kTokens = V <= 4 ? 4 : V <= 8 ? 2 : 1;  // As many accumulators as fit into registers.
  const int head_dim = 16 * V, rank = basis.rank, per_block = kBlockTokens * head_dim / rank;
  const size_t row = size_t(shape.kv_heads) * rank, ld = size_t(shape.kv_heads) * head_dim;
  alignas(64) float some[kTokens][kMaxRank];
  for (int first = 0; first < range.count; first += kTokens) {
    const int tokens = range.count - first < kTokens ? range.count - first : kTokens;
    for (int kv_head = 0; kv_head < shape.kv_heads; ++kv_head) {
      for (int t = 0; t < tokens; ++t) {
        const int token = range.first + first + t;
        const size_t place = size_t(range.table[token / per_block]) * per_block + token % per_block;
        widen_row(shape.cache_type, coefficients, place * row + size_t(kv_head) * rank, rank, some[t]);
      }
      const float* vectors = basis.vectors + size_t(kv_head) * rank * head_dim;
      const float* mean = basis.mean + size_t(kv_head) * head_dim;
      float* out = to + first * ld + size_t(kv_head) * head_dim;
      if (tokens == kTokens) {
        expand_rows<V, kTokens>(some, vectors, mean, rank, out, ld);
      } else {
        for (int t = 0; t < tokens; ++t) expand_rows<V, 1>(some + t, vectors, mean, rank, out + t * ld, ld);
      }
    }
  }
}

static void expand(const AttentionShape& shape, const void* coefficients, const Basis& basis, const KeyRange& range,
                   float* to) {
  with_vectors(shape.head_dim, [&]<int V>() { expand_of<V>(shape, coefficients, basis, range, to); });
}

}  // namespace TRIPTYCH_ISA
}  // namespace triptych
