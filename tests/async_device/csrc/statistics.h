#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace async_device {

/// The counts of one phase.
struct PhaseCounts {
  int64_t kernels = 0;                                 // operators that were launched
  std::map<std::string, int64_t> kernels_by_stream{};  // by Stream::kind
  int64_t communication_launches = 0;                  // a coalesced group is one
  int64_t messages = 0;                                // calls of a group, each by itself
  int64_t bytes_sent = 0;                              // what this rank gives to others
  int64_t peak_bytes = 0;                              // of the allocator
  std::map<std::string, int64_t> host_syncs{};         // by what a GPU would block the host for
  std::map<std::string, int64_t> artificial_syncs{};   // that only this device needs
};

/// Counts by phase. Safe from any thread; a phase is the whole process's, whatever the thread.
class Statistics {
 public:
  static Statistics& get();

  /// @param stream_kind  see Stream::kind.
  void count_kernel(const std::string& stream_kind);
  /// @param bytes  of all messages.
  void count_launch(int64_t messages, int64_t bytes);
  void count_host_sync(const std::string& what);
  void count_artificial_sync(const std::string& what);
  void set_live_bytes(int64_t bytes);
  void add_race(const std::string& race);

  /// Enters a phase. Returns the previous one's name.
  std::string enter(const std::string& phase);

  std::map<std::string, PhaseCounts> phases() const;
  /// Returns each kind of race once.
  std::vector<std::string> races() const;
  int64_t live_bytes() const;
  void reset();

 private:
  mutable std::mutex mutex_;
  std::string phase_;
  std::map<std::string, PhaseCounts> counts_;
  std::vector<std::string> races_;
  int64_t live_bytes_ = 0;
};

}  // namespace async_device
