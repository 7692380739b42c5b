#include "dmuon/balance/verify.h"

#include <algorithm>
#include <cstddef>
#include <vector>

namespace dmuon::balance {
namespace {

constexpr Nanoseconds kImpossible = -1;

// Returns the least time for 0 to all matrices of one shape, with batches of at most `longest`.
core::Vector<Count, Nanoseconds> least_times(const CostedShape& shape, Nanoseconds longest) {
  core::Vector<Count, Nanoseconds> least = {0};
  for (int k = 1; k <= shape.num_matrices; ++k) {
    Nanoseconds best = kImpossible;
    for (const BatchTime& batch : shape.batches) {
      if (batch.size > k || batch.ns > longest) continue;
      const Nanoseconds rest = least[Count(k - batch.size)];
      if (rest == kImpossible) continue;
      if (best == kImpossible || rest + batch.ns < best) best = rest + batch.ns;
    }
    least.push_back(best);
  }
  return least;
}

std::string verify_one_owner(const Instance& instance, const Certificate& certificate) {
  if (!instance.shapes.contains(certificate.shape)) return "no such shape";
  const CostedShape& shape = instance.shapes[certificate.shape];
  const core::Vector<Count, Nanoseconds> least = least_times(shape, kMaxTotalNs);
  // If every owner had fewer, matrices would be left over: some owner has k >= n / owners.
  for (const Count k : least.indices()) {
    const bool somebody_may = Wide{k.value()} * instance.num_owners >= shape.num_matrices;
    if (somebody_may && least[k] < certificate.bound) {
      return "an owner of that many matrices may take less";
    }
  }
  return {};
}

std::string verify_all_owners(const Instance& instance, const Certificate& certificate) {
  const Nanoseconds limit = certificate.bound - 1;
  Wide total = 0;
  for (const CostedShape& shape : instance.shapes) {
    const Nanoseconds least = least_times(shape, limit).back();
    if (least == kImpossible) return {};
    total += least;
  }
  return total > Wide{limit} * instance.num_owners ? "" : "all owners together have time enough";
}

// [cells + 1] the largest value of matrices of one shape that take at most so many cells.
std::vector<Wide> worth_by_cells(const CostedShape& shape, std::int64_t per_matrix,
                                 std::int64_t per_ns, Nanoseconds limit, Nanoseconds cell) {
  const core::Vector<Count, Nanoseconds> least = least_times(shape, kMaxTotalNs);
  std::vector<Wide> worth(static_cast<std::size_t>(limit / cell) + 1, 0);
  for (const Count k : least.indices()) {
    if (least[k] > limit) continue;
    Wide& entry = worth[static_cast<std::size_t>(least[k] / cell)];
    entry = std::max(entry, Wide{per_matrix} * k.value() + Wide{per_ns} * least[k]);
  }
  for (std::size_t q = 1; q < worth.size(); ++q) worth[q] = std::max(worth[q], worth[q - 1]);
  return worth;
}

std::string verify_patterns(const Instance& instance, const Certificate& certificate) {
  const Nanoseconds limit = certificate.bound - 1;
  const int num_shapes = instance.shapes.size();
  if (certificate.per_matrix.size() != num_shapes || certificate.per_ns.size() != num_shapes) {
    return "the prices are not one a shape";
  }
  if (certificate.cells < 1 || certificate.cells > limit || certificate.cells > 1 << 16) {
    return "cells is out of range";
  }
  const Nanoseconds cell = limit / certificate.cells;
  std::vector<Wide> most(static_cast<std::size_t>(limit / cell) + 1, 0);  // of all shapes so far
  Wide all = 0;
  for (const ShapeIndex s : instance.shapes.indices()) {
    const std::int64_t per_matrix = certificate.per_matrix[s];
    const std::int64_t per_ns = certificate.per_ns[s];
    if (per_matrix < 0 || per_ns < 0) return "a price is negative";
    const CostedShape& shape = instance.shapes[s];
    all += Wide{per_matrix} * shape.num_matrices +
           Wide{per_ns} * least_times(shape, kMaxTotalNs).back();
    const std::vector<Wide> worth = worth_by_cells(shape, per_matrix, per_ns, limit, cell);
    std::vector<Wide> next = most;
    for (std::size_t part = 1; part < worth.size(); ++part) {
      if (worth[part] == worth[part - 1]) continue;
      for (std::size_t q = part; q < next.size(); ++q) {
        next[q] = std::max(next[q], most[q - part] + worth[part]);
      }
    }
    // Counts parts that take less than a cell.
    for (std::size_t q = 0; q < next.size(); ++q) next[q] = std::max(next[q], most[q] + worth[0]);
    most = std::move(next);
  }
  // Tests all > most * num_owners; the product may exceed 128 bits.
  const bool too_much = all > 0 && (all - 1) / instance.num_owners >= most.back();
  return too_much ? "" : "owners within the limit can do all work";
}

}  // namespace

std::string verify(const Instance& instance, const Certificate& certificate) {
  if (certificate.bound < 0 || certificate.bound > kMaxTotalNs) return "the bound is out of range";
  if (certificate.bound == 0) return {};
  switch (certificate.kind) {
    case Certificate::Kind::kOneOwner:
      return verify_one_owner(instance, certificate);
    case Certificate::Kind::kAllOwners:
      return verify_all_owners(instance, certificate);
    case Certificate::Kind::kPatterns:
      return verify_patterns(instance, certificate);
  }
  return "unknown kind";
}

}  // namespace dmuon::balance
