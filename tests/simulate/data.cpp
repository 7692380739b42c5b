#include "tests/simulate/data.h"

#include <algorithm>
#include <utility>

#include "dmuon/core/error.h"

namespace dmuon::simulate {
namespace {

using schedule::Kind;

// One number for each contribution (SplitMix64's finalizer, Steele et al. 2014).
std::uint64_t token(core::Slot slot, int index) {
  std::uint64_t bits =
      ((static_cast<std::uint64_t>(slot.value()) << 32U) | static_cast<std::uint64_t>(index)) +
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
    : programs_(programs), node_copy_(node_copy), violations_(violations) {
  for (const core::Slot slot : programs.indices()) {
    const Program& program = programs[slot];
    const int num_units = program.layout->units.size();
    RankData rank{core::Vector<core::UnitIndex, Buffers>(num_units),
                  core::Vector<core::BatchIndex, int>(program.batches.size(), 0)};
    for (const core::BatchIndex batch : program.batches.indices()) {
      for (const core::UnitIndex unit : program.batches[batch])
        rank.units.at(unit).batches.push_back(batch);
    }
    ranks_.push_back(std::move(rank));
    for (int index = 0; index < program.num_issues(); ++index) {
      const Issue& issue = program.issue(index);
      if (!issue.is(Compute::kBackward)) continue;
      const auto step = static_cast<std::size_t>(issue.step);
      while (contributed_.size() <= step) contributed_.emplace_back(num_units, 0);
      contributed_[step].at(issue.unit()) += token(slot, index);
    }
  }
}

template <typename... Parts>
void Data::report(core::Slot slot, int index, Parts&&... parts) {
  violations_->push_back(core::message("slot ", slot, ", issue ", index, ", ",
                                       describe(issue(slot, index)), ": ", parts...));
}

// A part is as old as the batch that was updated least.
Value Data::masters(core::Slot slot, core::UnitIndex unit) const {
  Value value;
  if (!owns_part(slot, unit)) return value;
  const RankData& rank = ranks_[slot];
  for (const core::BatchIndex batch : rank.units[unit].batches)
    value.merge({rank.versions[batch], rank.versions[batch], 0});
  return value;
}

void Data::start(core::Slot slot, int index) {
  const Issue& of = issue(slot, index);
  if (of.is(Kind::kPrepare)) check_gradients(slot, index);
  if (of.is(Kind::kApply)) apply(slot, index);
  if (of.is_on_batch()) return;
  Buffers& own = ranks_[slot].units[of.unit()];
  const bool has_inter = layout(slot).has_inter();
  const bool intra = of.is(Kind::kPublishIntra);
  if (of.is(Kind::kPublishInter) || (intra && !has_inter)) own.part = masters(slot, of.unit());
  if (intra) own.packed = own.part;
  if (intra || of.is(Kind::kPublishInter)) check_part(slot, index);
  if (of.compute) check_weights(slot, index);
  if (of.is(Compute::kBackward)) own.packed_gradients.sum += token(slot, index);
}

Value Data::contribution(core::Slot slot, int index) const {
  const schedule::Operation& operation = issue(slot, index).operation;
  const Buffers& own = ranks_[slot].units[operation.unit()];
  if (operation.kind == Kind::kPublishInter) return masters(slot, operation.unit());
  if (operation.kind == Kind::kPublishIntra) return own.part;
  return operation.kind == Kind::kRouteIntra ? own.packed_gradients : own.node_sum;
}

void Data::contribute(core::Slot slot, int index, MessageId message) {
  messages_[message].merge(contribution(slot, index));
}

void Data::receive(core::Slot slot, int index, MessageId message) {
  take(slot, index, messages_[message]);
}

void Data::take(core::Slot slot, int index, const Value& value) {
  const Issue& of = issue(slot, index);
  Buffers& own = ranks_[slot].units[of.unit()];
  const bool has_inter = layout(slot).has_inter();
  if (of.operation.kind == Kind::kRouteIntra) {
    (has_inter ? own.node_sum : own.total).sum += value.sum;
  } else if (of.operation.kind == Kind::kRouteInter) {
    own.total.sum += value.sum;
  } else {
    (of.operation.kind == Kind::kPublishInter ? own.part : own.packed).merge(value);
  }
}

void Data::finish(core::Slot slot, int index) {
  const Issue& of = issue(slot, index);
  if (of.compute || of.is_on_batch()) return;
  Buffers& own = ranks_[slot].units[of.unit()];
  const bool alone = layout(slot).num_shards == 1;
  if (of.operation.kind == Kind::kRouteIntra && alone) take(slot, index, own.packed_gradients);
  if (of.operation.kind == Kind::kRouteInter) own.node_sum = {};
  if (of.operation.kind == Kind::kFinishRouteIntra) own.packed_gradients = {};
  if (of.operation.kind == Kind::kReshard) {
    own.packed = {};
    if (!node_copy_) own.part = {};
  }
}

// What this rank is about to publish, if it has any of it.
void Data::check_part(core::Slot slot, int index) {
  const Issue& of = issue(slot, index);
  const Value& part = ranks_[slot].units[of.unit()].part;
  if (part.newest >= 0 && (part.oldest != of.version() || part.newest != of.version()))
    report(slot, index, "would publish version ", part.oldest, " as version ", of.version());
}

void Data::check_weights(core::Slot slot, int index) {
  const Issue& of = issue(slot, index);
  if (layout(slot).units[of.unit()].num_elements() == 0) return;
  const Value& packed = ranks_[slot].units[of.unit()].packed;
  if (packed.newest < 0) {
    report(slot, index, "reads nothing");
  } else if (packed.oldest != of.step || packed.newest != of.step) {
    report(slot, index, "reads versions ", packed.oldest, " to ", packed.newest, ", expected ",
           of.step);
  }
}

void Data::check_gradients(core::Slot slot, int index) {
  const Issue& of = issue(slot, index);
  RankData& rank = ranks_[slot];
  const core::BatchIndex batch = of.operation.batch();
  for (const core::UnitIndex unit : programs_[slot].batches.at(batch)) {
    if (!owns_part(slot, unit)) continue;
    Buffers& own = rank.units[unit];
    for (; own.expected_step < of.step; ++own.expected_step) {
      const auto next = static_cast<std::size_t>(own.expected_step) + 1;
      if (next < contributed_.size()) own.expected.sum += contributed_[next][unit];
    }
    if (own.total.sum != own.expected.sum)
      report(slot, index, "the gradients of unit ", unit,
             " are not what all ranks put in, each once");
    own.total = own.expected;  // reported once
  }
}

void Data::apply(core::Slot slot, int index) {
  const Issue& of = issue(slot, index);
  const int version = ++ranks_[slot].versions[of.operation.batch()];
  if (version != of.version())
    report(slot, index, "leaves version ", version, ", expected ", of.version());
}

}  // namespace dmuon::simulate
