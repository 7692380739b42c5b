#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>

#include "dmuon/kernels/cpu/avx512_registers.h"
#include "dmuon/kernels/cpu/products.h"

namespace dmuon::kernels::cpu::avx512 {

// Memory for packed operands. A thread keeps its largest block, up to kMostKeptBytes, and more
// while a Use lives. New memory is slow, because the system clears it page by page: in a product of
// 1024 x 1024 this takes a fifth of the time.
class Scratch {
 public:
  class Use {
   public:
    explicit Use(Scratch& scratch) : scratch_(scratch) {}
    ~Use() { scratch_.give_back(); }
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;

   private:
    Scratch& scratch_;
  };

  std::uint32_t* words(std::int64_t count) {
    const auto bytes = static_cast<std::size_t>(count) * sizeof(std::uint32_t);
    if (bytes > bytes_) {
      data_.reset();
      bytes_ = 0;
      data_.reset(static_cast<std::uint32_t*>(::operator new(bytes, kAlignment)));
      bytes_ = bytes;
    }
    return data_.get();
  }

 private:
  static constexpr std::size_t kMostKeptBytes = std::size_t{64} << 20;
  static constexpr std::align_val_t kAlignment{sizeof(__m512i)};

  void give_back() {
    if (bytes_ <= kMostKeptBytes) return;
    data_.reset();
    bytes_ = 0;
  }

  struct Free {
    void operator()(std::uint32_t* words) const { ::operator delete(words, kAlignment); }
  };

  std::unique_ptr<std::uint32_t[], Free> data_;
  std::size_t bytes_ = 0;
};

// Rows of a, or columns of b: entry k of vector i is data[i * stride + k * step], in bytes.
struct Vectors {
  const std::byte* data;
  std::int64_t count;
  std::int64_t stride;
  std::int64_t step;
};

// `count` vectors, at most 16, of `bytes` that lie side by side.
DMUON_AVX512 inline void pack_side_by_side(const Vectors& from, std::int64_t bytes,
                                           std::uint32_t* panel) {
  for (std::int64_t at = 0; at < bytes; at += 4 * kLanes) {
    const std::int64_t left = bytes - at;
    const __mmask64 mask = left >= 64 ? ~__mmask64{0} : (__mmask64{1} << left) - 1;
    Block block{};
#pragma GCC unroll 16
    for (std::int64_t i = 0; i < kLanes; ++i) {
      block.row[i] = i < from.count
                         ? _mm512_maskz_loadu_epi8(mask, from.data + i * from.stride + at)
                         : _mm512_setzero_si512();
    }
    transpose(block);
    const std::int64_t words = std::min<std::int64_t>(kLanes, divided_up(left, 4));
    for (std::int64_t word = 0; word < words; ++word, panel += kLanes) {
      _mm512_store_si512(panel, block.row[word]);
    }
  }
}

// Packs `count` vectors, at most 16, whose entries lie beside the next vector's.
template <typename T>
DMUON_AVX512 void pack_across(const Vectors& from, std::int64_t inner, std::uint32_t* panel) {
  const std::int64_t entries = 4 / T::kSize;
  const __mmask16 mask = first(from.count);
  for (std::int64_t k = 0; k < inner; k += entries, panel += kLanes) {
    const bool whole = k + entries <= inner;
    _mm512_store_si512(panel, T::word(mask, from.data + k * from.step, from.step, whole));
  }
}

// All vectors of an operand: [panels][words][16], word w of the 16 vectors of a panel side by side.
struct Panels {
  std::uint32_t* data;
  std::int64_t words;  // of a vector

  /// Word `word` of a vector; the next one is kLanes further.
  std::uint32_t* at(std::int64_t vector, std::int64_t word = 0) const {
    return data + (vector / kLanes * words + word) * kLanes + vector % kLanes;
  }
};

// Packs this many entries of all vectors, then the next ones: a page of vectors that lie across is
// looked up once, not once a panel.
constexpr std::int64_t kEntriesAcross = 64;

template <typename T>
void pack(const Vectors& vectors, std::int64_t inner, const Panels& panels,
          const Workers& workers) {
  workers.run(divided_up(vectors.count, kLanes), [&](std::int64_t begin, std::int64_t end) {
    const bool across = vectors.step != T::kSize;
    const std::int64_t most = across ? kEntriesAcross : inner;
    for (std::int64_t entry = 0; entry < inner; entry += most) {
      const std::int64_t entries = std::min(most, inner - entry);
      for (std::int64_t done = begin * kLanes; done < end * kLanes; done += kLanes) {
        const Vectors some{vectors.data + done * vectors.stride + entry * vectors.step,
                           std::min<std::int64_t>(kLanes, vectors.count - done), vectors.stride,
                           vectors.step};
        std::uint32_t* panel = panels.at(done, entry * T::kSize / 4);
        if (across) {
          pack_across<T>(some, entries, panel);
        } else {
          pack_side_by_side(some, entries * T::kSize, panel);
        }
      }
    }
  });
}

}  // namespace dmuon::kernels::cpu::avx512
