#include "dmuon/bindings/topics.h"

// The module dmuon._plan does not link PyTorch: the command imports only it and starts at once.
PYBIND11_MODULE(_plan, module) {
  module.doc() = "Plans, costs and the catalog in C++; use the dmuon package, not this module.";
  module.attr("__version__") = DMUON_VERSION;
  dmuon::bindings::init_plan(module);
  dmuon::bindings::init_catalog(module);
  dmuon::bindings::init_predict(module);
}
