#pragma once

#include <memory>
#include <string>

#include "dmuon/optim/rules/muon.h"

namespace dmuon::optim {

/// Makes a rule of update by its name, one of plan::rule_names().
/// @throws InvalidArgument that lists the known names.
std::shared_ptr<const Rule> make_rule(const std::string& name, const MuonOptions& options);

}  // namespace dmuon::optim
