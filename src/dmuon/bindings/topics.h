#pragma once

#include <torch/csrc/utils/pybind.h>

namespace dmuon::bindings {

// One function a file, called in turn by module.cpp.
void init_plan(pybind11::module_& module);
void init_newton_schulz(pybind11::module_& module);
void init_schedule(pybind11::module_& module);
void init_engine(pybind11::module_& module);
void init_optim(pybind11::module_& module);

}  // namespace dmuon::bindings
