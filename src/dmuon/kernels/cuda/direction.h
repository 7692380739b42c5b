#pragma once

#include "dmuon/kernels/cuda/formats.h"
#include "dmuon/kernels/cuda/machine.h"
#include "dmuon/kernels/cuda/parameters.h"
#include "dmuon/kernels/cuda/quotient.h"

namespace dmuon::kernels::cuda::device {

/// Moves the momentum, and writes the direction in 16 bits, scaled by a power of two, with its
/// norm: 14 bytes an entry in one pass, although the scale depends on all entries. (elementwise.h
/// has the formulas.)
///
/// The first kernel guesses that the scale is the last step's, and computes what it should have
/// been. Where the guess was wrong, the second one, `run_again`, writes x anew from g and m;
/// elsewhere its few blocks end at once. So x depends on the operands alone, never on the guess.
/// The last block of a matrix that ends adds the sums of all parts, in their order.
template <typename Format>
class Direction {
 public:
  static DMUON_DEVICE void run(const DirectionParameters& p) {
    Direction direction(p, false);
    direction.add_part(machine::block_x());
    if (direction.is_last_block(p.num_parts)) direction.finish();
  }
  static DMUON_DEVICE void run_again(const DirectionParameters& p) {
    Direction again(p, true);
    if (machine::load_f32(again.memo_ + kMemoGuess) == machine::load_f32(again.memo_ + kMemoScale))
      return;
    for (int part = machine::block_x(); part < p.num_parts; part += p.blocks_again) {
      again.add_part(part);
      machine::barrier();
    }
    if (again.is_last_block(p.blocks_again)) again.finish();
  }

 private:
  static constexpr int kWarps = kDirectionThreads / 32;

  // Of one thread, of a part, of a matrix.
  struct Sums {
    float squares = 0;          // of the entries of x, before they are rounded
    std::uint32_t largest = 0;  // the bits of the largest |d|; a NaN counts as larger than all
  };

  // Four entries of a row of x; those outside of the matrix are zeros.
  struct Four {
    int count;        // entries of the matrix; at most 0: none
    std::int64_t at;  // in gradient and momentum
    float g[4];
    float m[4];
  };

  DMUON_DEVICE Direction(const DirectionParameters& p, bool again)
      : p_(p),
        again_(again),
        matrix_(machine::block_y()),
        num_fours_(p.x_rows * (p.x_cols / 4)),
        memo_(p.memo + static_cast<std::int64_t>(matrix_) * kMemoWords),
        first_(matrix_ / p.inner_batch * p.batch_stride + matrix_ % p.inner_batch * p.inner_stride),
        x_(p.x + static_cast<std::int64_t>(matrix_) * p.x_rows * p.x_cols),
        applies_(machine::load_u8(p.applies) != 0),
        rest_(machine::load_f32(p.rest)),
        factor_(p.gradient_factor == nullptr ? 1.F : machine::load_f32(p.gradient_factor)) {
    const float guess = machine::load_f32(memo_ + (again ? kMemoScale : kMemoGuess));
    scale_ = guess == 0 ? 1.F : guess;
  }

  // Leaves the part's sums for the last block.
  DMUON_DEVICE void add_part(int part) const {
    Sums sums;
    const int first = part * kDirectionThreads * kDirectionFours + machine::thread();
    if (p_.in_fours) {
      add<true>(sums, first);
    } else {
      add<false>(sums, first);
    }
    sums = of_block(sums);
    if (machine::thread() != 0) return;
    machine::store_f32(partial(part), sums.squares);
    machine::store_f32(partial(part) + 1, machine::float_of(sums.largest));
  }

  // Loops over arrays are unrolled: by an index that is not constant, an array would lie in memory.
  template <bool kInFours>
  DMUON_DEVICE void add(Sums& sums, int first) const {
    constexpr int kInFlight = kInFours ? 4 : 2;  // fours that are loaded before one is used
    const int end = first + kDirectionFours * kDirectionThreads;
    DMUON_UNROLL_BY(1)
    for (; first < end; first += kInFlight * kDirectionThreads) {
      Four fours[kInFlight];
      DMUON_UNROLL
      for (int i = 0; i < kInFlight; ++i) load<kInFours>(fours[i], first + i * kDirectionThreads);
      DMUON_UNROLL
      for (int i = 0; i < kInFlight; ++i)
        move<kInFours>(sums, fours[i], first + i * kDirectionThreads);
    }
  }

