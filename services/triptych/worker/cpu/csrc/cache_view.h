// Where one KV head's rows lie in the paged cache.
#pragma once

#include "kernels.h"
#include "vec.h"

namespace triptych {
namespace TRIPTYCH_ISA {

// How far ahead blocks are fetched: hardware prefetchers stop at each 4 KiB page, and blocks lie anywhere.
constexpr int kBlocksAhead = 2;

// Rows of one KV head in one layer's keys or values.
template <class T>
struct CacheView {
  const T* base;  // Block 0, token 0, this head.
  size_t row;     // Elements from token to token.
  const int32_t* table;

  TRIPTYCH_INLINE CacheView make(const AttentionShape& s, const void* cache, int kv_head, const int32_t* table) {
    const size_t head_dim = s.head_dim;
    return {static_cast<const T*>(cache) + kv_head * head_dim, s.kv_heads * head_dim, table};
  }
  // The sixteen tokens of the block that holds `token`.
  inline __attribute__((always_inline)) const T* block(int token) const {
    return base + static_cast<size_t>(table[token / kBlockTokens]) * kBlockTokens * row;
  }
  // The block to fetch while that one is read: a later one, or the last of `context` tokens.
  inline __attribute__((always_inline)) const T* ahead(int token, int context) const {
    const int later = token + kBlocksAhead * kBlockTokens;
    return block(later < context ? later : context - 1);
  }
};

// Fetches one row into the level-2 cache.
template <int V, class T>
TRIPTYCH_INLINE void fetch_row(const T* row) {
  constexpr int kLine = 64 / sizeof(T);
#pragma GCC unroll 16
  for (int i = 0; i < 16 * V; i += kLine) __builtin_prefetch(row + i, 0, 2);
}

// Scores of sixteen tokens, -inf after the first `valid`.
TRIPTYCH_INLINE F16 masked(F16 scores, int valid) {
  if (valid >= kBlockTokens) return scores;
  const I16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return lane < valid ? scores : splat(-__builtin_inff());
}

}  // namespace TRIPTYCH_ISA
}  // namespace triptych
