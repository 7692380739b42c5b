#pragma once

#include <nlohmann/json_fwd.hpp>

#include "dmuon/plan/inventory.h"
#include "dmuon/plan/json_reader.h"

namespace dmuon::plan {

/// What plan files and model files alike say of a parameter: its name and its matrices. What a
/// plain matrix need not say is left out, so that files of plain models are as they always were.
void write_matrices(nlohmann::json& json, const Parameter& parameter);

/// @return with neither unit nor tensor parallelism, which each file has in its own way.
Parameter read_matrices(const JsonReader& reader);

}  // namespace dmuon::plan
