#pragma once

#include <map>
#include <string>
#include <vector>

// Reads what the driver reads of a fat binary: its kernels, and their needs.
namespace dmuon::kernels::cuda::fake {

struct CubinKernel {
  int registers = 0;       ///< a thread's
  int max_threads = 1024;  ///< from __launch_bounds__
  int cluster = 1;         ///< blocks along x, from __cluster_dims__
  std::vector<int> parameter_bytes;
};

struct Cubin {
  int architecture = 0;  ///< such as 80
  std::map<std::string, CubinKernel> kernels;
};

/// Returns the cubins of an uncompressed fat binary; none if it is no fat binary.
std::vector<Cubin> read(const void* fat_binary);

}  // namespace dmuon::kernels::cuda::fake
