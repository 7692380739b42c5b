#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace async_device {

/// The entries known to have happened: their number for each stream.
class VectorClock {
 public:
  /// The last entry of this stream that is known to have happened; 0 if none is.
  uint64_t at(int stream) const {
    const auto index = static_cast<size_t>(stream);
    return index < entries_.size() ? entries_[index] : 0;
  }

  /// Adds the knowledge of `other`.
  void join(const VectorClock& other);

  /// Counts one more entry of this stream, and returns its number.
  uint64_t advance(int stream);

 private:
  std::vector<uint64_t> entries_;
};

}  // namespace async_device
