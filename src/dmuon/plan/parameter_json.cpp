#include "dmuon/plan/parameter_json.h"

#include <nlohmann/json.hpp>

namespace dmuon::plan {

void write_matrices(nlohmann::json& json, const Parameter& parameter) {
  json["name"] = parameter.name;
  json["rows"] = parameter.rows;
  json["cols"] = parameter.cols;
  if (parameter.num_matrices != 1) json["num_matrices"] = parameter.num_matrices;
  if (parameter.column_blocks != 1) json["column_blocks"] = parameter.column_blocks;
  if (parameter.transposed) json["transposed"] = true;
  if (parameter.continues) json["continues"] = true;
  if (parameter.column) json["column"] = parameter.column->value();
}

Parameter read_matrices(const JsonReader& reader) {
  Parameter parameter;
  parameter.name = reader.at("name").string();
  parameter.rows = reader.at("rows").integer(1, kMaxSide);
  parameter.cols = reader.at("cols").integer(1, kMaxSide);
  parameter.num_matrices = reader.count("num_matrices", 1, kMaxSide);
  parameter.column_blocks = reader.count("column_blocks", 1, kMaxSide);
  parameter.transposed = reader.flag("transposed");
  parameter.continues = reader.flag("continues");
  if (const auto column = reader.find("column"))
    parameter.column = core::Shard(column->small(0, kMaxSide));
  return parameter;
}

}  // namespace dmuon::plan
