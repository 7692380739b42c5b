#include "tests/kernels/cuda/emulator/warp.h"

#include <vector>

#include "tests/kernels/cuda/emulator/machine_emulated.h"

namespace dmuon::kernels::cuda::emulator {
namespace {

constexpr int kWarp = 32;

template <typename Argument>
Argument& of(void* const* lanes, int lane) {
  return *static_cast<Argument*>(lanes[lane]);
}

struct Shuffled {
  std::uint32_t value;
  std::uint32_t result;
  int mask;
};

void shuffle(void* const* lanes) {
  for (int l = 0; l < kWarp; ++l) {
    auto& own = of<Shuffled>(lanes, l);
    own.result = of<Shuffled>(lanes, (l ^ own.mask) % kWarp).value;
  }
}

struct Row {
  std::uint32_t words[4];
  std::uint32_t* result;
  bool transposed;

  std::uint32_t entry(int col) const { return words[col / 2] >> (col % 2 * 16) & 0xffffU; }
};

void distribute(void* const* lanes) {
  for (int l = 0; l < kWarp; ++l) {
    const Row& own = of<Row>(lanes, l);
    const int row = l / 4;
    const int col = l % 4 * 2;
    for (int m = 0; m < 4; ++m) {
      const auto row_of = [&](int i) -> const Row& { return of<Row>(lanes, 8 * m + i); };
      own.result[m] = own.transposed ? row_of(col).entry(row) | row_of(col + 1).entry(row) << 16
                                     : row_of(row).words[col / 2];
    }
  }
}

struct Fragments {
  float* sums;
  const std::uint32_t* a;
  const std::uint32_t* b;
  Narrow format;
};

void multiply_fragments(void* const* lanes) {
  const float* const wide = wide_values(of<Fragments>(lanes, 0).format);
  float a[16][16];
  float b[16][8];
  float sums[16][8];
  for (int l = 0; l < kWarp; ++l) {
    const auto& own = of<Fragments>(lanes, l);
    const int group = l / 4;
    const int pair = l % 4 * 2;
    for (int i = 0; i < 4; ++i) {
      a[group + i % 2 * 8][pair + i / 2 * 8] = wide[own.a[i] & 0xffffU];
      a[group + i % 2 * 8][pair + i / 2 * 8 + 1] = wide[own.a[i] >> 16];
      sums[group + i / 2 * 8][pair + i % 2] = own.sums[i];
    }
    for (int i = 0; i < 2; ++i) {
      b[pair + i * 8][group] = wide[own.b[i] & 0xffffU];
      b[pair + i * 8 + 1][group] = wide[own.b[i] >> 16];
    }
  }
  for (int i = 0; i < 16; ++i)
    for (int k = 0; k < 16; ++k)
      for (int j = 0; j < 8; ++j) sums[i][j] += a[i][k] * b[k][j];
  for (int l = 0; l < kWarp; ++l) {
    const auto& own = of<Fragments>(lanes, l);
    for (int i = 0; i < 4; ++i) own.sums[i] = sums[l / 4 + i / 2 * 8][l % 4 * 2 + i % 2];
  }
}

}  // namespace

const float* wide_values(Narrow format) {
  const auto make = [](float (*wide)(std::uint16_t)) {
    std::vector<float> all(65536);
    for (std::size_t i = 0; i < all.size(); ++i) all[i] = wide(static_cast<std::uint16_t>(i));
    return all;
  };
  static const std::vector<float> kF16 = make(machine::float_of_f16);
  static const std::vector<float> kBF16 = make(machine::float_of_bf16);
  return format == Narrow::kF16 ? kF16.data() : kBF16.data();
}

std::uint32_t shuffle_xor(std::uint32_t value, int mask, Site site) {
  Shuffled own{value, 0, mask};
  together(shuffle, mask, &own, site);
  return own.result;
}

void load_matrices(std::uint32_t (&words)[4], int word, bool transposed, Site site) {
  Row own{{}, words, transposed};
  shared_load(own.words, word, site);
  together(distribute, transposed ? 1 : 0, &own, site);
}

void multiply_add(float (&sums)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2],
                  Narrow format, Site site) {
  Fragments own{sums, a, b, format};
  together(multiply_fragments, static_cast<int>(format), &own, site);
}

}  // namespace dmuon::kernels::cuda::emulator
