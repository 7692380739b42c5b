#include "dmuon/predict/owned.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <utility>

#include "dmuon/plan/packed_units.h"

namespace dmuon::predict {
namespace {

using core::Owner;
using core::Slot;
using core::UnitIndex;
using schedule::Kind;
using schedule::Moment;
using simulate::TrainingEvent;

// The units of each slot's batches. kOutside has none: AdamW updates it, so that its weights wait
// for nothing on the update lane.
core::Vector<Slot, schedule::Batches> units_of_batches(const Setting& setting) {
  const core::Vector<core::ParameterIndex, UnitIndex> units =
      plan::units_of(setting.plan.inventory);
  core::Vector<Slot, schedule::Batches> all;
  for (const auto& of_slot : plan::batches_by_slot(setting.plan)) {
    schedule::Batches& batches = all.emplace_back();
    for (const std::vector<core::ParameterIndex>& parameters : of_slot) {
      std::vector<UnitIndex>& batch = batches.emplace_back();
      for (const core::ParameterIndex parameter : parameters)
        batch.emplace_back(units[parameter].value() + 1);
    }
  }
  return all;
}

int element_size(const schedule::UnitLayout& unit, bool publishes) {
  return publishes ? unit.weight_size : unit.gradient_size;
}

bool sums_by_host(const Setting& setting) {
  return setting.plan.options.on_cpu && setting.plan.mesh.num_replicates > 1 &&
         setting.training.outside_elements > 0 && !setting.plan.options.replicated;
}

}  // namespace

double times_sent(const plan::Plan& plan, const simulate::Issue& issue) {
  if (issue.unit() != kOutside) return 1;
  if (issue.is(Kind::kRouteInter)) return times_routed(plan, layout::Axis::kColumn);
  if (issue.is(Kind::kRouteIntra)) return times_routed(plan, layout::Axis::kRow);
  const bool in_backward = issue.event % kNumPhases == static_cast<int>(Phase::kBackward);
  return issue.is(Kind::kPublishIntra) && !in_backward && !plan.options.replicated ? 1 : 0;
}

simulate::Job owned_job(const Setting& setting, int num_steps) {
  const plan::Plan& plan = setting.plan;
  schedule::Layout layout =
      plan::pack_units(plan.inventory, plan.mesh, plan.owner, plan.options).layout;
  schedule::UnitLayout outside{.name = "outside of Muon",
                               .weight_size = plan.options.weight_bytes,
                               .gradient_size = plan.options.gradient_bytes};
  const int num_slots = plan.mesh.num_slots();
  outside.owner_elements = core::Vector<Slot, std::int64_t>(
      num_slots, (setting.training.outside_elements + num_slots - 1) / num_slots);
  core::Vector<UnitIndex, schedule::UnitLayout> units{std::move(outside)};
  for (schedule::UnitLayout& unit : layout.units) units.push_back(std::move(unit));
  layout.units = std::move(units);

  const schedule::StepOptions& options = plan.options;
  simulate::Job job{.layout = std::move(layout),
                    .options = options,
                    .forward = {},
                    .backward = {},
                    .evaluation = {},
                    .batches = units_of_batches(setting),
                    .events = {},
                    .skips = {}};
  for (const UnitIndex unit : job.layout.units.indices()) {
    job.forward.push_back({Moment::kBeforeUse, unit});
    job.forward.push_back({Moment::kAfterForward, unit});
  }
  for (int i = job.layout.units.size(); i-- > 0;) {
    job.backward.push_back({Moment::kBeforeUse, UnitIndex(i)});
    job.backward.push_back({Moment::kAfterBackward, UnitIndex(i)});
  }
  using What = TrainingEvent::What;
  for (int step = 0; step < num_steps; ++step) {
    for (const What what : {What::kTrainForward, What::kBackward, What::kStep})
      job.events.push_back({what});
  }
  return job;
}

simulate::Programs owned_programs(const Setting& setting, const simulate::Job& job) {
  simulate::Programs programs = simulate::unroll(job);
  if (setting.training.outside_elements == 0) return programs;
  const bool has_nodes = setting.plan.mesh.num_replicates > 1;
  const Kind last = has_nodes ? Kind::kRouteInter : Kind::kRouteIntra;
  const schedule::Operation wait{
      .kind = has_nodes ? Kind::kFinishRouteInter : Kind::kFinishRouteIntra,
      .subject = kOutside,
      .after = {{last, kOutside}}};
  for (simulate::Program& program : programs) {
    std::vector<simulate::Issue> issues;
    for (simulate::Issue& issue : program.issues) {
      const bool routes = issue.is(last) && issue.unit() == kOutside;
      issues.push_back(std::move(issue));
      if (!routes) continue;
      issues.push_back(
          {.operation = wait, .event = issues.back().event, .step = issues.back().step});
    }
    program.issues = std::move(issues);
  }
  return programs;
}

std::vector<simulate::Issue> owned_step(const Setting& setting, Owner rank) {
  constexpr int kSteps = 3;
  const simulate::Programs programs = simulate::unroll(owned_job(setting, kSteps));
  std::vector<simulate::Issue> step;
  for (const simulate::Issue& issue : programs.at(rank).issues) {
    if (issue.step == 1) step.push_back(issue);
  }
  return step;
}

core::PerOwner<double> exchanged_bytes(const plan::Plan& plan) {
  constexpr double kDirection = 4;
  const double result = plan.options.ns_bytes;
  const int num_ranks = plan.mesh.tensor_parallel;
  core::PerOwner<double> sent(plan.mesh.num_owners());
  core::PerOwner<double> received(plan.mesh.num_owners());
  for (const core::ParameterIndex parameter : plan.inventory.indices()) {
    const bool cut = plan.inventory[parameter].tensor_parallel;
    const Owner owner = plan.owner[parameter];
    // Each other rank of the slot sends and receives so many. If the matrix is not cut, it has the
    // direction already.
    const double elements =
        static_cast<double>(plan.inventory[parameter].num_elements()) / (cut ? num_ranks : 1);
    const double directions = cut ? kDirection * elements : 0;
    for (int rank = 0; rank < num_ranks; ++rank) {
      const Owner other(plan.mesh.slot_of(owner).value() * num_ranks + rank);
      if (other == owner) continue;
      sent[owner] += result * elements;
      received[owner] += directions;
      sent[other] += directions;
      received[other] += result * elements;
    }
  }
  core::PerOwner<double> bytes;
  for (const Owner rank : sent.indices()) bytes.push_back(std::max(sent[rank], received[rank]));
  return bytes;
}

OwnedDurations::OwnedDurations(const Setting& setting, const simulate::Job& job)
    : setting_(setting),
      layout_(job.layout),
      rates_(setting),
      host_sum_us_(sums_by_host(setting) ? 1e3 * setting.host_sum_ms : 0),
      forward_us_(forward_us(setting, rates_)) {
  for (const schedule::UnitLayout& unit : layout_.units) {
    weights_.push_back(shares_of(unit, true));
    gradients_.push_back(shares_of(unit, false));
  }
  if (setting.plan.options.on_cpu) {
    // Without lookahead weights of one unit travel at a time.
    if (setting.plan.options.lookahead > 0) fill_directions(true);
    fill_directions(false);
  }
  const plan::Plan& plan = setting.plan;
  updates_us_.resize(plan.mesh.num_owners());
  for (const plan::Batch& batch : plan.batches) {
    const plan::Shape shape = plan.inventory[batch.parameters.front()].shape();
    const std::vector<plan::BatchTime> times = plan::batch_times(plan.costs, shape);
    const auto size = static_cast<int>(batch.parameters.size());
    const auto time = std::ranges::find(times, size, &plan::BatchTime::size);
    // plan::complete() has found it.
    updates_us_[batch.owner].push_back(static_cast<double>(time->ns) / 1e3);
  }
}

OwnedDurations::Shares OwnedDurations::shares_of(const schedule::UnitLayout& unit,
                                                 bool publishes) const {
  // With tensor parallelism each rank of a slot sends its share.
  const double size = static_cast<double>(element_size(unit, publishes)) / layout_.tensor_parallel;
  Shares shares;
  std::vector<double> row;
  for (const core::Shard shard : layout_.shards()) {
    row.push_back(static_cast<double>(layout_.column_elements(unit, shard) - unit.kept_elements) *
                  size);
  }
  const double of_row = std::accumulate(row.begin(), row.end(), 0.0) * layout_.tensor_parallel;
  if (of_row > 0) shares.row = rates_.intra_us(row, publishes) / of_row;
  const Columns columns = columns_of(unit, publishes);
  shares.columns = rates_.inter_us(columns, publishes);
  shares.idle_us.resize(columns.size());
  // Columns wait for their latencies at once; only bytes share the adapter.
  const double latency_us = rates_.inter_latency_us(columns.front().size());
  for (std::size_t i = 0; i < columns.size(); ++i) {
    const double bytes = std::accumulate(columns[i].begin(), columns[i].end(), 0.0) * senders();
    if (bytes == 0 && !setting_.network.per_device)
      shares.idle_us[i] = shares.columns[i] - latency_us;
    shares.columns[i] = bytes > 0 ? shares.columns[i] / bytes : 0;
  }
  return shares;
}

// The ranks of a slot share the node's adapter, if there is but one.
int OwnedDurations::senders() const {
  return setting_.network.per_device ? layout_.tensor_parallel : 1;
}

OwnedDurations::Columns OwnedDurations::columns_of(const schedule::UnitLayout& unit,
                                                   bool publishes) const {
  const int size = element_size(unit, publishes);
  Columns columns;
  for (const core::Shard shard : layout_.shards()) {
    std::vector<double>& column = columns.emplace_back();
    for (const core::Replicate replicate : layout_.replicates()) {
      const core::Slot slot = layout_.slot_at(replicate, shard);
      column.push_back(static_cast<double>(unit.owner_elements[slot]) * size / senders());
    }
  }
  return columns;
}

// A lane of gloo begins a unit's messages while those of the last one travel (wire/lane.h). So a
// direction that one unit leaves idle has the next one's, and the bytes of all units together take
// as long as the busiest direction needs. FSDP2 sends those of kOutside, by themselves.
void OwnedDurations::fill_directions(bool publishes) {
  core::Vector<UnitIndex, Shares>& shares = publishes ? weights_ : gradients_;
  const auto num_columns = static_cast<std::size_t>(layout_.num_shards);
  Columns together(num_columns,
                   std::vector<double>(static_cast<std::size_t>(layout_.num_replicates)));
  const double latency_us = rates_.inter_latency_us(together.front().size());
  core::Vector<UnitIndex, std::vector<double>> us;
  std::vector<double> apart_us(num_columns);
  for (const UnitIndex unit : layout_.units.indices()) {
    const Columns columns = columns_of(layout_.units[unit], publishes);
    us.push_back(rates_.inter_us(columns, publishes));
    for (std::size_t i = 0; unit != kOutside && i < num_columns; ++i) {
      apart_us[i] += us[unit][i] - latency_us;
      std::ranges::transform(together[i], columns[i], together[i].begin(), std::plus<>());
    }
  }
  const std::vector<double> together_us = rates_.inter_us(together, publishes);
  for (const UnitIndex unit : shares.indices()) {
    for (std::size_t i = 0; unit != kOutside && i < num_columns; ++i) {
      if (apart_us[i] <= 0 || us[unit][i] <= 0) continue;
      const double filled = (together_us[i] - latency_us) / apart_us[i];
      const double bytes_us = (us[unit][i] - latency_us) * filled;
      shares[unit].columns[i] *= (bytes_us + latency_us) / us[unit][i];
      shares[unit].idle_us[i] *= filled;
    }
  }
}

double OwnedDurations::host_sum_us(const simulate::Issue& issue) const {
  if (!issue.is(simulate::Compute::kBackward) || issue.unit() == kOutside) return 0;
  return host_sum_us_;
}

double OwnedDurations::work_us(Owner rank, const simulate::Issue& issue) {
  if (issue.is(simulate::Compute::kForward)) return forward_us_[issue.unit()];
  if (issue.is(simulate::Compute::kBackward))
    return 2 * forward_us_[issue.unit()] + host_sum_us(issue);
  if (!issue.is(Kind::kOrthogonalise)) return 0;  // which stands for the batch's whole update
  const std::vector<double>& updates = updates_us_[rank];
  const std::size_t batch = issue.operation.batch().position();
  return batch < updates.size() ? updates[batch] : 0;
}

double OwnedDurations::message_us(Owner rank, const simulate::Issue& issue,
                                  const schedule::Message& message) {
  if (issue.lane() == schedule::Lane::kSlices) return 0;  // is in the batch's cost
  const Shares& shares = shares_of(issue);
  const bool in_row = message.axis == layout::Axis::kRow;
  return times_sent(setting_.plan, issue) * static_cast<double>(message.bytes) *
         (in_row ? shares.row : shares.columns[column_of(rank)]);
}

// A column without bytes waits for the others: else its next unit would have the adapter to itself.
double OwnedDurations::idle_us(Owner rank, const simulate::Issue& issue) {
  if (issue.lane() != schedule::Lane::kInter) return 0;
  return times_sent(setting_.plan, issue) * shares_of(issue).idle_us[column_of(rank)];
}

const OwnedDurations::Shares& OwnedDurations::shares_of(const simulate::Issue& issue) const {
  return (schedule::is_publication(issue.operation.kind) ? weights_ : gradients_)[issue.unit()];
}

std::size_t OwnedDurations::column_of(Owner rank) const {
  return layout_.shard_of(layout_.slot_of(rank)).position();
}

}  // namespace dmuon::predict
