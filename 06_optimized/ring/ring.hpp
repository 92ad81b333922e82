// Attention over several ranks: a sequence that does not fit one GPU is cut into blocks, and each
// rank holds the queries, keys and values of its blocks. Softmax in parts, merged by L, needs each
// block of keys to visit each block of queries once: so the keys travel.
//
// The method is written once, over two small interfaces: a Communicator, which carries bytes from
// rank to rank, and an Engine, which computes attention of some queries and some keys.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "common/core/tensor.hpp"

namespace fa::ring {

// ---- who holds what ----------------------------------------------------------------------------

// How a sequence is dealt out. Under a causal mask late queries see many keys and early ones few.
enum class Order {
  zigzag,      // 2P blocks; rank r has block r and block 2P - 1 - r: one from the front, one from
               // the back, so that all ranks see about as many keys
  contiguous,  // P blocks; rank r has block r
};

// Rows [first, first + rows) of the whole sequence.
struct Block {
  std::int64_t first, rows;
};

// The blocks of a rank in ascending order, none of them empty; two that touch are one. A rank's
// tensors hold these rows, one block after the other, and no others.
std::vector<Block> blocks_of(std::int64_t N, int ranks, int rank, Order order);
std::int64_t rows_of(std::int64_t N, int ranks, int rank, Order order);

// A part of what a rank computes in a step: its queries [row, row + rows) and the first `keys` of
// the keys that are there, counted as they lie in memory. Within a piece the mask is one that every
// kernel knows.
struct Piece {
  std::int64_t row, rows, keys;
  Causal causal;
};
// Every query is in one piece at most, since a rank's keys lie in ascending order: of them, too, a
// query sees the first so many. Key lengths are not looked at.
std::vector<Piece> pieces_of(const Problem& p, const std::vector<Block>& queries,
                             const std::vector<Block>& keys);

// ---- what carries bytes ------------------------------------------------------------------------

struct Message {
  int peer;  // to whom, or from whom
  void* data;
  std::size_t bytes;
};

// One rank's end of it. Every call may throw RankLost: what one rank cannot finish, none does.
class Communicator {
 public:
  virtual ~Communicator() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;

  // Puts messages under way; nobody waits. Until wait() has returned, what is sent must not be
  // written to, and what is received neither read nor written. (On a GPU: by work that is put on
  // the engine's stream after wait(); the host is not stopped.) Messages from one rank to another
  // come in the order in which they were sent. `at` says what for: "forward, step 2 of 4".
  virtual void begin(const std::string& at, const std::vector<Message>& sent,
                     const std::vector<Message>& received) = 0;
  virtual void wait() = 0;

  // Of host memory, `bytes` from each rank, to all: [size()][bytes]. Stops until all have come.
  virtual void tell_all(const std::string& at, const void* mine, void* all, std::size_t bytes) = 0;

  // This rank gives up: all others shall end too, and say why.
  virtual void leave(const std::string& why) noexcept = 0;

  // Bytes that begin() was given to send to other ranks, since this was last set.
  std::int64_t bytes_sent = 0;
};

// Another rank ended or did not come. Says which, at which step, and why.
struct RankLost : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// ---- what computes -----------------------------------------------------------------------------

// B x H x N rows of d numbers, in whatever strides.
struct Size {
  std::int64_t B, H, N, d;
};

// Sums are fp32; double for double. On a GPU all pointers but key_lengths are to device memory, and
// work is put on a stream.
template <class T>
class Engine {
 public:
  using Sum = Stat<T>;
  virtual ~Engine() = default;

  // Memory for one call. It stays with the engine, so that a call like the last one allocates
  // nothing, and that what is under way never loses its place.
  void* take(std::size_t bytes);
  void take_back() { taken_ = 0; }
  std::size_t held() const;

  // O and LSE of these queries and these keys alone.
  virtual void forward(const Problem& pair, const Forward<T>& t) = 0;
  // What these queries and these keys give to dQ, dK and dV. O and LSE are those of all keys: with
  // them P_ij and dS_ij are the whole problem's, and nothing else of other keys matters.
  virtual void backward(const Problem& pair, const Backward<T>& t) = 0;

  // O, L: what is merged so far; part: of other keys. merge() below says how.
  virtual void merge(const Size& size, const View<const T>& part_O, const Sum* part_L,
                     const View<Sum>& O, const View<Sum>& L) = 0;
  virtual void fill(Sum* to, std::size_t count, Sum value) = 0;
  virtual void copy(const Size& size, const View<const T>& from, const View<T>& to) = 0;
  virtual void copy_sums(const Size& size, const View<const Sum>& from, const View<Sum>& to) = 0;
  virtual void add(const Size& size, const View<const T>& from, const View<Sum>& to) = 0;
  virtual void add_sums(const Sum* from, Sum* to, std::size_t count) = 0;
  virtual void round(const Size& size, const View<const Sum>& from, const View<T>& to) = 0;

 protected:
  virtual std::shared_ptr<void> allocate(std::size_t bytes) = 0;

