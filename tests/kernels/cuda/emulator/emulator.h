#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

// Runs device code on the host: a thread of the GPU is a fiber. One launch at a time in a process.
//
// Finds: accesses outside registered buffers, between their rows, or not aligned; bytes written
// twice or never; reads of shared memory that nobody wrote; races inside a block and between
// blocks; words that are touched while a copy to them is in flight; a barrier or an instruction of
// a warp that not all threads reach.
//
// Blocks run one after the other, so a kernel whose blocks wait for each other does not end.
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
  /// If not negative, the index of the block that runs alone, if it exists: y * x's blocks + x.
  long only = -1;
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
/// Waits until the 32 threads of the warp call it with this instruction, at this line and with this
/// `variant`. Then one thread executes it.
void together(Instruction instruction, int variant, void* argument, Site site);
void fence();
std::uint32_t atomic_add(std::uint32_t* address, std::uint32_t value, Site site);

}  // namespace dmuon::kernels::cuda::emulator
