#pragma once

#include <cstddef>

// What tests ask of the fake libcuda.so.1 beside the driver's functions; by dlsym. It has eight
// devices, whose memory is one:
//   FAKE_CUDA_DEVICE=80     their compute capability, 8.0 (default 90)
//   FAKE_CUDA_MULTIPROCESSORS=8 their multiprocessors (default 108)
//   FAKE_CUDA_VERSION=12000 the driver's version (default 13000)
//   FAKE_CUDA_INIT=100      what cuInit returns (default 0)
extern "C" {

struct FakeRegion {
  const char* name;
  const void* base;
  std::size_t row_bytes, rows, row_pitch, batch, batch_pitch;
  int writes;  ///< 0 or 1
};

struct FakeCounts {
  unsigned long launches;
  unsigned long blocks;
  unsigned long bytes_read;     ///< of the buffers that kernels say they read
  unsigned long bytes_written;  ///< of those that they say they write
};

/// Decides the order of blocks and threads in the launches that follow.
void fake_cuda_seed(unsigned seed);
/// Runs this block alone in the launches that follow, by block_y * blocks along x + block_x, if
/// they have it; -1: all blocks. Of one block nothing says which bytes it must write.
void fake_cuda_only_block(long block);
/// Returns the counts since the last call.
FakeCounts fake_cuda_counts();
/// Returns what the emulator found since the last call, or null; and forgets that a launch failed,
/// which would cost a real device its context.
const char* fake_cuda_errors();

/// Adds a launch to a stream of another device, and calls run(argument) once when its turn has
/// come, in any thread. `regions` are all bytes that the kernel may touch. May throw.
using FakeExecutor = void (*)(int device, void* stream, const char* kernel, void (*run)(void*),
                              void* argument, const FakeRegion* regions, int num_regions);
/// True if launches on this stream are captured: no operator of another device may use it then.
int fake_cuda_is_captured(void* stream);
/// Spoils the captures that forbid the calling thread to wait or to allocate memory, which it is
/// about to do. Returns 1 if there are any.
int fake_cuda_forbids();
/// Returns how many graphs, executable ones included, have not been destroyed.
int fake_cuda_graphs();

/// Hands all later launches to an executor. `to_host` is added to an address of the device to get
/// the host's; addresses are then not compared with what cuMemAlloc gave.
void fake_cuda_executor(FakeExecutor executor, std::ptrdiff_t to_host);
}
