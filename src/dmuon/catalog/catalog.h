#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "dmuon/core/index.h"
#include "dmuon/plan/cost.h"
#include "dmuon/plan/inventory.h"

namespace dmuon::catalog {

/// The work of a model's training step beside its optimizer. Units are numbered as
/// Parameter::unit; those without matrices have 0.
struct Training {
  int sequence = 0;                   ///< tokens of a sequence; 0: the file does not say
  std::int64_t outside_elements = 0;  ///< parameters that Muon does not take
  double outside_flops = 0;           ///< of a token's forward outside of all units
  /// [units] FLOPs of a token's forward in the unit's matrices: 2 an element that it uses. Counts
  /// the tokens that pass through the unit for each token of the sequence.
  core::Vector<core::UnitIndex, double> unit_flops;
  /// [units] FLOPs of a token's forward in attention for each token of the sequence; likewise.
  core::Vector<core::UnitIndex, double> attention_flops;
};

/// The weight matrices of a published model, from models/*.json. The program contains the files.
struct Model {
  std::string name;
  std::string description;
  std::string source;     ///< of its dimensions
  bool stand_in = false;  ///< the published sizes are incomplete, parts are guessed
  plan::Inventory inventory;
  Training training;
};

/// Returns the FLOPs of a token's forward in a unit: its matrices and its attention.
/// @param tokens  that are together; if they are fewer than a sequence, they are a shorter one.
double token_flops(const Training& training, core::UnitIndex unit, double tokens);

/// Returns the FLOPs of a forward of so many tokens, in all units and outside of these.
double forward_flops(const Training& training, double tokens);

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

/// Returns the names of networks in models/devices.json.
std::vector<std::string> network_names();

/// @throws InvalidArgument for an unknown name, with the known ones.
plan::Network network(std::string_view name);

/// @throws InvalidArgument, naming the place in the text.
std::vector<plan::Network> networks_from_json(std::string_view text);

}  // namespace dmuon::catalog
