#pragma once

#include "dmuon/kernels/cuda/machine.h"
#include "dmuon/kernels/cuda/triangle.h"

namespace dmuon::kernels::cuda::device {

/// A tile of 16-bit entries in shared memory, from word 0 on, on its way to a matrix. `write`
/// writes the tile and its mirror image, each by 16 bytes; `write_alone` the tile. All threads of a
/// block call each function, with barriers between them.
///
/// A row consists of chunks of 4 words, 8 entries. A chunk's place in its row depends on the row,
/// so each of these groups of 8 chunks reaches all banks:
/// - neighbours in a row, which `write` loads
/// - the same chunk of 8 neighbouring rows, which fragments store
/// - the same chunk of rows 8 i + j and 8 i + j + 1, of 4 values of i: the mirror image is loaded
/// so
template <int kTile, int kThreads>
struct StagedTile {
  static constexpr int kSide = kTile;
  static constexpr int kWords = kTile * kTile / 2;

  /// Eight neighbours of a row, of which each thread has kChunks.
  struct Chunk {
    int row;
    int col;
  };
  static constexpr int kChunks = kTile * kTile / 8 / kThreads;
  static_assert(kChunks % 4 == 0);

  static DMUON_DEVICE Chunk chunk_of(int thread, int i) {
    return {(thread + i * kThreads) / (kTile / 8), thread % (kTile / 8) * 8};
  }

  /// Returns the word that holds the entries (row, col) and (row, col + 1); col is even.
  static DMUON_DEVICE int word_of(int row, int col) {
    const int move = (row & 1) | ((row >> 1 ^ row >> 3) & 3) << 1;
    return row * (kTile / 2) + ((col / 8) ^ move) * 4 + col % 8 / 2;
  }

  /// Begins a copy of the tile at `place` of x, rows x cols with rows aligned to 16 bytes. Entries
  /// beyond x become zeros.
  static DMUON_DEVICE void copy_from(const std::uint16_t* x, std::int64_t row_stride, int rows,
                                     int cols, Place place) {
    DMUON_UNROLL_BY(4)
    for (int id = machine::from_here(machine::thread()); id < kTile * kTile / 8; id += kThreads) {
      const int row = id / (kTile / 8);
      const int col = id % (kTile / 8) * 8;
      const int global_row = place.row * kTile + row;
      const int global_col = place.col * kTile + col;
      const int left = global_row < rows ? cols - global_col : 0;
      const int count = left < 0 ? 0 : left > 8 ? 8 : left;
      machine::copy_async(word_of(row, col),
                          count > 0 ? x + global_row * row_stride + global_col : x, 2 * count);
    }
    machine::commit_copies();
  }

  /// Writes the tile to its place in x and, transposed, to the mirrored place. Entries above the
  /// matrix's diagonal are not used: those below are written twice.
  static DMUON_DEVICE void write(std::uint16_t* x, std::int64_t row_stride, int m, Place place) {
    const int thread = machine::from_here(machine::thread());
    if (place.row != place.col && (place.row + 1) * kTile <= m) {
      std::uint16_t* const tile = x + place.row * kTile * row_stride + place.col * kTile;
      std::uint16_t* const mirrored = x + place.col * kTile * row_stride + place.row * kTile;
      return write_whole<true>(tile, mirrored, row_stride, thread);
    }
    DMUON_NO_UNROLL
    for (int i = 0; i < kChunks; ++i) {
      const Chunk chunk = chunk_of(thread, i);
      std::uint32_t eight[4];
      machine::shared_load_x4(eight, word_of(chunk.row, chunk.col));
      const int row = place.row * kTile + chunk.row;
      const int col = place.col * kTile + chunk.col;
      if (place.row != place.col && row < m && col + 8 <= m)
        machine::store_u16x8(x + row * row_stride + col, eight);
    }
    DMUON_NO_UNROLL
    for (int i = 0; i < kChunks; ++i) {
      std::uint32_t eight[4];
      const Chunk chunk = load_mirrored(eight, thread, i);
      if (place.row == place.col) take_lower(eight, chunk.row, chunk.col);
      const int row = place.col * kTile + chunk.row;
      const int col = place.row * kTile + chunk.col;
      if (row < m && col + 8 <= m) machine::store_u16x8(x + row * row_stride + col, eight);
    }
    write_ends(x, row_stride, m, place, thread);
  }

