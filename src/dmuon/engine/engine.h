#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "dmuon/core/hash.h"
#include "dmuon/engine/buffer.h"
#include "dmuon/engine/group.h"
#include "dmuon/engine/owned_batch.h"
#include "dmuon/engine/packing.h"
#include "dmuon/engine/unit.h"
#include "dmuon/schedule/order.h"

namespace dmuon::engine {

/// What is the same for every unit. The mesh is R x G: R replicates (nodes) of G shards.
struct Options {
  int num_replicates = 1;
  int num_shards = 1;
  int replicate = 0;  ///< this rank's
  int shard = 0;      ///< this rank's: its column
  c10::Device device = c10::kCPU;
  bool node_copy = true;              ///< keep what came from other nodes until the next version
  bool reshard_after_forward = true;  ///< free weights between a unit's forward and its backward
};

/// The process groups of a mesh, private to dmuon. One total order over all of them holds on every
/// rank.
struct Groups {
  Group row;      ///< the ranks of this node; members by shard index
  Group column;   ///< the ranks of this shard index; members by replicate index
  Group order;    ///< all; compares operations that no trace confirms. Host memory.
  Group verdict;  ///< all; the agreement of a step. Host memory.
  /// Whose pass is open: engines on one mesh share their groups, hence one order. Copies share it.
  std::shared_ptr<class Engine*> turn = std::make_shared<class Engine*>(nullptr);
};

struct UnitSpec {
  std::string name;
  std::vector<int> matrices;  ///< ascending
  at::ScalarType compute_dtype;
  at::ScalarType reduce_dtype;
};

/// What all ranks agree on before gradients are used; equal on all ranks.
struct Verdict {
  bool finite = true;                 ///< no gradient of any rank holds NaN or infinity
  std::vector<bool> has_gradient;     ///< [matrices] on any rank, since it was cleared
  std::vector<double> squared_norms;  ///< [matrices] of the mean gradient, fp64
  double host_squared_norm = 0;  ///< of the gradients that stay with the host framework, all ranks
};

/// The squared norms of this rank's share of the gradients that are not routed here.
struct HostNorms {
  double sharded = 0;     ///< of shards: each shard index counts once
  double replicated = 0;  ///< of tensors that every rank holds alike: counts once
};

/// Where a matrix lies in this rank's batches; batch -1 at ranks that do not own it.
struct Place {
  int batch = -1;
  std::size_t index = 0;
};

/// Moves weights to where a unit computes and gradients to their owners. It knows nothing of Muon:
/// owners' weights change between backward and forward by whoever holds `batches()`, who then calls
/// `publish()`.
///
/// A step, from hooks: begin_forward; before_forward and after_forward of each unit; from autograd:
/// the unit's weights return before its backward and its gradients leave after it; end of backward.
/// Then agree() and, once the owners have changed their weights, publish().
///
/// Order: hooks request operations and schedule::Order says what to issue, so every rank issues one
/// sequence whatever its own model skipped. Each operation completes before the next is issued.
///
/// Streams: everything runs on the current stream of the calling thread. Threads: one at a time;
/// the backward thread counts as the forward's continuation. Errors: CommError when a peer is lost;
/// InvalidArgument, on all ranks, when ranks want different things.
class Engine {
 public:
  /// @param specs    of every matrix.
  /// @param units    disjoint; every matrix is in one.
  /// @param batches  this rank's: global indices of equally shaped matrices that it owns.
  Engine(Options options, Groups groups, std::vector<MatrixSpec> specs,
         const std::vector<UnitSpec>& units, const std::vector<std::vector<int>>& batches);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Construction in two halves: parameters are made, by Python, of the unit's views.
  Unit& unit(int index) { return *units_.at(static_cast<std::size_t>(index)); }
  void bind(int unit, std::vector<at::Tensor> parameters);
  int num_units() const { return static_cast<int>(units_.size()); }

  /// The placeholders that the user sees, by matrix, and what stands in for their gradients: set as
  /// `.grad` at the end of each backward; a placeholder without `.grad` has had its gradient
  /// cleared.
  void set_placeholders(std::vector<at::Tensor> placeholders, std::vector<at::Tensor> gradients);

