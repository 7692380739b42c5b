#include <limits>
#include <nlohmann/json.hpp>

#include "dmuon/core/error.h"
#include "dmuon/plan/plan.h"

namespace dmuon::plan {
namespace {

using Json = nlohmann::json;

// Raised when a change makes older text mean something else.
constexpr int kFormat = 1;

// nlohmann::json converts numbers as C does: it would read 1.9, true or 2^32 as an int.
int as_int(const Json& value, std::string_view what) {
  const bool small =
      value.is_number_integer() &&
      (!value.is_number_unsigned() ||
       value.get<std::uint64_t>() <= std::uint64_t{std::numeric_limits<int>::max()}) &&
      value.get<std::int64_t>() >= std::numeric_limits<int>::min();
  core::require(small, "from_json: ", what, " must be a 32-bit integer; got ", value.dump());
  return value.get<int>();
}

double as_double(const Json& value, std::string_view what) {
  core::require(value.is_number(), "from_json: ", what, " must be a number; got ", value.dump());
  return value.get<double>();
}

const Json& member(const Json& object, const char* key) {
  core::require(object.is_object() && object.contains(key), "from_json: expected a member '", key,
                "'; got none");
  return object[key];
}

const Json& array(const Json& object, const char* key) {
  const Json& value = member(object, key);
  core::require(value.is_array(), "from_json: ", key, " must be an array; got ", value.type_name());
  return value;
}

std::vector<int> ints(const Json& object, const char* key) {
  std::vector<int> values;
  for (const Json& value : array(object, key)) values.push_back(as_int(value, key));
  return values;
}

Json parse(std::string_view text) {
  try {
    return Json::parse(text);
  } catch (const Json::exception& error) {
    throw core::InvalidArgument(core::message("from_json: text must be JSON; ", error.what()));
  }
}

}  // namespace

std::string to_json(const Plan& plan) {
  Json batches = Json::array();
  for (const Batch& batch : plan.batches) {
    batches.push_back({{"slot", batch.slot}, {"matrices", batch.matrices}});
  }
  const Json object = {
      {"format", kFormat},
      {"num_replicates", plan.mesh.num_replicates},
      {"num_shards", plan.mesh.num_shards},
      {"strategy", plan.strategy},
      {"owner", plan.owner},
      {"batches", std::move(batches)},
      {"slot_s", plan.slot_s},
      {"makespan_s", plan.makespan_s},
      {"lower_bound_s", plan.lower_bound_s},
  };
  return object.dump();
}

Plan from_json(std::string_view text, const Inventory& inventory) {
  const Json object = parse(text);
  const int format = as_int(member(object, "format"), "format");
  core::require(format == kFormat, "from_json: format must be ", kFormat, "; got ", format);

  Plan plan;
  plan.mesh.num_replicates = as_int(member(object, "num_replicates"), "num_replicates");
  plan.mesh.num_shards = as_int(member(object, "num_shards"), "num_shards");
  const Json& strategy = member(object, "strategy");
  core::require(strategy.is_string(), "from_json: strategy must be a string; got ",
                strategy.dump());
  plan.strategy = strategy.get<std::string>();
  plan.owner = ints(object, "owner");
  for (const Json& batch : array(object, "batches")) {
    plan.batches.push_back({as_int(member(batch, "slot"), "slot"), ints(batch, "matrices")});
  }
  for (const Json& value : array(object, "slot_s")) {
    plan.slot_s.push_back(as_double(value, "slot_s"));
  }
  plan.makespan_s = as_double(member(object, "makespan_s"), "makespan_s");
  plan.lower_bound_s = as_double(member(object, "lower_bound_s"), "lower_bound_s");
  validate(plan, inventory);
  return plan;
}

}  // namespace dmuon::plan
