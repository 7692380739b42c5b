#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include "dmuon/bindings/index_caster.h"
#include "dmuon/bindings/topics.h"
#include "dmuon/optim/muon_step.h"
#include "dmuon/optim/muon_update.h"
#include "dmuon/optim/rules/make_rule.h"
#include "dmuon/optim/rules/recorded.h"
#include "dmuon/optim/rules/user_rule.h"

namespace dmuon::bindings {
namespace py = pybind11;
using optim::MuonGroup;
using optim::UserFunction;

namespace {

// One of dmuon's by its name, or the user's.
using RuleChoice = std::variant<std::string, std::shared_ptr<UserFunction>>;

std::shared_ptr<const optim::Rule> rule_of(const RuleChoice& choice,
                                           const optim::MuonOptions& options) {
  if (const auto* name = std::get_if<std::string>(&choice)) return make_rule(*name, options);
  return std::make_shared<optim::UserRule>(options,
                                           std::get<std::shared_ptr<UserFunction>>(choice));
}

void init_user_rules(py::module_& module) {
  using Side = std::optional<std::int64_t>;
  using Tensors = std::vector<at::Tensor>;
  // Takes the GIL for the call, and whenever it copies or frees the function or its error.
  using Call = std::function<std::pair<at::Tensor, Tensors>(
      const at::Tensor&, const at::Tensor&, const Tensors&, const std::map<std::string, double>&)>;
  py::class_<UserFunction, std::shared_ptr<UserFunction>>(module, "UserFunction")
      .def(py::init([](std::string name,
                       const std::vector<std::tuple<std::string, Side, Side>>& states,
                       bool moves_weights, Call call) {
             UserFunction made{std::move(name), {}, moves_weights, {}};
             for (const auto& [state, rows, cols] : states)
               made.states.push_back(optim::user_state(state, rows, cols));
             made.call = [call = std::move(call)](const optim::UserMatrix& matrix) {
               auto [answer, new_states] = call(matrix.update, matrix.weights, matrix.states,
                                                {{"lr", matrix.lr},
                                                 {"adjusted_lr", matrix.adjusted_lr},
                                                 {"weight_decay", matrix.weight_decay},
                                                 {"beta2", matrix.beta2}});
               return optim::UserResult{std::move(answer), std::move(new_states)};
             };
             return std::make_shared<UserFunction>(std::move(made));
           }),
           py::arg("name"), py::arg("states"), py::arg("moves_weights"), py::arg("call"));
  module.def(
      "end_user_functions",
      [](int most_ms) { return optim::end_user_functions(std::chrono::milliseconds(most_ms)); },
      py::arg("most_ms"), py::call_guard<py::gil_scoped_release>());
}

// Of one stored matrix, by the names of the rule's states.
std::vector<std::pair<std::string, std::vector<std::int64_t>>> state_sizes(
    const MuonGroup& group, std::int64_t rows, std::int64_t cols, std::int64_t column_blocks,
    bool transposed) {
  std::vector<std::pair<std::string, std::vector<std::int64_t>>> sizes;
  for (const optim::State& state : group.rule->states())
    sizes.emplace_back(state.name, state.sizes_of({1, rows, cols, column_blocks, transposed, {}}));
  return sizes;
}

void init_update_stats(py::module_& module) {
  module.attr("UPDATE_STATS") = optim::kUpdateStats;
  module.def("begin_update_stats", &optim::begin_update_stats, py::arg("engine"),
             py::call_guard<py::gil_scoped_release>());
}

}  // namespace

void init_optim(py::module_& module) {
  const py::call_guard<py::gil_scoped_release> no_gil;
  init_user_rules(module);
  init_update_stats(module);

  py::class_<MuonGroup>(module, "MuonGroup")
      .def(py::init([](double lr, double weight_decay, double momentum, bool nesterov,
                       const std::vector<std::tuple<double, double, double>>& coefficients,
                       double eps, const std::string& adjust_lr_fn, at::ScalarType ns_dtype,
                       newton_schulz::Choices choices, const RuleChoice& rule, double beta2,
                       bool cautious_weight_decay, bool records) {
             newton_schulz::IterationOptions iteration;
             iteration.eps = eps;
             iteration.dtype = ns_dtype;
             for (const auto& [a, b, c] : coefficients) iteration.coefficients.push_back({a, b, c});
             const optim::MuonOptions muon{lr,
                                           weight_decay,
                                           momentum,
                                           nesterov,
                                           optim::parse_adjust_lr(adjust_lr_fn),
                                           beta2,
                                           cautious_weight_decay};
             std::shared_ptr<const optim::Rule> made = rule_of(rule, muon);
             if (records) made = std::make_shared<optim::Recorded>(std::move(made));
             return MuonGroup{std::move(made), std::move(iteration), std::move(choices)};
           }),
           py::arg("lr"), py::arg("weight_decay"), py::arg("momentum"), py::arg("nesterov"),
           py::arg("coefficients"), py::arg("eps"), py::arg("adjust_lr_fn"), py::arg("ns_dtype"),
           py::arg("choices") = newton_schulz::Choices(), py::arg("rule") = RuleChoice("muon"),
           py::arg("beta2") = 0.0, py::arg("cautious_weight_decay") = false,
           py::arg("records") = false)
      .def("state_sizes", &state_sizes, py::arg("rows"), py::arg("cols"),
           py::arg("column_blocks") = 1, py::arg("transposed") = false);

  module.def(
      "add_states",
      [](engine::Engine& engine, const RuleChoice& rule, std::int64_t memo_words) {
        return optim::add_states(engine, *rule_of(rule, {}), memo_words);
      },
      py::arg("engine"), py::arg("rule"), py::arg("memo_words"), no_gil);
  py::class_<optim::BatchGraphs, std::shared_ptr<optim::BatchGraphs>>(module, "BatchGraphs")
      .def(py::init<std::int64_t>(), py::arg("most_bytes"))
      .def("reports", &optim::BatchGraphs::reports)
      .def_property_readonly("num_captures", &optim::BatchGraphs::num_captures)
      .def_property_readonly("num_launches", &optim::BatchGraphs::num_launches);
  module.def(
      "muon_step",
      [](engine::Engine& engine, const std::vector<MuonGroup>& groups,
         const core::Vector<core::ParameterIndex, int>& group_of, const at::Tensor& applies,
         const std::optional<std::shared_ptr<optim::BatchGraphs>>& graphs,
         const optim::RowFactors& row_factors) {
        optim::muon_step(engine, groups, group_of, applies, graphs.value_or(nullptr), row_factors);
      },
      py::arg("engine"), py::arg("groups"), py::arg("group_of"), py::arg("applies"),
      py::arg("graphs") = std::nullopt, py::arg("row_factors") = optim::RowFactors(), no_gil);
  module.def("muon_update", &optim::muon_update, py::arg("master"), py::arg("momentum"),
             py::arg("gradient"), py::arg("group"), py::arg("applies"),
             py::arg("column_blocks") = 1, py::arg("transposed") = false,
             py::arg("memo") = std::nullopt, py::arg("others") = std::vector<at::Tensor>(),
             py::arg("heights") = std::vector<std::int64_t>(), no_gil);
}

}  // namespace dmuon::bindings
