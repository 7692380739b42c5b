#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "dmuon/layout/mesh.h"
#include "dmuon/watch/watch.h"
#include "dmuon/wire/group.h"

namespace dmuon::wire {

/// Exchanges a few words of host memory between all ranks of a mesh.
///
///   HostWords words({row, column}, watch);
///   words.all_reduce_max(tensor, Rendezvous::kAgreement, "the agreement of a step");
///
/// Words travel along the row first, then along the column: 2 (R + G) hops one after the other, and
/// a connection to each rank of the row and the column. A ring over all ranks would take 2 R G
/// hops.
///
/// Each call blocks, and is one rendezvous of the Watch. All ranks make the same calls in one
/// order. Not thread-safe.
/// @throws CommError as Group and Watch::wait().
class HostWords {
 public:
  HostWords(layout::PerAxis<Group> along, std::shared_ptr<watch::Watch> watch)
      : along_(std::move(along)), watch_(std::move(watch)) {}

  /// Computes the largest value of each element over all ranks, in place.
  void all_reduce_max(const at::Tensor& tensor, watch::Rendezvous kind, const std::string& what);

  /// Returns the words of each rank, by slot.
  std::vector<std::array<std::int64_t, 4>> all_gather(std::array<std::int64_t, 4> words,
                                                      watch::Rendezvous kind,
                                                      const std::string& what);

 private:
  void await(Pending pending, watch::Rendezvous kind, std::int64_t number, const std::string& what);

  layout::PerAxis<Group> along_;
  std::shared_ptr<watch::Watch> watch_;
};

}  // namespace dmuon::wire
