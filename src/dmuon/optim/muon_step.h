#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "dmuon/engine/engine.h"
#include "dmuon/engine/update.h"
#include "dmuon/optim/batch_graphs.h"
#include "dmuon/optim/batch_update.h"
#include "dmuon/optim/row_factors.h"
#include "dmuon/optim/rules/muon.h"

namespace dmuon::optim {

/// Updates a batch of equally shaped matrices in place, by Muon (rules/muon.h): a BatchUpdate.
///
/// Bytes an element that are read and written beside the iteration's products, in bf16:
///
///   before it  14  a matrix by itself, on CPUs in fp32 and bf16: momentum in and out, gradient, X
///              26  otherwise: also the direction, out and in twice; CPUs' caches hold 12 of these
///              18  by kernels/cuda, in fp16 and bf16: also X, in and out, to be multiplied by
///                  its scale; 10 more where the guess of that scale was wrong
///   after it    8  by kernels/cpu, if the last product goes straight into the weights
///              12  otherwise: also the product's result, out and in
///
/// Interleaved rows take 40 more: 24 before to gather gradient and momentum, 16 after for weights.
///
/// A factor of the gradient (Piece::gradient_factor) takes none on CPUs, where nesterov is on or a
/// matrix is by itself; else 8, as a pass over the gradient would.
///
/// @param group       its rule is a Muon, or one that derives from it.
/// @param applies     [] bool, on the same device: false leaves master and momentum as they are,
///                    whatever the gradient holds. The host does not wait to learn it.
/// @param transposed  True if the learning rate takes columns for rows, and rows for columns.
/// @param memo        [..., 1, words * column_blocks] (newton_schulz::MomentumStep), or nothing;
///                    of interleaved rows words * the number of heights.
/// @param others      the rule's states after the momentum, as Piece has them.
/// @param heights     of interleaved rows (layout::View); then tensors are [b, rows, cols].
/// @throws InvalidArgument naming the first tensor that is no fp32 of master's sizes and device,
///         or the sizes of others, or heights that do not fit; or as method_for.
void muon_update(const at::Tensor& master, const at::Tensor& momentum, const at::Tensor& gradient,
                 const MuonGroup& group, const at::Tensor& applies, std::int64_t column_blocks = 1,
                 bool transposed = false, const std::optional<at::Tensor>& memo = {},
                 const std::vector<at::Tensor>& others = {},
                 const std::vector<std::int64_t>& heights = {});

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
