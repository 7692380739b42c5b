#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <vector>

// What is known to have happened before what.
//
// A thread's time grows with each of its barriers, arrivals and fences. A thread that waits for
// others learns their times, and what they knew (vector clocks). Copies of tiles and
// multiplications of warpgroups are threads too, which run beside those of the blocks.
//
// Between clusters: a thread writes, fences, and increments an atomic word (release); a thread of
// another cluster increments the word later, and fences (acquire). A block without a cluster is
// one of its own.
namespace dmuon::kernels::cuda::emulator {

/// A thread's place in time.
struct Moment {
  int cluster = -1;  ///< -1: never
  int thread = 0;    ///< of the cluster
  std::uint32_t time = 0;
};

/// The last time that is known of each thread of a cluster; 0: none. Threads that have met at a
/// barrier share it.
using Known = std::shared_ptr<const std::vector<std::uint32_t>>;

/// Returns what both know. They may be null.
Known joined(const Known& a, const Known& b);
/// Returns `known` and a thread's time.
Known joined(const Known& known, int thread, std::uint32_t time);

/// Joins, and remembers the last pair: threads of a block often join the same two.
class Joiner {
 public:
  Known operator()(const Known& a, const Known& b);

 private:
  Known a_, b_, both_;
};

/// What threads of other clusters have released, by cluster.
class Released {
 public:
  void add(int cluster, const Known& known);
  void add(const Released& other);
  bool covers(const Moment& then) const;
  bool empty() const { return by_cluster_.empty(); }

 private:
  std::map<int, Known> by_cluster_;
};

class Acquired;

/// The moment of a running thread, and what it knows.
struct Now {
  Moment moment;
  const Known* known;
  const Acquired* acquired;

  /// True if `then` has happened before.
  bool knows(const Moment& then) const;
};

/// What the threads of the running cluster have acquired.
class Acquired {
 public:
  void add(const Released& released, const Moment& by) { all_.push_back({released, by}); }
  bool covers(const Moment& then, const Now& now) const;
  /// All that `now` knows of.
  Released known(const Now& now) const;
  void clear() { all_.clear(); }

 private:
  struct One {
    Released released;
    Moment by;
  };
  std::vector<One> all_;
};

/// Who has read a cell since it was written. Readers of one cluster are remembered together.
class Reads {
 public:
  void note(const Moment& reader, const Now& now);
  /// A reader that `now` knows nothing of.
  std::optional<Moment> unknown(const Now& now) const;
  void clear() { *this = {}; }

 private:
  Moment few_[2];
  std::unique_ptr<std::vector<std::uint32_t>> many_;  // the readers' times, by thread
};

}  // namespace dmuon::kernels::cuda::emulator
