#pragma once

#include <pybind11/pybind11.h>

#include "dmuon/core/index.h"

namespace pybind11::detail {

/// An index of any kind is an int in Python.
template <typename Kind>
class type_caster<dmuon::core::Index<Kind>> {
 public:
  PYBIND11_TYPE_CASTER(dmuon::core::Index<Kind>, const_name("int"));

  bool load(handle source, bool convert) {
    make_caster<int> number;
    if (!number.load(source, convert)) return false;
    value = dmuon::core::Index<Kind>(cast_op<int>(number));
    return true;
  }

  static handle cast(dmuon::core::Index<Kind> index, return_value_policy, handle) {
    return PyLong_FromLong(index.value());
  }
};

}  // namespace pybind11::detail
