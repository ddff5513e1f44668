#include "pool.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace triptych {
namespace {

// A pause takes 10 to 50 ns: this is 20 to 100 us.
constexpr int kSpins = 2000;

void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("isb");
#endif
}

// Waits until `value` is no longer `old`. Whoever changes it wakes it if `sleepers` is not zero.
void wait_for_change(std::atomic<unsigned>& value, unsigned old, std::atomic<int>& sleepers) {
  for (int spin = 0; spin < kSpins; ++spin) {
    if (value.load(std::memory_order_acquire) != old) return;
    relax();
  }
  sleepers.fetch_add(1);
  while (value.load() == old) value.wait(old);
  sleepers.fetch_sub(1);
}

}  // namespace

void Barrier::wait() {
  const unsigned round = round_.load(std::memory_order_relaxed);
  if (missing_.fetch_sub(1, std::memory_order_acq_rel) == 1) {
    missing_.store(threads_, std::memory_order_relaxed);
    round_.store(round + 1);
    if (sleepers_.load()) round_.notify_all();
  } else {
    wait_for_change(round_, round, sleepers_);
  }
}

Pool::Pool(int threads) : threads_(threads), barrier_(threads), counters_(new Counter[2 * threads]) {
  for (int index = 0; index < threads; ++index) workers_.emplace_back([this, index] { serve(index); });
}

Pool::~Pool() {
  stopping_.store(true);
  posted_.fetch_add(1);
  posted_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void Pool::start(std::function<void(Team&)> job) {
  job_ = std::move(job);
  working_.store(threads_);
  for (int i = 0; i < 2 * threads_; ++i) counters_[i].taken.store(0, std::memory_order_relaxed);
  posted_.fetch_add(1);
  if (sleepers_.load()) posted_.notify_all();
}

void Pool::wait() {
  for (int working; (working = working_.load()) != 0;) working_.wait(working);
}

void Pool::serve(int index) {
  for (unsigned seen = 0;; ++seen) {
    wait_for_change(posted_, seen, sleepers_);
    if (stopping_.load()) return;
    Team team(*this, index);
    job_(team);
    if (working_.fetch_sub(1) == 1) working_.notify_all();
  }
}

}  // namespace triptych
