#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "dmuon/plan/inventory.h"

namespace dmuon::plan {

/// Returns the names of dmuon's rules of update (optim/rules), the default first.
std::vector<std::string> rule_names();

/// The most rows, or columns, that a state of a user's rule has by a number.
inline constexpr std::int64_t kMostOfState = 1024;

// A plan names a rule of the user's with the sizes of its states for an [out, in] matrix:
// "mine[1 x 1, rows x 4, rows x cols]", or "mine[]".

/// Requires one of rule_names(), or a rule of the user's.
/// @param expected  the beginning of the message.
/// @throws InvalidArgument with the known names.
void require_rule(std::string_view rule, std::string_view expected = "plan: rule: expected");

/// Returns the bytes that an owner stores of a parameter: fp32 master, gradient, momentum, and what
/// else the rule of update stores. Optim's test compares them with the rules' own tensors.
/// @throws as require_rule.
std::int64_t state_bytes(const Shape& shape, std::string_view rule);

/// Returns the bytes an element that the update of a batch takes beside the iteration, because the
/// rule changes the orthogonalised update: fp32 copies of it. A function of the user's may take
/// more.
/// @throws as require_rule.
std::int64_t rule_update_bytes(std::string_view rule);

}  // namespace dmuon::plan
