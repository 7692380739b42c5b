#pragma once

#include "dmuon/kernels/cuda/formats.h"
#include "dmuon/kernels/cuda/machine.h"
#include "dmuon/kernels/cuda/parameters.h"
#include "dmuon/kernels/cuda/results.h"
#include "dmuon/kernels/cuda/staged_tile.h"

namespace dmuon::kernels::cuda::device {

/// A product by instructions that all GPUs from compute capability 8.0 on have. Result says which
/// tiles are computed, and what becomes of them (results.h).
///
/// A block computes a tile, or a part of its sums over `inner`:
/// 1. Copies bring tiles of a and b to shared memory, a step of kDepth entries of `inner` at a
///    time. The block multiplies one of kStages steps while the others arrive.
/// 2. If a tile has several parts, each block stores its sums in `partial`. The last block to end
///    adds all parts in their order, so bits do not depend on who is last. The other blocks end.
/// 3. The block scales the sums, adds c and the diagonal, and rounds. Result writes the tile.
///
/// A row of a step's tile consists of chunks of 4 words, 8 entries. A chunk's place in its row
/// depends on the row: load_matrices reads the same chunk of 8 rows, from different banks. A b that
/// lies transposed has a row for each entry of `inner`, of which load_matrices_transposed reads.
template <typename Format, ProductTile kShape, typename Result>
class Product80 {
 public:
  static DMUON_DEVICE void run(const ProductParameters& p) { Product80(p).block(); }

 private:
  static constexpr int kTile = kShape.tile;
  static constexpr int kDepth = kShape.depth;
  static constexpr int kStages = kShape.stages;
  static constexpr int kThreads = kShape.threads();
  static constexpr int kChunks = kDepth / 8;  // a row's
  static constexpr int kRowWords = kChunks * 4;
  static constexpr int kTileWords = kTile * kDepth / 2;  // of a or b
  static constexpr int kWarpsDown = kTile / kShape.warp_rows;
  static constexpr int kDown = kShape.warp_rows / 16;  // matrices of 16 x 8 sums, of a warp
  static constexpr int kAcross = kShape.warp_cols / 8;
  static constexpr int kTicketWord = kShape.shared_bytes() / 4 - 1;  // beyond the staged tile
  using Staged = StagedTile<kTile, kThreads>;
  static_assert(kDepth == 32 || kDepth == 64);
  static_assert(kTicketWord >= Staged::kWords);

  using Sums = float[kDown * kAcross][4];

  DMUON_DEVICE explicit Product80(const ProductParameters& p)
      : p_(p),
        index_(machine::block_x() / p.splits),
        split_(machine::block_x() % p.splits),
        matrix_(machine::block_y()),
        place_(Result::template place<kTile>(index_, p)),
        one_operand_(Result::kIsSymmetric && p.one_operand && place_.row == place_.col) {
    const int warp = machine::thread() / 32;
    warp_row_ = warp % kWarpsDown * kShape.warp_rows;
    warp_col_ = warp / kWarpsDown * kShape.warp_cols;
  }

  DMUON_DEVICE void block() {
    if (!Result::applies(p_)) return;
    Sums sums;
    if (!Result::kIsSymmetric && p_.b_transposed) {
      multiply<!Result::kIsSymmetric>(sums);
    } else {
      multiply<false>(sums);
    }
    if (p_.splits > 1 && !add_parts(sums)) return;
    finish(sums);
  }

  // Rows that are a multiple of 8 apart move their chunks alike.
  static DMUON_DEVICE int word_of(int row, int chunk) {
    const int moved = kChunks == 8 ? chunk ^ (row & 7) : chunk ^ (row >> 1 & 3);
    return row * kRowWords + moved * 4;
  }

  // Begins the copy of a step's tile of an operand with `size` rows; what lies beyond the operand
  // becomes zeros.
  DMUON_DEVICE void copy(int to_word, const std::uint16_t* x, std::int64_t row_stride, int size,
                         int tile_row, int step) const {
    constexpr int kApart = kThreads / kChunks;  // rows between a thread's copies
    static_assert(kThreads % kChunks == 0 && kApart % 8 == 0 && kTile % kApart == 0);
    const int row = machine::thread() / kChunks;
    const int chunk = machine::thread() % kChunks;
    const int k = step * kDepth + chunk * 8;
    const int left = p_.inner - k;
    const int count = left < 0 ? 0 : left > 8 ? 8 : left;
    const int rows = size - tile_row * kTile - row;  // from this row on
    const int word = to_word + word_of(row, chunk);
    const std::uint16_t* const source = x + (tile_row * kTile + row) * row_stride + k;
    DMUON_UNROLL
    for (int i = 0; i < kTile / kApart; ++i) {
      machine::copy_async(word + i * kApart * kRowWords, source + i * kApart * row_stride,
                          i * kApart < rows ? 2 * count : 0);
    }
  }

