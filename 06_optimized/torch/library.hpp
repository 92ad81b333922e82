// The stages' kernels as C functions, which Python calls by ctypes: one flat struct, no PyTorch at
// build time. A call is a prefix that depends on shapes, strides and choices alone, which a caller
// makes once and keeps, and the pointers behind it.
#pragma once
#include <cstdint>

extern "C" {

// Strides of a tensor [B, H, N, d] in elements; the last is 1.
struct fa_torch_strides {
  std::int64_t batch, head, row;
};

struct fa_torch_call {
  std::int64_t B, Hq, Hkv, Nq, Nk, d;
  std::int64_t causal;  // 0 none, 1 top_left, 2 bottom_right
  double scale;
  std::int64_t dtype;          // of the tensors: 0 float, 1 half, 2 bfloat16, 3 double
  std::int64_t device;         // -1: the CPU, else a GPU's number
  std::int64_t stage, kernel;  // as fa_torch_kernels() lists them
  std::int64_t deterministic;  // the backward gives the same bits in every run, or refuses
  // What walks take: row i sees keys i + shift - left to i + shift + right (-1: no limit), where
  // shift is Nk - Nq at the bottom right, else 0; and the share of weights that is dropped.
  std::int64_t window_left, window_right;
  double dropout;
  std::int64_t scratch_bytes;
  fa_torch_strides Q, K, V, O, dO, dQ, dK, dV;
  struct {
    std::int64_t threads;  // on the CPU; 0: all cores
    void *stream, *scratch;
    void* key_lengths;  // [B] of 64 bits, or null
    void* seed;         // of a dropout: seed and offset, of 64 bits; read when the kernel runs
    void *LSE, *Q, *K, *V, *O, *dO, *dQ, *dK, *dV;
  } at;
};

// One to eight new tokens of each sequence against all that it has had, which lie in pages. Of the
// call K and V are the pages, [pages, Hkv, page_size, d], key_lengths are lengths with the new
// tokens, and Nk is the largest of them; the new ones are put into their pages.
struct fa_torch_decode_call {
  fa_torch_call call;
  std::int64_t page_size, pages, table_stride;
  fa_torch_strides new_K, new_V;
  struct {
    void *table, *new_K, *new_V;  // table: [B, table_stride] of 32 bits
  } at;
};

// Of fa_torch_call and fa_torch_decode_call; who lays them out otherwise is of another version.
std::int64_t fa_torch_call_bytes();
std::int64_t fa_torch_decode_call_bytes();
// One line for each kernel: "forward 06.fa2 6 6 cuda half,bfloat16", which is way (or backward, or
// decode), name, stage, kernel, where its tensors are, and their types.
const char* fa_torch_kernels();
// Where the course is that this was built from, and the stage that it was built for alone, or "".
const char* fa_torch_source();
const char* fa_torch_mine();

// All of them return 0; or 1 for an argument that the kernel cannot take, 2 for what went wrong
// while it ran: then fa_torch_error() says what, until this thread's next call.
const char* fa_torch_error();
int fa_torch_forward(const fa_torch_call* call);   // writes O and LSE
int fa_torch_backward(const fa_torch_call* call);  // reads O, LSE, dO; writes dQ, dK, dV
// Can it, and with how much scratch? `call` is complete but for the scratch.
int fa_torch_forward_needs(const fa_torch_call* call, std::int64_t* bytes);
int fa_torch_backward_needs(const fa_torch_call* call, std::int64_t* bytes);
int fa_torch_decode(const fa_torch_decode_call* call);
int fa_torch_decode_needs(const fa_torch_decode_call* call, std::int64_t* bytes);
}
