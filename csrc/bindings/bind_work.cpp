// Pending calls: what `async_op` returns.

#include <pybind11/critical_section.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <string>

#include "bindings/arguments.h"
#include "bindings/bind.h"
#include "bindings/caller.h"
#include "bindings/work.h"
#include "core/error.h"

namespace py = pybind11;

namespace fastdist::bindings {

bool wait_interruptibly(Work& work, std::chrono::nanoseconds timeout) {
  using Clock = std::chrono::steady_clock;
  constexpr std::chrono::nanoseconds kSlice = std::chrono::milliseconds(50);
  const auto deadline = Clock::now() + timeout;
  for (;;) {
    const std::chrono::nanoseconds left = deadline - Clock::now();
    {
      const GilRelease release;
      if (work.wait(std::clamp(left, std::chrono::nanoseconds(0), kSlice))) return true;
    }
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    if (left <= kSlice) return false;
  }
}

void throw_unfinished(py::handle timeout) {
  throw Error(ErrorCode::kTimeout, "the call has not finished after " +
                                       py::str(timeout).cast<std::string>() +
                                       " s; it is still running, wait again");
}

void bind_work(py::module_& m) {
  py::class_<PendingCall>(m, "Work")
      .def("is_done", [](const PendingCall& call) { return call.work->is_done(); })
      .def(
          "wait",
          [](const py::object& self, const py::object& timeout) {
            const auto& call = self.cast<const PendingCall&>();
            const auto limit =
                timeout.is_none() ? std::chrono::hours(24 * 365) : to_duration(timeout, true);
            if (!wait_interruptibly(*call.work, limit)) throw_unfinished(timeout);
            const py::scoped_critical_section one_thread(self);
            *call.kept = py::none();
            return call.result;
          },
          py::arg("timeout") = py::none());
}

}  // namespace fastdist::bindings
