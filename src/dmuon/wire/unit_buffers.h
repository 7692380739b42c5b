#pragma once

#include <memory>
#include <string>

#include "dmuon/layout/packing.h"
#include "dmuon/wire/buffer.h"

namespace dmuon::wire {

/// The packed buffers through which a unit's weights and gradients travel.
struct UnitBuffers {
  UnitBuffers(std::string of, layout::Packing where, const std::shared_ptr<BufferPool>& pool,
              at::ScalarType compute_dtype, at::ScalarType reduce_dtype)
      : name(std::move(of)),
        packing(std::move(where)),
        weights(pool, packing.num_elements, compute_dtype, "a weight of '" + name + "'"),
        gradients(pool, packing.num_elements, reduce_dtype, "a gradient of '" + name + "'"),
        partial_filled(packing.parameters.size(), false) {}

  std::string name;
  layout::Packing packing;
  PackedBuffer weights;
  PackedBuffer gradients;
  std::unique_ptr<PackedBuffer> node_copy;   ///< [own column]; null without node copies
  std::unique_ptr<PackedBuffer> inbox;       ///< of the route's stage 1
  std::unique_ptr<PackedBuffer> node_mean;   ///< [own column] between the route's stages
  std::unique_ptr<PackedBuffer> node_inbox;  ///< of stage 2
  std::unique_ptr<PackedBuffer> partial;     ///< fp32 [own column] sums of no_sync; else null
  core::Vector<layout::PackedIndex, bool> partial_filled;
};

}  // namespace dmuon::wire
