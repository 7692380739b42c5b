#pragma once

#include <functional>
#include <optional>
#include <vector>

#include "dmuon/simulate/program.h"
#include "tests/simulate/random_job.h"

namespace dmuon::simulate {

using Condition = std::function<bool(const Program&, int)>;

inline std::size_t at(int index) { return static_cast<std::size_t>(index); }

bool is(const Program& program, int index, schedule::Kind kind);
bool is(const Program& program, int index, schedule::Kind kind, const schedule::Subject& subject);
inline core::UnitIndex unit_of(const Program& program, int index) {
  return program.issue(index).unit();
}

core::Owner random_rank(Random* random, const Programs& programs);

/// One of the issues that meet a condition.
std::optional<int> pick(Random* random, const Program& program, const Condition& condition);

/// The last issue before `end` of a kind and subject; -1 if none.
int last_before(const Program& program, int end, schedule::Kind kind,
                const schedule::Subject& subject);
/// The last compute before `end` of a unit; -1 if none.
int last_before(const Program& program, int end, Compute compute, core::UnitIndex unit);

void erase(Program* program, int index);
void move(Program* program, int from, int to);
/// Inserts the same issue again.
void repeat(Program* program, int index);

/// The same issue in another rank's program: the n-th of its kind and unit. Not for operations on
/// batches, nor for the compute of modules.
int counterpart(const Program& program, int index, const Program& other);

/// Picks an issue of one rank that meets a condition, and changes it there, or it and its
/// counterparts on all ranks.
/// @return false if there is none.
bool change(Random* random, Programs* programs, const Condition& condition,
            const std::function<void(Program*, int)>& apply);

/// Whether `first` is done before `second` starts: a search over lanes, program and dependencies,
/// which knows nothing of the frontiers of analyze().
bool is_ordered(const Program& program, int first, int second);

}  // namespace dmuon::simulate
