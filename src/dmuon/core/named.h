#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "dmuon/core/error.h"

namespace dmuon::core {

/// The first of `all` that has this name.
/// @param expected  how the message begins: "device: expected".
/// @param name_of   one's name; without it they are names themselves.
/// @param after     what the message says of the names after it has listed them.
/// @throws InvalidArgument, "device: expected one of a, b; got 'c'".
template <typename All, typename NameOf = std::identity, typename... After>
const auto& named(const All& all, std::string_view name, std::string_view expected,
                  NameOf name_of = {}, const After&... after) {
  for (const auto& one : all) {
    if (std::invoke(name_of, one) == name) return one;
  }
  std::vector<std::string> names;
  for (const auto& one : all) names.emplace_back(std::invoke(name_of, one));
  refuse(expected, " one of ", joined(names), after..., "; got '", name, "'");
}

}  // namespace dmuon::core
