#pragma once

#include "dmuon/kernels/cuda/parameters.h"

// Instructions of compute capability 9.0 alone. machine_ptx.h includes this header.
namespace dmuon::kernels::cuda::machine {

// A kernel that is launched early (Launch::begins_early) starts while the kernel before it in the
// stream still runs: it waits for that one's end before it touches memory that others write. The
// first function lets the next kernel start, in all blocks or none.
DMUON_DEVICE void let_next_kernel_begin() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
DMUON_DEVICE void wait_for_kernel_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Blocks 2 i and 2 i + 1 along x make a cluster, and are its blocks 0 and 1.
DMUON_DEVICE int cluster_rank() {
  int rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
// All threads of both blocks. Relaxed: no memory is handed over by it.
DMUON_DEVICE void cluster_barrier() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.aligned;" ::
                   : "memory");
}
// Barrier 1 to 15 of a block, for `threads` of its threads.
DMUON_DEVICE void named_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// An mbarrier is two words of shared memory, aligned to 8 bytes. A phase ends when `count` threads
// have arrived and all bytes that they expected have come.
DMUON_DEVICE void mbarrier_init(int word, uint32_t count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(word)), "r"(count)
               : "memory");
}
// After all mbarrier_init, before cluster_barrier.
DMUON_DEVICE void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
// Arrives, and adds to the bytes that the phase expects.
DMUON_DEVICE void mbarrier_expect(int word, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(word)),
               "r"(bytes)
               : "memory");
}
// Arrives at the mbarrier at the same word of block `rank` of the cluster. Not at the scope of the
// cluster, which would wait for this thread's stores to global memory.
DMUON_DEVICE void mbarrier_arrive(int word, int rank) {
  asm volatile(
      "{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}" ::"r"(shared_address(word)),
      "r"(rank)
      : "memory");
}
// Waits for the end of a phase of this parity: 0 for the first, third, ...
DMUON_DEVICE void mbarrier_wait(int word, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred ended;\nagain_%=:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 ended, [%0], %1;\n"
      "@ended bra done_%=;\nbra again_%=;\ndone_%=:\n}" ::"r"(shared_address(word)),
      "r"(parity)
      : "memory");
}

// Copies to come find the map in a cache.
DMUON_DEVICE void prefetch_map(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Copies the map's box at (col, row, matrix) to `word`, and counts its bytes at the mbarrier.
// Entries beyond the matrix become zeros, which count too.
DMUON_DEVICE void copy_tile(int word, const TensorMap& map, int mbarrier, int col, int row,
                            int matrix) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5}], [%2];" ::"r"(shared_address(word)),
      "l"(&map), "r"(shared_address(mbarrier)), "r"(col), "r"(row), "r"(matrix)
      : "memory");
}
// The same for both blocks of the cluster: to the same words, counted at each block's mbarrier.
DMUON_DEVICE void copy_tile_to_both(int word, const TensorMap& map, int mbarrier, int col, int row,
                                    int matrix) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(shared_address(word)),
      "l"(&map), "r"(shared_address(mbarrier)), "r"(col), "r"(row), "r"(matrix),
      "h"(static_cast<uint16_t>(3))
      : "memory");
}

// Describes an operand of multiply_64x256. It consists of boxes whose rows have 128 bytes; chunks
// of 16 bytes lie in the 128-byte swizzle. A box is aligned to 8 rows, 1024 bytes. A box's row has
// 64 columns of a row of the operand, and adding 2 moves the descriptor by 16 columns. Transposed,
// a box's row has 64 rows of a column, further rows are in the next box, and adding 128 moves the
// descriptor by 16 columns.
template <bool kTransposed>
DMUON_DEVICE uint64_t matrix_descriptor(int word) {
  constexpr uint64_t kSwizzle128 = 1ULL << 62;
  constexpr uint64_t kGroupOf8Rows = (1024ULL >> 4) << 32;
  constexpr uint64_t kNextBox = (kTransposed ? 64 * 128ULL >> 4 : 1ULL) << 16;
  return (shared_address(word) & 0x3ffff) >> 4 | kNextBox | kGroupOf8Rows | kSwizzle128;
}

// Products of a warpgroup run in the background. Before the first, and after registers of sums were
// touched, there must be a fence; wgmma_wait<n> waits for all groups of products but the last n.
DMUON_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DMUON_DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
DMUON_DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Moves registers between the warpgroups of a block; all threads of a warpgroup call it.
template <int kRegisters>
DMUON_DEVICE void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
DMUON_DEVICE void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// sums <- a b' (+ sums), 64 x 256 in fp32, of 64 x 16 and 256 x 16 entries; all threads of a
// warpgroup call it. Thread l of warp w has row 16 w + l / 4 and columns l % 4 * 2 + 8 j and the
// next in sums 4 j and 4 j + 1, and 8 rows further in the two after these.
#define DMUON_SUMS(i) "+f"(sums[i]), "+f"(sums[i + 1]), "+f"(sums[i + 2]), "+f"(sums[i + 3])
#define DMUON_SUMS16(i) DMUON_SUMS(i), DMUON_SUMS(i + 4), DMUON_SUMS(i + 8), DMUON_SUMS(i + 12)
#define DMUON_MULTIPLY_64X256(format)                                                              \
  template <bool kTransposedA, bool kTransposedB>                                                  \
  DMUON_DEVICE void multiply_64x256_##format(float(&sums)[128], uint64_t a, uint64_t b,            \
                                             bool accumulate) {                                    \
    asm volatile(                                                                                  \
        "{\n.reg .pred add;\nsetp.ne.b32 add, %130, 0;\n"                                          \
        "wgmma.mma_async.sync.aligned.m64n256k16.f32." #format "." #format                         \
        " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, "       \
        "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, "    \
        "%35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, "    \
        "%52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, "    \
        "%69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, "    \
        "%86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, "       \
        "%102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, "     \
        "%116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, "                \
        "%128, %129, add, 1, 1, %131, %132;\n}"                                                    \
        : DMUON_SUMS16(0), DMUON_SUMS16(16), DMUON_SUMS16(32), DMUON_SUMS16(48), DMUON_SUMS16(64), \
          DMUON_SUMS16(80), DMUON_SUMS16(96), DMUON_SUMS16(112)                                    \
        : "l"(a), "l"(b), "r"(static_cast<uint32_t>(accumulate)), "n"(kTransposedA ? 1 : 0),       \
          "n"(kTransposedB ? 1 : 0));                                                              \
  }
DMUON_MULTIPLY_64X256(f16)
DMUON_MULTIPLY_64X256(bf16)
#undef DMUON_MULTIPLY_64X256
#undef DMUON_SUMS16
#undef DMUON_SUMS

}  // namespace dmuon::kernels::cuda::machine
