// Memory of one step that is kept from step to step.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <new>

namespace triptych {

// Zeroed memory, aligned to 64 bytes, that only grows. Growing loses the content: it is zero again.
class Buffer {
 public:
  Buffer() = default;
  ~Buffer() { std::free(data_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  void reserve(size_t bytes) {
    if (bytes <= bytes_) return;
    std::free(data_);
    bytes_ = 0;
    const size_t rounded = (bytes + 63) / 64 * 64;
    data_ = static_cast<std::byte*>(std::aligned_alloc(64, rounded));
    if (!data_) throw std::bad_alloc();
    std::memset(data_, 0, rounded);
    bytes_ = bytes;
  }
  std::byte* data() const { return data_; }
  float* floats() const { return reinterpret_cast<float*>(data_); }

 private:
  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace triptych
