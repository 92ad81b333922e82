// Where a figure comes from: recorded with every measurement.
#pragma once
#include <string>

namespace fa::bench {

std::string cpu_model();     // "AMD EPYC", or "unknown CPU"
std::string isa();           // what this program was compiled for: "avx512", "avx2", "neon" ...
std::string machine_name();  // names the results file: "amd-epyc-avx512-2c"
int cores();                 // that this process may use, pinned or not
std::string load_average();  // of the last minute, "0.42"; empty where the system does not say
std::string commit();        // of the source tree, with "-dirty" if it has changes

// How many of those cores others keep busy, watched while this thread sleeps. The load of the last
// minute would count what we ourselves have built and tested.
double busy_cores(double seconds = 0.25);

// Why shares of the peak may be wrong: others kept so many of the cores busy, or the row `highest`
// reached an impossible share. Empty if nothing speaks against them.
std::string busy_machine(double busy, int cores, double share, const std::string& highest);

}  // namespace fa::bench
