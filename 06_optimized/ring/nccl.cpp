#include "06_optimized/ring/nccl.hpp"

#include <dlfcn.h>
#include <glob.h>

#include <climits>
#include <cstdlib>
#include <cstring>
#include <sstream>

#include "common/core/cuda.hpp"

namespace fa::ring {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

// ---- NCCL, as much of it as is used here -------------------------------------------------------

// Names, numbers and layouts are those of NCCL's nccl.h, 2.14 and later, which keeps them from one
// version to the next. A communicator that does not block came with 2.14.
struct Opaque;
using Comm = Opaque*;
struct UniqueId {
  char bytes[128];
};
struct Config {  // its first members, as of 2.14; NCCL takes the others from its defaults
  std::size_t size = sizeof(Config);
  unsigned magic = 0xcafebeef, version = 21400;
  int blocking = 0;
  int undefined = INT_MIN;  // what comes next in later versions, which fills these eight bytes
};
constexpr int success = 0, in_progress = 7, bytes_type = 1;

// NCCL's start, and its first group, which connects the ranks, take seconds, however short the
// patience; and who waits for a rank that lives but does not come shall end within half a minute.
constexpr std::chrono::milliseconds at_its_start{25000};

struct Nccl {
  int (*GetVersion)(int*);
  int (*GetUniqueId)(UniqueId*);
  int (*CommInitRankConfig)(Comm*, int ranks, UniqueId, int rank, Config*);
  int (*CommFinalize)(Comm);
  int (*CommDestroy)(Comm);
  int (*CommAbort)(Comm);
  int (*CommGetAsyncError)(Comm, int*);
  const char* (*GetErrorString)(int);
  const char* (*GetLastError)(Comm);
  int (*GroupStart)();
  int (*GroupEnd)();
  int (*Send)(const void*, std::size_t, int type, int peer, Comm, cudaStream_t);
  int (*Recv)(void*, std::size_t, int type, int peer, Comm, cudaStream_t);
  std::string file;
};

struct Library {
  void* handle = nullptr;
  std::string file, tried;

