// A list: each unsound change with its finding. It is long because there are so many of them.

#include "tests/simulate/mutations.h"

#include <algorithm>
#include <optional>

#include "tests/simulate/edits.h"

namespace dmuon::simulate {
namespace {

using schedule::Dependency;
using schedule::Kind;
using schedule::Lane;

int tensor_rank(const Job& job, core::Owner rank) {
  return rank.value() % job.layout.tensor_parallel;
}

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

bool drop_wait(Random* random, const Job&, Programs* programs) {
  const core::Owner rank = random_rank(random, *programs);
  Program& program = (*programs)[rank];
  const auto reads = [](const Program& of, int i) {
    return i > 0 && of.issue(i).is(Compute::kForward) &&
           is(of, i - 1, Kind::kAwaitWeights, unit_of(of, i));
  };
  const auto reader = pick(random, program, reads);
  if (!reader) return false;
  Program without = program;
  erase(&without, *reader - 1);
  const core::UnitIndex unit = unit_of(program, *reader);
  const int named = last_before(without, *reader - 1, Kind::kPublishIntra, unit);
  if (named < 0 || is_ordered(without, named, *reader - 1)) return false;
  program = without;
  return true;
}

bool free_weights_early(Random* random, const Job&, Programs* programs) {
  Program& program = (*programs)[random_rank(random, *programs)];
  const auto last_reader = [](const Program& of, int i) {
    const core::UnitIndex unit = unit_of(of, i);
    const int reader = std::max(last_before(of, i, Compute::kForward, unit),
                                last_before(of, i, Compute::kBackward, unit));
    return reader > last_before(of, i, Kind::kReshard, unit) ? reader : -1;
  };
  const auto freed = pick(random, program, [&](const Program& of, int i) {
    return is(of, i, Kind::kReshard) && last_reader(of, i) >= 0;
  });
  if (!freed) return false;
  move(&program, *freed, last_reader(program, *freed));
  return true;
}

bool is_finish(const Program& program, int i) { return is(program, i, Kind::kFinishRouteIntra); }
bool is_route(const Program& program, int i) { return is(program, i, Kind::kRouteIntra); }

bool free_gradients_early(Random* random, const Job&, Programs* programs) {
  return change(random, programs, is_finish, [](Program* program, int i) {
    move(program, i, last_before(*program, i, Kind::kRouteIntra, unit_of(*program, i)));
  });
}

// Before its stage 2 is sent.
bool free_node_mean_early(Random* random, const Job&, Programs* programs) {
  const Condition finishes = [](const Program& program, int i) {
    return is(program, i, Kind::kFinishRouteInter);
  };
  return change(random, programs, finishes, [](Program* program, int i) {
    move(program, i, last_before(*program, i, Kind::kRouteInter, unit_of(*program, i)));
  });
}

bool never_free_node_mean(Random* random, const Job&, Programs* programs) {
  const Condition finishes = [](const Program& program, int i) {
    return is(program, i, Kind::kFinishRouteInter);
  };
  return change(random, programs, finishes, erase);
}

bool never_free_gradients(Random* random, const Job&, Programs* programs) {
  return change(random, programs, is_finish, erase);
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

bool claim_wrong_version(Random* random, const Job& job, Programs* programs) {
  const int more = draw_one_in(random, 2) ? 1 : -1;
  const core::Owner rank = random_rank(random, *programs);
  Program& chosen = (*programs)[rank];
  const auto index = pick(random, chosen, [&](const Program& of, int i) {
    if (!is(of, i, Kind::kPublishIntra)) return false;
    std::int64_t column = 0;
    for (const core::Owner other : programs->indices()) {
      if (tensor_rank(job, other) != tensor_rank(job, rank)) continue;
      if (job.layout.shard_of(other) == job.layout.shard_of(rank))
        column += job.layout.units[unit_of(of, i)].owner_elements[job.layout.slot_of(other)];
    }
    return column > 0;
  });
  if (!index) return false;
  const Program original = chosen;
  const bool everywhere = draw_one_in(random, 2);
  for (Program& program : *programs) {
    if (everywhere || &program == &chosen)
      program.issues[at(counterpart(original, *index, program))].operation.version += more;
  }
  return true;
}

// Every stage 2 since the buffer was free, so that none is left for the wait.
bool drop_stage_2(Random* random, const Job&, Programs* programs) {
  const Condition awaits = [](const Program& program, int i) {
    return is(program, i, Kind::kAwaitWeights);
  };
  return change(random, programs, awaits, [](Program* program, int i) {
    const core::UnitIndex unit = unit_of(*program, i);
    for (int j = i; j-- > 0 && !is(*program, j, Kind::kReshard, unit);) {
      if (is(*program, j, Kind::kPublishIntra, unit)) erase(program, j);
    }
  });
}

// Every stage 1 of a version, or since the buffer was free, so that none is left for stage 2.
bool drop_stage_1(Random* random, const Job& job, Programs* programs) {
  if (job.layout.num_replicates == 1) return false;
  const auto index = pick(random, programs->front(), [&](const Program& program, int i) {
    return is(program, i, Kind::kPublishIntra);
  });
  if (!index) return false;
  const Program original = programs->front();
  const bool everywhere = draw_one_in(random, 2);
  for (Program& program : *programs) {
    if (!everywhere && &program != &programs->front()) break;
    const int i = counterpart(original, *index, program);
    const core::UnitIndex unit = unit_of(program, i);
    const int version = program.issue(i).version();
    for (int j = i; j-- > 0;) {
      if (!job.options.node_copy && is(program, j, Kind::kReshard, unit)) break;
      if (is(program, j, Kind::kPublishInter, unit) && program.issue(j).version() == version)
        erase(&program, j);
    }
  }
  return true;
}

bool drop_route(Random* random, const Job&, Programs* programs) {
  return change(random, programs, is_route, [](Program* program, int i) {
    const core::UnitIndex unit = unit_of(*program, i);
    int end = i;
    while (!is(*program, end, Kind::kFinishRouteIntra, unit)) ++end;
    for (int j = end; j-- > i;) {
      const bool stage =
          is(*program, j, Kind::kRouteIntra, unit) || is(*program, j, Kind::kRouteInter, unit);
      if (stage) erase(program, j);
    }
  });
}

// A unit's last route before a step, on all ranks, and the wait for it.
bool forget_route(Random* random, const Job& job, Programs* programs) {
  const auto num_steps = std::count_if(
      job.events.begin(), job.events.end(),
      [](const TrainingEvent& event) { return event.what == TrainingEvent::What::kStep; });
  Program& any = (*programs)[random_rank(random, *programs)];
  const auto index = pick(random, any, [&](const Program& program, int i) {
    if (!is(program, i, Kind::kRouteIntra)) return false;
    const core::UnitIndex unit = unit_of(program, i);
    const int begin = last_before(program, i, Kind::kFinishRouteIntra, unit);
    const bool contributes = last_before(program, i, Compute::kBackward, unit) > begin;
    if (!contributes || job.layout.units[unit].num_elements() == 0) return false;
    const int step = program.issue(i).step;
    if (step == num_steps) return false;  // no update asks for these gradients
    for (int j = i + 1; j < program.num_issues() && program.issue(j).step == step; ++j) {
      if (is(program, j, Kind::kRouteIntra, unit)) return false;
    }
    return true;
  });
  if (!index) return false;
  const Program original = any;
  for (Program& program : *programs) {
    const int begin = counterpart(original, *index, program);
    const core::UnitIndex unit = unit_of(program, begin);
    int end = begin;
    bool sent = false;
    while (!is(program, end, sent ? Kind::kFinishRouteInter : Kind::kFinishRouteIntra, unit))
      sent |= is(program, ++end, Kind::kRouteInter, unit);
    for (int j = end; j >= begin; --j) {
      for (const Kind kind : {Kind::kRouteIntra, Kind::kRouteInter, Kind::kFinishRouteIntra,
                              Kind::kFinishRouteInter}) {
        if (!is(program, j, kind, unit)) continue;
        erase(&program, j);
        break;
      }
    }
  }
  return true;
}

void repeat(Program* program, int i) {
  const Issue again = program->issue(i);
  program->issues.insert(program->issues.begin() + i, again);
}

bool route_twice(Random* random, const Job&, Programs* programs) {
  return change(random, programs, is_route, repeat);
}

// What the resolver's rule prevents.
bool publish_twice(Random* random, Programs* programs, Kind stage) {
  const Condition publishes = [&](const Program& program, int i) { return is(program, i, stage); };
  return change(random, programs, publishes, repeat);
}
bool send_stage_1_twice(Random* random, const Job&, Programs* programs) {
  return publish_twice(random, programs, Kind::kPublishInter);
}
bool send_stage_2_twice(Random* random, const Job&, Programs* programs) {
  return publish_twice(random, programs, Kind::kPublishIntra);
}

// One after which the buffer is filled again.
bool forget_reshard(Random* random, const Job&, Programs* programs) {
  const Condition frees = [](const Program& program, int i) {
    if (!is(program, i, Kind::kReshard)) return false;
    const core::UnitIndex unit = unit_of(program, i);
    const int filled = last_before(program, i, Kind::kPublishIntra, unit);
    if (filled <= last_before(program, i, Kind::kReshard, unit)) return false;
    for (int j = i + 1; j < program.num_issues(); ++j) {
      if (is(program, j, Kind::kPublishIntra, unit)) return true;
      if (is(program, j, Kind::kReshard, unit)) return false;  // of a stage 1 that nobody awaited
    }
    return false;
  };
  return change(random, programs, frees, erase);
}

// A unit whose stage 1 alone was sent is waited for before the update changes what it reads.
bool update_what_travels(Random* random, const Job&, Programs* programs) {
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
    erase(&without, i);
    for (int j = i; j < without.num_issues() && without.issue(j).step == of.issue(i).step; ++j) {
      if (changes(without, j, unit)) return sent >= 0 && !is_ordered(without, sent, j);
    }
    return false;
  };
  for (Program& program : *programs) {
    const auto wait = pick(random, program, waits);
    if (!wait) continue;
    erase(&program, *wait);
    return true;
  }
  return false;
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

bool compare_alone(Random* random, const Job&, Programs* programs) {
  Program& program = (*programs)[random_rank(random, *programs)];
  if (programs->size() == 1 || program.comparisons.empty()) return false;
  const int last = static_cast<int>(program.comparisons.size()) - 1;
  program.comparisons.erase(program.comparisons.begin() + draw(random, 0, last));
  return true;
}

}  // namespace

const std::vector<Mutator>& mutators() {
  static const std::vector<Mutator> kMutators{
      {"swap two messages of a group", "another member's is of", swap_in_group},
      {"swap messages of two lanes", "is issued where rank 0 issues", swap_across_lanes},
      {"drop a dependency", "may run at the same time", drop_dependency},
      {"drop a wait for weights", "may run at the same time", drop_wait},
      {"free weights early", "reads packed weights that are free", free_weights_early},
      {"free gradients early", "are not being routed", free_gradients_early},
      {"never free gradients", "", never_free_gradients},
      {"free what stage 2 sends early", "is not being sent", free_node_mean_early},
      {"never free what stage 2 sends", "", never_free_node_mean},
      {"take a wrong root", "another member's is of", take_wrong_root},
      {"publish before the update", "uses the masters too", update_too_late},
      {"publish while a batch is updated", "uses the masters too", publish_while_updating},
      {"never apply an update", "comes out of turn", never_apply},
      {"never wait for an update", "", never_finish_update},
      {"never exchange slices", "comes out of turn", never_exchange},
      {"exchange slices in another order", "", exchange_in_another_order},
      {"take an exchange for done", "uses what the batch moves too", forget_an_exchange},
      {"claim a wrong version", "would publish version", claim_wrong_version},
      {"drop stage 1 of a publication", "", drop_stage_1},
      {"drop stage 2 of a publication", "reads packed weights that are free", drop_stage_2},
      {"drop a route", "are not being routed", drop_route},
      {"forget a route", "are not what all ranks put in", forget_route},
      {"route twice", "routes again what is being routed", route_twice},
      {"send stage 1 twice", "sends it twice", send_stage_1_twice},
      {"send stage 2 twice", "fills packed weights that are full", send_stage_2_twice},
      {"forget a reshard", "fills packed weights that are full", forget_reshard},
      {"update what travels", "uses the masters too", update_what_travels},
      {"compare alone", "compares something else than rank 0", compare_alone},
  };
  return kMutators;
}

}  // namespace dmuon::simulate
