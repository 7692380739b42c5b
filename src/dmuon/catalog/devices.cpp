#include <nlohmann/json.hpp>

#include "dmuon/catalog/catalog.h"
#include "dmuon/catalog/embedded.h"
#include "dmuon/core/error.h"
#include "dmuon/core/named.h"
#include "dmuon/plan/json_reader.h"

namespace dmuon::catalog {
namespace {

using plan::JsonReader;

plan::Device read_device(const JsonReader& entry) {
  plan::Device device;
  device.name = entry.at("name").string();
  device.description = entry.at("description").string();
  device.source = entry.at("source").string();
  device.product_tflops = entry.at("product_tflops").number();
  const auto symmetric = entry.find("symmetric_tflops");
  device.symmetric_tflops = symmetric ? symmetric->number() : 0;
  device.after_tune = entry.flag("after_tune");
  device.elementwise_gb_per_s = entry.at("elementwise_gb_per_s").number();
  device.launch_us = entry.at("launch_us").number();
  device.tiles = entry.at("tiles").small(1, 1 << 20);
  device.link_gb_per_s = entry.at("link_gb_per_s").number();
  device.training_tflops = entry.at("training_tflops").number();
  device.memory_gb = entry.at("memory_gb").number();
  device.network = entry.at("network").string();
  plan::validate(device);
  return device;
}

// Reads whether each device has an adapter.
bool is_per_device(const JsonReader& per, std::string_view place) {
  const std::vector<std::string> known = {"device", "node"};
  return core::named(known, per.string(), core::message(place, ".per: expected")) == "device";
}

plan::Network read_network(const JsonReader& entry, std::string_view place) {
  plan::Network network;
  network.name = entry.at("name").string();
  network.description = entry.at("description").string();
  network.source = entry.at("source").string();
  network.gb_per_s = entry.at("gb_per_s").number();
  network.latency_us = entry.at("latency_us").number();
  network.per_device = is_per_device(entry.at("per"), place);
  plan::validate(network);
  return network;
}

// Each file is read once: the cost model asks for every batch.
const std::vector<plan::Device>& known_devices() {
  static const std::vector<plan::Device> kParsed = devices_from_json(text_of(kDevices));
  return kParsed;
}

const std::vector<plan::Network>& known_networks() {
  static const std::vector<plan::Network> kParsed = networks_from_json(text_of(kDevices));
  return kParsed;
}

template <typename All>
std::vector<std::string> names_of(const All& all) {
  std::vector<std::string> names;
  for (const auto& one : all) names.push_back(one.name);
  return names;
}

}  // namespace

std::vector<plan::Device> devices_from_json(std::string_view text) {
  const std::vector<std::string> networks = names_of(networks_from_json(text));
  const nlohmann::json value = plan::parse_json(text, "devices");
  const JsonReader reader(value, "devices");
  std::vector<plan::Device> devices;
  for (const JsonReader& entry : reader.at("devices").items()) {
    plan::Device device = read_device(entry);
    core::named(networks, device.network,
                core::message("devices.devices[", devices.size(), "].network: expected"));
    devices.push_back(std::move(device));
  }
  return devices;
}

std::vector<plan::Network> networks_from_json(std::string_view text) {
  const nlohmann::json value = plan::parse_json(text, "devices");
  const JsonReader reader(value, "devices");
  reader.require_version(kSchemaVersion);
  std::vector<plan::Network> networks;
  for (const JsonReader& entry : reader.at("networks").items()) {
    networks.push_back(
        read_network(entry, core::message("devices.networks[", networks.size(), "]")));
  }
  return networks;
}

std::vector<std::string> device_names() { return names_of(known_devices()); }

plan::Device device(std::string_view name) {
  return core::named(known_devices(), name, "device: expected", &plan::Device::name);
}

std::vector<std::string> network_names() { return names_of(known_networks()); }

plan::Network network(std::string_view name) {
  return core::named(known_networks(), name, "network: expected", &plan::Network::name);
}

}  // namespace dmuon::catalog
