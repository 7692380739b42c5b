#pragma once

#include "dmuon/kernels/cuda/formats.h"
#include "dmuon/kernels/cuda/machine.h"
#include "dmuon/kernels/cuda/parameters.h"
#include "dmuon/kernels/cuda/parts90.h"
#include "dmuon/kernels/cuda/results.h"
#include "dmuon/kernels/cuda/shares.h"
#include "dmuon/kernels/cuda/staged_tile.h"

namespace dmuon::kernels::cuda::device {

/// A product by what compute capability 9.0 alone has: TMA, clusters and wgmma. Result says which
/// tiles are computed, and what becomes of them (results.h).
///
/// A cluster of two blocks computes a tile of 256 x 256 entries, 128 rows a block, and then its
/// next share (shares.h). A block has three warpgroups. The last one fetches each step: the block's
/// rows of a, and half of the tile's rows of b, which it sends to both blocks. The other two
/// multiply 64 rows each, while the next kStages steps arrive.
///
/// With kTransposedA or kTransposedB the operand lies transposed in memory: its rows there are
/// along m or n.
///
/// If a tile has several parts, the last block to end adds them (parts90.h). Then the block scales
/// the sums, adds c and the diagonal, rounds, and Result writes one half of 128 columns after the
/// other.
template <typename Format, bool kTransposedA, bool kTransposedB, typename Result>
class Product90 {
 public:
  static DMUON_DEVICE void run(const Product90Parameters& p) { Product90(p).block(); }

 private:
  static constexpr int kTile = kProduct90Tile;
  static constexpr int kDepth = kProduct90Depth;
  static constexpr int kStages = kProduct90Stages;
  static constexpr int kMultipliers = 256;  // threads
  static constexpr int kOperand = kProduct90OperandWords;
  static constexpr int kStage = 3 * kOperand;  // a, and both halves of b
  static constexpr int kFirstStage = kProduct90StagedWords;
  static constexpr int kFull = kFirstStage + kStages * kStage;  // mbarriers
  static constexpr int kEmpty = kFull + 2 * kStages;
  static constexpr int kTicketWord = kEmpty + 2 * kStages;
  static_assert(kTicketWord < kProduct90SharedWords);
  using Staged = StagedTile<kTile, kMultipliers>;
  static_assert(Staged::kWords == kProduct90StagedWords);

  using Parts = Parts90<kMultipliers, kTicketWord>;
  using Sums = typename Parts::Sums;

  DMUON_DEVICE explicit Product90(const Product90Parameters& all)
      : all_(all),
        p_(all.product),
        rank_(machine::cluster_rank()),
        shares_(all.shares, machine::block_x() / 2, machine::num_blocks_x() / 2) {}

  DMUON_DEVICE void block() {
    if (machine::thread() == 0) {
      for (int stage = 0; stage < kStages; ++stage) {
        machine::mbarrier_init(kFull + 2 * stage, 1);
        machine::mbarrier_init(kEmpty + 2 * stage, 4);  // two warpgroups of two blocks
      }
      machine::mbarrier_init_fence();
    }
    machine::let_next_kernel_begin();
    if (machine::thread() == kMultipliers) {
      machine::prefetch_map(all_.a);
      machine::prefetch_map(all_.b);
    }
    machine::cluster_barrier();
    machine::wait_for_kernel_before();
    if (!Result::applies(p_)) return;
    if (machine::thread() >= kMultipliers) {
      machine::give_registers<40>();
      if (machine::thread() == kMultipliers) fetch();
    } else {
      machine::take_registers<232>();
      multiply();
    }
  }

  DMUON_DEVICE Place place_of(int tile) const {
    return Result::template place<2 * kTile>(tile, p_);
  }

  // The tile's rows are its columns, and a is b: then a block's a is half of b.
  DMUON_DEVICE bool one_operand(int tile) const {
    if (!Result::kIsSymmetric || !p_.one_operand) return false;
    const Place place = place_of(tile);
    return place.row == place.col;
  }

