#include "dmuon/plan/plan.h"

#include <optional>
#include <tuple>
#include <utility>

#include "dmuon/bindings/index_caster.h"
#include "dmuon/bindings/topics.h"
#include "dmuon/catalog/catalog.h"
#include "dmuon/core/error.h"
#include "dmuon/plan/division.h"
#include "dmuon/plan/state_bytes.h"
#include "dmuon/plan/strategy.h"
#include "dmuon/plan/wire_time.h"

namespace dmuon::bindings {
namespace py = pybind11;
using plan::CostTable;
using plan::Inventory;
using plan::Mesh;
using plan::Parameter;
using plan::Plan;
using plan::PlanOptions;

namespace {

// Returns number of matrices, rows and cols of the shapes whose costs add up to a parameter's.
std::vector<std::tuple<std::int64_t, std::int64_t, std::int64_t>> sizes_of_costs(
    const Parameter& parameter) {
  std::vector<std::tuple<std::int64_t, std::int64_t, std::int64_t>> all;
  for (const plan::Shape& shape : parameter.shape().of_costs())
    all.emplace_back(shape.num_matrices, shape.rows, shape.cols);
  return all;
}

void init_parameter(py::module_& module) {
  py::class_<Parameter>(module, "Parameter",
                        "One dedicated parameter: matrices that follow each other in memory.")
      .def(py::init([](std::string name, std::int64_t rows, std::int64_t cols, int unit,
                       bool tensor_parallel, std::int64_t num_matrices, bool continues,
                       std::optional<core::Shard> column, std::int64_t column_blocks,
                       bool transposed, std::vector<std::int64_t> heights) {
             core::require(column_blocks >= 1,
                           "Parameter: column_blocks: expected at least 1; got ", column_blocks);
             return Parameter{
                 std::move(name),
                 {num_matrices, rows, cols, column_blocks, transposed, std::move(heights)},
                 unit,
                 tensor_parallel,
                 continues,
                 column};
           }),
           py::arg("name"), py::arg("rows"), py::arg("cols"), py::arg("unit"),
           py::arg("tensor_parallel") = false, py::arg("num_matrices") = 1,
           py::arg("continues") = false, py::arg("column") = py::none(),
           py::arg("column_blocks") = 1, py::arg("transposed") = false,
           py::arg("heights") = std::vector<std::int64_t>())
      .def_readonly("name", &Parameter::name)
      .def_property_readonly("rows", [](const Parameter& p) { return p.view.rows; })
      .def_property_readonly("cols", [](const Parameter& p) { return p.view.cols; })
      .def_readonly("unit", &Parameter::unit)
      .def_readonly("tensor_parallel", &Parameter::tensor_parallel)
      .def_property_readonly("num_matrices", [](const Parameter& p) { return p.view.num_matrices; })
      .def_readonly("continues", &Parameter::continues)
      .def_readonly("column", &Parameter::column)
      .def_property_readonly("column_blocks",
                             [](const Parameter& p) { return p.view.column_blocks; })
      .def_property_readonly("transposed", [](const Parameter& p) { return p.view.transposed; })
      .def_property_readonly("heights", [](const Parameter& p) { return p.view.heights; })
      .def("sizes_of_costs", &sizes_of_costs)
      .def("shape_text", [](const Parameter& p) { return layout::to_string(p.shape()); });
}

void init_mesh_and_options(py::module_& module) {
  py::class_<Mesh>(module, "Mesh", "R x G slots of T ranks.")
      .def(py::init([](int num_replicates, int num_shards, int tensor_parallel) {
             return Mesh{num_replicates, num_shards, tensor_parallel};
           }),
           py::arg("num_replicates"), py::arg("num_shards"), py::arg("tensor_parallel") = 1)
      .def_readonly("num_replicates", &Mesh::num_replicates)
      .def_readonly("num_shards", &Mesh::num_shards)
      .def_readonly("tensor_parallel", &Mesh::tensor_parallel)
      .def("num_owners", &Mesh::num_owners)
      .def("shard_of", py::overload_cast<core::Owner>(&Mesh::shard_of, py::const_),
           py::arg("owner"))
      .def("replicate_of", py::overload_cast<core::Owner>(&Mesh::replicate_of, py::const_),
           py::arg("owner"));

  using schedule::StepOptions;
  module.attr("NS_STEPS") = flops::kDefaultSteps;
  py::class_<StepOptions>(module, "StepOptions")
      .def(py::init<>())
      .def_readwrite("node_copy", &StepOptions::node_copy)
      .def_readwrite("lookahead", &StepOptions::lookahead)
      .def_readwrite("max_units_in_flight", &StepOptions::max_units_in_flight)
      .def_readwrite("reshard_after_forward", &StepOptions::reshard_after_forward)
      .def_readwrite("late_updates", &StepOptions::late_updates)
      .def_readwrite("replicated", &StepOptions::replicated);
  module.def("updates_late", &schedule::updates_late, py::arg("on_cpu"), py::arg("num_replicates"));

  py::class_<PlanOptions, StepOptions>(module, "PlanOptions")
      .def(py::init<const StepOptions&>(), py::arg_v("step", StepOptions{}, "StepOptions()"))
      .def_readwrite("layout_slack", &PlanOptions::layout_slack)
      .def_readwrite("max_memory_bytes", &PlanOptions::max_memory_bytes)
      .def_readwrite("reserve_bytes", &PlanOptions::reserve_bytes)
      .def_readwrite("weight_bytes", &PlanOptions::weight_bytes)
      .def_readwrite("gradient_bytes", &PlanOptions::gradient_bytes)
      .def_readwrite("ns_bytes", &PlanOptions::ns_bytes)
      .def_readwrite("ns_steps", &PlanOptions::ns_steps)
      .def_readwrite("on_cpu", &PlanOptions::on_cpu)
      .def_readwrite("rule", &PlanOptions::rule)
      .def("validate", py::overload_cast<const PlanOptions&, std::string_view>(&plan::validate),
           py::arg("function"));
}

// A parameter's shape in Python: number of matrices, rows, cols.
using Sizes = std::array<std::int64_t, 3>;

plan::Shape shape_of(const Sizes& sizes) {
  return {.rows = sizes[1], .cols = sizes[2], .num_matrices = sizes[0]};
}

// Times of batches in Python: [(parameters, nanoseconds)].
CostTable cost_table(
    std::string source,
    const std::vector<std::pair<Sizes, std::vector<std::pair<int, std::int64_t>>>>& entries) {
  CostTable table{std::move(source), {}};
  for (const auto& [sizes, times] : entries) {
    plan::ShapeCosts costs{shape_of(sizes), {}};
    for (const auto& [size, ns] : times) costs.batches.push_back({size, ns});
    table.shapes.push_back(std::move(costs));
  }
  return table;
}

// Returns (size, nanoseconds) for each batch of the parameter's shape.
std::vector<std::pair<int, std::int64_t>> batches_of_shape(const CostTable& table,
                                                           const Parameter& parameter) {
  std::vector<std::pair<int, std::int64_t>> batches;
  for (const auto& [size, ns] : plan::batch_times(table, parameter.shape())) {
    batches.emplace_back(size, ns);
  }
  return batches;
}

void init_costs(py::module_& module) {
  const py::call_guard<py::gil_scoped_release> no_gil;

  py::class_<CostTable>(module, "CostTable", "c[s,b], nanoseconds of a batch.")
      .def(py::init(&cost_table), py::arg("source"), py::arg("entries"))
      .def_readonly("source", &CostTable::source)
      .def("batches", &batches_of_shape, py::arg("parameter"))
      .def(
          "to_json", [](const CostTable& table) { return plan::to_json(table); }, no_gil)
      .def_static("from_json", &plan::costs_from_json, py::arg("text"), no_gil);
  module.def(
      "candidate_batches",
      [](const Sizes& sizes, int num_parameters) {
        return plan::candidate_batches(shape_of(sizes), num_parameters);
      },
      py::arg("sizes"), py::arg("num_parameters"));
  module.def(
      "modelled_ns",
      [](const std::string& device, const Sizes& sizes, int num_batch) {
        return plan::modelled_ns(catalog::device(device), shape_of(sizes), num_batch);
      },
      py::arg("device"), py::arg("sizes"), py::arg("num_batch"));
  module.def(
      "modelled_costs",
      [](const Inventory& inventory, const std::string& device, int tensor_parallel) {
        return plan::modelled_costs(plan::group_by_shape(inventory), catalog::device(device),
                                    tensor_parallel);
      },
      py::arg("inventory"), py::arg("device"), py::arg("tensor_parallel") = 1, no_gil);
  module.def(
      "with_exchange",
      [](CostTable costs, const std::string& device, int tensor_parallel) {
        return plan::with_exchange(std::move(costs), catalog::device(device), tensor_parallel);
      },
      py::arg("costs"), py::arg("device"), py::arg("tensor_parallel"), no_gil);
}

std::vector<std::pair<core::Owner, std::vector<core::ParameterIndex>>> batches_of(
    const Plan& plan) {
  std::vector<std::pair<core::Owner, std::vector<core::ParameterIndex>>> batches;
  for (const auto& batch : plan.batches) batches.emplace_back(batch.owner, batch.parameters);
  return batches;
}

void init_results(py::module_& module) {
  using plan::Memory;
  using plan::Spread;
  using plan::UnitSpread;
  using plan::WireTime;
  const py::call_guard<py::gil_scoped_release> no_gil;

  py::class_<UnitSpread>(module, "UnitSpread", "A unit's bytes, by where their owners are.")
      .def_readonly("unit", &UnitSpread::unit)
      .def_readonly("bytes", &UnitSpread::bytes)
      .def_readonly("most_of_node", &UnitSpread::most_of_node)
      .def_readonly("least_of_node", &UnitSpread::least_of_node)
      .def_readonly("most_of_column", &UnitSpread::most_of_column);

  py::class_<Spread>(module, "Spread", "The spread of a window's matrices over columns.")
      .def_readonly("distinct_columns", &Spread::distinct_columns)
      .def_readonly("repeats", &Spread::repeats)
      .def_readonly("busiest_column", &Spread::busiest_column)
      .def_readonly("column_bytes", &Spread::column_bytes)
      .def_readonly("units", &Spread::units);

  py::class_<WireTime>(module, "WireTime", "Milliseconds of a step's messages between nodes.")
      .def_readonly("publish_ms", &WireTime::publish_ms)
      .def_readonly("route_ms", &WireTime::route_ms)
      .def_readonly("bound_ms", &WireTime::bound_ms);

  py::class_<Memory>(module, "Memory", "Bytes of one rank.")
      .def_readonly("state", &Memory::state)
      .def_readonly("node_copy", &Memory::node_copy)
      .def_readonly("buffers", &Memory::buffers)
      .def_readonly("update", &Memory::update)
      .def("total", &Memory::total);

  py::class_<Plan>(module, "Plan", "The owner of each parameter, and the batches.")
      .def_readonly("mesh", &Plan::mesh)
      .def_readonly("strategy", &Plan::strategy)
      .def_readonly("options", &Plan::options)
      .def_readonly("inventory", &Plan::inventory)
      .def_readonly("owner", &Plan::owner)
      .def_property_readonly("batches", &batches_of)
      .def_property_readonly("batches_by_slot", &plan::batches_by_slot)
      .def_readonly("loads_ns", &Plan::loads_ns)
      .def_property_readonly("makespan_ns", &Plan::makespan_ns)
      .def_property_readonly("bound_ns", &Plan::bound_ns)
      .def_property_readonly("gap", &Plan::gap)
      .def_property_readonly("memory", [](const Plan& p) { return p.memory.values(); })
      .def_property_readonly("memory_bytes",
                             [](const Plan& p) {
                               std::vector<std::int64_t> totals;
                               for (const Memory& one : p.memory) totals.push_back(one.total());
                               return totals;
                             })
      .def_readonly("spread", &Plan::spread)
      .def_property_readonly("costs", [](const Plan& p) { return p.costs; })
      .def(
          "to_json", [](const Plan& p) { return plan::to_json(p); }, no_gil)
      .def_static("from_json", &plan::from_json, py::arg("text"), no_gil)
      .def("wire_time", &plan::wire_time, py::arg("bytes_per_s"))
      .def("require_fit", &plan::require_fit, py::arg("inventory"), py::arg("mesh"), no_gil)
      .def("hash", &plan::hash, no_gil);
}

}  // namespace

void init_plan(py::module_& module) {
  const py::call_guard<py::gil_scoped_release> no_gil;
  init_parameter(module);
  init_mesh_and_options(module);
  init_costs(module);
  init_results(module);
  module.def("divide", &plan::divide, py::arg("inventory"), py::arg("mesh"),
             py::arg("smallest_part") = plan::kSmallestPart, no_gil);
  module.attr("SMALLEST_PART") = plan::kSmallestPart;
  module.attr("MOST_OF_STATE") = plan::kMostOfState;
  module.attr("ACCELERATOR_RESERVE_BYTES") = plan::kAcceleratorReserveBytes;
  module.def("make_plan", &plan::make_plan, py::arg("inventory"), py::arg("mesh"),
             py::arg("strategy"), py::arg("costs"), py::arg("options"), no_gil);
  module.def("make_plan_from_counts", &plan::make_plan_from_counts, py::arg("inventory"),
             py::arg("mesh"), py::arg("strategy"), py::arg("counts"), py::arg("costs"),
             py::arg("options"), no_gil);
  module.def("strategy_names", &plan::strategy_names);
  module.def("reads_costs", &plan::reads_costs, py::arg("strategy"));
  module.def("rule_names", &plan::rule_names);
}

}  // namespace dmuon::bindings
