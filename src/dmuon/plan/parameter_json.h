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

/// How many matrices an entry says it has; 1 where it does not.
std::int64_t num_matrices_of(const JsonReader& reader);

/// Leaves out a 1.
void write_num_matrices(nlohmann::json& json, std::int64_t number);

}  // namespace dmuon::plan
