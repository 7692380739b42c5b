#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "dmuon/core/error.h"
#include "dmuon/core/index.h"
#include "dmuon/layout/mesh.h"
#include "dmuon/watch/watch.h"
#include "dmuon/wire/group.h"
#include "dmuon/wire/host_words.h"
#include "dmuon/wire/lane.h"

namespace dmuon::wire {

/// Decides which of the models on a mesh may issue operations, so that one order holds over all.
///
///   turn.take(this, [this] { issue_rest(); });  // before the first operation of a pass
class Turn {
 public:
  /// Takes the turn. The previous holder issues the rest first. The holder itself may call it too.
  /// @param holder      the caller's identity.
  /// @param issue_rest  called when another takes the turn, unless the turn was given up before.
  void take(const void* holder, std::function<void()> issue_rest);

  /// Gives the turn up: nobody issues the holder's rest. A no-op if another has the turn.
  void give_up(const void* holder);

  /// Keeps the holder alive until another takes the turn. A no-op if another has the turn.
  void keep(const void* holder, std::shared_ptr<void> last);

  /// Frees what is kept: nobody will take the turn.
  void release();

  /// Nobody issues operations any more, because ranks may have issued different ones. From now on
  /// take() and require() throw InvalidArgument with these words.
  void end(std::string why) { over_ = std::move(why); }
  void require() const { core::require(over_.empty(), over_); }
  /// Empty before end().
  const std::string& why_over() const { return over_; }

 private:
  const void* holder_ = nullptr;
  std::function<void()> issue_rest_;
  std::shared_ptr<void> kept_;
  std::string over_;
};

/// Numbers the models on a mesh in the order in which they are made, which is the same on all
/// ranks. So ranks can find out that they use different ones. One thread at a time, as for
/// SharedMesh.
struct Models {
  int num_made = 0;
  int most_parameters = 0;  ///< of one model
  int most_maxima = 0;      ///< of one model, see Engine::set_num_maxima

  /// Adds a model. Returns its number, from 1.
  int add(int num_parameters) {
    most_parameters = std::max(most_parameters, num_parameters);
    return ++num_made;
  }
};

/// The operations that a rank has issued to a device's lanes, oldest first. Thread-safe.
class OnDevice {
 public:
  void add(watch::Stuck operation, Event done, c10::Device device);

  /// Returns the oldest operation that may not have happened yet. Forgets the ones before.
  std::optional<watch::Stuck> oldest();

 private:
  // Operations that the watch knows; a host that runs further ahead loses the oldest ones.
  static constexpr std::size_t kMost = 4096;

  std::mutex mutex_;
  std::deque<std::pair<watch::Stuck, Event>> operations_;
  std::optional<c10::Device> device_;
};

/// Groups in which the engine sends nothing, and the host may wait: the mesh's own, which FSDP2
/// uses, those of tensor parallelism, of AdamW's gradients and of buffers. Thread-safe.
class OtherGroups {
 public:
  void add(Group group);
  std::vector<Group> all() const;

 private:
  mutable std::mutex mutex_;
  std::vector<Group> groups_;
};

/// This rank's tensor-parallel group: the ranks that have the other slices of its parameters.
struct TensorParallel {
  Group slices;  ///< carries slices of directions and updates
  Group host;    ///< the same ranks; carries words in host memory
};

/// The process groups, private to dmuon, of a mesh of R replicates (nodes) x G shards, with the
/// lanes on which they are used and the turn. With tensor parallelism each rank of a slot has a row
/// and a column of its own.
///
///   SharedMesh mesh{{row, column}, {host_row, host_column}, everyone};
///   mesh.row().broadcast(tensor, root, "x").wait();
///
/// All models on the mesh share them, so one total order over all groups holds on every rank.
/// Copies share everything, but each counts its own traffic. Not thread-safe.
struct SharedMesh {
  layout::PerAxis<Group> along;  ///< this rank's row and column; they carry weights and gradients
  layout::PerAxis<Group> host;   ///< the same ranks; they carry words in host memory
  Group everyone;                ///< all, in host memory; the watch uses its store
  /// If the host waits outside of dmuon in vain, or its device too long, these are given up too.
  std::shared_ptr<OtherGroups> others = std::make_shared<OtherGroups>();
  std::optional<TensorParallel> tensor_parallel = {};
  std::shared_ptr<Lanes> lanes = std::make_shared<Lanes>();
  std::shared_ptr<Turn> turn = std::make_shared<Turn>();
  std::shared_ptr<Models> models = std::make_shared<Models>();
  std::shared_ptr<OnDevice> on_device = std::make_shared<OnDevice>();
  std::shared_ptr<watch::Watch> watch = watch_over();
  HostWords words = {groups_of_words(), watch};  ///< what all ranks compare and agree on
  pid_t process = getpid();                      ///< the process that made the mesh

  Group& row() { return along[layout::Axis::kRow]; }
  Group& column() { return along[layout::Axis::kColumn]; }

  layout::Mesh shape() const {
    return {along[layout::Axis::kColumn].size(), along[layout::Axis::kRow].size(),
            tensor_parallel ? tensor_parallel->slices.size() : 1};
  }
  bool has_inter() const { return shape().has_inter(); }

  // This rank's place. `tensor_rank` counts the ranks of its tensor-parallel group.
  int tensor_rank() const { return tensor_parallel ? tensor_parallel->slices.rank() : 0; }
  core::Shard shard() const { return core::Shard(along[layout::Axis::kRow].rank()); }
  core::Slot slot() const {
    return shape().slot_at(core::Replicate(along[layout::Axis::kColumn].rank()), shard());
  }

  /// Call this when ranks may have issued different operations, on all ranks. Ends the turn. On
  /// CPUs it gives up what is in flight, which a peer may never issue; a device would fail with it.
  void end(const std::string& why);

  /// Why no call of a model on the mesh may go on; empty if all may.
  std::string failure() const;

  /// Call this when the process ends. Gives operations up that have not happened within `grace`. So
  /// a rank that failed ends, and its peers raise, before any timeout. A no-op in a forked child.
  /// @returns  an error of a late update that no call has raised; else empty.
  std::string leave(std::chrono::milliseconds grace);

 private:
  std::shared_ptr<watch::Watch> watch_over();
  std::vector<Group> groups_of_words() const;
  void give_up_lanes(const std::string& why);
};

}  // namespace dmuon::wire
