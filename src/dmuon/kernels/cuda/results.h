#pragma once

#include "dmuon/kernels/cuda/machine.h"
#include "dmuon/kernels/cuda/moved_tile.h"
#include "dmuon/kernels/cuda/parameters.h"
#include "dmuon/kernels/cuda/triangle.h"

namespace dmuon::kernels::cuda::device {

// What becomes of a product: which tiles are computed, in which order, and where a staged tile goes
// (StagedTile). Product80 and Product90 take one of these two.

/// The lower triangle, each tile with its mirror image.
struct SymmetricResult {
  static constexpr bool kIsSymmetric = true;

  static DMUON_DEVICE bool applies(const ProductParameters&) { return true; }

  template <int kTile>
  static DMUON_DEVICE Place place(int index, const ProductParameters&) {
    return place_in_triangle(index);
  }

  template <typename Staged, typename Format>
  static DMUON_DEVICE void write(const ProductParameters& p, int matrix, Place place) {
    Staged::write(p.out + matrix * p.out_batch_stride, p.out_row_stride, p.m, place);
  }
};

/// Returns place `index` of rows x cols places: bands of kBand rows, in which one column follows
/// the other. Tiles that are computed at a time then share rows of a and of b, in the L2.
DMUON_DEVICE Place place_in_bands(int index, int rows, int cols) {
  constexpr int kBand = 8;
  const int band = index / (kBand * cols);
  const int left = rows - band * kBand;
  const int height = left < kBand ? left : kBand;
  const int in_band = index - band * kBand * cols;
  return {band * kBand + in_band % height, in_band / height};
}

/// All tiles, written to `out`; or the weights move by them.
struct FullResult {
  static constexpr bool kIsSymmetric = false;

  static DMUON_DEVICE bool applies(const ProductParameters& p) {
    return p.weights.w == nullptr || machine::load_u8(p.weights.applies) != 0;
  }

  template <int kTile>
  static DMUON_DEVICE Place place(int index, const ProductParameters& p) {
    return place_in_bands(index, (p.m + kTile - 1) / kTile, (p.n + kTile - 1) / kTile);
  }

  template <typename Staged, typename Format>
  static DMUON_DEVICE void write(const ProductParameters& p, int matrix, Place place) {
    if (p.weights.w != nullptr) return MovedTile<Staged, Format>::move(p.weights, matrix, place);
    Staged::write_alone(p.out + matrix * p.out_batch_stride, p.out_row_stride, p.m, p.n, place);
  }
};

}  // namespace dmuon::kernels::cuda::device
