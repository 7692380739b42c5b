#pragma once

#include "dmuon/kernels/cuda/formats.h"
#include "dmuon/kernels/cuda/machine.h"
#include "dmuon/kernels/cuda/parameters.h"
#include "dmuon/kernels/cuda/quotient.h"

namespace dmuon::kernels::cuda::device {

/// See MoveWeightsParameters.
template <typename Format>
class MoveWeights {
 public:
  static DMUON_DEVICE void run(const MoveWeightsParameters& p) {
    if (machine::load_u8(p.applies) == 0) return;
    const MoveWeights move(p);
    if (p.width == 4) {
      move.neighbours(machine::block_x() * kMoveWeightsThreads + machine::thread());
    } else {
      move.apart(machine::block_x() * 4 * kMoveWeightsThreads + machine::thread());
    }
  }

 private:
  struct Place {
    bool inside;
    int col;
    float* w;
    const std::uint16_t* u;
  };

  explicit DMUON_DEVICE MoveWeights(const MoveWeightsParameters& p)
      : p_(p),
        units_a_row_((p.cols + p.width - 1) / p.width),
        outer_(machine::block_y() / p.inner_batch),
        inner_(machine::block_y() % p.inner_batch),
        w_(p.w + outer_ * p.w_batch_stride + inner_ * p.w_inner_stride),
        u_(p.u + outer_ * p.u_batch_stride + inner_ * p.u_inner_stride),
        decay_(machine::load_f32(p.decay)),
        factor_(factor_of(p)) {}

  static DMUON_DEVICE float factor_of(const MoveWeightsParameters& p) {
    const float factor = machine::load_f32(p.factor) * p.scale;
    if (p.scales == nullptr) return factor;
    return factor * machine::load_f32(p.scales + machine::block_y() * p.scale_stride);
  }

  DMUON_DEVICE Place place(int unit) const {
    const int row = quotient(unit, p_.units_a_row);
    const int col = (unit - row * units_a_row_) * p_.width;
    return {row < p_.rows, col, w_ + row * p_.w_row_stride + col, u_ + row * p_.u_row_stride + col};
  }

  DMUON_DEVICE float moved(float w, std::uint16_t u) const {
    return decay_ * w + factor_ * Format::wide(u);
  }

  DMUON_DEVICE void neighbours(int unit) const {
    const auto [inside, col, w, u] = place(unit);
    if (!inside) return;
    if (col + 4 <= p_.cols) {
      float four[4];
      std::uint16_t update[4];
      machine::load_f32x4(four, w);
      machine::load_u16x4(update, u);
      DMUON_UNROLL
      for (int i = 0; i < 4; ++i) four[i] = moved(four[i], update[i]);
      machine::store_f32x4(w, four);
      return;
    }
    for (int i = 0; col + i < p_.cols; ++i)
      machine::store_f32(w + i, moved(machine::load_f32(w + i), machine::load_u16(u + i)));
  }

  // Four single entries, all loaded before the first is stored.
  DMUON_DEVICE void apart(int unit) const {
    Place places[4];
    float w[4];
    std::uint16_t update[4];
    DMUON_UNROLL
    for (int i = 0; i < 4; ++i) {
      places[i] = place(unit + i * kMoveWeightsThreads);
      if (!places[i].inside) continue;
      w[i] = machine::load_f32(places[i].w);
      update[i] = machine::load_u16(places[i].u);
    }
    DMUON_UNROLL
    for (int i = 0; i < 4; ++i)
      if (places[i].inside) machine::store_f32(places[i].w, moved(w[i], update[i]));
  }

  const MoveWeightsParameters& p_;
  int units_a_row_;
  int outer_;
  int inner_;
  float* w_;
  const std::uint16_t* u_;
  float decay_;
  float factor_;
};

}  // namespace dmuon::kernels::cuda::device
