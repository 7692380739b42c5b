#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "dmuon/engine/executor.h"

namespace dmuon::engine {

/// Moves the memory that outlives steps to the host, and back: owned tensors and node copies. Their
/// tensors stay the same, without storage in between; reading or changing one raises (c10::Error).
///
///   Offload offload(&executor);
///   offload.move_out();   // nothing is in flight
///   offload.move_back();  // before the next operation
///
/// A call that throws, as for want of memory, changes nothing, and may be made again.
class Offload {
 public:
  /// @param executor  outlives this.
  explicit Offload(Executor* executor) : executor_(executor) {}

  bool is_out() const { return !moved_.empty(); }
  /// Copies to pinned memory if the device is not the CPU. The host waits for the copies. A no-op
  /// if all is out.
  void move_out();
  /// Allocates on the current stream, and waits likewise. A no-op if nothing is out.
  void move_back();

 private:
  struct Moved {
    at::Tensor tensor;
    std::vector<at::Tensor> on_host;  // flat pieces
  };

  Executor* executor_;
  std::vector<Moved> moved_;
};

}  // namespace dmuon::engine
