#include <exception>

#include "dmuon/bindings/topics.h"
#include "dmuon/core/error.h"

PYBIND11_MODULE(_C, module) {
  module.doc() = "The C++ engine behind dmuon; use the dmuon package, not this module.";
  module.attr("__version__") = DMUON_VERSION;
  pybind11::register_exception_translator([](std::exception_ptr raised) {
    try {
      if (raised) std::rethrow_exception(raised);
    } catch (const dmuon::core::InvalidArgument& error) {
      PyErr_SetString(PyExc_ValueError, error.what());
    } catch (const dmuon::core::CommError& error) {
      PyErr_SetString(PyExc_RuntimeError, error.what());
    } catch (const dmuon::core::InternalError& error) {
      PyErr_SetString(PyExc_RuntimeError, error.what());
    }
  });
  dmuon::bindings::init_plan(module);
  dmuon::bindings::init_newton_schulz(module);
  dmuon::bindings::init_schedule(module);
  dmuon::bindings::init_engine(module);
  dmuon::bindings::init_optim(module);
}
