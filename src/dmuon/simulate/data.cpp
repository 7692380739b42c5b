#include "dmuon/simulate/data.h"

#include <algorithm>

#include "dmuon/core/error.h"

namespace dmuon::simulate {
namespace {

using schedule::Kind;

// One number for each contribution (SplitMix64's finalizer, Steele et al. 2014).
std::uint64_t token(int slot, int index) {
  std::uint64_t bits =
      ((static_cast<std::uint64_t>(slot) << 32U) | static_cast<std::uint64_t>(index)) +
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

Data::Data(const std::vector<Program>& programs, bool node_copy,
           std::vector<std::string>* violations)
    : programs_(programs),
      node_copy_(node_copy),
      violations_(violations),
      num_units_(programs.empty() ? 0 : programs.front().layout->units.size()),
      buffers_(programs.size() * num_units_) {
  for (std::size_t slot = 0; slot < programs.size(); ++slot) {
    const Program& program = programs[slot];
    batch_versions_.emplace_back(program.batches.size(), 0);
    std::vector<std::vector<int>>& of = batches_of_.emplace_back(num_units_);
    for (std::size_t batch = 0; batch < program.batches.size(); ++batch) {
      for (const int unit : program.batches[batch])
        of.at(static_cast<std::size_t>(unit)).push_back(static_cast<int>(batch));
    }
    for (std::size_t index = 0; index < program.issues.size(); ++index) {
      const Issue& issue = program.issues[index];
      if (issue.operation.kind != Kind::kBackward) continue;
      const auto step = static_cast<std::size_t>(issue.step);
      while (contributed_.size() <= step) contributed_.emplace_back(num_units_, 0);
      contributed_[step].at(static_cast<std::size_t>(issue.operation.unit)) +=
          token(static_cast<int>(slot), static_cast<int>(index));
    }
  }
}

const Issue& Data::issue(int slot, int index) const {
  return programs_[static_cast<std::size_t>(slot)].issues[static_cast<std::size_t>(index)];
}

const Data::Buffers& Data::buffers(int slot, int unit) const {
  return buffers_[static_cast<std::size_t>(slot) * num_units_ + static_cast<std::size_t>(unit)];
}

Data::Buffers& Data::buffers(int slot, int unit) {
  return buffers_[static_cast<std::size_t>(slot) * num_units_ + static_cast<std::size_t>(unit)];
}

template <typename... Parts>
void Data::report(int slot, int index, Parts&&... parts) {
  violations_->push_back(core::message("slot ", slot, ", issue ", index, ", ",
                                       describe(issue(slot, index).operation), ": ", parts...));
}

bool Data::owns_part(int slot, int unit) const {
  const schedule::Layout& layout = *programs_[static_cast<std::size_t>(slot)].layout;
  return layout.units[static_cast<std::size_t>(unit)]
             .owner_elements[static_cast<std::size_t>(slot)] > 0;
}

// A part is as old as the batch that was updated least.
Value Data::masters(int slot, int unit) const {
  Value value;
  if (!owns_part(slot, unit)) return value;
  const auto rank = static_cast<std::size_t>(slot);
  for (const int batch : batches_of_[rank][static_cast<std::size_t>(unit)]) {
    const int version = batch_versions_[rank][static_cast<std::size_t>(batch)];
    value.merge({version, version, 0});
  }
  return value;
}

void Data::start(int slot, int index) {
  const schedule::Operation& operation = issue(slot, index).operation;
  if (operation.kind == Kind::kUpdate) {
    update(slot, index);
    return;
  }
  Buffers& own = buffers(slot, operation.unit);
  const bool has_inter = programs_[static_cast<std::size_t>(slot)].layout->num_replicates > 1;
  const bool intra = operation.kind == Kind::kPublishIntra;
  if (operation.kind == Kind::kPublishInter || (intra && !has_inter))
    own.part = masters(slot, operation.unit);
  if (intra) own.packed = own.part;
  if (intra || operation.kind == Kind::kPublishInter) check_part(slot, index);
  if (operation.kind == Kind::kForward || operation.kind == Kind::kBackward)
    check_weights(slot, index);
  if (operation.kind == Kind::kBackward) own.packed_gradients.sum += token(slot, index);
}

Value Data::contribution(int slot, int index) const {
  const schedule::Operation& operation = issue(slot, index).operation;
  const Buffers& own = buffers(slot, operation.unit);
  if (operation.kind == Kind::kPublishInter) return masters(slot, operation.unit);
  if (operation.kind == Kind::kPublishIntra) return own.part;
  return operation.kind == Kind::kRouteIntra ? own.packed_gradients : own.node_sum;
}

void Data::receive(int slot, int index, const Value& value) {
  const Issue& of = issue(slot, index);
  Buffers& own = buffers(slot, of.operation.unit);
  const bool has_inter = programs_[static_cast<std::size_t>(slot)].layout->num_replicates > 1;
  if (of.operation.kind == Kind::kRouteIntra) {
    (has_inter ? own.node_sum : own.total).sum += value.sum;
  } else if (of.operation.kind == Kind::kRouteInter) {
    own.total.sum += value.sum;
  } else {
    (of.operation.kind == Kind::kPublishInter ? own.part : own.packed).merge(value);
  }
}

void Data::finish(int slot, int index) {
  const Issue& of = issue(slot, index);
  if (of.operation.kind == Kind::kUpdate) return;
  Buffers& own = buffers(slot, of.operation.unit);
  const bool alone = programs_[static_cast<std::size_t>(slot)].layout->num_shards == 1;
  if (of.operation.kind == Kind::kRouteIntra && alone) receive(slot, index, own.packed_gradients);
  if (of.operation.kind == Kind::kRouteInter) own.node_sum = {};
  if (of.operation.kind == Kind::kFinishRoute) own.packed_gradients = {};
  if (of.operation.kind == Kind::kReshard) {
    own.packed = {};
    if (!node_copy_) own.part = {};
  }
}

// What this rank is about to publish, if it has any of it.
void Data::check_part(int slot, int index) {
  const Issue& of = issue(slot, index);
  const Value& part = buffers(slot, of.operation.unit).part;
  if (part.newest >= 0 && (part.oldest != of.version() || part.newest != of.version()))
    report(slot, index, "would publish version ", part.oldest, " as version ", of.version());
}

void Data::check_weights(int slot, int index) {
  const Issue& of = issue(slot, index);
  const schedule::Layout& layout = *programs_[static_cast<std::size_t>(slot)].layout;
  if (layout.units[static_cast<std::size_t>(of.operation.unit)].num_elements() == 0) return;
  const Value& packed = buffers(slot, of.operation.unit).packed;
  if (packed.newest < 0) {
    report(slot, index, "reads nothing");
  } else if (packed.oldest != of.step || packed.newest != of.step) {
    report(slot, index, "reads versions ", packed.oldest, " to ", packed.newest, ", expected ",
           of.step);
  }
}

void Data::update(int slot, int index) {
  const Issue& of = issue(slot, index);
  const auto rank = static_cast<std::size_t>(slot);
  const auto batch = static_cast<std::size_t>(of.operation.unit);
  if (batch >= batch_versions_[rank].size()) return;  // reported by analyze
  for (const int unit : programs_[rank].batches[batch]) {
    if (!owns_part(slot, unit)) continue;
    Buffers& own = buffers(slot, unit);
    for (; own.expected_step < of.step; ++own.expected_step) {
      const auto next = static_cast<std::size_t>(own.expected_step) + 1;
      if (next < contributed_.size())
        own.expected.sum += contributed_[next][static_cast<std::size_t>(unit)];
    }
    if (own.total.sum != own.expected.sum)
      report(slot, index, "the gradients of unit ", unit,
             " are not what all ranks put in, each once");
    own.total = own.expected;  // reported once
  }
  ++batch_versions_[rank][batch];
  if (batch_versions_[rank][batch] != of.version())
    report(slot, index, "leaves version ", batch_versions_[rank][batch], ", expected ",
           of.version());
}

}  // namespace dmuon::simulate
