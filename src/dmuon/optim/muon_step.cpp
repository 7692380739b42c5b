#include "dmuon/optim/muon_step.h"

#include <algorithm>
#include <memory>
#include <type_traits>
#include <utility>

#include "dmuon/core/error.h"
#include "dmuon/newton_schulz/cuda_kernels.h"
#include "dmuon/optim/slice_update.h"

namespace dmuon::optim {
namespace {

// What a graph depends on, as bytes.
class Key {
 public:
  template <typename T>
  void add(const T& value) {
    static_assert(std::is_arithmetic_v<T> || std::is_enum_v<T> || std::is_pointer_v<T>);
    bytes_.append(reinterpret_cast<const char*>(&value), sizeof value);
  }
  void add(const std::string& text) {
    add(text.size());
    bytes_ += text;
  }
  template <typename T>
  void add(const std::optional<T>& value) {
    add(value.has_value());
    if (value) add(*value);
  }
  void add(const newton_schulz::Choice& choice) {
    add(choice.backend);
    add(choice.form);
    add(choice.batched);
    add(choice.panel_rows);
    add(choice.elementwise);
  }
  void add(const newton_schulz::IterationOptions& options) {
    add(options.coefficients.size());
    for (const auto& [a, b, c] : options.coefficients) {
      for (const double one : {a, b, c}) add(one);
    }
    add(options.eps);
    add(options.dtype);
    add(options.choice);
    add(options.form);
    add(options.gram_dtype);
  }
  std::string bytes() && { return std::move(bytes_); }

