#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "dmuon/watch/report.h"

namespace dmuon::watch {

/// Shares the state of the watch between the ranks of a mesh, through keys of a store: a report of
/// each rank, the alarm counter, the newest claim to diagnose, and the diagnosis.
///
///   board.store(own_report);
///   const std::int64_t alarm = board.alarm(/*raise=*/true);
///   if (board.claim(answered, alarm)) board.publish(in_vain(board.reports()));
///
/// Only reports are large (report.h), and only reports() reads several values. Each other call is
/// one request of some bytes; publish() is two. Not thread-safe. Throws the store's exceptions.
class Board {
 public:
  /// Makes its own connection to the store.
  Board(const c10::intrusive_ptr<c10d::Store>& store, std::size_t rank, std::size_t size);

  /// Replaces this rank's report.
  void store(const Report& own);

  /// Increments the alarm counter if `raise`. Returns the counter.
  std::int64_t alarm(bool raise);

  /// True if publish() has incremented a counter of this value.
  static bool is_published(std::int64_t alarm) { return alarm >= kPublished; }

  /// Returns the alarm that the newest claim known to this rank has diagnosed.
  std::int64_t diagnosed() const { return diagnosed_; }

  /// Claims to diagnose. Returns true if granted: if this rank knew the newest claim. A
  /// rank that is denied knows it then. So one of many ranks that claim in an interval is granted,
  /// even if ranks have died.
  /// @param answered  the alarm for which all ranks have stored their reports: diagnosed, if
  /// granted.
  /// @param alarm     the counter.
  bool claim(std::int64_t answered, std::int64_t alarm);

  /// Returns each rank's newest report; an empty one for a rank that has stored none.
  std::vector<Report> reports();

  /// Stores a diagnosis for all ranks, and increments the alarm counter by so much that
  /// is_published() is true.
  void publish(const std::string& diagnosis);

  /// Returns the published diagnosis. Waits for one.
  std::string diagnosis();

 private:
  static constexpr std::int64_t kPublished = std::int64_t{1} << 40;  // more than any alarm

  c10::intrusive_ptr<c10d::Store> store_;
  std::size_t rank_;
  std::vector<std::string> keys_;  // of the reports
  std::vector<bool> stored_;       // true for ranks whose report is known to be there
  std::string claim_;              // the newest one that this rank knows
  std::int64_t diagnosed_ = 0;
};

}  // namespace dmuon::watch
