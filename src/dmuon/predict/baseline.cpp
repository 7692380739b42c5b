#include "dmuon/predict/baseline.h"

#include <algorithm>
#include <memory>
#include <vector>

#include "dmuon/balance/owner_time.h"
#include "dmuon/plan/packed_units.h"

namespace dmuon::predict {
namespace {

using core::BatchIndex;
using core::UnitIndex;
using schedule::Kind;
using simulate::Compute;

constexpr int kMostMembers = 2;

layout::Mesh simulated(const layout::Mesh& mesh) {
  return {std::min(mesh.num_replicates, kMostMembers), std::min(mesh.num_shards, kMostMembers)};
}

// Lists what a rank issues. FSDP2's root group, unit 0, keeps its weights until its backward.
class Writer {
 public:
  Writer(int num_units, const plan::PlanOptions& options, simulate::Program* program)
      : num_units_(num_units),
        shards_(!options.replicated),
        blocks_(shards_ && options.on_cpu),
        program_(*program) {}

  void forward() {
    begin_event();
    publish(0);
    for (int unit = 0; unit < num_units_; ++unit) {
      if (unit + 1 < num_units_) publish(unit + 1);
      await(unit);
      compute(Compute::kForward, unit);
      if (unit > 0) reshard(unit);
    }
  }

  void backward() {
    begin_event();
    publish(num_units_ - 1);
    for (int unit = num_units_; unit-- > 0;) {
      if (unit > 1) publish(unit - 1);
      if (unit > 0) await(unit);
      compute(Compute::kBackward, unit);
      reshard(unit);
      add({.kind = Kind::kRouteIntra, .subject = UnitIndex(unit)});
      add({.kind = Kind::kRouteInter,
           .subject = UnitIndex(unit),
           .after = {{Kind::kRouteIntra, UnitIndex(unit)}}});
      if (blocks_) finish_route(unit);
    }
    if (blocks_) return;
    for (int unit = num_units_; unit-- > 0;) finish_route(unit);
  }

  void step(Baseline optimizer) {
    begin_event();
    if (optimizer == Baseline::kAdamW) return;
    gather_directions(1);
    for (int unit = 1; unit < num_units_; ++unit) {
      if (unit + 1 < num_units_) gather_directions(unit + 1);
      schedule::Operation update{.kind = Kind::kOrthogonalise, .subject = BatchIndex(unit - 1)};
      if (shards_) update.after = {{Kind::kPublishIntra, UnitIndex(unit)}};
      add(std::move(update));
    }
    add({.kind = Kind::kFinishUpdate,
         .subject = BatchIndex(num_units_ - 2),
         .after = {{Kind::kOrthogonalise, BatchIndex(num_units_ - 2)}}});
  }

 private:
  void begin_event() { ++event_; }
  void add(schedule::Operation operation) {
    program_.issues.push_back({.operation = std::move(operation), .event = event_});
  }
  void publish(int unit) {
    if (!shards_) return;
    add({.kind = Kind::kPublishIntra, .subject = UnitIndex(unit)});
    if (blocks_) await(unit);
  }
  // Waits until those of the unit before the last one have gone, because there is room for two.
  void gather_directions(int unit) {
    if (!shards_) return;
    schedule::Operation gather{.kind = Kind::kPublishIntra, .subject = UnitIndex(unit)};
    if (unit > 2) gather.after = {{Kind::kOrthogonalise, BatchIndex(unit - 3)}};
    add(std::move(gather));
  }
  void finish_route(int unit) {
    add({.kind = Kind::kFinishRouteInter,
         .subject = UnitIndex(unit),
         .after = {{Kind::kRouteInter, UnitIndex(unit)}}});
  }
  void await(int unit) {
    if (!shards_) return;
    add({.kind = Kind::kAwaitWeights,
         .subject = UnitIndex(unit),
         .after = {{Kind::kPublishIntra, UnitIndex(unit)}}});
  }
  void reshard(int unit) {
    if (shards_) add({.kind = Kind::kReshard, .subject = UnitIndex(unit)});
  }
  void compute(Compute what, int unit) {
    program_.issues.push_back(
        {.compute = what, .operation = {.subject = UnitIndex(unit)}, .event = event_});
  }