  bool open(const std::string& path) {
    handle = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    file = path;
    if (!handle) tried += (tried.empty() ? "" : ", ") + path;
    return handle != nullptr;
  }
  // Every file that fits, as a shell would list them.
  bool open_any(const std::string& pattern) {
    glob_t found{};
    bool opened = false;
    if (::glob(pattern.c_str(), 0, nullptr, &found) == 0)
      for (std::size_t k = 0; k < found.gl_pathc && !opened; ++k) opened = open(found.gl_pathv[k]);
    else
      tried += (tried.empty() ? "" : ", ") + pattern;
    ::globfree(&found);
    return opened;
  }
};

Library open_nccl() {
  // NVLS lets the switches between GPUs add and copy to many ("multicast"). Messages from one rank
  // to one other gain nothing by it, and what it sets up takes memory and is not allowed
  // everywhere. It is off in all that this course measures.
  ::setenv("NCCL_NVLS_ENABLE", "0", 0);
  Library library;
  if (const char* file = std::getenv("FA_NCCL"); file && *file) {
    if (library.open(file)) return library;
    throw std::runtime_error(std::string("ring: FA_NCCL names no library that can be loaded: ") +
                             ::dlerror());
  }
  if (library.open("libnccl.so.2")) return library;
  std::vector<std::string> roots;
  for (const char* variable : {"VIRTUAL_ENV", "CONDA_PREFIX"})
    if (const char* root = std::getenv(variable)) roots.emplace_back(root);
  if (const char* home = std::getenv("HOME")) roots.push_back(std::string(home) + "/.local");
  // Where a Python is in PATH its packages are beside it.
  std::istringstream path(std::getenv("PATH") ? std::getenv("PATH") : "");
  for (std::string folder; std::getline(path, folder, ':');)
    if (folder.size() > 4 && folder.compare(folder.size() - 4, 4, "/bin") == 0)
      roots.push_back(folder.substr(0, folder.size() - 4));
  for (const std::string& root : roots)
    for (const char* packages : {"site-packages", "dist-packages"})
      if (library.open_any(root + "/lib/python3*/" + packages + "/nvidia/nccl/lib/libnccl.so.2"))
        return library;
  throw std::runtime_error(
      "ring: several GPUs need NCCL, and no libnccl.so.2 was found; PyTorch for CUDA brings one: "
      "set FA_NCCL to its path, .../site-packages/nvidia/nccl/lib/libnccl.so.2. Looked for: " +
      library.tried);
}

Nccl load() {
  const Library library = open_nccl();
  Nccl nccl{};
  nccl.file = library.file;
  const auto find = [&](auto& function, const char* symbol) {
    void* const place = ::dlsym(library.handle, symbol);
    if (!place)
      throw std::runtime_error("ring: " + library.file + " has no " + symbol +
                               "; NCCL 2.14 or later is needed");
    std::memcpy(&function, &place, sizeof place);
  };
  find(nccl.GetVersion, "ncclGetVersion");
  find(nccl.GetUniqueId, "ncclGetUniqueId");
  find(nccl.CommInitRankConfig, "ncclCommInitRankConfig");
  find(nccl.CommFinalize, "ncclCommFinalize");
  find(nccl.CommDestroy, "ncclCommDestroy");
  find(nccl.CommAbort, "ncclCommAbort");
  find(nccl.CommGetAsyncError, "ncclCommGetAsyncError");
  find(nccl.GetErrorString, "ncclGetErrorString");
  find(nccl.GetLastError, "ncclGetLastError");
  find(nccl.GroupStart, "ncclGroupStart");
  find(nccl.GroupEnd, "ncclGroupEnd");
  find(nccl.Send, "ncclSend");
  find(nccl.Recv, "ncclRecv");
  return nccl;
}

// ---- the communicator --------------------------------------------------------------------------

class Event {
 public:
  explicit Event(bool timed) {
    FA_CUDA_CHECK(
        cudaEventCreateWithFlags(&event_, timed ? cudaEventDefault : cudaEventDisableTiming));
  }
  ~Event() { cudaEventDestroy(event_); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  void record(cudaStream_t stream) { FA_CUDA_CHECK(cudaEventRecord(event_, stream)); }
  operator cudaEvent_t() const { return event_; }

 private:
  cudaEvent_t event_ = nullptr;
};

class OverNccl : public NcclCommunicator {
 public:
  OverNccl(Assembly& assembly, cudaStream_t engine)
      : assembly_(assembly),
        engine_(engine),
        ready_(false),
        begun_(false),
        came_(false),
        end_(false) {
    try {
      start();
    } catch (const std::exception& error) {
      assembly_.leave(error.what());  // or the others would wait in NCCL, which knows nothing of it
      throw;
    }
    assembly_.on_lost([this] { abort(); });
  }

  ~OverNccl() override {
    assembly_.on_lost(nullptr);
    {
      const std::lock_guard lock(mutex_);
      if (comm_ && !assembly_.over() && finalized()) {
        nccl_.CommDestroy(comm_);
        comm_ = nullptr;
      }
    }
    abort();
    if (stream_) cudaStreamDestroy(stream_);
  }
  OverNccl(const OverNccl&) = delete;
  OverNccl& operator=(const OverNccl&) = delete;

  int rank() const override { return assembly_.rank(); }
  int size() const override { return assembly_.size(); }

