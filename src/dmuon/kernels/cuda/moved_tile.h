#pragma once

#include "dmuon/kernels/cuda/machine.h"
#include "dmuon/kernels/cuda/parameters.h"
#include "dmuon/kernels/cuda/triangle.h"

namespace dmuon::kernels::cuda::device {

/// Moves weights by a staged tile of a product: see MovedWeights.
template <typename Staged, typename Format>
class MovedTile {
 public:
  /// All threads of the block call it.
  static DMUON_DEVICE void move(const MovedWeights& p, int matrix, Place place) {
    const MovedTile tile(p, p.first + matrix, place);
    if (p.in_fours && (place.row + 1) * kTile <= p.rows && (place.col + 1) * kTile <= p.cols)
      return tile.whole();
    DMUON_NO_UNROLL
    for (int i = 0; i < Staged::kChunks; ++i) tile.chunk(i);
  }

 private:
  static constexpr int kTile = Staged::kSide;
  static constexpr int kAtOnce = 2;  // chunks of 8 weights that a thread loads before it stores

  DMUON_DEVICE MovedTile(const MovedWeights& p, int matrix, Place place)
      : p_(p),
        row_(place.row * kTile),
        col_(place.col * kTile),
        thread_(machine::from_here(machine::thread())),
        w_(p.w + matrix / p.inner_batch * p.batch_stride + matrix % p.inner_batch * p.inner_stride +
           row_ * p.row_stride + col_),
        decay_(machine::load_f32(p.decay)),
        factor_(factor_of(p, matrix)) {}

  static DMUON_DEVICE float factor_of(const MovedWeights& p, int matrix) {
    const float factor = machine::load_f32(p.factor) * p.scale;
    if (p.scales == nullptr) return factor;
    return factor * machine::load_f32(p.scales + matrix * p.scale_stride);
  }

  DMUON_DEVICE float moved(float w, std::uint32_t half) const {
    return decay_ * w + factor_ * Format::wide(static_cast<std::uint16_t>(half));
  }

  // A tile that lies in the weights with all its entries.
  DMUON_DEVICE void whole() const {
    DMUON_NO_UNROLL
    for (int i = 0; i < Staged::kChunks; i += kAtOnce) {
      float w[kAtOnce][2][4];
      DMUON_UNROLL
      for (int j = 0; j < kAtOnce; ++j) {
        const auto [row, col] = Staged::chunk_of(thread_, i + j);
        const float* const from = w_ + row * p_.row_stride + col;
        machine::load_f32x4(w[j][0], from);
        machine::load_f32x4(w[j][1], from + 4);
      }
      DMUON_UNROLL
      for (int j = 0; j < kAtOnce; ++j) {
        const auto [row, col] = Staged::chunk_of(thread_, i + j);
        std::uint32_t eight[4];
        machine::shared_load_x4(eight, Staged::word_of(row, col));
        DMUON_UNROLL
        for (int e = 0; e < 8; ++e)
          w[j][e / 4][e % 4] = moved(w[j][e / 4][e % 4], eight[e / 2] >> e % 2 * 16);
        float* const to = w_ + row * p_.row_stride + col;
        machine::store_f32x4(to, w[j][0]);
        machine::store_f32x4(to + 4, w[j][1]);
      }
    }
  }

  // Eight weights or fewer, one by one.
  DMUON_DEVICE void chunk(int i) const {
    const auto [row, col] = Staged::chunk_of(thread_, i);
    if (row_ + row >= p_.rows) return;
    const int left = p_.cols - col_ - col;
    float* const w = w_ + row * p_.row_stride + col;
    DMUON_NO_UNROLL
    for (int e = 0; e < 8 && e < left; ++e)
      machine::store_f32(w + e, moved(machine::load_f32(w + e), Staged::entry(row, col + e)));
  }

  const MovedWeights& p_;
  int row_;  // the tile's first
  int col_;
  int thread_;
  float* w_;
  float decay_;
  float factor_;
};

}  // namespace dmuon::kernels::cuda::device
