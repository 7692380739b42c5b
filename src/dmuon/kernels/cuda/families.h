#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "dmuon/core/divided_up.h"
#include "dmuon/kernels/cuda/product.h"

// The families of kernels for products, which product.cpp chooses among. It has checked what they
// are given.
namespace dmuon::kernels::cuda {

/// A choice, with the time that it would take by a family's estimate.
struct Estimate {
  double us;
  ProductChoice choice;
};

/// One family: a source, and the choices that its kernels offer.
struct ProductFamily {
  bool (*has)(const std::string& kernel);
  /// False for operands that the kernel does not read as they lie.
  bool (*takes)(const Product& product, const std::string& kernel);
  int max_splits;
  /// Adds none where the family has no kernel for such a product.
  void (*add_candidates)(std::vector<Estimate>& found, const Product& product, int device);
  /// Scratch memory, where a choice has more than one split.
  std::int64_t (*workspace_bytes)(const Product& product, const ProductChoice& choice, int device);
  std::int64_t (*num_tickets)(const Product& product, const ProductChoice& choice, int device);
  void (*launch)(const Product& product, const ProductChoice& choice, void* workspace,
                 std::uint32_t* tickets, int device, void* stream);
};

const ProductFamily& product80();
const ProductFamily& product90();

/// The tiles that are computed: those of the lower triangle, or all.
constexpr std::int64_t num_tiles(const Product& product, std::int64_t tile) {
  const std::int64_t rows = core::divided_up(product.m, tile);
  if (product.symmetric) return rows * (rows + 1) / 2;
  return rows * core::divided_up(product.n, tile);
}

/// Returns the parameters that all kernels share: all but tiles, splits and scratch memory.
ProductParameters parameters_of(const Product& product);

}  // namespace dmuon::kernels::cuda
