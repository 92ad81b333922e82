// Independent tasks on several threads.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

namespace fa {

// Calls worker(task) once for every task in [0, tasks), where each thread makes its own worker by
// make_worker(): what a worker owns (scratch memory) belongs to one thread and is first touched by
// it.
// Tasks are handed out in order, one at a time, so a late thread does not hold up the others.
// threads: 0 for all cores. An exception of a worker is thrown here, after all threads have ended.
template <class MakeWorker>
void parallel_for(std::int64_t tasks, int threads, const MakeWorker& make_worker) {
  if (threads <= 0) threads = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  threads = static_cast<int>(std::min<std::int64_t>(threads, tasks));
  std::atomic<std::int64_t> next{0};
  std::exception_ptr error;
  std::mutex error_mutex;
  const auto work = [&] {
    try {
      auto worker = make_worker();
      for (std::int64_t task; (task = next.fetch_add(1, std::memory_order_relaxed)) < tasks;)
        worker(task);
    } catch (...) {
      next.store(tasks);
      const std::lock_guard lock(error_mutex);
      error = std::current_exception();
    }
  };
  std::vector<std::thread> others;
  for (int t = 1; t < threads; ++t) others.emplace_back(work);
  if (tasks > 0) work();
  for (std::thread& thread : others) thread.join();
  if (error) std::rethrow_exception(error);
}

}  // namespace fa
