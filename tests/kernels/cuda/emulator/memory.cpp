#include "tests/kernels/cuda/emulator/memory.h"

#include <algorithm>
#include <utility>

namespace dmuon::kernels::cuda::emulator {
namespace {

constexpr std::uint32_t kPoison = 0xffffffffU;  // two NaNs in 16 bits

std::string who(const Moment& moment, int line) {
  return "block " + std::to_string(moment.block) + " thread " + std::to_string(moment.thread) +
         " at line " + std::to_string(line);
}

// True if `now` knows that `then` has happened.
bool ordered(const Moment& then, const Moment& now, const Acquired& acquired) {
  return then.block == now.block ? precedes(then, now) : acquired.covers(then, now);
}

bool written_once(const Buffer& buffer) {
  return buffer.access == Access::kWrite || buffer.access == Access::kUpdate;
}

void note_read(Touched& cell, const Moment& now, Site site) {
  const bool same = cell.read.block == now.block && cell.read.epoch == now.epoch;
  cell.many_read = same && (cell.many_read || cell.read.thread != now.thread);
  cell.read = now;
  cell.read_line = site.line;
}

// Of reads inside the running block: those of other blocks are not remembered together.
bool read_is_ordered(const Touched& cell, const Moment& now) {
  if (cell.read.block != now.block || cell.read.epoch < now.epoch) return true;
  return !cell.many_read && cell.read.thread == now.thread;
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

void SharedMemory::reset(unsigned bytes) {
  words_.assign(bytes / 4, kPoison);
  touched_.assign(bytes / 4, {});
}

bool SharedMemory::is_inside(int word, const char* what, Site site) {
  if (word >= 0 && static_cast<std::size_t>(word) < words_.size()) return true;
  report_(site, std::string(what) + " of shared word " + std::to_string(word) + ", of " +
                    std::to_string(words_.size()));
  return false;
}

void SharedMemory::check_aligned(int word, int words, Site site) {
  if (word % words != 0)
    report_(site,
            "shared word " + std::to_string(word) + " is no multiple of " + std::to_string(words));
}

std::uint32_t SharedMemory::load(int word, const Moment& now, Site site) {
  if (!is_inside(word, "load", site)) return 0;
  const auto at = static_cast<std::size_t>(word);
  Touched& cell = touched_[at];
  const std::string name = "shared word " + std::to_string(word);
  if (!cell.written) report_(site, "load of " + name + ", which nobody wrote");
  if (cell.in_flight) {
    report_(site, "load of " + name + " while a copy to it is in flight, of " +
                      who(cell.write, cell.write_line));
    return words_[at];
  }
  if (cell.written && !precedes(cell.write, now)) {
    report_(site, "race: loads " + name + ", written by " + who(cell.write, cell.write_line) +
                      " without a barrier");
  }
  note_read(cell, now, site);
  return words_[at];
}

void SharedMemory::load(std::uint32_t (&values)[4], int word, const Moment& now, Site site) {
  check_aligned(word, 4, site);
  for (int i = 0; i < 4; ++i) values[i] = load(word + i, now, site);
}

void SharedMemory::store(int word, std::uint32_t value, const Moment& now, Site site) {
  if (!is_inside(word, "store", site)) return;
  const auto at = static_cast<std::size_t>(word);
  Touched& cell = touched_[at];
  const std::string name = "shared word " + std::to_string(word);
  if (cell.in_flight) {
    report_(site, "store to " + name + " while a copy to it is in flight, of " +
                      who(cell.write, cell.write_line));
  }
  if (cell.written && !precedes(cell.write, now)) {
    report_(site, "race: overwrites " + name + ", written by " + who(cell.write, cell.write_line) +
                      " without a barrier");
  }
  if (!read_is_ordered(cell, now)) {
    report_(site, "race: overwrites " + name + ", loaded by " + who(cell.read, cell.read_line) +
                      " without a barrier");
  }
  cell.write = now;
  cell.write_line = site.line;
  cell.written = true;
  words_[at] = value;
}

void SharedMemory::begin_copy(int word, const Moment& now, Site site) {
  store(word, kPoison, now, site);
  if (word >= 0 && static_cast<std::size_t>(word) < words_.size())
    touched_[static_cast<std::size_t>(word)].in_flight = true;
}

void SharedMemory::end_copy(int word, std::uint32_t value, const Moment& now) {
  if (word < 0 || static_cast<std::size_t>(word) >= words_.size()) return;  // reported before
  const auto at = static_cast<std::size_t>(word);
  touched_[at].in_flight = false;
  touched_[at].write = now;
  words_[at] = value;
}

GlobalMemory::GlobalMemory(const std::vector<Buffer>& buffers, Report report)
    : report_(std::move(report)) {
  for (const Buffer& buffer : buffers) {
    if (buffer.bytes() == 0) continue;
    tracked_.push_back({buffer});
  }
}

std::optional<GlobalMemory::Place> GlobalMemory::find(const void* address, std::size_t bytes,
                                                      std::size_t alignment, const char* what,
                                                      Site site) {
  const auto at = reinterpret_cast<std::uintptr_t>(address);
  const std::string name = std::string(what) + " of " + std::to_string(bytes) + " bytes";
  if (at % alignment != 0) {
    report_(site, name + ": the address is not aligned to them");
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
      report_(site, name + " at " + buffer.name + " + " + std::to_string(offset) +
                        ": between its rows or past its end");
      return std::nullopt;
    }
  }
  report_(site, name + ": the address is in no buffer of the kernel");
  return std::nullopt;
}

bool GlobalMemory::read(const void* address, std::size_t bytes, const Moment& now,
                        const Acquired& acquired, Site site, std::size_t alignment) {
  const auto place = find(address, bytes, alignment == 0 ? bytes : alignment, "load", site);
  if (!place) return false;
  if (place->tracked->buffer.access == Access::kRead) return true;
  for (std::size_t i = 0; i < bytes; i += 2) {
    Touched& cell = place->tracked->cell(place->offset + i);
    note_read(cell, now, site);
    if (cell.written && !ordered(cell.write, now, acquired)) {
      report_(site, "race: loads " + place->tracked->buffer.name + " + " +
                        std::to_string(place->offset + i) + ", written by " +
                        who(cell.write, cell.write_line) + " without order between them");
      break;
    }
  }
  return true;
}

bool GlobalMemory::write(void* address, std::size_t bytes, const Moment& now,
                         const Acquired& acquired, Site site) {
  const auto place = find(address, bytes, bytes, "store", site);
  if (!place) return false;
  const Buffer& buffer = place->tracked->buffer;
  if (buffer.access == Access::kRead) {
    report_(site, "store to " + buffer.name + ", which the kernel only reads");
    return false;
  }
  for (std::size_t i = 0; i < bytes; i += 2) {
    Touched& cell = place->tracked->cell(place->offset + i);
    const std::string name = buffer.name + " + " + std::to_string(place->offset + i);
    if (cell.written && written_once(buffer)) {
      report_(site, name + " is written twice, before by " + who(cell.write, cell.write_line));
      break;
    }
    if (cell.written && !ordered(cell.write, now, acquired)) {
      report_(site, "race: overwrites " + name + ", written by " +
                        who(cell.write, cell.write_line) + " without order between them");
      break;
    }
    const bool foreign = cell.read.block >= 0 && cell.read.block != now.block;
    if (foreign ? !acquired.covers(cell.read, now) : !read_is_ordered(cell, now)) {
      report_(site, "race: overwrites " + name + ", loaded by " + who(cell.read, cell.read_line) +
                        " without order between them");
      break;
    }
    cell.write = now;
    cell.write_line = site.line;
    cell.written = true;
  }
  return true;
}

bool GlobalMemory::atomic(void* address, Site site) {
  const auto place = find(address, 4, 4, "atomic operation", site);
  if (!place) return false;
  if (place->tracked->buffer.access == Access::kChanges) return true;
  report_(site, "atomic operation on " + place->tracked->buffer.name + ", which is no such buffer");
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
      report_({"", 0},
              std::to_string(missing) + " bytes of " + buffer.name + " were never written");
    }
  }
}

}  // namespace dmuon::kernels::cuda::emulator
