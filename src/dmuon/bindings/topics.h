#pragma once

#include <pybind11/pybind11.h>

namespace dmuon::bindings {

// One function a file. Called in turn by plan_module.cpp, which is below the torch line:
void init_plan(pybind11::module_& module);
void init_catalog(pybind11::module_& module);
void init_predict(pybind11::module_& module);

// by module.cpp, which is above it:
void init_newton_schulz(pybind11::module_& module);
void init_schedule(pybind11::module_& module);
void init_simulate(pybind11::module_& module);
void init_wire(pybind11::module_& module);
void init_engine(pybind11::module_& module);
void init_optim(pybind11::module_& module);

}  // namespace dmuon::bindings
