#include "dmuon/wire/shared_mesh.h"

#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <initializer_list>
#include <span>
#include <utility>
#include <vector>

namespace dmuon::wire {

namespace {

// A group's kernels end at once, but freeing its memory may take for ever.
constexpr std::chrono::seconds kAbort{2};

void give_up_all(std::initializer_list<std::span<Group>> groups, const std::string& why) {
  std::vector<std::shared_future<void>> ended;
  for (const std::span<Group> some : groups) {
    for (Group& group : some) ended.push_back(group.give_up(why));
  }
  const auto end = std::chrono::steady_clock::now() + kAbort;
  for (const auto& each : ended) each.wait_until(end);
}

}  // namespace

void Turn::take(const void* holder, std::function<void()> issue_rest) {
  require();
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

void Turn::release() {
  const std::shared_ptr<void> last = std::exchange(kept_, nullptr);  // its end gives the turn up
}

void OtherGroups::add(Group group) {
  const std::scoped_lock lock(mutex_);
  groups_.push_back(std::move(group));
}

std::vector<Group> OtherGroups::all() const {
  const std::scoped_lock lock(mutex_);
  return groups_;
}

void OnDevice::add(watch::Stuck operation, Event done, c10::Device device) {
  const std::scoped_lock lock(mutex_);
  device_ = device;
  operations_.emplace_back(std::move(operation), std::move(done));
  if (operations_.size() > kMost) operations_.pop_front();
}

std::optional<watch::Stuck> OnDevice::oldest() {
  const std::scoped_lock lock(mutex_);
  // Without a current device CUDA would make a context on the first device.
  const c10::OptionalDeviceGuard guard(device_);
  while (!operations_.empty() && operations_.front().second.has_happened()) operations_.pop_front();
  if (operations_.empty()) return std::nullopt;
  return operations_.front().first;
}

std::shared_ptr<watch::Watch> SharedMesh::watch_over() {
  // Copies of a group end the same messages.
  std::vector<Group> for_words = groups_of_words();
  std::vector<Group> messages{row(), column(), everyone};
  if (tensor_parallel) messages.push_back(tensor_parallel->slices);
  const auto give_up = [for_words, messages](const std::string& why) mutable {
    give_up_all({messages, for_words}, why);
  };
  auto made =
      std::make_shared<watch::Watch>(everyone.store(), everyone.rank(), everyone.size(), give_up);
  watch::Watch::Outside outside;
  outside.give_up = [for_words, messages, others = others](const std::string& why) mutable {
    for (Group& group : others->all()) messages.push_back(std::move(group));
    give_up_all({messages, for_words}, why);
    // The host may wait for a message that Python has sent in one of these.
    for (Group& group : messages) group.close_connections();
  };
  if (row().device() != c10::DeviceType::CPU) {
    outside.oldest = [known = on_device] { return known->oldest(); };
    outside.timeout = std::min(row().timeout(), column().timeout());
  }
  made->look_at(std::move(outside));
  return made;
}

std::vector<Group> SharedMesh::groups_of_words() const {
  std::vector<Group> groups{host[layout::Axis::kRow], host[layout::Axis::kColumn]};
  if (tensor_parallel) groups.push_back(tensor_parallel->host);
  return groups;
}

std::string SharedMesh::failure() const {
  return turn->why_over().empty() ? watch->failure() : turn->why_over();
}

void SharedMesh::end(const std::string& why) {
  turn->end(why);
  if (row().device() == c10::DeviceType::CPU) give_up_lanes(why);
}

void SharedMesh::give_up_lanes(const std::string& why) {
  give_up_all({along.values}, why);
  if (tensor_parallel) give_up_all({{&tensor_parallel->slices, 1}}, why);
}

std::string SharedMesh::leave(std::chrono::milliseconds grace) {
  if (getpid() != process) return {};
  const std::string why = "its program has ended";
  // A process that ends does not wait for a store that does not answer.
  if (!watch->over(why)) static_cast<void>(new std::shared_ptr<watch::Watch>(watch));  // NOLINT
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
  if (!std::ranges::all_of(*lanes, ends_in_time)) give_up_lanes(why);
  return watch->unraised();
}

}  // namespace dmuon::wire
