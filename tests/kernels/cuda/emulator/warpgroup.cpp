#include "tests/kernels/cuda/emulator/warpgroup.h"

#include <algorithm>
#include <cstring>
#include <string>

namespace dmuon::kernels::cuda::emulator {
namespace {

constexpr int kRows = 64;
constexpr int kDepth = 16;
constexpr std::uint32_t kPoison = 0x7fd1e5e1;  // a NaN, which sums and products hand on

bool is(float value, std::uint32_t bits) { return std::memcmp(&value, &bits, 4) == 0; }

// A matrix descriptor: an address, bytes from 8 rows of a tile to the next 8, and from a tile to
// the next.
struct Operand {
  int begin;
  int pitch;
  int next_tile;

  // The word of the pair of entries (row, 2 i) and (row, 2 i + 1): the bits that count the row in
  // its group of 8 are added without carry to those that count the chunk of 16 bytes.
  int word(int row, int i) const {
    return swizzled(begin + row / 8 * pitch + row % 8 * 128 + i * 4);
  }
  // Transposed: of the entries (2 i, col) and (2 i + 1, col).
  int transposed_word(int i, int col) const {
    return swizzled(begin + i / 32 * next_tile + col / 8 * pitch + col % 8 * 128 + i % 32 * 4);
  }

