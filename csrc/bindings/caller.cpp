#include "bindings/caller.h"

namespace py = pybind11;

namespace fastdist::bindings {

std::string python_location() {
  py::object frame =
      py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(PyEval_GetFrame()));
  while (frame && !frame.is_none()) {
    const std::string module =
        py::str(frame.attr("f_globals").attr("get")("__name__", "")).cast<std::string>();
    if (module != "fastdist" && module.rfind("fastdist.", 0) != 0) {
      const py::object code = frame.attr("f_code");
      return py::str("{}:{} in {}")
          .format(code.attr("co_filename"), frame.attr("f_lineno"), code.attr("co_name"))
          .cast<std::string>();
    }
    frame = frame.attr("f_back");
  }
  return "";
}

std::string PythonCaller::location() const {
  const py::gil_scoped_acquire gil;
  try {
    return python_location();
  } catch (const py::error_already_set&) {
    return "";  // peers wait for this rank to say where it is; saying nothing is better than late
  }
}

void PythonCaller::check_interrupt() const {
  const py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

}  // namespace fastdist::bindings
