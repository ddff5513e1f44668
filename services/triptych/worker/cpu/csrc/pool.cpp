#include "pool.h"

#include <stdexcept>
#include <utility>

namespace triptych {
namespace {

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

bool Pool::take(uint64_t phase, int owner, long items, long& item) {
  const long begin = share_begin(items, owner), end = share_begin(items, owner + 1);
  std::atomic<uint64_t>& word = shares_[owner].taken;
  for (uint64_t seen = word.load(std::memory_order_relaxed);;) {
    const uint64_t of = seen >> kCountBits;
    const long taken = of == phase ? static_cast<long>(seen & kCountMask) : 0;
    if (of > phase || begin + taken >= end) return false;
    if (word.compare_exchange_weak(seen, phase << kCountBits | (taken + 1), std::memory_order_relaxed)) {
      item = begin + taken;
      return true;
    }
  }
}

void Pool::count_done(uint64_t phase, long items) {
  for (uint64_t seen = done_.load(std::memory_order_relaxed);;) {
    const long done = seen >> kCountBits == phase ? static_cast<long>(seen & kCountMask) : 0;
    if (!done_.compare_exchange_weak(seen, phase << kCountBits | (done + 1), std::memory_order_acq_rel)) continue;
    if (done + 1 < items) return;
    over_.store(phase);
    if (waiting_for_bell_.load()) {
      bell_.fetch_add(1);
      bell_.notify_all();
    }
    return;
  }
}

void Pool::sleep_until_over(uint64_t phase) {
  waiting_for_bell_.fetch_add(1);
  for (unsigned heard; heard = bell_.load(), over_.load() < phase;) bell_.wait(heard);
  waiting_for_bell_.fetch_sub(1);
}

Pool::Pool(int threads) : threads_(threads), shares_(new Share[threads]) {
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
  first_phase_ = over_.load();
  working_.store(threads_);
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
    Team team(*this, index, first_phase_);
    job_(team);
    if (working_.fetch_sub(1) == 1) working_.notify_all();
  }
}

}  // namespace triptych
