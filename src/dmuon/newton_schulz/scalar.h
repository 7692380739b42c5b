#pragma once

namespace dmuon::newton_schulz {

/// A number that may change from step to step. Kernels that read it on the device get the same
/// arguments in each step.
struct Scalar {
  Scalar(double number, const float* address = nullptr)  // NOLINT(google-explicit-constructor)
      : value(number), on_device(address) {}

  double value;
  /// The address of the same on the device, rounded to fp32. It stays valid until the kernels that
  /// read it have run. Null: only the host has it.
  const float* on_device;
};

}  // namespace dmuon::newton_schulz
