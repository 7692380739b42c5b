#pragma once

// The one door from device code to the machine. Device code touches memory, other threads and the
// 16-bit formats only by the functions of dmuon::kernels::cuda::machine:
//
//   thread(), block_x(), block_y()           places in the block and the grid
//   load_*, store_*                          global memory; x4 needs addresses aligned to its size
//   shared_load, shared_store                the block's shared memory, by the index of a word
//   copy_async, commit_copies, wait_copies   16 bytes of global to shared memory, in the background
//   load_matrices, multiply_add_*            a warp's fragments, see machine_ptx.h
//   barrier, shuffle_xor, fence, atomic_add  other threads
//   square_root, multiply_add                correctly rounded; a b + c with one rounding
//   f16_of, bf16_of, float_of_f16, ...       formats; conversions round to nearest even
//
// nvcc compiles them from machine_ptx.h. The tests compile the same device code for the host, by
// the machine_emulated.h of tests/kernels/cuda/emulator, which checks each access.
#if defined(__CUDACC__)
#include "dmuon/kernels/cuda/machine_ptx.h"
#else
#include "machine_emulated.h"
#endif
