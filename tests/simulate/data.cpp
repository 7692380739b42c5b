#include "tests/simulate/data.h"

#include <algorithm>
#include <utility>

#include "dmuon/core/error.h"

namespace dmuon::simulate {
namespace {

using schedule::Kind;

// One number for each contribution (SplitMix64's finalizer, Steele et al. 2014).
std::uint64_t token(core::Owner rank, int index) {
  std::uint64_t bits =
      ((static_cast<std::uint64_t>(rank.value()) << 32U) | static_cast<std::uint64_t>(index)) +
      0x9e3779b97f4a7c15ULL;
  bits = (bits ^ (bits >> 30U)) * 0xbf58476d1ce4e5b9ULL;
  bits = (bits ^ (bits >> 27U)) * 0x94d049bb133111ebULL;
  return bits ^ (bits >> 31U);
}

}  // namespace

void Value::merge(const Value& other) {
  oldest = std::min(oldest, other.oldest);
  newest = std::max(newest, other.newest);
  sum += other.sum;
}

Data::Data(const Programs& programs, bool node_copy, std::vector<std::string>* violations)
    : programs_(programs),
      node_copy_(node_copy),
      violations_(violations),
      contributed_(static_cast<std::size_t>(programs.front().layout->tensor_parallel)) {
  for (const core::Owner rank : programs.indices()) {
    const Program& program = programs[rank];
    const int num_units = program.layout->units.size();
    RankData own_data{core::Vector<core::UnitIndex, Buffers>(num_units),
                      core::Vector<core::BatchIndex, int>(program.batches.size(), 0)};
    for (const core::BatchIndex batch : program.batches.indices()) {
      for (const core::UnitIndex unit : program.batches[batch])
        own_data.units.at(unit).batches.push_back(batch);
    }
    ranks_.push_back(std::move(own_data));
    for (int index = 0; index < program.num_issues(); ++index) {
      const Issue& issue = program.issue(index);
      if (!issue.is(Compute::kBackward)) continue;
      const auto step = static_cast<std::size_t>(issue.step);
      auto& of_slices = contributed_[tensor_rank(rank)];
      while (of_slices.size() <= step) of_slices.emplace_back(num_units, 0);
      of_slices[step].at(issue.unit()) += token(rank, index);
    }
  }
}

template <typename... Parts>
void Data::report(core::Owner rank, int index, Parts&&... parts) {
  violations_->push_back(core::message("rank ", rank, ", issue ", index, ", ",
                                       describe(issue(rank, index)), ": ", parts...));
}

// A part is as old as the batch that was updated least.
Value Data::masters(core::Owner rank, core::UnitIndex unit) const {
  Value value;
  if (!owns_part(rank, unit)) return value;
  const RankData& own_data = ranks_[rank];
  for (const core::BatchIndex batch : own_data.units[unit].batches)
    value.merge({own_data.versions[batch], own_data.versions[batch], 0});
  return value;
}

void Data::start(core::Owner rank, int index) {
  const Issue& of = issue(rank, index);
  if (of.is(Kind::kPrepare)) check_gradients(rank, index);
  if (of.is(Kind::kApply)) apply(rank, index);
  if (of.is_on_batch()) return;
  Buffers& own = ranks_[rank].units[of.unit()];
  const bool has_inter = layout(rank).has_inter();
  const bool intra = of.is(Kind::kPublishIntra);
  if (of.is(Kind::kPublishInter) || (intra && !has_inter)) own.part = masters(rank, of.unit());
  if (intra) own.packed = own.part;
  if (intra || of.is(Kind::kPublishInter)) check_part(rank, index);
  if (of.compute) check_weights(rank, index);
  if (of.is(Compute::kBackward)) own.packed_gradients.sum += token(rank, index);
}

Value Data::contribution(core::Owner rank, int index) const {
  const schedule::Operation& operation = issue(rank, index).operation;
  const Buffers& own = ranks_[rank].units[operation.unit()];
  if (operation.kind == Kind::kPublishInter) return masters(rank, operation.unit());
  if (operation.kind == Kind::kPublishIntra) return own.part;
  return operation.kind == Kind::kRouteIntra ? own.packed_gradients : own.node_sum;
}

void Data::contribute(core::Owner rank, int index, MessageId message) {
  messages_[message].merge(contribution(rank, index));
}

void Data::receive(core::Owner rank, int index, MessageId message) {
  take(rank, index, messages_[message]);
}

void Data::take(core::Owner rank, int index, const Value& value) {
  const Issue& of = issue(rank, index);
  Buffers& own = ranks_[rank].units[of.unit()];
  const bool has_inter = layout(rank).has_inter();
  if (of.operation.kind == Kind::kRouteIntra) {
    (has_inter ? own.node_sum : own.total).sum += value.sum;
  } else if (of.operation.kind == Kind::kRouteInter) {
    own.total.sum += value.sum;
  } else {
    (of.operation.kind == Kind::kPublishInter ? own.part : own.packed).merge(value);
  }
}

void Data::finish(core::Owner rank, int index) {
  const Issue& of = issue(rank, index);
  if (of.compute || of.is_on_batch()) return;
  Buffers& own = ranks_[rank].units[of.unit()];
  const bool alone = layout(rank).num_shards == 1;
  if (of.operation.kind == Kind::kRouteIntra && alone) take(rank, index, own.packed_gradients);
  if (of.operation.kind == Kind::kRouteInter) own.node_sum = {};
  if (of.operation.kind == Kind::kFinishRouteIntra) own.packed_gradients = {};
  if (of.operation.kind == Kind::kReshard) {
    own.packed = {};
    if (!node_copy_) own.part = {};
  }
}

// What this rank is about to publish, if it has any of it.
void Data::check_part(core::Owner rank, int index) {
  const Issue& of = issue(rank, index);
  const Value& part = ranks_[rank].units[of.unit()].part;
  if (part.newest >= 0 && (part.oldest != of.version() || part.newest != of.version()))
    report(rank, index, "would publish version ", part.oldest, " as version ", of.version());
}

void Data::check_weights(core::Owner rank, int index) {
  const Issue& of = issue(rank, index);
  if (layout(rank).units[of.unit()].num_elements() == 0) return;
  const Value& packed = ranks_[rank].units[of.unit()].packed;
  if (packed.newest < 0) {
    report(rank, index, "reads nothing");
  } else if (packed.oldest != of.step || packed.newest != of.step) {
    report(rank, index, "reads versions ", packed.oldest, " to ", packed.newest, ", expected ",
           of.step);
  }
}

void Data::check_gradients(core::Owner rank, int index) {
  const Issue& of = issue(rank, index);
  RankData& own_data = ranks_[rank];
  const core::BatchIndex batch = of.operation.batch();
  for (const core::UnitIndex unit : programs_[rank].batches.at(batch)) {
    if (!owns_part(rank, unit)) continue;
    Buffers& own = own_data.units[unit];
    const auto& of_slices = contributed_[tensor_rank(rank)];
    for (; own.expected_step < of.step; ++own.expected_step) {
      const auto next = static_cast<std::size_t>(own.expected_step) + 1;
      if (next < of_slices.size()) own.expected.sum += of_slices[next][unit];
    }
    if (own.total.sum != own.expected.sum)
      report(rank, index, "the gradients of unit ", unit,
             " are not what all ranks put in, each once");
    own.total = own.expected;  // reported once
  }
}

void Data::apply(core::Owner rank, int index) {
  const Issue& of = issue(rank, index);
  const int version = ++ranks_[rank].versions[of.operation.batch()];
  if (version != of.version())
    report(rank, index, "leaves version ", version, ", expected ", of.version());
}

}  // namespace dmuon::simulate
