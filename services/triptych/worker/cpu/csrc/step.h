// A whole step of a Llama-family decoder: all layers, without coming up for air.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "kernels.h"
#include "panels.h"
#include "pool.h"

namespace triptych {

// Layout shared with kernels.py.
struct DecoderShape {
  int32_t layers;
  int32_t hidden;
  int32_t intermediate;
  int32_t heads;
  int32_t kv_heads;
  int32_t head_dim;
  int32_t vocabulary;
  int32_t positions;  // Rows of the rotary tables.
  float epsilon;
};

// Trailing positions of one sequence. Layout shared with kernels.py.
struct SequenceRows {
  int32_t rows;     // Positions to compute, > 0.
  int32_t context;  // Positions up to the last one of them, cached ones included.
  int32_t logits;   // For how many of the last rows logits are wanted, 0 to rows.
  int32_t table;    // Where its block table begins in StepInput::tables; covers `context`.
};

// Keys that a sequence's only row attends to beside those of its block table, all of them before it. Layout shared with
// library.py. With origins the blocks hold principal components, else keys and values as the step's own cache does.
struct Segment {
  int32_t sequence;        // Whose; segments are in the order of the sequences.
  int32_t cache;           // 0: the step's own; 1: the second one.
  int32_t tokens;          // > 0.
  int32_t table;           // Where its blocks begin in StepInput::tables.
  const int32_t* origins;  // [tokens]: rows of the rotary tables by which expanded keys turn; or null.
  const float* bias;       // [layers, tokens rounded up to 16], added to scores; or null.
};

struct StepInput {
  const float* embedded;  // [tokens, hidden]: rows of all sequences in a row.
  int32_t tokens;
  const SequenceRows* sequences;
  int32_t sequence_count;
  const int32_t* tables;
  const int32_t* positions;  // [tokens], for the rotary embedding; null: the places in the sequences.
  const Segment* segments;
  int32_t segment_count;
};

struct StepOutput {
  float* logits;     // [sum of logits, vocabulary], or null.
  int32_t* greedy;   // [sum of logits]: first largest logit, or null.
  uint8_t* finite;   // [sequences]: whether the last row's hidden state is.
};

// Layer weights as the caller has them: float, [outputs, inputs].
struct LayerTensors {
  const float* attention_norm;
  const float* qkv;
  const float* qkv_bias;  // May be null.
  const float* output;
  const float* mlp_norm;
  const float* gate_up;
  const float* down;
};

class Decoder {
 public:
  Decoder(const DecoderShape& shape, WeightFormat format, Isa isa, int threads);
  ~Decoder();

  // Everything is copied. Layers in order.
  void add_layer(const LayerTensors& tensors);
  void set_head(const float* final_norm, const float* head);
  void set_rotary(const float* cosines, const float* sines);  // [positions, head_dim / 2]
  // Adds a cache, which is not copied; layers' tensors [blocks, 16, kv_heads, head_dim]. Steps write into the first; all
  // have its type.
  void add_cache(void* const* keys, void* const* values, int blocks, CacheType type);
  // Principal components of keys before their rotation, and of values: vectors [layers, kv_heads, rank, head_dim] and
  // means [layers, kv_heads, head_dim]. rank divides 16 * head_dim and is at most head_dim.
  void set_basis(const float* keys, const float* key_means, const float* values, const float* value_means, int rank);

  // Begins a step, after the one before has ended; what `input` and `output` point at must live until `wait` returns.
  // Returns false, having changed nothing, if the input does not fit the decoder.
  bool start(const StepInput& input, const StepOutput& output);
  // Returns when the step has ended.
  void wait() { pool_.wait(); }

  const Kernels& kernels() const { return kernels_; }
  size_t weight_bytes() const { return weight_bytes_; }  // What one step reads at least, the head included.

 private:
  struct Layer {
    std::vector<float> attention_norm, mlp_norm, qkv_bias;
    Panels qkv, output, gate_up, down;
  };
  struct Cache {
    std::vector<void*> keys, values;
    int blocks;
  };
  struct LowRank {
    std::vector<float> keys, key_means, values, value_means;
    int rank = 0;
  };
  // Rows of one sequence whose attention is computed.
  struct Rows {
    int first;     // Row of the first query.
    int out;       // Row of its result.
    int count;
    int position;  // Place of the first in its sequence.
    const int32_t* table;
    const Segment* segments;
    int segment_count;
  };
  // Work for one thread: a tile of queries of one KV head, or, when `parts` is not 0, a part of the keys of one query.
  struct AttentionItem {
    int rows;  // Index of the Rows.
    int kv_head, first, count;
    int part, parts, first_part;
    const Segment* segment;  // Whose keys; null: those of the block table.
  };
  struct AttentionPlan {
    std::vector<Rows> rows;
    std::vector<AttentionItem> items;
    int partials = 0;
    int out_rows = 0;
  };
  struct Buffers;
  class Step;

  bool accepts(const StepInput& input) const;
  bool accepts(const Segment& segment, const StepInput& input) const;
  void plan(const StepInput& input);
  void plan_items(AttentionPlan& plan) const;

  const DecoderShape shape_;
  const WeightFormat format_;
  const Kernels& kernels_;
  Arena arena_;
  size_t weight_bytes_ = 0;
  std::vector<Layer> layers_;
  std::vector<float> final_norm_, cosines_, sines_;
  Panels head_;
  std::vector<Cache> caches_;
  CacheType cache_type_ = CacheType::kF32;
  LowRank low_rank_;

  std::unique_ptr<Buffers> buffers_;  // Grown as needed and kept.
  AttentionPlan plan_;                // Of all layers but the last,
  AttentionPlan last_plan_;           // which computes only rows that somebody wants.
  std::vector<int> slots_;            // Per row: block * 16 + offset.
  std::vector<int> angles_;           // Per row: row of the rotary tables.
  std::vector<int> logit_rows_;       // Among the last plan's results.
  Pool pool_;
};

}  // namespace triptych