  template <bool kInFours>
  DMUON_DEVICE void load(Four& four, int index) const {
    const int row = quotient(index, p_.fours_a_row);
    const int col = (index - row * (p_.x_cols / 4)) * 4;
    four.count = row < p_.rows && index < num_fours_ ? p_.cols - col : 0;
    four.at = first_ + row * p_.row_stride + col;
    DMUON_UNROLL
    for (int i = 0; i < 4; ++i) four.g[i] = four.m[i] = 0;
    if constexpr (kInFours) {
      if (four.count <= 0) return;
      machine::load_f32x4(four.g, p_.gradient + four.at);
      machine::load_f32x4(four.m, p_.momentum + four.at);
    } else {
      DMUON_UNROLL
      for (int i = 0; i < 4; ++i) {
        if (i >= four.count) continue;
        four.g[i] = machine::load_f32(p_.gradient + four.at + i);
        four.m[i] = machine::load_f32(p_.momentum + four.at + i);
      }
    }
  }

  template <bool kInFours>
  DMUON_DEVICE void move(Sums& sums, Four& four, int index) const {
    if (index >= num_fours_) return;
    std::uint16_t x[4] = {};
    if (!kInFours || four.count > 0) {
      DMUON_UNROLL
      for (int i = 0; i < 4; ++i) {
        if (!kInFours && i >= four.count) continue;
        const float d = moved(four.g[i], four.m[i]);
        const std::uint32_t size = machine::bits_of(d) & 0x7fffffffU;
        const float scaled = scale_ * d;
        if (size > sums.largest) sums.largest = size;
        sums.squares += scaled * scaled;
        x[i] = Format::narrow(scaled);
      }
    }
    machine::store_u16x4(x_ + index * 4, x);
    if (again_ || !applies_) return;
    if constexpr (kInFours) {
      if (four.count > 0) machine::store_f32x4(p_.momentum + four.at, four.m);
    } else {
      DMUON_UNROLL
      for (int i = 0; i < 4; ++i)
        if (i < four.count) machine::store_f32(p_.momentum + four.at + i, four.m[i]);
    }
  }

  // Moves m, unless this is the second kernel, and returns the direction. From the nearer end and
  // with one rounding at it: m has the bits of torch.lerp.
  DMUON_DEVICE float moved(float gradient, float& m) const {
    const float to = applies_ ? factor_ * gradient : m;
    const bool near = rest_ < 0.5F;
    const float weight = near ? rest_ : -(1 - rest_);
    if (!again_) m = machine::multiply_add(weight, to - m, near ? m : to);
    const float ahead = machine::multiply_add(-weight, m - to, near ? m : to);
    return p_.nesterov ? ahead : m;
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

  // True in all threads of the matrix's last block that ends; it sees the sums of all parts.
  DMUON_DEVICE bool is_last_block(int num_blocks) const {
    if (machine::thread() == 0) {
      machine::fence();
      const std::uint32_t ticket = machine::atomic_add(ticket_word(), 1);
      machine::fence();
      machine::shared_store(2 * kWarps, ticket);
    }
    machine::barrier();
    return machine::shared_load(2 * kWarps) + 1 == static_cast<std::uint32_t>(num_blocks);
  }

  DMUON_DEVICE void finish() const {
    Sums sums;
    DMUON_UNROLL_BY(8)
    for (int part = machine::thread(); part < p_.num_parts; part += kDirectionThreads) {
      float words[2];
      machine::load_f32x2_l2(words, partial(part));
      sums.squares += words[0];
      const std::uint32_t largest = machine::bits_of(words[1]);
      if (largest > sums.largest) sums.largest = largest;
    }
    sums = of_block(sums);
    if (machine::thread() != 0) return;
    const float norm = machine::square_root(sums.squares);
    const float least = scale_ * p_.eps;
    const float inverse = norm == 0 ? 1.F : 1 / (norm < least ? least : norm);
    machine::store_f32(memo_ + kMemoInverse, inverse);
    if (p_.squares != nullptr) machine::store_f32(p_.squares + matrix_, inverse * inverse);
    machine::store_f32(memo_ + (again_ ? kMemoGuess : kMemoScale), scale_for(sums.largest));
    machine::store_u32(ticket_word(), 0);
  }

  static DMUON_DEVICE float scale_for(std::uint32_t largest) {
    if (largest == 0) return 1;
    const int exponent = 14 - (static_cast<int>(largest >> 23) - 127);
    const int held = exponent > 127 ? 127 : exponent;  // never below -114
    return machine::float_of(static_cast<std::uint32_t>(held + 127) << 23);
  }

  DMUON_DEVICE float* partial(int part) const {
    return p_.partial + (static_cast<std::int64_t>(matrix_) * p_.num_parts + part) * 2;
  }
  DMUON_DEVICE std::uint32_t* ticket_word() const {
    return reinterpret_cast<std::uint32_t*>(memo_ + kMemoTicket);
  }

  const DirectionParameters& p_;
  bool again_;
  int matrix_;
  int num_fours_;
  float* memo_;
  std::int64_t first_;
  std::uint16_t* x_;
  bool applies_;
  float rest_;  // 1 - mu
  float factor_;
  float scale_;
};

}  // namespace dmuon::kernels::cuda::device
