#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "dmuon/engine/engine.h"
#include "dmuon/engine/update.h"
#include "dmuon/optim/batch_graphs.h"
#include "dmuon/optim/batch_update.h"
#include "dmuon/optim/row_factors.h"
#include "dmuon/optim/rules/muon.h"

namespace dmuon::optim {

/// One step's update of what a rank owns: a BatchUpdate for each batch, or several. On CPUs
/// orthogonalise() does all of a batch's update, piece by piece, so that the batch takes the memory
/// of one piece.
class MuonUpdate final : public engine::Update {
 public:
  /// @param owned     outlives this.
  /// @param groups    the hyperparameters of this step, by group index.
  /// @param group_of  group index; -1 leaves the parameter as it is. Neighbours of one group in a
  ///                  batch are updated together.
  /// @param applies   [] bool, on the engine's device: false leaves everything as it is.
  /// @param graphs    of this optimizer's batches, on a device with dmuon's CUDA kernels; null:
  ///                  each kernel is launched. A batch in a graph runs in apply().
  /// @param row_factors  multiply masters behind the rule, also of parameters without a group.
  MuonUpdate(const wire::Owned& owned, std::vector<MuonGroup> groups,
             core::Vector<core::ParameterIndex, int> group_of, at::Tensor applies,
             std::shared_ptr<BatchGraphs> graphs = nullptr, RowFactors row_factors = {});

  void prepare(core::BatchIndex batch) override;
  void orthogonalise(core::BatchIndex batch) override;
  void apply(core::BatchIndex batch) override;

 private:
  // Neighbours of one group, at places [begin, end) of a batch, or one part of their rows.
  struct Run {
    std::size_t begin;
    std::size_t end;
    std::size_t part;  // of View::row_parts
    const MuonGroup* group;
    std::size_t scalars;  // their place in scalars_
  };
  std::vector<Run> runs_of(const wire::OwnedBatch& batch);
  std::vector<BatchUpdate> updates_of(core::BatchIndex batch, const at::Tensor& applies,
                                      const at::Tensor& gradient_factor) const;
  void move(core::BatchIndex batch);
  bool by_piece() const { return applies_.is_cpu(); }
  bool takes_program(core::BatchIndex batch);
  std::string key_of(core::BatchIndex batch) const;

  const wire::Owned& owned_;
  std::vector<MuonGroup> groups_;
  core::Vector<core::ParameterIndex, int> group_of_;
  at::Tensor applies_;
  at::Tensor gradient_factor_;
  std::shared_ptr<StepScalars> scalars_ = std::make_shared<StepScalars>();
  core::Vector<core::BatchIndex, std::vector<Run>> runs_;
  std::shared_ptr<BatchGraphs> graphs_;
  RowFactors row_factors_;
  const BatchGraphs::Inputs* inputs_ = nullptr;                       // from the first batch on
  core::Vector<core::BatchIndex, BatchGraphs::Program*> programs_;    // null: launches
  core::Vector<core::BatchIndex, std::vector<BatchUpdate>> updates_;  // between the three calls
};

/// Adds a rule's states of zeros for each parameter, at its owner alone. Once an engine, before its
/// first step. `memo_words` other than 0 also adds a memo of so many words a matrix
/// (newton_schulz::MomentumStep), which is no state: it is not saved. Neither this nor muon_step
/// may run beside other calls of the engine.
/// @returns their names.
std::vector<std::string> add_states(engine::Engine& engine, const Rule& rule,
                                    std::int64_t memo_words = 0);

/// Updates what this rank owns and publishes it (Engine::step). Every rank calls it, with equal
/// arguments. Works on the current stream. If a rule takes no factor of gradients, multiplies it in
/// before. The parameters are MuonUpdate's; without CUDA kernels, and with tensor parallelism,
/// `graphs` remain without graphs.
/// @throws InvalidArgument, before anything is sent, as check_row_factors, or if there are row
/// factors with tensor parallelism, where an owner has no whole rows.
void muon_step(engine::Engine& engine, const std::vector<MuonGroup>& groups,
               const core::Vector<core::ParameterIndex, int>& group_of, const at::Tensor& applies,
               const std::shared_ptr<BatchGraphs>& graphs = nullptr,
               const RowFactors& row_factors = {});

}  // namespace dmuon::optim
