#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "tests/kernels/cuda/emulator/emulator.h"
#include "tests/kernels/cuda/emulator/order.h"

namespace dmuon::kernels::cuda::emulator {

/// Reports an error at a place in the device code.
using Report = std::function<void(Site site, const std::string& what)>;

/// Who touched a cell last.
struct Touched {
  Moment write;
  int write_line = 0;
  Moment read;
  int read_line = 0;
  bool many_read = false;  ///< threads other than read.thread did too, in its epoch
  bool written = false;
  bool in_flight = false;  ///< a copy will write it
};

/// A block's shared memory, in words.
class SharedMemory {
 public:
  explicit SharedMemory(Report report) : report_(std::move(report)) {}
  /// Forgets everything: a new block begins.
  void reset(unsigned bytes);
  /// Reports a word that is no multiple of `words`.
  void check_aligned(int word, int words, Site site);
  std::uint32_t load(int word, const Moment& now, Site site);
  void load(std::uint32_t (&values)[4], int word, const Moment& now, Site site);
  void store(int word, std::uint32_t value, const Moment& now, Site site);
  /// Begins or ends a copy to a word. In between nobody may touch the word.
  void begin_copy(int word, const Moment& now, Site site);
  void end_copy(int word, std::uint32_t value, const Moment& now);

 private:
  bool is_inside(int word, const char* what, Site site);

  Report report_;
  std::vector<std::uint32_t> words_;
  std::vector<Touched> touched_;
};

/// The buffers of a launch. Cells of two bytes remember who touched them.
class GlobalMemory {
 public:
  GlobalMemory(const std::vector<Buffer>& buffers, Report report);
  /// Checks an access. Returns false, after a report, if it must not happen. Alignment 0: `bytes`.
  bool read(const void* address, std::size_t bytes, const Moment& now, const Acquired& acquired,
            Site site, std::size_t alignment = 0);
  bool write(void* address, std::size_t bytes, const Moment& now, const Acquired& acquired,
             Site site);
  /// Checks the address of an atomic operation, which is no race with another.
  bool atomic(void* address, Site site);
  /// Reports buffers of kWrite and kUpdate with bytes that were never written.
  void check_written();

 private:
  // Pages of cells that were touched, because buffers may be of more memory than there is.
  struct Tracked {
    static constexpr std::size_t kCells = 256;
    Buffer buffer;
    std::unordered_map<std::size_t, std::array<Touched, kCells>> pages{};

    Touched& cell(std::size_t offset) { return pages[offset / 2 / kCells][offset / 2 % kCells]; }
    bool is_written(std::size_t offset) const {
      const auto page = pages.find(offset / 2 / kCells);
      return page != pages.end() && page->second[offset / 2 % kCells].written;
    }
  };
  struct Place {
    Tracked* tracked;
    std::size_t offset;
  };
  std::optional<Place> find(const void* address, std::size_t bytes, std::size_t alignment,
                            const char* what, Site site);

  Report report_;
  std::vector<Tracked> tracked_;
};

}  // namespace dmuon::kernels::cuda::emulator
