#pragma once

#include <string>

namespace dmuon::plan {

/// A device's rates: constants of the cost model, for times that cannot be measured.
struct Device {
  std::string name;           ///< "a800-sxm4-80gb"
  std::string description;    ///< as the vendor writes it
  std::string source;         ///< where each constant comes from
  double product_tflops = 0;  ///< 10^12 FLOP/s of a large matrix product
  /// 10^12 FLOP/s of a symmetric product, a triangle counted once; 0: the device has none and
  /// runs full products.
  double symmetric_tflops = 0;
  double elementwise_gb_per_s = 0;  ///< 10^9 bytes/s
  double launch_us = 0;             ///< microseconds to start one operation
  int tiles = 1;                    ///< tiles of 128 x 128 results that it works on at once
  double link_gb_per_s = 0;         ///< 10^9 bytes/s a direction to the others of its node
  /// 10^12 FLOP/s of a model's forward and backward, all of their operations counted.
  double training_tflops = 0;
  double memory_gb = 0;     ///< 10^9 bytes
  std::string network;      ///< name of the Network between nodes of such devices
  bool after_tune = false;  ///< runs symmetric products only after `dmuon tune`
};

/// What connects nodes.
struct Network {
  std::string name;         ///< "infiniband-200g"
  std::string description;  ///< as a user would say it
  std::string source;       ///< where each constant comes from
  double gb_per_s = 0;      ///< 10^9 bytes/s in each direction, of one adapter
  double latency_us = 0;    ///< microseconds a message
  bool per_device = true;   ///< each device has an adapter; false: a node's devices share one
};

/// @throws InvalidArgument, naming the first constant that is not finite and > 0;
///         symmetric_tflops and launch_us may be 0.
void validate(const Device& device);

/// @throws InvalidArgument, naming the first constant that is not finite and > 0; latency_us may be
///         0.
void validate(const Network& network);

}  // namespace dmuon::plan
