#include "tests/simulate/edits.h"

#include <utility>

namespace dmuon::simulate {

using schedule::Dependency;
using schedule::Kind;
using schedule::Lane;

bool is(const Program& program, int index, Kind kind) { return program.issue(index).is(kind); }
bool is(const Program& program, int index, Kind kind, const schedule::Subject& subject) {
  return is(program, index, kind) && program.issue(index).operation.subject == subject;
}

core::Owner random_rank(Random* random, const Programs& programs) {
  return core::Owner(draw(random, 0, programs.size() - 1));
}

std::optional<int> pick(Random* random, const Program& program, const Condition& condition) {
  std::vector<int> found;
  for (int i = 0; i < program.num_issues(); ++i) {
    if (condition(program, i)) found.push_back(i);
  }
  if (found.empty()) return std::nullopt;
  return found[at(draw(random, 0, static_cast<int>(found.size()) - 1))];
}

int last_before(const Program& program, int end, Kind kind, const schedule::Subject& subject) {
  while (end-- > 0) {
    if (is(program, end, kind, subject)) return end;
  }
  return -1;
}

int last_before(const Program& program, int end, Compute compute, core::UnitIndex unit) {
  while (end-- > 0) {
    if (program.issue(end).is(compute) && unit_of(program, end) == unit) return end;
  }
  return -1;
}

void erase(Program* program, int index) { program->issues.erase(program->issues.begin() + index); }

void move(Program* program, int from, int to) {
  const Issue moved = program->issue(from);
  erase(program, from);
  program->issues.insert(program->issues.begin() + to, moved);
}

void repeat(Program* program, int index) {
  const Issue again = program->issue(index);
  program->issues.insert(program->issues.begin() + index, again);
}

int counterpart(const Program& program, int index, const Program& other) {
  const auto [kind, unit] = std::pair{program.issue(index).operation.kind, unit_of(program, index)};
  int occurrence = 0;
  for (int i = 0; i < index; ++i) occurrence += is(program, i, kind, unit) ? 1 : 0;
  for (int i = 0; i < other.num_issues(); ++i) {
    if (is(other, i, kind, unit) && occurrence-- == 0) return i;
  }
  return -1;
}

bool change(Random* random, Programs* programs, const Condition& condition,
            const std::function<void(Program*, int)>& apply) {
  const core::Owner rank = random_rank(random, *programs);
  const Program original = (*programs)[rank];
  const std::optional<int> index = pick(random, original, condition);
  if (!index) return false;
  const bool everywhere = draw_one_in(random, 2);
  for (const core::Owner other : programs->indices()) {
    Program& program = (*programs)[other];
    if (everywhere || other == rank) apply(&program, counterpart(original, *index, program));
  }
  return true;
}

bool is_ordered(const Program& program, int first, int second) {
  std::vector<bool> before(at(program.num_issues()), false);
  before[at(second)] = true;
  for (int i = second; i > first; --i) {
    if (!before[at(i)]) continue;
    for (int j = i - 1; j >= first; --j) {
      const Lane lane = program.issue(j).lane();
      if (lane == Lane::kCompute || lane == program.issue(i).lane()) before[at(j)] = true;
    }
    for (const Dependency& dependency : program.issue(i).operation.after) {
      const int named = last_before(program, i, dependency.kind, dependency.subject);
      if (named >= 0) before[at(named)] = true;
    }
  }
  return before[at(first)];
}

}  // namespace dmuon::simulate
