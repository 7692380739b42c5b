#pragma once

#include "dmuon/kernels/cuda/formats.h"
#include "dmuon/kernels/cuda/machine.h"
#include "dmuon/kernels/cuda/parameters.h"

namespace dmuon::kernels::cuda::device {

/// Moves the momentum, and writes the direction in 16 bits, scaled by a power of two, with its
/// norm: 14 bytes an entry in one pass, although the scale depends on all entries. (elementwise.h
/// has the formulas.)
///
/// The first kernel guesses that the scale is the last step's, and computes what it should have
/// been. Where the guess was wrong, the second one, `run_again`, writes x anew from g and m;
/// elsewhere its blocks end at once. So x depends on the operands alone, never on the guess. The
/// last block of a matrix that ends adds the sums of all its blocks, in their order.
template <typename Format>
class Direction {
 public:
  static DMUON_DEVICE void run(const DirectionParameters& p) { Direction(p, false).block(); }
  static DMUON_DEVICE void run_again(const DirectionParameters& p) {
    Direction again(p, true);
    if (machine::load_f32(again.memo_ + kMemoGuess) != machine::load_f32(again.memo_ + kMemoScale))
      again.block();
  }

 private:
  static constexpr int kWarps = kDirectionThreads / 32;

  // Of one thread, of a block, of a matrix.
  struct Sums {
    float squares = 0;          // of the entries of x, before they are rounded
    std::uint32_t largest = 0;  // the bits of the largest |d|; a NaN counts as larger than all
  };

  DMUON_DEVICE Direction(const DirectionParameters& p, bool again)
      : p_(p),
        again_(again),
        matrix_(machine::block_y()),
        memo_(p.memo + static_cast<std::int64_t>(matrix_) * kMemoWords),
        applies_(machine::load_u8(p.applies) != 0),
        factor_(p.gradient_factor == nullptr ? 1.F : machine::load_f32(p.gradient_factor)) {
    const float guess = machine::load_f32(memo_ + (again ? kMemoScale : kMemoGuess));
    scale_ = guess == 0 ? 1.F : guess;
  }

  DMUON_DEVICE void block() {
    Sums sums;
    const int fours_a_row = p_.x_cols / 4;
    const int first = machine::block_x() * kDirectionThreads * kDirectionFours + machine::thread();
    for (int i = 0; i < kDirectionFours; ++i) {
      const int four = first + i * kDirectionThreads;
      if (four < p_.x_rows * fours_a_row) add(sums, four / fours_a_row, four % fours_a_row * 4);
    }
    sums = of_block(sums);
    if (is_last_block(sums)) finish();
  }

  // Four entries of a row of x; those outside of the matrix are zeros.
  DMUON_DEVICE void add(Sums& sums, int row, int col) const {
    float g[4] = {};
    float m[4] = {};
    const int count = row < p_.rows ? (p_.cols - col < 4 ? p_.cols - col : 4) : 0;
    const std::int64_t at = offset(row, col);
    const bool whole = count == 4 && p_.in_fours;
    if (whole) {
      machine::load_f32x4(g, p_.gradient + at);
      machine::load_f32x4(m, p_.momentum + at);
    }
    for (int i = 0; !whole && i < count; ++i) {
      g[i] = machine::load_f32(p_.gradient + at + i);
      m[i] = machine::load_f32(p_.momentum + at + i);
    }
    std::uint16_t x[4] = {};
    for (int i = 0; i < count; ++i) {
      const float d = moved(g[i], m[i]);
      const std::uint32_t size = machine::bits_of(d) & 0x7fffffffU;
      const float scaled = scale_ * d;
      if (size > sums.largest) sums.largest = size;
      sums.squares += scaled * scaled;
      x[i] = Format::narrow(scaled);
    }
    machine::store_u16x4(
        p_.x + (static_cast<std::int64_t>(matrix_) * p_.x_rows + row) * p_.x_cols + col, x);
    if (again_ || !applies_) return;
    if (whole) machine::store_f32x4(p_.momentum + at, m);
    for (int i = 0; !whole && i < count; ++i) machine::store_f32(p_.momentum + at + i, m[i]);
  }

