#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <vector>

namespace dmuon::watch {

/// What all ranks of a mesh do in one order, each numbered from 1.
enum class Rendezvous : int { kOperation, kComparison, kAgreement };
inline constexpr int kNumRendezvous = 3;

/// What a rank says of itself.
struct Report {
  static constexpr std::size_t kMostHashes = 64;  ///< ranks that are further apart are not compared
  static constexpr std::size_t kMostWords = 8;

  std::int64_t reached[kNumRendezvous] = {};  ///< how many of each it has come to
  std::optional<Rendezvous> awaited;          ///< it does nothing until all ranks have come to ...
  std::int64_t number = 0;                    ///< ... this one, to which it has come itself
  std::string where;                          ///< what that is, for people
  std::string pass;                           ///< the model's that it is in, for people; or empty
  std::string over;                           ///< why it will not come to anything more; else empty
  std::int64_t told_ms = 0;                   ///< when, by its clock, since 1970; 0: never

  // The newest operations, the last being number `reached[kOperation]`.
  std::deque<std::uint64_t> hashes;  ///< of each and all before it
  std::deque<std::string> words;     ///< what they are; of fewer

  /// Comes to its next operation.
  void issue(const std::string& what);
};

/// 1.5 KB where operations have words of 40 bytes each and all windows are full.
std::string to_text(const Report& report);
Report report_from(const std::string& text);

/// Why ranks wait in vain, if that is certain; else empty. Two of them are named, the same ones
/// whoever asks. Reports may be old. Takes time in proportion to hashes and ranks, and to ranks for
/// each place at which some wait.
///
/// Certain are: two ranks have issued different operations at one number; a rank that is waited for
/// is over; ranks wait for each other in a circle.
std::string in_vain(const std::vector<Report>& reports);

/// Whether the rank at `self` awaits what another has not come to.
bool awaits_others(const std::vector<Report>& reports, std::size_t self);

/// For people, where the wait of the rank at `self` has failed: who has not come to what it awaits;
/// then a line for each rank: what it issued last, what it waits for, whether it is over, and how
/// long ago it told so. Of many ranks those that are furthest behind.
/// @param now_ms  since 1970. Clocks of machines differ: so may ages.
std::string attendance(const std::vector<Report>& reports, std::size_t self, std::int64_t now_ms);

}  // namespace dmuon::watch
