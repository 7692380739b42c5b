#pragma once

#include "dmuon/kernels/cuda/machine.h"

namespace dmuon::kernels::cuda::device {

// The 16-bit formats: fp32 rounds to the nearest, ties to even.
struct Fp16 {
  static DMUON_DEVICE float wide(std::uint16_t half) { return machine::float_of_f16(half); }
  static DMUON_DEVICE std::uint16_t narrow(float value) { return machine::f16_of(value); }
  static DMUON_DEVICE std::uint32_t narrow_pair(float low, float high) {
    return machine::f16_pair_of(low, high);
  }
  static DMUON_DEVICE void multiply_add(float (&sums)[4], const std::uint32_t (&a)[4],
                                        const std::uint32_t (&b)[2]) {
    machine::multiply_add_f16(sums, a, b);
  }
  template <bool kTransposedA, bool kTransposedB>
  static DMUON_DEVICE void multiply_64x256(float (&sums)[128], std::uint64_t a, std::uint64_t b,
                                           bool accumulate) {
    machine::multiply_64x256_f16<kTransposedA, kTransposedB>(sums, a, b, accumulate);
  }
};
struct BFloat16 {
  static DMUON_DEVICE float wide(std::uint16_t half) { return machine::float_of_bf16(half); }
  static DMUON_DEVICE std::uint16_t narrow(float value) { return machine::bf16_of(value); }
  static DMUON_DEVICE std::uint32_t narrow_pair(float low, float high) {
    return machine::bf16_pair_of(low, high);
  }
  static DMUON_DEVICE void multiply_add(float (&sums)[4], const std::uint32_t (&a)[4],
                                        const std::uint32_t (&b)[2]) {
    machine::multiply_add_bf16(sums, a, b);
  }
  template <bool kTransposedA, bool kTransposedB>
  static DMUON_DEVICE void multiply_64x256(float (&sums)[128], std::uint64_t a, std::uint64_t b,
                                           bool accumulate) {
    machine::multiply_64x256_bf16<kTransposedA, kTransposedB>(sums, a, b, accumulate);
  }
};

}  // namespace dmuon::kernels::cuda::device
