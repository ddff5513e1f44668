// What a step has to do: which rows attend to what, cut into pieces of work.
#include <algorithm>

#include "step.h"

namespace triptych {
namespace {

// Contexts up to this long are split finely, so that one sequence keeps all threads busy. The split depends on the
// context alone: a sequence's result does not depend on the batch around it.
constexpr int kShortContext = 1024;
constexpr int kShortPart = 64;
static_assert(kShortPart <= kMaxPartTokens);

int part_tokens(int context) { return context <= kShortContext ? kShortPart : kMaxPartTokens; }

int divide_up(int a, int b) { return (a + b - 1) / b; }

}  // namespace

bool Decoder::accepts(const StepInput& input) const {
  if (int(layers_.size()) != shape_.layers || !head_.data || cosines_.empty() || caches_.empty()) return false;
  long tokens = 0;
  for (int s = 0; s < input.sequence_count; ++s) {
    const SequenceRows& q = input.sequences[s];
    if (q.rows <= 0 || q.rows > q.context || q.logits < 0 || q.logits > q.rows) return false;
    if (!input.positions && q.context > shape_.positions) return false;
    for (int b = 0; b < divide_up(q.context, kBlockTokens); ++b) {
      const int32_t block = input.tables[q.table + b];
      if (block < 0 || block >= caches_[0].blocks) return false;
    }
    tokens += q.rows;
  }
  int before = 0;
  for (int i = 0; i < input.segment_count; ++i) {
    const Segment& segment = input.segments[i];
    if (segment.sequence < before || segment.sequence >= input.sequence_count || !accepts(segment, input)) return false;
    before = segment.sequence;
  }
  if (input.positions)
    for (int row = 0; row < input.tokens; ++row)
      if (input.positions[row] < 0 || input.positions[row] >= shape_.positions) return false;
  return tokens == input.tokens && tokens > 0 && tokens <= Pool::kMostItems;
}

bool Decoder::accepts(const Segment& segment, const StepInput& input) const {
  if (segment.cache < 0 || segment.cache >= int(caches_.size()) || segment.tokens <= 0) return false;
  if (input.sequences[segment.sequence].rows != 1) return false;
  int per_block = kBlockTokens;
  if (segment.origins) {
    if (!low_rank_.rank) return false;
    per_block = kBlockTokens * shape_.head_dim / low_rank_.rank;
    for (int t = 0; t < segment.tokens; ++t)
      if (segment.origins[t] < 0 || segment.origins[t] >= shape_.positions) return false;
  }
  for (int b = 0; b < divide_up(segment.tokens, per_block); ++b) {
    const int32_t block = input.tables[segment.table + b];
    if (block < 0 || block >= caches_[segment.cache].blocks) return false;
  }
  return true;
}

void Decoder::plan(const StepInput& input) {
  plan_.rows.clear();
  last_plan_.rows.clear();
  slots_.clear();
  angles_.clear();
  logit_rows_.clear();
  int first = 0, out = 0, segment = 0;
  for (int s = 0; s < input.sequence_count; ++s) {
    const SequenceRows& q = input.sequences[s];
    const int32_t* table = input.tables + q.table;
    const int start = q.context - q.rows;
    for (int position = start; position < q.context; ++position) {
      slots_.push_back(table[position / kBlockTokens] * kBlockTokens + position % kBlockTokens);
      angles_.push_back(input.positions ? input.positions[first + position - start] : position);
    }
    // The last row is always wanted: it tells whether the sequence's numbers are finite.
    const int wanted = std::max(1, q.logits), skipped = q.rows - wanted;
    const Segment* segments = input.segments + segment;
    const int before = segment;
    while (segment < input.segment_count && input.segments[segment].sequence == s) ++segment;
    plan_.rows.push_back({first, first, q.rows, start, table, segments, segment - before});
    last_plan_.rows.push_back({first + skipped, out, wanted, start + skipped, table, segments, segment - before});
    for (int i = wanted - q.logits; i < wanted; ++i) logit_rows_.push_back(out + i);
    first += q.rows;
    out += wanted;
  }
  plan_.out_rows = first;
  last_plan_.out_rows = out;
  plan_items(plan_);
  plan_items(last_plan_);
}

void Decoder::plan_items(AttentionPlan& plan) const {
  plan.items.clear();
  plan.partials = 0;
  const int tile = std::max(1, kQueryRows / (shape_.heads / shape_.kv_heads));
  for (int r = 0; r < int(plan.rows.size()); ++r) {
    const Rows& rows = plan.rows[r];
    if (rows.count == 1) {
      const size_t begin = plan.items.size();
      const auto add = [&](int tokens, const Segment* segment) {
        const int size = part_tokens(tokens);
        for (int first = 0; first < tokens; first += size)
          plan.items.push_back({r, 0, first, std::min(size, tokens - first), 0, 0, plan.partials, segment});
      };
      add(rows.position + 1, nullptr);
      for (int s = 0; s < rows.segment_count; ++s) add(rows.segments[s].tokens, rows.segments + s);
      const int parts = static_cast<int>(plan.items.size() - begin);
      for (int part = 0; part < parts; ++part) {
        plan.items[begin + part].part = part;
        plan.items[begin + part].parts = parts;
      }
      plan.partials += parts;
      continue;
    }
    for (int first = 0; first < rows.count; first += tile)
      for (int kv_head = 0; kv_head < shape_.kv_heads; ++kv_head)
        plan.items.push_back({r, kv_head, first, std::min(tile, rows.count - first), 0, 0, 0, nullptr});
  }
}

}  // namespace triptych
