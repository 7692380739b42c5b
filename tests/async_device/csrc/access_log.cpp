#include "async_device/csrc/access_log.h"

#include <algorithm>

namespace async_device {
namespace {

std::string stream_name(int stream) {
  return stream < 0 ? "the host" : "stream " + std::to_string(stream);
}

std::string subject(const Access& access) {
  return describe(access.label) + " on " + stream_name(access.stream) +
         (access.write ? " writes" : " reads");
}

bool is_before(const Access& earlier, const Access& access, const VectorClock& known) {
  return earlier.stream == access.stream || known.at(earlier.stream) >= earlier.time;
}

}  // namespace

std::optional<Access> AccessLog::conflict(const Access& access, const VectorClock& known) const {
  for (const Access& earlier : accesses_) {
    if ((earlier.write || access.write) && !is_before(earlier, access, known) &&
        overlap(earlier.region, access.region))
      return earlier;
  }
  return std::nullopt;
}

std::optional<Access> AccessLog::add(const Access& access, const VectorClock& known) {
  std::optional<Access> race = conflict(access, known);
  if (access.stream < 0) return race;
  std::erase_if(accesses_, [&](const Access& earlier) {
    const bool is_outdone = access.write || (!earlier.write && earlier.stream == access.stream);
    return is_outdone && is_before(earlier, access, known) && covers(access.region, earlier.region);
  });
  accesses_.push_back(access);
  return race;
}

std::string describe_race(const Access& earlier, const Access& later, int64_t block_bytes) {
  const int64_t begin = std::max(earlier.region.begin, later.region.begin);
  const int64_t end = std::min(earlier.region.end(), later.region.end());
  return "race: " + subject(later) + " what " + subject(earlier) +
         ", with no event between them (bytes " + std::to_string(begin) + " to " +
         std::to_string(end) + " of a block of " + std::to_string(block_bytes) + ")";
}

}  // namespace async_device
