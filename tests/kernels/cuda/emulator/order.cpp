#include "tests/kernels/cuda/emulator/order.h"

#include <algorithm>

namespace dmuon::kernels::cuda::emulator {

void Released::add(const Moment& fence) {
  auto& fences = by_block_[fence.block];
  if (std::ranges::find(fences, fence) == fences.end()) fences.push_back(fence);
}

void Released::add(const Released& other) {
  for (const auto& [block, fences] : other.by_block_) {
    for (const Moment& fence : fences) add(fence);
  }
}

bool Released::covers(const Moment& then) const {
  const auto fences = by_block_.find(then.block);
  return fences != by_block_.end() && std::ranges::any_of(fences->second, [&](const Moment& fence) {
           return emulator::covers(fence, then);
         });
}

bool Acquired::covers(const Moment& then, const Moment& now) const {
  return std::ranges::any_of(
      all_, [&](const One& one) { return precedes(one.by, now) && one.released.covers(then); });
}

Released Acquired::known(const Moment& now) const {
  Released known;
  for (const One& one : all_) {
    if (precedes(one.by, now)) known.add(one.released);
  }
  return known;
}

}  // namespace dmuon::kernels::cuda::emulator
