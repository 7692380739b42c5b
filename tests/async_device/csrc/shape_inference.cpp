#include "async_device/csrc/shape_inference.h"

#include <ATen/EmptyTensor.h>

#include <atomic>
#include <mutex>
#include <string>
#include <unordered_map>

#include "async_device/csrc/tensors.h"

namespace async_device {
namespace {

constexpr size_t kMaxKept = 65536;

std::atomic<bool> keeps{true};

at::Tensor meta_of(const at::Tensor& tensor) {
  if (!is_on_device(tensor)) return tensor;
  at::Tensor meta =
      at::detail::empty_strided_meta(tensor.sizes(), tensor.strides(), tensor.scalar_type());
  if (tensor.storage_offset() != 0) {
    meta.storage().unsafeGetStorageImpl()->set_nbytes(tensor.storage().nbytes());
    meta.unsafeGetTensorImpl()->set_storage_offset(tensor.storage_offset());
  }
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
    meta.unsafeGetTensorImpl()->set_wrapped_number(true);
  }
  return meta;
}

/// Serialises the arguments that decide the shapes of results. Not every argument can be.
class Key {
 public:
  Key(const c10::OperatorHandle& handle, const Stack& arguments) {
    put(&handle.schema());
    put(c10::get_default_dtype_as_scalartype());
    for (const c10::IValue& argument : arguments) add(argument);
  }

  bool is_complete() const { return is_complete_; }
  const std::string& bytes() const { return bytes_; }

 private:
  template <typename T>
  void put(const T& value) {
    bytes_.append(reinterpret_cast<const char*>(&value), sizeof(value));
  }

  template <typename List>
  void put_list(const List& list) {
    put(list.size());
    for (size_t i = 0; i < list.size(); ++i) put(list[i]);
  }

  void add_tensor(const at::Tensor& tensor) {
    if (!tensor.defined()) return put('u');
    // A mask of the host decides by its values, and is there.
    const at::ScalarType dtype = tensor.scalar_type();
    if (!is_on_device(tensor) && (dtype == at::kBool || dtype == at::kByte)) is_complete_ = false;
    put(tensor.device().type());
    put(dtype);
    put(tensor.unsafeGetTensorImpl()->is_wrapped_number());
    put(tensor.storage_offset());
    put_list(tensor.sizes());
    put_list(tensor.strides());
    if (tensor.has_storage()) put(tensor.storage().nbytes());
  }

  void add(const c10::IValue& value) {
    if (value.isTensor()) {
      put('t');
      add_tensor(value.toTensor());
    } else if (value.isTensorList()) {
      put('T');
      const auto tensors = value.toTensorVector();
      put(tensors.size());
      for (const at::Tensor& tensor : tensors) add_tensor(tensor);
    } else if (value.isOptionalTensorList()) {
      put('O');
      const auto tensors = value.toOptionalTensorVector();
      put(tensors.size());
      for (const auto& tensor : tensors) add_tensor(tensor.value_or(at::Tensor()));
    } else {
      add_value(value);
    }
  }

  void add_value(const c10::IValue& value) {
    if (value.isNone() || value.isGenerator() || value.isDevice()) {
      put('n');
    } else if (value.isInt()) {
      put('i');
      put(value.toInt());
    } else if (value.isDouble()) {
      put('d');
      put(value.toDouble());
    } else if (value.isBool()) {
      put('b');
      put(value.toBool());
    } else if (value.isString()) {
      put('s');
      put_list(value.toStringRef());
    } else if (value.isIntList()) {
      put('I');
      put_list(value.toIntVector());
    } else if (value.isDoubleList()) {
      put('D');
      put_list(value.toDoubleVector());
    } else {
      is_complete_ = false;
    }
  }

  std::string bytes_;
  bool is_complete_ = true;
};

bool says_no_meta_kernel(const std::string& message) {
  for (const char* part : {"NotImplementedError", "meta", "Meta", "data-dependent"}) {
    if (message.find(part) != std::string::npos) return true;
  }
  return false;
}

/// Corrects results for which CPU kernels disagree with those of the meta device.
void correct(const OperatorFacts& facts, const Stack& arguments, Stack& results) {
  if (*facts.name == "aten::native_batch_norm" && !arguments.at(5).toBool()) {
    for (const size_t i : {1, 2}) results[i] = results[i].toTensor().new_empty({0});
  }
  if (*facts.name != "aten::native_layer_norm") return;
  // On CPUs mean and rstd have the parameters' type.
  const c10::IValue& weight = arguments.at(2);
  const bool has_weight = weight.isTensor() && weight.toTensor().defined();
  const auto type = (has_weight ? weight : arguments.at(0)).toTensor().scalar_type();
  for (const size_t i : {1, 2}) results[i] = results[i].toTensor().to(type);
}

std::shared_ptr<const Inferred> infer(const c10::OperatorHandle& handle, const OperatorFacts& facts,
                                      const Stack& arguments) {
  auto inferred = std::make_shared<Inferred>();
  const Stack metas = map_arguments(arguments, c10::kMeta, meta_of);
  try {
    inferred->results = metas;
    handle.callBoxed(&inferred->results);
  } catch (const c10::NotImplementedError&) {
    return inferred;
  } catch (const std::exception& error) {
    if (!says_no_meta_kernel(error.what())) throw;
    return inferred;
  }
  inferred->is_known = true;
  correct(facts, arguments, inferred->results);
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (!facts.arguments[i].is_out || !arguments[i].isTensor()) continue;
    inferred->outs.emplace_back(i, metas[i].toTensor());
  }
  return inferred;
}

}  // namespace

void keep_shapes(bool keep) { keeps = keep; }

std::shared_ptr<const Inferred> infer_shapes(const c10::OperatorHandle& handle,
                                             const OperatorFacts& facts, const Stack& arguments) {
  static std::mutex mutex;
  static auto* kept = new std::unordered_map<std::string, std::shared_ptr<const Inferred>>();
  if (!keeps) return infer(handle, facts, arguments);
  const Key key(handle, arguments);
  if (!key.is_complete()) return infer(handle, facts, arguments);
  {
    const std::scoped_lock lock(mutex);
    const auto found = kept->find(key.bytes());
    if (found != kept->end()) return found->second;
  }
  auto inferred = infer(handle, facts, arguments);
  const std::scoped_lock lock(mutex);
  if (kept->size() >= kMaxKept) kept->clear();
  kept->emplace(key.bytes(), inferred);
  return inferred;
}

}  // namespace async_device
