#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <vector>

#include "dmuon/core/by_enum.h"

namespace dmuon::watch {

/// Kinds of steps that all ranks of a mesh come to in one order, each numbered from 1.
enum class Rendezvous : int { kOperation, kComparison, kAgreement, kUpdate };
inline constexpr int kNumRendezvous = 4;

/// The state of a rank, as it stores it for others.
///
///   report.issue("publish of 'a'");
///   board.store(report);
struct Report {
  static constexpr std::size_t kMostHashes = 64;  ///< ranks that are further apart are not compared
  static constexpr std::size_t kMostWords = 8;

  core::ByEnum<Rendezvous, std::int64_t, kNumRendezvous> reached{};  ///< numbers it has come to
  std::optional<Rendezvous> awaited;  ///< it does nothing until all ranks have come to ...
  std::int64_t number = 0;            ///< ... this one, to which it has come itself
  std::string where;                  ///< this one in words, for people
  std::string pass;                   ///< the model's open pass, for people; or empty
  std::string over;                   ///< the reason if it comes to nothing more; else empty
  std::int64_t stored_ms = 0;         ///< when, by its clock, since 1970; 0: never

  // The newest operations; the last one has the number `reached[kOperation]`.
  std::deque<std::uint64_t> hashes;  ///< of each and all before it
  std::deque<std::string> words;     ///< in words; fewer

  /// Comes to the next operation.
  void issue(const std::string& what);
  /// Has come to the operations up to number `last` alone.
  void take_back_to(std::int64_t last);
};

/// Returns the report as JSON: 1.5 KB if operations have words of 40 bytes and all windows are
/// full.
std::string to_text(const Report& report);
Report report_from(const std::string& text);

/// Returns the reason if ranks certainly wait in vain; else an empty string. Names two ranks, the
/// same ones whichever rank asks. Reports may be old. The time grows with hashes times ranks,
/// and with ranks times places at which some wait.
///
/// Three states are certain. Two ranks have issued different operations at one number. A rank is
/// over, and others wait for it. Ranks wait for each other in a circle.
std::string in_vain(const std::vector<Report>& reports);

/// True if another rank has not come to the rendezvous that the rank at `self` awaits.
bool awaits_others(const std::vector<Report>& reports, std::size_t self);

/// Returns a table for people, for a wait of the rank at `self` that has failed. First it names the
/// ranks that have not come to the awaited rendezvous. Then it has a line for each rank: the last
/// operation, the awaited rendezvous, the reason if it is over, and the age of the report. In a
/// large mesh it shows only the ranks that are furthest behind.
/// @param now_ms  since 1970. Clocks of machines differ, and ages with them.
/// @param answered  false if the store did not answer, so that reports may be older than needed.
std::string attendance(const std::vector<Report>& reports, std::size_t self, std::int64_t now_ms,
                       bool answered = true);

}  // namespace dmuon::watch
