#pragma once

#include <ATen/core/Tensor.h>
#include <sys/types.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "dmuon/engine/local_part.h"
#include "dmuon/engine/profile.h"
#include "dmuon/engine/unit.h"
#include "dmuon/engine/update.h"
#include "dmuon/plan/plan.h"
#include "dmuon/schedule/step_schedule.h"
#include "dmuon/wire/owned.h"
#include "dmuon/wire/shared_mesh.h"

namespace dmuon::engine {

/// The properties of a unit that the plan does not have.
struct UnitSpec {
  std::string name;
  at::ScalarType compute_dtype;
  at::ScalarType reduce_dtype;
  bool host = false;  ///< see layout::UnitLayout
};

/// Holds the newest operation of a kind on a subject.
struct Newest {
  wire::Event done;
  std::int64_t number = 0;  ///< by which the Watch knows it, or its update if it is on a batch
};

/// The update of a step.
struct StepUpdate {
  std::shared_ptr<Update> update;
  std::string when;                  ///< see Executor::when
  std::int64_t after_operation = 0;  ///< the rank had come to it before, by the Watch's count
  std::int64_t number = 0;           ///< by the Watch's count: with tensor parallelism alone
};

/// A unit on this rank.
struct UnitState {
  std::unique_ptr<wire::UnitBuffers> buffers;
  std::unique_ptr<Unit> unit;
  bool host = false;                                     ///< see layout::UnitLayout
  core::Vector<layout::PackedIndex, bool> has_gradient;  ///< on this rank, since it was cleared
  wire::StreamMark weights_used;  ///< or awaited, whatever stream that was on
  schedule::PerKind<Newest> newest;
};

/// Performs operations on real tensors and groups: moves weights from owners' batches to units'
/// packed buffers, and gradients back. It knows no trigger, no order and no history. A
/// schedule::Resolver chooses the operations, in the same order on every rank.
///
///     Executor executor(mesh, plan, units, node_copy, device);
///     executor.perform({.kind = Kind::kPublishIntra, .subject = unit});  // travels on its lane
///     executor.perform({.kind = Kind::kAwaitWeights, .subject = unit});  // compute waits for it
///
/// Streams: operations of the compute lane are the current stream's, which may be another one each
/// time; those of the other lanes run beside it, see Lane. Threads: one at a time. The calling
/// thread takes and gives back packed buffers, so that their memory is the same in every run.
/// Errors: CommError when a peer is lost, at the first operation that waits for it; then no more
/// operation runs. On a CPU the buffers of units whose operations failed are then never freed.
class Executor {
 public:
  /// @param mesh       must be as large as the plan's.
  /// @param plan       its inventory holds the parameters.
  /// @param units      the plan's units, by index.
  /// @param node_copy  column members keep a copy of their column's weights, if there are several
  ///                   nodes.
  /// @param sizes, cuts  see local_part.
  Executor(wire::SharedMesh mesh, const plan::Plan& plan, const std::vector<UnitSpec>& units,
           bool node_copy, c10::Device device, const layout::LeafSizes& sizes = {},
           const layout::Cuts& cuts = {});
  ~Executor();
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  void perform(const schedule::Operation& operation);

  /// Sets who performs operations on batches from now on. Operations that were issued keep theirs.
  void set_update(std::shared_ptr<Update> update);
  /// The current stream waits for what kFinishUpdate has waited for on others.
  void await_update() const { update_awaited_.wait(); }

  /// Computes the largest of each element over all ranks, in place, behind all that is in flight.
  /// Not on a CPU, where words travel over the host with the agreement.
  void max_over_mesh(const at::Tensor& words, const std::string& what);

  /// Waits for everything: nothing is in flight afterwards.
  void drain();

  /// Waits until the mesh's lanes are idle, whoever's operations they run.
  void drain_lanes();

  /// Returns "in step 3", or "in step 3 of model 2" if the mesh has several models. Steps count
  /// from 1. Ranks compare it within what they issue.
  std::string when() const;
  /// This model's number among those of the mesh.
  int model() const { return model_; }
  void begin_next_step() { ++step_; }

  Unit& unit(core::UnitIndex index) { return *states_.at(index).unit; }
  const layout::Parameters& parameters() const { return part_.parameters; }
  const layout::Leaves& leaves() const { return part_.leaves; }
  const wire::SlicedParameters& sliced() const { return part_.sliced; }
  wire::Owned& owned() { return owned_; }
  /// Owned tensors and node copies, whose values outlive steps; always in the same order.
  std::vector<at::Tensor> lasting_tensors() const;
  wire::SharedMesh& mesh() { return mesh_; }
  wire::BufferPool& pool() { return *pool_; }
  Profile& profile() { return profile_; }

  /// Around what a module computes with a unit's weights, on the current stream: they are there,
  /// and stay until it is done, whatever stream they were awaited on and are freed on.
  void begin_use(core::UnitIndex unit) { states_.at(unit).weights_used.wait(); }
  void end_use(core::UnitIndex unit) { states_.at(unit).weights_used.set(pool_->device()); }

  /// See wire::take_back. The unit's weights are there.
  void take_back(core::UnitIndex unit);

  // For a Resolver.
  schedule::Layout layout() const;
  schedule::Batches units_of_batches() const;

  /// True if this rank has had a gradient of the parameter since it was cleared.
  bool has_gradient(core::ParameterIndex parameter) const;
  /// No route of the gradient may be in flight.
  void clear_gradient(core::ParameterIndex parameter);
  /// Sets the gradient to zero, if there is one. No route of it may be in flight.
  void zero_gradient(core::ParameterIndex parameter);

  std::map<std::string, double> statistics() const;

 private:
  Newest& newest(schedule::Kind kind, const schedule::Subject& subject);
  void perform_on_unit(const schedule::Operation& operation);
  void enqueue(const schedule::Operation& operation, wire::Work work);
  void enqueue_update(const schedule::Operation& operation);
  void await(const schedule::Operation& operation);
  std::string described(schedule::Kind kind, core::UnitIndex unit) const;
  static void take_gradients(UnitState* state);
  std::string described(core::BatchIndex batch, const StepUpdate& of) const;
  void finish(schedule::Kind kind, const schedule::Subject& subject);
  void finish_update(schedule::Kind kind, const schedule::Subject& subject, const Newest& awaited);
  void tell_of_failed_update(core::BatchIndex batch, const StepUpdate& of,
                             const std::string& why) const;

  wire::SharedMesh mesh_;
  LocalPart part_;
  core::PerParameter<layout::PackedIndex> place_of_;  // in its unit, for a step asks for all
  std::shared_ptr<wire::BufferPool> pool_;
  wire::Owned owned_;
  core::Vector<core::UnitIndex, UnitState> states_;
  core::Vector<core::BatchIndex, schedule::PerKind<Newest>> batches_;
  std::shared_ptr<const StepUpdate> update_;
  wire::StreamMark update_awaited_;
  Profile profile_;
  int model_;
  std::int64_t step_ = 1;
  std::int64_t num_unshards_ = 0;
  std::int64_t num_routes_ = 0;
};

}  // namespace dmuon::engine
