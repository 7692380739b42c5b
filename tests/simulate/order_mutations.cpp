#include <memory>
#include <utility>

#include "tests/simulate/edits.h"
#include "tests/simulate/mutations.h"

namespace dmuon::simulate {
namespace {

using schedule::Dependency;
using schedule::Kind;
using schedule::Lane;

bool has_messages(const Program& program, int index, core::Owner rank) {
  return program.issue(index).carries_messages() &&
         !schedule::messages_of(program.issue(index).operation, *program.layout,
                                program.layout->slot_of(rank))
              .empty();
}

// Two messages of one group, one right after the other; nothing between them frees what they fill.
bool swap_in_group(Random* random, const Job&, Programs* programs) {
  const core::Owner rank = random_rank(random, *programs);
  Program& program = (*programs)[rank];
  const auto lane = [&](int i) { return program.issue(i).lane(); };
  const auto next = [&](int first) {
    const schedule::Operation& one = program.issue(first).operation;
    for (int i = first + 1; i < program.num_issues(); ++i) {
      if (is(program, i, Kind::kReshard)) return -1;
      if (lane(i) != lane(first) || !has_messages(program, i, rank)) continue;
      const schedule::Operation& other = program.issue(i).operation;
      return other.kind == one.kind && other.subject == one.subject ? -1 : i;
    }
    return -1;
  };
  const auto first = pick(random, program, [&](const Program& of, int i) {
    return has_messages(of, i, rank) && next(i) >= 0;
  });
  if (!first) return false;
  std::swap(program.issues[at(*first)], program.issues[at(next(*first))]);
  return true;
}

bool swap_across_lanes(Random* random, const Job&, Programs* programs) {
  const core::Owner rank = random_rank(random, *programs);
  Program& program = (*programs)[rank];
  const auto pick_from = [&](Lane lane) {
    return pick(random, program, [&](const Program& of, int i) {
      return of.issue(i).lane() == lane && has_messages(of, i, rank);
    });
  };
  const auto intra = pick_from(Lane::kIntra);
  const auto inter = pick_from(Lane::kInter);
  if (!intra || !inter) return false;
  std::swap(program.issues[at(*intra)], program.issues[at(*inter)]);
  return true;
}

// One that is not implied by the lanes or by other dependencies.
bool drop_dependency(Random* random, const Job&, Programs* programs) {
  const Program original = programs->front();
  const auto index = pick(random, original, [&](const Program& program, int i) {
    return !program.issue(i).operation.after.empty() && !program.issue(i).is_on_batch();
  });
  if (!index) return false;
  const Dependency& dependency = original.issue(*index).operation.after.front();
  const int named = last_before(original, *index, dependency.kind, dependency.subject);
  Program without = original;
  without.issues[at(*index)].operation.after.clear();
  if (named < 0 || is_ordered(without, named, *index)) return false;
  const bool everywhere = draw_one_in(random, 2);
  for (Program& program : *programs) {
    if (!everywhere && &program != &programs->front()) break;
    program.issues[at(counterpart(original, *index, program))].operation.after.clear();
  }
  return true;
}

bool take_wrong_root(Random* random, const Job& job, Programs* programs) {
  const core::Owner rank = random_rank(random, *programs);
  Program& program = (*programs)[rank];
  const bool in_row = job.layout.num_shards > 1 && draw_one_in(random, 2);
  const auto index = pick(random, program, [&](const Program& of, int i) {
    const Kind kind = in_row ? Kind::kPublishIntra : Kind::kPublishInter;
    return is(of, i, kind) && has_messages(of, i, rank);
  });
  if (!index) return false;
  schedule::Layout layout = job.layout;
  auto& elements = layout.units[unit_of(program, *index)].owner_elements;
  const int shards = layout.num_shards;
  // An owner's part goes to its neighbour in the row, which has one too (so that no message comes
  // into being of which no other rank knows), or in this rank's column.
  for (const core::Slot owner : elements.indices()) {
    if (!in_row && layout.shard_of(owner) != layout.shard_of(rank)) continue;
    const int place = owner.value();
    const core::Slot neighbour(in_row ? place / shards * shards + (place + 1) % shards
                                      : (place + shards) % layout.num_slots());
    if (elements[owner] == 0 || (in_row && elements[neighbour] == 0)) continue;
    elements[neighbour] += elements[owner];
    elements[owner] = 0;
    program.layout = std::make_shared<const schedule::Layout>(layout);
    return true;
  }
  return false;
}

bool compare_alone(Random* random, const Job&, Programs* programs) {
  Program& program = (*programs)[random_rank(random, *programs)];
  if (programs->size() == 1 || program.comparisons.empty()) return false;
  const int last = static_cast<int>(program.comparisons.size()) - 1;
  program.comparisons.erase(program.comparisons.begin() + draw(random, 0, last));
  return true;
}

}  // namespace

std::vector<Mutator> order_mutators() {
  return {
      {"swap two messages of a group", "another member's is of", swap_in_group},
      {"swap messages of two lanes", "is issued where rank 0 issues", swap_across_lanes},
      {"drop a dependency", "may run at the same time", drop_dependency},
      {"take a wrong root", "another member's is of", take_wrong_root},
      {"compare alone", "compares something else than rank 0", compare_alone},
  };
}

}  // namespace dmuon::simulate
