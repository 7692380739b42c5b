#pragma once

#include <optional>
#include <string>
#include <vector>

#include "async_device/csrc/label.h"
#include "async_device/csrc/region.h"
#include "async_device/csrc/vector_clock.h"

namespace async_device {

/// An operation's use of bytes of one block.
struct Access {
  Region region{};
  bool write = false;
  int stream = 0;     // -1: the host
  uint64_t time = 0;  // of the stream's entry
  Label label{};
};

/// The accesses to a block, by bytes, that a later access could still race with.
class AccessLog {
 public:
  /// Adds an access of a stream. Checks one of the host without adding it: the host has waited.
  /// @param known  the entries that happened before `access`.
  /// @return       an earlier access that conflicts with `access` and is not in `known`.
  std::optional<Access> add(const Access& access, const VectorClock& known);

  /// Checks an access without adding it.
  std::optional<Access> conflict(const Access& access, const VectorClock& known) const;

 private:
  std::vector<Access> accesses_;
};

/// Reports a race in one sentence.
std::string describe_race(const Access& earlier, const Access& later, int64_t block_bytes);

}  // namespace async_device
