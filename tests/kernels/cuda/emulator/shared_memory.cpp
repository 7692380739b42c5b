#include "tests/kernels/cuda/emulator/shared_memory.h"

#include <algorithm>

namespace dmuon::kernels::cuda::emulator {
namespace {

constexpr std::uint32_t kPoison = 0xffffffffU;  // two NaNs in 16 bits

bool same(const Moment& a, const Moment& b) { return a.thread == b.thread && a.time == b.time; }

}  // namespace

void SharedMemory::reset(unsigned bytes) {
  cells_.clear();
  cells_.resize(bytes / 4);
  for (Cell& cell : cells_) cell.value = kPoison;
}

SharedMemory::Cell* SharedMemory::find(int word, const char* what, Site site) {
  if (word < 0 || static_cast<std::size_t>(word) >= cells_.size()) {
    report_.error(
        site, std::string(what) + " of " + name(word) + ", of " + std::to_string(cells_.size()));
    return nullptr;
  }
  Cell& cell = cells_[static_cast<std::size_t>(word)];
  if (cell.holds != Holds::kMbarrier) return &cell;
  report_.error(site, std::string(what) + " of " + name(word) + ", which is an mbarrier");
  return nullptr;
}

void SharedMemory::check_aligned(int word, int words, Site site) {
  if (word % words != 0)
    report_.error(site, name(word) + " is no multiple of " + std::to_string(words));
}

bool SharedMemory::check_in_flight(const Cell& cell, int word, const char* what, Site site) {
  if (!cell.in_flight) return true;
  report_.error(site, std::string(what) + name(word) + " while a copy to it is in flight, of " +
                          report_.who(cell.write, cell.write_line));
  return false;
}

std::uint32_t SharedMemory::load(int word, const Now& now, Site site) {
  Cell* const cell = find(word, "load", site);
  if (cell == nullptr) return 0;
  if (cell->holds == Holds::kNothing)
    report_.error(site, "load of " + name(word) + ", which nobody wrote");
  if (!check_in_flight(*cell, word, "load of ", site)) return cell->value;
  if (cell->holds != Holds::kNothing && !now.knows(cell->write)) {
    report_.error(site, "race: loads " + name(word) + ", written by " +
                            report_.who(cell->write, cell->write_line) + " without a barrier");
  }
  cell->reads.note(now.moment, now);
  cell->read_line = site.line;
  return cell->value;
}

void SharedMemory::load(std::uint32_t (&values)[4], int word, const Now& now, Site site) {
  check_aligned(word, 4, site);
  for (int i = 0; i < 4; ++i) values[i] = load(word + i, now, site);
}

bool SharedMemory::check_overwrite(const Cell& cell, int word, const Now& now, Site site) {
  if (!check_in_flight(cell, word, "store to ", site)) return false;
  const auto refuse = [&](const char* how, const Moment& who, int line) {
    report_.error(site, "race: overwrites " + name(word) + how + report_.who(who, line) +
                            " without a barrier");
    return false;
  };
  if (const auto reader = cell.reads.unknown(now))
    return refuse(", loaded by ", *reader, cell.read_line);
  if (cell.holds == Holds::kNothing || now.knows(cell.write)) return true;
  return refuse(", written by ", cell.write, cell.write_line);
}

void SharedMemory::store(int word, std::uint32_t value, const Now& now, Site site) {
  Cell* const cell = find(word, "store", site);
  if (cell == nullptr) return;
  check_overwrite(*cell, word, now, site);
  *cell = {value, Holds::kStored, false, site.line, 0, now.moment};
}

void SharedMemory::begin_copy(int word, const Now& now, Site site) {
  store(word, kPoison, now, site);
  if (word >= 0 && static_cast<std::size_t>(word) < cells_.size())
    cells_[static_cast<std::size_t>(word)].in_flight = true;
}

void SharedMemory::end_copy(int word, std::uint32_t value, const Moment& now) {
  end_tile(word, value);
  if (word >= 0 && static_cast<std::size_t>(word) < cells_.size())
    cells_[static_cast<std::size_t>(word)].write = now;
}

bool SharedMemory::begin_tile(int word, const Moment& writer, const Now& now, Site site) {
  Cell* const cell = find(word, "copy of a tile", site);
  if (cell == nullptr) return false;
  bool right = check_overwrite(*cell, word, now, site);
  if (cell->holds == Holds::kStored) {
    right = false;
    report_.error(site, "a tile's copy overwrites " + name(word) + ", stored by " +
                            report_.who(cell->write, cell->write_line) +
                            " without a fence between them");
  }
  *cell = {kPoison, Holds::kTile, true, site.line, 0, writer};
  return right;
}

void SharedMemory::end_tile(int word, std::uint32_t value) {
  if (word < 0 || static_cast<std::size_t>(word) >= cells_.size()) return;  // reported before
  Cell& cell = cells_[static_cast<std::size_t>(word)];
  cell.in_flight = false;
  cell.value = value;
}

std::uint32_t SharedMemory::load_operand(int word, const Moment& reader, const Now& now,
                                         Writers& writers, Site site) {
  Cell* const cell = find(word, "multiplication", site);
  if (cell == nullptr) return 0;
  if (cell->holds == Holds::kNothing)
    report_.error(site, "multiplication of " + name(word) + ", which nobody wrote");
  if (!check_in_flight(*cell, word, "multiplication of ", site)) return cell->value;
  if (cell->holds == Holds::kStored) {
    report_.error(site, "multiplication of " + name(word) + ", stored by " +
                            report_.who(cell->write, cell->write_line) +
                            " without a fence between them");
  }
  if (writers.empty() || !same(writers.back().first, cell->write)) {
    const auto is_it = [&](const auto& one) { return same(one.first, cell->write); };
    if (std::ranges::none_of(writers, is_it)) writers.emplace_back(cell->write, word);
  }
  cell->reads.note(reader, now);
  cell->read_line = site.line;
  return cell->value;
}

bool SharedMemory::make_mbarrier(int word, const Now& now, Site site) {
  check_aligned(word, 2, site);
  for (int i = 0; i < 2; ++i) {
    Cell* const cell = find(word + i, "mbarrier", site);
    if (cell == nullptr) return false;
    check_overwrite(*cell, word + i, now, site);
    *cell = {kPoison, Holds::kMbarrier, false, site.line, 0, now.moment};
  }
  return true;
}

}  // namespace dmuon::kernels::cuda::emulator