 private:
  static int swizzled(int byte) { return (byte ^ (byte >> 7 & 7) << 4) / 4; }
};

// Returns what is wrong with a descriptor of rows of 128 bytes, swizzled; or null.
const char* decode(std::uint64_t descriptor, bool transposed, Operand& operand) {
  operand.begin = static_cast<int>(descriptor & 0x3fff) << 4;
  operand.next_tile = static_cast<int>(descriptor >> 16 & 0x3fff) << 4;
  operand.pitch = static_cast<int>(descriptor >> 32 & 0x3fff) << 4;
  if (descriptor >> 62 != 1) return "a descriptor without the swizzle of 128 bytes";
  if ((descriptor >> 49 & 7) != 0) return "a descriptor with a base offset";
  if (operand.begin / 128 % 8 != 0) return "an operand that is not aligned to 1024 bytes";
  if (operand.pitch % 1024 != 0) return "groups of 8 rows that are not aligned to 1024 bytes";
  const int last = transposed ? 0 : 128 - 2 * kDepth;
  if (operand.begin % 128 > last) return "an operand past the row of 128 bytes";
  if (transposed && operand.next_tile % 1024 != 0)
    return "tiles that are not aligned to 1024 bytes";
  return nullptr;
}

}  // namespace

bool is_poison(float value) { return is(value, kPoison) || is(value, kPoison | 0x80000000U); }

template <typename Visit>
void Multiplications::Sums::for_each(const Visit& visit) {
  for (int t = 0; t < kWarpgroup; ++t) {
    for (int i = 0; i < cols / 2; ++i) {
      const int row = t / 32 * 16 + t % 32 / 4 + i / 2 % 2 * 8;
      const int col = i / 4 * 8 + t % 4 * 2 + i % 2;
      visit(registers[static_cast<std::size_t>(t)][i],
            values[static_cast<std::size_t>(row * cols + col)]);
    }
  }
}

bool Multiplications::check_lanes(const Multiplication* const* lanes) {
  const Multiplication& first = *lanes[0];
  if (!fenced_) report_.error(first.site, "the sums were touched, and no wgmma_fence followed");
  const auto differs = [&](const Multiplication* other) {
    return other->a != first.a || other->b != first.b || other->accumulates != first.accumulates;
  };
  if (std::none_of(lanes, lanes + kWarpgroup, differs)) return true;
  report_.error(first.site, "the warpgroup's threads multiply different operands");
  return false;
}

bool Multiplications::load(std::vector<float>& values, const OperandOf& given, int rows,
                           const Multiplication& of, const std::vector<Now>& nows,
                           SharedMemory& shared) {
  const Site site = of.site;
  Operand operand{};
  if (const char* const wrong = decode(given.descriptor, given.transposed, operand)) {
    report_.error(site, std::string("multiplication: ") + wrong);
    return false;
  }
  const float* const wide = wide_values(of.format);
  const Moment reader{cluster_, thread_, committed_ + 1};
  Writers writers;
  values.resize(static_cast<std::size_t>(rows * kDepth));
  // Stored transposed, for sums over rows.
  const auto load_pair = [&](int word, int at, int next) {
    const std::uint32_t pair = shared.load_operand(word, reader, nows[0], writers, site);
    values[static_cast<std::size_t>(at)] = wide[pair & 0xffffU];
    values[static_cast<std::size_t>(next)] = wide[pair >> 16];
  };
  for (int row = 0; row < rows && !given.transposed; ++row) {
    for (int i = 0; i < kDepth / 2; ++i)
      load_pair(operand.word(row, i), 2 * i * rows + row, (2 * i + 1) * rows + row);
  }
  for (int col = 0; col < kDepth && given.transposed; ++col) {
    for (int i = 0; i < rows / 2; ++i)
      load_pair(operand.transposed_word(i, col), col * rows + 2 * i, col * rows + 2 * i + 1);
  }
  for (const auto& [writer, word] : writers) {
    const auto ignorant = std::ranges::find_if(
        nows, [&](const Now& now) { return writer.cluster >= 0 && !now.knows(writer); });
    if (ignorant == nows.end()) continue;
    report_.error(site, "race: multiplies shared word " + std::to_string(word) + ", whose copy " +
                            report_.name(ignorant->moment) + " has not waited for");
  }
  return true;
}

Multiplications::Sums& Multiplications::sums_of(const Multiplication* const* lanes) {
  const Multiplication& first = *lanes[0];
  const auto found =
      std::ranges::find_if(all_, [&](const Sums& one) { return one.registers[0] == first.sums; });
  if (found != all_.end()) {
    if (found->cols != first.cols) report_.error(first.site, "sums of another width are in flight");
    return *found;
  }
  Sums& made = all_.emplace_back(Sums{{}, first.cols, 0, {}});
  for (int t = 0; t < kWarpgroup; ++t) made.registers.push_back(lanes[t]->sums);
  made.values.resize(static_cast<std::size_t>(kRows * first.cols));
  made.for_each([](float& one, float& value) {
    value = one;
    std::memcpy(&one, &kPoison, sizeof one);
  });
  return made;
}

void Multiplications::begin(const Multiplication* const* lanes, const std::vector<Now>& nows,
                            SharedMemory& shared) {
  if (!check_lanes(lanes)) return;
  const Multiplication& first = *lanes[0];
  std::vector<float> a;
  std::vector<float> b;
  if (!load(a, first.a, kRows, first, nows, shared)) return;
  if (!load(b, first.b, first.cols, first, nows, shared)) return;
  Sums& sums = sums_of(lanes);
  sums.group = committed_ + 1;
  if (sums.cols != first.cols) return;
  if (!first.accumulates) std::ranges::fill(sums.values, 0.F);
  for (int row = 0; row < kRows; ++row) {
    float* const to = sums.values.data() + row * sums.cols;
    for (int k = 0; k < kDepth; ++k) {
      const float factor = a[static_cast<std::size_t>(k * kRows + row)];
      const float* const from = b.data() + k * sums.cols;
      for (int col = 0; col < sums.cols; ++col) to[col] += factor * from[col];
    }
  }
}

std::uint32_t Multiplications::wait(std::uint32_t pending, Site site) {
  if (committed_ > pending) ended_ = std::max(ended_, committed_ - pending);
  for (auto sums = all_.begin(); sums != all_.end();) {
    if (sums->group > ended_) {
      ++sums;
      continue;
    }
    bool touched = false;
    sums->for_each([&](float& one, float& value) {
      touched = touched || !is(one, kPoison);
      one = value;
    });
    if (touched) report_.error(site, "sums were touched while a multiplication changed them");
    sums = all_.erase(sums);
    fenced_ = false;
  }
  return ended_;
}

}  // namespace dmuon::kernels::cuda::emulator
