#include "tests/kernels/cuda/emulator/memory.h"

#include <algorithm>
#include <utility>

namespace dmuon::kernels::cuda::emulator {
namespace {

bool written_once(const Buffer& buffer) {
  return buffer.access == Access::kWrite || buffer.access == Access::kUpdate;
}

// True if [offset, offset + bytes) lies in one row.
bool in_a_row(const Buffer& buffer, std::size_t offset, std::size_t bytes) {
  std::pair<std::size_t, std::size_t> outer{buffer.batch_pitch, buffer.batch};
  std::pair<std::size_t, std::size_t> inner{buffer.row_pitch, buffer.rows};
  // A batch of blocks of columns has its matrices closer than their rows.
  if (outer.second <= 1 || (inner.second > 1 && outer.first < inner.first)) std::swap(outer, inner);
  for (const auto& [pitch, count] : {outer, inner}) {
    if (count <= 1) continue;
    if (pitch == 0 || offset / pitch >= count) return false;
    offset %= pitch;
  }
  return offset + bytes <= buffer.row_bytes;
}

}  // namespace

GlobalMemory::GlobalMemory(const std::vector<Buffer>& buffers, const Report& report)
    : report_(report) {
  for (const Buffer& buffer : buffers) {
    if (buffer.bytes() == 0) continue;
    tracked_.push_back({buffer});
  }
}

std::optional<GlobalMemory::Place> GlobalMemory::find(const void* address, std::size_t bytes,
                                                      std::size_t alignment, const char* what,
                                                      Site site) {
  const auto at = reinterpret_cast<std::uintptr_t>(address);
  const auto name = [&] { return std::string(what) + " of " + std::to_string(bytes) + " bytes"; };
  if (at % alignment != 0) {
    report_.error(site, name() + ": the address is not aligned to them");
    return std::nullopt;
  }
  for (Tracked& tracked : tracked_) {
    const Buffer& buffer = tracked.buffer;
    const std::size_t offset = at - reinterpret_cast<std::uintptr_t>(buffer.base);
    if (offset < buffer.span() && in_a_row(buffer, offset, bytes)) return Place{&tracked, offset};
  }
  for (const Tracked& tracked : tracked_) {
    const Buffer& buffer = tracked.buffer;
    const std::size_t offset = at - reinterpret_cast<std::uintptr_t>(buffer.base);
    if (offset < buffer.span() + 4096) {
      report_.error(site, name() + " at " + buffer.name + " + " + std::to_string(offset) +
                              ": between its rows or past its end");
      return std::nullopt;
    }
  }
  report_.error(site, name() + ": the address is in no buffer of the kernel");
  return std::nullopt;
}

bool GlobalMemory::read(const void* address, std::size_t bytes, const Now& now, Site site,
                        std::size_t alignment) {
  const auto place = find(address, bytes, alignment == 0 ? bytes : alignment, "load", site);
  if (!place) return false;
  if (place->tracked->buffer.access == Access::kRead) return true;
  for (std::size_t i = 0; i < bytes; i += 2) {
    Touched& cell = place->tracked->cell(place->offset + i);
    cell.reads.note(now.moment, now);
    cell.read_line = site.line;
    if (cell.written && !now.knows(cell.write)) {
      report_.error(site, "race: loads " + place->tracked->buffer.name + " + " +
                              std::to_string(place->offset + i) + ", written by " +
                              report_.who(cell.write, cell.write_line) +
                              " without order between them");
      break;
    }
  }
  return true;
}

bool GlobalMemory::write(void* address, std::size_t bytes, const Now& now, Site site) {
  const auto place = find(address, bytes, bytes, "store", site);
  if (!place) return false;
  const Buffer& buffer = place->tracked->buffer;
  if (buffer.access == Access::kRead) {
    report_.error(site, "store to " + buffer.name + ", which the kernel only reads");
    return false;
  }
  for (std::size_t i = 0; i < bytes; i += 2) {
    Touched& cell = place->tracked->cell(place->offset + i);
    const auto name = [&] { return buffer.name + " + " + std::to_string(place->offset + i); };
    if (cell.written && written_once(buffer)) {
      report_.error(site, name() + " is written twice, before by " +
                              report_.who(cell.write, cell.write_line));
      break;
    }
    if (cell.written && !now.knows(cell.write)) {
      report_.error(site, "race: overwrites " + name() + ", written by " +
                              report_.who(cell.write, cell.write_line) +
                              " without order between them");
      break;
    }
    if (const auto reader = cell.reads.unknown(now)) {
      report_.error(site, "race: overwrites " + name() + ", loaded by " +
                              report_.who(*reader, cell.read_line) + " without order between them");
      break;
    }
    cell = {now.moment, site.line, 0, {}, true};
  }
  return true;
}

bool GlobalMemory::atomic(void* address, Site site) {
  const auto place = find(address, 4, 4, "atomic operation", site);
  if (!place) return false;
  if (place->tracked->buffer.access == Access::kChanges) return true;
  report_.error(site,
                "atomic operation on " + place->tracked->buffer.name + ", which is no such buffer");
  return false;
}

void GlobalMemory::check_written() {
  for (const Tracked& tracked : tracked_) {
    const Buffer& buffer = tracked.buffer;
    if (!written_once(buffer)) continue;
    std::size_t missing = 0;
    for (std::size_t matrix = 0; matrix < buffer.batch; ++matrix) {
      for (std::size_t row = 0; row < buffer.rows; ++row) {
        const std::size_t begin = matrix * buffer.batch_pitch + row * buffer.row_pitch;
        for (std::size_t i = 0; i < buffer.row_bytes; i += 2) {
          if (!tracked.is_written(begin + i)) missing += 2;
        }
      }
    }
    if (missing > 0) {
      report_.error({"", 0},
                    std::to_string(missing) + " bytes of " + buffer.name + " were never written");
    }
  }
}

}  // namespace dmuon::kernels::cuda::emulator
