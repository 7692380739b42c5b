#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "dmuon/layout/slices.h"
#include "dmuon/wire/group.h"

namespace dmuon::wire {

/// A parameter that is cut into slices, one for each rank of a tensor-parallel group.
struct SlicedParameter {
  layout::View whole;
  int owner = 0;                      ///< the rank of the group that orthogonalises it
  std::vector<layout::Slice> slices;  ///< [ranks]; none: every rank has all of it

  bool is_replicated() const { return slices.empty(); }
  /// Elements that a rank has.
  std::int64_t num_elements(int rank) const;
};

using SlicedParameters = core::PerParameter<SlicedParameter>;

/// Neighbours in a batch that have one owner and matrices of one shape.
struct SlicedRun {
  std::vector<const SlicedParameter*> parameters;  ///< not empty

  int owner() const { return parameters.front()->owner; }
  const layout::View& shape() const { return parameters.front()->whole; }  ///< of each matrix
  std::int64_t num_matrices() const;
  std::int64_t num_elements(int rank) const;
  bool is_replicated() const { return parameters.front()->is_replicated(); }
};

/// True if both may be in one run.
bool may_share_run(const SlicedParameter& a, const SlicedParameter& b);

/// Moves matrices between the ranks' slices and their owners, for all runs of a batch at once (the
/// paper's nested owners):
///
///   const SliceExchange exchange(&group, runs);
///   std::vector<at::Tensor> wholes = exchange.gather(directions, at::kFloat, "directions");
///   for (at::Tensor& whole : wholes)
///     if (whole.defined()) whole = orthogonalised(whole);
///   std::vector<at::Tensor> updates = exchange.scatter(wholes, at::kBFloat16, "updates");
///
/// Each call sends one message to each other rank and receives one from it, whatever the number of
/// matrices. A gather sends an element that this rank has once, unless it owns it. A scatter sends
/// an element that this rank owns once, unless it has it; a replicated one, to each other rank. All
/// ranks of the group make the same calls with the same runs, on a lane. Blocks the host on CPU
/// backends, the current stream elsewhere.
/// @throws CommError naming `what`.
class SliceExchange {
 public:
  /// @param group  outlives this, as the parameters do.
  SliceExchange(Group* group, std::vector<SlicedRun> runs);

  /// Sends each rank's slices to their owners. Sends no replicated run, because its owner has all.
  /// @param slices   [runs] flat, this rank's slices of the run's parameters, one after the other.
  /// @param options  dtype and device of all slices.
  /// @return         [runs] each [matrices, rows, cols]; undefined if another rank owns the run.
  std::vector<at::Tensor> gather(const std::vector<at::Tensor>& slices,
                                 const at::TensorOptions& options, const std::string& what) const;

  /// Sends each rank its slices of the owners' matrices.
  /// @param wholes   [runs] as gather() returns them.
  /// @param options  dtype and device of the messages.
  /// @return         [runs] flat, as the slices of gather().
  std::vector<at::Tensor> scatter(const std::vector<at::Tensor>& wholes,
                                  const at::TensorOptions& options, const std::string& what) const;

  enum class Way : bool { kGather, kScatter };

 private:
  std::vector<std::size_t> runs_of(int owner, Way way) const;
  at::Tensor buffer_of(int owner, int rank, Way way, const at::TensorOptions& options) const;
  void copy_own(const std::vector<at::Tensor>& wholes, int rank, const at::Tensor& buffer,
                Way way) const;

  Group* group_;
  std::vector<SlicedRun> runs_;
};

}  // namespace dmuon::wire
