#pragma once

#include <ATen/core/Tensor.h>

#include <map>

#include "dmuon/core/index.h"
#include "dmuon/wire/owned.h"

namespace dmuon::optim {

/// Factors of the rows of masters, by parameter: [num_matrices * rows] fp32 on the engine's device.
/// Row i of a parameter is the i-th row in its memory, whichever matrix has it.
using RowFactors = std::map<core::ParameterIndex, at::Tensor>;

/// @throws InvalidArgument, naming the first parameter that is not owned here, or whose factors
/// have other sizes or another dtype.
void check_row_factors(const RowFactors& factors, const wire::Owned& owned,
                       const layout::Parameters& parameters);

/// Multiplies rows of the batch's masters, in place, on the current stream. Reads and writes the
/// masters of parameters that have factors, 8 bytes an element, and no others. Waits for no
/// accelerator. A factor of 1 keeps every bit.
void scale_rows(const wire::OwnedBatch& batch, const RowFactors& factors);

}  // namespace dmuon::optim
