#pragma once

#include <ATen/core/Tensor.h>
#include <sys/types.h>

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "dmuon/engine/buffer.h"
#include "dmuon/engine/group.h"
#include "dmuon/engine/lane.h"
#include "dmuon/engine/owned_batch.h"
#include "dmuon/engine/packing.h"
#include "dmuon/engine/profile.h"
#include "dmuon/engine/unit.h"
#include "dmuon/schedule/step_schedule.h"

namespace dmuon::engine {

/// What is the same for every unit. The mesh is R x G: R replicates (nodes) of G shards.
struct Options {
  int num_replicates = 1;
  int num_shards = 1;
  int replicate = 0;  ///< this rank's
  int shard = 0;      ///< this rank's: its column
  c10::Device device = c10::kCPU;
  /// Of the parameters that stay with the host framework; it has slots / host_replicates shards.
  int host_replicates = 1;
  bool reshard_after_forward = true;  ///< free weights between a unit's forward and its backward
  schedule::Options schedule;

  int slot() const { return replicate * num_shards + shard; }
};

/// The process groups of a mesh, private to dmuon. One total order over all of them holds on every
/// rank.
struct Groups {
  Group row;      ///< the ranks of this node; members by shard index
  Group column;   ///< the ranks of this shard index; members by replicate index
  Group order;    ///< all; compares triggers that no trace confirms. Host memory.
  Group verdict;  ///< all; the agreement of a step. Host memory.
  /// Whose pass is open: engines on one mesh share their groups, hence one order. Copies share it.
  std::shared_ptr<class Engine*> turn = std::make_shared<class Engine*>(nullptr);
  std::shared_ptr<Lanes> lanes = std::make_shared<Lanes>();

  /// For a process that ends: what has not happened within `grace` is given up, so that a rank that
  /// failed leaves, and its peers hear of it, before any timeout.
  void leave(std::chrono::milliseconds grace);
};

struct UnitSpec {
  std::string name;
  std::vector<int> matrices;  ///< ascending
  at::ScalarType compute_dtype;
  at::ScalarType reduce_dtype;
};

/// Where a matrix lies in this rank's batches; batch -1 at ranks that do not own it.
struct Place {
  int batch = -1;
  std::size_t index = 0;
};

/// Performs operations on real tensors and groups: moves weights from owners' batches to units'
/// packed buffers, and gradients back. It knows no trigger, no order and no history: it does each
/// operation that it is told, and a schedule::Resolver tells it those that make sense, in the same
/// order on every rank.
///
/// Streams: operations of the compute lane are the current stream's; those of the other lanes run
/// beside it, see Lane. Threads: one at a time. All memory is taken and given back by the calling
/// thread, so that it is the same in every run.
/// Errors: CommError when a peer is lost, at the first operation that waits for it; then no more
/// operation runs.
class Executor {
 public:
  Executor(Options options, Groups groups, std::vector<MatrixSpec> specs,
           const std::vector<UnitSpec>& units, const std::vector<std::vector<int>>& batches);
  ~Executor();
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  /// @param update  called for kUpdate with the index of the batch.
  void perform(const schedule::Operation& operation,
               const std::function<void(int)>& update = nullptr);

  /// Waits for everything: nothing is in flight afterwards.
  void drain();

  Unit& unit(int index) { return *states_.at(core::UnitIndex(index)).unit; }
  int num_units() const { return states_.size(); }
  std::vector<OwnedBatch>& batches() { return batches_; }
  Place place(int matrix) const { return places_.at(static_cast<std::size_t>(matrix)); }
  const std::vector<MatrixSpec>& specs() const { return specs_; }
  const Options& options() const { return options_; }
  Groups& groups() { return groups_; }
  BufferPool& pool() { return *pool_; }
  schedule::Layout layout() const;
  Profile& profile() { return profile_; }

  schedule::Batches units_of_batches() const;

  bool has_gradient(int matrix) const { return has_gradient_[static_cast<std::size_t>(matrix)]; }
  void clear_gradient(int matrix);

  std::map<std::string, double> statistics() const;

 private:
  struct UnitState {
    std::unique_ptr<Unit> unit;
    std::unique_ptr<PackedBuffer> node_copy;  // null where there is none
    std::unique_ptr<PackedBuffer> inbox;      // of the route that is in flight
    std::unique_ptr<PackedBuffer> partial;    // fp32 [own segment] what no_sync kept; else null
    std::vector<bool> partial_filled;         // [matrices, in packed order]
    std::array<Event, schedule::kNumKinds> done;  // the newest of each kind
  };

  bool is_owner(int matrix) const {
    return specs_[static_cast<std::size_t>(matrix)].owner == options_.slot();
  }
  bool has_inter() const { return options_.num_replicates > 1; }
  const Segment& own_column(const UnitState& state) const {
    return state.unit->packing().columns[static_cast<std::size_t>(options_.shard)];
  }
  std::vector<Segment> own_parts(const UnitState& state) const;

  const Event& newest(const schedule::Dependency& dependency) const {
    return states_[dependency.unit].done[static_cast<std::size_t>(dependency.kind)];
  }
  void enqueue(const schedule::Operation& operation, std::function<void()> work);
  void await(const schedule::Operation& operation);

  // publish.cpp
  void publish_inter(UnitState& state, const schedule::Operation& operation);
  void publish_intra(UnitState& state, const schedule::Operation& operation);
  void reshard(UnitState& state, const schedule::Operation& operation);
  void write_owned(const Unit& unit, const at::Tensor& target, std::int64_t origin);
  // route.cpp
  void route_intra(UnitState& state, const schedule::Operation& operation);
  void route_inter(UnitState& state, const schedule::Operation& operation);
  void finish_route(UnitState& state, const schedule::Operation& operation);
  void take_node_mean(UnitState& state, std::int64_t begin, at::Tensor mean, bool hold);
  void accumulate(const Unit& unit, std::int64_t begin, const at::Tensor& sum, double scale);
  void finish_accumulation(const Unit& unit);

  Options options_;
  Groups groups_;
  std::vector<MatrixSpec> specs_;
  std::shared_ptr<BufferPool> pool_;
  core::Vector<core::UnitIndex, UnitState> states_;
  std::vector<OwnedBatch> batches_;
  std::vector<Place> places_;       // [matrices] in batches_
  std::vector<bool> has_gradient_;  // [matrices] on this rank, since it was cleared
  Profile profile_;
  pid_t process_;  // that made it: a forked child has no lanes
  std::int64_t num_unshards_ = 0;
  std::int64_t num_routes_ = 0;
};

}  // namespace dmuon::engine
