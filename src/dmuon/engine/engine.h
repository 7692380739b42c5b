#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "dmuon/engine/agreement.h"
#include "dmuon/engine/executor.h"
#include "dmuon/schedule/resolver.h"

namespace dmuon::engine {

/// Runs a model's communication: hooks say how far a step has come, schedule::Resolver says which
/// operations run, Executor does them. It knows nothing of Muon: owners' weights change in step(),
/// by the function that it is given.
///
/// A step, from hooks: begin_forward; before_forward and after_forward of each unit; from autograd:
/// the unit's weights return before its backward and its gradients leave after it; end of backward.
/// Then agree() and step().
///
/// Order: every rank crosses one sequence of triggers whatever its own model skipped. The first
/// pass of a kind is served on demand; from its trace the schedule is built. Messages travel while
/// the model computes: gradients are with their owners when agree() returns, weights when their
/// unit begins.
///
/// Streams: the calling thread's current stream, and the lanes beside it. Threads: one at a time;
/// the backward thread counts as the forward's continuation. Errors: CommError when a peer is lost;
/// InvalidArgument, on all ranks, when ranks want different things.
class Engine : private schedule::Performer {
 public:
  /// @param specs    of every matrix.
  /// @param units    disjoint; every matrix is in one.
  /// @param batches  this rank's: global indices of equally shaped matrices that it owns.
  Engine(Options options, Groups groups, std::vector<MatrixSpec> specs,
         const std::vector<UnitSpec>& units, const std::vector<std::vector<int>>& batches);
  ~Engine() override;
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Construction in two halves: parameters are made, by Python, of the unit's views.
  Unit& unit(int index) { return executor_.unit(index); }
  void bind(int unit, std::vector<at::Tensor> parameters);
  int num_units() const { return executor_.num_units(); }
  /// Its weights may be read.
  bool ready(int unit) const { return resolver_.ready(core::UnitIndex(unit)); }

  /// The placeholders that the user sees, by matrix, and what stands in for their gradients: set as
  /// `.grad` at the end of each backward; a placeholder without `.grad` has had its gradient
  /// cleared.
  void set_placeholders(std::vector<at::Tensor> placeholders, std::vector<at::Tensor> gradients);

  /// This rank's matrices.
  std::vector<OwnedBatch>& batches() { return executor_.batches(); }
  Place place(int matrix) const { return executor_.place(matrix); }
  const std::vector<MatrixSpec>& specs() const { return executor_.specs(); }

  /// Counts memory that the caller keeps beside the owned batches.
  void count_bytes(std::int64_t num_bytes) { executor_.pool().count(num_bytes); }

  // Triggers, from module hooks.
  void begin_forward();
  void before_forward(int unit);
  void after_forward(int unit);
  std::vector<at::Tensor> watch_inputs(int unit, const std::vector<at::Tensor>& inputs);
  void watch_outputs(int unit, const std::vector<at::Tensor>& outputs);
  void watch_root_outputs(const std::vector<at::Tensor>& outputs);

  /// One message over all ranks; kept until gradients change, so that a second call costs nothing.
  /// @param host      ignored where the verdict is kept.
  /// @param settings  a digest of what must be equal on all ranks, hyperparameters say; likewise.
  /// @throws InvalidArgument, on all ranks, where what was issued or the settings differ.
  const Verdict& agree(const HostNorms& host, std::uint32_t settings = 0);
  bool agreed() const { return verdict_.has_value(); }
  void forget_verdict() { verdict_.reset(); }

  /// All gradients, the host's too, have been multiplied by `factor` on all ranks; the verdict
  /// stays.
  void scale_verdict(double factor) {
    if (verdict_) verdict_->scale(factor);
  }

  /// New weights, then their publication: `update(batch)` is called for each of this rank's
  /// batches, in the order in which units are waited for, and the first units travel when this
  /// returns. Every rank calls it, in the same place of its program.
  void step(const std::function<void(int)>& update);

  /// The owners' weights have been changed by other means, as step() does.
  void publish() {
    step([](int) {});
  }

  /// Under no_sync: gradients of the next backwards stay at the column members. Alike on all ranks.
  void set_sync(bool sync) { resolver_.set_sync(sync); }

  /// Whether column members hold gradients that no synchronised backward has sent on; alike on all
  /// ranks.
  bool holds_partial_sums() const { return resolver_.holds_partial_sums(); }

  /// Clears a matrix's accumulated gradient, as zero_grad does.
  void clear_gradient(int matrix);

  /// Waits for everything that is in flight on the mesh's lanes, other models' too: then their
  /// groups may be used beside them. Local: it was issued on every rank.
  void drain();

  /// Ends what a pass still owes; called before anything collective outside a pass.
  void settle();

  /// Before a step's agreement: settles, and takes part in a backward that other ranks may have run
  /// while this rank's loss touched nothing.
  void settle_step();

  /// Collective: the fp32 weight, on every rank.
  at::Tensor collect_master(int matrix);

  // For verification: one unit's operations by themselves, outside any pass. Collective.
  void unshard(int unit) { serve(schedule::Moment::kBeforeUse, unit); }
  void reshard(int unit) { serve(schedule::Moment::kAfterForward, unit); }
  void route(int unit) { serve(schedule::Moment::kAfterBackward, unit); }
  void put_gradient(int unit, int matrix, const at::Tensor& value);

  /// The schedule as it stands; passes that have not been traced are empty.
  const schedule::StepSchedule& schedule() const { return resolver_.schedule(); }
  const schedule::Layout& layout() const { return resolver_.layout(); }
  const schedule::Trace& trace(schedule::Pass pass) const { return resolver_.order().trace(pass); }
  Profile& profile() { return executor_.profile(); }

  std::map<std::string, double> statistics() const;
  void reset_peak() { executor_.pool().reset_peak(); }

 private:
  void compare(const std::optional<schedule::Trigger>& trigger) override;
  void perform(const schedule::Operation& operation) override;
  void serve(schedule::Moment moment, int unit) {
    resolver_.serve({moment, core::UnitIndex(unit)});
  }
  void before_backward(int unit);
  void open_backward();
  void take_turn();
  void end_backward();
  void give_placeholder_gradients();
  void take_new_gradients();

  const Options& options() const { return executor_.options(); }
  Groups& groups() { return executor_.groups(); }
  std::size_t num_matrices() const { return executor_.specs().size(); }

  Executor executor_;
  std::vector<at::Tensor> placeholders_;
  std::vector<at::Tensor> placeholder_gradients_;

  schedule::Resolver resolver_;
  std::function<void(int)> update_;  // of the step that is being taken
  std::weak_ptr<bool> backward_;     // alive while the backward that opened the pass is
  std::int64_t num_compared_ = 0;
  std::optional<Verdict> verdict_;
  std::map<std::string, double> seconds_;
};

}  // namespace dmuon::engine