  // Rows of a transposed b, of kTile entries.
  static DMUON_DEVICE int transposed_word_of(int row, int chunk) {
    return row * (kTile / 2) + (chunk ^ (row & 7)) * 4;
  }

  // As copy, of a b that lies transposed.
  DMUON_DEVICE void copy_transposed(int to_word, const std::uint16_t* b, int step) const {
    constexpr int kAcrossTile = kTile / 8;  // chunks
    constexpr int kApart = kThreads / kAcrossTile;
    static_assert(kThreads % kAcrossTile == 0 && kApart % 8 == 0 && kDepth % kApart == 0);
    const int row = machine::thread() / kAcrossTile;
    const int chunk = machine::thread() % kAcrossTile;
    const int col = place_.col * kTile + chunk * 8;
    const int left = p_.n - col;
    const int count = left < 0 ? 0 : left > 8 ? 8 : left;
    const int rows = p_.inner - step * kDepth - row;  // from this row on
    const int word = to_word + transposed_word_of(row, chunk);
    const std::uint16_t* const source = b + (step * kDepth + row) * p_.b_row_stride + col;
    DMUON_UNROLL
    for (int i = 0; i < kDepth / kApart; ++i) {
      machine::copy_async(word + i * kApart * (kTile / 2), source + i * kApart * p_.b_row_stride,
                          i * kApart < rows ? 2 * count : 0);
    }
  }

  template <bool kTransposedB>
  DMUON_DEVICE void multiply(Sums& sums) const {
    DMUON_UNROLL
    for (int i = 0; i < kDown * kAcross; ++i) {
      DMUON_UNROLL
      for (int e = 0; e < 4; ++e) sums[i][e] = 0;
    }
    // Full products have this function twice: what both compute stays out of registers before.
    const int steps = (machine::from_here(p_.inner) + kDepth - 1) / kDepth;
    const int split = machine::from_here(split_);
    const int first = static_cast<int>(static_cast<std::int64_t>(split) * steps / p_.splits);
    const int last = static_cast<int>(static_cast<std::int64_t>(split + 1) * steps / p_.splits);
    const std::uint16_t* const a = p_.a + matrix_ * p_.a_batch_stride;
    const std::uint16_t* const b = p_.b + matrix_ * p_.b_batch_stride;
    const auto fetch = [&](int step) {
      if (step < last) {
        const int to = (step - first) % kStages * 2 * kTileWords;
        copy(to, a, p_.a_row_stride, p_.m, place_.row, step);
        if (kTransposedB) {
          copy_transposed(to + kTileWords, b, step);
        } else if (!one_operand_) {
          copy(to + kTileWords, b, p_.b_row_stride, p_.n, place_.col, step);
        }
      }
      machine::commit_copies();  // a group a step, though it be empty
    };
    for (int stage = 0; stage < kStages - 1; ++stage) fetch(first + stage);
    for (int step = first; step < last; ++step) {
      machine::wait_copies<kStages - 2>();
      machine::barrier();  // all have read the stage that is fetched now
      fetch(step + kStages - 1);
      const int at = (step - first) % kStages * 2 * kTileWords;
      multiply_step<kTransposedB>(sums, at, one_operand_ ? at : at + kTileWords);
    }
    machine::wait_copies<0>();
    machine::barrier();
  }

  // Of b the rows warp_col_ + 16 j .. + 15, and 16 entries of `inner`.
  template <bool kTransposedB>
  DMUON_DEVICE void load_b(std::uint32_t (&b)[kAcross / 2][4], int b_word, int k) const {
    const int lane = machine::thread() % 32;
    const int straight =
        b_word + word_of(warp_col_ + lane % 8 + lane / 16 * 8, k * 2 ^ lane / 8 % 2);
    DMUON_UNROLL
    for (int j = 0; j < kAcross / 2; ++j) {
      if (kTransposedB) {
        const int chunk = warp_col_ / 8 + 2 * j + lane / 16;
        machine::load_matrices_transposed(b[j],
                                          b_word + transposed_word_of(k * 16 + lane % 16, chunk));
      } else {
        machine::load_matrices(b[j], straight + j * 16 * kRowWords);
      }
    }
  }

