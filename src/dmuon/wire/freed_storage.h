#pragma once

#include <c10/core/StorageImpl.h>
#include <torch/version.h>

#include <string>
#include <utility>

namespace dmuon::wire {

// A storage whose memory is freed can hold an error for those who read it. Nothing else protects
// them: at::sum, for instance, would read from address 0.

#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 12

/// Allows reads again.
inline void clear_read_error(c10::StorageImpl* storage) {
  storage->clear_data_ptr_access_error_msg_();
}

#else

// Before PyTorch 2.12 a storage has no function that takes its error back. An explicit
// instantiation may name private members, and so reaches the two that matter.
namespace before_2_12 {

struct ThrowsOnRead {
  using Member = bool c10::StorageImpl::*;
  friend Member member_of(ThrowsOnRead);
};
struct Refresh {
  using Member = void (c10::StorageImpl::*)();
  friend Member member_of(Refresh);
};
template <typename Tag, typename Tag::Member kMember>
struct Opened {
  friend typename Tag::Member member_of(Tag) { return kMember; }
};
template struct Opened<ThrowsOnRead, &c10::StorageImpl::throw_on_immutable_data_ptr_>;
template struct Opened<Refresh, &c10::StorageImpl::refresh_has_data_ptr_check>;

}  // namespace before_2_12

inline void clear_read_error(c10::StorageImpl* storage) {
  storage->*member_of(before_2_12::ThrowsOnRead{}) = false;
  (storage->*member_of(before_2_12::Refresh{}))();
}

#endif

/// Makes every read or write of the storage throw a c10::Error with this text.
inline void set_read_error(c10::StorageImpl* storage, std::string text) {
  storage->release_data_and_set_meta_custom_data_ptr_error_msg_(std::move(text));
}

}  // namespace dmuon::wire
