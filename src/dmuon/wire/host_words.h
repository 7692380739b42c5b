#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "dmuon/watch/watch.h"
#include "dmuon/wire/group.h"

namespace dmuon::wire {

/// Exchanges a few words of host memory between all ranks of a mesh.
///
///   HostWords words({row, column, tensor_parallel}, watch);
///   words.all_reduce_max(tensor, Rendezvous::kAgreement, "the agreement of a step");
///
/// Words travel along one group after the other: 2 (R + G + T) hops, and a connection to each rank
/// of these groups. A ring over all ranks would take 2 R G T hops.
///
/// Each call blocks, and is one rendezvous of the Watch. All ranks make the same calls in one
/// order. Not thread-safe.
/// @throws CommError as Group and Watch::wait().
class HostWords {
 public:
  /// @param groups  this rank's groups, one for each dimension of the mesh, the innermost first.
  HostWords(std::vector<Group> groups, std::shared_ptr<watch::Watch> watch)
      : groups_(std::move(groups)), watch_(std::move(watch)) {}

  /// Computes the largest value of each element over all ranks, in place.
  void all_reduce_max(const at::Tensor& tensor, watch::Rendezvous kind, const std::string& what);

  /// Returns the words of each rank: by slot, and by rank of the tensor-parallel group before that.
  std::vector<std::array<std::int64_t, 4>> all_gather(std::array<std::int64_t, 4> words,
                                                      watch::Rendezvous kind,
                                                      const std::string& what);

 private:
  std::vector<Group> groups_;
  std::shared_ptr<watch::Watch> watch_;
};

}  // namespace dmuon::wire
