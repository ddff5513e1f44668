// A fixed team of threads that runs one job at a time, phase by phase, while its caller does something else.
//
// A phase is a number of items, and ends when all are done; the next one begins for whoever is there. A thread that
// the system holds up (on a machine with two cores, whatever else wants one) delays nobody, if what it had in hand is
// work that may be done twice: another thread does it, and the first of both to end keeps its result. The late one
// finds its phases over, and joins in where the others are.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

namespace triptych {

class Pool;

// One thread's view of a running job. Every thread of the team must make the same calls.
class Team {
 public:
  Team(Pool& pool, int index, uint64_t phase) : pool_(pool), index_(index), phase_(phase) {}
  int index() const { return index_; }

  // Calls work(item) for every item in [0, items) once, over all threads, then waits until all are done. Each thread
  // has a contiguous share, which keeps its memory stream in order; one that finishes early helps the others.
  template <class Work>
  void for_each(long items, const Work& work);

  // The same for work in two parts: compute(item), which writes nothing that another thread sees and may be called
  // twice for an item, the second time with inputs that are being overwritten; then keep(item), once, on the same
  // thread.
  template <class Compute, class Keep>
  void for_each(long items, const Compute& compute, const Keep& keep);

 private:
  template <class Compute, class Keep>
  bool redo(const Compute& compute, const Keep& keep, long items);

  Pool& pool_;
  const int index_;
  uint64_t phase_;  // The last one this thread was in.
};

class Pool {
 public:
  explicit Pool(int threads);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  // Most items of a phase.
  static constexpr long kMostItems = (1 << 20) - 1;

  int threads() const { return threads_; }

  // Begins job(team) on every thread; the caller is none of them. One job and one caller at a time.
  void start(std::function<void(Team&)> job);
  // Returns when all threads are done with the job; at once when there is none.
  void wait();
  void run(std::function<void(Team&)> job) {
    start(std::move(job));
    wait();
  }

 private:
  friend class Team;

  // A count that belongs to a phase, in one word. One of an earlier phase stands for zero. Phases never come again:
  // their 44 bits last for years.
  static constexpr int kCountBits = 20;
  static constexpr uint64_t kCountMask = (uint64_t{1} << kCountBits) - 1;

  // What a thread has in hand: a phase's item, and whether somebody has claimed its result. A phase's upper bits are
  // cut off; only equality counts.
  static uint64_t in_hand(uint64_t phase, long item) { return phase << (kCountBits + 1) | uint64_t(item) << 1; }
  static constexpr uint64_t kClaimed = 1;

  struct alignas(64) Share {
    std::atomic<uint64_t> taken{0};
    std::atomic<uint64_t> hand{kClaimed};
  };

  long share_begin(long items, int thread) const { return items * thread / threads_; }
  // Takes the next item of a thread's share, if the phase is not over and one is left.
  bool take(uint64_t phase, int owner, long items, long& item);
  void count_done(uint64_t phase, long items);
  bool is_over(uint64_t phase) const { return over_.load(std::memory_order_acquire) >= phase; }
  // Waits until the phase is over. From time to time help() is called; it returns whether it did something.
  template <class Help>
  void await(uint64_t phase, const Help& help);
  void sleep_until_over(uint64_t phase);
  void serve(int index);

  const int threads_;
  std::unique_ptr<Share[]> shares_;
  alignas(64) std::atomic<uint64_t> done_{0};
  alignas(64) std::atomic<uint64_t> over_{0};  // The last phase of which all items are done.
  std::atomic<unsigned> bell_{0};
  std::atomic<int> waiting_for_bell_{0};
  std::function<void(Team&)> job_;
  uint64_t first_phase_ = 0;
  alignas(64) std::atomic<unsigned> posted_{0};
  std::atomic<int> sleepers_{0};
  alignas(64) std::atomic<int> working_{0};
  std::atomic<bool> stopping_{false};
  std::vector<std::thread> workers_;
};

// A processor's way to spend some ten nanoseconds on waiting.
inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb");
#endif
}

// Pauses before a waiting thread sleeps. One takes 10 to 50 ns: this is 20 to 100 us.
constexpr int kSpins = 2000;

template <class Help>
void Pool::await(uint64_t phase, const Help& help) {
  constexpr int kPatience = 500;  // Help is tried after 5 to 25 us.
  for (int spin = 0; spin < kSpins; ++spin) {
    if (is_over(phase)) return;
    if (spin >= kPatience && spin % 16 == 0 && help()) spin = kPatience;
    relax();
  }
  sleep_until_over(phase);
}

template <class Work>
void Team::for_each(long items, const Work& work) {
  for_each(items, [](long) {}, work);
}

template <class Compute, class Keep>
void Team::for_each(long items, const Compute& compute, const Keep& keep) {
  if (items <= 0) return;
  const uint64_t phase = ++phase_;
  std::atomic<uint64_t>& hand = pool_.shares_[index_].hand;
  for (int step = 0; step < pool_.threads_ && !pool_.is_over(phase); ++step)
    for (long item; pool_.take(phase, (index_ + step) % pool_.threads_, items, item);) {
      uint64_t mine = Pool::in_hand(phase, item);
      hand.store(mine, std::memory_order_release);
      compute(item);
      if (!hand.compare_exchange_strong(mine, mine | Pool::kClaimed, std::memory_order_acq_rel)) continue;
      keep(item);
      pool_.count_done(phase, items);
    }
  pool_.await(phase, [&] { return redo(compute, keep, items); });
}

// Does what another thread has had in hand for long. Returns whether there was something.
template <class Compute, class Keep>
bool Team::redo(const Compute& compute, const Keep& keep, long items) {
  for (int thread = 0; thread < pool_.threads_; ++thread) {
    std::atomic<uint64_t>& hand = pool_.shares_[thread].hand;
    uint64_t theirs = hand.load(std::memory_order_acquire);
    const long item = theirs >> 1 & Pool::kCountMask;
    if (theirs != Pool::in_hand(phase_, item)) continue;  // Claimed, or of another phase.
    compute(item);
    if (hand.compare_exchange_strong(theirs, theirs | Pool::kClaimed, std::memory_order_acq_rel)) {
      keep(item);
      pool_.count_done(phase_, items);
    }
    return true;
  }
  return false;
}

}  // namespace triptych
