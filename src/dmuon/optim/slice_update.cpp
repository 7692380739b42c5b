#include "dmuon/optim/slice_update.h"

#include <string>
#include <utility>

#include "dmuon/newton_schulz/orthogonalize.h"

namespace dmuon::optim {
namespace {

// @param wholes  [b, rows, cols]. Blocks of columns are orthogonalised apart.
at::Tensor orthogonalised(const at::Tensor& wholes, const layout::View& view,
                          const MuonGroup& group) {
  const std::int64_t rows = view.rows;
  const std::int64_t cols = view.cols / view.column_blocks;
  const at::Tensor blocks =
      wholes.view({wholes.size(0), rows, view.column_blocks, cols}).transpose(1, 2);
  const at::Tensor results = newton_schulz::orthogonalize(blocks, group.iteration_of(rows, cols));
  return results.transpose(1, 2).reshape(wholes.sizes());
}

// Groups may have iterations of different dtypes.
at::ScalarType dtype_of(const std::vector<const MuonGroup*>& groups) {
  at::ScalarType dtype = groups.front()->iteration.dtype;
  for (const MuonGroup* group : groups) dtype = c10::promoteTypes(dtype, group->iteration.dtype);
  return dtype;
}

}  // namespace

SliceUpdate::SliceUpdate(const wire::Owned& owned, const wire::SlicedParameters& sliced,
                         wire::Group* group, std::vector<MuonGroup> groups,
                         core::Vector<core::ParameterIndex, int> group_of, at::Tensor applies)
    : owned_(owned),
      sliced_(sliced),
      group_(group),
      groups_(std::move(groups)),
      group_of_(std::move(group_of)),
      applies_(std::move(applies)),
      gradient_factor_(owned.gradient_factor()),
      open_(owned.batches().size()) {}

// A run ends where the owner, the shape of matrices, or the group of hyperparameters changes.
SliceUpdate::Open SliceUpdate::open(const wire::OwnedBatch& batch) const {
  Open open;
  const auto of = [&](std::size_t i) -> const wire::SlicedParameter& {
    return sliced_.at(batch.parameters[i]);
  };
  const auto group = [&](std::size_t i) { return group_of_.at(batch.parameters[i]); };
  std::size_t end = 0;
  for (std::size_t begin = 0; begin < batch.parameters.size(); begin = end) {
    wire::SlicedRun run;
    while (end < batch.parameters.size() && group(end) == group(begin) &&
           wire::may_share_run(of(begin), of(end))) {
      run.parameters.push_back(&of(end++));
    }
    if (group(begin) < 0) continue;
    const MuonGroup& of_these = groups_.at(static_cast<std::size_t>(group(begin)));
    Piece slice = stored_piece(batch, begin, end, *of_these.rule);
    slice.transposed = run.shape().transposed;
    slice.applies = applies_;
    slice.gradient_factor = gradient_factor_;
    open.runs.push_back(std::move(run));
    open.groups.push_back(&of_these);
    open.slices.push_back(std::move(slice));
  }
  if (!open.runs.empty()) open.exchange.emplace(group_, open.runs);
  return open;
}

void SliceUpdate::prepare(core::BatchIndex batch) {
  Open& open = open_.at(batch) = this->open(owned_.batches()[batch]);
  for (std::size_t i = 0; i < open.runs.size(); ++i)
    open.directions.push_back(open.groups[i]->rule->direction(open.slices[i]).reshape({-1}));
}

void SliceUpdate::gather(core::BatchIndex batch) {
  Open& open = open_.at(batch);
  if (!open.exchange) return;
  open.wholes = open.exchange->gather(open.directions, applies_.options().dtype(at::kFloat),
                                      "directions of batch " + std::to_string(batch.value()));
}

void SliceUpdate::orthogonalise(core::BatchIndex batch) {
  Open& open = open_.at(batch);
  open.results.resize(open.runs.size());
  for (std::size_t i = 0; i < open.runs.size(); ++i) {
    if (open.wholes[i].defined())
      open.results[i] = orthogonalised(open.wholes[i], open.runs[i].shape(), *open.groups[i]);
  }
  open.wholes.clear();
}

void SliceUpdate::scatter(core::BatchIndex batch) {
  Open& open = open_.at(batch);
  if (!open.exchange) return;
  open.updates =
      open.exchange->scatter(open.results, applies_.options().dtype(dtype_of(open.groups)),
                             "updates of batch " + std::to_string(batch.value()));
}

void SliceUpdate::apply(core::BatchIndex batch) {
  const Open open = std::exchange(open_.at(batch), {});
  for (std::size_t i = 0; i < open.runs.size(); ++i) {
    const layout::View& view = open.runs[i].shape();
    const at::Tensor update = open.updates[i].view(open.slices[i].weights.sizes());
    open.groups[i]->rule->move(open.slices[i], update, view.rows, view.cols / view.column_blocks);
  }
}

}  // namespace dmuon::optim