  int num_units_;
  bool shards_;  // FSDP2 does; else all ranks have all
  bool blocks_;  // compute waits for each message: FSDP2's calls of gloo return when it has come
  simulate::Program& program_;
  int event_ = -1;
};

// The elements of a head that is no embedding. Two FLOPs an element say how large the head is.
double untied_head(const catalog::Training& training) {
  const double head = training.outside_flops / 2;
  return static_cast<double>(training.outside_elements) >= 2 * head ? head : 0;
}

}  // namespace

core::Vector<UnitIndex, double> elements_of(const Setting& setting) {
  core::Vector<UnitIndex, double> all{static_cast<double>(setting.training.outside_elements)};
  for (const auto& parameters : plan::group_by_unit(setting.plan.inventory)) {
    double& elements = all.emplace_back(0.0);
    for (const core::ParameterIndex parameter : parameters)
      elements += plan::elements_in_slot(setting.plan.inventory[parameter], setting.plan.mesh);
  }
  if (setting.plan.options.replicated) {
    const double head = untied_head(setting.training);
    all[UnitIndex(0)] -= head;
    all.back() += head;
  }
  return all;
}

simulate::Programs baseline_programs(const Setting& setting, Baseline optimizer, int num_steps) {
  const auto layout = std::make_shared<schedule::Layout>();
  static_cast<layout::Mesh&>(*layout) = simulated(setting.plan.mesh);
  const core::Vector<UnitIndex, double> elements = elements_of(setting);
  simulate::Program program;
  program.layout = layout;
  for (const double count : elements) {
    // Durations are the unit's, whatever the size of its messages; one of no bytes is not sent.
    schedule::UnitLayout& unit = layout->units.emplace_back();
    unit.owner_elements =
        core::Vector<core::Slot, std::int64_t>(layout->num_slots(), count > 0 ? 1 : 0);
  }
  for (int unit = 1; unit < elements.size(); ++unit) program.batches.push_back({UnitIndex(unit)});
  Writer writer(elements.size(), setting.plan.options, &program);
  for (int step = 0; step < num_steps; ++step) {
    writer.forward();
    writer.backward();
    writer.step(optimizer);
  }
  return simulate::Programs(layout->num_slots(), program);
}

BaselineDurations::BaselineDurations(const Setting& setting)
    : simulated_(simulated(setting.plan.mesh)) {
  const Rates rates(setting);
  const plan::Plan& plan = setting.plan;
  const layout::Mesh& mesh = plan.mesh;
  const core::Vector<UnitIndex, double> elements = elements_of(setting);
  const auto forward = forward_us(setting, rates);
  const auto ranks = static_cast<std::size_t>(mesh.num_shards);
  const auto nodes = static_cast<std::size_t>(mesh.num_replicates);
  for (const UnitIndex unit : elements.indices()) {
    OfUnit& us = units_.emplace_back();
    us.forward = forward[unit];
    const double shard = elements[unit] / (mesh.num_shards * mesh.tensor_parallel);
    us.gather = rates.intra_us(std::vector(ranks, shard * plan.options.weight_bytes), true);
    us.scatter = times_routed(plan, layout::Axis::kRow) *
                 rates.intra_us(std::vector(ranks, shard * plan.options.gradient_bytes), false);
    // An all-reduce: each node sums a part, and sends it to the others.
    const int sharing = setting.network.per_device ? 1 : mesh.tensor_parallel;
    const double part = shard * sharing * plan.options.gradient_bytes / mesh.num_replicates;
    us.sum = times_routed(plan, layout::Axis::kColumn) *
             rates.inter_us(std::vector(ranks, std::vector(nodes, part)), false).front();
  }
  // All matrices of a shape in the cheapest batches, as an owner of all runs them. Costs include
  // momentum and update.
  const plan::ShapeGroups groups = plan::group_by_shape(plan.inventory);
  core::PerShape<double> each_us;
  for (const balance::CostedShape& shape :
       plan::instance_of(groups, plan.costs, 1, plan.options.rule).shapes)
    each_us.push_back(static_cast<double>(balance::OwnerTime(shape).of_all()) / 1e3 /
                      shape.num_matrices);
  const auto unit_of = plan::units_of(plan.inventory);
  for (const core::ParameterIndex parameter : plan.inventory.indices())
    units_[UnitIndex(unit_of[parameter].value() + 1)].newton_schulz +=
        each_us[groups.shape_of[parameter]];
}

double BaselineDurations::work_us(core::Owner, const simulate::Issue& issue) {
  if (issue.is(Compute::kForward)) return units_[issue.unit()].forward;
  if (issue.is(Compute::kBackward)) return 2 * units_[issue.unit()].forward;
  if (!issue.is(Kind::kOrthogonalise)) return 0;
  return units_[UnitIndex(issue.operation.batch().value() + 1)].newton_schulz;
}

double BaselineDurations::message_us(core::Owner, const simulate::Issue& issue,
                                     const schedule::Message& message) {
  const OfUnit& us = units_[issue.unit()];
  const double whole = issue.is(Kind::kPublishIntra) ? us.gather
                       : issue.is(Kind::kRouteIntra) ? us.scatter
                                                     : us.sum;
  return whole / simulated_.size(message.axis);
}

}  // namespace dmuon::predict
