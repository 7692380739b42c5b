#pragma once

#include <map>
#include <string>
#include <vector>

#include "tests/kernels/cuda/emulator/emulator.h"

namespace dmuon::kernels::cuda::fake {

/// A kernel's source, compiled for the host.
struct HostKernel {
  std::size_t parameter_bytes;
  void (*block_thread)(const void* parameters);
  /// The memory that a launch touches. Read when the kernel runs, because it may depend on memory.
  /// `grid_y` is the batch; `to_host` is added to an address of the device to read it.
  std::vector<emulator::Buffer> (*buffers)(const void* parameters, unsigned grid_y,
                                           std::ptrdiff_t to_host);
};

/// By the name in the cubin. Sums of floats are compiled as in the cubin: without contraction.
const std::map<std::string, HostKernel>& kernels();

}  // namespace dmuon::kernels::cuda::fake
