#pragma once

#include <ATen/core/List.h>
#include <ATen/core/stack.h>

#include <optional>

namespace async_device {

using Stack = torch::jit::Stack;

/// The value with each defined tensor in it replaced by `replace(tensor)`.
template <typename Replace>
c10::IValue map_tensors(const c10::IValue& value, const Replace& replace) {
  if (value.isTensor()) {
    return value.toTensor().defined() ? c10::IValue(replace(value.toTensor())) : value;
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> all;
    for (const at::Tensor& tensor : value.toTensorVector()) {
      all.push_back(tensor.defined() ? replace(tensor) : tensor);
    }
    return all;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> all;
    for (const auto& tensor : value.toOptionalTensorVector()) {
      const bool is_there = tensor && tensor->defined();
      all.push_back(is_there ? std::optional<at::Tensor>(replace(*tensor)) : tensor);
    }
    return all;
  }
  return value;
}

/// Calls `visit` with each defined tensor in the value.
template <typename Visit>
void for_each_tensor(const c10::IValue& value, const Visit& visit) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) visit(value.toTensor());
  } else if (value.isTensorList() || value.isOptionalTensorList()) {
    map_tensors(value, [&](const at::Tensor& tensor) {
      visit(tensor);
      return tensor;
    });
  }
}

/// Arguments for a kernel of another device: tensors replaced, `device` for devices, no generator.
template <typename Replace>
Stack map_arguments(const Stack& arguments, c10::DeviceType device, const Replace& replace) {
  Stack mapped;
  mapped.reserve(arguments.size());
  for (const c10::IValue& argument : arguments) {
    if (argument.isDevice()) {
      mapped.emplace_back(c10::Device(device));
    } else if (argument.isGenerator()) {
      mapped.emplace_back();
    } else {
      mapped.push_back(map_tensors(argument, replace));
    }
  }
  return mapped;
}

}  // namespace async_device
