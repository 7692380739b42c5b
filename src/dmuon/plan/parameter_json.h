#pragma once

#include <nlohmann/json_fwd.hpp>

#include "dmuon/plan/inventory.h"
#include "dmuon/plan/json_reader.h"

namespace dmuon::plan {

/// Writes the members that plan files and model files share: a parameter's name and its matrices.
/// Omits members that a plain matrix does not need, so files of plain models look as always.
void write_matrices(nlohmann::json& json, const Parameter& parameter);

/// Reads these members. Unit and tensor parallelism stay unset: each file stores them in its own
/// way.
Parameter read_matrices(const JsonReader& reader);

}  // namespace dmuon::plan
