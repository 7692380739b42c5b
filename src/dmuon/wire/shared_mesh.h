#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <chrono>
#include <cstddef>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

#include "dmuon/core/index.h"
#include "dmuon/layout/mesh.h"
#include "dmuon/watch/watch.h"
#include "dmuon/wire/group.h"
#include "dmuon/wire/lane.h"

namespace dmuon::wire {

/// Whose operations may be issued, of those who share a mesh's groups: one order holds over all.
class Turn {
 public:
  /// Ends what the holder before has left open; nothing for the holder itself.
  /// @param holder      tells it from others.
  /// @param issue_rest  called where another takes the turn, unless given up before.
  void take(const void* holder, std::function<void()> issue_rest);

  /// What the holder has left open is nobody's any more. Nothing where another has the turn.
  void give_up(const void* holder);

  /// The holder's last owner, until another takes the turn. Nothing where another has it.
  void keep(const void* holder, std::shared_ptr<void> last);

 private:
  const void* holder_ = nullptr;
  std::function<void()> issue_rest_;
  std::shared_ptr<void> kept_;
};

/// What a rank has given to a device's lanes, oldest first. Thread-safe.
class OnDevice {
 public:
  void add(watch::Stuck operation, Event done, c10::Device device);

  /// The oldest of which the host does not know that it has happened; the others are forgotten.
  std::optional<watch::Stuck> oldest();

 private:
  // A host that runs further ahead than this is not looked after that far.
  static constexpr std::size_t kMost = 4096;

  std::mutex mutex_;
  std::deque<std::pair<watch::Stuck, Event>> operations_;
  std::optional<c10::Device> device_;
};

/// What all models on a mesh of R replicates (nodes) x G shards share: process groups that are
/// private to dmuon, the lanes on which they are used, and the turn. One total order over all
/// groups holds on every rank. Copies share all of it, and each counts its own traffic.
/// Not thread-safe.
struct SharedMesh {
  layout::PerAxis<Group> along;  ///< this rank's row and column; they carry weights and gradients
  Group order;                   ///< all; compares triggers that no trace confirms. Host memory.
  Group verdict;                 ///< all; the agreement of a step. Host memory.
  std::shared_ptr<Lanes> lanes = std::make_shared<Lanes>();
  std::shared_ptr<Turn> turn = std::make_shared<Turn>();
  std::shared_ptr<OnDevice> on_device = std::make_shared<OnDevice>();
  std::shared_ptr<watch::Watch> watch = watch_over();
  pid_t process = getpid();  ///< that made it

  Group& row() { return along[layout::Axis::kRow]; }
  Group& column() { return along[layout::Axis::kColumn]; }

  layout::Mesh shape() const {
    return {along[layout::Axis::kColumn].size(), along[layout::Axis::kRow].size()};
  }
  bool has_inter() const { return shape().has_inter(); }

  // This rank's place.
  core::Shard shard() const { return core::Shard(along[layout::Axis::kRow].rank()); }
  core::Slot slot() const {
    return shape().slot_at(core::Replicate(along[layout::Axis::kColumn].rank()), shard());
  }

  /// For a process that ends: what has not happened within `grace` is given up, so that a rank that
  /// failed leaves, and its peers hear of it, before any timeout. Nothing in a forked child.
  void leave(std::chrono::milliseconds grace);

 private:
  std::shared_ptr<watch::Watch> watch_over();
};

}  // namespace dmuon::wire
