#include "dmuon/plan/cost_json.h"

#include <limits>
#include <nlohmann/json.hpp>

#include "dmuon/plan/cost.h"

namespace dmuon::plan {
namespace {

constexpr int kCostsVersion = 1;

}  // namespace

nlohmann::json json_of(const CostTable& costs) {
  auto shapes = nlohmann::json::array();
  for (const ShapeCosts& entry : costs.shapes) {
    auto batches = nlohmann::json::array();
    for (const BatchTime& batch : entry.batches) {
      batches.push_back({{"size", batch.size}, {"ns", batch.ns}});
    }
    shapes.push_back({{"rows", entry.shape.rows},
                      {"cols", entry.shape.cols},
                      {"tensor_parallel", entry.shape.tensor_parallel},
                      {"batches", std::move(batches)}});
  }
  return {
      {"schema_version", kCostsVersion}, {"source", costs.source}, {"shapes", std::move(shapes)}};
}

CostTable costs_of(const JsonReader& reader) {
  reader.require_version(kCostsVersion);
  CostTable costs;
  costs.source = reader.at("source").string();
  for (const JsonReader& entry : reader.at("shapes").items()) {
    ShapeCosts shape;
    shape.shape.rows = entry.at("rows").integer(1, kMaxSide);
    shape.shape.cols = entry.at("cols").integer(1, kMaxSide);
    const auto tensor_parallel = entry.find("tensor_parallel");
    shape.shape.tensor_parallel = tensor_parallel && tensor_parallel->boolean();
    for (const JsonReader& batch : entry.at("batches").items()) {
      shape.batches.push_back({batch.at("size").small(1, std::numeric_limits<int>::max()),
                               batch.at("ns").integer(0, balance::kMaxTotalNs)});
    }
    costs.shapes.push_back(std::move(shape));
  }
  return costs;
}

std::string to_json(const CostTable& costs) { return dump_json(json_of(costs)); }

CostTable costs_from_json(std::string_view text) {
  const nlohmann::json value = parse_json(text, "costs");
  return costs_of(JsonReader(value, "costs"));
}

}  // namespace dmuon::plan
