#pragma once

#include <cstdint>

namespace dmuon::kernels::cuda::emulator {

enum class Narrow { kF16, kBF16 };

/// The values of all 65536 entries of a format: without them most of the emulation's time is
/// conversions.
const float* wide_values(Narrow format);

}  // namespace dmuon::kernels::cuda::emulator
