#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "async_device/csrc/operator_facts.h"
#include "async_device/csrc/stack.h"

namespace async_device {

/// An operator's results, as tensors of the meta device.
struct Inferred {
  bool is_known = false;  // false: there is no kernel for the meta device
  Stack results;
  std::vector<std::pair<size_t, at::Tensor>> outs;  // by the number of the argument
};

/// Runs the operator on the meta device, or finds its earlier results for arguments with the same
/// geometry and values. Safe from any thread.
/// @throws the operator's own error for bad arguments.
std::shared_ptr<const Inferred> infer_shapes(const c10::OperatorHandle& handle,
                                             const OperatorFacts& facts, const Stack& arguments);

/// Enables the cache of shapes; disable it to measure the cache's gain.
void keep_shapes(bool keep);

}  // namespace async_device
