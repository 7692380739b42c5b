#include "dmuon/wire/group.h"

#include <ATen/ops/empty.h>

#include <stdexcept>
#include <thread>
#include <utility>

#include "dmuon/core/error.h"
#include "dmuon/core/hash.h"
#include "dmuon/layout/packed_size.h"

namespace dmuon::wire {
namespace {

// Closes all connections of a gloo backend, so that peers that wait there fail too. gloo closes
// them when a receive takes longer than its timeout. This one is of what nobody sends: its tag is
// no small number, which users and PyTorch take.
void close(c10d::Backend& backend) {
  constexpr int kNobodySends = 0x7fd0a0c1;
  std::vector<at::Tensor> tensors{at::empty({1})};
  for (int from = 0; from < backend.getSize(); ++from) {
    try {
      if (from != backend.getRank())
        backend.recv(tensors, from, kNobodySends)->wait(std::chrono::milliseconds(1));
    } catch (const std::exception&) {  // closed, now or before
    }
  }
}

}  // namespace

template <typename Call>
Pending Group::issue(const std::string& what, Call&& call) {
  try {
    // On a CPU the wait for the message fails instead, and its error names the missing ranks.
    const std::string given_up = in_flight_->given_up();
    if (!runs_beside() && !given_up.empty()) throw std::runtime_error(given_up);
    return Pending({call()}, what, in_flight_);
  } catch (const std::exception& error) {
    fail(what, error);
  }
}

template <typename Call>
Pending Group::issue(const std::string& what, at::Tensor tensor, Call&& call) {
  std::vector<at::Tensor> tensors{std::move(tensor)};
  return issue(what, [&] { return call(tensors); });
}

Group::Group(c10::intrusive_ptr<c10d::ProcessGroup> group, std::string name, int rank, int size,
             c10::DeviceType device, std::vector<int> order,
             c10::intrusive_ptr<c10d::ProcessGroup> down)
    : group_(std::move(group)),
      down_(std::move(down)),
      name_(std::move(name)),
      rank_(rank),
      size_(size),
      order_(std::move(order)),
      device_(device),
      free_point_to_point_(device == c10::DeviceType::CPU) {
  core::invariant(size_ == 1 || group_, "Group ", name_, ": no process group for ", size_,
                  " ranks");
  if (!group_) return;
  core::invariant(order_.empty() || static_cast<int>(order_.size()) == size_, "Group ", name_,
                  ": no order of ", size_, " members");
  core::invariant(group_->getRank() == in_process_group(rank_) && group_->getSize() == size_,
                  "Group ", name_, ": rank or size differs from its process group's");
  backend_ = group_->getBackend(device_);
  free_point_to_point_ &= backend_->getBackendName() == "gloo";
  core::invariant(!down_ || (down_->getRank() == group_->getRank() && down_->getSize() == size_),
                  "Group ", name_, ": the two process groups differ in rank or size");
  if (down_ && free_point_to_point_) {
    down_backend_ = down_->getBackend(device_);
    in_flight_->on_failure([up = backend_, down = down_backend_] {
      for (const auto& backend : {up, down}) close(*backend);
    });
  }
  groups_messages_ = device_ != c10::DeviceType::CPU && backend_->supportsCoalescing();
}

void Group::close_connections() {
  if (backend_ && free_point_to_point_) close(*backend_);
}

std::chrono::milliseconds Group::timeout() const {
  if (!group_) return watch::kNoTimeout;
  try {
    // Null with torch's `fake` backend.
    const auto options = backend_->getBackendOptions();
    return options ? options->timeout : watch::kNoTimeout;
  } catch (const c10::Error&) {  // the backend has no options
    return watch::kNoTimeout;
  }
}

std::shared_future<void> Group::give_up(const std::string& why) {
  in_flight_->give_up(why);
  return in_flight_->abort_once([&] {
    for (auto kept : {group_, down_}) static_cast<void>(kept.release());
    // Detached, and a promise's future: nobody joins a thread that may never return.
    std::promise<void> ended;
    std::shared_future<void> result = ended.get_future().share();
    const auto abort = [](const c10::intrusive_ptr<c10d::Backend>& backend,
                          std::promise<void> done) {
      try {
        backend->abort();
      } catch (const std::exception&) {  // a backend that cannot: its own timeout ends what it does
      }
      done.set_value();
    };
    if (group_ && device_ != c10::DeviceType::CPU) {
      std::thread(abort, backend_, std::move(ended)).detach();
    } else {
      ended.set_value();
    }
    return result;
  });
}

c10::intrusive_ptr<c10d::Store> Group::store() const {
  return group_ ? group_->getStore() : c10::intrusive_ptr<c10d::Store>();
}

// Returns a tag, so that a message never meets the receive of another one. Without tags gloo would
// end the process of a rank that has gone astray, or, with equal sizes, swap data.
int Group::tag_of(const std::string& what) const {
  return static_cast<int>(core::Hasher().add(what).add(number_).value() & 0x7fffffff);
}

// Every message calls this, and few need the words: a stream would take longer than a small
// message.
std::string Group::along(const char* does, const std::string& what) const {
  return does + what + " along the " + name_;
}

void Group::count(const at::Tensor& tensor, std::int64_t times) {
  num_messages_.add(1);
  num_bytes_.add(times * static_cast<std::int64_t>(tensor.nbytes()));
}

at::Tensor Group::own_part(const at::Tensor& packed) const {
  core::invariant(order_.empty(), "Group ", name_, ": equal parts of members in another order");
  const std::int64_t length = packed.numel() / size_;
  return packed.narrow(0, rank_ * length, length);
}

Pending Group::broadcast(at::Tensor tensor, int root, const std::string& what) {
  if (size_ == 1 || tensor.numel() == 0) return {};
  if (root == rank_) count(tensor);
  if (free_point_to_point_ && size_ <= layout::kMostDirect) {
    if (root == rank_) return send_to_all(tensor, what);
    return receive(std::move(tensor), root, what);
  }
  const std::string described = along("broadcast of ", what) + " from " + std::to_string(root);
  return issue(described, std::move(tensor), [&](auto& tensors) {
    return backend_->broadcast(tensors,
                               {.rootRank = in_process_group(root), .asyncOp = runs_beside()});
  });
}

std::vector<Pending> Group::together(const std::string& what,
                                     const std::function<std::vector<Pending>()>& issue_all) {
  if (!groups_messages_) return issue_all();
  const auto grouped = [&] {
    backend_->startCoalescing();
    try {
      issue_all();
    } catch (...) {
      // An open group would take in all later messages of this thread, to whatever group.
      try {
        backend_->endCoalescing();
      } catch (const std::exception&) {  // the first error says why
      }
      throw;
    }
    return backend_->endCoalescing();
  };
  return {issue(along("messages of ", what), grouped)};
}

Pending Group::send_to_all(const at::Tensor& tensor, const std::string& what) {
  const std::string described = along("sending ", what) + " to all";
  std::vector<WorkPtr> works;
  try {
    // In ring order, so that not all roots send to one member at once.
    for (int i = 1; i < size_; ++i) {
      std::vector<at::Tensor> tensors{tensor};
      const int member = (rank_ + i) % size_;
      works.push_back(between(rank_, member).send(tensors, in_process_group(member), tag_of(what)));
    }
  } catch (const std::exception& error) {
    fail(described, error);
  }
  return {std::move(works), described, in_flight_};
}

Pending Group::reduce_sum(at::Tensor tensor, int root, const std::string& what) {
  if (size_ == 1 || tensor.numel() == 0) return {};
  if (root != rank_) count(tensor);
  const std::string described = along("reduction of ", what) + " to " + std::to_string(root);
  return issue(described, std::move(tensor), [&](auto& tensors) {
    return backend_->reduce(tensors,
                            {.rootRank = in_process_group(root), .asyncOp = runs_beside()});
  });
}

Pending Group::all_gather_equal(const at::Tensor& packed, const std::string& what) {
  if (size_ == 1) return {};
  at::Tensor all = packed;
  at::Tensor own = own_part(packed);
  count(own);
  return issue(along("all-gather of ", what),
               [&] { return backend_->_allgather_base(all, own, {.asyncOp = runs_beside()}); });
}

Pending Group::reduce_scatter_equal(const at::Tensor& packed, const std::string& what) {
  if (size_ == 1) return {};
  at::Tensor all = packed;
  at::Tensor own = own_part(packed);
  count(own, size_ - 1);
  return issue(along("reduce-scatter of ", what), [&] {
    return backend_->_reduce_scatter_base(own, all, {.asyncOp = runs_beside()});
  });
}

Pending Group::send(at::Tensor tensor, int to, const std::string& what) {
  if (tensor.numel() == 0) return {};
  count(tensor);
  const std::string described = along("sending ", what) + " to " + std::to_string(to);
  return issue(described, std::move(tensor), [&](auto& tensors) {
    return between(rank_, to).send(tensors, in_process_group(to), tag_of(what));
  });
}

Pending Group::receive(at::Tensor tensor, int from, const std::string& what) {
  if (tensor.numel() == 0) return {};
  const std::string described = along("receiving ", what) + " from " + std::to_string(from);
  return issue(described, std::move(tensor), [&](auto& tensors) {
    return between(from, rank_).recv(tensors, in_process_group(from), tag_of(what));
  });
}

std::vector<Pending> Group::all_to_all(const std::vector<at::Tensor>& received,
                                       const std::vector<at::Tensor>& sent,
                                       const std::string& what) {
  core::invariant(std::ssize(received) == size_ && std::ssize(sent) == size_, "Group ", name_,
                  ": all_to_all: expected ", size_, " tensors");
  const auto at = [](const std::vector<at::Tensor>& parts, int member) {
    return parts[static_cast<std::size_t>(member)];
  };
  at(received, rank_).copy_(at(sent, rank_));
  if (size_ == 1) return {};
  return together(what, [&] {
    std::vector<Pending> messages;
    // In ring order, so that not all members send to one at once.
    for (int i = 1; i < size_; ++i) {
      const int to = (rank_ + i) % size_;
      const int from = (rank_ - i + size_) % size_;
      messages.push_back(send(at(sent, to), to, what));
      messages.push_back(receive(at(received, from), from, what));
    }
    return messages;
  });
}

Pending Group::all_reduce_max(at::Tensor tensor, const std::string& what) {
  if (size_ == 1 || tensor.numel() == 0) return {};
  count(tensor);
  return issue(along("maximum of ", what), std::move(tensor), [&](auto& tensors) {
    return backend_->allreduce(tensors,
                               {.reduceOp = c10d::ReduceOp::MAX, .asyncOp = runs_beside()});
  });
}

Pending Group::all_gather(const at::Tensor& all, const at::Tensor& own, const std::string& what) {
  if (size_ == 1) {
    all[0].copy_(own);
    return {};
  }
  count(own);
  std::vector<at::Tensor> inputs{own};
  std::vector<std::vector<at::Tensor>> outputs{all.unbind()};
  for (std::size_t member = 0; member < order_.size(); ++member)
    outputs[0].at(static_cast<std::size_t>(order_[member])) =
        all[static_cast<std::int64_t>(member)];
  return issue(what, [&] { return backend_->allgather(outputs, inputs); });
}

}  // namespace dmuon::wire