  DMUON_DEVICE void fetch() {
    int fetched = 0;  // steps
    while (shares_.next()) {
      const Share share = shares_.share();
      const Place place = place_of(share.tile);
      const bool one = one_operand(share.tile);
      for (int step = share.first; step < share.last; ++step, ++fetched) {
        const int stage = fetched % kStages;
        const int at = kFirstStage + stage * kStage;
        const int full = kFull + 2 * stage;
        wait_for_stage(fetched);
        machine::mbarrier_expect(full, 4 * (one ? 2 : 3) * kOperand);
        const int of_b = at + (1 + rank_) * kOperand;
        if (!one) fetch_a(at, full, step, 2 * place.row + rank_, share.matrix);
        fetch_b(of_b, full, step, 2 * place.col + rank_, share.matrix);
      }
    }
    // A block must not end before the other one has released all of its stages.
    for (const int end = fetched + kStages; fetched < end; ++fetched) wait_for_stage(fetched);
  }

  // Until both blocks have released the step that was fetched to this one's stage before.
  static DMUON_DEVICE void wait_for_stage(int step) {
    machine::mbarrier_wait(kEmpty + 2 * (step % kStages), (step / kStages & 1) ^ 1);
  }

  // A step of kTile rows of an operand: in one box, or transposed in two.
  DMUON_DEVICE void fetch_a(int to, int full, int step, int tile, int matrix) const {
    DMUON_UNROLL
    for (int box = 0; box < (kTransposedA ? 2 : 1); ++box) {
      const Corner at = corner_of<kTransposedA>(step, tile, box);
      machine::copy_tile(to + box * (kOperand / 2), all_.a, full, at.x, at.y, matrix);
    }
  }
  DMUON_DEVICE void fetch_b(int to, int full, int step, int tile, int matrix) const {
    DMUON_UNROLL
    for (int box = 0; box < (kTransposedB ? 2 : 1); ++box) {
      const Corner at = corner_of<kTransposedB>(step, tile, box);
      machine::copy_tile_to_both(to + box * (kOperand / 2), all_.b, full, at.x, at.y, matrix);
    }
  }

  struct Corner {
    int x;
    int y;
  };
  template <bool kTransposed>
  static DMUON_DEVICE Corner corner_of(int step, int tile, int box) {
    const int row = tile * kTile + box * kDepth;
    if (kTransposed) return {row, step * kDepth};
    return {step * kDepth, row};
  }

  DMUON_DEVICE void multiply() {
    int taken = 0;  // steps
    while (shares_.next()) {
      Sums sums;
      taken = multiply_share(sums, taken);
      if (shares_.share().num_parts > 1 && !Parts::add(sums, all_, shares_.share(), rank_))
        continue;
      finish(sums);
    }
  }

  // The step's stage may be fetched anew, by both blocks.
  static DMUON_DEVICE void release(int step) {
    if (machine::thread() % 128 != 0) return;
    for (int rank = 0; rank < 2; ++rank)
      machine::mbarrier_arrive(kEmpty + 2 * (step % kStages), rank);
  }

  DMUON_DEVICE int multiply_share(Sums& sums, int taken) const {
    const int end = taken + shares_.num_steps();
    const bool one = one_operand(shares_.share().tile);
    const int a_word = (one ? 1 + rank_ : 0) * kOperand + machine::thread() / 128 * (kOperand / 2);
    bool adds = false;  // the first product clears the sums
    DMUON_NO_UNROLL
    for (; taken < end; ++taken) {
      const int stage = kFirstStage + taken % kStages * kStage;
      machine::mbarrier_wait(kFull + 2 * (taken % kStages), taken / kStages & 1);
      machine::wgmma_fence();
      const std::uint64_t a = machine::matrix_descriptor<kTransposedA>(stage + a_word);
      const std::uint64_t b = machine::matrix_descriptor<kTransposedB>(stage + kOperand);
      // 16 entries further along `inner`
      constexpr int kNextA = kTransposedA ? 128 : 2;
      constexpr int kNextB = kTransposedB ? 128 : 2;
      DMUON_UNROLL
      for (int k = 0; k < kDepth / 16; ++k) {
        Format::template multiply_64x256<kTransposedA, kTransposedB>(sums, a + kNextA * k,
                                                                     b + kNextB * k, adds || k > 0);
      }
      machine::wgmma_commit();
      machine::wgmma_wait<1>();
      if (adds) release(taken - 1);
      adds = true;
    }
    machine::wgmma_wait<0>();
    release(taken - 1);
    return taken;
  }

