#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "dmuon/kernels/cuda/parameters.h"

// Runs device code on the host: a thread of the GPU is a fiber. One launch at a time in a process.
//
// Finds: accesses outside registered buffers, between their rows, or not aligned; bytes written
// twice or never; reads of shared memory that nobody wrote; races inside a block and between
// blocks; words that are touched while a copy to them is in flight; a barrier or an instruction of
// a warp that not all threads reach. Of compute capability 9.0: phases of mbarriers that end early,
// never or with the wrong bytes; sums that are touched while a multiplication changes them; blocks
// that end while their cluster still sends to them.
//
// Clusters run one after the other, so a kernel whose clusters wait for each other does not end.
namespace dmuon::kernels::cuda::emulator {

enum class Access {
  kRead,     ///< may be read
  kWrite,    ///< each byte is written exactly once
  kUpdate,   ///< each byte is read, and then written exactly once
  kChanges,  ///< may be read and written at will, such as tickets
};

/// `batch` matrices of `rows` rows of `row_bytes` bytes. Nothing beside these bytes is touched.
struct Buffer {
  std::string name;
  const void* base = nullptr;
  std::size_t row_bytes = 0;
  std::size_t rows = 1;
  std::size_t row_pitch = 0;  ///< bytes from row to row
  std::size_t batch = 1;
  std::size_t batch_pitch = 0;  ///< bytes from matrix to matrix
  Access access = Access::kRead;

  /// Bytes of all rows.
  std::size_t bytes() const { return row_bytes * rows * batch; }
  /// Bytes from `base` to the end of the last row.
  std::size_t span() const {
    return bytes() == 0 ? 0 : (rows - 1) * row_pitch + (batch - 1) * batch_pitch + row_bytes;
  }
};

struct Grid {
  unsigned x = 1;
  unsigned y = 1;
  unsigned threads = 32;  ///< a block's, a multiple of 32
  unsigned shared_bytes = 0;
  long only = -1;  ///< if not negative, the index of the block whose cluster runs alone, y * x's
                   ///< blocks + x
  unsigned cluster = 1;       ///< blocks along x that make a cluster
  bool begins_early = false;  ///< before the kernel in front of it has ended, for which it waits
  unsigned registers = 0;     ///< a thread's at the beginning; 0: take_registers() is not checked
};

/// Runs `block_thread` once for each thread of the grid. The seed decides the order of blocks,
/// warps and threads. `to_host` is added to an address of the device to get the host's.
/// @return what was found, at most ten sentences with the place in the device code.
std::vector<std::string> run(const Grid& grid, const std::vector<Buffer>& buffers,
                             const std::function<void()>& block_thread, unsigned seed,
                             std::ptrdiff_t to_host = 0);

// What machine_emulated.h calls inside a launch.

/// The line of device code that calls.
struct Site {
  const char* file;
  int line;
};

int thread();
int block_x();
int block_y();
int num_blocks_x();
/// Returns the host's address of `bytes` bytes, to be read. After an error: of zeros.
const void* read(const void* address, std::size_t bytes, Site site);
/// Returns the host's address, to be written at once.
void* write(void* address, std::size_t bytes, Site site);
std::uint32_t shared_load(int word, Site site);
void shared_store(int word, std::uint32_t value, Site site);
/// Loads four words from a multiple of 4 on.
void shared_load(std::uint32_t (&values)[4], int word, Site site);
void barrier(Site site);
/// Reads `bytes` bytes, at most 16, into four words from a multiple of 4 on; the rest becomes
/// zeros. The copy is in flight until its thread waits for it.
void copy_async(int word, const void* source, int bytes, Site site);
/// Makes a group of the thread's copies since the last group.
void commit_copies();
/// Waits until at most `pending` of the thread's last groups are in flight.
void wait_copies(int pending);
/// What a warp's instruction does with the arguments of its 32 threads.
using Instruction = void (*)(void* const* lanes);
/// Waits until the threads of the warp, or of the warpgroup of 128, call it with this instruction,
/// at this line and with this `variant`. Then one thread executes it.
void together(Instruction instruction, int variant, void* argument, Site site, int threads = 32);
void fence();
std::uint32_t atomic_add(std::uint32_t* address, std::uint32_t value, Site site);

// Of compute capability 9.0. Words are the calling block's, unless a rank is named.

/// Waits for the kernel in front. In a launch that begins early all threads do, and none touches
/// global memory before a thread that it knows of has.
void wait_for_kernel_before();
int cluster_rank();
void cluster_barrier(Site site);
/// The barrier 1 to 15 of `threads` threads.
void named_barrier(int id, int threads, Site site);
/// Makes an mbarrier of `count` arrivals at an even word.
void mbarrier_init(int word, std::uint32_t count, Site site);
void mbarrier_init_fence();
/// Arrives at an mbarrier of block `rank` of the cluster, which expects `bytes` more bytes.
void mbarrier_arrive(int word, int rank, std::uint32_t bytes, Site site);
/// Waits until the phase of this parity has ended.
void mbarrier_wait(int word, std::uint32_t parity, Site site);
/// Copies a tile of a matrix, see TiledMap, to a word that is a multiple of 256; zeros beyond the
/// matrix. Its bytes arrive at the mbarrier. `to_both`: and the same in the cluster's other block.
void copy_tile(int word, const TensorMap& map, int mbarrier, int col, int row, int matrix,
               bool to_both, Site site);
/// Takes registers from what the block's other warpgroups have given, or gives them. All threads of
/// a warpgroup call it.
void change_registers(int count, bool takes, Site site);

/// wgmma, see Multiplication. All threads of a warpgroup call them.
struct Multiplication;
void multiply(const Multiplication& multiplication);
void multiplication_fence(Site site);
void commit_multiplications(Site site);
void wait_multiplications(std::uint32_t pending, Site site);

/// Reports a NaN that comes from sums that a multiplication was still changing.
void check_nan(float value, Site site);

}  // namespace dmuon::kernels::cuda::emulator
