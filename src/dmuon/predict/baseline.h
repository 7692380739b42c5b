#pragma once

#include "dmuon/predict/rates.h"
#include "dmuon/simulate/execution.h"

// The steps that dmuon is compared with. FSDP2 shards their weights, gradients and optimizer state.
// Beside replicated weights (StepOptions::replicated) all ranks have these whole, under
// DistributedDataParallel.
namespace dmuon::predict {

enum class Baseline {
  kAdamW,   ///< fused AdamW for all parameters
  kMuonAg,  ///< Muon that orthogonalises each matrix on all ranks. Under FSDP2 the ranks of a node
            ///< gather its direction in the step before
};

/// Training steps under FSDP2, inside a node, or HSDP, between nodes. All ranks do the same. So at
/// most two nodes of at most two ranks stand for all. Durations are those of the mesh.
///
/// FSDP2 gathers a unit's weights one use ahead, in the backward too. A unit's gradients are
/// reduced and scattered inside the node after its backward, then summed between nodes. On CPUs it
/// waits for each message before it goes on. In Muon-AG's step the directions of one unit travel
/// while those of the unit before are orthogonalised.
///
/// DistributedDataParallel gathers no weights. A unit's gradients are summed over all ranks behind
/// the rest of the backward, which ends with the last sum.
simulate::Programs baseline_programs(const Setting& setting, Baseline optimizer, int num_steps);

/// The elements of each unit of these programs. The first unit has what Muon does not take. Under
/// DistributedDataParallel an output head of its own is in the last unit, since its gradient comes
/// first.
core::Vector<core::UnitIndex, double> elements_of(const Setting& setting);

class BaselineDurations : public simulate::Durations {
 public:
  explicit BaselineDurations(const Setting& setting);

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
