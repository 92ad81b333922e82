// The program's machine on a GPU, with NCCL; on the emulator, with sockets.
#include <algorithm>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "06_optimized/ring/check/program.hpp"
#include "06_optimized/ring/gpu.hpp"
#include "common/core/cuda.hpp"
#ifndef FA_EMULATED
#include "06_optimized/ring/nccl.hpp"
#endif

namespace fa::ring {
namespace {

using Int = std::int64_t;

// Rows [first, first + gridDim.x) of the sequence, of all heads.
template <class T>
__global__ void draw_rows(std::uint64_t seed, Int first, Int d, View<T> to) {
  const Int i = blockIdx.x, h = blockIdx.y;
  for (int x = threadIdx.x; x < int(d); x += blockDim.x)
    to.at(0, h, i)[x] =
        T(drawn(seed, std::uint64_t(h), std::uint64_t(first + i), std::uint64_t(x)));
}

// P = 1: nobody to talk to, and no NCCL needed.
class Nobody : public Communicator {
 public:
  int rank() const override { return 0; }
  int size() const override { return 1; }
  void begin(const std::string&, const std::vector<Message>&,
             const std::vector<Message>&) override {}
  void wait() override {}
  void tell_all(const std::string&, const void* mine, void* all, std::size_t bytes) override {
    if (bytes) std::memcpy(all, mine, bytes);
  }
  void leave(const std::string&) noexcept override {}
};

// Through host memory: for ranks that share a GPU, which NCCL does not serve, and on the emulator.
// The host waits for each message.
class Staged : public Communicator {
 public:
  Staged(Assembly& assembly, cudaStream_t stream)
      : real_(over_sockets(assembly)), stream_(stream) {}
  int rank() const override { return real_->rank(); }
  int size() const override { return real_->size(); }
  void begin(const std::string& at, const std::vector<Message>& sent,
             const std::vector<Message>& received) override {
    std::size_t bytes = 0;
    for (const auto* all : {&sent, &received})
      for (const Message& message : *all) bytes += message.bytes;
    if (host_.size() < bytes) host_.resize(bytes);
    char* place = host_.data();
    const auto here = [&](const Message& message) {
      return Message{message.peer, std::exchange(place, place + message.bytes), message.bytes};
    };
    std::vector<Message> staged_sent, staged_received;
    for (const Message& message : sent) {
      staged_sent.push_back(here(message));
      copy(staged_sent.back().data, message.data, message.bytes, cudaMemcpyDeviceToHost);
    }
    for (const Message& message : received) staged_received.push_back(here(message));
    const cudaError_t said = cudaStreamSynchronize(stream_);
    if (said != cudaSuccess) throw_cuda_error(said, "what is sent at " + at, __FILE__, __LINE__);
    received_ = received, staged_ = staged_received;
    real_->begin(at, staged_sent, staged_received);
    bytes_sent += std::exchange(real_->bytes_sent, 0);
  }
  void wait() override {
    real_->wait();
    for (std::size_t k = 0; k < received_.size(); ++k)
      copy(received_[k].data, staged_[k].data, received_[k].bytes, cudaMemcpyHostToDevice);
    FA_CUDA_CHECK(cudaStreamSynchronize(stream_));
  }
  void tell_all(const std::string& at, const void* mine, void* all, std::size_t bytes) override {
    real_->tell_all(at, mine, all, bytes);
  }
  void leave(const std::string& why) noexcept override { real_->leave(why); }

 private:
  void copy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind) {
    if (bytes) FA_CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, kind, stream_));
  }
  std::unique_ptr<Communicator> real_;
  const cudaStream_t stream_;
  std::vector<char> host_;
  std::vector<Message> received_, staged_;
};

