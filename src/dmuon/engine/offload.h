#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "dmuon/engine/executor.h"

namespace dmuon::engine {

/// Moves the memory that outlives steps to the host, and back: owned tensors and node copies. Their
/// tensors stay the same, without storage in between.
///
///   Offload offload(&executor);
///   offload.move_out();   // nothing is in flight
///   offload.move_back();  // before the next operation
class Offload {
 public:
  /// @param executor  outlives this.
  explicit Offload(Executor* executor) : executor_(executor) {}

  bool is_out() const { return is_out_; }
  /// Copies to pinned memory if the device is not the CPU. The host waits for the copies.
  void move_out();
  /// Allocates on the current stream, and waits likewise.
  void move_back();

 private:
  Executor* executor_;
  bool is_out_ = false;
  std::vector<at::Tensor> saved_;  // on the host, in the order of the executor's lasting tensors
};

}  // namespace dmuon::engine
