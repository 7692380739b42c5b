#pragma once

#include "dmuon/predict/rates.h"
#include "dmuon/simulate/execution.h"

// The steps that dmuon is compared with: weights, gradients and optimizer state sharded by FSDP2.
namespace dmuon::predict {

enum class Sharded {
  kAdamW,   ///< fused AdamW for all parameters
  kMuonAg,  ///< Muon that gathers each matrix's direction in the step, and orthogonalises it on all
            ///< ranks of a node
};

/// Training steps under FSDP2, inside a node, or HSDP, between nodes. All ranks do the same. So at
/// most two nodes of at most two ranks stand for all. Durations are those of the mesh.
///
/// FSDP2 gathers a unit's weights one use ahead, in the backward too. A unit's gradients are
/// reduced and scattered inside the node after its backward, then summed between nodes. On CPUs it
/// waits for each message before it goes on.
simulate::Programs sharded_programs(const Setting& setting, Sharded optimizer, int num_steps);

/// The elements of each unit of these programs. The first unit has what Muon does not take.
core::Vector<core::UnitIndex, double> elements_of(const Setting& setting);

class ShardedDurations : public simulate::Durations {
 public:
  explicit ShardedDurations(const Setting& setting);

  double work_us(core::Owner rank, const simulate::Issue& issue) override;
  double message_us(core::Owner rank, const simulate::Issue& issue,
                    const schedule::Message& message) override;
  bool rendezvous() const override { return true; }

 private:
  struct OfUnit {
    double forward = 0, gather = 0, scatter = 0, sum = 0, newton_schulz = 0;  // microseconds
  };
  core::Vector<core::UnitIndex, OfUnit> units_;
  layout::Mesh simulated_;
};

}  // namespace dmuon::predict
