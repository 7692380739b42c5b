#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "dmuon/engine/executor.h"
#include "dmuon/engine/gradient_norms.h"
#include "dmuon/engine/host_sums.h"
#include "dmuon/engine/offload.h"
#include "dmuon/engine/open_uses.h"
#include "dmuon/engine/other_gradients.h"
#include "dmuon/engine/placeholders.h"
#include "dmuon/engine/transfers.h"
#include "dmuon/schedule/resolver.h"

namespace dmuon::engine {

/// The options that do not follow from the mesh and the plan.
struct EngineOptions {
  schedule::StepOptions step;
  c10::Device device = c10::kCPU;
  /// Copies that the host framework has of each of its parameters, over all ranks. Each copy is cut
  /// into slots / host_replicates shards.
  int host_replicates = 1;
  /// Owners' gradients are the mean over all ranks times this.
  double gradient_scale = 1;
};

/// Runs a model's communication and updates. Hooks report how far a step has come,
/// schedule::Resolver decides which operations run, Executor performs them. An Update changes the
/// owners' weights in step(); the engine knows nothing of Muon.
///
///     engine.begin_forward();                // the model's own
///     engine.before_forward(unit);           // its weights may be read
///     engine.after_forward(unit);            // ... of each unit; autograd calls back in between
///     engine.agree(norms, settings);         // one message: what all ranks know of the step
///     engine.step(update);                   // new masters; the first weights travel
///     engine.end_step();
///
/// Order: every rank crosses one sequence of triggers, whatever its own model skipped. The first
/// pass of a kind is traced and served on demand; its trace makes the schedule. Messages travel
/// while the model computes: owners have the gradients when agree() returns, and a unit has its
/// weights when it begins.
///
/// Streams: the calling thread's current stream, and the lanes beside it. Threads: one at a time;
/// the backward thread counts as the forward's continuation. Errors: CommError if a peer is lost;
/// InvalidArgument, on all ranks, if ranks want different things.
class Engine : private schedule::Performer {
 public:
  /// See Executor. Python makes engines by make().
  Engine(EngineOptions options, wire::SharedMesh mesh, const plan::Plan& plan,
         const std::vector<UnitSpec>& units, const layout::LeafSizes& sizes = {},
         const layout::Cuts& cuts = {});
  ~Engine() override;
  /// Makes an engine that ranks may free at different times, as Python frees garbage. If its
  /// forward still owes peers operations, it lives until another engine takes the turn.
  static std::shared_ptr<Engine> make(EngineOptions options, wire::SharedMesh mesh,
                                      const plan::Plan& plan, const std::vector<UnitSpec>& units,
                                      const layout::LeafSizes& sizes, const layout::Cuts& cuts);
  /// Lets graphs that may run backwards through the engine hold it by this pointer.
  void keep_in_graphs(const std::weak_ptr<Engine>& self) { self_ = self; }
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Construction has two halves: Python makes parameters from the unit's weights, then binds them.
  Unit& unit(core::UnitIndex index) { return executor_.unit(index); }
  /// @param parameters, to_local  see Unit::bind. Gradients of the unit's placeholders accumulate
  ///                              into the parameters.
  void bind(core::UnitIndex unit, std::vector<at::Tensor> parameters, Unit::ToLocal to_local = {});
  /// True if the unit's weights may be read.
  bool ready(core::UnitIndex unit) const { return resolver_.ready(unit); }

  /// They show gradients to the user. Set them before bind().
  Placeholders& placeholders() { return placeholders_; }

  const layout::Parameters& parameters() const { return executor_.parameters(); }
  const layout::Leaves& leaves() const { return executor_.leaves(); }
  wire::SharedMesh& mesh() { return executor_.mesh(); }
  /// Without tensor parallelism there are no slices, and their group is null.
  const wire::SlicedParameters& sliced() const { return executor_.sliced(); }
  wire::Group* slices() {
    return mesh().tensor_parallel ? &mesh().tensor_parallel->slices : nullptr;
  }

  /// The tensors that this rank owns. New masters count from publish() on.
  wire::Owned& owned() { return executor_.owned(); }
  /// Moves owned tensors to other ranks, and back.
  const Transfers& transfers() const { return transfers_; }

  /// Tells the Watch that all ranks next do `what`, outside of the engine, and may wait there.
  void leave(const std::string& what) { mesh().watch->leave(what + " " + executor_.when()); }

  /// Settles, and returns when all ranks have come to `call`, outside of a step. Collective.
  /// @throws CommError or InvalidArgument, on all ranks, if one has come to something else.
  void meet(const std::string& call);

