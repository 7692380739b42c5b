#include <algorithm>
#include <utility>

#include "tests/simulate/edits.h"
#include "tests/simulate/mutations.h"

namespace dmuon::simulate {
namespace {

using schedule::Dependency;
using schedule::Kind;

bool update_too_late(Random* random, const Job& job, Programs* programs) {
  const core::Owner rank = random_rank(random, *programs);
  Program& program = (*programs)[rank];
  const Kind first_stage =
      job.layout.num_replicates > 1 ? Kind::kPublishInter : Kind::kPublishIntra;
  const auto update_of = [&](const Program& of, int i) {
    int update = i;
    while (update-- > 0) {
      if (!is(of, update, Kind::kApply)) continue;
      const auto& touched = of.batches[of.issue(update).operation.batch()];
      if (std::find(touched.begin(), touched.end(), unit_of(of, i)) != touched.end()) break;
    }
    return update;
  };
  const auto published = pick(random, program, [&](const Program& of, int i) {
    return is(of, i, first_stage) && of.issue(i).operation.version == 1 &&
           job.layout.units[unit_of(of, i)].owner_elements[job.layout.slot_of(rank)] > 0 &&
           update_of(of, i) >= 0;
  });
  if (!published) return false;
  move(&program, update_of(program, *published), *published);
  return true;
}

// Changes a reshard that waits for stage 1. It is of a unit whose stage 1 alone was sent: nothing
// else waits before the update changes what stage 1 reads.
bool update_what_travels(Random* random, Programs* programs, void (*apply)(Program*, int)) {
  const auto changes = [](const Program& of, int i, core::UnitIndex unit) {
    if (!is(of, i, Kind::kApply)) return false;
    const auto& touched = of.batches[of.issue(i).operation.batch()];
    return std::find(touched.begin(), touched.end(), unit) != touched.end();
  };
  const Condition waits = [&](const Program& of, int i) {
    if (!is(of, i, Kind::kReshard)) return false;
    const core::UnitIndex unit = unit_of(of, i);
    const int sent = last_before(of, i, Kind::kPublishInter, unit);
    Program without = of;
    apply(&without, i);
    for (int j = i; j < without.num_issues() && without.issue(j).step == of.issue(i).step; ++j) {
      if (changes(without, j, unit)) return sent >= 0 && !is_ordered(without, sent, j);
    }
    return false;
  };
  for (Program& program : *programs) {
    const auto wait = pick(random, program, waits);
    if (!wait) continue;
    apply(&program, *wait);
    return true;
  }
  return false;
}
bool drop_the_wait_for_stage_1(Random* random, const Job&, Programs* programs) {
  return update_what_travels(random, programs, erase);
}
bool drop_stage_1_from_a_wait(Random* random, const Job&, Programs* programs) {
  return update_what_travels(random, programs, [](Program* program, int i) {
    std::erase(program->issues[at(i)].operation.after,
               Dependency{Kind::kPublishInter, unit_of(*program, i)});
  });
}

// At one rank alone, whose batches are its own.
bool drop_one(Random* random, Programs* programs, Kind kind) {
  Program& program = (*programs)[random_rank(random, *programs)];
  const auto index =
      pick(random, program, [&](const Program& of, int i) { return is(of, i, kind); });
  if (!index) return false;
  erase(&program, *index);
  return true;
}
bool never_apply(Random* random, const Job&, Programs* programs) {
  return drop_one(random, programs, Kind::kApply);
}
bool never_finish_update(Random* random, const Job&, Programs* programs) {
  return drop_one(random, programs, Kind::kFinishUpdate);
}

// A publication that does not wait for the batches that complete its unit, issued before compute
// has waited for them.
bool publish_while_updating(Random* random, const Job& job, Programs* programs) {
  const Kind first_stage =
      job.layout.num_replicates > 1 ? Kind::kPublishInter : Kind::kPublishIntra;
  Program& program = (*programs)[random_rank(random, *programs)];
  const auto without_waits = [&](const Program& of, int i) {
    Program without = of;
    without.issues[at(i)].operation.after.clear();
    int first = i;
    while (first > 0 && is(of, first - 1, Kind::kFinishUpdate)) --first;
    move(&without, i, first);
    return std::pair{without, first};
  };
  const auto index = pick(random, program, [&](const Program& of, int i) {
    if (!is(of, i, first_stage) || of.issue(i).operation.after.empty()) return false;
    const Dependency& apply = of.issue(i).operation.after.back();
    const auto [without, place] = without_waits(of, i);
    const int named = last_before(without, place, apply.kind, apply.subject);
    return named >= 0 && !is_ordered(without, named, place);
  });
  if (!index) return false;
  program = without_waits(program, *index).first;
  return true;
}

bool never_exchange(Random* random, const Job&, Programs* programs) {
  return drop_one(random, programs, draw_one_in(random, 2) ? Kind::kGather : Kind::kScatter);
}

// Of two batches, at one rank of a slot alone.
bool exchange_in_another_order(Random* random, const Job&, Programs* programs) {
  Program& program = (*programs)[random_rank(random, *programs)];
  const auto gather = pick(random, program, [](const Program& of, int i) {
    if (!is(of, i, Kind::kGather)) return false;
    for (int j = i + 1; j < of.num_issues() && of.issue(j).step == of.issue(i).step; ++j)
      if (is(of, j, Kind::kGather)) return true;
    return false;
  });
  if (!gather) return false;
  int other = *gather + 1;
  while (!is(program, other, Kind::kGather)) ++other;
  move(&program, *gather, other);
  return true;
}

// What comes next takes the messages for arrived.
bool forget_an_exchange(Random* random, const Job&, Programs* programs) {
  Program& program = (*programs)[random_rank(random, *programs)];
  const auto index = pick(random, program, [](const Program& of, int i) {
    return (is(of, i, Kind::kOrthogonalise) || is(of, i, Kind::kApply)) &&
           of.layout->tensor_parallel > 1;
  });
  if (!index) return false;
  program.issues[at(*index)].operation.after.clear();
  return true;
}

}  // namespace

std::vector<Mutator> update_mutators() {
  return {
      {"publish before the update", "uses the masters too", update_too_late},
      {"publish while a batch is updated", "uses the masters too", publish_while_updating},
      {"never apply an update", "comes out of turn", never_apply},
      {"never wait for an update", "", never_finish_update},
      {"never exchange slices", "comes out of turn", never_exchange},
      {"exchange slices in another order", "", exchange_in_another_order},
      {"take an exchange for done", "uses what the batch moves too", forget_an_exchange},
      {"drop the wait for stage 1", "uses the masters too", drop_the_wait_for_stage_1},
      {"drop stage 1 from a wait", "uses the masters too", drop_stage_1_from_a_wait},
  };
}

}  // namespace dmuon::simulate
