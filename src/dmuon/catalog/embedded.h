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

/// Returns the text of the file, which must exist.
std::string_view text_of(std::string_view name);

inline constexpr int kSchemaVersion = 1;                 ///< of all files
inline constexpr std::string_view kDevices = "devices";  ///< the file that is not a model

}  // namespace dmuon::catalog
