#include "06_optimized/ring/check/fake_cuda.hpp"

#include <chrono>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>

using Clock = std::chrono::steady_clock;

// One recording of an event; what waits for it keeps waiting for this one, whatever comes later.
struct Recorded {
  std::mutex mutex;
  std::condition_variable changed;
  bool done = false;
  Clock::time_point when;
  void finish() {
    const std::lock_guard lock(mutex);
    done = true, when = Clock::now();
    changed.notify_all();
  }
  void wait() {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return done; });
  }
};
struct CUevent_st {
  std::shared_ptr<Recorded> last;
};
struct CUstream_st {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::function<void()>> work;
  bool over = false;
  std::thread thread{[this] {
    for (;;) {
      std::function<void()> next;
      {
        std::unique_lock lock(mutex);
        changed.wait(lock, [&] { return over || !work.empty(); });
        if (work.empty()) return;
        next = std::move(work.front());
        work.pop_front();
      }
      next();
    }
  }};
};

extern "C" {
void fake_cuda_put(cudaStream_t stream, const std::function<void()>& work) {
  if (!stream) return work();
  const std::lock_guard lock(stream->mutex);
  stream->work.push_back(work);
  stream->changed.notify_all();
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
  *stream = new CUstream_st;
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  {
    const std::lock_guard lock(stream->mutex);
    stream->over = true;
    stream->changed.notify_all();
  }
  stream->thread.join();
  delete stream;
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  fake_cuda_put(stream, [recorded = event->last] { recorded->wait(); });
  return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = new CUevent_st;
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  event->last = std::make_shared<Recorded>();
  fake_cuda_put(stream, [recorded = event->last] { recorded->finish(); });
  return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  const std::lock_guard lock(event->last->mutex);
  return event->last->done ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaEventElapsedTime(float* time, cudaEvent_t from, cudaEvent_t to) {
  *time = std::chrono::duration<float, std::milli>(to->last->when - from->last->when).count();
  return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* most) {
  *least = 0, *most = -5;
  return cudaSuccess;
}
cudaError_t cudaGetLastError() { return cudaSuccess; }
cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = 0;
  return cudaSuccess;
}
const char* cudaGetErrorString(cudaError_t) { return "an error"; }
const char* cudaGetErrorName(cudaError_t) { return "cudaErrorOfTheTest"; }
}
