// A library that has NCCL's calls, as far as nccl.cpp makes them, for ranks that are processes of
// one host. It keeps NCCL's manners: no call waits; a rank that is gone is not noticed, and whoever
// waits for it does so until CommAbort; messages need a group, and their bytes must agree.
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "06_optimized/ring/check/fake_cuda.hpp"

namespace {

constexpr int success = 0, invalid_argument = 4, invalid_usage = 5, in_progress = 7;

struct UniqueId {
  char bytes[128];
};
struct Config {
  std::size_t size;
  unsigned magic, version;
  int blocking, undefined;
};
struct Message {
  bool sent;
  char* data;
  std::size_t bytes;
  int peer;
};

void nap() { std::this_thread::sleep_for(std::chrono::milliseconds(1)); }

struct Comm {
  int rank = 0, ranks = 1;
  std::string name;
  std::vector<int> sockets;
  std::atomic<int> state{in_progress};
  std::atomic<bool> aborted{false};
  std::vector<Message> group;
  cudaStream_t stream = nullptr;

  // A name that begins with 0 is no file: it is gone with who had it.
  sockaddr_un at(int r) const {
    sockaddr_un place{};
    place.sun_family = AF_UNIX;
    const std::string own = name + "/" + std::to_string(r);
    std::memcpy(place.sun_path + 1, own.data(), std::min(own.size(), sizeof place.sun_path - 1));
    return place;
  }
  void connect_all() {
    const int door = ::socket(AF_UNIX, SOCK_STREAM, 0);
    const sockaddr_un here = at(rank);
    ::bind(door, reinterpret_cast<const sockaddr*>(&here), sizeof here);
    ::listen(door, 64);
    for (int r = 0; r < rank && !aborted; ++r) {
      const sockaddr_un there = at(r);
      sockets[std::size_t(r)] = ::socket(AF_UNIX, SOCK_STREAM, 0);
      while (!aborted && ::connect(sockets[std::size_t(r)],
                                   reinterpret_cast<const sockaddr*>(&there), sizeof there))
        nap();
      if (::send(sockets[std::size_t(r)], &rank, sizeof rank, MSG_NOSIGNAL) < 0) return;
    }
    for (int left = ranks - 1 - rank; left > 0 && !aborted; --left) {
      const int socket = ::accept(door, nullptr, nullptr);
      int who = 0;
      if (::recv(socket, &who, sizeof who, MSG_WAITALL) < 0) return;
      sockets[std::size_t(who)] = socket;
    }
    state = success;
  }
  // Each message begins with its length.
  void move(std::vector<Message> messages) const {
    std::vector<std::size_t> heads(messages.size()), at(messages.size(), 0);
    for (std::size_t k = 0; k < messages.size(); ++k) heads[k] = messages[k].bytes;
    for (bool left = true; left && !aborted;) {
      left = false;
      std::vector<bool> busy(std::size_t(2 * ranks), false);
      for (std::size_t k = 0; k < messages.size(); ++k) {
        const Message& m = messages[k];
        const std::size_t all = sizeof(std::size_t) + m.bytes;
        // Of those of one rank in one direction the first that is not done.
        const std::size_t line = 2 * std::size_t(m.peer) + std::size_t(m.sent);
        if (at[k] == all || busy[line]) continue;
        busy[line] = left = true;
        const bool head = at[k] < sizeof(std::size_t);
        char* const from = head ? reinterpret_cast<char*>(&heads[k]) + at[k]
                                : m.data + (at[k] - sizeof(std::size_t));
        const std::size_t n = head ? sizeof(std::size_t) - at[k] : all - at[k];
        const int socket = sockets[std::size_t(m.peer)];
        const ssize_t moved = m.sent ? ::send(socket, from, n, MSG_NOSIGNAL | MSG_DONTWAIT)
                                     : ::recv(socket, from, n, MSG_DONTWAIT);
        if (moved > 0) at[k] += std::size_t(moved);
        if (!m.sent && at[k] == sizeof(std::size_t) && heads[k] != m.bytes) std::abort();
      }
    }
  }
};

thread_local int depth = 0;
thread_local Comm* of_group = nullptr;

int put(bool sent, const void* data, std::size_t bytes, int type, int peer, Comm* comm,
        cudaStream_t stream) {
  if (type != 1 || peer < 0 || peer >= comm->ranks) return invalid_argument;
  if (depth == 0 || comm->state != success) return invalid_usage;
  of_group = comm;
  comm->stream = stream;
  comm->group.push_back({sent, static_cast<char*>(const_cast<void*>(data)), bytes, peer});
  return in_progress;
}

}  // namespace

extern "C" {
int ncclGetVersion(int* version) {
  *version = 22809;
  return success;
}
int ncclGetUniqueId(UniqueId* id) {
  static int made = 0;
  std::snprintf(id->bytes, sizeof id->bytes, "fake_nccl_%d_%d", int(::getpid()), made++);
  return success;
}
int ncclCommInitRankConfig(Comm** comm, int ranks, UniqueId id, int rank, const Config* config) {
  if (config->magic != 0xcafebeef || config->blocking != 0 || config->size != sizeof(Config))
    return invalid_argument;
  if (const char* who = std::getenv("FAKE_NCCL_FAILS"); who && std::atoi(who) == rank)
    return invalid_argument;
  Comm* const made = new Comm;
  made->rank = rank, made->ranks = ranks, made->name = id.bytes;
  made->sockets.assign(std::size_t(ranks), -1);
  std::thread([made] { made->connect_all(); }).detach();
  *comm = made;
  return in_progress;
}
int ncclCommFinalize(Comm* comm) { return comm->state; }
int ncclCommDestroy(Comm* comm) {
  for (const int socket : comm->sockets)
    if (socket >= 0) ::close(socket);
  return success;
}
int ncclCommAbort(Comm* comm) {
  comm->aborted = true;
  return success;
}
int ncclCommGetAsyncError(Comm* comm, int* state) {
  *state = comm->state;
  return success;
}
const char* ncclGetErrorString(int error) {
  return error == invalid_argument ? "invalid argument" : "invalid usage";
}
const char* ncclGetLastError(Comm*) { return "as the test wants it"; }
int ncclGroupStart() {
  ++depth;
  return success;
}
int ncclGroupEnd() {
  if (--depth > 0 || !of_group) return success;
  Comm* const comm = std::exchange(of_group, nullptr);
  comm->state = in_progress;
  // As NCCL does where a group is not waited for: a thread puts it on the stream, a little later.
  std::thread([comm, messages = std::exchange(comm->group, {})] {
    nap();
    fake_cuda_put(comm->stream, [comm, messages] { comm->move(messages); });
    comm->state = success;
  }).detach();
  return in_progress;
}
int ncclSend(const void* data, std::size_t n, int type, int peer, Comm* comm, cudaStream_t s) {
  return put(true, data, n, type, peer, comm, s);
}
int ncclRecv(void* data, std::size_t n, int type, int peer, Comm* comm, cudaStream_t s) {
  return put(false, data, n, type, peer, comm, s);
}
}
