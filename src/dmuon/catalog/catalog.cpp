#include "dmuon/catalog/catalog.h"

#include <nlohmann/json.hpp>

#include "dmuon/catalog/embedded.h"
#include "dmuon/core/error.h"
#include "dmuon/core/named.h"
#include "dmuon/plan/json_reader.h"
#include "dmuon/plan/parameter_json.h"

namespace dmuon::catalog {
namespace {

using plan::JsonReader;

constexpr int kVersion = 1;
constexpr int kMaxMatrices = 1 << 22;
constexpr std::string_view kDevices = "devices";

std::string_view text_of(std::string_view name) {
  for (const Embedded& file : embedded()) {
    if (file.name == name) return file.text;
  }
  core::bug("catalog has no '", name, "'");
}

std::string with_index(const std::string& name, std::int64_t index) {
  const std::size_t place = name.find("{}");
  if (place == std::string::npos) return name;
  return name.substr(0, place) + std::to_string(index) + name.substr(place + 2);
}

// Reads matrices without their unit.
std::vector<plan::Parameter> listed_in(const JsonReader& unit, bool tensor_parallel) {
  std::vector<plan::Parameter> all;
  for (const JsonReader& entry : unit.at("matrices").items()) {
    all.push_back(plan::read_matrices(entry));
    all.back().tensor_parallel = !entry.flag("whole") && tensor_parallel;
    all.back().view.num_matrices *= entry.count("stack", 1, kMaxMatrices);  // in older files
  }
  return all;
}

// Reads one unit of the model.
void add_unit(const std::vector<plan::Parameter>& matrices, const std::string& name, int unit,
              plan::Inventory& inventory) {
  for (plan::Parameter matrix : matrices) {
    if (!name.empty()) matrix.name = name + "." + matrix.name;
    matrix.unit = unit;
    inventory.push_back(std::move(matrix));
  }
}

// Reads the devices once: the cost model asks for every batch.
const std::vector<plan::Device>& known_devices() {
  static const std::vector<plan::Device> kParsed = devices_from_json(text_of(kDevices));
  return kParsed;
}

}  // namespace

Model model_from_json(std::string_view text, bool tensor_parallel) {
  const nlohmann::json value = plan::parse_json(text, "model");
  const JsonReader reader(value, "model");
  reader.require_version(kVersion);
  Model model;
  model.name = reader.at("name").string();
  model.description = reader.at("description").string();
  model.source = reader.at("source").string();
  model.stand_in = reader.at("stand_in").boolean();
  int unit = 0;
  for (const JsonReader& entry : reader.at("units").items()) {
    const std::string name = entry.at("name").string();
    const std::int64_t first = entry.count("first", 0, kMaxMatrices);
    const std::int64_t repeat = entry.count("repeat", 1, kMaxMatrices);
    const std::vector<plan::Parameter> matrices = listed_in(entry, tensor_parallel);
    // Checks before it allocates: a short text may ask for any number.
    const int left = kMaxMatrices - model.inventory.size();
    core::require(std::ssize(matrices) <= left / repeat, "model.units: expected at most ",
                  kMaxMatrices, " matrices; got ",
                  model.inventory.size() + repeat * std::ssize(matrices));
    core::require(repeat <= kMaxMatrices - unit, "model.units: expected at most ", kMaxMatrices,
                  " units; got ", repeat + unit);
    if (const auto number = entry.find("unit")) {
      core::require(repeat == 1, "model.units: expected no repeat where unit is given; got ",
                    repeat);
      add_unit(matrices, name, number->small(0, kMaxMatrices), model.inventory);
      continue;
    }
    for (int i = 0; i < repeat; ++i, ++unit) {
      add_unit(matrices, with_index(name, first + i), unit, model.inventory);
    }
  }
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

std::vector<plan::Device> devices_from_json(std::string_view text) {
  const nlohmann::json value = plan::parse_json(text, "devices");
  const JsonReader reader(value, "devices");
  reader.require_version(kVersion);
  std::vector<plan::Device> devices;
  for (const JsonReader& entry : reader.at("devices").items()) {
    plan::Device device;
    device.name = entry.at("name").string();
    device.description = entry.at("description").string();
    device.source = entry.at("source").string();
    device.product_tflops = entry.at("product_tflops").number();
    const auto symmetric = entry.find("symmetric_tflops");
    device.symmetric_tflops = symmetric ? symmetric->number() : 0;
    device.elementwise_gb_per_s = entry.at("elementwise_gb_per_s").number();
    device.launch_us = entry.at("launch_us").number();
    device.tiles = entry.at("tiles").small(1, 1 << 20);
    device.link_gb_per_s = entry.at("link_gb_per_s").number();
    plan::validate(device);
    devices.push_back(std::move(device));
  }
  return devices;
}

std::vector<std::string> device_names() {
  std::vector<std::string> names;
  for (const plan::Device& device : known_devices()) names.push_back(device.name);
  return names;
}

plan::Device device(std::string_view name) {
  return core::named(known_devices(), name, "device: expected", &plan::Device::name);
}

}  // namespace dmuon::catalog
