#pragma once

#include <cstddef>
#include <vector>

#include "tests/kernels/cuda/emulator/shared_memory.h"

namespace dmuon::kernels::cuda::emulator {

inline constexpr std::size_t kCopiedBytes = 16;  ///< what a copy writes

/// A thread's asynchronous copies to shared memory, in groups that end in their order.
class Copies {
 public:
  /// Begins a copy of `bytes` bytes at the host's `source`, and of zeros up to 16.
  void start(int word, const char* source, std::size_t bytes, SharedMemory& shared, const Now& now,
             Site site);
  void commit() { ++groups_; }
  /// Ends the copies of all groups but the last `pending`.
  void wait(int pending, SharedMemory& shared, const Now& now);
  bool empty() const { return all_.empty(); }

 private:
  struct Copy {
    int word;
    const char* source;
    std::size_t bytes;
    int group;
  };
  std::vector<Copy> all_;  // in flight, in their order
  int groups_ = 0;         // that were committed
};

}  // namespace dmuon::kernels::cuda::emulator
