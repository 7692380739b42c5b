#include "tests/simulate/mutations.h"

#include <algorithm>
#include <optional>

#include "tests/simulate/edits.h"

namespace dmuon::simulate {
namespace {

using schedule::Dependency;
using schedule::Kind;
using schedule::Lane;

bool has_messages(const Program& program, int index, int slot) {
  return !schedule::messages_of(issue(program, index).operation, *program.layout, slot).empty();
}

// Two messages of one group, one right after the other; nothing between them frees what they fill.
bool swap_in_group(Random* random, const Job& job, Programs* programs) {
  const int slot = random_slot(random, *programs);
  Program& program = (*programs)[at(slot)];
  const std::vector<bool> does = active(program, job);
  const auto lane = [&](int i) { return schedule::lane_of(issue(program, i).operation.kind); };
  const auto next = [&](int first) {
    const schedule::Operation& one = issue(program, first).operation;
    for (int i = first + 1; i < num_issues(program); ++i) {
      if (is(program, i, Kind::kReshard)) return -1;
      if (!does[at(i)] || lane(i) != lane(first) || !has_messages(program, i, slot)) continue;
      const schedule::Operation& other = issue(program, i).operation;
      return other.kind == one.kind && other.unit == one.unit ? -1 : i;
    }
    return -1;
  };
  const auto first = pick(random, program, [&](const Program& of, int i) {
    return does[at(i)] && has_messages(of, i, slot) && next(i) >= 0;
  });
  if (!first) return false;
  std::swap(program.issues[at(*first)], program.issues[at(next(*first))]);
  return true;
}

bool swap_across_lanes(Random* random, const Job& job, Programs* programs) {
  const int slot = random_slot(random, *programs);
  Program& program = (*programs)[at(slot)];
  const std::vector<bool> does = active(program, job);
  const auto pick_from = [&](Lane lane) {
    return pick(random, program, [&](const Program& of, int i) {
      return does[at(i)] && schedule::lane_of(issue(of, i).operation.kind) == lane &&
             has_messages(of, i, slot);
    });
  };
  const auto intra = pick_from(Lane::kIntra);
  const auto inter = pick_from(Lane::kInter);
  if (!intra || !inter) return false;
  std::swap(program.issues[at(*intra)], program.issues[at(*inter)]);
  return true;
}

// One that is not implied by the lanes or by other dependencies.
bool drop_dependency(Random* random, const Job& job, Programs* programs) {
  const Program original = programs->front();
  const std::vector<bool> does = active(original, job);
  const auto index = pick(random, original, [&](const Program& program, int i) {
    return does[at(i)] && !issue(program, i).operation.after.empty();
  });
  if (!index) return false;
  const Dependency& dependency = issue(original, *index).operation.after.front();
  const int named = named_by(original, does, *index, dependency);
  Program without = original;
  without.issues[at(*index)].operation.after.clear();
  if (named < 0 || is_ordered(without, does, named, *index)) return false;
  const bool everywhere = draw_one_in(random, 2);
  for (Program& program : *programs) {
    if (!everywhere && &program != &programs->front()) break;
    program.issues[at(counterpart(original, *index, program))].operation.after.clear();
  }
  return true;
}

bool drop_wait(Random* random, const Job& job, Programs* programs) {
  const int slot = random_slot(random, *programs);
  Program& program = (*programs)[at(slot)];
  const auto reads = [](const Program& of, int i) {
    return i > 0 && is(of, i, Kind::kForward) && is(of, i - 1, Kind::kAwaitWeights, unit_of(of, i));
  };
  const auto reader = pick(random, program, reads);
  if (!reader) return false;
  Program without = program;
  erase(&without, *reader - 1);
  const std::vector<bool> does = active(without, job);
  const Dependency filled{Kind::kPublishIntra, unit_of(program, *reader)};
  const int named = named_by(without, does, *reader - 1, filled);
  if (named < 0 || is_ordered(without, does, named, *reader - 1)) return false;
  program = without;
  return true;
}

bool free_weights_early(Random* random, const Job&, Programs* programs) {
  Program& program = (*programs)[at(random_slot(random, *programs))];
  const auto last_reader = [](const Program& of, int i) {
    const int unit = unit_of(of, i);
    const int reader = std::max(last_before(of, i, Kind::kForward, unit),
                                last_before(of, i, Kind::kBackward, unit));
    return reader > last_before(of, i, Kind::kReshard, unit) ? reader : -1;
  };
  const auto freed = pick(random, program, [&](const Program& of, int i) {
    return is(of, i, Kind::kReshard) && last_reader(of, i) >= 0;
  });
  if (!freed) return false;
  move(&program, *freed, last_reader(program, *freed));
  return true;
}

bool is_finish(const Program& program, int i) { return is(program, i, Kind::kFinishRoute); }
bool is_route(const Program& program, int i) { return is(program, i, Kind::kRouteIntra); }

bool free_gradients_early(Random* random, const Job&, Programs* programs) {
  return change(random, programs, is_finish, [](Program* program, int i) {
    move(program, i, last_before(*program, i, Kind::kRouteIntra, unit_of(*program, i)));
  });
}

bool never_free_gradients(Random* random, const Job&, Programs* programs) {
  return change(random, programs, is_finish, erase);
}

bool take_wrong_root(Random* random, const Job& job, Programs* programs) {
  const int slot = random_slot(random, *programs);
  Program& program = (*programs)[at(slot)];
  const std::vector<bool> does = active(program, job);
  const bool in_row = job.layout.num_shards > 1 && draw_one_in(random, 2);
  const auto index = pick(random, program, [&](const Program& of, int i) {
    const Kind kind = in_row ? Kind::kPublishIntra : Kind::kPublishInter;
    return does[at(i)] && is(of, i, kind) && has_messages(of, i, slot);
  });
  if (!index) return false;
  schedule::Layout layout = job.layout;
  auto& elements = layout.units[at(unit_of(program, *index))].owner_elements;
  const int shards = layout.num_shards;
  // An owner's part goes to its neighbour in the row, which has one too (so that no message comes
  // into being of which no other rank knows), or in this rank's column.
  for (int owner = in_row ? 0 : slot % shards; owner < layout.num_slots();
       owner += in_row ? 1 : shards) {
    const int neighbour = in_row ? owner / shards * shards + (owner + 1) % shards
                                 : (owner + shards) % layout.num_slots();
    if (elements[at(owner)] == 0 || (in_row && elements[at(neighbour)] == 0)) continue;
    elements[at(neighbour)] += elements[at(owner)];
    elements[at(owner)] = 0;
    program.layout = std::make_shared<const schedule::Layout>(layout);
    return true;
  }
  return false;
}

bool update_too_late(Random* random, const Job& job, Programs* programs) {
  const int slot = random_slot(random, *programs);
  Program& program = (*programs)[at(slot)];
  const std::vector<bool> does = active(program, job);
  const Kind first_stage =
      job.layout.num_replicates > 1 ? Kind::kPublishInter : Kind::kPublishIntra;
  const auto update_of = [&](const Program& of, int i) {
    int update = i;
    while (update-- > 0) {
      if (!is(of, update, Kind::kUpdate)) continue;
      const std::vector<int>& touched = of.batches[at(unit_of(of, update))];
      if (std::find(touched.begin(), touched.end(), unit_of(of, i)) != touched.end()) break;
    }
    return update;
  };
  const auto published = pick(random, program, [&](const Program& of, int i) {
    return does[at(i)] && is(of, i, first_stage) && issue(of, i).operation.version == 1 &&
           job.layout.units[at(unit_of(of, i))].owner_elements[at(slot)] > 0 &&
           update_of(of, i) >= 0;
  });
  if (!published) return false;
  move(&program, update_of(program, *published), *published);
  return true;
}

bool claim_wrong_version(Random* random, const Job& job, Programs* programs) {
  const int more = draw_one_in(random, 2) ? 1 : -1;
  const int slot = random_slot(random, *programs);
  Program& chosen = (*programs)[at(slot)];
  const std::vector<bool> does = active(chosen, job);
  const auto index = pick(random, chosen, [&](const Program& of, int i) {
    const schedule::UnitLayout& unit =
        job.layout
            .units[at(std::min(unit_of(of, i), static_cast<int>(job.layout.units.size()) - 1))];
    std::int64_t column = 0;
    for (int other = slot % job.layout.num_shards; other < job.layout.num_slots();
         other += job.layout.num_shards)
      column += unit.owner_elements[at(other)];
    return does[at(i)] && is(of, i, Kind::kPublishIntra) && column > 0;
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
    const int unit = unit_of(*program, i);
    for (int j = i; j-- > 0 && !is(*program, j, Kind::kReshard, unit);) {
      if (is(*program, j, Kind::kPublishIntra, unit)) erase(program, j);
    }
  });
}

// Every stage 1 of a version, or since the buffer was free, so that none is left for stage 2.
bool drop_stage_1(Random* random, const Job& job, Programs* programs) {
  if (job.layout.num_replicates == 1) return false;
  const std::vector<bool> does = active(programs->front(), job);
  const auto index = pick(random, programs->front(), [&](const Program& program, int i) {
    return does[at(i)] && is(program, i, Kind::kPublishIntra);
  });
  if (!index) return false;
  const Program original = programs->front();
  const bool everywhere = draw_one_in(random, 2);
  for (Program& program : *programs) {
    if (!everywhere && &program != &programs->front()) break;
    const int i = counterpart(original, *index, program);
    const int unit = unit_of(program, i);
    const int version = issue(program, i).version();
    for (int j = i; j-- > 0;) {
      if (!job.options.node_copy && is(program, j, Kind::kReshard, unit)) break;
      if (is(program, j, Kind::kPublishInter, unit) && issue(program, j).version() == version)
        erase(&program, j);
    }
  }
  return true;
}

bool drop_route(Random* random, const Job&, Programs* programs) {
  return change(random, programs, is_route, [](Program* program, int i) {
    const int unit = unit_of(*program, i);
    int end = i;
    while (!is(*program, end, Kind::kFinishRoute, unit)) ++end;
    for (int j = end; j-- > i;) {
      const bool stage =
          is(*program, j, Kind::kRouteIntra, unit) || is(*program, j, Kind::kRouteInter, unit);
      if (stage) erase(program, j);
    }
  });
}

// A unit's last route before a step, on all ranks, and the wait for it.
bool forget_route(Random* random, const Job& job, Programs* programs) {
  Program& any = (*programs)[at(random_slot(random, *programs))];
  const auto index = pick(random, any, [&](const Program& program, int i) {
    if (!is(program, i, Kind::kRouteIntra)) return false;
    const int unit = unit_of(program, i);
    const int begin = last_before(program, i, Kind::kFinishRoute, unit);
    const bool contributes = last_before(program, i, Kind::kBackward, unit) > begin;
    if (!contributes || job.layout.units[at(unit)].num_elements() == 0) return false;
    const int step = issue(program, i).step;
    for (int j = i + 1; j < num_issues(program) && issue(program, j).step == step; ++j) {
      if (is(program, j, Kind::kRouteIntra, unit)) return false;
    }
    return true;
  });
  if (!index) return false;
  const Program original = any;
  for (Program& program : *programs) {
    const int begin = counterpart(original, *index, program);
    const int unit = unit_of(program, begin);
    int end = begin;
    while (!is(program, end, Kind::kFinishRoute, unit)) ++end;
    for (int j = end; j >= begin; --j) {
      if (is(program, j, Kind::kRouteIntra, unit) || is(program, j, Kind::kRouteInter, unit) ||
          j == end)
        erase(&program, j);
    }
  }
  return true;
}

bool route_twice(Random* random, const Job&, Programs* programs) {
  return change(random, programs, is_route, [](Program* program, int i) {
    const Issue again = issue(*program, i);
    program->issues.insert(program->issues.begin() + i, again);
  });
}

}  // namespace

const std::vector<Mutator>& mutators() {
  static const std::vector<Mutator> kMutators{
      {"swap two messages of a group", "another member's is of", swap_in_group},
      {"swap messages of two lanes", "is issued where slot 0 issues", swap_across_lanes},
      {"drop a dependency", "may run at the same time", drop_dependency},
      {"drop a wait for weights", "may run at the same time", drop_wait},
      {"free weights early", "reads packed weights that are free", free_weights_early},
      {"free gradients early", "are not being routed", free_gradients_early},
      {"never free gradients", "", never_free_gradients},
      {"take a wrong root", "another member's is of", take_wrong_root},
      {"publish before the update", "uses the masters too", update_too_late},
      {"claim a wrong version", "would publish version", claim_wrong_version},
      {"drop stage 1 of a publication", "", drop_stage_1},
      {"drop stage 2 of a publication", "reads packed weights that are free", drop_stage_2},
      {"drop a route", "are not being routed", drop_route},
      {"forget a route", "are not what all ranks put in", forget_route},
      {"route twice", "routes again what is being routed", route_twice},
  };
  return kMutators;
}

}  // namespace dmuon::simulate
