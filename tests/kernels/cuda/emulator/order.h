#pragma once

#include <cstdint>
#include <map>
#include <vector>

// What is known to have happened before what.
//
// Inside a block only barriers order threads, and each passes all threads. So of two moments the
// one of the lower epoch came first, where the epoch counts the barriers that a thread has passed.
//
// Between blocks: a thread writes, fences, and increments an atomic word (release); a thread of
// another block increments the word later, and fences (acquire). A fence also covers what threads
// of its block did before the last barrier.
namespace dmuon::kernels::cuda::emulator {

/// A thread's place in time.
struct Moment {
  int block = -1;
  int thread = 0;
  std::uint32_t epoch = 0;
  std::uint32_t fences = 0;  ///< fences that the thread has passed

  bool operator==(const Moment&) const = default;
};

/// True if the two, of one block, are ordered: `then` came first.
inline bool precedes(const Moment& then, const Moment& now) {
  return then.thread == now.thread || then.epoch < now.epoch;
}

/// True if a fence right after the moment `fence` covers what happened at `then`.
inline bool covers(const Moment& fence, const Moment& then) {
  if (fence.thread == then.thread) return then.fences <= fence.fences;
  return then.epoch < fence.epoch;
}

/// Fences of other blocks, by block.
class Released {
 public:
  void add(const Moment& fence);
  void add(const Released& other);
  bool covers(const Moment& then) const;
  bool empty() const { return by_block_.empty(); }

 private:
  std::map<int, std::vector<Moment>> by_block_;
};

/// What the threads of the running block have acquired.
class Acquired {
 public:
  void add(const Released& released, const Moment& by) { all_.push_back({released, by}); }
  bool covers(const Moment& then, const Moment& now) const;
  /// All that `now` knows of.
  Released known(const Moment& now) const;
  void clear() { all_.clear(); }

 private:
  struct One {
    Released released;
    Moment by;
  };
  std::vector<One> all_;
};

}  // namespace dmuon::kernels::cuda::emulator
