#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "dmuon/engine/update.h"
#include "dmuon/optim/batch_update.h"
#include "dmuon/wire/group.h"
#include "dmuon/wire/owned.h"
#include "dmuon/wire/slice_exchange.h"

namespace dmuon::optim {

/// One step's update of slices, with tensor parallelism. The ranks of a tensor-parallel group call
/// it with the same batches. For each batch:
///
/// 1. prepare moves the states of this rank's slices, and computes their directions.
/// 2. gather brings the directions of whole matrices to their owners.
/// 3. orthogonalise works on the matrices that this rank owns.
/// 4. scatter brings the results back, in the iteration's dtype.
/// 5. apply moves the weights of this rank's slices.
class SliceUpdate final : public engine::Update {
 public:
  /// @param owned   this rank's slices, as stacks of 1 x 1 matrices. Outlives this, as `sliced` and
  ///                `group` do.
  /// @param groups  as MuonUpdate's, like group_of and applies.
  SliceUpdate(const wire::Owned& owned, const wire::SlicedParameters& sliced, wire::Group* group,
              std::vector<MuonGroup> groups, core::Vector<core::ParameterIndex, int> group_of,
              at::Tensor applies);

  void prepare(core::BatchIndex batch) override;
  void gather(core::BatchIndex batch) override;
  void orthogonalise(core::BatchIndex batch) override;
  void scatter(core::BatchIndex batch) override;
  void apply(core::BatchIndex batch) override;

 private:
  // A batch between the calls. Each member has one entry a run. Lanes read what others have
  // allocated, so all of it lives until the end, but for whole matrices, which the lane that has
  // allocated them waits for.
  struct Open {
    std::vector<wire::SlicedRun> runs;
    std::optional<wire::SliceExchange> exchange;  // of the runs; none without runs
    std::vector<const MuonGroup*> groups;
    std::vector<Piece> slices;
    std::vector<at::Tensor> directions;  // flat
    std::vector<at::Tensor> wholes;      // of this rank's own runs, gathered
    std::vector<at::Tensor> results;     // of this rank's own runs, orthogonalised
    std::vector<at::Tensor> updates;     // flat
  };

  Open open(const wire::OwnedBatch& batch) const;

  const wire::Owned& owned_;
  const wire::SlicedParameters& sliced_;
  wire::Group* group_;
  std::vector<MuonGroup> groups_;
  core::Vector<core::ParameterIndex, int> group_of_;
  at::Tensor applies_;
  at::Tensor gradient_factor_;
  core::Vector<core::BatchIndex, Open> open_;
};

}  // namespace dmuon::optim