  DMUON_DEVICE void finish(const Sums& sums) const {
    const Share share = shares_.share();
    const Place cluster = place_of(share.tile);
    const float alpha =
        p_.scale == nullptr ? p_.alpha : p_.alpha * machine::load_f32(p_.scale + share.matrix);
    DMUON_UNROLL
    for (int half = 0; half < 2; ++half) {
      const Place place{2 * cluster.row + rank_, 2 * cluster.col + half};
      if (is_left_out(place)) continue;
      Parts::meet();  // what was staged before has been written
      const bool has_diagonal = Result::kIsSymmetric && p_.diagonal != 0;
      if (p_.c == nullptr && !has_diagonal) {
        stage_half<kSumsAlone>(sums, half, place, share.matrix, alpha);
      } else if (p_.c != nullptr && !has_diagonal && is_whole(place)) {
        stage_half<kWithC>(sums, half, place, share.matrix, alpha);
      } else {
        if (p_.c != nullptr) {
          Staged::copy_from(p_.c + share.matrix * p_.c_batch_stride, p_.c_row_stride, p_.m, p_.n,
                            place);
          machine::wait_copies<0>();
          Parts::meet();
        }
        stage_half<kAnything>(sums, half, place, share.matrix, alpha);
      }
      Parts::meet();
      Result::template write<Staged, Format>(p_, share.matrix, place);
    }
  }

  // Places of 128 x 128 entries.
  DMUON_DEVICE bool is_left_out(Place place) const {
    const bool above = Result::kIsSymmetric ? place.col > place.row : place.col * kTile >= p_.n;
    return above || place.row * kTile >= p_.m;
  }
  DMUON_DEVICE bool is_whole(Place place) const {
    const bool has_cols = Result::kIsSymmetric || (place.col + 1) * kTile <= p_.n;
    return has_cols && (place.row + 1) * kTile <= p_.m;
  }

  // The code adds to the sums: nothing; c, if all entries of the tile lie in it; or the staged c,
  // if there is one, and the diagonal.
  enum Added { kSumsAlone, kWithC, kAnything };

  // Scales the sums of 128 columns, adds and rounds.
  template <Added kAdded>
  DMUON_DEVICE void stage_half(const Sums& sums, int half, Place place, int matrix,
                               float alpha) const {
    const int thread = machine::from_here(machine::thread());
    const int lane = thread % 32;
    const int first_row = thread / 32 * 16 + lane / 4;
    const int first_col = lane % 4 * 2;
    const std::uint16_t* const c = p_.c + matrix * p_.c_batch_stride +
                                   (place.row * kTile + first_row) * p_.c_row_stride +
                                   place.col * kTile + first_col;
    DMUON_UNROLL
    for (int i = 0; i < 32; ++i) {
      const int row = first_row + i % 2 * 8;
      const int col = first_col + i / 2 * 8;
      const int word = Staged::word_of(row, col);
      float pair[2] = {alpha * sums[half * 64 + i * 2], alpha * sums[half * 64 + i * 2 + 1]};
      if (kAdded == kWithC) {
        add_c(pair, machine::load_u16x2(c + i % 2 * 8 * p_.c_row_stride + i / 2 * 8));
      } else if (kAdded == kAnything) {
        if (p_.c != nullptr) add_c(pair, machine::shared_load(word));
        const bool may_cross = Result::kIsSymmetric && place.row == place.col;
        if (may_cross && row == col) pair[0] += p_.diagonal;
        if (may_cross && row == col + 1) pair[1] += p_.diagonal;
      }
      machine::shared_store(word, Format::narrow_pair(pair[0], pair[1]));
    }
  }

  DMUON_DEVICE void add_c(float (&pair)[2], std::uint32_t c) const {
    pair[0] += p_.beta * Format::wide(static_cast<std::uint16_t>(c));
    pair[1] += p_.beta * Format::wide(static_cast<std::uint16_t>(c >> 16));
  }

  const Product90Parameters& all_;
  const ProductParameters& p_;
  int rank_;  // of the block in its cluster
  Shares shares_;
};

}  // namespace dmuon::kernels::cuda::device
