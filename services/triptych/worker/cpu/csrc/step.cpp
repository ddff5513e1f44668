#include "step.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <stdexcept>

#include "buffers.h"

namespace triptych {
namespace {

// Up to this many rows, every thread normalises all of them for itself: cheaper than waiting for each other.
constexpr int kPrivateRows = 4;

int divide_up(int a, int b) { return (a + b - 1) / b; }

}  // namespace

struct Decoder::Buffers {
  Buffer hidden;      // float [rows, hidden], the residual stream
  Buffer normed;      // activations [rows, padded hidden]
  Buffer qkv;         // float [rows, (heads + 2 * kv_heads) * head_dim]
  Buffer attended;    // activations [rows, padded heads * head_dim]
  Buffer gated;       // activations [rows, padded intermediate]
  Buffer partials;    // float, decode parts
  Buffer logits;      // float [logit rows, vocabulary], when the caller wants none
  Buffer scratch;     // per thread
  Buffer own_normed;  // per thread: activations [kPrivateRows + spare, padded hidden]
  size_t scratch_stride = 0;
  std::vector<std::atomic<int>> parts_done;  // Per sequence; zero between steps.
};

Decoder::Decoder(const DecoderShape& shape, WeightFormat format, Isa isa, int threads)
    : shape_(shape),
      format_(format),
      kernels_(kernels_for(format == WeightFormat::kF32 ? std::min(isa, Isa::kAvx512) : isa)),
      buffers_(std::make_unique<Buffers>()),
      pool_(threads) {}

Decoder::~Decoder() = default;

void Decoder::add_layer(const LayerTensors& tensors) {
  const DecoderShape& s = shape_;
  const int queries = s.heads * s.head_dim, all = queries + 2 * s.kv_heads * s.head_dim;
  Layer layer;
  layer.attention_norm.assign(tensors.attention_norm, tensors.attention_norm + s.hidden);
  layer.mlp_norm.assign(tensors.mlp_norm, tensors.mlp_norm + s.hidden);
  if (tensors.qkv_bias) layer.qkv_bias.assign(tensors.qkv_bias, tensors.qkv_bias + all);
  layer.qkv = pack(tensors.qkv, all, s.hidden, format_, arena_);
  layer.output = pack(tensors.output, s.hidden, queries, format_, arena_);
  layer.gate_up = pack_gate_up(tensors.gate_up, s.intermediate, s.hidden, format_, arena_);
  layer.down = pack(tensors.down, s.hidden, s.intermediate, format_, arena_);
  for (const Panels* panels : {&layer.qkv, &layer.output, &layer.gate_up, &layer.down})
    weight_bytes_ += panels->panel_bytes * panels->count;
  layers_.push_back(std::move(layer));
}

void Decoder::set_head(const float* final_norm, const float* head) {
  final_norm_.assign(final_norm, final_norm + shape_.hidden);
  head_ = pack(head, shape_.vocabulary, shape_.hidden, format_, arena_);
  weight_bytes_ += head_.panel_bytes * head_.count;
}

void Decoder::set_rotary(const float* cosines, const float* sines) {
  const size_t n = size_t(shape_.positions) * (shape_.head_dim / 2);
  cosines_.assign(cosines, cosines + n);
  sines_.assign(sines, sines + n);
}

void Decoder::add_cache(void* const* keys, void* const* values, int blocks, CacheType type) {
  const size_t element = type == CacheType::kF32 ? 4 : 2;
  const size_t bytes = element * blocks * kBlockTokens * shape_.kv_heads * shape_.head_dim;
  for (int layer = 0; layer < shape_.layers; ++layer) {
    prefer_huge_pages(keys[layer], bytes);
    prefer_huge_pages(values[layer], bytes);
  }
  caches_.push_back({{keys, keys + shape_.layers}, {values, values + shape_.layers}, blocks});
  cache_type_ = type;
}

void Decoder::set_basis(const float* keys, const float* key_means, const float* values, const float* value_means,
                        int rank) {
  if (rank < 1 || rank > kMaxRank || kBlockTokens * shape_.head_dim % rank)
    throw std::invalid_argument("a rank must divide 16 * head_dim and be at most 256");
  const size_t means = size_t(shape_.layers) * shape_.kv_heads * shape_.head_dim, vectors = means * rank;
  low_rank_ = {{keys, keys + vectors},
               {key_means, key_means + means},
               {values, values + vectors},
               {value_means, value_means + means},
               rank};
}

// One running step; every thread calls `run`.
class Decoder::Step {
 public:
  Step(Decoder& decoder, const StepInput& input, const StepOutput& output);
  void run(Team& team);

