#include "dmuon/wire/group.h"

#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <gtest/gtest.h>

#include <chrono>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "dmuon/core/error.h"
#include "tests/wire/groups.h"

namespace dmuon::wire {
namespace {

using Clock = std::chrono::steady_clock;

at::Tensor filled(double value, std::int64_t size = 5, at::ScalarType dtype = at::kFloat) {
  return at::full({size}, value, at::TensorOptions().dtype(dtype));
}

void meet(Group& group) { group.all_reduce_max(filled(0), "the meeting").wait(); }

// A backend that groups messages, and fails at one of them.
class Grouping final : public c10d::Backend {
 public:
  Grouping(int failing) : Backend(0, 2), failing_(failing) {}
  const std::string getBackendName() const override { return "grouping"; }
  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override { ++open_; }
  WorkPtr endCoalescing() override {
    --open_;
    ++launches_;
    return nullptr;
  }
  WorkPtr broadcast(std::vector<at::Tensor>&, const c10d::BroadcastOptions& options) override {
    EXPECT_FALSE(options.asyncOp);  // on the current stream
    if (messages_++ == failing_) throw std::runtime_error("no peer");
    return nullptr;
  }
  void abort() override { ++aborts_; }
  c10::intrusive_ptr<Options> getBackendOptions() override {
    return has_options_ ? nullptr : Backend::getBackendOptions();  // which throws
  }

  bool has_options_ = false;
  int failing_, open_ = 0, launches_ = 0, messages_ = 0, aborts_ = 0;
};

// It has a backend for a device that needs not exist here: tensors are the host's.
Group group_over(const c10::intrusive_ptr<Grouping>& backend) {
  const auto type = c10d::ProcessGroup::BackendType::CUSTOM;
  auto group =
      c10::make_intrusive<c10d::ProcessGroup>(c10::make_intrusive<c10d::HashStore>(), 0, 2);
  for (const c10::DeviceType device : {c10::DeviceType::CPU, c10::DeviceType::CUDA})
    group->setBackend(device, type, c10::intrusive_ptr<c10d::Backend>(backend));
  group->setDefaultBackend(type);
  return {std::move(group), "row", 0, 2, c10::DeviceType::CUDA};
}

// Calls itself gloo, and writes down with whom it would exchange messages.
class Noting final : public c10d::Backend {
 public:
  Noting() : Backend(1, 3) {}
  const std::string getBackendName() const override { return "gloo"; }
  WorkPtr send(std::vector<at::Tensor>&, int to, int) override { return note("to ", to); }
  WorkPtr recv(std::vector<at::Tensor>&, int from, int) override { return note("from ", from); }

  std::vector<std::string> noted;

