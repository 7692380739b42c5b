#include "tests/simulate/edits.h"

#include <string>
#include <utility>

#include "dmuon/simulate/rank_analysis.h"

namespace dmuon::simulate {

using schedule::Dependency;
using schedule::Kind;
using schedule::Lane;

bool is(const Program& program, int index, Kind kind) {
  return issue(program, index).operation.kind == kind;
}
bool is(const Program& program, int index, Kind kind, int unit) {
  return is(program, index, kind) && issue(program, index).operation.unit == unit;
}
int unit_of(const Program& program, int index) { return issue(program, index).operation.unit; }

std::vector<bool> active(const Program& program, const Job& job) {
  std::vector<std::string> ignored;
  return analyze(program, 0, job.options.node_copy, &ignored).active;
}

int random_slot(Random* random, const Programs& programs) {
  return draw(random, 0, static_cast<int>(programs.size()) - 1);
}

std::optional<int> pick(Random* random, const Program& program, const Condition& condition) {
  std::vector<int> found;
  for (int i = 0; i < num_issues(program); ++i) {
    if (condition(program, i)) found.push_back(i);
  }
  if (found.empty()) return std::nullopt;
  return found[at(draw(random, 0, static_cast<int>(found.size()) - 1))];
}

int last_before(const Program& program, int end, Kind kind, int unit) {
  while (end-- > 0) {
    if (is(program, end, kind, unit)) return end;
  }
  return -1;
}

void erase(Program* program, int index) { program->issues.erase(program->issues.begin() + index); }

void move(Program* program, int from, int to) {
  const Issue moved = issue(*program, from);
  erase(program, from);
  program->issues.insert(program->issues.begin() + to, moved);
}

int counterpart(const Program& program, int index, const Program& other) {
  const auto [kind, unit] =
      std::pair{issue(program, index).operation.kind, unit_of(program, index)};
  int occurrence = 0;
  for (int i = 0; i < index; ++i) occurrence += is(program, i, kind, unit) ? 1 : 0;
  for (int i = 0; i < num_issues(other); ++i) {
    if (is(other, i, kind, unit) && occurrence-- == 0) return i;
  }
  return -1;
}

bool change(Random* random, Programs* programs, const Condition& condition,
            const std::function<void(Program*, int)>& apply) {
  const int slot = random_slot(random, *programs);
  const Program original = (*programs)[at(slot)];
  const std::optional<int> index = pick(random, original, condition);
  if (!index) return false;
  const bool everywhere = draw_one_in(random, 2);
  for (int other = 0; other < static_cast<int>(programs->size()); ++other) {
    Program& program = (*programs)[at(other)];
    if (everywhere || other == slot) apply(&program, counterpart(original, *index, program));
  }
  return true;
}

bool is_ordered(const Program& program, const std::vector<bool>& does, int first, int second) {
  std::vector<bool> before(at(num_issues(program)), false);
  before[at(second)] = true;
  for (int i = second; i > first; --i) {
    if (!before[at(i)]) continue;
    const schedule::Operation& operation = issue(program, i).operation;
    for (int j = i - 1; j >= first; --j) {
      const Lane lane = schedule::lane_of(issue(program, j).operation.kind);
      const bool waits = lane == Lane::kCompute || lane == schedule::lane_of(operation.kind);
      if (does[at(j)] && waits) before[at(j)] = true;
    }
    for (const Dependency& dependency : operation.after) {
      int j = i - 1;
      while (j >= 0 && !(does[at(j)] && is(program, j, dependency.kind, dependency.unit))) --j;
      if (j >= 0) before[at(j)] = true;
    }
  }
  return before[at(first)];
}

int named_by(const Program& program, const std::vector<bool>& does, int index,
             const Dependency& dependency) {
  while (index-- > 0) {
    if (does[at(index)] && is(program, index, dependency.kind, dependency.unit)) return index;
  }
  return -1;
}

}  // namespace dmuon::simulate
