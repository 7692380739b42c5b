#include "dmuon/plan/cost.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <utility>

#include "dmuon/core/error.h"

namespace dmuon::plan {
namespace {

// cuda: an H200's sustained fp16 products and memory, 132 multiprocessors with one 128 x 128 tile
// each, and the middle of 2 - 4 us a launch. cpu: order of magnitude for two server cores (fp32
// products through ATen, one memory pass, one ATen call). Plans use ratios, which differ little
// between devices of a kind; absolute times come from measured costs.
constexpr std::array<DeviceModel, 2> kDevices = {{
    {"cpu", 100e9, 64.0 * 64.0, 20e9, 5e-6},
    {"cuda", 790e12, 132.0 * 128.0 * 128.0, 4.3e12, 3e-6},
}};

// Momentum 12 bytes an element, Nesterov 12, norm 4, cast into the batch 6, decay and update 20,
// cast out 6: unfused fp32 passes.
constexpr double kBytesPerElement = 60;
constexpr double kElementwiseLaunches = 8;

// Bounds the working memory of a batch: 64 MiB of fp32 input.
constexpr std::int64_t kMaxBatchElements = std::int64_t{16} << 20;
// Batching gains nothing more once a launch is shared by this many.
constexpr std::int64_t kMaxBatchMatrices = 64;

// Products of one Newton-Schulz run, m <= n: `to_square` and `square` have an m x m result from
// inner dimension n and m, `to_wide` an m x n result from inner dimension m.
struct Products {
  double to_square;
  double square;
  double to_wide;
};

// Five steps as full products: 20 m^2 n + 10 m^3 FLOPs, and with one restart 8 m^2 n + 28 m^3 in
// Gram space (sec:design-gram-ns).
constexpr Products kDirect = {5, 5, 5};
constexpr Products kGram = {2, 14, 2};

double products_seconds(const DeviceModel& device, Shape shape, double num_batch,
                        const Products& products) {
  const auto m = static_cast<double>(std::min(shape.rows, shape.cols));
  const auto n = static_cast<double>(std::max(shape.rows, shape.cols));
  // A result too small to fill the device takes as long as one that just fills it.
  const auto seconds = [&](double flops, double elements) {
    const double filled = std::min(1.0, num_batch * elements / device.full_elements);
    return num_batch * flops / (device.flop_rate * filled);
  };
  const double launches = products.to_square + products.square + products.to_wide;
  return products.to_square * seconds(2 * m * m * n, m * m) +
         products.square * seconds(2 * m * m * m, m * m) +
         products.to_wide * seconds(2 * m * m * n, m * n) + launches * device.launch_seconds;
}

}  // namespace

std::vector<std::string> device_kinds() {
  std::vector<std::string> kinds;
  for (const DeviceModel& device : kDevices) kinds.emplace_back(device.kind);
  return kinds;
}

const DeviceModel& device_model(std::string_view kind) {
  std::string known;
  for (const DeviceModel& device : kDevices) {
    if (device.kind == kind) return device;
    known += (known.empty() ? "" : ", ") + std::string(device.kind);
  }
  throw core::InvalidArgument(
      core::message("device_model: device kind must be one of ", known, "; got '", kind, "'"));
}

double modelled_seconds(const DeviceModel& device, Shape shape, int num_batch) {
  const double newton_schulz = std::min(products_seconds(device, shape, num_batch, kDirect),
                                        products_seconds(device, shape, num_batch, kGram));
  const double bytes = kBytesPerElement * num_batch * static_cast<double>(shape.num_elements());
  return newton_schulz + bytes / device.byte_rate + kElementwiseLaunches * device.launch_seconds;
}

int max_batch(Shape shape) {
  const std::int64_t fitting = std::max<std::int64_t>(1, kMaxBatchElements / shape.num_elements());
  return static_cast<int>(std::min(fitting, kMaxBatchMatrices));
}

// f[0] = 0; f[k] = min over batch sizes b of f[k - b] + c[b]. The first b that attains the minimum
// is kept, so that the answer is one and the same everywhere.
BatchCosts::BatchCosts(std::vector<double> batch_seconds, int num_matrices)
    : batch_seconds_(std::move(batch_seconds)) {
  core::require(!batch_seconds_.empty(), "BatchCosts: batch_seconds must have an entry; got none");
  core::require(num_matrices >= 0, "BatchCosts: num_matrices must be >= 0; got ", num_matrices);
  for (std::size_t i = 0; i < batch_seconds_.size(); ++i) {
    core::require(std::isfinite(batch_seconds_[i]) && batch_seconds_[i] >= 0,
                  "BatchCosts: batch_seconds[", i, "] must be finite and >= 0; got ",
                  batch_seconds_[i]);
  }
  best_seconds_.assign(num_matrices + 1, 0.0);
  last_batch_.assign(num_matrices + 1, 0);
  for (int k = 1; k <= num_matrices; ++k) {
    for (int b = 1; b <= std::min(k, max_batch()); ++b) {
      const double seconds = best_seconds_[k - b] + this->batch_seconds(b);
      if (b == 1 || seconds < best_seconds_[k]) {
        best_seconds_[k] = seconds;
        last_batch_[k] = b;
      }
    }
  }
}

std::vector<int> BatchCosts::best_batches(int k) const {
  std::vector<int> sizes;
  for (; k > 0; k -= last_batch_[k]) sizes.push_back(last_batch_[k]);
  std::sort(sizes.begin(), sizes.end(), std::greater<>());
  return sizes;
}

double BatchCosts::cheapest_batch() const {
  return *std::min_element(batch_seconds_.begin(), batch_seconds_.end());
}

CostTable modelled_costs(const ShapeGroups& groups, const DeviceModel& device) {
  CostTable costs;
  costs.reserve(groups.shapes.size());
  for (std::size_t s = 0; s < groups.shapes.size(); ++s) {
    const int largest = std::min(max_batch(groups.shapes[s]), groups.num_matrices[s]);
    std::vector<double> seconds;
    for (int b = 1; b <= largest; ++b) {
      seconds.push_back(modelled_seconds(device, groups.shapes[s], b));
    }
    costs.emplace_back(std::move(seconds), groups.num_matrices[s]);
  }
  return costs;
}

}  // namespace dmuon::plan
