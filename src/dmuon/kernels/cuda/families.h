#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "dmuon/core/divided_up.h"
#include "dmuon/kernels/cuda/symmetric.h"

// The families of kernels for symmetric products, which symmetric.cpp chooses among. It has checked
// what they are given.
namespace dmuon::kernels::cuda {

/// A choice, with the time that it would take by a family's estimate.
struct Estimate {
  double us;
  SymmetricChoice choice;
};

/// One family: a source, and the choices that its kernels offer.
struct SymmetricFamily {
  bool (*has)(const std::string& kernel);
  int max_splits;
  void (*add_candidates)(std::vector<Estimate>& found, const Symmetric& product, int device);
  /// Scratch memory, where a choice has more than one split.
  std::int64_t (*workspace_bytes)(const Symmetric& product, const SymmetricChoice& choice,
                                  int device);
  std::int64_t (*num_tickets)(const Symmetric& product, const SymmetricChoice& choice, int device);
  void (*launch)(const Symmetric& product, const SymmetricChoice& choice, void* workspace,
                 std::uint32_t* tickets, int device, void* stream);
};

const SymmetricFamily& symmetric80();
const SymmetricFamily& symmetric90();

/// The tiles of a lower triangle with m rows.
constexpr std::int64_t num_tiles(std::int64_t m, std::int64_t tile) {
  const std::int64_t rows = core::divided_up(m, tile);
  return rows * (rows + 1) / 2;
}

/// Returns the parameters that all kernels share: all but tiles, splits and scratch memory.
SymmetricParameters parameters_of(const Symmetric& product);

}  // namespace dmuon::kernels::cuda
