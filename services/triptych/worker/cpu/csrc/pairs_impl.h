// Decode attention over a bfloat16 cache with products of bfloat16 pairs: half of the instructions, as nothing is widened.
// Queries and weights are rounded to bfloat16, as in prefill.
#pragma once

#include "bf16_impl.h"
#include "cache_view.h"
#include "kernels.h"

namespace triptych {
namespace TRIPTYCH_ISA {

// scores[h][token - first] = queries[h] . key, -inf after the last; whole blocks.
template <int V>
static void score_part(const CacheView<Bf16>& keys, const float* queries, int group, int first, int count, int context,
                       float (*scores)[kMaxPartTokens], Pairs<V>) {
  constexpr int kHeadsAtOnce = 4, kVectors = V / 2;
  for (int h0 = 0; h0 < group; h0 += kHeadsAtOnce) {
    const int heads = group - h0 < kHeadsAtOnce ? group - h0 : kHeadsAtOnce;
    alignas(64) Bf16 narrowed[kHeadsAtOnce][16 * V];
    for (int h = 0; h < heads; ++h)
      for (int i = 0; i < 16 * V; i += 16) store16(narrowed[h] + i, load<F16>(queries + (h0 + h) * 16 * V + i));
    for (int done = 0; done < count; done += kBlockTokens) {
      F16 sums[kHeadsAtOnce][kBlockTokens];
      const Bf16* block = keys.block(first + done);
      const Bf16* ahead = keys.ahead(first + done, context);
      const int valid = count - done < kBlockTokens ? count - done : kBlockTokens;
      for (int t = 0; t < kBlockTokens; ++t) {
        if (t >= valid) {
          for (int h = 0; h < heads; ++h) sums[h][t] = F16{};
          continue;
        }
        if (h0 == 0) fetch_row<V>(ahead + t * keys.row);
        U16 key[kVectors];
#pragma GCC unroll 16
        for (int i = 0; i < kVectors; ++i) key[i] = load<U16>(block + t * keys.row + 32 * i);
        for (int h = 0; h < heads; ++h) {
          F16 a{};
#pragma GCC unroll 16
          for (int i = 0; i < kVectors; ++i) a = add_products(a, load<U16>(narrowed[h] + 32 * i), key[i]);
          sums[h][t] = a;
        }
      }
      for (int h = 0; h < heads; ++h) store(scores[h0 + h] + done, masked(sum_each(sums[h]), valid));
    }
  }
}

// out[h] = sum of weights[h][token] * value, for G heads.
template <int V, int G>
static void weigh_part(const CacheView<Bf16>& values, const float (*weights)[kMaxPartTokens], int first, int count,
                       int context, bool fetches, float* out, Pairs<V>) {
  // Two rows are interleaved within 128-bit lanes, so sums come in an order of their own: of every 32 elements, the
  // lower halves of eight in one vector, the upper halves in the next.
  F16 a[G][V];
#pragma GCC unroll 16
  for (int h = 0; h < G; ++h)
#pragma GCC unroll 16
    for (int i = 0; i < V; ++i) a[h][i] = F16{};
  for (int done = 0; done < count; done += kBlockTokens) {
    const Bf16* row = values.block(first + done);
    const Bf16* ahead = values.ahead(first + done, context);
    const int valid = count - done < kBlockTokens ? count - done : kBlockTokens;
    alignas(32) uint32_t pairs[G][kBlockTokens / 2];
#pragma GCC unroll 16
    for (int h = 0; h < G; ++h) store16(reinterpret_cast<Bf16*>(pairs[h]), load<F16>(weights[h] + done));
    for (int t = 0; t < valid; t += 2, row += 2 * values.row, ahead += 2 * values.row) {
      const Bf16* next = t + 1 < valid ? row + values.row : row;  // A weight after the last is zero.
      if (fetches) {
        fetch_row<V>(ahead);
        fetch_row<V>(ahead + values.row);
      }
#pragma GCC unroll 16
      for (int i = 0; i < V; i += 2) {
        const auto even = load<__m512i>(row + 16 * i), odd = load<__m512i>(next + 16 * i);
        const U16 low = (U16)_mm512_unpacklo_epi16(even, odd), high = (U16)_mm512_unpackhi_epi16(even, odd);
#pragma GCC unroll 16
        for (int h = 0; h < G; ++h) {
          const U16 pair = U16{} + pairs[h][t / 2];
          a[h][i] = add_products(a[h][i], low, pair);
          a[h][i + 1] = add_products(a[h][i + 1], high, pair);
        }
      }
    }
  }
#pragma GCC unroll 16
  for (int h = 0; h < G; ++h)
#pragma GCC unroll 16
    for (int i = 0; i < V; i += 2) {
      const F16 low = a[h][i], high = a[h][i + 1];
      store(out + (h * V + i) * 16,
            __builtin_shufflevector(low, high, 0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23));
      store(out + (h * V + i + 1) * 16,
            __builtin_shufflevector(low, high, 8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31));
    }
}

}  // namespace TRIPTYCH_ISA
}  // namespace triptych
