#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "dmuon/engine/executor.h"
#include "dmuon/wire/shards.h"

namespace dmuon::engine {

/// Moves what owners hold to all ranks and back, outside of steps.
///
///     const at::Tensor whole = engine.transfers().gather(leaf, wire::kMaster);
///     engine.transfers().scatter(leaf, wire::kMaster, whole.mul(2));  // owners write
///     engine.publish();                                               // units see new masters
///
/// Names are those of wire::Owned. Threads: as Engine. Errors: CommError if a peer is lost;
/// InvalidArgument for an unknown name, before anything is sent.
class Transfers {
 public:
  /// @param executor         outlives this.
  /// @param num_host_shards  chunks of a leaf in to_shards() and from_shards().
  /// @param drain            waits until nothing is in flight on the mesh's lanes.
  /// @param finish_update    waits for the update of the last step.
  Transfers(Executor* executor, int num_host_shards, std::function<void()> drain,
            std::function<void()> finish_update)
      : executor_(*executor),
        num_host_shards_(num_host_shards),
        drain_(std::move(drain)),
        finish_update_(std::move(finish_update)) {}

  /// Returns the sizes of a leaf's whole named tensor; see wire::Owned.
  std::vector<std::int64_t> sizes_of(core::LeafIndex leaf, const std::string& name) const {
    return executor_.owned().sizes_of(executor_.leaves().at(leaf), name);
  }

  /// Returns the number of rows that the tensor's shards are cut by; see wire::Owned.
  std::int64_t rows_of(core::LeafIndex leaf, const std::string& name) const {
    return executor_.owned().rows_of(executor_.leaves().at(leaf), name);
  }

  /// Returns the named tensor of a leaf on every rank, in its own sizes. A gradient is undefined if
  /// an owner holds nothing of it. Collective.
  at::Tensor gather(core::LeafIndex leaf, const std::string& name) const;

  /// Writes `value` at the owners, to each its part. Other ranks do nothing; nothing is sent.
  void scatter(core::LeafIndex leaf, const std::string& name, const at::Tensor& value) const;

  struct OwnedPart {
    core::ParameterIndex parameter;
    layout::Segment elements;  ///< of the leaf
    at::Tensor tensor;         ///< in sizes of its view
  };
  /// Returns this rank's parts of a leaf's tensor, in order. No update is under way then.
  std::vector<OwnedPart> owned_parts(core::LeafIndex leaf, const std::string& name) const;

  /// Returns this rank's shards, flat, as the host framework cuts its own parameters; see
  /// wire::Shards. Collective.
  std::vector<at::Tensor> to_shards(const std::vector<core::LeafIndex>& which,
                                    const std::string& name, at::ScalarType dtype) const;

  /// Writes all ranks' shards at the owners. Collective.
  void from_shards(const std::vector<core::LeafIndex>& which, const std::string& name,
                   const std::vector<at::Tensor>& shards) const;

 private:
  wire::Shards shards() const;

  Executor& executor_;
  int num_host_shards_;
  std::function<void()> drain_;
  std::function<void()> finish_update_;
};

}  // namespace dmuon::engine
