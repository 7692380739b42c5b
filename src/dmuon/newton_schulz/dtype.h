#pragma once

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

namespace dmuon::newton_schulz {

/// Whether this machine's CPU multiplies bf16 in hardware (AVX512-BF16, AMX,
/// or Arm's BF16 extension). Elsewhere torch emulates it, slower than fp32.
bool cpu_multiplies_bf16();

/// The dtype Newton-Schulz runs in when the user names none: fp16 on CUDA and
/// other accelerators (three more significand bits than bf16, and the iteration
/// never leaves its range); on CPUs bf16 where the hardware multiplies it, fp32
/// elsewhere. Thread-safe.
c10::ScalarType default_dtype(c10::Device device);

}  // namespace dmuon::newton_schulz
