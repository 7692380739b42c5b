#include <limits>
#include <nlohmann/json.hpp>

#include "dmuon/balance/verify.h"
#include "dmuon/core/error.h"
#include "dmuon/plan/complete.h"
#include "dmuon/plan/cost_json.h"
#include "dmuon/plan/json_reader.h"
#include "dmuon/plan/plan.h"

namespace dmuon::plan {
namespace {

using balance::Certificate;
using Json = nlohmann::json;

// Raised when a change makes older text mean something else.
constexpr int kPlanVersion = 2;
constexpr int kMaxInt = std::numeric_limits<int>::max();
constexpr std::int64_t kMaxWide = std::numeric_limits<std::int64_t>::max();
constexpr const char* kKinds[] = {"one owner", "all owners", "patterns"};

Json json_of(const Certificate& certificate) {
  Json json = {{"kind", kKinds[static_cast<int>(certificate.kind)]},
               {"bound_ns", certificate.bound}};
  if (certificate.kind == Certificate::Kind::kOneOwner) json["shape"] = certificate.shape;
  if (certificate.kind == Certificate::Kind::kPatterns) {
    json["per_matrix"] = certificate.per_matrix;
    json["per_ns"] = certificate.per_ns;
    json["cells"] = certificate.cells;
  }
  return json;
}

Certificate certificate_of(const JsonReader& reader) {
  Certificate certificate;
  const std::string kind = reader.at("kind").string();
  int index = 0;
  while (index < 3 && kind != kKinds[index]) ++index;
  core::require(index < 3, "plan.certificate.kind: expected one of '", kKinds[0], "', '", kKinds[1],
                "', '", kKinds[2], "'; got '", kind, "'");
  certificate.kind = static_cast<Certificate::Kind>(index);
  certificate.bound = reader.at("bound_ns").integer(0, balance::kMaxTotalNs);
  if (certificate.kind == Certificate::Kind::kOneOwner) {
    certificate.shape = reader.at("shape").small(-1, kMaxInt);
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

Json json_of(const Options& options) {
  return {{"lookahead", options.lookahead},
          {"layout_slack", options.layout_slack},
          {"max_memory_bytes", options.max_memory_bytes},
          {"weight_bytes", options.weight_bytes},
          {"gradient_bytes", options.gradient_bytes},
          {"node_copy", options.node_copy},
          {"units_in_flight", options.units_in_flight}};
}

Options options_of(const JsonReader& reader) {
  Options options;
  options.lookahead = reader.at("lookahead").small(0, kMaxInt);
  options.layout_slack = reader.at("layout_slack").number();
  options.max_memory_bytes = reader.at("max_memory_bytes").integer(0, kMaxWide);
  options.weight_bytes = reader.at("weight_bytes").small(1, 8);
  options.gradient_bytes = reader.at("gradient_bytes").small(1, 8);
  options.node_copy = reader.at("node_copy").boolean();
  options.units_in_flight = reader.at("units_in_flight").small(1, kMaxInt);
  validate(options);
  return options;
}

Json assignments(const Plan& plan) {
  Json all = Json::array();
  for (std::size_t w = 0; w < plan.inventory.size(); ++w) {
    const Parameter& matrix = plan.inventory[w];
    all.push_back({{"name", matrix.name},
                   {"rows", matrix.rows},
                   {"cols", matrix.cols},
                   {"unit", matrix.unit},
                   {"tensor_parallel", matrix.tensor_parallel},
                   {"owner", plan.owner[w]}});
  }
  return all;
}

void read_assignments(const JsonReader& reader, Plan& plan) {
  for (const JsonReader& entry : reader.items()) {
    plan.inventory.push_back({entry.at("name").string(), entry.at("rows").integer(1, kMaxInt),
                              entry.at("cols").integer(1, kMaxInt),
                              entry.at("unit").small(0, kMaxInt),
                              entry.at("tensor_parallel").boolean()});
    plan.owner.push_back(entry.at("owner").small(0, kMaxInt));
  }
  validate(plan.inventory);
}

void check_bound(const Plan& plan) {
  const ShapeGroups groups = group_by_shape(plan.inventory);
  const std::string problem = verify(
      instance_of(groups, plan.costs, plan.mesh.num_owners(), kStateBytes), plan.certificate);
  core::require(problem.empty(), "plan.certificate: expected a proof of ", plan.certificate.bound,
                " ns; ", problem);
}

}  // namespace

std::string to_json(const Plan& plan) {
  Json loads = Json::array();
  for (const Nanoseconds ns : plan.loads_ns) loads.push_back(milliseconds(ns));
  Json bytes = Json::array();
  for (const Memory& one : plan.memory) bytes.push_back(one.total());
  Json batches = Json::array();
  for (const Batch& batch : plan.batches) {
    batches.push_back({{"owner", batch.owner}, {"matrices", batch.parameters}});
  }
  return dump_json({
      {"schema_version", kPlanVersion},
      {"mesh",
       {{"num_replicates", plan.mesh.num_replicates},
        {"num_shards", plan.mesh.num_shards},
        {"tensor_parallel", plan.mesh.tensor_parallel}}},
      {"strategy", plan.strategy},
      {"options", json_of(plan.options)},
      {"assignments", assignments(plan)},
      {"batches", std::move(batches)},
      {"costs", json_of(plan.costs)},
      {"certificate", json_of(plan.certificate)},
      // For readers; from_json computes them again.
      {"makespan_ms", milliseconds(plan.makespan_ns())},
      {"bound_ms", milliseconds(plan.bound_ns())},
      {"gap", plan.gap()},
      {"loads_ms", std::move(loads)},
      {"memory_bytes", std::move(bytes)},
      {"spread",
       {{"distinct_columns", plan.spread.distinct_columns},
        {"repeats", plan.spread.repeats},
        {"busiest_column", plan.spread.busiest_column},
        {"batch_units", plan.spread.batch_units},
        {"column_bytes", plan.spread.column_bytes}}},
  });
}

Plan from_json(std::string_view text) {
  const Json value = parse_json(text, "plan");
  const JsonReader reader(value, "plan");
  reader.require_version(kPlanVersion);
  Plan plan;
  const JsonReader mesh = reader.at("mesh");
  plan.mesh.num_replicates = mesh.at("num_replicates").small(1, kMaxInt);
  plan.mesh.num_shards = mesh.at("num_shards").small(1, kMaxInt);
  plan.mesh.tensor_parallel = mesh.at("tensor_parallel").small(1, kMaxInt);
  validate(plan.mesh);
  plan.strategy = reader.at("strategy").string();
  plan.options = options_of(reader.at("options"));
  read_assignments(reader.at("assignments"), plan);
  for (const JsonReader& batch : reader.at("batches").items()) {
    Batch read{batch.at("owner").small(0, kMaxInt), {}};
    for (const JsonReader& matrix : batch.at("matrices").items()) {
      read.parameters.push_back(matrix.small(0, kMaxInt));
    }
    plan.batches.push_back(std::move(read));
  }
  plan.costs = costs_of(reader.at("costs"));
  plan.certificate = certificate_of(reader.at("certificate"));
  complete(plan);
  check_bound(plan);
  return plan;
}

}  // namespace dmuon::plan