 private:
  struct Held {
    std::shared_ptr<void> data;
    std::size_t bytes;
  };
  std::vector<Held> memory_;
  std::size_t taken_ = 0;
};

// One row of d numbers: O and L of all keys seen so far, and those of other keys. L = -infinity: no
// key was seen. In host memory; a GPU's engine has it as a kernel.
template <class Sum, class T>
void merge(const T* part_O, Sum part_L, std::int64_t d, Sum* O, Sum& L);

// ---- the methods -------------------------------------------------------------------------------

enum class Method {
  ring,    // keys travel from rank to rank while the last ones are computed with
  gather,  // every rank gets all keys first
  heads,   // rows are exchanged for heads: each rank has all rows of some heads. At most Hkv ranks
};
const char* name(Method method);

struct Options {
  Method method = Method::ring;
  Order order = Order::zigzag;
  // Ranks tell each other before whether their arguments are right and the same, and after that
  // they have come to the end: then all ranks return, or all throw. Without, a GPU's host never
  // stops; the caller must know that all have called with the same problem.
  bool agree = true;
};

// Every rank calls it at once with the same problem, that of the whole sequence, and its own rows:
// Q and O are [B, Hq, rows_of(Nq), d], K and V [B, Hkv, rows_of(Nk), d], in any strides; LSE is
// [B, Hq, rows_of(Nq)]. p.key_lengths are in host memory. Both alignments, groups, any lengths.
//
// Throws on every rank if one fails: std::invalid_argument for arguments, naming the rank; RankLost
// if a rank ended or did not come. Outputs then hold no result.
template <class T>
void forward(Communicator& comm, Engine<T>& engine, const Problem& p, const Forward<T>& t,
             const Options& options = {});
// O and LSE are what forward() returned. Gradients of keys are added up in a fixed order: bits are
// the same in every run if the engine's are.
template <class T>
void backward(Communicator& comm, Engine<T>& engine, const Problem& p, const Backward<T>& t,
              const Options& options = {});

// ---- what entry.cpp calls, once arguments are right --------------------------------------------

template <class T>
struct Rank {
  Communicator& comm;
  Engine<T>& engine;
  const Problem& p;
  Order order;

  std::vector<Block> query_blocks(int of) const { return blocks_of(p.Nq, comm.size(), of, order); }
  std::vector<Block> key_blocks(int of) const { return blocks_of(p.Nk, comm.size(), of, order); }
  std::int64_t queries(int of) const { return rows_of(p.Nq, comm.size(), of, order); }
  std::int64_t keys(int of) const { return rows_of(p.Nk, comm.size(), of, order); }

  // Memory of the engine for `count` numbers.
  template <class X>
  X* take(std::int64_t count) const {
    return static_cast<X*>(engine.take(static_cast<std::size_t>(count) * sizeof(X)));
  }
};

// f(the piece's Problem, its first query) for all pieces in which a key is seen.
void each_piece(const Problem& p, const std::vector<Block>& queries, const std::vector<Block>& keys,
                const std::function<void(const Problem&, std::int64_t row)>& f);

// The same tensor from this row on.
template <class X>
View<X> from(const View<X>& v, std::int64_t row) {
  return {v.at(0, 0, row), v.batch, v.head, v.row};
}

// O and L of this rank's queries and of all keys that were added.
template <class T>
class MergedForward {
 public:
  using Sum = Stat<T>;
  explicit MergedForward(const Rank<T>& at);
  // The piece's own O and L, merged into those of its queries.
  void add(const Problem& piece, const Forward<T>& t, const View<T>& K, const View<T>& V,
           std::int64_t row) const;
  void give(const Forward<T>& t) const;

 private:
  const Rank<T>& at_;
  const std::int64_t rows_;
  Sum *O_, *L_, *part_L_;
  T* part_O_;
};

// What one piece gives to the gradients of its rows, and where that is before it is added.
template <class T>
class PartOfBackward {
 public:
  using Sum = Stat<T>;
  // For pieces of the queries and keys of any rank, or of all keys.
  PartOfBackward(const Rank<T>& at, std::int64_t most_rows, std::int64_t most_keys);
  void compute(const Problem& pair, const Backward<T>& t, const View<T>& K, const View<T>& V,
               std::int64_t row) const;
  // Of the piece that was computed last.
  void add(const Problem& pair, std::int64_t row, const View<Sum>& dQ, const View<Sum>& dK,
           const View<Sum>& dV) const;

 private:
  const Rank<T>& at_;
  T *dQ_, *dK_, *dV_;
  Sum* L_;
};

template <class T>
void ring_forward(const Rank<T>& at, const Forward<T>& t);
template <class T>
void ring_backward(const Rank<T>& at, const Backward<T>& t);
template <class T>
void gather_forward(const Rank<T>& at, const Forward<T>& t);
template <class T>
void gather_backward(const Rank<T>& at, const Backward<T>& t);
template <class T>
void heads_forward(const Rank<T>& at, const Forward<T>& t);
template <class T>
void heads_backward(const Rank<T>& at, const Backward<T>& t);

}  // namespace fa::ring
