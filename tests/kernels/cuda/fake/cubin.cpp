#include "tests/kernels/cuda/fake/cubin.h"

#include <elf.h>

#include <cstdint>
#include <cstring>

namespace dmuon::kernels::cuda::fake {
namespace {

// Attributes in .nv.info sections, as NVIDIA's cuobjdump names them.
enum Attribute : unsigned char {
  kMaxThreads = 0x05,  // EIATTR_MAX_THREADS: of __launch_bounds__
  kParameter = 0x17,   // EIATTR_KPARAM_INFO
  kRegisters = 0x2f,   // EIATTR_REGCOUNT: from sm_90 on
  kCluster = 0x3d,     // EIATTR_CTA_PER_CLUSTER: of __cluster_dims__
};
constexpr unsigned char kHasSize = 4;  // the format of a record whose value has a size

template <typename T>
T at(const unsigned char* p) {
  T v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

// Calls on_record(attribute, value) for the records of an .nv.info section that have a size.
template <typename OnRecord>
void for_each_record(const unsigned char* p, std::size_t bytes, const OnRecord& on_record) {
  for (std::size_t i = 0; i + 4 <= bytes;) {
    const bool has_size = p[i] == kHasSize;
    if (has_size) on_record(p[i + 1], p + i + 4);
    i += 4 + (has_size ? at<std::uint16_t>(p + i + 2) : 0U);
  }
}

class Elf {
 public:
  explicit Elf(const unsigned char* image) : image_(image), header_(at<Elf64_Ehdr>(image)) {
    for (std::size_t i = 0; i < header_.e_shnum; ++i) {
      sections_.push_back(at<Elf64_Shdr>(image + header_.e_shoff + i * sizeof(Elf64_Shdr)));
    }
  }

  Cubin cubin() const {
    Cubin cubin;
    // ABI 8, of CUDA 13, has the architecture in the second byte of the flags; earlier ones in the
    // first.
    const unsigned shift = header_.e_ident[EI_ABIVERSION] >= 8 ? 8 : 0;
    cubin.architecture = static_cast<int>(header_.e_flags >> shift & 0xff);
    for (const Elf64_Shdr& section : sections_) {
      const std::string kernel = after(section, ".text.");
      if (!kernel.empty())
        cubin.kernels[kernel].registers = static_cast<int>(section.sh_info >> 24);
    }
    for (const Elf64_Shdr& section : sections_) {
      if (name(section) == std::string(".nv.info")) read_registers(section, cubin);
      const auto kernel = cubin.kernels.find(after(section, ".nv.info."));
      if (kernel != cubin.kernels.end()) read_needs(section, kernel->second);
    }
    return cubin;
  }

 private:
  const char* name(const Elf64_Shdr& section) const {
    const Elf64_Shdr& names = sections_.at(header_.e_shstrndx);
    return reinterpret_cast<const char*>(image_ + names.sh_offset) + section.sh_name;
  }

  std::string after(const Elf64_Shdr& section, const std::string& prefix) const {
    const std::string whole = name(section);
    return whole.starts_with(prefix) ? whole.substr(prefix.size()) : "";
  }

  // Records of a symbol's index and a count.
  void read_registers(const Elf64_Shdr& section, Cubin& cubin) const {
    const Elf64_Shdr& symbols = sections_.at(section.sh_link);
    const auto* strings =
        reinterpret_cast<const char*>(image_ + sections_.at(symbols.sh_link).sh_offset);
    for_each_record(image_ + section.sh_offset, section.sh_size,
                    [&](unsigned char attribute, const unsigned char* value) {
                      if (attribute != kRegisters) return;
                      const auto symbol =
                          at<Elf64_Sym>(image_ + symbols.sh_offset +
                                        at<std::uint32_t>(value) * sizeof(Elf64_Sym));
                      const auto kernel = cubin.kernels.find(strings + symbol.st_name);
                      if (kernel == cubin.kernels.end()) return;
                      kernel->second.registers = static_cast<int>(at<std::uint32_t>(value + 4));
                    });
  }

  void read_needs(const Elf64_Shdr& section, CubinKernel& kernel) const {
    for_each_record(image_ + section.sh_offset, section.sh_size,
                    [&](unsigned char attribute, const unsigned char* value) {
                      if (attribute == kMaxThreads) {
                        kernel.max_threads = static_cast<int>(at<std::uint32_t>(value));
                      } else if (attribute == kCluster) {
                        kernel.cluster = static_cast<int>(at<std::uint32_t>(value));
                      } else if (attribute == kParameter) {
                        // Index (4 bytes), ordinal (2), offset (2), flags with the size from
                        // bit 18.
                        const auto size = at<std::uint32_t>(value + 8) >> 18;
                        kernel.parameter_bytes.push_back(static_cast<int>(size));
                      }
                    });
  }

  const unsigned char* image_;
  Elf64_Ehdr header_;
  std::vector<Elf64_Shdr> sections_;
};

constexpr std::uint32_t kFatBinary = 0xba55ed50;
constexpr std::uint16_t kElfEntry = 2;

}  // namespace

std::vector<Cubin> read(const void* fat_binary) {
  const auto* p = static_cast<const unsigned char*>(fat_binary);
  std::vector<Cubin> found;
  if (at<std::uint32_t>(p) != kFatBinary) return found;
  const std::uint64_t header = at<std::uint16_t>(p + 6);
  const std::uint64_t end = header + at<std::uint64_t>(p + 8);
  for (std::uint64_t i = header; i < end;) {  // kind (2), version (2), header size (4), size (8)
    const unsigned char* data = p + i + at<std::uint32_t>(p + i + 4);
    if (at<std::uint16_t>(p + i) == kElfEntry && std::memcmp(data, ELFMAG, SELFMAG) == 0) {
      found.push_back(Elf(data).cubin());
    }
    i += at<std::uint32_t>(p + i + 4) + at<std::uint64_t>(p + i + 8);
  }
  return found;
}

}  // namespace dmuon::kernels::cuda::fake