  // Triggers, from module hooks. A call of a module has one Call for its inputs and outputs. The
  // end of its backward calls `before_end` first, unless the call is nested.
  void begin_forward();  ///< the model's own
  void end_forward();
  void before_forward(core::UnitIndex unit, bool reader = false);
  void after_forward(core::UnitIndex unit, bool reader = false);
  void forget_call(core::UnitIndex unit) { open_uses_.end_call(unit); }  ///< after an interrupt
  std::vector<at::Tensor> watch_inputs(core::UnitIndex unit, const std::vector<at::Tensor>& inputs,
                                       const std::shared_ptr<Call>& call,
                                       std::function<void()> before_end);
  void watch_outputs(core::UnitIndex unit, const std::vector<at::Tensor>& outputs,
                     const std::shared_ptr<Call>& call);
  void watch_root_outputs(const std::vector<at::Tensor>& outputs);

  /// Takes the unit's packed weights for new masters, because a module has changed them while it
  /// used them. All ranks do so at this place of their program.
  /// @param checksum  of the packed weights.
  /// @throws InvalidArgument, on all ranks, if checksums differ or a rank is elsewhere.
  void take_back(core::UnitIndex unit, std::int64_t checksum);

  /// Calls `callback` at the end of each backward, while units that have no watched inputs still
  /// have their weights. Its exceptions leave through backward().
  void before_end_of_backward(std::function<void()> callback) { before_end_ = std::move(callback); }
  OtherGradients& other_gradients() { return others_; }
  /// Triggers that the last backward has crossed so far.
  int num_crossed() const { return resolver_.num_crossed(); }

  /// True while a backward runs that is traced or replayed, outside of no_sync.
  bool in_synchronised_backward() const { return backward_is_open() && backward_syncs_; }

  /// Moves what outlives steps to the host, and back, see Offload. Frees replicated weights, which
  /// the next uses send again. Call nothing else in between, and meet() before.
  void move_out();
  void move_back() { offload_.move_back(); }

  /// Lets every backward throw InvalidArgument with these words at its first hook, from now on.
  /// Empty words let backwards run again.
  void refuse_backward(std::string why) { no_backward_ = std::move(why); }

  /// Agrees on the step with one message over all ranks. The host waits for other hosts, and never
  /// for a device that is not a CPU.
  /// @param host, maxima  on the engine's device, see GradientNorms::measure.
  /// @param settings  a digest of hyperparameters and all else that must be equal on all ranks.
  /// @param has_open_gradients  true if gradients of OtherGradients are no means yet, on this rank.
  /// @throws InvalidArgument, on all ranks, as engine::agree, or if micro-steps under no_sync have
  /// used other host units.
  const Verdict& agree(const at::Tensor& host = {}, std::uint32_t settings = 0,
                       const at::Tensor& maxima = {}, bool has_open_gradients = false);
  /// Sets of how many numbers each agreement finds the largest over all ranks; 0 at first. Drops
  /// the verdict. All ranks do the same, between steps.
  void set_num_maxima(int num_maxima);
  /// The verdict of the last agreement. Null if gradients have changed since, or its step is over.
  const Verdict* verdict() const {
    return verdict_ && kept_ == placeholders_.kept() ? &*verdict_ : nullptr;
  }
  /// Gradients that only the host knows have been cleared.
  void forget_verdict() { verdict_.reset(); }

  /// The step that the verdict was for is over.
  void end_step() {
    verdict_.reset();
    executor_.begin_next_step();
  }

  HostSums& host_sums() { return host_sums_; }
  /// Since construction, the open one included; and the last one before which all were cleared.
  std::int64_t num_backwards() const { return num_backwards_; }
  std::int64_t last_anew() const { return last_anew_; }
  std::int64_t backward_number() const { return num_backwards_ + (backward_is_open() ? 0 : 1); }
  /// Multiplies the owned gradients (Owned::scale_gradients); the verdict stays. The caller
  /// multiplies the host's gradients, and all ranks do the same.
  /// @param factor  [] on the engine's device.
  void scale_gradients(const at::Tensor& factor);
  /// Multiplies one leaf's gradient, and drops the verdict. All ranks do the same.
  void scale_gradient(core::LeafIndex leaf, const at::Tensor& factor);

  /// New weights, then their publication. Updates this rank's batches, in the order in which units
  /// are waited for. Masters are new when this returns, and the first units travel. With
  /// StepOptions::late_updates masters are new after finish_update(). Every rank calls it, in the
  /// same place of its program.
  /// @param update  not null.
  void step(std::shared_ptr<Update> update);

  /// Waits for the update of the last step, if it is late; on a device the current stream does. All
  /// calls of this class wait that read or write owned tensors, and every backward does. A caller
  /// that has such a tensor already waits itself.
  void finish_update();
  /// @throws InvalidArgument inside of an update, as in a rule's function: it would wait for
  /// itself.
  static void refuse_in_update();