  template <bool kTransposedB>
  DMUON_DEVICE void multiply_step(Sums& sums, int a_word, int b_word) const {
    const int lane = machine::thread() % 32;
    DMUON_UNROLL
    for (int k = 0; k < kDepth / 16; ++k) {
      std::uint32_t a[kDown][4];
      std::uint32_t b[kAcross / 2][4];
      const int a_at = a_word + word_of(warp_row_ + lane % 16, k * 2 ^ lane / 16);
      DMUON_UNROLL
      for (int i = 0; i < kDown; ++i) machine::load_matrices(a[i], a_at + i * 16 * kRowWords);
      load_b<kTransposedB>(b, b_word, k);
      DMUON_UNROLL
      for (int i = 0; i < kDown; ++i) {
        DMUON_UNROLL
        for (int j = 0; j < kAcross; ++j) {
          const std::uint32_t half[2] = {b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]};
          Format::multiply_add(sums[i * kAcross + j], a[i], half);
        }
      }
    }
  }

  // True in the block that now has the sums of all parts.
  DMUON_DEVICE bool add_parts(Sums& sums) const {
    constexpr std::int64_t kPart = std::int64_t{kTile} * kTile;
    const std::int64_t tile = std::int64_t{matrix_} * p_.num_tiles + index_;
    float* const mine = p_.partial + tile * p_.splits * kPart + machine::thread() * 4;
    DMUON_UNROLL
    for (int i = 0; i < kDown * kAcross; ++i)
      machine::store_f32x4(mine + split_ * kPart + i * kThreads * 4, sums[i]);
    machine::barrier();
    if (machine::thread() == 0) {
      machine::fence();
      const std::uint32_t ticket = machine::atomic_add(p_.tickets + tile, 1);
      machine::fence();
      machine::shared_store(kTicketWord, ticket);
    }
    machine::barrier();
    if (machine::shared_load(kTicketWord) + 1 != static_cast<std::uint32_t>(p_.splits))
      return false;
    if (machine::thread() == 0) machine::store_u32(p_.tickets + tile, 0);
    DMUON_UNROLL
    for (int i = 0; i < kDown * kAcross; ++i) {
      machine::load_f32x4_l2(sums[i], mine + i * kThreads * 4);
      for (int part = 1; part < p_.splits; ++part) {
        float more[4];
        machine::load_f32x4_l2(more, mine + part * kPart + i * kThreads * 4);
        DMUON_UNROLL
        for (int e = 0; e < 4; ++e) sums[i][e] += more[e];
      }
    }
    return true;
  }

  DMUON_DEVICE void finish(const Sums& sums) const {
    // A full product computes the place anew, because its multiplications need the registers.
    const int index = machine::from_here(machine::block_x()) / p_.splits;
    const Place place = Result::kIsSymmetric ? place_ : Result::template place<kTile>(index, p_);
    const bool adds = p_.c != nullptr;
    if (adds) {
      Staged::copy_from(p_.c + matrix_ * p_.c_batch_stride, p_.c_row_stride, p_.m, p_.n, place);
      machine::wait_copies<0>();
      machine::barrier();
    }
    const float alpha =
        p_.scale == nullptr ? p_.alpha : p_.alpha * machine::load_f32(p_.scale + matrix_);
    const int lane = machine::thread() % 32;
    DMUON_UNROLL
    for (int i = 0; i < kDown * kAcross * 2; ++i) {
      const int row = warp_row_ + i / 2 / kAcross * 16 + i % 2 * 8 + lane / 4;
      const int col = warp_col_ + i / 2 % kAcross * 8 + lane % 4 * 2;
      const int word = Staged::word_of(row, col);
      const std::uint32_t c = adds ? machine::shared_load(word) : 0;
      std::uint32_t pair = 0;
      DMUON_UNROLL
      for (int e = 0; e < 2; ++e) {
        float value = alpha * sums[i / 2][i % 2 * 2 + e];
        if (adds) value += p_.beta * Format::wide(static_cast<std::uint16_t>(c >> 16 * e));
        if (Result::kIsSymmetric && place.row == place.col && row == col + e) value += p_.diagonal;
        pair |= std::uint32_t{Format::narrow(value)} << 16 * e;
      }
      machine::shared_store(word, pair);
    }
    machine::barrier();
    Result::template write<Staged, Format>(p_, matrix_, place);
  }

  const ProductParameters& p_;
  int index_;   // the tile's in the triangle
  int split_;   // the part of its sums
  int matrix_;  // of the batch
  Place place_;
  bool one_operand_;  // the tiles of a and b are the same
  int warp_row_;      // of the warp's sums in the tile
  int warp_col_;
};

}  // namespace dmuon::kernels::cuda::device
