#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "dmuon/plan/inventory.h"

namespace dmuon::plan {

/// What a device does per second, by kind; see cost.cpp for where each figure comes from.
struct DeviceModel {
  std::string_view kind;
  double flop_rate;       ///< FLOP/s of a matrix product large enough to fill the device
  double full_elements;   ///< elements of a product's result that fill the device
  double byte_rate;       ///< bytes/s of an elementwise pass
  double launch_seconds;  ///< seconds to start one operation
};

/// @return the known kinds: "cpu", "cuda".
std::vector<std::string> device_kinds();

/// @throws InvalidArgument for an unknown kind, with the known ones.
const DeviceModel& device_model(std::string_view kind);

/// Predicted seconds of the whole owner path (momentum, Newton-Schulz with
/// five steps, update, cast) for one batch of equal shapes.
/// @param shape     rows, cols >= 1.
/// @param num_batch matrices in the batch, >= 1.
double modelled_seconds(const DeviceModel& device, Shape shape, int num_batch);

/// The most matrices of a shape that one batch may hold: working memory is
/// bounded by 64 MiB of fp32 input a batch, or one matrix.
int max_batch(Shape shape);

/// c[s,b] of one shape, and the cheapest way to run k matrices of it as batches.
/// Costs may come from a model or a measurement; nothing is assumed of them but
/// that they are finite and >= 0 (measured ones are neither monotone nor convex).
/// Immutable, so safe to share between threads.
class BatchCosts {
 public:
  /// @param batch_seconds [max batch] seconds of one batch of 1, 2, ... matrices.
  /// @param num_matrices  >= 0, the most that will be asked for.
  /// @throws InvalidArgument, naming the first bad argument.
  BatchCosts(std::vector<double> batch_seconds, int num_matrices);

  /// @param k in [0, num_matrices].
  double best_seconds(int k) const { return best_seconds_[k]; }
  const std::vector<double>& best_seconds() const { return best_seconds_; }

  /// The batch sizes behind best_seconds(k), largest first; they sum to k.
  std::vector<int> best_batches(int k) const;

  /// @param num_batch in [1, max_batch()].
  double batch_seconds(int num_batch) const { return batch_seconds_[num_batch - 1]; }
  int max_batch() const { return static_cast<int>(batch_seconds_.size()); }

  /// The cheapest batch of any size: what a slot pays at least for one matrix.
  double cheapest_batch() const;

 private:
  std::vector<double> batch_seconds_;
  std::vector<double> best_seconds_;  // [num_matrices + 1]
  std::vector<int> last_batch_;       // [num_matrices + 1], a batch of some best way
};

/// One entry a shape, in the order of ShapeGroups::shapes.
using CostTable = std::vector<BatchCosts>;

CostTable modelled_costs(const ShapeGroups& groups, const DeviceModel& device);

}  // namespace dmuon::plan
