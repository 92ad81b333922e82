// Independent tasks on several threads.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <mutex>
#include <new>
#include <optional>
#include <thread>
#include <vector>

namespace fa {

// How many threads parallel_for asks for: as many as given, 0 for all cores, never more than tasks.
inline int threads_for(std::int64_t tasks, int threads) {
  if (threads <= 0) threads = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  return static_cast<int>(std::min<std::int64_t>(threads, tasks));
}

// Calls worker(task) once for every task in [0, tasks), where each thread makes its own worker by
// make_worker(): what a worker owns (scratch memory) belongs to one thread and is first touched by
// it. Tasks are handed out in order, one at a time, so a late thread does not hold up the others.
// If the system gives fewer threads than asked for, or no memory for another worker, those that
// started do all the tasks: the caller's own worker is made first, before any task begins. After
// another exception no further task begins; it is thrown here, once all threads have ended.
template <class MakeWorker>
void parallel_for(std::int64_t tasks, int threads, const MakeWorker& make_worker) {
  threads = threads_for(tasks, threads);
  if (tasks <= 0) return;
  std::atomic<std::int64_t> next{0};
  std::exception_ptr error;
  std::mutex error_mutex;
  const auto work = [&](auto& worker) {
    for (std::int64_t task; (task = next.fetch_add(1, std::memory_order_relaxed)) < tasks;)
      worker(task);
  };
  const auto guarded = [&](const auto& body) {
    try {
      body();
    } catch (...) {
      next.store(tasks);
      const std::lock_guard lock(error_mutex);
      error = std::current_exception();
    }
  };
  auto own = make_worker();
  const auto help = [&] {
    guarded([&] {
      std::optional<decltype(own)> worker;
      try {
        worker.emplace(make_worker());
      } catch (const std::bad_alloc&) {
        return;
      }
      work(*worker);
    });
  };
  std::vector<std::thread> others;
  try {
    for (int t = 1; t < threads; ++t) others.emplace_back(help);
  } catch (const std::exception&) {
    // No more threads, or no memory for one. Leaving now would destroy threads that still run,
    // which ends the program; and this thread alone could do all the tasks.
  }
  guarded([&] { work(own); });
  for (std::thread& thread : others) thread.join();
  if (error) std::rethrow_exception(error);
}

}  // namespace fa
