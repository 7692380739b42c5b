#include "async_device/csrc/group.h"

#include <atomic>
#include <utility>

#include "async_device/csrc/group_work.h"
#include "async_device/csrc/launch_order.h"
#include "async_device/csrc/settings.h"
#include "async_device/csrc/statistics.h"
#include "async_device/csrc/tensors.h"

namespace async_device {
namespace {

constexpr int kAllRanks = -1;

int64_t next_id() {
  static std::atomic<int64_t> next{1};
  return next++;
}

/// Starts all messages, then does all collectives one after the other.
void run_calls(const std::vector<Call>& calls) {
  std::vector<WorkPtr> works;
  for (const Call& call : calls) {
    if (call.start) works.push_back(call.start());
  }
  for (const Call& call : calls) {
    if (call.run) call.run();
  }
  for (const WorkPtr& work : works) work->wait();
}

std::vector<Use> uses_of(const std::vector<Call>& calls) {
  std::vector<Use> uses;
  for (const Call& call : calls) {
    for (const at::Tensor& tensor : call.reads) add_use(uses, tensor, false);
    for (const at::Tensor& tensor : call.writes) add_use(uses, tensor, true);
  }
  return uses;
}

Tensors all_tensors(const std::vector<Call>& calls) {
  Tensors all;
  for (const Call& call : calls) {
    all.insert(all.end(), call.reads.begin(), call.reads.end());
    all.insert(all.end(), call.writes.begin(), call.writes.end());
  }
  return all;
}

}  // namespace

Group::Group(c10::intrusive_ptr<c10d::Backend> gloo, std::string name,
             std::vector<int> global_ranks, std::chrono::milliseconds timeout)
    : Backend(gloo->getRank(), gloo->getSize()),
      gloo_(std::move(gloo)),
      name_(std::move(name)),
      global_ranks_(std::move(global_ranks)),
      options_(c10::make_intrusive<Options>("emulated", timeout)),
      id_(next_id()) {}

Group::~Group() {
  shutdown();
  for (const auto& [peer, communicator] : communicators_) {
    Device::get().return_stream(communicator.stream);
  }
}

void Group::shutdown() {
  const WithoutGil without_gil;
  for (const auto& flight : flights_) {
    try {
      Device::get().synchronize(flight->end);
    } catch (const std::exception&) {  // its waiters hear of it
    }
  }
  flights_.clear();
}

void Group::abort() {
  const WithoutGil without_gil;
  abort_error_ = "group '" + name_ + "' was aborted";
  Device::get().abort(id_, abort_error_);
}

void Group::startCoalescing() { is_coalescing_ = true; }

WorkPtr Group::endCoalescing() {
  is_coalescing_ = false;
  if (coalesced_.empty()) return nullptr;
  return issue(std::exchange(coalesced_, {}), "coalesced", c10d::OpType::COALESCED);
}

WorkPtr Group::add(Call call) {
  if (!is_coalescing_) {
    const std::string name = call.name;
    const c10d::OpType type = call.type;
    std::vector<Call> calls;
    calls.push_back(std::move(call));
    return issue(std::move(calls), name, type);
  }
  const bool is_message = call.peer != kAllRanks;
  const c10d::OpType type = call.type;
  coalesced_.push_back(std::move(call));
  if (!is_message) return nullptr;
  return c10::make_intrusive<GroupWork>(getRank(), type, nullptr, current_device(), Tensors{},
                                        false);
}

WorkPtr Group::issue(std::vector<Call> calls, const std::string& name, c10d::OpType type) {
  if (!abort_error_.empty()) raise(name + ": " + abort_error_);
  Device& device = Device::get();
  Tensors held = all_tensors(calls);
  Tensors results = calls[0].writes;
  const bool is_async = calls[0].is_async, blocks_host = calls[0].blocks_host;
  const int index = held.empty() ? current_device() : index_of(held[0].device());
  const bool is_pair = calls.size() == 1 && type != c10d::OpType::COALESCED;
  const int peer = is_pair ? calls[0].peer : kAllRanks;
  note_order(calls, name, peer);
  Communicator& communicator = communicators_[peer];
  if (communicator.stream == nullptr) communicator.stream = device.take_stream(index);
  Stream* current = device.current_stream(index);
  Stream* stream = is_async ? communicator.stream : current;
  if (is_async) device.wait(stream, device.record(current));
  device.wait(stream, communicator.last);

  int64_t bytes = 0;
  for (const Call& call : calls) bytes += call.bytes_sent;
  Statistics::get().count_launch(static_cast<int64_t>(calls.size()), bytes);
  auto flight = std::make_shared<Flight>();
  flight->launch = std::make_shared<Launch>();
  flight->launch->group = id_;
  const std::string* full = interned(name + " of group '" + name_ + "'");
  std::vector<Use> uses = uses_of(calls);
  for (Call& call : calls) call.reads = call.writes = {};  // the flight holds them
  auto run = [all = std::move(calls)] { run_calls(all); };
  device.enqueue(stream, {full, std::move(run), std::move(uses), flight->launch, ++num_launches_});
  flight->end = communicator.last = device.record(stream);
  if (is_async) flight->held = std::move(held);
  forget_finished();
  flights_.push_back(flight);
  return c10::make_intrusive<GroupWork>(getRank(), type, flight, index, std::move(results),
                                        blocks_host);
}

void Group::note_order(const std::vector<Call>& calls, const std::string& name, int peer) const {
  const auto global_rank = [this](int rank) { return global_ranks_.at(static_cast<size_t>(rank)); };
  std::vector<int> ranks{global_rank(getRank())};
  for (const Call& call : calls) {
    if (call.peer == kAllRanks) {
      ranks = global_ranks_;
      break;
    }
    ranks.push_back(global_rank(call.peer));
  }
  const std::string operation = peer == kAllRanks ? name : "message";  // two names, by the side
  LaunchOrder::get().add(interned(operation + " of group '" + name_ + "'"), interned_ranks(ranks));
}

void Group::forget_finished() {
  Device::get().observe();
  std::erase_if(flights_, [](const auto& flight) {
    if (!Device::get().has_happened(flight->end)) return false;
    flight->held.clear();
    return true;
  });
}

}  // namespace async_device