 private:
  using Buffers = Decoder::Buffers;

  void* activations(const Buffer& buffer, size_t row, size_t ld) const { return buffer.data() + row * ld * element_; }
  std::byte* scratch(Team& team) const { return b_.scratch.data() + team.index() * b_.scratch_stride; }

  const void* normalise(Team& team, const float* weight, int rows);
  void multiply(Team& team, const Product& product) const;
  void rotate_and_write(Team& team, int layer) const;
  void attend(Team& team, int layer, const AttentionPlan& plan) const;
  AttentionShape cache_at(int cache, int layer) const;
  void attend_part(Team& team, int layer, const AttentionPlan& plan, const AttentionItem& item) const;
  void keep_part(Team& team, const AttentionPlan& plan, const AttentionItem& item) const;
  void attend_segment(Team& team, int layer, const float* queries, const AttentionItem& item, float* partial) const;
  void keep_wanted_rows() const;
  void finish(Team& team);

  Decoder& d_;
  Buffers& b_;
  const Kernels& k_;
  const DecoderShape& s_;
  const StepInput input_;
  const StepOutput output_;
  const size_t element_;  // Bytes of an activation.
  const int queries_, keys_, qkv_;
  const size_t ld_hidden_, ld_attended_, ld_gated_;
  const size_t part_bytes_;
};

Decoder::Step::Step(Decoder& decoder, const StepInput& input, const StepOutput& output)
    : d_(decoder),
      b_(*decoder.buffers_),
      k_(decoder.kernels_),
      s_(decoder.shape_),
      input_(input),
      output_(output),
      element_(k_.narrow_activations ? 2 : 4),
      queries_(s_.heads * s_.head_dim),
      keys_(s_.kv_heads * s_.head_dim),
      qkv_(queries_ + 2 * keys_),
      ld_hidden_(round_up(s_.hidden, kInputStep)),
      ld_attended_(round_up(queries_, kInputStep)),
      ld_gated_(round_up(s_.intermediate, kInputStep)),
      part_bytes_(round_up(sizeof(float) * partial_floats(s_.heads, s_.head_dim), 64)) {
  const size_t rows = input.tokens, spare = rows + kSpareRows;
  b_.hidden.reserve(4 * rows * s_.hidden);
  b_.normed.reserve(element_ * spare * ld_hidden_);
  b_.qkv.reserve(4 * rows * qkv_);
  b_.attended.reserve(element_ * spare * ld_attended_);
  b_.gated.reserve(element_ * spare * ld_gated_);
  const int partials = std::max(d_.plan_.partials, d_.last_plan_.partials);
  b_.partials.reserve(4 * partials * partial_floats(s_.heads, s_.head_dim));
  if (!output.logits && output.greedy) b_.logits.reserve(4 * d_.logit_rows_.size() * s_.vocabulary);
  const size_t widest = std::max({ld_hidden_, ld_attended_, ld_gated_});
  const size_t expanded = part_bytes_ + (d_.low_rank_.rank ? sizeof(float) * 2 * kMaxPartTokens * keys_ : 0);
  b_.scratch_stride = round_up(std::max({k_.multiply_scratch(static_cast<int>(widest)),
                                         k_.prefill_scratch(s_.head_dim), expanded}) + 64, 4096);
  b_.scratch.reserve(b_.scratch_stride * d_.pool_.threads());
  b_.own_normed.reserve(element_ * d_.pool_.threads() * (kPrivateRows + kSpareRows) * ld_hidden_);
  if (b_.parts_done.size() < d_.plan_.rows.size())
    b_.parts_done = std::vector<std::atomic<int>>(2 * d_.plan_.rows.size());
}

void Decoder::Step::run(Team& team) {
  k_.enter();
  float* hidden = b_.hidden.floats();
  team.for_each(input_.tokens, [&](long row) {
    std::memcpy(hidden + row * s_.hidden, input_.embedded + row * s_.hidden, sizeof(float) * s_.hidden);
  });
  for (int index = 0; index < s_.layers; ++index) {
    const Layer& layer = d_.layers_[index];
    const bool last = index + 1 == s_.layers;
    const AttentionPlan& plan = last ? d_.last_plan_ : d_.plan_;
    const int rows = plan.out_rows;
    const void* normed = normalise(team, layer.attention_norm.data(), input_.tokens);
    const float* bias = layer.qkv_bias.empty() ? nullptr : layer.qkv_bias.data();
    multiply(team, {&layer.qkv, normed, ld_hidden_, input_.tokens, Finish::kStore, b_.qkv.floats(), size_t(qkv_), bias,
                    nullptr, 0});
    rotate_and_write(team, index);
    attend(team, index, plan);
    if (last && rows < input_.tokens) team.for_each(1, [&](long) { keep_wanted_rows(); });
    multiply(team, {&layer.output, b_.attended.data(), ld_attended_, rows, Finish::kAdd, hidden, size_t(s_.hidden),
                    nullptr, nullptr, 0});
    normed = normalise(team, layer.mlp_norm.data(), rows);
    multiply(team, {&layer.gate_up, normed, ld_hidden_, rows, Finish::kSwiGlu, nullptr, 0, nullptr, b_.gated.data(),
                    ld_gated_});
    multiply(team, {&layer.down, b_.gated.data(), ld_gated_, rows, Finish::kAdd, hidden, size_t(s_.hidden), nullptr,
                    nullptr, 0});
  }
  finish(team);
  k_.leave();
}

// Returns activations [rows, padded hidden] of the residual stream's RMSNorm. A thread that comes late may read rows
// that are being overwritten; nobody uses what it makes of them.
const void* Decoder::Step::normalise(Team& team, const float* weight, int rows) {
  const float* hidden = b_.hidden.floats();
  if (rows <= kPrivateRows) {
    const size_t own = size_t(team.index()) * (kPrivateRows + kSpareRows);
    for (int row = 0; row < rows; ++row)
      k_.norm(hidden + row * s_.hidden, weight, s_.epsilon, s_.hidden,
              activations(b_.own_normed, own + row, ld_hidden_));
    return activations(b_.own_normed, own, ld_hidden_);
  }
  team.for_each(rows, [&](long row) {
    k_.norm(hidden + row * s_.hidden, weight, s_.epsilon, s_.hidden, activations(b_.normed, row, ld_hidden_));
  });
  return b_.normed.data();
}

void Decoder::Step::multiply(Team& team, const Product& product) const {
  const int panels = product.weights->count;
  if (product.rows <= kSummedRows) {
    alignas(64) float sums[kSummedRows * kPanel];
    return team.for_each(
        panels, [&](long panel) { k_.sum(product, static_cast<int>(panel), scratch(team), sums); },
        [&](long panel) { k_.finish_sums(product, static_cast<int>(panel), sums); });
  }
  const int blocks = divide_up(product.rows, k_.row_block(product.weights->padded_inputs));
  // Blocks of rows are the outer loop: a block stays in the cache while panels stream by.
  team.for_each(long(blocks) * panels, [&](long item) {
    const int block = static_cast<int>(item / panels);
    const int first = static_cast<int>(long(product.rows) * block / blocks);
    const int end = static_cast<int>(long(product.rows) * (block + 1) / blocks);
    k_.multiply(product, first, end - first, static_cast<int>(item % panels), scratch(team));
  });
}

void Decoder::Step::rotate_and_write(Team& team, int layer) const {
  const int half = s_.head_dim / 2;
  const float scale = 1.0f / __builtin_sqrtf(static_cast<float>(s_.head_dim));
  const size_t bytes = d_.cache_type_ == CacheType::kF32 ? 4 : 2;
  const Cache& cache = d_.caches_[0];
  team.for_each(input_.tokens, [&](long row) {
    float* queries = b_.qkv.floats() + row * qkv_;
    float* keys = queries + queries_;
    const float* cosines = d_.cosines_.data() + size_t(d_.angles_[row]) * half;
    const float* sines = d_.sines_.data() + size_t(d_.angles_[row]) * half;
    k_.rotate(queries, s_.heads, s_.head_dim, cosines, sines, scale);
    k_.rotate(keys, s_.kv_heads, s_.head_dim, cosines, sines, 1.0f);
    const size_t offset = bytes * keys_ * d_.slots_[row];
    k_.write_cache(keys, keys_, d_.cache_type_, static_cast<std::byte*>(cache.keys[layer]) + offset);
    k_.write_cache(keys + keys_, keys_, d_.cache_type_, static_cast<std::byte*>(cache.values[layer]) + offset);
  });
}

void Decoder::Step::attend(Team& team, int layer, const AttentionPlan& plan) const {
  const AttentionShape shape = cache_at(0, layer);
  const int group = s_.heads / s_.kv_heads;
  const auto compute = [&](long i) {
    if (plan.items[i].parts) attend_part(team, layer, plan, plan.items[i]);
  };
  team.for_each(long(plan.items.size()), compute, [&](long i) {
    const AttentionItem& item = plan.items[i];
    if (item.parts) return keep_part(team, plan, item);
    const Rows& rows = plan.rows[item.rows];
    const float* queries =
        b_.qkv.floats() + size_t(rows.first + item.first) * qkv_ + item.kv_head * group * s_.head_dim;
    k_.prefill_tile(shape, item.kv_head, queries, qkv_, item.count, rows.position + item.first, rows.table,
                    activations(b_.attended, rows.out + item.first, ld_attended_), ld_attended_, scratch(team));
  });
}

AttentionShape Decoder::Step::cache_at(int cache, int layer) const {
  const Cache& c = d_.caches_[cache];
  return {s_.heads, s_.kv_heads, s_.head_dim, d_.cache_type_, c.keys[layer], c.values[layer]};
}

// Leaves the part at the start of the thread's scratch.
void Decoder::Step::attend_part(Team& team, int layer, const AttentionPlan& plan, const AttentionItem& item) const {
  const Rows& rows = plan.rows[item.rows];
  const float* queries = b_.qkv.floats() + size_t(rows.first) * qkv_;
  auto* partial = reinterpret_cast<float*>(scratch(team));
  if (item.segment) {
    attend_segment(team, layer, queries, item, partial);
  } else {
    k_.decode_part(cache_at(0, layer), queries, {rows.table, item.first, item.count, rows.position + 1, nullptr},
                   partial);
  }
}

// Puts the part in its place; whoever brings a row's last one joins them.
void Decoder::Step::keep_part(Team& team, const AttentionPlan& plan, const AttentionItem& item) const {
  const Rows& rows = plan.rows[item.rows];
  const size_t stride = partial_floats(s_.heads, s_.head_dim);
  float* partials = b_.partials.floats() + item.first_part * stride;
  std::memcpy(partials + item.part * stride, scratch(team), sizeof(float) * stride);
  std::atomic<int>& done = b_.parts_done[item.rows];
  if (item.parts > 1 && done.fetch_add(1, std::memory_order_acq_rel) + 1 < item.parts) return;
  done.store(0, std::memory_order_relaxed);
  k_.join_parts(partials, item.parts, s_.heads, s_.head_dim, activations(b_.attended, rows.out, ld_attended_));
}

void Decoder::Step::attend_segment(Team& team, int layer, const float* queries, const AttentionItem& item,
                                   float* partial) const {
  const Segment& segment = *item.segment;
  AttentionShape shape = cache_at(segment.cache, layer);
  const KeyRange range{input_.tables + segment.table, item.first, item.count, segment.tokens,
                       segment.bias ? segment.bias + layer * round_up(segment.tokens, kBlockTokens) : nullptr};
  if (!segment.origins) return k_.decode_part(shape, queries, range, partial);
  const LowRank& low_rank = d_.low_rank_;
  const size_t means = size_t(layer) * keys_, vectors = means * low_rank.rank;
  float* keys = reinterpret_cast<float*>(scratch(team) + part_bytes_);
  float* values = keys + size_t(kMaxPartTokens) * keys_;
  k_.expand(shape, shape.keys, {&low_rank.keys[vectors], &low_rank.key_means[means], low_rank.rank}, range, keys);
  k_.expand(shape, shape.values, {&low_rank.values[vectors], &low_rank.value_means[means], low_rank.rank}, range,
            values);
  const int half = s_.head_dim / 2;
  for (int t = 0; t < item.count; ++t) {
    const size_t angle = size_t(segment.origins[item.first + t]) * half;
    k_.rotate(keys + size_t(t) * keys_, s_.kv_heads, s_.head_dim, d_.cosines_.data() + angle, d_.sines_.data() + angle,
              1.0f);
  }
  static constexpr int32_t kInOrder[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  static_assert(sizeof(kInOrder) == sizeof(int32_t) * kMaxPartTokens / kBlockTokens);
  shape.cache_type = CacheType::kF32;
  shape.keys = keys;
  shape.values = values;
  k_.decode_part(shape, queries, {kInOrder, 0, item.count, item.count, nullptr}, partial);
}

// Moves the rows of the residual stream that the last layer continues with to the front.
void Decoder::Step::keep_wanted_rows() const {
  float* hidden = b_.hidden.floats();
  for (const Rows& rows : d_.last_plan_.rows)
    std::memmove(hidden + size_t(rows.out) * s_.hidden, hidden + size_t(rows.first) * s_.hidden,
                 sizeof(float) * rows.count * s_.hidden);
}

void Decoder::Step::finish(Team& team) {
  const float* hidden = b_.hidden.floats();
  const auto& sequences = d_.last_plan_.rows;
  const int rows = static_cast<int>(d_.logit_rows_.size());
  team.for_each(rows + long(sequences.size()), [&](long i) {
    if (i < rows) {
      k_.norm(hidden + size_t(d_.logit_rows_[i]) * s_.hidden, d_.final_norm_.data(), s_.epsilon, s_.hidden,
              activations(b_.normed, i, ld_hidden_));
    } else {
      const Rows& sequence = sequences[i - rows];
      const size_t row = sequence.out + sequence.count - 1;
      output_.finite[i - rows] = k_.is_finite(hidden + row * s_.hidden, s_.hidden);
    }
  });
  float* logits = output_.logits ? output_.logits : b_.logits.floats();
  if (!rows || !logits) return;
  multiply(team, {&d_.head_, b_.normed.data(), ld_hidden_, rows, Finish::kStore, logits, size_t(s_.vocabulary),
                  nullptr, nullptr, 0});
  if (output_.greedy)
    team.for_each(rows, [&](long i) { output_.greedy[i] = k_.argmax(logits + i * s_.vocabulary, s_.vocabulary); });
}

bool Decoder::start(const StepInput& input, const StepOutput& output) {
  pool_.wait();
  if (!accepts(input)) return false;
  plan(input);
  auto step = std::make_shared<Step>(*this, input, output);
  pool_.start([step](Team& team) { step->run(team); });
  return true;
}

}  // namespace triptych
