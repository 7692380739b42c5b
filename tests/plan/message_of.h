#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
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

/// The number behind "must be >= ", of an error about memory.
inline std::int64_t least_named_in(const std::string& message) {
  const std::string before = "plan: max_memory_bytes must be >= ";
  EXPECT_EQ(message.rfind(before, 0), 0U) << message;
  return message.size() > before.size() ? std::atoll(message.c_str() + before.size()) : 0;
}

}  // namespace dmuon::plan
