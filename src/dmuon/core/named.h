#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "dmuon/core/error.h"

namespace dmuon::core {

/// Returns the first of `all` that has this name.
/// @param expected  the beginning of the message: "device: expected".
/// @param name_of   returns an element's name; the default takes elements as names.
/// @param after     words of the message after the list of names.
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
