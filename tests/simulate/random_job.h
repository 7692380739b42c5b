#pragma once

#include <cstdlib>
#include <ostream>
#include <random>
#include <string>

#include "dmuon/simulate/program.h"

namespace dmuon::simulate {

using Random = std::mt19937;

/// In [first, last], the same on every machine.
inline int draw(Random* random, int first, int last) {
  return first + static_cast<int>((*random)() % static_cast<unsigned>(last - first + 1));
}
inline bool draw_one_in(Random* random, int n) { return draw(random, 1, n) == 1; }

/// How many schedules to draw: DMUON_NUM_SCHEDULES, else `usual`.
inline int num_schedules(int usual) {
  const char* wanted = std::getenv("DMUON_NUM_SCHEDULES");
  return wanted == nullptr ? usual : std::stoi(wanted);
}

/// What the column that owns least of a unit has of it.
std::int64_t least_of_a_column(const schedule::Layout& layout, const schedule::UnitLayout& unit);

/// A job that a sound schedule can serve: a mesh up to 8 x 8 (mostly small), 1 to 8 units with
/// uneven, empty and kept parts, traces with repeated, nested and tied uses, any options, several
/// steps of micro-steps with and without no_sync, evaluations, forwards that are dropped, passes
/// that deviate, and units that some ranks skip.
Job draw_job(Random* random);

/// As program text, nearly: to be read, and to make a test of.
std::ostream& operator<<(std::ostream& out, const Job& job);

}  // namespace dmuon::simulate
