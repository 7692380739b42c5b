#include "dmuon/core/error.h"
#include "dmuon/kernels/cpu/products.h"

// Other processors compile this file instead of avx512.cpp.
namespace dmuon::kernels::cpu {

bool multiplies(Dtype) { return false; }

namespace {

void refuse() { core::bug("multiply: this processor has no AVX-512"); }

}  // namespace

void multiply(const Product&, Dtype, const Workers&) { refuse(); }
void multiply(const WideGram&, const Workers&) { refuse(); }
void multiply(const WideProduct&, const Workers&) { refuse(); }

}  // namespace dmuon::kernels::cpu
