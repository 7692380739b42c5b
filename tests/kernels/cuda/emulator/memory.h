#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <unordered_map>
#include <vector>

#include "tests/kernels/cuda/emulator/emulator.h"
#include "tests/kernels/cuda/emulator/report.h"

namespace dmuon::kernels::cuda::emulator {

/// Who touched a cell last.
struct Touched {
  Moment write;
  int write_line = 0;
  int read_line = 0;
  Reads reads{};
  bool written = false;
};

/// The buffers of a launch. Cells of two bytes remember who touched them.
class GlobalMemory {
 public:
  GlobalMemory(const std::vector<Buffer>& buffers, const Report& report);
  /// Checks an access. Returns false, after a report, if it must not happen. Alignment 0: `bytes`.
  bool read(const void* address, std::size_t bytes, const Now& now, Site site,
            std::size_t alignment = 0);
  bool write(void* address, std::size_t bytes, const Now& now, Site site);
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

  const Report& report_;
  std::vector<Tracked> tracked_;
};

}  // namespace dmuon::kernels::cuda::emulator