 private:
  WorkPtr note(const char* how, int peer) {
    noted.push_back(how + std::to_string(peer));
    return nullptr;
  }
};

ProcessGroupPtr group_of_noting(const c10::intrusive_ptr<Noting>& backend) {
  const auto type = c10d::ProcessGroup::BackendType::GLOO;
  auto group =
      c10::make_intrusive<c10d::ProcessGroup>(c10::make_intrusive<c10d::HashStore>(), 1, 3);
  group->setBackend(c10::DeviceType::CPU, type, c10::intrusive_ptr<c10d::Backend>(backend));
  group->setDefaultBackend(type);
  return group;
}

// Else a receiver's word that it is ready waits for all that it sends itself.
TEST(Group, SendsToLowerMembersByAConnectionOfTheirOwn) {
  const auto up = c10::make_intrusive<Noting>();
  const auto down = c10::make_intrusive<Noting>();
  Group group(group_of_noting(up), "column", 1, 3, c10::DeviceType::CPU, {}, group_of_noting(down));
  for (const int peer : {0, 2}) {
    group.send(filled(1), peer, "x").wait();
    group.receive(filled(1), peer, "x").wait();
  }
  for (const int root : {0, 1, 2}) group.broadcast(filled(1), root, "x").wait();
  using Notes = std::vector<std::string>;
  EXPECT_EQ(up->noted, (Notes{"from 0", "to 2", "from 0", "to 2"}));
  EXPECT_EQ(down->noted, (Notes{"to 0", "from 2", "to 0", "from 2"}));
}

std::vector<Pending> broadcasts(Group* group, int number) {
  return group->together("x", [&] {
    std::vector<Pending> messages;
    for (int i = 0; i < number; ++i) messages.push_back(group->broadcast(filled(1), i % 2, "x"));
    return messages;
  });
}

TEST(Group, LaunchesMessagesTogetherWhereTheBackendCan) {
  const auto backend = c10::make_intrusive<Grouping>(-1);
  Group group = group_over(backend);
  EXPECT_FALSE(group.free_point_to_point());
  for (Pending& message : broadcasts(&group, 3)) message.wait();
  EXPECT_EQ(backend->launches_, 1);
  EXPECT_EQ(backend->messages_, 3);
}

TEST(Group, HasNoTimeoutIfItsBackendDoesNotSay) {
  const auto backend = c10::make_intrusive<Grouping>(-1);
  EXPECT_EQ(group_over(backend).timeout(), watch::kNoTimeout);
  backend->has_options_ = true;  // which are null, as those of torch's `fake` backend
  EXPECT_EQ(group_over(backend).timeout(), watch::kNoTimeout);
}

// Part m of rank r has r + m + 1 values, or none; each says where it is from and goes to.
TEST(Group, SendsEachMemberItsPart) {
  for (const int size : {1, 2, 3, 5}) {
    run_ranks(size, [&](int rank, const StorePtr& store) {
      Group group = make_group(store, "tensor parallel", rank, size);
      const auto part = [&](int from, int to) {
        return filled(10 * from + to, from == to + 1 ? 0 : from + to + 1);
      };
      std::vector<at::Tensor> sent;
      std::vector<at::Tensor> received;
      for (int other = 0; other < size; ++other) {
        sent.push_back(part(rank, other));
        received.push_back(at::zeros_like(part(other, rank)));
      }
      for (Pending& message : group.all_to_all(received, sent, "slices")) message.wait();
      std::int64_t num_messages = 0;
      for (int other = 0; other < size; ++other) {
        const auto place = static_cast<std::size_t>(other);
        EXPECT_TRUE(at::equal(received[place], part(other, rank)));
        num_messages += other != rank && sent[place].numel() > 0 ? 1 : 0;
      }
      EXPECT_EQ(group.traffic().num_messages, num_messages);
    });
  }
}

// Else all that the thread sends later, in whatever group, would wait for the end of this launch.
TEST(Group, LeavesNoLaunchOpenWhereAMessageFails) {
  const auto backend = c10::make_intrusive<Grouping>(1);
  Group group = group_over(backend);
  EXPECT_THROW(broadcasts(&group, 3), core::CommError);
  EXPECT_EQ(backend->open_, 0);
}

TEST(Group, IssuesNothingOnceItWasGivenUp) {
  const auto backend = c10::make_intrusive<Grouping>(-1);
  Group group = group_over(backend);
  group.give_up("nobody comes").wait();
  EXPECT_EQ(backend->aborts_, 1);
  try {
    broadcasts(&group, 1);
    ADD_FAILURE() << "it was issued";
  } catch (const core::CommError& error) {
    EXPECT_NE(std::string(error.what()).find("given up: nobody comes"), std::string::npos);
  }
  EXPECT_EQ(backend->messages_, 0);
}

TEST(Group, OfOneCommunicatesNothing) {
  Group group(nullptr, "row", 0, 1);
  const at::Tensor tensor = filled(3);
  group.broadcast(tensor, 0, "x").wait();
  group.reduce_sum(tensor, 0, "x").wait();
  group.all_reduce_max(tensor, "x").wait();
  EXPECT_EQ(tensor[4].item<float>(), 3);
  const at::Tensor all = at::zeros({1, tensor.numel()});
  group.all_gather(all, tensor, "x").wait();
  EXPECT_TRUE(all[0].equal(tensor));
  EXPECT_EQ(group.traffic().num_messages, 0);
}

TEST(Group, RefusesToBeOfSeveralWithoutAProcessGroup) {
  EXPECT_THROW(Group(nullptr, "row", 0, 2), core::InternalError);
}

TEST(Group, BroadcastsFromEachRootAndCountsThere) {
  run_ranks(3, [](int rank, const StorePtr& store) {
    Group group = make_group(store, "g", rank, 3);
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
      for (int root = 0; root < 3; ++root) {
        const at::Tensor tensor = filled(rank + 10, 5, dtype);
        group.broadcast(tensor, root, "x").wait();
        EXPECT_EQ(tensor[4].item<float>(), static_cast<float>(root + 10));
      }
    }
    EXPECT_EQ(group.traffic().num_messages, 2);
    EXPECT_EQ(group.traffic().num_bytes, 5 * 4 + 5 * 2);
  });
}

TEST(Group, ReducesToTheRootAndCountsElsewhere) {
  run_ranks(3, [](int rank, const StorePtr& store) {
    Group group = make_group(store, "g", rank, 3);
    const at::Tensor tensor = filled(1 << rank);
    group.reduce_sum(tensor, 1, "x").wait();
    if (rank == 1) {
      EXPECT_EQ(tensor[0].item<float>(), 7);
    }
    EXPECT_EQ(group.traffic().num_bytes, rank == 1 ? 0 : 20);
  });
}

TEST(Group, SendsToOneMember) {
  run_ranks(3, [](int rank, const StorePtr& store) {
    Group group = make_group(store, "g", rank, 3);
    EXPECT_TRUE(group.free_point_to_point());
    const int next = (rank + 1) % 3;
    const int previous = (rank + 2) % 3;
    const at::Tensor inbox = filled(-1);
    Pending receive = group.receive(inbox, previous, "x");
    Pending send = group.send(filled(rank), next, "x");
    receive.wait();
    send.wait();
    EXPECT_EQ(inbox[2].item<float>(), static_cast<float>(previous));
    EXPECT_EQ(group.traffic().num_messages, 1);
    EXPECT_EQ(group.traffic().num_bytes, 20);
  });
}

// Two messages of one name, which the receiver takes in the other order.
TEST(Group, KeepsMessagesOfCopiesApart) {
  run_ranks(2, [](int rank, const StorePtr& store) {
    Group first = make_group(store, "g", rank, 2);
    Group second = first;
    first.keep_apart(1);
    second.keep_apart(2);
    if (rank == 0) {
      wait_all({first.send(filled(1), 1, "x"), second.send(filled(2), 1, "x")});
      return;
    }
    const at::Tensor of_second = filled(-1);
    const at::Tensor of_first = filled(-1);
    wait_all({second.receive(of_second, 0, "x"), first.receive(of_first, 0, "x")});
    EXPECT_EQ(of_first[0].item<float>(), 1);
    EXPECT_EQ(of_second[0].item<float>(), 2);
  });
}

TEST(Group, SendsNothingOfAnEmptyTensor) {
  run_ranks(2, [](int rank, const StorePtr& store) {
    Group group = make_group(store, "g", rank, 2);
    const at::Tensor empty = at::zeros({0});
    group.broadcast(empty, 0, "x").wait();
    group.reduce_sum(empty, 0, "x").wait();
    if (rank == 0) group.send(empty, 1, "x").wait();
    EXPECT_EQ(group.traffic().num_messages, 0);
    meet(group);
  });
}

// What a peer's death looks like from every kind of call.
TEST(Group, NamesTheOperationWhenAPeerHasLeft) {
  run_ranks(2, [](int rank, const StorePtr& store) {
    Group group = make_group(store, "column", rank, 2, std::chrono::milliseconds(1000));
    meet(group);
    if (rank == 1) return;  // its process group goes with it
    const auto start = Clock::now();
    try {
      group.receive(filled(0), 1, "blocks.3").wait();
      ADD_FAILURE() << "received from a rank that left";
    } catch (const core::CommError& error) {
      const std::string message = error.what();
      EXPECT_NE(message.find("receiving blocks.3 along the column from 1"), std::string::npos)
          << message;
    }
    EXPECT_THROW(group.all_reduce_max(filled(0), "x").wait(), core::CommError);
    EXPECT_THROW(group.broadcast(filled(0, 1 << 20), 1, "x").wait(), core::CommError);
    EXPECT_LT(Clock::now() - start, std::chrono::milliseconds(4500));
  });
}

TEST(Group, GivesUpOnAPeerThatDoesNotComeWithinTheTimeout) {
  run_ranks(2, [](int rank, const StorePtr& store) {
    Group group = make_group(store, "g", rank, 2, std::chrono::milliseconds(400));
    meet(group);
    const auto start = Clock::now();
    if (rank == 0) {
      EXPECT_THROW(group.receive(filled(0), 1, "x").wait(), core::CommError);
      EXPECT_LT(Clock::now() - start, std::chrono::milliseconds(1500));
      store->set("over", std::vector<std::uint8_t>{1});
    } else {
      store->wait({"over"});  // alive, and elsewhere
    }
  });
}

// A member that waits in the other group would learn of it at its own timeout.
TEST(Group, ClosesBothDirectionsWhenAWaitFails) {
  run_ranks(2, [](int rank, const StorePtr& store) {
    const std::chrono::milliseconds timeout(rank == 0 ? 400 : 60000);
    Group group(make_process_group(store, "up", rank, 2, timeout), "column", rank, 2,
                c10::DeviceType::CPU, {}, make_process_group(store, "down", rank, 2, timeout));
    meet(group);
    const auto start = Clock::now();
    // Rank 0 waits for what comes down, and rank 1 for what goes up.
    EXPECT_THROW(group.receive(filled(0), 1 - rank, "x" + std::to_string(rank)).wait(),
                 core::CommError);
    EXPECT_LT(Clock::now() - start, std::chrono::milliseconds(5000));
    if (store->add("over", 1) == 2) store->set("both", std::vector<std::uint8_t>{1});
    store->wait({"both"});
  });
}

// As a process does that ends: its timeout may be half an hour.
TEST(Group, GivesUpAtOnceWhenAskedTo) {
  run_ranks(2, [](int rank, const StorePtr& store) {
    Group group = make_group(store, "g", rank, 2, std::chrono::milliseconds(60000));
    meet(group);
    const auto start = Clock::now();
    if (rank == 0) {
      Group copy = group;  // as each engine of a mesh has one
      std::thread other([&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(100));
        group.give_up("nobody comes");
      });
      EXPECT_THROW(copy.receive(filled(0), 1, "x").wait(), core::CommError);
      EXPECT_THROW(copy.receive(filled(0), 1, "y").wait(), core::CommError);
      EXPECT_LT(Clock::now() - start, std::chrono::milliseconds(5000));
      other.join();
      store->set("over", std::vector<std::uint8_t>{1});
    } else {
      store->wait({"over"});
    }
  });
}

// Rank 0 waits where dmuon cannot end a wait; rank 1 lives on, and waits there too.
TEST(Group, ClosesConnectionsInWhichOthersWait) {
  run_ranks(2, [](int rank, const StorePtr& store) {
    auto framework = make_process_group(store, "g", rank, 2, std::chrono::milliseconds(60000));
    Group group(framework, "mesh (dimension 0)", rank, 2);
    meet(group);
    const auto start = Clock::now();
    std::thread watch([&, mutable_group = group]() mutable {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      if (rank == 0) mutable_group.close_connections();
    });
    std::vector<at::Tensor> tensors{filled(0)};
    EXPECT_ANY_THROW(framework->recv(tensors, 1 - rank, 1 + rank)->wait());
    EXPECT_LT(Clock::now() - start, std::chrono::milliseconds(5000));
    watch.join();
    if (store->add("over", 1) == 2) store->set("both", std::vector<std::uint8_t>{1});
    store->wait({"both"});
  });
  Group(nullptr, "alone", 0, 1).close_connections();
}

}  // namespace
}  // namespace dmuon::wire
