// Memory that ends where a page without memory begins: who reads behind its last byte is ended.
#pragma once
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <memory>
#include <new>

#include "common/judge/buffer.hpp"

namespace fa::judge {

// Filled with NaN.
class Edge {
 public:
  explicit Edge(std::size_t bytes) {
    const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    const std::size_t used = (bytes + page - 1) / page * page;
    mapped_ = used + page;
    pages_ = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (pages_ == MAP_FAILED) throw std::bad_alloc();
    mprotect(static_cast<char*>(pages_) + used, page, PROT_NONE);
    data_ = static_cast<char*>(pages_) + used - bytes;
    std::memset(data_, 0xff, bytes);
  }
  ~Edge() { munmap(pages_, mapped_); }
  Edge(const Edge&) = delete;
  Edge& operator=(const Edge&) = delete;
  void* data() const { return data_; }

 private:
  void *data_ = nullptr, *pages_ = nullptr;
  std::size_t mapped_ = 0;
};

// A copy of a buffer's tensor whose last element is the last that may be read or written: what
// follows is a page of addresses without memory.
template <class T>
class AtTheEdge {
 public:
  explicit AtTheEdge(Buffer<T>& x) : view_(x.view()) {
    // Rows in order, without gaps after the last: from the first element to the last.
    const auto elements =
        std::size_t(x.B() == 0 || x.H() == 0 || x.N() == 0
                        ? 0
                        : &x.at(x.B() - 1, x.H() - 1, x.N() - 1, x.d() - 1) - &x.at(0, 0, 0) + 1);
    edge_ = std::make_unique<Edge>(elements * sizeof(T));
    view_.data = static_cast<T*>(edge_->data());
    std::memcpy(edge_->data(), x.view().data, elements * sizeof(T));
  }
  View<T> view() const { return view_; }

 private:
  std::unique_ptr<Edge> edge_;
  View<T> view_;
};

}  // namespace fa::judge
