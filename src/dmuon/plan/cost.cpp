#include "dmuon/plan/cost.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <span>
#include <utility>

#include "dmuon/core/error.h"
#include "dmuon/flops/newton_schulz.h"
#include "dmuon/plan/state_bytes.h"

namespace dmuon::plan {
namespace {

// Momentum 12 bytes an element, Nesterov 12, norm 4, cast into the batch 6, decay and update 20,
// cast out 6: unfused fp32 passes.
constexpr double kBytesPerElement = 60;
constexpr double kElementwiseLaunches = 8;
constexpr double kTile = 128;

// Bounds the working memory of a batch: 64 MiB of fp32 input.
constexpr std::int64_t kMaxBatchElements = std::int64_t{16} << 20;
// Limits the sizes to measure; beyond 64, sharing launches gains nothing more.
constexpr int kBatchSizes[] = {1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64};

double tiles_along(double size) { return std::ceil(size / kTile); }

// Models five Newton-Schulz steps of one batch on one device.
class Model {
 public:
  Model(const Device& device, const Shape& shape, double num_batch)
      : device_(device),
        m_(static_cast<double>(std::min(shape.rows, shape.cols))),
        n_(static_cast<double>(std::max(shape.rows, shape.cols))),
        num_batch_(num_batch) {}

  double seconds(flops::Form form) const {
    const flops::Products count = flops::products(flops::segments(5, form));
    const int launches = count.to_square + count.square + count.to_wide;
    return count.to_square * symmetric_seconds(n_) + count.square * symmetric_seconds(m_) +
           count.to_wide * full_seconds(n_, m_) + launches * device_.launch_us * 1e-6;
  }

 private:
  // Times an m x m result from this inner dimension.
  double symmetric_seconds(double inner) const {
    if (device_.symmetric_tflops <= 0) return full_seconds(m_, inner);
    const double tiles = tiles_along(m_) * (tiles_along(m_) + 1) / 2;
    return work_seconds(flops::product(m_, m_, inner) / 2, tiles, device_.symmetric_tflops);
  }

  // Times an m x cols result.
  double full_seconds(double cols, double inner) const {
    return work_seconds(flops::product(m_, cols, inner), tiles_along(m_) * tiles_along(cols),
                        device_.product_tflops);
  }

  // Tiles are worked on in rounds; the last one takes as long as a full one.
  double work_seconds(double work, double tiles, double tflops) const {
    const double rounds = std::ceil(num_batch_ * tiles / device_.tiles);
    const double filled = num_batch_ * tiles / (rounds * device_.tiles);
    return num_batch_ * work / (tflops * 1e12 * filled);
  }

