#include "dmuon/simulate/critical_path.h"

#include <algorithm>
#include <limits>

namespace dmuon::simulate {

std::vector<PathPart> critical_path(const Execution& execution, core::Owner rank, int issue,
                                    double from_us) {
  constexpr int kAll = std::numeric_limits<int>::max();
  std::vector<PathPart> path;  // backwards
  int num_messages = kAll;     // of the operation that are on the path
  double end_us = execution.origins[rank][static_cast<std::size_t>(issue)].end_us;
  while (issue >= 0 && end_us > from_us) {
    const Origin& of = execution.origins[rank][static_cast<std::size_t>(issue)];
    const auto behind = std::ranges::lower_bound(of.late, num_messages, {}, &LateMember::message);
    const LateMember* late = behind == of.late.begin() ? nullptr : &*std::prev(behind);
    const double begin_us = late != nullptr ? late->arrival.at_us : of.start_us;
    if (begin_us < end_us) path.push_back({rank, issue, std::max(begin_us, from_us), end_us});
    end_us = begin_us;
    rank = late != nullptr ? late->arrival.rank : rank;
    issue = late != nullptr ? late->arrival.issue : of.after;
    num_messages = late != nullptr ? late->arrival.message : kAll;
  }
  std::ranges::reverse(path);
  return path;
}

}  // namespace dmuon::simulate
