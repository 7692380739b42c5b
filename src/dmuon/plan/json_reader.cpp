#include "dmuon/plan/json_reader.h"

#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>

#include "dmuon/core/error.h"

namespace dmuon::plan {
namespace {

constexpr std::size_t kMaxShown = 60;
constexpr std::size_t kMaxQuoted = 300;

// Shows only the size of lists and objects: deep text would need a stack as deep.
std::string shown(const nlohmann::json& value) {
  if (value.is_object()) return core::message("an object of ", value.size());
  if (value.is_array()) return core::message("an array of ", value.size());
  // Writes ASCII, so that no character is cut in two.
  std::string text = value.dump(-1, ' ', true);
  return text.size() <= kMaxShown ? text : text.substr(0, kMaxShown) + "...";
}

// The parser quotes unreadable text as it is: whole strings and bytes that are not UTF-8.
std::string in_ascii(std::string_view text) {
  std::string quoted(text.substr(0, kMaxQuoted));
  for (char& byte : quoted) byte = byte < ' ' || byte > '~' ? '?' : byte;
  return quoted + (text.size() > kMaxQuoted ? "..." : "");
}

}  // namespace

JsonReader JsonReader::at(const char* key) const {
  if (!value_->is_object()) fail("an object");
  const auto found = value_->find(key);
  core::require(found != value_->end(), place_, ": expected a member '", key, "'; got none");
  return {*found, place_ + "." + key};
}

std::optional<JsonReader> JsonReader::find(const char* key) const {
  if (!value_->is_object()) fail("an object");
  const auto found = value_->find(key);
  if (found == value_->end() || found->is_null()) return std::nullopt;
  return JsonReader(*found, place_ + "." + key);
}

bool JsonReader::flag(const char* key) const {
  const auto found = find(key);
  return found && found->boolean();
}

std::int64_t JsonReader::count(const char* key, std::int64_t least, std::int64_t most) const {
  const auto found = find(key);
  return found ? found->integer(least, most) : least;
}

std::vector<JsonReader> JsonReader::items() const {
  if (!value_->is_array()) fail("an array");
  std::vector<JsonReader> items;
  items.reserve(value_->size());
  for (const auto& item : *value_) {
    items.emplace_back(item, core::message(place_, "[", items.size(), "]"));
  }
  return items;
}

std::int64_t JsonReader::integer(std::int64_t least, std::int64_t most) const {
  const bool whole = value_->is_number_integer();
  const bool signed_range =
      whole && (!value_->is_number_unsigned() ||
                value_->get<std::uint64_t>() <=
                    static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max()));
  if (!signed_range || value_->get<std::int64_t>() < least || value_->get<std::int64_t>() > most) {
    fail(core::message("a whole number in [", least, ", ", most, "]"));
  }
  return value_->get<std::int64_t>();
}

double JsonReader::number() const {
  if (!value_->is_number() || !std::isfinite(value_->get<double>())) fail("a finite number");
  return value_->get<double>();
}

double JsonReader::number(double least, double most) const {
  const double found = value_->is_number() ? value_->get<double>() : std::nan("");
  if (!(found >= least && found <= most)) {
    fail(core::message("a number in [", least, ", ", most, "]"));
  }
  return found;
}

std::string JsonReader::string() const {
  if (!value_->is_string()) fail("a string");
  return value_->get<std::string>();
}

bool JsonReader::boolean() const {
  if (!value_->is_boolean()) fail("true or false");
  return value_->get<bool>();
}

void JsonReader::require_version(int version) const {
  const std::int64_t found =
      at("schema_version").integer(0, std::numeric_limits<std::int64_t>::max());
  core::require(found == version, place_, ".schema_version: expected ", version, "; got ", found);
}

void JsonReader::fail(std::string_view expected) const {
  core::refuse(place_, ": expected ", expected, "; got ", shown(*value_));
}

nlohmann::json parse_json(std::string_view text, std::string_view what) {
  try {
    return nlohmann::json::parse(text);
  } catch (const nlohmann::json::exception& error) {
    // "[json.exception.parse_error.101] parse error at ..."
    const std::string_view all = error.what();
    core::refuse(what, ": expected JSON; ", in_ascii(all.substr(all.find("] ") + 2)));
  }
}

std::string dump_json(const nlohmann::json& value) {
  return value.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

}  // namespace dmuon::plan
