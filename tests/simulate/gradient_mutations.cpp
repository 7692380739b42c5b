#include <algorithm>

#include "tests/simulate/edits.h"
#include "tests/simulate/mutations.h"

namespace dmuon::simulate {
namespace {

using schedule::Kind;

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

bool route_twice(Random* random, const Job&, Programs* programs) {
  return change(random, programs, is_route, repeat);
}

}  // namespace

std::vector<Mutator> gradient_mutators() {
  return {
      {"free gradients early", "are not being routed", free_gradients_early},
      {"never free gradients", "", never_free_gradients},
      {"free what stage 2 sends early", "is not being sent", free_node_mean_early},
      {"never free what stage 2 sends", "", never_free_node_mean},
      {"drop a route", "are not being routed", drop_route},
      {"forget a route", "are not what all ranks put in", forget_route},
      {"route twice", "routes again what is being routed", route_twice},
  };
}

}  // namespace dmuon::simulate
