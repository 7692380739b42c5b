#pragma once

#include "dmuon/kernels/cuda/formats.h"
#include "dmuon/kernels/cuda/machine.h"
#include "dmuon/kernels/cuda/parameters.h"
#include "dmuon/kernels/cuda/shares.h"
#include "dmuon/kernels/cuda/staged_tile.h"
#include "dmuon/kernels/cuda/triangle.h"

namespace dmuon::kernels::cuda::device {

/// The symmetric product by what compute capability 9.0 alone has: TMA, clusters and wgmma.
///
/// A cluster of two blocks computes a tile of 256 x 256 entries of the lower triangle, 128 rows a
/// block, and then its next share (shares.h). A block has three warpgroups. The last one fetches
/// each step: the block's rows of a, and half of the tile's rows of b, which it sends to both
/// blocks. The other two multiply 64 rows each, while the next kStages steps arrive.
///
/// With kTransposed a and b lie transposed in memory: an operand's rows there are along m.
///
/// If a tile has several parts, each block stores its sums in `partial`. For each half of the tile
/// the last block to end adds all parts in their order, so bits do not depend on who is last. Then
/// the block scales the sums, adds c and the diagonal, rounds, and StagedTile writes one half of
/// 128 columns after the other.
template <typename Format, bool kTransposed>
class Symmetric90 {
 public:
  static DMUON_DEVICE void run(const Symmetric90Parameters& p) { Symmetric90(p).block(); }

 private:
  static constexpr int kTile = kSymmetric90Tile;
  static constexpr int kDepth = kSymmetric90Depth;
  static constexpr int kStages = kSymmetric90Stages;
  static constexpr int kMultipliers = 256;  // threads
  static constexpr int kOperand = kSymmetric90OperandWords;
  static constexpr int kStage = 3 * kOperand;  // a, and both halves of b
  static constexpr int kFirstStage = kSymmetric90StagedWords;
  static constexpr int kFull = kFirstStage + kStages * kStage;  // mbarriers
  static constexpr int kEmpty = kFull + 2 * kStages;
  static constexpr int kTicketWord = kEmpty + 2 * kStages;
  static_assert(kTicketWord < kSymmetric90SharedWords);
  using Staged = StagedTile<kTile, kMultipliers>;
  static_assert(Staged::kWords == kSymmetric90StagedWords);

  using Sums = float[128];  // as multiply_64x256 has them
  static constexpr std::int64_t kPart = std::int64_t{128} * kMultipliers;  // a block's sums

  DMUON_DEVICE explicit Symmetric90(const Symmetric90Parameters& all)
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
    if (machine::thread() >= kMultipliers) {
      machine::give_registers<40>();
      if (machine::thread() == kMultipliers) fetch();
    } else {
      machine::take_registers<232>();
      multiply();
    }
  }

  // The tile's rows are its columns, and a is b: then a block's a is half of b.
  DMUON_DEVICE bool one_operand(Place place) const {
    return p_.one_operand && place.row == place.col;
  }

  DMUON_DEVICE void fetch() {
    int fetched = 0;  // steps
    while (shares_.next()) {
      const Share share = shares_.share();
      const Place place = place_in_triangle(share.tile);
      const bool one = one_operand(place);
      for (int step = share.first; step < share.last; ++step, ++fetched) {
        const int stage = fetched % kStages;
        const int at = kFirstStage + stage * kStage;
        const int full = kFull + 2 * stage;
        wait_for_stage(fetched);
        machine::mbarrier_expect(full, 4 * (one ? 2 : 3) * kOperand);
        const int of_b = at + (1 + rank_) * kOperand;
        if (!one) fetch_operand<false>(at, all_.a, full, step, 2 * place.row + rank_, share.matrix);
        fetch_operand<true>(of_b, all_.b, full, step, 2 * place.col + rank_, share.matrix);
      }
    }
    // A block must not end before the other one has released all of its stages.
    for (const int end = fetched + kStages; fetched < end; ++fetched) wait_for_stage(fetched);
  }

  // Until both blocks have released the step that was fetched to this one's stage before.
  static DMUON_DEVICE void wait_for_stage(int step) {
    machine::mbarrier_wait(kEmpty + 2 * (step % kStages), (step / kStages & 1) ^ 1);
  }

  // A step of kTile rows: in one box, or transposed in two.
  template <bool kToBoth>
  static DMUON_DEVICE void fetch_operand(int to, const TensorMap& map, int full, int step, int tile,
                                         int matrix) {
    DMUON_UNROLL
    for (int box = 0; box < (kTransposed ? 2 : 1); ++box) {
      const int at = to + box * (kOperand / 2);
      const int row = tile * kTile + box * kDepth;
      const int x = kTransposed ? row : step * kDepth;
      const int y = kTransposed ? step * kDepth : row;
      if (kToBoth) {
        machine::copy_tile_to_both(at, map, full, x, y, matrix);
      } else {
        machine::copy_tile(at, map, full, x, y, matrix);
      }
    }
  }

