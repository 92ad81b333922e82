// Where a figure comes from: recorded with every measurement.
#pragma once
#include <string>

namespace fa::bench {

std::string cpu_model();     // "AMD EPYC", or "unknown CPU"
std::string isa();           // what this program was compiled for: "avx512", "avx2", "neon" ...
std::string machine_name();  // names the results file: "amd-epyc-avx512-2c"
int cores();                 // that this process may use
std::string commit();        // of the source tree, with "-dirty" if it has changes

}  // namespace fa::bench
