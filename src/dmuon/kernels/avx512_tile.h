#pragma once

#include <cstddef>
#include <cstdint>

#include "dmuon/kernels/avx512_registers.h"

namespace dmuon::kernels::avx512 {

constexpr std::int64_t kTileRows = 8;
constexpr std::int64_t kTileVectors = 3;
constexpr std::int64_t kTileCols = kTileVectors * kLanes;
constexpr std::int64_t kLineBytes = 64;  // of a cache

// What of a product a tile is: where it begins, and how far it goes, at most kTileRows rows and
// kTileCols columns. The sums of earlier words are added from `sums`, [kTileRows][kTileCols], and
// those of all but the last words left there.
struct Tile {
  const std::uint32_t* a;
  const std::uint32_t* b;
  std::int64_t panel;  // words between a panel of b and the next
  std::int64_t words;
  bool is_first;
  bool is_last;
  float* sums;
  const std::byte* c;
  std::int64_t c_stride;
  std::byte* out;
  std::int64_t out_stride;
  std::int64_t rows;
  std::int64_t cols;
  const float* decay;  // Product::decay; null where unset
};

template <typename T, std::int64_t kVectors, bool kAdds>
DMUON_AVX512 void compute_tile(const Tile& tile, float alpha, float beta) {
  __m512 sum[kTileRows][kVectors];
#pragma GCC unroll 8
  for (std::int64_t i = 0; i < kTileRows; ++i) {
#pragma GCC unroll 3
    for (std::int64_t v = 0; v < kVectors; ++v) {
      sum[i][v] = _mm512_setzero_ps();
    }
  }
  // What it is added to comes from memory, in pieces too short for the processor to foresee.
  if (kAdds && tile.is_last) {
    for (std::int64_t i = 0; i < tile.rows && i < kTileRows; ++i) {
      for (std::int64_t at = 0; at < tile.cols * Fp32::kSize; at += kLineBytes)
        _mm_prefetch(reinterpret_cast<const char*>(tile.out + i * tile.out_stride + at),
                     _MM_HINT_T0);
    }
  }
  const std::uint32_t* a = tile.a;
  const std::uint32_t* b = tile.b;
  const std::int64_t panel = tile.panel;
  for (std::int64_t word = 0; word < tile.words; ++word, a += kLanes, b += kLanes) {
    __m512i of_b[kVectors];
#pragma GCC unroll 3
    for (std::int64_t v = 0; v < kVectors; ++v) of_b[v] = _mm512_load_si512(b + v * panel);
#pragma GCC unroll 8
    for (std::int64_t i = 0; i < kTileRows; ++i) {
      const __m512i of_a = _mm512_set1_epi32(static_cast<int>(a[i]));
#pragma GCC unroll 3
      for (std::int64_t v = 0; v < kVectors; ++v)
        sum[i][v] = T::multiplied(sum[i][v], of_a, of_b[v]);
    }
  }
#pragma GCC unroll 8
  for (std::int64_t i = 0; i < kTileRows; ++i) {
    if (i >= tile.rows) break;
#pragma GCC unroll 3
    for (std::int64_t v = 0; v < kVectors; ++v) {
      if (!tile.is_first) {
        const __m512 before = _mm512_load_ps(tile.sums + i * kTileCols + v * kLanes);
        sum[i][v] = _mm512_add_ps(before, sum[i][v]);
      }
      if (!tile.is_last) {
        _mm512_store_ps(tile.sums + i * kTileCols + v * kLanes, sum[i][v]);
        continue;
      }
      const __mmask16 mask = first(tile.cols - v * kLanes);
      const std::int64_t at = v * kLanes * T::kSize;
      __m512 value = _mm512_mul_ps(sum[i][v], _mm512_set1_ps(alpha));
      if (beta != 0) {
        const __m512 addend = T::load(mask, tile.c + i * tile.c_stride + at);
        value = _mm512_fmadd_ps(addend, _mm512_set1_ps(beta), value);
      }
      std::byte* row = tile.out + i * tile.out_stride;
      if constexpr (kAdds) {
        row += v * kLanes * Fp32::kSize;
        value = _mm512_fmadd_ps(Fp32::load(mask, row), _mm512_set1_ps(*tile.decay), value);
        Fp32::store(row, mask, value);
      } else {
        T::store(row + at, mask, value);
      }
    }
  }
}

template <typename T, bool kAdds>
void compute_tile(const Tile& tile, float alpha, float beta) {
  switch (divided_up(tile.cols, kLanes)) {
    case 1:
      return compute_tile<T, 1, kAdds>(tile, alpha, beta);
    case 2:
      return compute_tile<T, 2, kAdds>(tile, alpha, beta);
    default:
      return compute_tile<T, kTileVectors, kAdds>(tile, alpha, beta);
  }
}

template <typename T>
void compute_tile(const Tile& tile, float alpha, float beta) {
  if (tile.decay == nullptr) return compute_tile<T, false>(tile, alpha, beta);
  compute_tile<T, true>(tile, alpha, beta);
}

// Copies the 16 x 16 block of m x m `square` that begins at (top, left) on or below the diagonal to
// where its transpose belongs; of a block on the diagonal, what lies strictly below that.
template <typename T>
DMUON_AVX512 void mirror(std::byte* square, std::int64_t stride, std::int64_t m, std::int64_t top,
                         std::int64_t left) {
  const __mmask16 cols = first(m - left);
  const __mmask16 rows = first(m - top);
  Block block{};
#pragma GCC unroll 16
  for (std::int64_t i = 0; i < kLanes; ++i) {
    const std::byte* row = square + (top + i) * stride + left * T::kSize;
    block.row[i] = top + i < m ? _mm512_castps_si512(T::load(cols, row)) : _mm512_setzero_si512();
  }
  transpose(block);
#pragma GCC unroll 16
  for (std::int64_t i = 0; i < kLanes; ++i) {
    if (left + i >= m) break;
    const auto above = static_cast<__mmask16>(top == left ? 0xfffe << i : 0xffff);
    T::store(square + (left + i) * stride + top * T::kSize, static_cast<__mmask16>(rows & above),
             _mm512_castsi512_ps(block.row[i]));
  }
}

}  // namespace dmuon::kernels::avx512
