#include "async_device/csrc/vector_clock.h"

#include <algorithm>

namespace async_device {

void VectorClock::join(const VectorClock& other) {
  if (entries_.size() < other.entries_.size()) entries_.resize(other.entries_.size());
  for (size_t i = 0; i < other.entries_.size(); ++i) {
    entries_[i] = std::max(entries_[i], other.entries_[i]);
  }
}

uint64_t VectorClock::advance(int stream) {
  const auto index = static_cast<size_t>(stream);
  if (entries_.size() <= index) entries_.resize(index + 1);
  return ++entries_[index];
}

}  // namespace async_device
