#include "dmuon/wire/exchange.h"

namespace dmuon::wire {

std::vector<Pending> Exchange::for_segments(
    Group* group, const at::Tensor& packed, const std::vector<layout::Part>& parts,
    const std::string& what,
    const std::function<Pending(const at::Tensor& values, int root)>& issue) {
  return group->together(what, [&] {
    std::vector<Pending> issued;
    for (std::size_t root = 0; root < parts.size(); ++root) {
      for (const layout::Segment& segment : parts[root].segments) {
        const at::Tensor values = packed.narrow(0, segment.begin, segment.size());
        issued.push_back(issue(values, static_cast<int>(root)));
      }
    }
    return issued;
  });
}

Rest Exchange::gather(Group& group, const at::Tensor& packed,
                      const std::vector<layout::Part>& parts, const std::string& what) const {
  return [messages =
              for_segments(&group, packed, parts, what, [&](const at::Tensor& values, int root) {
                return group.broadcast(values, root, what);
              })] { wait_all(messages); };
}

}  // namespace dmuon::wire
