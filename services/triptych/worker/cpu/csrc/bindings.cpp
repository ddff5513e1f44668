// The C interface that kernels.py calls. No exception leaves it.
#include <chrono>
#include <atomic>
#include <exception>
#include <stdexcept>
#include <string>

#include "step.h"

namespace {

thread_local std::string last_error;

template <class Body>
int guarded(const Body& body) {
  try {
    body();
    return 0;
  } catch (const std::exception& error) {
    last_error = error.what();
    return 1;
  }
}

triptych::Decoder* decoder_of(void* handle) { return static_cast<triptych::Decoder*>(handle); }

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

const char* triptych_last_error() { return last_error.c_str(); }

int triptych_best_isa() { return static_cast<int>(triptych::best_isa()); }

// Returns null on failure; triptych_last_error() has the reason.
void* triptych_create(const triptych::DecoderShape* shape, int format, int isa, int threads) {
  void* handle = nullptr;
  guarded([&] {
    handle = new triptych::Decoder(*shape, static_cast<triptych::WeightFormat>(format),
                                   static_cast<triptych::Isa>(isa), threads);
  });
  return handle;
}

void triptych_destroy(void* handle) { delete decoder_of(handle); }

int triptych_add_layer(void* handle, const triptych::LayerTensors* tensors) {
  return guarded([&] { decoder_of(handle)->add_layer(*tensors); });
}

int triptych_set_head(void* handle, const float* final_norm, const float* head) {
  return guarded([&] { decoder_of(handle)->set_head(final_norm, head); });
}

int triptych_set_rotary(void* handle, const float* cosines, const float* sines) {
  return guarded([&] { decoder_of(handle)->set_rotary(cosines, sines); });
}

int triptych_add_cache(void* handle, void* const* keys, void* const* values, int blocks, int type) {
  return guarded(
      [&] { decoder_of(handle)->add_cache(keys, values, blocks, static_cast<triptych::CacheType>(type)); });
}

int triptych_set_basis(void* handle, const float* keys, const float* key_means, const float* values,
                       const float* value_means, int rank) {
  return guarded([&] { decoder_of(handle)->set_basis(keys, key_means, values, value_means, rank); });
}

size_t triptych_weight_bytes(void* handle) { return decoder_of(handle)->weight_bytes(); }

int triptych_isa(void* handle) { return static_cast<int>(decoder_of(handle)->kernels().isa); }

// Begins a step. Returns 0, or 1 with nothing begun.
int triptych_start_step(void* handle, const triptych::StepInput* input, const triptych::StepOutput* output) {
  return guarded([&] {
    if (!decoder_of(handle)->start(*input, *output)) throw std::invalid_argument("the step does not fit the decoder");
  });
}

// Returns when the step has ended; at once when none runs.
void triptych_await_step(void* handle) { decoder_of(handle)->wait(); }

// Seconds that `threads` threads take to read `bytes` at `data` once, in order: the limit of a decode step.
double triptych_read_seconds(const void* data, size_t bytes, int threads) {
  triptych::Pool pool(threads);
  std::atomic<uint64_t> sink{0};
  pool.run([&](triptych::Team& team) { team.for_each(threads, [](long) {}); });
  const auto begin = std::chrono::steady_clock::now();
  pool.run([&](triptych::Team& team) {
    constexpr size_t kPiece = size_t{1} << 20;
    team.for_each(static_cast<long>(bytes / kPiece), [&](long piece) {
      const auto* words = reinterpret_cast<const uint64_t*>(static_cast<const char*>(data) + piece * kPiece);
      uint64_t sums[32] = {};
      for (size_t i = 0; i < kPiece / 8; i += 32) {
        for (int line = 0; line < 4; ++line) __builtin_prefetch(words + i + 256 + 8 * line);
        for (int lane = 0; lane < 32; ++lane) sums[lane] += words[i + lane];
      }
      for (uint64_t sum : sums) sink.fetch_xor(sum, std::memory_order_relaxed);
    });
  });
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return seconds;
}

}  // extern "C"
#pragma GCC visibility pop
