// Cost tables and plans as JSON.

#include <limits>
#include <nlohmann/json.hpp>

#include "dmuon/balance/verify.h"
#include "dmuon/core/error.h"
#include "dmuon/core/named.h"
#include "dmuon/plan/json_reader.h"
#include "dmuon/plan/parameter_json.h"
#include "dmuon/plan/plan.h"

// nlohmann-json finds these functions in the namespaces of the written types, within lists too, but
// not in an unnamed namespace.
namespace dmuon {

using Json = nlohmann::json;

namespace core {

template <typename Kind>
void to_json(Json& json, Index<Kind> index) {
  json = index.value();
}

template <typename I, typename T>
void to_json(Json& json, const Vector<I, T>& vector) {
  json = vector.values();
}

}  // namespace core

namespace layout {

static void to_json(Json& json, const Mesh& mesh) {
  json = {{"num_replicates", mesh.num_replicates},
          {"num_shards", mesh.num_shards},
          {"tensor_parallel", mesh.tensor_parallel}};
}

static void to_json(Json& json, const Parameter& matrix) {
  json = {{"unit", matrix.unit}, {"tensor_parallel", matrix.tensor_parallel}};
  plan::write_matrices(json, matrix);
}

}  // namespace layout

namespace balance {

constexpr const char* kKinds[] = {"one owner", "all owners", "patterns"};

static void to_json(Json& json, const BatchTime& batch) {
  json = {{"size", batch.size}, {"ns", batch.ns}};
}

static void to_json(Json& json, const Certificate& certificate) {
  json = {{"kind", kKinds[static_cast<int>(certificate.kind)]}, {"bound_ns", certificate.bound}};
  if (certificate.kind == Certificate::Kind::kOneOwner) json["shape"] = certificate.shape;
  if (certificate.kind == Certificate::Kind::kPatterns) {
    json["per_matrix"] = certificate.per_matrix;
    json["per_ns"] = certificate.per_ns;
    json["cells"] = certificate.cells;
  }
}

}  // namespace balance

namespace plan {

using balance::Certificate;

// Increase this number when a change makes older text mean something else.
constexpr int kCostsVersion = 1;
constexpr int kPlanVersion = 4;
constexpr int kMaxInt = std::numeric_limits<int>::max();
constexpr std::int64_t kMaxWide = std::numeric_limits<std::int64_t>::max();

static void to_json(Json& json, const ShapeCosts& entry) {
  json = {{"rows", entry.shape.rows},
          {"cols", entry.shape.cols},
          {"tensor_parallel", entry.shape.tensor_parallel},
          {"batches", entry.batches}};
  if (entry.shape.num_matrices != 1) json["num_matrices"] = entry.shape.num_matrices;
}

static void to_json(Json& json, const CostTable& costs) {
  json = {{"schema_version", kCostsVersion}, {"source", costs.source}, {"shapes", costs.shapes}};
}

static void to_json(Json& json, const PlanOptions& options) {
  json = {{"lookahead", options.lookahead},
          {"layout_slack", options.layout_slack},
          {"max_memory_bytes", options.max_memory_bytes},
          {"weight_bytes", options.weight_bytes},
          {"gradient_bytes", options.gradient_bytes},
          {"ns_bytes", options.ns_bytes},
          {"ns_steps", options.ns_steps},
          {"on_cpu", options.on_cpu},
          {"node_copy", options.node_copy},
          {"max_units_in_flight", options.max_units_in_flight},
          {"reshard_after_forward", options.reshard_after_forward}};
  if (options.reserve_bytes != 0) json["reserve_bytes"] = options.reserve_bytes;
  if (options.late_updates) json["late_updates"] = true;
  if (options.replicated) json["replicated"] = true;
  if (options.rule != PlanOptions().rule) json["rule"] = options.rule;
}

static void to_json(Json& json, const Batch& batch) {
  json = {{"owner", batch.owner}, {"matrices", batch.parameters}};
}

static void to_json(Json& json, const Memory& memory) { json = memory.total(); }

static void to_json(Json& json, const UnitSpread& unit) {
  json = {{"unit", unit.unit},
          {"bytes", unit.bytes},
          {"most_of_node", unit.most_of_node},
          {"least_of_node", unit.least_of_node},
          {"most_of_column", unit.most_of_column}};
}

static void to_json(Json& json, const Spread& spread) {
  json = {{"distinct_columns", spread.distinct_columns}, {"repeats", spread.repeats},
          {"busiest_column", spread.busiest_column},     {"batch_units", spread.batch_units},
          {"column_bytes", spread.column_bytes},         {"units", spread.units}};
}

namespace {

CostTable costs_of(const JsonReader& reader) {
  reader.require_version(kCostsVersion);
  CostTable costs;
  costs.source = reader.at("source").string();
  for (const JsonReader& entry : reader.at("shapes").items()) {
    ShapeCosts& shape = costs.shapes.emplace_back();
    shape.shape.rows = entry.at("rows").integer(1, kMaxSide);
    shape.shape.cols = entry.at("cols").integer(1, kMaxSide);
    shape.shape.tensor_parallel = entry.flag("tensor_parallel");
    shape.shape.num_matrices = entry.count("num_matrices", 1, kMaxSide);
    for (const JsonReader& batch : entry.at("batches").items()) {
      shape.batches.push_back(
          {batch.at("size").small(1, kMaxInt), batch.at("ns").integer(0, balance::kMaxTotalNs)});
    }
  }
  return costs;
}

Certificate certificate_of(const JsonReader& reader) {
  const auto& kind =
      core::named(balance::kKinds, reader.at("kind").string(), "plan.certificate.kind: expected");
  Certificate certificate;
  certificate.kind = static_cast<Certificate::Kind>(&kind - balance::kKinds);
  certificate.bound = reader.at("bound_ns").integer(0, balance::kMaxTotalNs);
  if (certificate.kind == Certificate::Kind::kOneOwner) {
    certificate.shape = ShapeIndex(reader.at("shape").small(-1, kMaxInt));
  }
  if (certificate.kind == Certificate::Kind::kPatterns) {
    for (const JsonReader& price : reader.at("per_matrix").items()) {
      certificate.per_matrix.push_back(price.integer(0, kMaxWide));
    }
    for (const JsonReader& price : reader.at("per_ns").items()) {
      certificate.per_ns.push_back(price.integer(0, kMaxWide));
    }
    certificate.cells = reader.at("cells").small(1, kMaxInt);
  }
  return certificate;
}

Mesh mesh_of(const JsonReader& reader) {
  Mesh mesh;
  mesh.num_replicates = reader.at("num_replicates").small(1, kMaxInt);
  mesh.num_shards = reader.at("num_shards").small(1, kMaxInt);
  mesh.tensor_parallel = reader.at("tensor_parallel").small(1, kMaxInt);
  validate(mesh);
  return mesh;
}

PlanOptions options_of(const JsonReader& reader) {
  PlanOptions options;
  options.lookahead = reader.at("lookahead").small(0, kMaxInt);
  options.layout_slack = reader.at("layout_slack").number();
  options.max_memory_bytes = reader.at("max_memory_bytes").integer(0, kMaxWide);
  if (const auto reserve = reader.find("reserve_bytes"))
    options.reserve_bytes = reserve->integer(0, kMaxWide);
  options.weight_bytes = reader.at("weight_bytes").small(1, 8);
  options.gradient_bytes = reader.at("gradient_bytes").small(1, 8);
  options.ns_bytes = reader.at("ns_bytes").small(1, 8);
  options.ns_steps = reader.at("ns_steps").small(0, kMaxInt);
  options.on_cpu = reader.at("on_cpu").boolean();
  options.node_copy = reader.at("node_copy").boolean();
  options.max_units_in_flight = reader.at("max_units_in_flight").small(0, kMaxInt);
  options.reshard_after_forward = reader.at("reshard_after_forward").boolean();
  if (const auto late = reader.find("late_updates")) options.late_updates = late->boolean();
  if (const auto whole = reader.find("replicated")) options.replicated = whole->boolean();
  if (const auto rule = reader.find("rule")) options.rule = rule->string();
  validate(options);
  return options;
}

void read_assignments(const JsonReader& reader, Plan& plan) {
  for (const JsonReader& entry : reader.items()) {
    Parameter parameter = read_matrices(entry);
    parameter.unit = entry.at("unit").small(0, kMaxInt);
    parameter.tensor_parallel = entry.at("tensor_parallel").boolean();
    plan.inventory.push_back(std::move(parameter));
    plan.owner.push_back(Owner(entry.at("owner").small(0, kMaxInt)));
  }
  validate(plan.inventory);
}

void check_bound(const Plan& plan) {
  const ShapeGroups groups = group_by_shape(plan.inventory);
  const std::string problem = verify(
      instance_of(groups, plan.costs, plan.mesh.num_owners(), plan.options.rule), plan.certificate);
  core::require(problem.empty(), "plan.certificate: expected a proof of ", plan.certificate.bound,
                " ns; ", problem);
}

}  // namespace

std::string to_json(const CostTable& costs) { return dump_json(costs); }

CostTable costs_from_json(std::string_view text) {
  const Json value = parse_json(text, "costs");
  const bool is_plan = value.is_object() && value.contains("assignments");
  core::require(!is_plan,
                "costs: expected a table of costs, as a plan has it under 'costs'; got a plan");
  return costs_of(JsonReader(value, "costs"));
}

std::string to_json(const Plan& plan) {
  Json assignments = plan.inventory;
  for (const ParameterIndex w : plan.owner.indices()) {
    assignments[w.position()]["owner"] = plan.owner[w];
  }
  Json loads = Json::array();
  for (const Nanoseconds ns : plan.loads_ns) loads.push_back(milliseconds(ns));
  return dump_json({
      {"schema_version", kPlanVersion},
      {"mesh", plan.mesh},
      {"strategy", plan.strategy},
      {"options", plan.options},
      {"assignments", std::move(assignments)},
      {"batches", plan.batches},
      {"costs", plan.costs},
      {"certificate", plan.certificate},
      // Informs readers; from_json computes these members again.
      {"makespan_ms", milliseconds(plan.makespan_ns())},
      {"bound_ms", milliseconds(plan.bound_ns())},
      {"gap", plan.gap()},
      {"loads_ms", std::move(loads)},
      {"memory_bytes", plan.memory},
      {"spread", plan.spread},
  });
}

Plan from_json(std::string_view text) {
  const Json value = parse_json(text, "plan");
  const JsonReader reader(value, "plan");
  reader.require_version(kPlanVersion);
  Plan plan;
  plan.mesh = mesh_of(reader.at("mesh"));
  plan.strategy = reader.at("strategy").string();
  plan.options = options_of(reader.at("options"));
  read_assignments(reader.at("assignments"), plan);
  for (const JsonReader& batch : reader.at("batches").items()) {
    Batch& read = plan.batches.emplace_back();
    read.owner = Owner(batch.at("owner").small(0, kMaxInt));
    for (const JsonReader& matrix : batch.at("matrices").items()) {
      read.parameters.emplace_back(matrix.small(0, kMaxInt));
    }
  }
  plan.costs = costs_of(reader.at("costs"));
  plan.certificate = certificate_of(reader.at("certificate"));
  complete(plan);
  check_bound(plan);
  return plan;
}

}  // namespace plan
}  // namespace dmuon