  /// Writes the tile to its place in x, rows x cols.
  static DMUON_DEVICE void write_alone(std::uint16_t* x, std::int64_t row_stride, int rows,
                                       int cols, Place place) {
    const int thread = machine::from_here(machine::thread());
    std::uint16_t* const tile = x + place.row * kTile * row_stride + place.col * kTile;
    const int rows_left = rows - place.row * kTile;
    const int cols_left = cols - place.col * kTile;
    if (rows_left >= kTile && cols_left >= kTile)
      return write_whole<false>(tile, nullptr, row_stride, thread);
    DMUON_NO_UNROLL
    for (int i = 0; i < kChunks; ++i) {
      const auto [row, col] = chunk_of(thread, i);
      if (row >= rows_left) continue;
      std::uint16_t* const to = tile + row * row_stride + col;
      if (col + 8 <= cols_left) {
        std::uint32_t eight[4];
        machine::shared_load_x4(eight, word_of(row, col));
        machine::store_u16x8(to, eight);
        continue;
      }
      DMUON_NO_UNROLL
      for (int e = 0; col + e < cols_left; ++e) machine::store_u16(to + e, entry(row, col + e));
    }
  }

  /// Returns one staged entry.
  static DMUON_DEVICE std::uint16_t entry(int row, int col) {
    return static_cast<std::uint16_t>(machine::shared_load(word_of(row, col & ~1)) >>
                                      16 * (col & 1));
  }

 private:
  // Loads eight neighbours of a row of the mirror image. A warp takes 32 rows and 8 columns of the
  // tile. load_matrices_transposed gives a thread two neighbours of a column from each of four
  // matrices; the matrices have rows such that these are 8 neighbours.
  static DMUON_DEVICE Chunk load_mirrored(std::uint32_t (&eight)[4], int thread, int i) {
    const int lane = thread % 32;
    const int row_in_unit = lane % 8 / 2 * 8 + lane / 8 * 2 + lane % 2;
    const int unit = thread / 32 + i * (kThreads / 32);
    const int first = unit % (kTile / 32) * 32;
    const int col = unit / (kTile / 32) * 8;
    machine::load_matrices_transposed(eight, word_of(first + row_in_unit, col));
    return {col + lane / 4, first + lane % 4 * 8};
  }

  // A tile off the diagonal that lies in x with all its entries: four loads, then four stores.
  template <bool kMirrors>
  static DMUON_DEVICE void write_whole(std::uint16_t* tile, std::uint16_t* mirrored,
                                       std::int64_t row_stride, int thread) {
    std::uint32_t eight[4][4];
    Chunk chunks[4];
    DMUON_UNROLL
    for (int i = 0; i < (kMirrors ? 2 : 1) * kChunks; i += 4) {
      DMUON_UNROLL
      for (int j = 0; j < 4; ++j) {
        if (i < kChunks) {
          chunks[j] = chunk_of(thread, i + j);
          machine::shared_load_x4(eight[j], word_of(chunks[j].row, chunks[j].col));
        } else {
          chunks[j] = load_mirrored(eight[j], thread, i + j - kChunks);
        }
      }
      std::uint16_t* const to = i < kChunks ? tile : mirrored;
      DMUON_UNROLL
      for (int j = 0; j < 4; ++j)
        machine::store_u16x8(to + chunks[j].row * row_stride + chunks[j].col, eight[j]);
    }
  }

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

  // The ends of rows, of fewer than eight entries: one by one, in code that is small.
  static DMUON_DEVICE void write_ends(std::uint16_t* x, std::int64_t row_stride, int m, Place place,
                                      int thread) {
    const int end = m % 8;
    if (end == 0 || (m / 8 * 8) / kTile != place.row) return;
    const int first = m / 8 * 8 - place.row * kTile;  // of the last rows, in the tile
    DMUON_NO_UNROLL
    for (int id = thread; id < end * kTile; id += kThreads) {
      const int row = first + id / kTile;  // an end of x's column, mirrored at an end of its row
      const int col = id % kTile;
      if (place.col * kTile + col >= m) continue;
      const bool below = place.row != place.col || col <= row;
      machine::store_u16(x + (place.col * kTile + col) * row_stride + place.row * kTile + row,
                         below ? entry(row, col) : entry(col, row));
    }
  }
};

}  // namespace dmuon::kernels::cuda::device
