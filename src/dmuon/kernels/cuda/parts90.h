#pragma once

#include "dmuon/kernels/cuda/machine.h"
#include "dmuon/kernels/cuda/parameters.h"
#include "dmuon/kernels/cuda/shares.h"

namespace dmuon::kernels::cuda::device {

/// The parts of a tile's sums, by Product90. Each block stores its part in `partial`. For each half
/// of the tile the last block to end adds all parts in their order, so bits do not depend on who is
/// last.
template <int kThreads, int kTicketWord>
struct Parts90 {
  using Sums = float[128];  // as multiply_64x256 has them
  static constexpr std::int64_t kPart = std::int64_t{128} * kThreads;  // a block's sums

  static DMUON_DEVICE void meet() { machine::named_barrier(1, kThreads); }

  /// True in the block that now has the sums of all parts. Threads that multiply call it.
  static DMUON_DEVICE bool add(Sums& sums, const Product90Parameters& p, const Share& share,
                               int rank) {
    const SharesOf& of = p.shares;
    const std::int64_t cut = std::int64_t{share.matrix} * (of.num_tiles - of.num_whole) +
                             machine::from_here(share.tile) - of.num_whole;
    float* const parts =
        p.product.partial + (cut * p.most_parts * 2 + rank) * kPart + machine::thread() * 4;
    std::uint32_t* const ticket = p.product.tickets + 2 * cut + rank;
    const auto last = static_cast<std::uint32_t>(share.num_parts - 1);
    // One of the first two parts, if all others have ended, stays in registers.
    if (share.part >= 2 || add_ended(ticket, 0) != last) {
      DMUON_UNROLL
      for (int i = 0; i < 32; ++i) {
        const float four[4] = {sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]};
        machine::store_f32x4(parts + share.part * 2 * kPart + i * kThreads * 4, four);
      }
      if (add_ended(ticket, 1) != last) return false;
    }
    if (machine::thread() == 0) machine::store_u32(ticket, 0);
    add_in_order(sums, parts, share.part, share.num_parts);
    return true;
  }

 private:
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
        machine::load_f32x4_l2(more, parts + part * 2 * kPart + i * kThreads * 4);
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
};

}  // namespace dmuon::kernels::cuda::device
