#include "dmuon/plan/parameter_json.h"

#include <nlohmann/json.hpp>

namespace dmuon::plan {
namespace {

constexpr const char* kNumMatrices = "num_matrices";
constexpr const char* kContinues = "continues";
constexpr const char* kColumn = "column";
constexpr const char* kColumnBlocks = "column_blocks";
constexpr const char* kTransposed = "transposed";

void write_count(nlohmann::json& json, const char* key, std::int64_t count) {
  if (count != 1) json[key] = count;
}

void write_flag(nlohmann::json& json, const char* key, bool flag) {
  if (flag) json[key] = true;
}

std::int64_t count_of(const JsonReader& reader, const char* key) {
  const auto found = reader.find(key);
  return found ? found->integer(1, kMaxSide) : 1;
}

bool flag_of(const JsonReader& reader, const char* key) {
  const auto found = reader.find(key);
  return found && found->boolean();
}

}  // namespace

void write_num_matrices(nlohmann::json& json, std::int64_t number) {
  write_count(json, kNumMatrices, number);
}

std::int64_t num_matrices_of(const JsonReader& reader) { return count_of(reader, kNumMatrices); }

void write_matrices(nlohmann::json& json, const Parameter& parameter) {
  json["name"] = parameter.name;
  json["rows"] = parameter.rows;
  json["cols"] = parameter.cols;
  write_num_matrices(json, parameter.num_matrices);
  write_count(json, kColumnBlocks, parameter.column_blocks);
  write_flag(json, kTransposed, parameter.transposed);
  write_flag(json, kContinues, parameter.continues);
  if (parameter.column) json[kColumn] = parameter.column->value();
}

Parameter read_matrices(const JsonReader& reader) {
  Parameter parameter;
  parameter.name = reader.at("name").string();
  parameter.rows = reader.at("rows").integer(1, kMaxSide);
  parameter.cols = reader.at("cols").integer(1, kMaxSide);
  parameter.num_matrices = num_matrices_of(reader);
  parameter.column_blocks = count_of(reader, kColumnBlocks);
  parameter.transposed = flag_of(reader, kTransposed);
  parameter.continues = flag_of(reader, kContinues);
  if (const auto column = reader.find(kColumn))
    parameter.column = core::Shard(column->small(0, kMaxSide));
  return parameter;
}

}  // namespace dmuon::plan
