#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "dmuon/plan/cost.h"
#include "dmuon/plan/inventory.h"

namespace dmuon::catalog {

/// The weight matrices of a published model, from models/*.json. The program contains the files.
struct Model {
  std::string name;
  std::string description;
  std::string source;     ///< of its dimensions
  bool stand_in = false;  ///< the published sizes are incomplete, parts are guessed
  plan::Inventory inventory;
};

/// Returns the known models in alphabetical order. Thread-safe, like all functions here.
std::vector<std::string> model_names();

/// @throws InvalidArgument for an unknown name, with the known ones.
Model model(std::string_view name, bool tensor_parallel = false);

/// Reads a model file, whose format models/README.md describes.
/// @param tensor_parallel cuts every matrix, except those that the file calls whole.
/// @throws InvalidArgument, naming the place in the text; for more than 2^22 matrices.
Model model_from_json(std::string_view text, bool tensor_parallel = false);

/// Returns the names in models/devices.json.
std::vector<std::string> device_names();

/// @throws InvalidArgument for an unknown name, with the known ones.
plan::Device device(std::string_view name);

/// @throws InvalidArgument, naming the place in the text.
std::vector<plan::Device> devices_from_json(std::string_view text);

}  // namespace dmuon::catalog
