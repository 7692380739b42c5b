#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "dmuon/watch/report.h"

namespace dmuon::watch {

/// What the ranks of a mesh tell each other through a store: a report of each, a bell, who judges,
/// and the verdict. Reports are the only large values (report.h), and reports() the only call that
/// reads more than one value; each other call is one request of some bytes.
///
/// Not thread-safe. Throws what the store throws.
class Board {
 public:
  /// Makes its own connection to the store.
  Board(const c10::intrusive_ptr<c10d::Store>& store, std::size_t rank, std::size_t size);

  /// In place of what this rank told before.
  void tell(const Report& own);

  /// Rings the bell, or only listens. @return what it shows: it grows with every ring.
  std::int64_t bell(bool ring);

  /// Whether a bell that shows this was rung by publish().
  static bool is_published(std::int64_t shown) { return shown >= kPublished; }

  /// What the bell showed that has been judged, as far as this rank knows.
  std::int64_t judged() const { return judged_; }

  /// Asks to be the one that judges. Of the ranks whose last call was before somebody's last
  /// success none succeeds: so of many that ask once an interval one does in each interval,
  /// whichever of them have died.
  /// @param answered  what the bell showed when all that had heard it had told: judged, if granted.
  /// @param shown     what it shows.
  bool claim(std::int64_t answered, std::int64_t shown);

  /// What each rank told last; of a rank that has told nothing, a report that says nothing.
  std::vector<Report> reports();

  /// Tells a verdict to all ranks, and rings so that they know.
  void publish(const std::string& verdict);

  /// What was published, after a bell that says so.
  std::string verdict();

 private:
  static constexpr std::int64_t kPublished = std::int64_t{1} << 40;  // more than is ever rung

  c10::intrusive_ptr<c10d::Store> store_;
  std::size_t rank_;
  std::vector<std::string> keys_;  // of the reports
  std::vector<bool> told_;         // by whom a report is known to be there
  std::string claim_;              // the last one granted, as far as this rank knows
  std::int64_t judged_ = 0;
};

}  // namespace dmuon::watch
