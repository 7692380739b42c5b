#include "dmuon/predict/prediction.h"

#include <algorithm>
#include <array>
#include <functional>

#include "dmuon/core/error.h"
#include "dmuon/plan/packed_units.h"
#include "dmuon/plan/state_bytes.h"
#include "dmuon/predict/baseline.h"
#include "dmuon/predict/owned.h"

namespace dmuon::predict {
namespace {

using core::Owner;
using core::UnitIndex;
using schedule::Kind;
using schedule::Lane;

// The first step is traced, the one after the next is measured, the last one follows it.
constexpr int kNumSteps = 4;
constexpr int kMeasured = 2;

constexpr double kMs = 1e-3;  // in microseconds
// Bytes of an element: fp32 parameter, gradient and two moments.
constexpr double kAdamwState = 16;

// The ranks of a slot count together.
double num_elements(const plan::Plan& plan) {
  double sum = 0;
  for (const plan::Parameter& parameter : plan.inventory)
    sum += plan::elements_in_slot(parameter, plan.mesh);
  return sum;
}

// The ranks among which AdamW's parameters and their state are sharded.
double num_sharing(const plan::Plan& plan) {
  return static_cast<double>(plan.options.replicated ? 1 : plan.mesh.num_shards) *
         plan.mesh.tensor_parallel;
}

// The fullest rank's bytes of what the plan counts, of parameters outside of Muon, and of their
// whole weights and gradients: FSDP2's root group keeps its weights gathered during a step, and has
// its gradients whole when all others have gone. Beside replicated weights, which stay, the message
// of these gradients is a copy of all.
double owned_memory(const Setting& setting, double outside) {
  const plan::Plan& plan = setting.plan;
  const double whole = outside / plan.mesh.tensor_parallel;
  double last = whole * plan.options.gradient_bytes;
  double weights = whole * plan.options.weight_bytes;
  if (plan.options.replicated) {
    last += num_elements(plan) * plan.options.weight_bytes / plan.mesh.tensor_parallel;
    weights = 0;  // AdamW's are in use
  }
  double most = 0;
  for (const plan::Memory& memory : plan.memory) {
    const auto moves = static_cast<double>(std::max(memory.buffers, memory.update));
    most = std::max(most,
                    static_cast<double>(memory.state + memory.node_copy) + std::max(moves, last));
  }
  return most + kAdamwState * outside / num_sharing(plan) + weights;
}

// Likewise under FSDP2, of which two units' weights and one's gradients are whole at the peak. The
// directions of two units, which Muon-AG gathers in its step, take less.
// DistributedDataParallel's messages are copies of all gradients, which it keeps.
double baseline_memory(const Setting& setting, const core::Vector<UnitIndex, double>& elements,
                       bool muon) {
  const plan::Plan& plan = setting.plan;
  const double ranks = num_sharing(plan);
  const double weights = plan.options.weight_bytes;
  const double gradients = plan.options.gradient_bytes;
  const auto outside = static_cast<double>(setting.training.outside_elements);
  double largest = 0;
  for (const UnitIndex unit : elements.indices())
    if (unit != kOutside) largest = std::max(largest, elements[unit]);
  const double moves = std::max(largest * (2 * weights + gradients), outside * gradients);
  const double matrices = num_elements(plan);
  const auto muon_state =
      static_cast<double>(plan::state_bytes({1, 1, 1}, plan::rule_names().front()));
  const double state = kAdamwState * outside + (muon ? muon_state : kAdamwState) * matrices;
  if (plan.options.replicated) return (state + gradients * (outside + matrices)) / ranks;
  return state / ranks + (moves + outside * weights) / plan.mesh.tensor_parallel;
}

Span named(const simulate::SimulatedSpan& span, const simulate::Issue& issue) {
  const bool forward = issue.is(simulate::Compute::kForward);
  return {.lane = schedule::name_of(span.lane),
          .kind = !issue.compute ? schedule::name_of(issue.operation.kind)
                  : forward      ? "forward"
                                 : "backward",
          .unit = issue.is_on_batch() ? -1 : issue.unit().value(),
          .batch = issue.is_on_batch() ? issue.operation.batch().value() : -1,
          .issued_ms = kMs * span.issued_us,
          .start_ms = kMs * span.start_us,
          .end_ms = kMs * span.end_us};
}

// Means over ranks; what is held up counts on the rank where that is most.
Prediction sum_up(const simulate::Programs& programs, const simulate::Execution& execution,
                  const Surroundings& around) {
  core::invariant(execution.violations.empty(), "predict: ", core::joined(execution.violations));
  Prediction result;
  const double share = kMs / programs.size();
  double update_held_up_ms = 0;
  double messages_us = 0;
  double awaited_us = 0;
  core::PerOwner<RankStep> steps;
  for (const Owner rank : programs.indices())
    steps.push_back(measure(programs[rank], execution.timeline[rank], kMeasured, around,
                            critical_causes(programs, execution, rank)));
  for (const RankStep& step : steps) {
    double update_us = 0;
    result.optimizer_ms -= share * step.routes_in_step_us;
    for (const Phase phase : kPhases) {
      result.phases_ms[phase] += share * step.elapsed_us[phase];
      update_us += step.busy_us[phase][Lane::kUpdate];
      for (const Cause cause : kCauses)
        result.waits_ms[phase][cause] += share * step.waits_us[phase][cause];
      for (const Lane lane : core::EachOf<Lane, schedule::kNumLanes>{})
        result.busy_ms[lane] += share * step.busy_us[phase][lane];
    }
    const HeldUp held_up = held_up_in(step, around.on_cpu);
    messages_us += step.messages_us;
    awaited_us += std::max(0.0, step.awaited_us - held_up.spared_us);
    result.beside_ms = std::max(result.beside_ms, kMs * held_up.all_us);
    update_held_up_ms = std::max(update_held_up_ms, kMs * held_up.update_us);
    result.update_ms = std::max(result.update_ms, kMs * update_us);
  }
  if (messages_us > 0) result.hidden = 1 - awaited_us / messages_us;
  result.optimizer_ms += result.phases_ms[Phase::kStep] + update_held_up_ms;
  for (const Phase phase : {Phase::kForward, Phase::kBackward})
    result.optimizer_ms += result.waits_ms[phase][Cause::kUpdate];
  const simulate::Program& first = programs.front();
  for (const auto& span : spans_of(first, execution.timeline.front(), kMeasured))
    result.spans.push_back(named(span, first.issue(span.issue)));
  const PerPhase<double>& elapsed_us = steps.front().elapsed_us;
  result.begins_ms[Phase::kBackward] = kMs * elapsed_us[Phase::kForward];
  result.begins_ms[Phase::kStep] =
      result.begins_ms[Phase::kBackward] + kMs * elapsed_us[Phase::kBackward];
  return result;
}

// Calls `count` with each issue of the measured step that sends messages.
template <typename Count>
void for_each_sent(const simulate::Program& program, const Count& count) {
  for (const simulate::Issue& issue : program.issues) {
    if (!issue.compute && issue.carries_messages() && issue.event / kNumPhases == kMeasured)
      count(issue);
  }
}

// The bytes that a member receives of a publication, or sends of a route.
double through_member(const std::vector<schedule::Message>& messages, int member) {
  double bytes = 0;
  for (const schedule::Message& message : messages)
    bytes += message.root == member ? 0 : static_cast<double>(message.bytes);
  return bytes;
}

void count_bytes(const simulate::Programs& programs, const plan::Plan& plan, Prediction* result) {
  const schedule::Layout& layout = *programs.front().layout;
  const core::PerOwner<double> exchanged = exchanged_bytes(plan);
  for (const core::Slot slot : layout.slots()) {
    double intra = 0;
    double inter = 0;
    for_each_sent(programs[Owner(slot.value() * layout.tensor_parallel)], [&](const auto& issue) {
      const layout::Axis axis = schedule::axis_of(issue.lane());
      (axis == layout::Axis::kRow ? intra : inter) +=
          times_sent(plan, issue) *
          through_member(schedule::messages_of(issue.operation, layout, slot),
                         layout.member_of(slot, axis)) /
          layout.tensor_parallel;
    });
    for (int rank = 0; rank < layout.tensor_parallel; ++rank) {
      const Owner owner(slot.value() * layout.tensor_parallel + rank);
      result->intra_bytes = std::max(result->intra_bytes, intra + exchanged[owner]);
    }
    result->inter_bytes = std::max(result->inter_bytes, inter);
  }
}

// As above, of a baseline. Under FSDP2 a member receives the others' shards, or sends them.
void count_bytes(const simulate::Program& program, const Setting& setting,
                 const core::Vector<UnitIndex, double>& elements, Prediction* result) {
  const layout::Mesh& mesh = setting.plan.mesh;
  const double weight_bytes = setting.plan.options.weight_bytes;
  const double gradient_bytes = setting.plan.options.gradient_bytes;
  const double ranks = static_cast<double>(mesh.num_shards) * mesh.tensor_parallel;
  const double others = (mesh.num_shards - 1) / ranks;
  const double in_row = times_routed(setting.plan, layout::Axis::kRow);
  const double in_column = times_routed(setting.plan, layout::Axis::kColumn);
  for_each_sent(program, [&](const simulate::Issue& issue) {
    const double count = elements[issue.unit()];
    if (issue.is(Kind::kPublishIntra)) result->intra_bytes += count * others * weight_bytes;
    if (issue.is(Kind::kRouteIntra))
      result->intra_bytes += in_row * count * others * gradient_bytes;
    if (issue.is(Kind::kRouteInter)) {  // an all-reduce: parts to those who add them, and back
      result->inter_bytes += in_column * count / ranks * gradient_bytes *
                             (mesh.num_replicates - 1) / mesh.num_replicates;
    }
  });
}

Prediction predict_owned(const Setting& setting) {
  const plan::Plan& plan = setting.plan;
  const simulate::Job job = owned_job(setting, kNumSteps);
  OwnedDurations durations(setting, job);
  const simulate::Programs programs = owned_programs(setting, job);
  const Surroundings around{.on_cpu = plan.options.on_cpu,
                            .blocked_us = [&](const auto& of) { return durations.host_sum_us(of); },
                            .fsdp2_unit = kOutside};
  Prediction result = sum_up(programs, simulate::execute(programs, durations), around);
  count_bytes(programs, plan, &result);
  const auto outside = static_cast<double>(setting.training.outside_elements);
  result.adamw_ms = kMs * Rates(setting).adamw_us(outside / num_sharing(plan));
  result.memory_bytes = owned_memory(setting, outside);
  result.host_ms = job.layout.units.size() *
                   (plan.options.replicated ? setting.replicated_host_ms : setting.owned_host_ms);
  return result;
}

Prediction predict_baseline(const Setting& setting, Baseline optimizer) {
  const plan::Plan& plan = setting.plan;
  const simulate::Programs programs = baseline_programs(setting, optimizer, kNumSteps);
  BaselineDurations durations(setting);
  Prediction result =
      sum_up(programs, simulate::execute(programs, durations), {.on_cpu = plan.options.on_cpu});

  const double matrices = num_elements(plan);
  const auto outside = static_cast<double>(setting.training.outside_elements);
  const bool muon = optimizer == Baseline::kMuonAg;
  // The costs of Muon-AG's updates contain their momentum.
  result.adamw_ms =
      kMs * Rates(setting).adamw_us((outside + (muon ? 0 : matrices)) / num_sharing(plan));
  const core::Vector<UnitIndex, double> elements = elements_of(setting);
  count_bytes(programs.front(), setting, elements, &result);
  result.memory_bytes = baseline_memory(setting, elements, muon);
  if (!plan.options.replicated)
    result.host_ms = setting.sharded_host_ms * programs.front().layout->units.size();
  return result;
}

// Appends what the lanes do not have. Spans are then as long as the step, unless an accelerator's
// host decides how long that is.
void append_rest(Prediction* result, bool on_cpu) {
  double end_ms = 0;
  for (const Span& span : result->spans) end_ms = std::max(end_ms, span.end_ms);
  const auto append = [&](const char* kind, double ms) {
    if (ms <= 0) return;
    result->spans.push_back({.lane = schedule::name_of(Lane::kCompute),
                             .kind = kind,
                             .unit = -1,
                             .issued_ms = end_ms,
                             .start_ms = end_ms,
                             .end_ms = end_ms + ms});
    end_ms += ms;
  };
  append("held up", result->beside_ms);
  append("adamw", result->adamw_ms);
  if (on_cpu) append("host", result->host_ms);
}

}  // namespace

const char* name_of(Contender contender) {
  constexpr std::array kNames{"AdamW", "dmuon", "Muon-AG"};
  return kNames.at(static_cast<std::size_t>(contender));
}

Prediction predict(const Setting& setting, Contender contender) {
  validate(setting);
  Prediction result = contender == Contender::kDmuon ? predict_owned(setting)
                      : contender == Contender::kMuonAg
                          ? predict_baseline(setting, Baseline::kMuonAg)
                          : predict_baseline(setting, Baseline::kAdamW);
  for (const Phase phase : kPhases) result.step_ms += result.phases_ms[phase];
  result.optimizer_ms += result.adamw_ms;
  result.step_ms += result.adamw_ms + result.beside_ms;
  const bool on_cpu = setting.plan.options.on_cpu;
  append_rest(&result, on_cpu);
  // A CPU runs hooks between modules; the host of an accelerator runs ahead of it.
  result.step_ms =
      on_cpu ? result.step_ms + result.host_ms : std::max(result.step_ms, result.host_ms);
  return result;
}

}  // namespace dmuon::predict