  /// This rank's matrices.
  std::vector<OwnedBatch>& batches() { return batches_; }
  Place place(int matrix) const { return places_.at(static_cast<std::size_t>(matrix)); }
  const std::vector<MatrixSpec>& specs() const { return specs_; }

  /// Counts memory that the caller keeps beside the owned batches.
  void count_bytes(std::int64_t num_bytes) { pool_->count(num_bytes); }

  // Triggers, from module hooks.
  void begin_forward();
  void before_forward(int unit);
  void after_forward(int unit);
  std::vector<at::Tensor> watch_inputs(int unit, const std::vector<at::Tensor>& inputs);
  void watch_outputs(int unit, const std::vector<at::Tensor>& outputs);
  void watch_root_outputs(const std::vector<at::Tensor>& outputs);

  /// One message over all ranks; kept until gradients change, so that a second call costs nothing.
  /// @param host  ignored where the verdict is kept.
  const Verdict& agree(const HostNorms& host);
  bool agreed() const { return verdict_.has_value(); }
  void forget_verdict() { verdict_.reset(); }

  /// All gradients, the host's too, have been multiplied by `factor` on all ranks; the verdict
  /// stays.
  void scale_verdict(double factor);

  /// The owners have new weights: every rank calls it, in the same place of its program.
  void publish();

  /// Clears a matrix's accumulated gradient, as zero_grad does.
  void clear_gradient(int matrix);

  /// Ends what a pass still owes; called before anything collective outside a pass.
  void settle();

  /// Before a step's agreement: settles, and takes part in a backward that other ranks may have run
  /// while this rank's loss touched nothing.
  void settle_step();

  /// Collective: the fp32 weight, on every rank.
  at::Tensor collect_master(int matrix);

  // For verification: one unit's operations by themselves, outside any pass. Collective.
  void unshard(Unit& unit);
  void route(Unit& unit);
  void put_gradient(Unit& unit, int matrix, const at::Tensor& value);

  std::map<std::string, double> statistics() const;
  void reset_peak() { pool_->reset_peak(); }

 private:
  void issue(const std::vector<schedule::Issue>& issues);
  void perform(const schedule::Issue& issue);
  void compare(int action, int unit);
  void end_pass();
  void before_backward(int unit);
  void open_backward();
  void take_turn();
  void end_backward(bool complete);
  void request(schedule::Action action, int unit);

  // publish.cpp
  void fill(Unit& unit);
  void fill_column(Unit& unit, const at::Tensor& target, std::int64_t origin);
  void write_owned(Unit& unit, const at::Tensor& target, std::int64_t origin);
  // route.cpp
  void accumulate(Unit& unit, const at::Tensor& values, std::int64_t origin, double scale);
  void take_new_gradients();

  int slot() const { return options_.replicate * options_.num_shards + options_.shard; }
  bool is_owner(int matrix) const {
    return specs_[static_cast<std::size_t>(matrix)].owner == slot();
  }

  Options options_;
  Groups groups_;
  std::vector<MatrixSpec> specs_;
  std::shared_ptr<BufferPool> pool_;
  std::vector<std::unique_ptr<Unit>> units_;
  std::vector<std::unique_ptr<PackedBuffer>> node_copies_;  // [units], null where there is none
  std::vector<std::int64_t> node_versions_;  // [units] version that the node copy holds
  std::vector<OwnedBatch> batches_;
  std::vector<Place> places_;  // [matrices] in batches_
  std::vector<at::Tensor> placeholders_;
  std::vector<at::Tensor> placeholder_gradients_;
  std::vector<bool> has_gradient_;  // [matrices] on this rank, since it was cleared

  schedule::Order order_;
  std::weak_ptr<bool> backward_;  // alive while the backward that opened the pass is
  std::int64_t version_ = 0;
  std::int64_t num_compared_ = 0;
  core::Hasher issued_;
  std::optional<Verdict> verdict_;
  std::map<std::string, double> seconds_;
  std::int64_t num_unshards_ = 0;
  std::int64_t num_routes_ = 0;
};

}  // namespace dmuon::engine
