#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace dmuon::plan {

/// Reads JSON strictly: every error is an InvalidArgument that names the place in the text, the
/// expected value and the given one. nlohmann::json alone would read 1.9 or true as an int.
/// Immutable.
class JsonReader {
 public:
  /// @param value outlives the reader. @param place its name in errors, "plan".
  JsonReader(const nlohmann::json& value, std::string place)
      : value_(&value), place_(std::move(place)) {}

  JsonReader at(const char* key) const;
  std::optional<JsonReader> find(const char* key) const;  ///< nullopt if absent or null
  bool flag(const char* key) const;                       ///< false if absent or null
  /// Returns the whole number in [least, most]; `least` if absent or null.
  std::int64_t count(const char* key, std::int64_t least, std::int64_t most) const;
  std::vector<JsonReader> items() const;  ///< of an array
  std::int64_t integer(std::int64_t least, std::int64_t most) const;
  int small(int least, int most) const { return static_cast<int>(integer(least, most)); }
  double number() const;                           ///< finite
  double number(double least, double most) const;  ///< in [least, most]
  std::string string() const;
  bool boolean() const;

  /// @throws InvalidArgument unless the member "schema_version" is this.
  void require_version(int version) const;

 private:
  [[noreturn]] void fail(std::string_view expected) const;

  const nlohmann::json* value_;
  std::string place_;
};

/// @throws InvalidArgument with the place of the first mistake.
nlohmann::json parse_json(std::string_view text, std::string_view what);

/// Writes compact JSON, the same bytes for equal values. Replaces text that is not UTF-8.
std::string dump_json(const nlohmann::json& value);

}  // namespace dmuon::plan
