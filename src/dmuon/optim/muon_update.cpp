#include "dmuon/optim/muon_update.h"

#include <c10/core/GradMode.h>

#include <string>
#include <utility>

#include "dmuon/core/error.h"

namespace dmuon::optim {
namespace {

void check(const at::Tensor& master, const at::Tensor& momentum, const at::Tensor& gradient) {
  for (const auto& [name, tensor] :
       {std::pair{"master", master}, {"momentum", momentum}, {"gradient", gradient}}) {
    core::require(tensor.defined() && tensor.dim() >= 2 && tensor.layout() == at::kStrided &&
                      tensor.scalar_type() == at::kFloat && tensor.device() == master.device() &&
                      tensor.sizes() == master.sizes(),
                  "update: ", name,
                  " must be dense fp32 of master's sizes, [..., rows, cols], on its ",
                  "device; got ", tensor.defined() ? tensor.toString() : "nothing", " ",
                  tensor.defined() ? tensor.sizes() : at::IntArrayRef());
  }
}

void check(const layout::View& view, const at::Tensor& master) {
  const std::string problem = view.problem_of_heights();
  core::require(problem.empty(), "update: heights: expected ", problem);
  core::require(view.heights.empty() || master.dim() == 3,
                "update: master: expected [b, rows, cols] of interleaved rows, got ",
                master.sizes());
}

void check(const std::vector<at::Tensor>& given, const std::vector<State>& states,
           const layout::View& view) {
  core::require(given.size() == states.size(), "update: others: expected ", states.size() - 1,
                " states beside the momentum, got ", given.size() - 1);
  for (std::size_t i = 0; i < given.size(); ++i) {
    const std::vector<std::int64_t> sizes = states[i].sizes_of(view);
    core::require(given[i].dim() >= 2 && given[i].size(-2) == sizes[0] &&
                      given[i].size(-1) == sizes[1] && given[i].scalar_type() == at::kFloat,
                  "update: ", states[i].name, ": expected fp32 [..., ", sizes[0], ", ", sizes[1],
                  "], got ", given[i].toString(), " ", given[i].sizes());
  }
}

}  // namespace

void muon_update(const at::Tensor& master, const at::Tensor& momentum, const at::Tensor& gradient,
                 const MuonGroup& group, const at::Tensor& applies, std::int64_t column_blocks,
                 bool transposed, const std::optional<at::Tensor>& memo,
                 const std::vector<at::Tensor>& others, const std::vector<std::int64_t>& heights) {
  check(master, momentum, gradient);
  std::vector<at::Tensor> states{momentum};
  states.insert(states.end(), others.begin(), others.end());
  const layout::View view{.rows = master.size(-2),
                          .cols = master.size(-1),
                          .column_blocks = column_blocks,
                          .transposed = transposed,
                          .heights = heights};
  check(view, master);
  check(states, group.rule->states(), view);
  const c10::AutoGradMode no_grad(false);
  const Piece stored{.weights = master,
                     .gradient = gradient,
                     .states = std::move(states),
                     .applies = applies,
                     .memo = memo.value_or(at::Tensor()),
                     .transposed = transposed};
  for (std::size_t part = 0; part < view.row_parts().size(); ++part)
    BatchUpdate(group, part_of(stored, view, part), column_blocks).run();
}

}  // namespace dmuon::optim
