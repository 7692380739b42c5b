#pragma once

#include <string_view>
#include <vector>

namespace dmuon::catalog {

/// A file of models/ as it was when the program was built. CMake writes embedded.cpp.
struct Embedded {
  std::string_view name;  ///< without the ending
  std::string_view text;
};

const std::vector<Embedded>& embedded();

}  // namespace dmuon::catalog