 private:
  std::string bytes_;
};

const std::string kMemo = "memo";  // newton_schulz::MomentumStep::memo

}  // namespace

MuonUpdate::MuonUpdate(const wire::Owned& owned, std::vector<MuonGroup> groups,
                       core::Vector<core::ParameterIndex, int> group_of, at::Tensor applies,
                       std::shared_ptr<BatchGraphs> graphs, RowFactors row_factors)
    : owned_(owned),
      groups_(std::move(groups)),
      group_of_(std::move(group_of)),
      applies_(std::move(applies)),
      gradient_factor_(owned.gradient_factor()),
      graphs_(std::move(graphs)),
      row_factors_(std::move(row_factors)),
      programs_(owned.batches().size()),
      updates_(owned.batches().size()) {
  for (const wire::OwnedBatch& batch : owned.batches()) runs_.push_back(runs_of(batch));
}

// Mostly the whole batch is of one group.
std::vector<MuonUpdate::Run> MuonUpdate::runs_of(const wire::OwnedBatch& batch) {
  std::vector<Run> runs;
  const std::size_t size = batch.parameters.size();
  const auto group = [&](std::size_t index) { return group_of_.at(batch.parameters[index]); };
  std::size_t end = 0;
  for (std::size_t begin = 0; begin < size; begin = end) {
    end = begin + 1;
    while (end < size && group(end) == group(begin)) ++end;
    if (group(begin) < 0) continue;
    const MuonGroup& of_these = groups_.at(static_cast<std::size_t>(group(begin)));
    const layout::View& view = batch.view;
    const std::vector<layout::RowPart> parts = view.row_parts();
    for (std::size_t part = 0; part < parts.size(); ++part) {
      const std::size_t place = scalars_->add(of_these.rule->scalars(
          view.rows_of(parts[part]), view.cols / view.column_blocks, view.transposed));
      runs.push_back({begin, end, part, &of_these, place});
    }
  }
  return runs;
}

std::vector<BatchUpdate> MuonUpdate::updates_of(core::BatchIndex index, const at::Tensor& applies,
                                                const at::Tensor& gradient_factor) const {
  const wire::OwnedBatch& batch = owned_.batches()[index];
  std::vector<BatchUpdate> updates;
  for (const Run& run : runs_[index]) {
    Piece stored = stored_piece(batch, run.begin, run.end, *run.group->rule);
    stored.applies = applies;
    stored.gradient_factor = gradient_factor;
    if (batch.tensors.contains(kMemo)) stored.memo = batch.part(kMemo, run.begin, run.end);
    updates.emplace_back(*run.group, part_of(stored, batch.view, run.part),
                         batch.view.column_blocks, scalars_, run.scalars);
  }
  return updates;
}

// Beside addresses, the constants of launches and what decides which kernels are launched.
std::string MuonUpdate::key_of(core::BatchIndex index) const {
  const wire::OwnedBatch& batch = owned_.batches()[index];
  Key key;
  key.add(newton_schulz::current_stream(applies_.device()));
  for (const at::Tensor* tensor : {&inputs_->applies, &inputs_->gradient_factor, &inputs_->scalars})
    key.add(tensor->const_data_ptr());
  for (const auto& [name, tensor] : batch.tensors) {
    key.add(name);
    key.add(tensor.const_data_ptr());
  }
  const layout::View& view = batch.view;
  for (const std::int64_t size : {view.rows, view.cols, view.column_blocks}) key.add(size);
  key.add(view.heights.size());
  for (const std::int64_t height : view.heights) key.add(height);
  key.add(view.transposed);
  for (const Run& run : runs_[index]) {
    for (const std::size_t place : {run.begin, run.end, run.part, run.scalars}) key.add(place);
    for (const std::size_t place : {run.begin, run.end}) key.add(batch.first_matrix.at(place));
    key.add(run.group->rule->constants());
    const std::int64_t rows = view.rows_of(view.row_parts().at(run.part));
    key.add(run.group->iteration_of(rows, view.cols / view.column_blocks));
  }
  return std::move(key).bytes();
}

// True if the batch's update waits for apply().
bool MuonUpdate::takes_program(core::BatchIndex batch) {
  if (graphs_ == nullptr || runs_[batch].empty()) return false;
  if (inputs_ == nullptr) {
    inputs_ = &graphs_->begin_step(applies_, gradient_factor_, scalars_->size());
    scalars_->put_in(inputs_->scalars);
    if (scalars_->size() > 0) scalars_->on_device(0, applies_.device());  // not in a graph
  }
  BatchGraphs::Program& program = graphs_->program_of(batch, key_of(batch));
  for (const Run& run : runs_[batch]) {
    if (!run.group->rule->constants())
      program.reason = "launches: its rule of update is not for graphs";
  }
  programs_.at(batch) = program.reason.empty() ? &program : nullptr;
  return program.reason.empty();
}

void MuonUpdate::prepare(core::BatchIndex batch) {
  if (takes_program(batch)) return;
  updates_.at(batch) = updates_of(batch, applies_, gradient_factor_);
  if (by_piece()) return;
  for (BatchUpdate& update : updates_[batch]) update.prepare();
}

void MuonUpdate::orthogonalise(core::BatchIndex batch) {
  if (by_piece()) {
    for (BatchUpdate& update : std::exchange(updates_.at(batch), {})) update.run();
    return;
  }
  for (BatchUpdate& update : updates_.at(batch)) update.orthogonalise();
}

void MuonUpdate::apply(core::BatchIndex batch) {
  move(batch);
  scale_rows(owned_.batches()[batch], row_factors_);
}

void MuonUpdate::move(core::BatchIndex batch) {
  if (BatchGraphs::Program* const program = std::exchange(programs_.at(batch), nullptr)) {
    return graphs_->run(*program, [&] {
      std::vector<BatchUpdate> updates =
          updates_of(batch, inputs_->applies, inputs_->gradient_factor);
      for (BatchUpdate& update : updates) update.prepare();
      for (BatchUpdate& update : updates) update.orthogonalise();
      for (BatchUpdate& update : updates) update.apply();
    });
  }
  for (BatchUpdate& update : std::exchange(updates_.at(batch), {})) update.apply();
}

std::vector<std::string> add_states(engine::Engine& engine, const Rule& rule,
                                    std::int64_t memo_words) {
  std::vector<std::string> names;
  for (const State& state : rule.states()) {
    engine.owned().add(state.name,
                       [state](const layout::View& view) { return state.sizes_of(view); });
    names.push_back(state.name);
  }
  if (memo_words > 0 && engine.slices() == nullptr) {
    engine.owned().add(kMemo, [memo_words](const layout::View& view) {
      const auto num_parts = static_cast<std::int64_t>(view.row_parts().size());
      return std::vector<std::int64_t>{1, memo_words * view.column_blocks * num_parts};
    });
  }
  return names;
}

void muon_step(engine::Engine& engine, const std::vector<MuonGroup>& groups,
               const core::Vector<core::ParameterIndex, int>& group_of, const at::Tensor& applies,
               const std::shared_ptr<BatchGraphs>& graphs, const RowFactors& row_factors) {
  core::require(row_factors.empty() || engine.slices() == nullptr,
                "muon_step: row_factors: expected none with tensor parallelism, got ",
                row_factors.size());
  check_row_factors(row_factors, engine.owned(), engine.parameters());
  if (!std::ranges::all_of(groups, [](const auto& of) { return of.rule->takes_gradient_factor(); }))
    engine.owned().multiply_factor_in();
  const bool sliced = engine.slices() != nullptr;
  std::string why;          // no graphs
  if (graphs != nullptr) {  // asked only then: it may test kernels
    why = sliced ? "with tensor parallelism slices travel in an update"
                 : newton_schulz::why_no_cuda_kernels(applies.device());
    graphs->refuse(why.empty() ? "" : "all batches: launches: " + why);
  }
  if (sliced) {
    return engine.step(std::make_shared<SliceUpdate>(engine.owned(), engine.sliced(),
                                                     engine.slices(), groups, group_of, applies));
  }
  const std::int64_t before = graphs != nullptr ? graphs->scratch_bytes() : 0;
  engine.step(std::make_shared<MuonUpdate>(engine.owned(), groups, group_of, applies,
                                           why.empty() ? graphs : nullptr, row_factors));
  if (graphs != nullptr) engine.owned().pool()->count(graphs->scratch_bytes() - before);
}

}  // namespace dmuon::optim
