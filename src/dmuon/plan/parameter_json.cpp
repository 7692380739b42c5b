#include "dmuon/plan/parameter_json.h"

#include <nlohmann/json.hpp>

namespace dmuon::plan {

void write_matrices(nlohmann::json& json, const Parameter& parameter) {
  json["name"] = parameter.name;
  json["rows"] = parameter.view.rows;
  json["cols"] = parameter.view.cols;
  if (parameter.view.num_matrices != 1) json["num_matrices"] = parameter.view.num_matrices;
  if (parameter.view.column_blocks != 1) json["column_blocks"] = parameter.view.column_blocks;
  if (parameter.view.transposed) json["transposed"] = true;
  if (!parameter.view.heights.empty()) json["heights"] = parameter.view.heights;
  if (parameter.continues) json["continues"] = true;
  if (parameter.column) json["column"] = parameter.column->value();
}

Parameter read_matrices(const JsonReader& reader) {
  Parameter parameter;
  parameter.name = reader.at("name").string();
  parameter.view.rows = reader.at("rows").integer(1, kMaxSide);
  parameter.view.cols = reader.at("cols").integer(1, kMaxSide);
  parameter.view.num_matrices = reader.count("num_matrices", 1, kMaxSide);
  parameter.view.column_blocks = reader.count("column_blocks", 1, kMaxSide);
  parameter.view.transposed = reader.flag("transposed");
  if (const auto heights = reader.find("heights")) {
    for (const JsonReader& height : heights->items())
      parameter.view.heights.push_back(height.integer(1, kMaxSide));
  }
  parameter.continues = reader.flag("continues");
  if (const auto column = reader.find("column"))
    parameter.column = core::Shard(column->small(0, kMaxSide));
  return parameter;
}

}  // namespace dmuon::plan