  DMUON_DEVICE void multiply() {
    int taken = 0;  // steps
    while (shares_.next()) {
      Sums sums;
      taken = multiply_share(sums, taken);
      if (shares_.share().num_parts > 1 && !add_parts(sums)) continue;
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
    const bool one = one_operand(place_in_triangle(shares_.share().tile));
    const int a_word = (one ? 1 + rank_ : 0) * kOperand + machine::thread() / 128 * (kOperand / 2);
    bool adds = false;  // the first product clears the sums
    DMUON_NO_UNROLL
    for (; taken < end; ++taken) {
      const int stage = kFirstStage + taken % kStages * kStage;
      machine::mbarrier_wait(kFull + 2 * (taken % kStages), taken / kStages & 1);
      machine::wgmma_fence();
      const std::uint64_t a = machine::matrix_descriptor<kTransposed>(stage + a_word);
      const std::uint64_t b = machine::matrix_descriptor<kTransposed>(stage + kOperand);
      constexpr int kNext = kTransposed ? 128 : 2;  // 16 entries further along `inner`
      DMUON_UNROLL
      for (int k = 0; k < kDepth / 16; ++k) {
        Format::template multiply_64x256<kTransposed>(sums, a + kNext * k, b + kNext * k,
                                                      adds || k > 0);
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

  static DMUON_DEVICE void meet() { machine::named_barrier(1, kMultipliers); }

  // Sums of this part become those of all parts. The first two parts may change places without a
  // change of bits, so of these the cluster's own sums are used as they are.
  static DMUON_DEVICE void add_in_order(Sums& sums, const float* parts, int mine, int num_parts) {
    const bool keeps = mine < 2;
    DMUON_UNROLL
    for (int i = 0; i < 128; ++i) sums[i] = (keeps ? sums[i] : 0.F) + 0.F;
    DMUON_NO_UNROLL
    for (int part = 0; part < num_parts; ++part) {
      if (keeps && part == mine) continue;
      DMUON_UNROLL
      for (int i = 0; i < 32; ++i) {
        float more[4];
        machine::load_f32x4_l2(more, parts + part * 2 * kPart + i * kMultipliers * 4);
        DMUON_UNROLL
        for (int e = 0; e < 4; ++e) sums[4 * i + e] += more[e];
      }
    }
  }

  // Adds to the parts of the tile that have ended, once all threads are here, and returns how many
  // there were. Stores of this block come before; those of the parts that have ended are visible.
  static DMUON_DEVICE std::uint32_t add_ended(std::uint32_t* ticket, std::uint32_t more) {
    meet();
    if (machine::thread() == 0)
      machine::shared_store(kTicketWord, machine::atomic_add_fenced(ticket, more));
    meet();
    return machine::shared_load(kTicketWord);
  }

  // True in the block that now has the sums of all parts.
  DMUON_DEVICE bool add_parts(Sums& sums) const {
    const Share share = shares_.share();
    const SharesOf& of = all_.shares;
    const std::int64_t cut = std::int64_t{share.matrix} * (of.num_tiles - of.num_whole) +
                             machine::from_here(share.tile) - of.num_whole;
    float* const parts =
        p_.partial + (cut * all_.most_parts * 2 + rank_) * kPart + machine::thread() * 4;
    std::uint32_t* const ticket = p_.tickets + 2 * cut + rank_;
    const auto last = static_cast<std::uint32_t>(share.num_parts - 1);
    // One of the first two parts, if all others have ended, stays in registers.
    if (share.part >= 2 || add_ended(ticket, 0) != last) {
      DMUON_UNROLL
      for (int i = 0; i < 32; ++i) {
        const float four[4] = {sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]};
        machine::store_f32x4(parts + share.part * 2 * kPart + i * kMultipliers * 4, four);
      }
      if (add_ended(ticket, 1) != last) return false;
    }
    if (machine::thread() == 0) machine::store_u32(ticket, 0);
    add_in_order(sums, parts, share.part, share.num_parts);
    return true;
  }

  DMUON_DEVICE void finish(const Sums& sums) const {
    const Share share = shares_.share();
    const Place cluster = place_in_triangle(share.tile);
    const float alpha =
        p_.scale == nullptr ? p_.alpha : p_.alpha * machine::load_f32(p_.scale + share.matrix);
    DMUON_UNROLL
    for (int half = 0; half < 2; ++half) {
      const Place place{2 * cluster.row + rank_, 2 * cluster.col + half};
      if (place.col > place.row || place.row * kTile >= p_.m) continue;
      meet();  // what was staged before has been written
      const bool is_whole = (place.row + 1) * kTile <= p_.m;
      if (p_.c == nullptr && p_.diagonal == 0) {
        stage_half<kSumsAlone>(sums, half, place, share.matrix, alpha);
      } else if (p_.c != nullptr && p_.diagonal == 0 && is_whole) {
        stage_half<kWithC>(sums, half, place, share.matrix, alpha);
      } else {
        if (p_.c != nullptr) {
          Staged::copy_from(p_.c + share.matrix * p_.c_batch_stride, p_.c_row_stride, p_.m, place);
          machine::wait_copies<0>();
          meet();
        }
        stage_half<kAnything>(sums, half, place, share.matrix, alpha);
      }
      meet();
      Staged::write(p_.out + share.matrix * p_.out_batch_stride, p_.out_row_stride, p_.m, place);
    }
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
        if (place.row == place.col && row == col) pair[0] += p_.diagonal;
        if (place.row == place.col && row == col + 1) pair[1] += p_.diagonal;
      }
      machine::shared_store(word, Format::narrow_pair(pair[0], pair[1]));
    }
  }

  DMUON_DEVICE void add_c(float (&pair)[2], std::uint32_t c) const {
    pair[0] += p_.beta * Format::wide(static_cast<std::uint16_t>(c));
    pair[1] += p_.beta * Format::wide(static_cast<std::uint16_t>(c >> 16));
  }

  const Symmetric90Parameters& all_;
  const SymmetricParameters& p_;
  int rank_;  // of the block in its cluster
  Shares shares_;
};

}  // namespace dmuon::kernels::cuda::device
