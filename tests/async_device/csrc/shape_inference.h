#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "async_device/csrc/operator_facts.h"
#include "async_device/csrc/stack.h"

namespace async_device {

/// What an operator's results look like, as tensors of the meta device.
struct Inferred {
  bool is_known = false;  // false: there is no kernel for the meta device
  Stack results;
  std::vector<std::pair<size_t, at::Tensor>> outs;  // by the number of the argument
};

/// Runs the operator on the meta device, or finds what came of it for arguments with the same
/// geometry and values. Safe from any thread.
/// @throws what the operator throws for bad arguments.
std::shared_ptr<const Inferred> infer_shapes(const c10::OperatorHandle& handle,
                                             const OperatorFacts& facts, const Stack& arguments);

/// Whether shapes are kept; for measuring what that saves.
void keep_shapes(bool keep);

}  // namespace async_device
