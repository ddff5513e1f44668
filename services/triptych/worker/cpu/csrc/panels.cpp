#include "panels.h"

#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <new>

namespace triptych {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kChunkBytes = size_t{32} << 20;

uint16_t to_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if (x != x) return 0x7fc0;
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// row(output) points to that output's weights, or is null for padding.
Panels pack_rows(const std::function<const float*(int)>& row, int padded_outputs, int inputs, WeightFormat format,
                 Arena& arena) {
  Panels panels;
  panels.format = format;
  panels.inputs = inputs;
  panels.padded_inputs = static_cast<int>(round_up(inputs, kInputStep));
  panels.count = padded_outputs / kPanel;
  const size_t element = format == WeightFormat::kF32 ? 4 : format == WeightFormat::kBf16 ? 2 : 1;
  panels.panel_bytes = element * kPanel * panels.padded_inputs;
  std::byte* data = arena.take(panels.panel_bytes * panels.count);
  float* scales = format == WeightFormat::kInt8 ? reinterpret_cast<float*>(arena.take(4 * padded_outputs)) : nullptr;
  for (int output = 0; output < padded_outputs; ++output) {
    const float* from = row(output);
    if (!from) continue;
    std::byte* panel = data + output / kPanel * panels.panel_bytes;
    const int column = output % kPanel;
    if (format == WeightFormat::kF32) {
      auto* to = reinterpret_cast<float*>(panel);
      for (int k = 0; k < inputs; ++k) to[k * kPanel + column] = from[k];
    } else if (format == WeightFormat::kBf16) {
      auto* to = reinterpret_cast<uint16_t*>(panel);
      for (int k = 0; k < inputs; ++k) to[(k / 2 * kPanel + column) * 2 + k % 2] = to_bf16(from[k]);
    } else {
      float largest = 0;
      for (int k = 0; k < inputs; ++k) largest = std::max(largest, std::fabs(from[k]));
      scales[output] = largest / 127;
      const float inverse = largest > 0 ? 127 / largest : 0;
      auto* to = reinterpret_cast<int8_t*>(panel);
      for (int k = 0; k < inputs; ++k) to[k * kPanel + column] = static_cast<int8_t>(std::lrint(from[k] * inverse));
    }
  }
  panels.data = data;
  panels.scales = scales;
  return panels;
}

}  // namespace

Arena::~Arena() {
  for (const Chunk& chunk : chunks_) munmap(chunk.start, chunk.bytes);
}

std::byte* Arena::take(size_t bytes) {
  bytes = round_up(bytes, 64);
  if (chunks_.empty() || used_ + bytes > chunks_.back().bytes) {
    const size_t size = round_up(std::max(bytes, kChunkBytes), kHugePage);
    // Maps one huge page more than needed and gives back what is not aligned.
    auto* start = static_cast<std::byte*>(
        mmap(nullptr, size + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    if (start == MAP_FAILED) throw std::bad_alloc();
    const size_t skipped = (kHugePage - reinterpret_cast<uintptr_t>(start) % kHugePage) % kHugePage;
    if (skipped) munmap(start, skipped);
    if (skipped < kHugePage) munmap(start + skipped + size, kHugePage - skipped);
#if defined(MADV_HUGEPAGE)
    madvise(start + skipped, size, MADV_HUGEPAGE);
#endif
    chunks_.push_back({start + skipped, size});
    used_ = 0;
  }
  std::byte* taken = static_cast<std::byte*>(chunks_.back().start) + used_;
  used_ += bytes;
  return taken;
}

void prefer_huge_pages(void* start, size_t bytes) {
#if defined(MADV_HUGEPAGE)
  const uintptr_t begin = round_up(reinterpret_cast<uintptr_t>(start), kHugePage);
  const uintptr_t end = (reinterpret_cast<uintptr_t>(start) + bytes) / kHugePage * kHugePage;
  if (begin >= end) return;
  constexpr int kCollapse = 25;  // MADV_COLLAPSE, Linux 6.1: now, for pages that are in use already.
  madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
  madvise(reinterpret_cast<void*>(begin), end - begin, kCollapse);
#endif
}

Panels pack(const float* weights, int outputs, int inputs, WeightFormat format, Arena& arena) {
  const auto row = [&](int output) { return output < outputs ? weights + size_t(output) * inputs : nullptr; };
  Panels panels = pack_rows(row, static_cast<int>(round_up(outputs, kPanel)), inputs, format, arena);
  panels.outputs = outputs;
  return panels;
}

Panels pack_gate_up(const float* gate_up, int intermediate, int inputs, WeightFormat format, Arena& arena) {
  constexpr int kHalf = kPanel / 2;
  const auto row = [&](int output) -> const float* {
    const int unit = output / kPanel * kHalf + output % kHalf;
    if (unit >= intermediate) return nullptr;
    const bool is_up = output % kPanel >= kHalf;
    return gate_up + (size_t(is_up) * intermediate + unit) * inputs;
  };
  Panels panels = pack_rows(row, static_cast<int>(2 * round_up(intermediate, kHalf)), inputs, format, arena);
  panels.outputs = 2 * intermediate;
  return panels;
}

}  // namespace triptych
