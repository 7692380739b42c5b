#include "dmuon/newton_schulz/elementwise/cpu_loops.h"

#include <ATen/TensorIterator.h>
#include <ATen/ops/empty_like.h>
#include <c10/util/BFloat16.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <iterator>
#include <numeric>
#include <vector>

#include "dmuon/newton_schulz/cpu_threads.h"

// The loops are compiled for several instruction sets, and the loader picks one. Multiplications
// and additions are not fused (-ffp-contract=off), because fusing rounds differently.
#if defined(__x86_64__) && defined(__GLIBC__) && (!defined(__clang__) || __clang_major__ >= 18)
#define DMUON_EACH_INSTRUCTION_SET \
  __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define DMUON_EACH_INSTRUCTION_SET
#endif

namespace dmuon::newton_schulz::cpu {
namespace {

// Starts from the nearer end, as torch.lerp: a mu of 0 gives the scaled gradient exactly.
DMUON_EACH_INSTRUCTION_SET
void momentum_loop(float* momentum, float* direction, const float* gradient, float factor,
                   std::int64_t size, float rest) {
  const float kept = 1 - rest;
  const bool near = rest < 0.5F;
  for (std::int64_t i = 0; i < size; ++i) {
    const float scaled = factor * gradient[i];
    const float way = scaled - momentum[i];
    const float moved = near ? momentum[i] + rest * way : scaled - kept * way;
    const float back = moved - scaled;
    momentum[i] = moved;
    direction[i] = near ? moved - rest * back : scaled + kept * back;
  }
}

DMUON_EACH_INSTRUCTION_SET
void weight_loop(float* weights, const float* update, std::int64_t size, float decay,
                 float factor) {
  for (std::int64_t i = 0; i < size; ++i) weights[i] = decay * weights[i] + factor * update[i];
}

float wide(std::uint16_t bf16) {
  const std::uint32_t bits = std::uint32_t{bf16} << 16;
  float value = 0;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

DMUON_EACH_INSTRUCTION_SET
void weight_loop_bf16(float* weights, const std::uint16_t* update, std::int64_t size, float decay,
                      float factor) {
  for (std::int64_t i = 0; i < size; ++i)
    weights[i] = decay * weights[i] + factor * wide(update[i]);
}

constexpr std::int64_t kLanes = 32;

DMUON_EACH_INSTRUCTION_SET
double squares_loop(const float* x, std::int64_t size) {
  double sums[kLanes] = {};
  std::int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    for (std::int64_t lane = 0; lane < kLanes; ++lane) {
      const double value = x[i + lane];
      sums[lane] += value * value;
    }
  }
  for (; i < size; ++i) sums[i % kLanes] += static_cast<double>(x[i]) * x[i];
  double total = 0;
  for (const double sum : sums) total += sum;
  return total;
}

DMUON_EACH_INSTRUCTION_SET
void scale_loop(const float* x, std::int64_t size, double scale, float* out) {
  for (std::int64_t i = 0; i < size; ++i) out[i] = static_cast<float>(x[i] * scale);
}

// Rounds to the nearest, ties to even. Keeps NaN.
std::uint16_t narrow(float value) {
  std::uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof bits);
  const std::uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return static_cast<std::uint16_t>(value == value ? rounded : 0x7fc0);
}

DMUON_EACH_INSTRUCTION_SET
void scale_loop_bf16(const float* x, std::int64_t size, double scale, std::uint16_t* out) {
  for (std::int64_t i = 0; i < size; ++i) out[i] = narrow(static_cast<float>(x[i] * scale));
}

// Calls loop(data, size) on stretches that are contiguous in all operands: at worst one element.
template <std::size_t kOperands, typename Loop>
void over(at::TensorIterator iterator, const std::array<std::int64_t, kOperands>& sizes,
          const Loop& loop) {
  iterator.for_each(
      [&](char** data, const std::int64_t* strides, std::int64_t size0, std::int64_t size1) {
        bool whole = true;
        for (std::size_t k = 0; k < kOperands; ++k) whole = whole && strides[k] == sizes[k];
        for (std::int64_t row = 0; row < size1; ++row) {
          std::array<char*, kOperands> at{};
          for (std::size_t k = 0; k < kOperands; ++k)
            at[k] = data[k] + row * strides[kOperands + k];
          if (whole) {
            loop(at, size0);
            continue;
          }
          for (std::int64_t i = 0; i < size0; ++i) {
            loop(at, 1);
            for (std::size_t k = 0; k < kOperands; ++k) at[k] += strides[k];
          }
        }
      });
}

at::TensorIteratorConfig in_place() {
  at::TensorIteratorConfig config;
  config.check_all_same_dtype(false).resize_outputs(false).set_check_mem_overlap(false);
  return config;
}

// Works on pieces that fit the first-level cache, with the loops above.
template <typename Out>
double move_momentum_of_row(float* momentum, const float* gradient, float factor, std::int64_t size,
                            float rest, bool nesterov, Out* direction) {
  std::array<float, 1024> piece{};
  double squares = 0;
  for (std::int64_t at = 0; at < size; at += std::ssize(piece)) {
    const std::int64_t length = std::min(size - at, std::ssize(piece));
    momentum_loop(momentum + at, piece.data(), gradient + at, factor, length, rest);
    const float* taken = nesterov ? piece.data() : momentum + at;
    squares += squares_loop(taken, length);
    write_scaled(taken, length, 1, direction + at);
  }
  return squares;
}

template <typename T>
T* as(char* data) {
  return reinterpret_cast<T*>(data);
}

}  // namespace

