#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "tests/kernels/cuda/emulator/emulator.h"

namespace dmuon::kernels::cuda::fake {

/// A kernel's source, compiled for the host.
struct HostKernel {
  std::size_t parameter_bytes;
  void (*block_thread)(const void* parameters);
  /// The memory that a launch touches, which may depend on memory. `grid_y` is the batch.
  /// @param to_host  is added to an address of the device to read it, when the kernel's turn has
  ///                 come. Without it nothing is read: the answer is all that the launch may touch.
  std::vector<emulator::Buffer> (*buffers)(const void* parameters, unsigned grid_y,
                                           std::optional<std::ptrdiff_t> to_host);
};

/// By the name in the cubin. Sums of floats are compiled as in the cubin: without contraction.
const std::map<std::string, HostKernel>& kernels();

}  // namespace dmuon::kernels::cuda::fake
