#include "dmuon/engine/exchange.h"

namespace dmuon::engine {

void Exchange::for_segments(Group* group, const at::Tensor& packed,
                            const std::vector<Segment>& segments, const std::string& what,
                            const std::function<Pending(const at::Tensor& part, int root)>& issue) {
  std::vector<Pending> messages = group->together(what, [&] {
    std::vector<Pending> issued;
    for (std::size_t root = 0; root < segments.size(); ++root) {
      const Segment& segment = segments[root];
      if (segment.size() == 0) continue;  // with many owners most are: they cost nothing
      const at::Tensor part = packed.narrow(0, segment.begin, segment.size());
      issued.push_back(issue(part, static_cast<int>(root)));
    }
    return issued;
  });
  for (Pending& message : messages) message.wait();
}

void Exchange::gather(Group& group, const at::Tensor& packed, const std::vector<Segment>& segments,
                      const std::string& what) const {
  for_segments(&group, packed, segments, what,
               [&](const at::Tensor& part, int root) { return group.broadcast(part, root, what); });
}

}  // namespace dmuon::engine
