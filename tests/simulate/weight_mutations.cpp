#include <algorithm>
#include <cstdint>
#include <optional>

#include "tests/simulate/edits.h"
#include "tests/simulate/mutations.h"

namespace dmuon::simulate {
namespace {

using schedule::Kind;

int tensor_rank(const Job& job, core::Owner rank) {
  return rank.value() % job.layout.tensor_parallel;
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

}  // namespace

std::vector<Mutator> weight_mutators() {
  return {
      {"drop a wait for weights", "may run at the same time", drop_wait},
      {"free weights early", "reads packed weights that are free", free_weights_early},
      {"claim a wrong version", "would publish version", claim_wrong_version},
      {"drop stage 1 of a publication", "", drop_stage_1},
      {"drop stage 2 of a publication", "reads packed weights that are free", drop_stage_2},
      {"send stage 1 twice", "sends it twice", send_stage_1_twice},
      {"send stage 2 twice", "fills packed weights that are full", send_stage_2_twice},
      {"forget a reshard", "fills packed weights that are full", forget_reshard},
  };
}

}  // namespace dmuon::simulate
