// The x-ray's heat map of a block, as SVG: what its warps read, how often, and when.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace fa::xray {

// How often a number was read, on average over some rows, in one of the block's intervals.
struct Heat {
  double global = 0, shared = 0;
};

// Rows of a tensor, or numbers that the block has computed.
struct Panel {
  std::string name, first, last;  // of the rows
  // By warp, band of rows (all of equal height) and interval from one __syncthreads to the next.
  std::vector<std::vector<std::vector<Heat>>> heat;
};

struct KernelMap {
  std::string title;
  std::vector<Panel> panels;
};

// One above the other; without kernels that read nothing.
std::string svg(std::vector<KernelMap> kernels);

}  // namespace fa::xray
