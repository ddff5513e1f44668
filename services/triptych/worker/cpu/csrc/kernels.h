// What a step is made of, once per instruction set. All pointers are to rows of a step's buffers.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu.h"
#include "panels.h"

namespace triptych {

enum class CacheType { kF32 = 0, kBf16 = 1, kFp16 = 2 };

// Positions of one block of the KV cache.
constexpr int kBlockTokens = 16;
// Most query rows (tokens times heads of a group) of one prefill tile.
constexpr int kQueryRows = 96;
// Keys that a prefill tile looks at together.
constexpr int kKeyTokens = 64;
// Most keys of one decode part.
constexpr int kMaxPartTokens = 256;
// Most principal components of a key or value.
constexpr int kMaxRank = 256;
// Rows that buffers have in excess, because AMX reads and writes sixteen at a time.
constexpr int kSpareRows = 32;

// Most rows whose sums are kept apart until a whole panel is done.
constexpr int kSummedRows = 32;

// What is done with a product's rows.
enum class Finish {
  kStore,   // out = product + bias
  kAdd,     // out += product
  kSwiGlu,  // activations = silu(gate) * up
};

// activations [rows, padded_inputs] times a matrix. Activations are float, or bfloat16 if Kernels::narrow_activations.
struct Product {
  const Panels* weights;
  const void* x;
  size_t ldx;  // Elements from row to row.
  int rows;
  Finish finish;
  float* out;  // kStore, kAdd: [rows, outputs].
  size_t ld_out;
  const float* bias;  // kStore only; may be null.
  void* activations;  // kSwiGlu only: [rows, intermediate].
  size_t ld_activations;
};

// One layer's cache and the heads that read it.
struct AttentionShape {
  int heads;
  int kv_heads;
  int head_dim;  // Multiple of 16, at most 256.
  CacheType cache_type;
  void* keys;  // [blocks, 16, kv_heads, head_dim]
  void* values;
};

// Positions of one sequence, which has `context` of them in its table. `first` is a multiple of 16.
struct KeyRange {
  const int32_t* table;
  int first;
  int count;
  int context;
  const float* bias;  // Added to the score of each key, from position 0 on, up to a multiple of 16; or null.
};

// Rows of heads, each `rank` coefficients of basis vectors around a mean (principal components).
struct Basis {
  const float* vectors;  // [kv_heads, rank, head_dim]
  const float* mean;     // [kv_heads, head_dim]
  int rank;
};

// What a decode part leaves: for each head the sum of exp(score - largest) * value, then largest, then the sum of exp.
constexpr size_t partial_floats(int heads, int head_dim) { return size_t(heads) * (head_dim + kBlockTokens); }

struct Kernels {
  Isa isa;
  bool narrow_activations;

  // Bytes of scratch that `multiply` needs for a matrix with so many padded inputs, and that prefill needs.
  size_t (*multiply_scratch)(int padded_inputs);
  size_t (*prefill_scratch)(int head_dim);
  // Rows of a product that one work item takes when there are many.
  int (*row_block)(int padded_inputs);

  // Called on each thread before its first and after its last kernel of a step.
  void (*enter)();
  void (*leave)();

  // Rows [first, first + rows) of one panel of a product.
  void (*multiply)(const Product& product, int first, int rows, int panel, void* scratch);
  // The same in two parts, for all of at most kSummedRows rows: sums [kSummedRows, 32], and what is done with them.
  void (*sum)(const Product& product, int panel, void* scratch, float* sums);
  void (*finish_sums)(const Product& product, int panel, const float* sums);
  // RMSNorm of one row of n floats, written as activations.
  void (*norm)(const float* x, const float* weight, float epsilon, int n, void* activations);
  // Turns heads [heads, head_dim] in place by cosines and sines [head_dim / 2] and multiplies by scale.
  void (*rotate)(float* x, int heads, int head_dim, const float* cosines, const float* sines, float scale);
  // Writes one token's keys or values [kv_heads * head_dim] into the cache.
  void (*write_cache)(const float* from, int n, CacheType type, void* to);
  // All heads of one query over at most kMaxPartTokens keys. queries are scaled.
  void (*decode_part)(const AttentionShape& shape, const float* queries, const KeyRange& range, float* partial);
  // Keys or values of `count` tokens from the coefficients [tokens, kv_heads, rank] that blocks hold, 16 * head_dim / rank
  // tokens a block; written as floats [count, kv_heads, head_dim].
  void (*expand)(const AttentionShape& shape, const void* coefficients, const Basis& basis, const KeyRange& range,
                 float* to);
  // Joins the parts of one query and writes [heads * head_dim] activations.
  void (*join_parts)(const float* partials, int parts, int heads, int head_dim, void* activations);
  // One KV head's group over `tokens` queries at positions from `position` on, tokens * group <= kQueryRows.
  // queries: the first token's first query head of the group.
  void (*prefill_tile)(const AttentionShape& shape, int kv_head, const float* queries, size_t ld_queries, int tokens,
                       int position, const int32_t* table, void* activations, size_t ld_activations, void* scratch);
  // Index of the first largest element.
  int (*argmax)(const float* x, int n);
  // Whether all elements are finite.
  bool (*is_finite)(const float* x, int n);
};

// The kernels for an instruction set, or for the best one below it that this build has.
const Kernels& kernels_for(Isa isa);

}  // namespace triptych
