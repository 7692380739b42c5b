#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "tests/kernels/cuda/emulator/report.h"

namespace dmuon::kernels::cuda::emulator {

/// The last writers of what an instruction reads, without repetition.
using Writers = std::vector<std::pair<Moment, int>>;  // with the word

/// A block's shared memory, in words.
class SharedMemory {
 public:
  explicit SharedMemory(const Report& report) : report_(report) {}
  /// Forgets everything: a new block begins.
  void reset(unsigned bytes);
  /// Reports a word that is no multiple of `words`.
  void check_aligned(int word, int words, Site site);
  std::uint32_t load(int word, const Now& now, Site site);
  void load(std::uint32_t (&values)[4], int word, const Now& now, Site site);
  void store(int word, std::uint32_t value, const Now& now, Site site);
  /// Begins or ends a copy to a word. In between nobody may touch the word.
  void begin_copy(int word, const Now& now, Site site);
  void end_copy(int word, std::uint32_t value, const Moment& now);

  // What tiles' copies and multiplications touch. They do not see what threads have stored, without
  // a fence that device code does not have.

  /// Begins a tile's copy to a word: `writer` will write it. `now` is the thread that asks for it.
  /// Returns false after a report.
  bool begin_tile(int word, const Moment& writer, const Now& now, Site site);
  void end_tile(int word, std::uint32_t value);
  /// Loads a word of a multiplication's operand. The caller checks that threads know the writers.
  std::uint32_t load_operand(int word, const Moment& reader, const Now& now, Writers& writers,
                             Site site);
  /// Makes two words an mbarrier, which no thread may touch. Returns false after a report.
  bool make_mbarrier(int word, const Now& now, Site site);

 private:
  enum class Holds : unsigned char { kNothing, kStored, kTile, kMbarrier };
  struct Cell {
    std::uint32_t value;
    Holds holds = Holds::kNothing;
    bool in_flight = false;  // a copy will write it
    int write_line = 0;
    int read_line = 0;
    Moment write;
    Reads reads{};
  };
  /// Returns null, after a report, if there is no such word or it is an mbarrier.
  Cell* find(int word, const char* what, Site site);
  bool check_in_flight(const Cell& cell, int word, const char* what, Site site);
  bool check_overwrite(const Cell& cell, int word, const Now& now, Site site);
  static std::string name(int word) { return "shared word " + std::to_string(word); }

  const Report& report_;
  std::vector<Cell> cells_;
};

}  // namespace dmuon::kernels::cuda::emulator
