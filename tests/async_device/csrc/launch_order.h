#pragma once

#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

namespace async_device {

/// Records the order in which this process launches communication, over all its groups, and
/// compares it with other ranks. If two ranks launch common communication in different orders, NCCL
/// can wait for ever: on each rank the kernel of one group may hold resources that the other
/// group's needs.
///
/// Ranks exchange their orders through c10d's store: on request, or when a communication takes
/// longer than `stall_s` of the settings, which a thread watches. Safe from any thread.
class LaunchOrder {
 public:
  static LaunchOrder& get();

  /// Forgets what was launched; from now on ranks meet in this store, which all of them have.
  void connect(c10::intrusive_ptr<c10d::Store> store, int rank, int num_ranks);

  /// @param operation  alike on all ranks that take part; interned.
  /// @param ranks      that take part, as ",0,2,"; interned.
  void add(const std::string* operation, const std::string* ranks);

  /// All ranks call it. @throws c10::Error if two of them launched in different orders.
  void check();

 private:
  struct Launch {
    const std::string* operation;
    const std::string* ranks;
  };

  void watch();
  void look_into_stall();
  void publish(const std::string& key);
  std::optional<std::string> compare(int other, const std::string& published, bool is_final);

  std::mutex mutex_;
  std::vector<Launch> launches_;
  c10::intrusive_ptr<c10d::Store> store_;
  int rank_ = 0;
  int num_ranks_ = 0;
  int64_t num_checks_ = 0;
  bool is_watched_ = false;
};

/// ",0,2,": sorted.
const std::string* interned_ranks(std::vector<int> ranks);

}  // namespace async_device
