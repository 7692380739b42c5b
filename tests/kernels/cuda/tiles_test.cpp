#include "tests/kernels/cuda/emulator/tiles.h"

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "dmuon/kernels/cuda/machine.h"

// Copies of tiles and multiplications of warpgroups in the emulator, by the PTX ISA's layouts.
namespace dmuon::kernels::cuda {
namespace {

using emulator::Access;
using emulator::Buffer;

// Small integers, exact in both formats.
std::uint16_t entry(std::size_t i, bool fp16) {
  const auto value = static_cast<float>((i * 7 + i / 64 * 3) % 17) - 8;
  return fp16 ? machine::f16_of(value) : machine::bf16_of(value);
}

struct Matrix {
  int rows, cols;
  std::vector<std::uint16_t> entries{};
  alignas(64) TensorMap map{};

  Matrix(int of_rows, int of_cols, int tile_rows, bool fp16 = true) : rows(of_rows), cols(of_cols) {
    entries.assign(static_cast<std::size_t>(rows * pitch()), 0x7fff);  // NaN between rows
    for (int row = 0; row < rows; ++row)
      for (int col = 0; col < cols; ++col)
        at(row, col) = entry(static_cast<std::size_t>(row * 131 + col), fp16);
    map = emulator::TiledMap{.base = reinterpret_cast<const char*>(entries.data()),
                             .cols = static_cast<std::uint64_t>(cols),
                             .rows = static_cast<std::uint64_t>(rows),
                             .row_pitch = 2 * static_cast<std::uint64_t>(pitch()),
                             .tile_rows = static_cast<std::uint64_t>(tile_rows)}
              .encoded();
  }
  int pitch() const { return (cols + 15) / 8 * 8; }
  std::uint16_t& at(int row, int col) {
    return entries[static_cast<std::size_t>(row * pitch() + col)];
  }
  Buffer buffer() const {
    return {.name = "matrix",
            .base = entries.data(),
            .row_bytes = 2 * static_cast<std::size_t>(cols),
            .rows = static_cast<std::size_t>(rows),
            .row_pitch = 2 * static_cast<std::size_t>(pitch()),
            .access = Access::kRead};
  }
};

std::string run(const std::vector<Buffer>& buffers, unsigned threads, unsigned shared_bytes,
                const std::function<void()>& block_thread) {
  std::string all;
  for (const std::string& sentence :
       emulator::run({.threads = threads, .shared_bytes = shared_bytes}, buffers, block_thread, 3))
    all += sentence + "\n";
  return all;
}

// Thread 0 lets copies begin, which arrive at the mbarrier; all threads wait for them.
void fetch(int mbarrier, std::uint32_t bytes, const std::function<void()>& copy,
           bool fences = true) {
  if (machine::thread() == 0) {
    machine::mbarrier_init(mbarrier, 1);
    if (fences) machine::mbarrier_init_fence();
    machine::mbarrier_expect(mbarrier, bytes);
    copy();
  }
  machine::barrier();
  machine::mbarrier_wait(mbarrier, 0);
}

// The chunk of 16 bytes that lies in each place of a row, by the CUDA C++ Programming Guide's table
// of CU_TENSOR_MAP_SWIZZLE_128B.
constexpr int kSwizzled[8][8] = {{0, 1, 2, 3, 4, 5, 6, 7}, {1, 0, 3, 2, 5, 4, 7, 6},
                                 {2, 3, 0, 1, 6, 7, 4, 5}, {3, 2, 1, 0, 7, 6, 5, 4},
                                 {4, 5, 6, 7, 0, 1, 2, 3}, {5, 4, 7, 6, 1, 0, 3, 2},
                                 {6, 7, 4, 5, 2, 3, 0, 1}, {7, 6, 5, 4, 3, 2, 1, 0}};

TEST(Tiles, AreSwizzledAndHaveZerosBeyondTheMatrix) {
  Matrix matrix(40, 100, 32);
  std::vector<std::uint32_t> words(32 * 32);
  const int tile = 256;
  EXPECT_EQ(run({matrix.buffer()}, 32, 8192,
                [&] {
                  fetch(2, 32 * 128, [&] { machine::copy_tile(tile, matrix.map, 2, 64, 16, 0); });
                  for (int i = machine::thread(); i < 32 * 32; i += 32)
                    words[static_cast<std::size_t>(i)] = machine::shared_load(tile + i);
                }),
            "");
  for (int row = 0; row < 32; ++row) {
    for (int i = 0; i < 64; ++i) {
      const int col = 64 + kSwizzled[row % 8][i / 8] * 8 + i % 8;
      const bool inside = 16 + row < matrix.rows && col < matrix.cols;
      const std::uint32_t word = words[static_cast<std::size_t>(row * 32 + i / 2)];
      EXPECT_EQ(word >> i % 2 * 16 & 0xffff, inside ? matrix.at(16 + row, col) : 0)
          << row << ", " << i;
    }
  }
}

TEST(Tiles, FindBadCopies) {
  const Matrix matrix(64, 64, 64);
  const auto found = [&](const Buffer& buffer, const std::function<void()>& copy) {
    return run({buffer}, 32, 20480, [&] { fetch(2, 64 * 128, copy); });
  };
  const auto expect = [&](const char* words, const Buffer& buffer,
                          const std::function<void()>& copy) {
    const std::string all = found(buffer, copy);
    EXPECT_NE(all.find(words), std::string::npos) << words << "; found:\n" << all;
  };
  const Buffer whole = matrix.buffer();
  Buffer less = whole;
  less.rows = 63;
  const TensorMap no_map{};
  const auto copy = [&](int word, const TensorMap& map, int mbarrier) {
    return [&map, word, mbarrier] { machine::copy_tile(word, map, mbarrier, 0, 0, 0); };
  };
  EXPECT_EQ(found(whole, copy(256, matrix.map, 2)), "");
  expect("past its end", less, copy(256, matrix.map, 2));
  expect("no multiple of 256", whole, copy(272, matrix.map, 2));
  expect("no mbarrier", whole, copy(256, matrix.map, 4));
  expect("no tensor map", whole, copy(256, no_map, 2));
  expect("of 5120", whole, copy(4096, matrix.map, 2));
  expect("in no cluster", whole, [&] { machine::copy_tile_to_both(256, matrix.map, 2, 0, 0, 0); });
  expect("which is an mbarrier", whole, copy(0, matrix.map, 2));
  const std::string unfenced =
      run({whole}, 32, 20480, [&] { fetch(2, 64 * 128, copy(256, matrix.map, 2), false); });
  EXPECT_NE(unfenced.find("no fence after the initialisation"), std::string::npos);
}

// The fields of the PTX ISA's matrix descriptor for wgmma.
TEST(Wgmma, HasThePtxIsasDescriptors) {
  const std::uint64_t descriptor = machine::matrix_descriptor(3 * 256);
  EXPECT_EQ(descriptor & 0x3fff, 3 * 1024 / 16);    // address
  EXPECT_EQ(descriptor >> 32 & 0x3fff, 1024 / 16);  // bytes from 8 rows to the next
  EXPECT_EQ(descriptor >> 49 & 7, 0);               // base offset
  EXPECT_EQ(descriptor >> 62, 1);                   // swizzle of 128 bytes
}

// The place of d[i] of a warpgroup's thread, by the PTX ISA's figure for D of wgmma.m64nNk16.
struct At {
  int row;
  int col;
};
At of_sums(int thread, int i) {
  const int group = thread % 32 / 4;
  const int row = thread / 32 * 16 + (i % 4 < 2 ? group : group + 8);
  return {row, thread % 4 * 2 + (i & 1) + i / 4 * 8};
}

// Products of 64 x 64 and kCols x 64 entries, added to what the registers hold or not.
template <int kCols, typename Multiply>
void expect_product(bool fp16, bool accumulates, const Multiply& multiply) {
  Matrix a(64, 64, 64, fp16);
  Matrix b(kCols, 64, 128, fp16);
  float got[64][kCols];
  constexpr int kA = 256;
  constexpr int kB = kA + 64 * 32;
  EXPECT_EQ(run({a.buffer(), b.buffer()}, 128, 4 * (kB + kCols * 32),
                [&] {
                  fetch(0, (64 + kCols) * 128, [&] {
                    machine::copy_tile(kA, a.map, 0, 0, 0, 0);
                    for (int row = 0; row < kCols; row += 128)
                      machine::copy_tile(kB + row * 32, b.map, 0, 0, row, 0);
                  });
                  const int t = machine::thread();
                  float sums[kCols / 2];
                  for (int i = 0; i < kCols / 2; ++i)
                    sums[i] = static_cast<float>(of_sums(t, i).row - of_sums(t, i).col);
                  machine::wgmma_fence();
                  for (unsigned k = 0; k < 4; ++k) {
                    multiply(sums, machine::matrix_descriptor(kA) + 2 * k,
                             machine::matrix_descriptor(kB) + 2 * k, accumulates || k > 0);
                  }
                  machine::wgmma_commit();
                  machine::wgmma_wait<0>();
                  for (int i = 0; i < kCols / 2; ++i)
                    got[of_sums(t, i).row][of_sums(t, i).col] = sums[i];
                }),
            "");
  const auto wide = [&](std::uint16_t v) {
    return fp16 ? machine::float_of_f16(v) : machine::float_of_bf16(v);
  };
  for (int row = 0; row < 64; ++row) {
    for (int col = 0; col < kCols; ++col) {
      float sum = accumulates ? static_cast<float>(row - col) : 0;
      for (int k = 0; k < 64; ++k) sum += wide(a.at(row, k)) * wide(b.at(col, k));
      ASSERT_EQ(got[row][col], sum) << row << ", " << col;
    }
  }
}

TEST(Wgmma, MultipliesByThePtxIsasLayout) {
  using std::uint64_t;
  expect_product<128>(true, true, [](float(&d)[64], uint64_t a, uint64_t b, bool adds) {
    machine::multiply_64x128_f16(d, a, b, adds);
  });
  expect_product<128>(false, false, [](float(&d)[64], uint64_t a, uint64_t b, bool adds) {
    machine::multiply_64x128_bf16(d, a, b, adds);
  });
  expect_product<256>(true, false, [](float(&d)[128], uint64_t a, uint64_t b, bool adds) {
    machine::multiply_64x256_f16(d, a, b, adds);
  });
  expect_product<256>(false, true, [](float(&d)[128], uint64_t a, uint64_t b, bool adds) {
    machine::multiply_64x256_bf16(d, a, b, adds);
  });
}

// A b that lies transposed, in two tiles of 64 of its rows each, 32 deep, and an a that does or
// not. By the PTX ISA's canonical layout of 128-byte swizzled operands that are M- or N-major.
template <bool kTransposedA>
void expect_product_of_transposed() {
  Matrix a(kTransposedA ? 32 : 64, kTransposedA ? 64 : 32, kTransposedA ? 32 : 64);
  Matrix b(32, 128, 32);  // [depth, rows]
  float got[64][128];
  constexpr int kA = 256;
  constexpr int kB = kA + 64 * 32;  // tiles lie 64 rows apart
  EXPECT_EQ(run({a.buffer(), b.buffer()}, 128, 4 * (kB + 2 * 64 * 32),
                [&] {
                  fetch(0, (kTransposedA ? 3 : 4) * 32 * 128, [&] {
                    machine::copy_tile(kA, a.map, 0, 0, 0, 0);
                    machine::copy_tile(kB, b.map, 0, 0, 0, 0);
                    machine::copy_tile(kB + 64 * 32, b.map, 0, 64, 0, 0);
                  });
                  const int t = machine::thread();
                  float sums[64];
                  machine::wgmma_fence();
                  for (unsigned k = 0; k < 2; ++k) {  // 16 rows of 128 bytes further, or 16 entries
                    machine::multiply_64x128_f16<kTransposedA, true>(
                        sums,
                        machine::matrix_descriptor<kTransposedA>(kA) +
                            k * (kTransposedA ? 16 * 128 / 16 : 2),
                        machine::matrix_descriptor<true>(kB) + k * 16 * 128 / 16, k > 0);
                  }
                  machine::wgmma_commit();
                  machine::wgmma_wait<0>();
                  for (int i = 0; i < 64; ++i) got[of_sums(t, i).row][of_sums(t, i).col] = sums[i];
                }),
            "");
  for (int row = 0; row < 64; ++row) {
    for (int col = 0; col < 128; ++col) {
      float sum = 0;
      for (int k = 0; k < 32; ++k) {
        sum += machine::float_of_f16(kTransposedA ? a.at(k, row) : a.at(row, k)) *
               machine::float_of_f16(b.at(k, col));
      }
      ASSERT_EQ(got[row][col], sum) << row << ", " << col;
    }
  }
}

TEST(Wgmma, MultipliesTransposedOperands) {
  expect_product_of_transposed<true>();
  expect_product_of_transposed<false>();
}

TEST(Wgmma, NeedsAFenceAfterSumsWereTouched) {
  const Matrix matrix(128, 64, 128);
  const auto found = [&](bool fences) {
    return run({matrix.buffer()}, 128, 4 * 256 * 40, [&] {
      fetch(0, 128 * 128, [&] { machine::copy_tile(256, matrix.map, 0, 0, 0, 0); });
      float sums[64];
      machine::wgmma_fence();
      for (int i = 0; i < 2; ++i) {
        const std::uint64_t operand = machine::matrix_descriptor(256);
        machine::multiply_64x128_f16(sums, operand, operand, false);
        machine::wgmma_commit();
        machine::wgmma_wait<0>();
        sums[5] = 0;
        if (fences) machine::wgmma_fence();
      }
    });
  };
  EXPECT_EQ(found(true), "");
  EXPECT_NE(found(false).find("no wgmma_fence followed"), std::string::npos);
}

TEST(Wgmma, FindsBadOperands) {
  const Matrix matrix(128, 64, 128);
  const auto expect = [&](const char* words, std::uint64_t a, bool differs = false) {
    const std::string all = run({matrix.buffer()}, 128, 4 * 256 * 40, [&] {
      fetch(0, 128 * 128, [&] { machine::copy_tile(256, matrix.map, 0, 0, 0, 0); });
      float sums[64];
      machine::wgmma_fence();
      machine::multiply_64x128_f16(sums, differs && machine::thread() == 77 ? a + 2 : a,
                                   machine::matrix_descriptor(256), false);
      machine::wgmma_commit();
      machine::wgmma_wait<0>();
    });
    EXPECT_NE(all.find(words), std::string::npos) << words << "; found:\n" << all;
  };
  const std::uint64_t right = machine::matrix_descriptor(256);
  expect("without the swizzle", right & ~(std::uint64_t{3} << 62));
  expect("base offset", right | std::uint64_t{1} << 49);
  expect("not aligned to 1024", right + 8);
  expect("past the row of 128 bytes", right + 7);
  expect("which nobody wrote", machine::matrix_descriptor(256 + 4096));
  expect("of 10240", machine::matrix_descriptor(256 * 48));
  expect("different operands", right, true);
}

}  // namespace
}  // namespace dmuon::kernels::cuda
