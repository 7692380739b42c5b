#include "dmuon/engine/shared_mesh.h"

#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <array>
#include <utility>

namespace dmuon::engine {

void Turn::take(const void* holder, std::function<void()> issue_rest) {
  if (holder_ == holder) return;
  if (holder_ != nullptr) issue_rest_();
  holder_ = holder;
  issue_rest_ = std::move(issue_rest);
  kept_.reset();
}

void Turn::give_up(const void* holder) {
  if (holder_ == holder) holder_ = nullptr;
}

void Turn::keep(const void* holder, std::shared_ptr<void> last) {
  if (holder_ == holder) kept_ = std::move(last);
}

void OnDevice::add(Stuck operation, Event done, c10::Device device) {
  const std::scoped_lock lock(mutex_);
  device_ = device;
  operations_.emplace_back(std::move(operation), std::move(done));
  if (operations_.size() > kMost) operations_.pop_front();
}

std::optional<Stuck> OnDevice::oldest() {
  const std::scoped_lock lock(mutex_);
  // Of a thread that has chosen none: CUDA would make a context on the first device.
  const c10::OptionalDeviceGuard guard(device_);
  while (!operations_.empty() && operations_.front().second.has_happened()) operations_.pop_front();
  if (operations_.empty()) return std::nullopt;
  return operations_.front().first;
}

std::shared_ptr<Watch> SharedMesh::watch_over() {
  // The groups' copies end the same messages.
  const auto give_up =
      [groups = std::array{row, column, order, verdict}](const std::string& why) mutable {
        for (Group& group : groups) group.give_up(why);
      };
  auto made = std::make_shared<Watch>(order.store(), order.rank(), order.size(), give_up);
  if (row.device() != c10::DeviceType::CPU)
    made->look_at([known = on_device] { return known->oldest(); });
  order.wait_under(made, Rendezvous::kComparison);
  verdict.wait_under(made, Rendezvous::kAgreement);
  return made;
}

void SharedMesh::leave(std::chrono::milliseconds grace) {
  if (getpid() != process) return;
  const std::string why = "its program has ended";
  watch->over(why);
  const auto end = std::chrono::steady_clock::now() + grace;
  const auto left = [&] {
    const auto rest = end - std::chrono::steady_clock::now();
    return std::chrono::ceil<std::chrono::milliseconds>(std::max(rest, rest.zero()));
  };
  const auto ends_in_time = [&](Lane& lane) {
    try {
      return lane.ends_within(left());
    } catch (const std::exception&) {  // a device that has failed
      return false;
    }
  };
  if (ends_in_time(lanes->intra) && ends_in_time(lanes->inter)) return;
  row.give_up(why);
  column.give_up(why);
}

}  // namespace dmuon::engine
