#include "dmuon/plan/device.h"

#include <cmath>

#include "dmuon/core/error.h"

namespace dmuon::plan {
namespace {

constexpr double kPositive = 1e-9;

// Checks the constants of one device or network.
class Constants {
 public:
  Constants(const char* kind, const std::string& name) : kind_(kind), name_(name) {}

  void check(double value, double least, const char* constant) const {
    core::require(std::isfinite(value) && value >= least, kind_, " '", name_, "': ", constant,
                  " must be finite and ", least > 0 ? "> 0" : ">= 0", "; got ", value);
  }

 private:
  const char* kind_;
  const std::string& name_;
};

}  // namespace

void validate(const Device& device) {
  const Constants constants("Device", device.name);
  constants.check(device.product_tflops, kPositive, "product_tflops");
  constants.check(device.symmetric_tflops, 0, "symmetric_tflops");
  constants.check(device.elementwise_gb_per_s, kPositive, "elementwise_gb_per_s");
  constants.check(device.launch_us, 0, "launch_us");
  constants.check(device.tiles, 1, "tiles");
  constants.check(device.link_gb_per_s, kPositive, "link_gb_per_s");
  constants.check(device.training_tflops, kPositive, "training_tflops");
  constants.check(device.memory_gb, kPositive, "memory_gb");
}

void validate(const Network& network) {
  const Constants constants("Network", network.name);
  constants.check(network.gb_per_s, kPositive, "gb_per_s");
  constants.check(network.latency_us, 0, "latency_us");
}

}  // namespace dmuon::plan