  void begin(const std::string& at, const std::vector<Message>& sent,
             const std::vector<Message>& received) override {
    assembly_.at(at);
    assembly_.check();
    if (recording_) note(at);
    // What is sent is written, and what is received is no longer read, once the engine comes here.
    ready_.record(engine_);
    FA_CUDA_CHECK(cudaStreamWaitEvent(stream_, ready_, 0));
    begun_.record(stream_);
    if (recording_) times_.back()->copy_from.record(stream_);
    {
      const std::lock_guard lock(mutex_);
      here();
      // One group: all messages at once, in both directions, so that no order of ranks can block.
      check(nccl_.GroupStart(), "ncclGroupStart");
      for (const Message& message : sent)
        if (message.bytes > 0)
          done_or_begun(
              nccl_.Send(message.data, message.bytes, bytes_type, message.peer, comm_, stream_),
              "ncclSend");
      for (const Message& message : received)
        if (message.bytes > 0)
          done_or_begun(
              nccl_.Recv(message.data, message.bytes, bytes_type, message.peer, comm_, stream_),
              "ncclRecv");
      done_or_begun(nccl_.GroupEnd(), "ncclGroupEnd");
    }
    // The group is on the stream once NCCL says so: the first one connects the ranks.
    until_done("ncclGroupEnd", std::max(assembly_.patience(), at_its_start));
    came_.record(stream_);
    // NCCL's blocks come to their SMs first, or at least soon: gpu.cu leaves one now and then.
    FA_CUDA_CHECK(cudaStreamWaitEvent(engine_, begun_, 0));
    if (recording_) times_.back()->copy_to.record(stream_);
    for (const Message& message : sent) bytes_sent += std::int64_t(message.bytes);
  }

  void wait() override {
    if (recording_) times_.back()->compute_to.record(engine_);
    FA_CUDA_CHECK(cudaStreamWaitEvent(engine_, came_, 0));
  }

  void tell_all(const std::string& at, const void* mine, void* all, std::size_t bytes) override {
    assembly_.tell_all(at, mine, all, bytes);
  }
  void leave(const std::string& why) noexcept override { assembly_.leave(why); }

  void finish(const std::string& at) override {
    assembly_.at(at);
    end_.record(engine_);
    const auto begun = Clock::now();
    int looks = 0;
    for (;;) {
      const cudaError_t said = cudaEventQuery(end_);
      assembly_.check();
      if (said == cudaSuccess) return;
      if (said != cudaErrorNotReady)
        throw_cuda_error(said, "waiting for " + at, __FILE__, __LINE__);
      {
        const std::lock_guard lock(mutex_);
        here();
        int state = success;
        check(nccl_.CommGetAsyncError(comm_, &state), "ncclCommGetAsyncError");
        if (state != in_progress) check(state, "NCCL, while messages travelled");
      }
      if (Clock::now() - begun > assembly_.patience() / 4) assembly_.waits();
      // Nobody has moved: one of the ranks does not come. Rank 0 has seen all and says which.
      const milliseconds grace(rank() ? assembly_.patience() / 4 : milliseconds(0));
      if (Clock::now() - std::max(begun, assembly_.last_move()) > assembly_.patience() + grace)
        assembly_.give_up(assembly_.late(rank()));
      if (++looks > 100) std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }

  void record(bool on) override {
    recording_ = on;
    if (!on) return;
    times_.clear();
    base_ = std::make_unique<Event>(true);
    last_ = std::make_unique<Event>(true);
    base_->record(engine_);
  }
  std::vector<Span> spans() override {
    std::vector<Span> spans;
    if (!base_) return spans;
    last_->record(engine_);
    finish("the times of all messages");
    const auto since = [&](const Event& event) {
      float time = 0;
      FA_CUDA_CHECK(cudaEventElapsedTime(&time, *base_, event));
      return time;
    };
    float rest = 0;
    for (const auto& t : times_) {
      spans.push_back({t->at, since(t->compute_from), since(t->compute_to), since(t->copy_from),
                       since(t->copy_to)});
      rest = std::max(spans.back().compute_to, spans.back().copy_to);
    }
    spans.push_back({"the rest", rest, since(*last_), rest, rest});
    return spans;
  }

  std::string version() const override {
    int number = 0;
    nccl_.GetVersion(&number);
    return std::to_string(number / 10000) + "." + std::to_string(number / 100 % 100) + "." +
           std::to_string(number % 100) + " from " + nccl_.file;
  }

 private:
  void start() {
    // What is known to fail on this rank is told before anybody waits for it in NCCL.
    std::string wrong;
    UniqueId id{};
    try {
      nccl_ = load();
      if (rank() == 0) check(nccl_.GetUniqueId(&id), "ncclGetUniqueId");
    } catch (const std::exception& error) {
      wrong = error.what();
    }
    const std::vector<std::string> wrongs = assembly_.tell_texts("NCCL's library", wrong);
    for (std::size_t r = 0; r < wrongs.size(); ++r)
      if (!wrongs[r].empty())
        throw std::runtime_error("rank " + std::to_string(r) + ": " + wrongs[r]);
    std::vector<UniqueId> ids(std::size_t(size()), UniqueId{});
    assembly_.tell_all("NCCL's address", &id, ids.data(), sizeof id);

    // The copies' few blocks go before the thousands of blocks of a kernel that fills the GPU.
    int least = 0, most = 0;
    FA_CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&least, &most));
    FA_CUDA_CHECK(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, most));
    assembly_.at("NCCL's start");
    Config config;
    const int said = nccl_.CommInitRankConfig(&comm_, size(), ids[0], rank(), &config);
    if (said != in_progress) check(said, "ncclCommInitRankConfig");
    // The first start on a machine takes seconds, however short the patience. A rank that dies
    // meanwhile is noticed at once all the same.
    until_done("ncclCommInitRankConfig", std::max(assembly_.patience(), at_its_start));
  }

