// A fixed team of threads that runs one job at a time in lock step, while its caller does something else.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

namespace triptych {

// Where threads of a team wait for each other: they spin for some tens of microseconds, then sleep.
class Barrier {
 public:
  explicit Barrier(int threads) : threads_(threads), missing_(threads) {}
  void wait();

 private:
  const int threads_;
  alignas(64) std::atomic<int> missing_;
  alignas(64) std::atomic<unsigned> round_{0};
  alignas(64) std::atomic<int> sleepers_{0};
};

class Pool;

// One thread's view of a running job.
class Team {
 public:
  Team(Pool& pool, int index) : pool_(pool), index_(index) {}
  int index() const { return index_; }

  // Calls work(item) for every item in [0, items) once, over all threads, then waits until all are done. Each thread
  // has a contiguous share, which keeps its memory stream in order; one that finishes early helps the others.
  // Every thread of the team must make the same calls.
  template <class Work>
  void for_each(long items, const Work& work);

 private:
  Pool& pool_;
  const int index_;
  unsigned phase_ = 0;
};

class Pool {
 public:
  explicit Pool(int threads);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

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
  struct alignas(64) Counter {
    std::atomic<long> taken{0};
  };

  void serve(int index);
  long share_begin(long items, int thread) const { return items * thread / threads_; }
  Counter& counter(unsigned phase, int thread) { return counters_[(phase & 1) * threads_ + thread]; }

  const int threads_;
  Barrier barrier_;
  std::unique_ptr<Counter[]> counters_;
  std::function<void(Team&)> job_;
  alignas(64) std::atomic<unsigned> posted_{0};
  std::atomic<int> sleepers_{0};
  alignas(64) std::atomic<int> working_{0};
  std::atomic<bool> stopping_{false};
  std::vector<std::thread> workers_;
};

template <class Work>
void Team::for_each(long items, const Work& work) {
  const int threads = pool_.threads_;
  // Nobody touches the other set of counters now: its last phase is behind a barrier, its next one in front of one.
  pool_.counter(phase_ + 1, index_).taken.store(0, std::memory_order_relaxed);
  for (int step = 0; step < threads; ++step) {
    const int owner = (index_ + step) % threads;
    const long begin = pool_.share_begin(items, owner), end = pool_.share_begin(items, owner + 1);
    std::atomic<long>& taken = pool_.counter(phase_, owner).taken;
    if (begin + taken.load(std::memory_order_relaxed) >= end) continue;
    for (long item; (item = begin + taken.fetch_add(1, std::memory_order_relaxed)) < end;) work(item);
  }
  ++phase_;
  pool_.barrier_.wait();
}

}  // namespace triptych
