// Ranks that have a GPU each: NCCL carries what is in their memory, over NVLink where there is one.
// NCCL is found when the program runs. Nothing of it is needed to build the course, and a machine
// with one GPU does not need it at all.
#pragma once
#include <cuda_runtime.h>

#include <memory>
#include <string>
#include <vector>

#include "06_optimized/ring/processes.hpp"

namespace fa::ring {

// What went on between a begin() and its wait(), in milliseconds since record() was called.
struct Span {
  std::string at;
  float compute_from, compute_to;  // on the engine's stream
  float copy_from, copy_to;        // on the communicator's
};

// Messages have a stream of their own. begin() puts them there behind all work that is on the
// engine's stream by now; wait() makes what is put on the engine's stream from now on wait for
// them. So the host is not stopped, and copies run beside what is computed in between.
class NcclCommunicator : public Communicator {
 public:
  // Waits on the host until all work on the engine's stream is done, in short looks: if a rank is
  // lost meanwhile, throws RankLost. A plain cudaStreamSynchronize would wait for ever for a
  // message that never comes.
  virtual void finish(const std::string& at) = 0;

  // Notes the time of all messages from now on, or no longer.
  virtual void record(bool on) = 0;
  virtual std::vector<Span> spans() = 0;

  virtual std::string version() const = 0;  // "2.27.5 from /usr/lib/libnccl.so.2"
};

// For the GPU that is current now. All ranks of the assembly call it at once. NCCL is the file that
// $FA_NCCL names; else what the system's loader finds; else the one that came with a Python's
// PyTorch. Throws std::runtime_error, which says where it was looked for, if there is none.
std::unique_ptr<NcclCommunicator> over_nccl(Assembly& assembly, cudaStream_t engine);

}  // namespace fa::ring