  struct Times {
    explicit Times(std::string at_) : at(std::move(at_)) {}
    std::string at;
    Event compute_from{true}, compute_to{true}, copy_from{true}, copy_to{true};
  };
  void note(const std::string& at) {
    times_.push_back(std::make_unique<Times>(at));
    times_.back()->compute_from.record(engine_);
  }

  void check(int said, const std::string& call) {
    if (said == success) return;
    assembly_.check();  // an error that is only the echo of a rank that was lost
    std::string words = nccl_.GetErrorString(said);
    if (const char* last = comm_ ? nccl_.GetLastError(comm_) : nullptr; last && *last)
      words += std::string(": ") + last;
    throw std::runtime_error("ring: " + call + " failed: " + words);
  }
  void done_or_begun(int said, const char* call) {
    if (said != in_progress) check(said, call);
  }
  // The thread that watches may have ended NCCL meanwhile.
  void here() {
    if (!comm_) assembly_.give_up("NCCL was ended");
  }
  void until_done(const char* call, milliseconds patience) {
    const auto end = Clock::now() + patience;
    for (int looks = 0;; ++looks) {
      int state = in_progress;
      {
        const std::lock_guard lock(mutex_);
        here();
        check(nccl_.CommGetAsyncError(comm_, &state), "ncclCommGetAsyncError");
        if (state != in_progress) check(state, call);
      }
      if (state == success) return;
      assembly_.check();
      if (Clock::now() > end)
        assembly_.give_up(std::string(call) + " of rank " + std::to_string(rank()) +
                          " did not come to its end within " + std::to_string(patience.count()) +
                          " ms");
      if (looks > 1000) std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }
  bool finalized() {
    if (nccl_.CommFinalize(comm_) != success) {
      int state = in_progress;
      const auto end = Clock::now() + milliseconds(2000);
      while (nccl_.CommGetAsyncError(comm_, &state) == success && state == in_progress &&
             Clock::now() < end)
        std::this_thread::sleep_for(milliseconds(1));
      return state == success;
    }
    return true;
  }
  // Ends what NCCL has on the stream, kernels too, so that nobody waits for it any more.
  void abort() noexcept {
    const std::lock_guard lock(mutex_);
    if (comm_) nccl_.CommAbort(comm_);
    comm_ = nullptr;
  }

  Assembly& assembly_;
  const cudaStream_t engine_;
  cudaStream_t stream_ = nullptr;
  Nccl nccl_{};
  std::mutex mutex_;  // of comm_: this thread's calls, and the end by the one that watches
  Comm comm_ = nullptr;
  Event ready_, begun_, came_, end_;
  bool recording_ = false;
  std::unique_ptr<Event> base_, last_;
  std::vector<std::unique_ptr<Times>> times_;
};

}  // namespace

std::unique_ptr<NcclCommunicator> over_nccl(Assembly& assembly, cudaStream_t engine) {
  return std::make_unique<OverNccl>(assembly, engine);
}

}  // namespace fa::ring
