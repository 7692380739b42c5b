#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <string>
#include <vector>

namespace async_device {

/// The facts of an operator's schema that the device needs.
struct OperatorFacts {
  struct Argument {
    bool is_written;
    bool is_out;
    bool is_generator;
  };
  static constexpr int kFresh = -1;

  const std::string* name;  // interned
  std::vector<Argument> arguments;
  std::vector<int> returned;     // for each result the argument that it is, or kFresh
  bool has_out = false;          // an argument is_out
  bool has_fresh = false;        // a result is a new tensor
  bool is_view = false;          // results share the storage of the first argument
  bool needs_values = false;     // its results' shapes, or its results themselves, are the host's
  bool blocks_gpu_host = false;  // ... also on a GPU
};

/// Returns the facts of one schema; the reference is valid for ever. Safe from any thread.
const OperatorFacts& facts_of(const c10::OperatorHandle& handle);

}  // namespace async_device
