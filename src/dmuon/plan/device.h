#pragma once

#include <string>

namespace dmuon::plan {

/// What a device does per second: constants of the cost model, used where nothing can be measured.
struct Device {
  std::string name;           ///< "a800-sxm4-80gb"
  std::string description;    ///< as the vendor writes it
  std::string source;         ///< where each constant comes from
  double product_tflops = 0;  ///< 10^12 FLOP/s of a large matrix product
  /// 10^12 FLOP/s of a symmetric product, a triangle counted once; 0: none exists, full products
  /// are run instead.
  double symmetric_tflops = 0;
  double elementwise_gb_per_s = 0;  ///< 10^9 bytes/s
  double launch_us = 0;             ///< microseconds to start one operation
  int tiles = 1;                    ///< tiles of 128 x 128 results that it works on at once
  double link_gb_per_s = 0;         ///< 10^9 bytes/s a direction to the others of its node
};

/// @throws InvalidArgument, naming the first constant that is not finite and > 0 (symmetric_tflops
///         and launch_us: >= 0).
void validate(const Device& device);

}  // namespace dmuon::plan
