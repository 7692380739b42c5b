#pragma once

#include "dmuon/kernels/cuda/machine.h"
#include "dmuon/kernels/cuda/triangle.h"

namespace dmuon::kernels::cuda::device {

/// A tile of 16-bit entries in shared memory, from word 0 on, on its way to a symmetric matrix:
/// `write` writes the tile and its mirror image, each by 16 bytes. All threads of a block call each
/// function, with barriers between them.
///
/// A row consists of chunks of 4 words, 8 entries. A chunk's place in its row depends on the row,
/// so each of these groups of 8 chunks reaches all banks:
/// - neighbours in a row, which `write` loads
/// - the same chunk of 8 neighbouring rows, which fragments store
/// - the same chunk of rows 8 i + j and 8 i + j + 1, of 4 values of i: the mirror image is loaded
/// so
template <int kTile, int kThreads>
struct StagedTile {
  static constexpr int kWords = kTile * kTile / 2;

  /// Returns the word that holds the entries (row, col) and (row, col + 1); col is even.
  static DMUON_DEVICE int word_of(int row, int col) {
    const int move = (row & 1) | ((row >> 1 ^ row >> 3) & 3) << 1;
    return row * (kTile / 2) + ((col / 8) ^ move) * 4 + col % 8 / 2;
  }

  /// Begins a copy of the tile at `place` of x, m x m with rows aligned to 16 bytes. Entries beyond
  /// x become zeros.
  static DMUON_DEVICE void copy_from(const std::uint16_t* x, std::int64_t row_stride, int m,
                                     Place place) {
    DMUON_NO_UNROLL
    for (int id = machine::from_here(machine::thread()); id < kTile * kTile / 8; id += kThreads) {
      const int row = id / (kTile / 8);
      const int col = id % (kTile / 8) * 8;
      const int global_row = place.row * kTile + row;
      const int global_col = place.col * kTile + col;
      const int left = global_row < m ? m - global_col : 0;
      const int count = left < 0 ? 0 : left > 8 ? 8 : left;
      machine::copy_async(word_of(row, col),
                          count > 0 ? x + global_row * row_stride + global_col : x, 2 * count);
    }
    machine::commit_copies();
  }

  /// Writes the tile to its place in x and, transposed, to the mirrored place. Entries above the
  /// matrix's diagonal are not used: those below are written twice.
  static DMUON_DEVICE void write(std::uint16_t* x, std::int64_t row_stride, int m, Place place) {
    const bool on_diagonal = place.row == place.col;
    DMUON_NO_UNROLL
    for (int id = machine::from_here(machine::thread()); !on_diagonal && id < kTile * kTile / 8; id += kThreads) {
      const int row = id / (kTile / 8);
      const int col = id % (kTile / 8) * 8;
      std::uint32_t eight[4];
      machine::shared_load_x4(eight, word_of(row, col));
      store(x, row_stride, m, place.row * kTile + row, place.col * kTile + col, eight);
    }
    // A warp takes 32 rows and 8 columns. load_matrices_transposed gives a thread two neighbours of
    // a column from each of four matrices; the matrices have rows such that these are 8 neighbours.
    const int thread = machine::from_here(machine::thread());
    const int lane = thread % 32;
    const int row_in_unit = lane % 8 / 2 * 8 + lane / 8 * 2 + lane % 2;
    DMUON_NO_UNROLL
    for (int unit = thread / 32; unit < kTile / 32 * (kTile / 8);
         unit += kThreads / 32) {
      const int first = unit % (kTile / 32) * 32;
      const int col = unit / (kTile / 32) * 8;
      std::uint32_t eight[4];
      machine::load_matrices_transposed(eight, word_of(first + row_in_unit, col));
      const int mirrored_row = col + lane / 4;
      const int mirrored_col = first + lane % 4 * 8;
      if (on_diagonal) take_lower(eight, mirrored_row, mirrored_col);
      store(x, row_stride, m, place.col * kTile + mirrored_row, place.row * kTile + mirrored_col,
            eight);
    }
  }

 private:
  // Replaces those of eight mirrored entries that do not lie above the diagonal.
  static DMUON_DEVICE void take_lower(std::uint32_t (&eight)[4], int row, int col) {
    std::uint32_t lower[4];
    machine::shared_load_x4(lower, word_of(row, col));
    DMUON_UNROLL
    for (int i = 0; i < 4; ++i) {
      const std::uint32_t mask =
          (col + 2 * i <= row ? 0xffffU : 0) | (col + 2 * i + 1 <= row ? 0xffff0000U : 0);
      eight[i] = (lower[i] & mask) | (eight[i] & ~mask);
    }
  }

  static DMUON_DEVICE void store(std::uint16_t* x, std::int64_t row_stride, int m, int row, int col,
                                 const std::uint32_t (&eight)[4]) {
    if (row >= m || col >= m) return;
    std::uint16_t* const to = x + row * row_stride + col;
    if (col + 8 <= m) return machine::store_u16x8(to, eight);
    DMUON_UNROLL
    for (int i = 0; i < 8; ++i) {
      if (col + i < m)
        machine::store_u16(to + i, static_cast<std::uint16_t>(eight[i / 2] >> 16 * (i % 2)));
    }
  }
};

}  // namespace dmuon::kernels::cuda::device