template <class T>
class Gpu : public Machine<T> {
 public:
  Gpu(Assembly& assembly, [[maybe_unused]] bool sockets) {
    FA_CUDA_CHECK(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    FA_CUDA_CHECK(cudaEventCreate(&begun_));
    FA_CUDA_CHECK(cudaEventCreate(&ended_));
#ifndef FA_EMULATED
    if (!sockets && assembly.size() > 1) {
      auto nccl = over_nccl(assembly, stream_);
      nccl_ = nccl.get();
      comm_ = std::move(nccl);
    }
#endif
    if (!comm_ && assembly.size() > 1) comm_ = std::make_unique<Staged>(assembly, stream_);
    if (!comm_) comm_ = std::make_unique<Nobody>();
  }
  ~Gpu() override {
    comm_.reset();
    cudaEventDestroy(begun_);
    cudaEventDestroy(ended_);
    cudaStreamDestroy(stream_);
  }
  Gpu(const Gpu&) = delete;
  Gpu& operator=(const Gpu&) = delete;

  Communicator& comm() override { return *comm_; }
  std::unique_ptr<Engine<T>> engine(bool deterministic) override {
    return gpu_engine<T>(stream_, deterministic);
  }
  std::string name() const override { return current_gpu(); }
  std::string carriers() const override {
#ifndef FA_EMULATED
    if (nccl_) return "NCCL " + nccl_->version();
#endif
    return comm_->size() > 1 ? "sockets, through host memory" : "nothing, one rank";
  }

  std::shared_ptr<void> allocate(std::size_t bytes) override {
    const auto memory = std::make_shared<DeviceMemory>(bytes);
    return {memory, memory->template as<void>()};
  }
  std::size_t free_bytes() const override { return memory().first; }
  std::size_t used_bytes() const override { return memory().second - memory().first; }
  void to_host(float* to, const T* from, std::size_t count) override {
    std::vector<T> copy(std::min<std::size_t>(count, std::size_t(1) << 24));
    for (std::size_t k = 0; k < count; k += copy.size()) {
      const std::size_t n = std::min(copy.size(), count - k);
      FA_CUDA_CHECK(cudaMemcpy(copy.data(), from + k, n * sizeof(T), cudaMemcpyDeviceToHost));
      for (std::size_t e = 0; e < n; ++e) to[k + e] = float(copy[e]);
    }
  }
  void sums_to_host(float* to, const float* from, std::size_t count) override {
    if (count) FA_CUDA_CHECK(cudaMemcpy(to, from, count * sizeof(float), cudaMemcpyDeviceToHost));
  }
  void draw(std::uint64_t seed, Int H, Int d, const std::vector<Block>& blocks,
            const View<T>& to) override {
    Int row = 0;
    const auto kernel = draw_rows<T>;
    for (const Block& block : blocks) {
      FA_LAUNCH(kernel, dim3(unsigned(block.rows), unsigned(H)), dim3(32), 0, stream_, seed,
                block.first, d, from(to, row));
      row += block.rows;
    }
  }

  void finish(const std::string& at) override {
#ifndef FA_EMULATED
    if (nccl_) return nccl_->finish(at);
#endif
    const cudaError_t said = cudaStreamSynchronize(stream_);
    if (said != cudaSuccess) throw_cuda_error(said, "waiting for " + at, __FILE__, __LINE__);
  }
  void start() override { FA_CUDA_CHECK(cudaEventRecord(begun_, stream_)); }
  double stop() override {
    FA_CUDA_CHECK(cudaEventRecord(ended_, stream_));
    finish("the end of a round");
    FA_CUDA_CHECK(cudaEventSynchronize(ended_));
    float time = 0;
    FA_CUDA_CHECK(cudaEventElapsedTime(&time, begun_, ended_));
    return double(time);
  }

#ifdef FA_EMULATED
  void timeline(bool) override {}
  std::vector<Exchange> exchanges() override { return {}; }
#else
  void timeline(bool on) override {
    if (nccl_) nccl_->record(on);
  }
  std::vector<Exchange> exchanges() override {
    std::vector<Exchange> all;
    for (const Span& span : nccl_ ? nccl_->spans() : std::vector<Span>())
      all.push_back({span.at, span.compute_from, span.compute_to, span.copy_from, span.copy_to});
    return all;
  }
#endif

 private:
  static std::pair<std::size_t, std::size_t> memory() {
    std::size_t free = 0, total = 0;
    FA_CUDA_CHECK(cudaMemGetInfo(&free, &total));
    return {free, total};
  }

  cudaStream_t stream_ = nullptr;
  cudaEvent_t begun_ = nullptr, ended_ = nullptr;
  std::unique_ptr<Communicator> comm_;
#ifndef FA_EMULATED
  NcclCommunicator* nccl_ = nullptr;
#endif
};

// This rank's own GPU.
void choose_gpu([[maybe_unused]] const Place& place, [[maybe_unused]] bool shared) {
#ifndef FA_EMULATED
  int there = 0;
  FA_CUDA_CHECK(cudaGetDeviceCount(&there));
  if (place.local >= there && !(shared && there > 0))
    throw std::runtime_error("ring: rank " + std::to_string(place.rank) + " is number " +
                             std::to_string(place.local) +
                             " on its host and wants a GPU of its "
                             "own; there " +
                             (there == 1 ? "is 1" : "are " + std::to_string(there)));
  FA_CUDA_CHECK(cudaSetDevice(place.local % there));
  FA_CUDA_CHECK(cudaFree(nullptr));  // the first call, which takes a while, is this one
#endif
}

}  // namespace

std::vector<std::string> types_of_this_program() { return {"bf16", "fp16"}; }
int run_on_this_machine(Assembly& assembly, const Place& place, const Asked& asked) {
  choose_gpu(place, asked.sockets);
  if (asked.type == "fp16")
    return run_on<__half>(assembly, asked,
                          [&] { return std::make_unique<Gpu<__half>>(assembly, asked.sockets); });
  return run_on<__nv_bfloat16>(assembly, asked, [&] {
    return std::make_unique<Gpu<__nv_bfloat16>>(assembly, asked.sockets);
  });
}

}  // namespace fa::ring