  const Device& device_;
  double m_;
  double n_;
  double num_batch_;
};

// Slices of directions come from the other ranks of the group, and slices of results return. If the
// matrix is not cut, its whole result goes to each of the others. All count as fp32, though results
// travel in the iteration's dtype.
double link_seconds(const Device& device, const Shape& shape, int num_batch, int tensor_parallel) {
  if (tensor_parallel == 1) return 0;
  const int times = shape.tensor_parallel ? 2 : 1;
  const double parts = shape.tensor_parallel ? tensor_parallel : 1;
  const double elements = num_batch * static_cast<double>(shape.num_elements());
  const double bytes = times * 4 * (tensor_parallel - 1) / parts * elements;
  return bytes / (device.link_gb_per_s * 1e9) + times * device.launch_us * 1e-6;
}

// Returns the table's only entry for one of Shape::of_costs.
const ShapeCosts& entry_of(const CostTable& costs, const Shape& shape) {
  const auto is_it = [&](const ShapeCosts& entry) { return entry.shape == shape; };
  const auto found = std::find_if(costs.shapes.begin(), costs.shapes.end(), is_it);
  core::require(found != costs.shapes.end(), "costs: expected an entry for shape ",
                to_string(shape), "; got none");
  core::require(std::find_if(found + 1, costs.shapes.end(), is_it) == costs.shapes.end(),
                "costs: expected one entry for shape ", to_string(shape), "; got two");
  return *found;
}

}  // namespace

std::vector<int> candidate_batches(const Shape& shape, int num_matrices) {
  std::vector<int> sizes;
  for (const int size : kBatchSizes) {
    const bool fits = size == 1 || shape.num_elements() <= kMaxBatchElements / size;
    if (fits && size <= std::max(num_matrices, 1)) sizes.push_back(size);
  }
  return sizes;
}

Nanoseconds modelled_ns(const Device& device, const Shape& shape, int num_batch,
                        int tensor_parallel) {
  const Model model(device, shape, static_cast<double>(shape.num_matrices) * num_batch);
  const double bytes = kBytesPerElement * num_batch * static_cast<double>(shape.num_elements());
  const double seconds =
      std::min(model.seconds(flops::Form::kDirect), model.seconds(flops::Form::kGram)) +
      bytes / (device.elementwise_gb_per_s * 1e9) + kElementwiseLaunches * device.launch_us * 1e-6 +
      link_seconds(device, shape, num_batch, tensor_parallel);
  const double ns = seconds * 1e9;
  core::require(ns < static_cast<double>(balance::kMaxTotalNs), "modelled_ns: a batch of ",
                num_batch, " of ", to_string(shape), " must take less than ", balance::kMaxTotalNs,
                " ns; got ", ns);
  return std::llround(ns);
}

CostTable modelled_costs(const ShapeGroups& groups, const Device& device, int tensor_parallel) {
  validate(device);
  CostTable table;
  table.source = "model of " + device.name + (device.after_tune ? ", after dmuon tune" : "");
  std::vector<Shape> shapes;  // by first appearance
  std::map<Shape, int> num_parameters;
  for (const ShapeIndex s : groups.shapes.indices()) {
    std::set<Shape> seen;  // equal parts of one shape are not updated together
    for (const Shape& shape : groups.shapes[s].of_costs()) {
      if (!num_parameters.contains(shape)) shapes.push_back(shape);
      if (seen.insert(shape).second) num_parameters[shape] += groups.num_matrices[s];
    }
  }
  for (const Shape& shape : shapes) {
    ShapeCosts costs{shape, {}};
    for (const int size : candidate_batches(shape, num_parameters[shape])) {
      costs.batches.push_back({size, modelled_ns(device, shape, size, tensor_parallel)});
    }
    table.shapes.push_back(std::move(costs));
  }
  return table;
}

CostTable with_exchange(CostTable costs, const Device& device, int tensor_parallel) {
  if (tensor_parallel == 1) return costs;
  std::set<Shape> known;
  bool has_exchange = false;
  for (const ShapeCosts& entry : costs.shapes) {
    known.insert(entry.shape);
    has_exchange |= entry.shape.tensor_parallel;
  }
  const auto add_exchange = [&](ShapeCosts* entry) {
    for (BatchTime& batch : entry->batches) {
      const double seconds = link_seconds(device, entry->shape, batch.size, tensor_parallel);
      batch.ns += std::llround(seconds * 1e9);
    }
  };
  const std::vector<ShapeCosts> given = std::exchange(costs.shapes, {});
  for (const ShapeCosts& entry : given) {
    costs.shapes.push_back(entry);
    if (entry.shape.tensor_parallel) continue;
    if (!has_exchange) add_exchange(&costs.shapes.back());
    ShapeCosts cut = entry;
    cut.shape.tensor_parallel = true;
    if (!known.insert(cut.shape).second) continue;
    add_exchange(&cut);
    costs.shapes.push_back(std::move(cut));
  }
  return costs;
}

std::vector<BatchTime> batch_times(const CostTable& costs, const Shape& shape) {
  const std::vector<Shape> parts = shape.of_costs();
  std::vector<BatchTime> sums = entry_of(costs, parts.front()).batches;
  core::require(!sums.empty() && sums.front().size == 1, "costs: expected batches of shape ",
                to_string(parts.front()), " from one of 1 matrix on; got ",
                sums.empty() ? 0 : sums.front().size, " first");
  for (const Shape& part : std::span(parts).subspan(1)) {
    std::vector<BatchTime> common;
    for (const auto& [size, ns] : entry_of(costs, part).batches) {
      const auto found = std::ranges::find(sums, size, &BatchTime::size);
      if (found == sums.end()) continue;
      core::require(ns <= balance::kMaxTotalNs - found->ns, "costs: expected times of shape ",
                    to_string(shape), " that add up to at most ", balance::kMaxTotalNs,
                    " ns; got more");
      common.push_back({size, found->ns + ns});
    }
    sums = std::move(common);
  }
  return sums;
}

balance::Instance instance_of(const ShapeGroups& groups, const CostTable& costs, int num_owners,
                              std::string_view rule) {
  balance::Instance instance;
  instance.num_owners = num_owners;
  for (const ShapeIndex s : groups.shapes.indices()) {
    const Shape& shape = groups.shapes[s];
    instance.shapes.push_back(
        {groups.num_matrices[s], batch_times(costs, shape), state_bytes(shape, rule)});
  }
  balance::validate(instance);
  return instance;
}

}  // namespace dmuon::plan
