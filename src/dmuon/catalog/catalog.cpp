#include "dmuon/catalog/catalog.h"

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>

#include "dmuon/catalog/embedded.h"
#include "dmuon/core/error.h"
#include "dmuon/core/named.h"
#include "dmuon/plan/json_reader.h"
#include "dmuon/plan/parameter_json.h"

namespace dmuon::catalog {
namespace {

using plan::JsonReader;

constexpr int kMaxMatrices = 1 << 22;
constexpr std::int64_t kMaxElements = std::int64_t{1} << 56;  // as plan::validate has it
constexpr double kMaxFlops = 1e18;
constexpr double kMaxTokens = 1e6;

std::string with_index(const std::string& name, std::int64_t index) {
  const std::size_t place = name.find("{}");
  if (place == std::string::npos) return name;
  return name.substr(0, place) + std::to_string(index) + name.substr(place + 2);
}

// The content of an entry of a file, for each unit that it makes.
struct Entry {
  std::vector<plan::Parameter> matrices;  ///< without their unit
  double flops = 0;                       ///< as Training::unit_flops
  double attention_flops = 0;             ///< likewise
};

Entry read_entry(const JsonReader& reader, bool tensor_parallel) {
  Entry entry;
  for (const JsonReader& listed : reader.at("matrices").items()) {
    plan::Parameter matrix = plan::read_matrices(listed);
    matrix.tensor_parallel = !listed.flag("whole") && tensor_parallel;
    plan::View& view = matrix.view;
    view.num_matrices *= listed.count("stack", 1, kMaxMatrices);  // in older files
    const auto active = listed.find("active");
    const std::int64_t used = active ? active->integer(0, view.num_matrices) : view.num_matrices;
    entry.flops += 2. * static_cast<double>(view.rows) * static_cast<double>(view.cols) *
                   static_cast<double>(used);
    entry.matrices.push_back(std::move(matrix));
  }
  const auto tokens = reader.find("tokens");
  const double share = tokens ? tokens->number(1 / kMaxTokens, kMaxTokens) : 1;
  entry.flops *= share;
  const auto width = reader.find("attention_width");
  const auto causal = reader.find("causal");
  // Two products, queries by keys and weights by values, of 2 FLOPs an element. A causal mask
  // leaves half of each.
  const double flops = causal && !causal->boolean() ? 4 : 2;
  entry.attention_flops = share * flops * (width ? width->number(0, plan::kMaxSide) : 0);
  return entry;
}

// Adds an entry to one unit of the model.
void add_unit(const Entry& entry, const std::string& name, int unit, Model& model) {
  for (plan::Parameter matrix : entry.matrices) {
    if (!name.empty()) matrix.name = name + "." + matrix.name;
    matrix.unit = unit;
    model.inventory.push_back(std::move(matrix));
  }
  Training& training = model.training;
  if (unit >= training.unit_flops.size()) {
    training.unit_flops.resize(unit + 1);
    training.attention_flops.resize(unit + 1);
  }
  training.unit_flops[core::UnitIndex(unit)] += entry.flops;
  training.attention_flops[core::UnitIndex(unit)] += entry.attention_flops;
}

void read_training(const JsonReader& reader, Training& training) {
  if (const auto sequence = reader.find("sequence"))
    training.sequence = sequence->small(1, std::numeric_limits<int>::max());
  training.outside_elements = reader.at("outside_elements").integer(0, kMaxElements);
  training.outside_flops = reader.at("outside_flops").number(0, kMaxFlops);
}

}  // namespace

double token_flops(const Training& training, core::UnitIndex unit, double tokens) {
  const double sequence =
      training.sequence > 0 ? std::min<double>(training.sequence, tokens) : tokens;
  return training.unit_flops[unit] + training.attention_flops[unit] * sequence;
}

double forward_flops(const Training& training, double tokens) {
  double of_token = training.outside_flops;
  for (const core::UnitIndex unit : training.unit_flops.indices())
    of_token += token_flops(training, unit, tokens);
  return of_token * tokens;
}

std::string_view text_of(std::string_view name) {
  for (const Embedded& file : embedded()) {
    if (file.name == name) return file.text;
  }
  core::bug("catalog has no '", name, "'");
}

Model model_from_json(std::string_view text, bool tensor_parallel) {
  const nlohmann::json value = plan::parse_json(text, "model");
  const JsonReader reader(value, "model");
  reader.require_version(kSchemaVersion);
  Model model;
  model.name = reader.at("name").string();
  model.description = reader.at("description").string();
  model.source = reader.at("source").string();
  model.stand_in = reader.at("stand_in").boolean();
  int next = 0;  // the first unit after all others
  for (const JsonReader& entry : reader.at("units").items()) {
    const std::string name = entry.at("name").string();
    const std::int64_t first = entry.count("first", 0, kMaxMatrices);
    const std::int64_t repeat = entry.count("repeat", 1, kMaxMatrices);
    const Entry read = read_entry(entry, tensor_parallel);
    const std::int64_t matrices = std::ssize(read.matrices);
    // Checks before it allocates: a short text may ask for any number.
    const int left = kMaxMatrices - model.inventory.size();
    core::require(matrices <= left / repeat, "model.units: expected at most ", kMaxMatrices,
                  " matrices; got ", model.inventory.size() + repeat * matrices);
    if (const auto number = entry.find("unit")) {
      core::require(repeat == 1, "model.units: expected no repeat where unit is given; got ",
                    repeat);
      const int unit = number->small(0, kMaxMatrices);
      add_unit(read, name, unit, model);
      next = std::max(next, unit + 1);
      continue;
    }
    core::require(repeat <= kMaxMatrices - next, "model.units: expected at most ", kMaxMatrices,
                  " units; got ", repeat + next);
    for (int i = 0; i < repeat; ++i, ++next)
      add_unit(read, with_index(name, first + i), next, model);
  }
  if (const auto training = reader.find("training")) read_training(*training, model.training);
  plan::validate(model.inventory);
  return model;
}

std::vector<std::string> model_names() {
  std::vector<std::string> names;
  for (const Embedded& file : embedded()) {
    if (file.name != kDevices) names.emplace_back(file.name);
  }
  return names;
}

Model model(std::string_view name, bool tensor_parallel) {
  core::named(model_names(), name, "model: expected");
  return model_from_json(text_of(name), tensor_parallel);
}

}  // namespace dmuon::catalog