  /// Removes a named tensor of this rank, at once or when no update reads owned tensors any more.
  void remove_owned(const std::string& name);

  /// As step(), where the owners' weights have been changed by other means.
  void publish();

  /// Lets the model compute with a named tensor in place of the masters, which it then holds, or
  /// with the masters again (kMaster). Meets at `call` before. Does nothing the second time, so a
  /// caller may repeat a call that it cannot know to be done.
  void compute_with(const std::string& name, const std::string& call);

  /// False under no_sync: the next gradients stay at the column members. Equal on all ranks.
  void set_sync(bool sync);

  /// Clears a leaf's accumulated gradient: it has none any more.
  void clear_gradient(core::LeafIndex leaf);
  /// Sets a leaf's accumulated gradient to zero. A leaf that has a gradient keeps one. All ranks do
  /// the same.
  void zero_gradient(core::LeafIndex leaf);

  /// Waits for everything in flight on the mesh's lanes, other models' operations included. Then
  /// the caller may use their groups. Local: every rank has issued the same.
  void drain();

  /// Issues what a pass still owes. Comes before anything collective outside a pass.
  void settle();

  /// Settles if the last backward has raised.
  /// @returns  true if it has.
  bool end_failed_backward();

  /// Settles before a step's agreement. Takes part in a backward that other ranks may have run
  /// while this rank's loss touched nothing.
  void settle_step();

  // One unit's operations by themselves, outside any pass, for verification. Collective.
  void unshard(core::UnitIndex unit) { serve(schedule::Moment::kBeforeUse, unit); }
  void reshard(core::UnitIndex unit) { serve(schedule::Moment::kAfterForward, unit); }
  void route(core::UnitIndex unit) { serve(schedule::Moment::kAfterBackward, unit); }
  void put_gradient(core::LeafIndex leaf, const at::Tensor& value);

  /// The layout and traces that the schedule is built from. The trace of an untraced pass is empty.
  const schedule::Layout& layout() const { return resolver_.layout(); }
  const schedule::Trace& trace(schedule::Pass pass) const { return resolver_.order().trace(pass); }
  Profile& profile() { return executor_.profile(); }

  std::map<std::string, double> statistics() const;
  void reset_peak() { executor_.pool().reset_peak(); }

 private:
  void compare(const std::optional<schedule::Trigger>& trigger) override;
  void before_crossing(int num_crossed) override;
  void perform(const schedule::Operation& operation) override;
  void leave_to_host(const std::optional<schedule::Trigger>& use) override;
  void leave_before_forward() override;
  struct Compared;
  Compared compared(std::int64_t moment, std::int64_t unit);
  std::string described(const Compared& compared) const;
  void require_all_at(const Compared& here, const std::string& what);
  void serve(schedule::Moment moment, core::UnitIndex unit) { resolver_.serve({moment, unit}); }
  void before_backward(core::UnitIndex unit, Call& call);
  void after_backward(core::UnitIndex unit, Call& call);
  void open_forward(bool whole);
  void enter(const char* pass);
  void open_backward();
  std::string why_no_second_order() const;
  void enter_second_order();
  bool in_second_order(core::UnitIndex unit);
  bool follows_second_order(core::UnitIndex unit) const;
  void take_turn();
  void begin_new_weights();
  bool backward_is_open() const;
  void end_backward();
  void close_backward(bool raised);
  void take_new_gradients();
  int num_host_shards() const { return layout().num_slots() / options_.host_replicates; }

  EngineOptions options_;
  std::weak_ptr<Engine> self_;
  Executor executor_;
  schedule::Resolver resolver_;
  std::vector<std::string> removed_;  // owned tensors, while an update may read their names
  std::weak_ptr<bool> backward_;      // alive while the backward that opened the pass is
  bool backward_syncs_ = true;        // as its begin found it
  OpenUses open_uses_;
  std::int64_t num_backwards_ = 0;
  std::int64_t last_anew_ = 1;
  bool has_second_order_ = false;  // since weights were new, or a backward gave up its graph
  int second_order_ = -1;  // the last backward that created a graph; its recomputations are no uses
  std::int64_t num_evaluations_ = 0;
  Transfers transfers_;
  Offload offload_{&executor_};
  HostSums host_sums_;
  Placeholders placeholders_;
  std::int64_t num_compared_ = 0;
  std::string computes_with_ = wire::kMaster;  // the name of the tensor that masters hold
  std::function<void()> before_end_;
  OtherGradients others_;
  std::string no_backward_;  // why, if none may begin
  GradientNorms norms_;
  std::optional<Verdict> verdict_;
  Placeholders::PerLeaf kept_;  // when the verdict was found
  std::map<std::string, double> seconds_;
};

}  // namespace dmuon::engine