  // Moves m, unless this is the second kernel, and returns the direction. From the nearer end and
  // with one rounding at it: m has the bits of torch.lerp.
  DMUON_DEVICE float moved(float gradient, float& m) const {
    const float to = applies_ ? factor_ * gradient : m;
    const bool near = p_.rest < 0.5F;
    if (!again_) {
      m = near ? machine::multiply_add(p_.rest, to - m, m)
               : machine::multiply_add(-p_.kept, to - m, to);
    }
    if (!p_.nesterov) return m;
    const float back = m - to;
    return near ? machine::multiply_add(-p_.rest, back, m)
                : machine::multiply_add(p_.kept, back, to);
  }

  DMUON_DEVICE std::int64_t offset(int row, int col) const {
    return matrix_ / p_.inner_batch * p_.batch_stride + matrix_ % p_.inner_batch * p_.inner_stride +
           row * p_.row_stride + col;
  }

  // Valid in thread 0. In one order. Between two calls there must be a barrier.
  static DMUON_DEVICE Sums of_block(Sums sums) {
    const auto add = [&sums](float squares, std::uint32_t largest) {
      sums.squares += squares;
      if (largest > sums.largest) sums.largest = largest;
    };
    for (int distance = 16; distance > 0; distance /= 2) {
      const std::uint32_t squares = machine::shuffle_xor(machine::bits_of(sums.squares), distance);
      const std::uint32_t largest = machine::shuffle_xor(sums.largest, distance);
      add(machine::float_of(squares), largest);
    }
    const int warp = machine::thread() / 32;
    if (machine::thread() % 32 == 0) {
      machine::shared_store(2 * warp, machine::bits_of(sums.squares));
      machine::shared_store(2 * warp + 1, sums.largest);
    }
    machine::barrier();
    if (machine::thread() != 0) return sums;
    sums = {};
    for (int w = 0; w < kWarps; ++w)
      add(machine::float_of(machine::shared_load(2 * w)), machine::shared_load(2 * w + 1));
    return sums;
  }

  // Leaves the block's sums for the last one.
  DMUON_DEVICE bool is_last_block(const Sums& sums) const {
    if (machine::thread() == 0) {
      float* mine = partial(machine::block_x());
      machine::store_f32(mine, sums.squares);
      machine::store_f32(mine + 1, machine::float_of(sums.largest));
      machine::fence();
      const std::uint32_t ticket = machine::atomic_add(ticket_word(), 1);
      machine::fence();
      machine::shared_store(2 * kWarps, ticket);
    }
    machine::barrier();
    return machine::shared_load(2 * kWarps) + 1 == static_cast<std::uint32_t>(p_.num_blocks);
  }

  DMUON_DEVICE void finish() const {
    Sums sums;
    for (int block = machine::thread(); block < p_.num_blocks; block += kDirectionThreads) {
      sums.squares += machine::load_f32_l2(partial(block));
      const std::uint32_t largest = machine::bits_of(machine::load_f32_l2(partial(block) + 1));
      if (largest > sums.largest) sums.largest = largest;
    }
    sums = of_block(sums);
    if (machine::thread() != 0) return;
    const float norm = machine::square_root(sums.squares);
    const float least = scale_ * p_.eps;
    const float inverse = norm == 0 ? 1.F : 1 / (norm < least ? least : norm);
    machine::store_f32(memo_ + kMemoInverse, inverse);
    machine::store_f32(memo_ + (again_ ? kMemoGuess : kMemoScale), scale_for(sums.largest));
    machine::store_u32(ticket_word(), 0);
  }

  static DMUON_DEVICE float scale_for(std::uint32_t largest) {
    if (largest == 0) return 1;
    const int exponent = 14 - (static_cast<int>(largest >> 23) - 127);
    const int held = exponent > 127 ? 127 : exponent;  // never below -114
    return machine::float_of(static_cast<std::uint32_t>(held + 127) << 23);
  }

  DMUON_DEVICE float* partial(int block) const {
    return p_.partial + (static_cast<std::int64_t>(matrix_) * p_.num_blocks + block) * 2;
  }
  DMUON_DEVICE std::uint32_t* ticket_word() const {
    return reinterpret_cast<std::uint32_t*>(memo_ + kMemoTicket);
  }

  const DirectionParameters& p_;
  bool again_;
  int matrix_;
  float* memo_;
  bool applies_;
  float factor_;
  float scale_;
};

}  // namespace dmuon::kernels::cuda::device
