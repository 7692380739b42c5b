#pragma once

#include <functional>
#include <string>

#include "dmuon/core/error.h"

namespace dmuon::plan {

/// What an InvalidArgument says; empty if none is thrown.
inline std::string message_of(const std::function<void()>& act) {
  try {
    act();
  } catch (const core::InvalidArgument& error) {
    return error.what();
  }
  return {};
}

}  // namespace dmuon::plan
