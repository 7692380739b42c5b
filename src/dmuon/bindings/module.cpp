#include "dmuon/bindings/topics.h"

PYBIND11_MODULE(_C, module) {
  module.doc() = "The C++ engine behind dmuon; use the dmuon package, not this module.";
  pybind11::module_::import("dmuon._plan");  // its types are parameters here
  dmuon::bindings::init_newton_schulz(module);
  dmuon::bindings::init_schedule(module);
  dmuon::bindings::init_simulate(module);
  dmuon::bindings::init_wire(module);
  dmuon::bindings::init_engine(module);
  dmuon::bindings::init_optim(module);
}
