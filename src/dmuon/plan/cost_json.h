#pragma once

#include <nlohmann/json_fwd.hpp>

#include "dmuon/plan/cost.h"
#include "dmuon/plan/json_reader.h"

namespace dmuon::plan {

/// A cost table inside a larger JSON object; see to_json and costs_from_json of cost.h.
nlohmann::json json_of(const CostTable& costs);
CostTable costs_of(const JsonReader& reader);

}  // namespace dmuon::plan
