#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "dmuon/plan/inventory.h"

namespace dmuon::plan {

/// Returns the names of the rules of update (optim/rules), the default first.
std::vector<std::string> rule_names();

/// Returns the bytes that an owner stores of a parameter: fp32 master, gradient, momentum, and what
/// else the rule of update stores. Optim's test compares them with the rules' own tensors.
/// @throws InvalidArgument for an unknown rule, with the known ones.
std::int64_t state_bytes(const Shape& shape, std::string_view rule);

/// Returns the bytes an element that the update of a batch takes beside the iteration, because the
/// rule changes the orthogonalised update: fp32 copies of it.
/// @throws as state_bytes.
std::int64_t rule_update_bytes(std::string_view rule);

}  // namespace dmuon::plan
