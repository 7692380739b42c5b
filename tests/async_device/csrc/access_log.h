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

/// Who touched which bytes of a block, as far as a later access could still race with it.
class AccessLog {
 public:
  /// Adds an access of a stream; one of the host is only checked, for the host has then waited.
  /// @param known  what has happened before `access`.
  /// @return       an earlier access that conflicts with it and is not among what is known.
  std::optional<Access> add(const Access& access, const VectorClock& known);

  /// The same without adding it.
  std::optional<Access> conflict(const Access& access, const VectorClock& known) const;

 private:
  std::vector<Access> accesses_;
};

/// The report of a race in one sentence.
std::string describe_race(const Access& earlier, const Access& later, int64_t block_bytes);

}  // namespace async_device
