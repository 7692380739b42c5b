#pragma once

#include <functional>
#include <string>

#include "tests/kernels/cuda/emulator/emulator.h"
#include "tests/kernels/cuda/emulator/order.h"

namespace dmuon::kernels::cuda::emulator {

/// Where errors go.
struct Report {
  /// Reports an error at a place in the device code.
  std::function<void(Site site, const std::string& what)> error;
  /// Returns the name of a thread of the running or an earlier cluster, for an error.
  std::function<std::string(const Moment& moment)> name;

  std::string who(const Moment& moment, int line) const {
    return name(moment) + " at line " + std::to_string(line);
  }
};

}  // namespace dmuon::kernels::cuda::emulator