at::Tensor move_momentum(const at::Tensor& momentum, const at::Tensor& gradient,
                         float gradient_factor, double mu) {
  at::Tensor direction = at::empty_like(momentum);
  const auto rest = static_cast<float>(1 - mu);
  over<3>(in_place().add_output(momentum).add_output(direction).add_const_input(gradient).build(),
          {4, 4, 4}, [&](const std::array<char*, 3>& at, std::int64_t size) {
            momentum_loop(as<float>(at[0]), as<float>(at[1]), as<float>(at[2]), gradient_factor,
                          size, rest);
          });
  return direction;
}

double move_momentum(const at::Tensor& momentum, const at::Tensor& gradient, float gradient_factor,
                     double mu, bool nesterov, const at::Tensor& direction) {
  const auto rest = static_cast<float>(1 - mu);
  std::vector<double> squares(static_cast<std::size_t>(momentum.size(0)));
  const auto take = [&]<typename Out>(Out* out) {
    on_threads(momentum.size(0), [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t row = begin; row < end; ++row) {
        squares[static_cast<std::size_t>(row)] = move_momentum_of_row(
            momentum.data_ptr<float>() + row * momentum.stride(0),
            gradient.const_data_ptr<float>() + row * gradient.stride(0), gradient_factor,
            momentum.size(1), rest, nesterov, out + row * direction.stride(0));
      }
    });
  };
  if (direction.scalar_type() == at::kFloat) {
    take(direction.data_ptr<float>());
  } else {
    take(direction.data_ptr<c10::BFloat16>());
  }
  return std::accumulate(squares.begin(), squares.end(), 0.0);
}

void move_weights(const at::Tensor& weights, double decay, const at::Tensor& update,
                  double factor) {
  const bool is_bf16 = update.scalar_type() == at::kBFloat16;
  const at::Tensor from = is_bf16 ? update : update.to(at::kFloat);
  const auto kept = static_cast<float>(decay);
  const auto rate = static_cast<float>(factor);
  over<2>(in_place().add_output(weights).add_const_input(from).build(), {4, is_bf16 ? 2 : 4},
          [&](const std::array<char*, 2>& at, std::int64_t size) {
            if (is_bf16) {
              weight_loop_bf16(as<float>(at[0]), as<std::uint16_t>(at[1]), size, kept, rate);
            } else {
              weight_loop(as<float>(at[0]), as<float>(at[1]), size, kept, rate);
            }
          });
}

double sum_of_squares(const float* x, std::int64_t size) { return squares_loop(x, size); }

void write_scaled(const float* x, std::int64_t size, double scale, float* out) {
  scale_loop(x, size, scale, out);
}

void write_scaled(const float* x, std::int64_t size, double scale, c10::BFloat16* out) {
  scale_loop_bf16(x, size, scale, &out->x);
}

}  // namespace dmuon::newton_schulz::cpu
