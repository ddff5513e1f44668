// Weight matrices in the order in which the kernels read them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace triptych {

enum class WeightFormat { kF32 = 0, kBf16 = 1, kInt8 = 2 };

// Output columns of a panel.
constexpr int kPanel = 32;
// Inputs are padded with zeros to a multiple of this: one AMX tile row of bfloat16.
constexpr int kInputStep = 32;

constexpr size_t round_up(size_t n, size_t step) { return (n + step - 1) / step * step; }

// A matrix [outputs, inputs] as panels of 32 outputs; a panel is one contiguous piece, read from front to back.
//   kF32   [inputs][32]         float
//   kBf16  [inputs / 2][32][2]  bfloat16, the pairs that dpbf16 and AMX multiply at once
//   kInt8  [inputs][32]         int8, output o is worth scales[o] times its integer sum
// Outputs are padded to whole panels with zeros.
struct Panels {
  WeightFormat format;
  int outputs = 0;
  int inputs = 0;         // As in the model.
  int padded_inputs = 0;  // Multiple of kInputStep.
  int count = 0;
  size_t panel_bytes = 0;
  const std::byte* data = nullptr;
  const float* scales = nullptr;  // kInt8 only, [count * 32].

  const std::byte* panel(int index) const { return data + index * panel_bytes; }
};

// Memory for all weights of a decoder, in huge pages where the system has them. Freed as a whole.
class Arena {
 public:
  Arena() = default;
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // Returns zeroed memory aligned to 64 bytes; throws std::bad_alloc.
  std::byte* take(size_t bytes);

 private:
  struct Chunk {
    void* start;
    size_t bytes;
  };
  std::vector<Chunk> chunks_;
  size_t used_ = 0;
};

// Asks for huge pages under memory that others allocated, as far as it covers whole ones. Blocks of a paged cache lie
// anywhere: with small pages, finding them costs more than reading them.
void prefer_huge_pages(void* start, size_t bytes);

// Packs `weights` [outputs, inputs], row-major. With int8, each row is scaled so that its largest weight is 127.
Panels pack(const float* weights, int outputs, int inputs, WeightFormat format, Arena& arena);

// Packs `gate_up` [2 * intermediate, inputs], gate above up, so that each panel holds 16 gates and their 16 ups.
Panels pack_gate_up(const float* gate_up, int intermediate, int inputs, WeightFormat format, Arena& arena);

}  // namespace triptych
