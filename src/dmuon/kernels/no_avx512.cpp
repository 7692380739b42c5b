#include "dmuon/core/error.h"
#include "dmuon/kernels/products.h"

// Compiled instead of avx512.cpp for processors of another kind.
namespace dmuon::kernels {

bool multiplies(Dtype) { return false; }

void multiply(const Product&, Dtype, const Workers&) {
  core::invariant(false, "multiply: this processor has no AVX-512");
}

}  // namespace dmuon::kernels
