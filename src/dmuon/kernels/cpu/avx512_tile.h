#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "dmuon/kernels/cpu/avx512_registers.h"
#include "dmuon/kernels/cpu/products.h"

namespace dmuon::kernels::cpu::avx512 {

constexpr std::int64_t kTileRows = 8;
constexpr std::int64_t kTileVectors = 3;
constexpr std::int64_t kTileCols = kTileVectors * kLanes;
constexpr std::int64_t kLineBytes = 64;  // of a cache

/// Operands, addend and result of a WideProduct, which its tiles share. A WideGram sets only `out`.
struct WideEnd {
  std::int64_t m;
  WideSquare a;
  WideSquare b;
  const float* c;
  WideSquare out;
};

/// The destination of a tile's sums.
enum class End {
  kStored,  ///< in the dtype
  kAdded,   ///< to fp32: Product::decay
  kWide,    ///< as a WideSquare
};

// A tile of a product: its beginning and its extent, at most kTileRows rows and kTileCols columns.
// The sums of earlier words are read from `sums`, [kTileRows][kTileCols]. Unless the words are the
// last, the new sums are stored there.
struct Tile {
  const std::byte* a;
  std::int64_t a_row;   // bytes between a row of a and the next
  std::int64_t a_word;  // bytes between a word of a row and the next
  const std::uint32_t* b;
  std::int64_t panel;  // words between a panel of b and the next
  std::int64_t words;
  bool is_first;
  bool is_last;
  float* sums;
  const std::byte* c;
  std::int64_t c_stride;
  const float* row_factors;  // of the tile's rows, or null
  const float* col_factors;
  std::byte* out;
  std::int64_t out_stride;
  std::int64_t rows;
  std::int64_t cols;
  float decay;
  const WideEnd* wide;  // of End::kWide, with where in it the tile begins
  std::int64_t top;
  std::int64_t left;
};

// 16 sums of a row of the tile, from column `col` on.
template <typename T, End kEnd>
DMUON_AVX512_INLINE void store(const Tile& tile, std::int64_t i, std::int64_t col, __mmask16 mask,
                               __m512 sum, float alpha, float beta) {
  __m512 value = _mm512_mul_ps(sum, _mm512_set1_ps(alpha));
  if (beta != 0) {
    __m512 factor = _mm512_set1_ps(beta);
    if (tile.row_factors != nullptr) {
      factor = _mm512_mul_ps(factor, _mm512_set1_ps(tile.row_factors[i]));
    } else if (tile.col_factors != nullptr) {
      factor = _mm512_mul_ps(factor, _mm512_maskz_loadu_ps(mask, tile.col_factors + col));
    }
    const __m512 addend = T::load(mask, tile.c + i * tile.c_stride + col * T::kSize);
    value = _mm512_fmadd_ps(addend, factor, value);
  }
  std::byte* row = tile.out + i * tile.out_stride;
  if constexpr (kEnd == End::kAdded) {
    row += col * Fp32::kSize;
    value = _mm512_fmadd_ps(Fp32::load(mask, row), _mm512_set1_ps(tile.decay), value);
    Fp32::store(row, mask, value);
  } else {
    T::store(row + col * T::kSize, mask, value);
  }
}

// Let a = D + A and b = E + B, with diagonals D and E. Then a b = A B + D b + A E; the sum is A B.
template <>
DMUON_AVX512_INLINE void store<Bf16, End::kWide>(const Tile& tile, std::int64_t i, std::int64_t col,
                                                 __mmask16 mask, __m512 sum, float alpha,
                                                 float beta) {
  const auto& [m, a, b, c, out] = *tile.wide;
  const std::int64_t row = tile.top + i;
  const std::int64_t left = tile.left + col;
  const std::int64_t at = row * m + left;
  const bool has_diagonal = left <= row && row < left + kLanes;
  const auto diagonal = static_cast<__mmask16>(has_diagonal ? 1 << (row - left) : 0);
  const auto beside = static_cast<__mmask16>(mask & ~diagonal);
  if (a.wide != nullptr) {
    const __m512 of_b = _mm512_maskz_loadu_ps(mask, b.wide + at);
    sum = _mm512_fmadd_ps(_mm512_set1_ps(a.diagonal[row]), of_b, sum);
    const __m512 of_a = _mm512_maskz_loadu_ps(beside, a.wide + at);
    sum = _mm512_fmadd_ps(of_a, _mm512_maskz_loadu_ps(mask, b.diagonal + left), sum);
  }
  __m512 value = _mm512_mul_ps(sum, _mm512_set1_ps(alpha));
  if (beta != 0) {
    value = _mm512_fmadd_ps(_mm512_maskz_loadu_ps(mask, c + at), _mm512_set1_ps(beta), value);
  }
  _mm512_mask_storeu_ps(out.wide + at, mask, value);
  if (has_diagonal) _mm512_mask_compressstoreu_ps(out.diagonal + row, diagonal & mask, value);
  Bf16::store(static_cast<std::byte*>(out.narrow) + at * Bf16::kSize, mask,
              _mm512_maskz_mov_ps(beside, value));
}

DMUON_AVX512_INLINE void prefetch(const void* first, std::int64_t stride, const Tile& tile) {
  for (std::int64_t i = 0; i < tile.rows && i < kTileRows; ++i) {
    for (std::int64_t at = 0; at < tile.cols * Fp32::kSize; at += kLineBytes)
      _mm_prefetch(static_cast<const char*>(first) + i * stride + at, _MM_HINT_T0);
  }
}

// Addends in fp32 come from memory, in pieces too short for the processor to prefetch by itself.
template <End kEnd>
DMUON_AVX512_INLINE void prefetch_addends(const Tile& tile) {
  if constexpr (kEnd == End::kAdded) prefetch(tile.out, tile.out_stride, tile);
  if constexpr (kEnd == End::kWide) {
    const auto& [m, a, b, c, out] = *tile.wide;
    const std::int64_t at = tile.top * m + tile.left;
    const std::int64_t stride = m * Fp32::kSize;
    prefetch(out.wide + at, stride, tile);
    if (a.wide != nullptr) prefetch(a.wide + at, stride, tile);
    if (b.wide != a.wide) prefetch(b.wide + at, stride, tile);
    if (c != nullptr && c != a.wide && c != b.wide) prefetch(c + at, stride, tile);
  }
}

template <typename T, std::int64_t kVectors, End kEnd>
DMUON_AVX512 void compute_tile(const Tile& tile, float alpha, float beta) {
  if (tile.is_last) prefetch_addends<kEnd>(tile);
  const std::byte* a = tile.a;
  const std::uint32_t* b = tile.b;
  const std::uint32_t* const end = b + tile.words * kLanes;
  bool is_first = tile.is_first;
  do {
    const std::uint32_t* const end_of_sum = std::min(b + T::kSumWords * kLanes, end);
    const bool is_last = tile.is_last && end_of_sum == end;
    __m512 sum[kTileRows][static_cast<std::size_t>(kVectors)];
#pragma GCC unroll 8
    for (std::int64_t i = 0; i < kTileRows; ++i) {
#pragma GCC unroll 3
      for (std::int64_t v = 0; v < kVectors; ++v) sum[i][v] = _mm512_setzero_ps();
    }
    for (; b < end_of_sum; a += tile.a_word, b += kLanes) {
      __m512i of_b[static_cast<std::size_t>(kVectors)];
#pragma GCC unroll 3
      for (std::int64_t v = 0; v < kVectors; ++v) of_b[v] = _mm512_load_si512(b + v * tile.panel);
#pragma GCC unroll 8
      for (std::int64_t i = 0; i < kTileRows; ++i) {
        const __m512i of_a = in_all_lanes(a + i * tile.a_row);
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
        float* const sums = tile.sums + i * kTileCols + v * kLanes;
        if (!is_first) sum[i][v] = _mm512_add_ps(_mm512_load_ps(sums), sum[i][v]);
        if (!is_last) {
          _mm512_store_ps(sums, sum[i][v]);
          continue;
        }
        const std::int64_t col = v * kLanes;
        store<T, kEnd>(tile, i, col, first(tile.cols - col), sum[i][v], alpha, beta);
      }
    }
    is_first = false;
  } while (b < end);
}

template <typename T, End kEnd>
void compute_tile(const Tile& tile, float alpha, float beta) {
  switch (divided_up(tile.cols, kLanes)) {
    case 1:
      return compute_tile<T, 1, kEnd>(tile, alpha, beta);
    case 2:
      return compute_tile<T, 2, kEnd>(tile, alpha, beta);
    default:
      return compute_tile<T, kTileVectors, kEnd>(tile, alpha, beta);
  }
}

// Copies the 16 x 16 block at (top, left) of m x m `square` to its transposed place. The block lies
// on or below the diagonal; of a block on the diagonal only the entries strictly below it are
// copied.
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

}  // namespace dmuon::kernels::cpu::avx512
