#pragma once

#include <cstdint>

#include "tests/kernels/cuda/emulator/emulator.h"
#include "tests/kernels/cuda/emulator/narrow.h"

// Instructions that the 32 threads of a warp execute together, with the fragments of the PTX ISA.
// Lane l is the warp's thread l.
namespace dmuon::kernels::cuda::emulator {

std::uint32_t shuffle_xor(std::uint32_t value, int mask, Site site);

/// ldmatrix.m8n8.x4: four matrices of 8 x 8 entries of 16 bits. Lane 8 m + i has the word where
/// row i of matrix m begins, a multiple of 4. Then lane l has in words[m] the entries (l / 4,
/// l % 4 * 2) and the next one of the row; with `transposed`, of the transposed matrix m.
void load_matrices(std::uint32_t (&words)[4], int word, bool transposed, Site site);

/// mma.m16n8k16: sums += a b in fp32, where a is 16 x 16 and b is 16 x 8 in 16 bits.
/// - words a[i] of lane l: entries (l / 4 + i % 2 * 8, l % 4 * 2 + i / 2 * 8) and the next of a row
/// - words b[i]: entries (l % 4 * 2 + i * 8, l / 4) and the next of a column
/// - sums[i]: entry (l / 4 + i / 2 * 8, l % 4 * 2 + i % 2)
void multiply_add(float (&sums)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2],
                  Narrow format, Site site);

}  // namespace dmuon::kernels::cuda::emulator
