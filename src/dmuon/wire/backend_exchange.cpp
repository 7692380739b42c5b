#include "dmuon/wire/exchange.h"

namespace dmuon::wire {
namespace {

// Returns true if the backend's own all-gather and reduce-scatter fit.
bool are_equal_parts(const Group& group, const at::Tensor& packed,
                     const std::vector<layout::Part>& parts) {
  return group.in_order() && layout::equal_parts(parts, packed.numel());
}

class BackendExchange final : public Exchange {
 public:
  std::int64_t inbox_elements(const Group&, const std::vector<layout::Part>&) const override {
    return 0;
  }

  Rest gather(Group& group, const at::Tensor& packed, const std::vector<layout::Part>& parts,
              const std::string& what) const override {
    if (!are_equal_parts(group, packed, parts)) return Exchange::gather(group, packed, parts, what);
    return [message = group.all_gather_equal(packed, what)] { wait_all({message}); };
  }

  Rest reduce(Group& group, const at::Tensor& packed, const std::vector<layout::Part>& parts,
              const at::Tensor& /*inbox*/, TakeSum take, const std::string& what) const override {
    double scale = 1.0 / group.size();
    if (packed.scalar_type() == at::kHalf && group.size() > 1) {
      packed.mul_(scale);
      scale = 1;
    }
    const auto sum_to = [&](const at::Tensor& values, int root) {
      return group.reduce_sum(values, root, what);
    };
    std::vector<Pending> messages =
        are_equal_parts(group, packed, parts)
            ? std::vector<Pending>{group.reduce_scatter_equal(packed, what)}
            : for_segments(&group, packed, parts, what, sum_to);
    return [packed, scale, messages = std::move(messages), take = std::move(take),
            own = parts[static_cast<std::size_t>(group.rank())]] {
      wait_all(messages);
      std::int64_t begin = 0;
      for (const layout::Segment& segment : own.segments) {
        take(begin, packed.narrow(0, segment.begin, segment.size()), scale);
        begin += segment.size();
      }
    };
  }
};

}  // namespace

const Exchange& backend_exchange() {
  static const BackendExchange kExchange;
  return kExchange;
}

}  // namespace dmuon::wire
