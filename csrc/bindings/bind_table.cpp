// The storage of parameter servers: tables of rows, dense variables, and routing to servers.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "bindings/array.h"
#include "bindings/caller.h"
#include "core/error.h"
#include "table/dense_variable.h"
#include "table/format.h"
#include "table/routing.h"
#include "table/row_table.h"

namespace fastdist::bindings {
namespace {

using table::DenseVariable;
using table::RowTable;
using table::UpdateRule;

// One row-major array of one of `dtypes`, as a span. The span is valid while this object lives.
template <class T>
class Array {
 public:
  Array(py::handle object, Access access, const char* argument, std::initializer_list<DType> dtypes)
      : arrays_(object, access, argument) {
    const TensorView& view = arrays_.views()[0];
    std::string expected;
    bool is_known = false;
    for (const DType dtype : dtypes) {
      expected += (expected.empty() ? "" : " or ") + std::string(name_of(dtype));
      is_known = is_known || view.dtype == dtype;
    }
    if (arrays_.is_list() || !is_known) {
      refuse(ErrorCode::kType, argument, " must be an array of ", expected, ", got ",
             (arrays_.is_list() ? "a list" : std::string(name_of(view.dtype))));
    }
    if (view.order != 0) {
      refuse(ErrorCode::kValue, argument, " must be in row-major order");
    }
    span_ = {reinterpret_cast<T*>(view.data), view.count};
  }
  [[nodiscard]] operator std::span<T>() const noexcept { return span_; }

 private:
  Arrays arrays_;
  std::span<T> span_;
};

struct Ids : Array<const std::uint64_t> {
  explicit Ids(py::handle object)
      : Array(object, Access::kRead, "ids", {DType::kInt64, DType::kUInt64}) {}
};

struct Floats : Array<const float> {
  Floats(py::handle object, const char* argument)
      : Array(object, Access::kRead, argument, {DType::kFloat32}) {}
};

struct FloatsOut : Array<float> {
  explicit FloatsOut(py::handle object, const char* argument = "out")
      : Array(object, Access::kWrite, argument, {DType::kFloat32}) {}
};

// None gives an empty span.
std::optional<Floats> optional_floats(py::handle object, const char* argument) {
  if (object.is_none()) return std::nullopt;
  return Floats(object, argument);
}
std::span<const float> span_of(const std::optional<Floats>& floats) {
  return floats ? *floats : std::span<const float>();
}

// Calls a method with arrays, which it takes as spans, or other arguments.
template <class Method, class... Arguments>
auto call_without_gil(const Method& method, Arguments&&... arguments) {
  const GilRelease release;
  return std::invoke(method, arguments...);
}

UpdateRule make_rule(const std::string& name, const py::kwargs& given) {
  std::vector<UpdateRule::Hyperparameter> hyperparameters;
  for (const auto& [key, value] : given) {
    const auto argument = key.cast<std::string>();
    if (argument == "betas") {
      const auto [first, second] = value.cast<std::pair<double, double>>();
      hyperparameters.emplace_back("beta1", first);
      hyperparameters.emplace_back("beta2", second);
    } else {
      hyperparameters.emplace_back(argument, value.cast<double>());
    }
  }
  return {name, hyperparameters};
}

std::vector<std::string> slot_names(const UpdateRule& rule) {
  std::vector<std::string> names;
  for (const table::Slot& slot : rule.slots()) names.emplace_back(slot.name);
  return names;
}

std::unique_ptr<RowTable> make_row_table(std::size_t dim, const UpdateRule& rule,
                                         std::optional<std::uint64_t> rows,
                                         std::optional<std::size_t> memory_bytes,
                                         const std::tuple<std::string, double, double>& initializer,
                                         std::uint64_t seed, std::uint64_t first_id,
                                         const std::string& storage,
                                         std::optional<std::uint64_t> max_rows,
                                         std::optional<std::uint32_t> max_age) {
  const auto& [distribution, first, second] = initializer;
  table::RowTableOptions options{dim, rule, table::Initializer(distribution, first, second)};
  options.seed = seed;
  options.first_id = first_id;
  options.rows = rows;
  options.memory_bytes = memory_bytes;
  options.max_rows = max_rows;
  options.max_age = max_age;
  options.storage = table::storage_of(storage);
  const GilRelease release;
  return std::make_unique<RowTable>(std::move(options));
}

// Returns the ids, values and slots of the rows of parts from `part` on, until they are `enough` or
// no part is left, and the number of the next part.
py::tuple read_parts(RowTable& table, std::size_t part, std::size_t enough) {
  std::vector<std::uint64_t> ids;
  {
    const GilRelease release;
    for (; part < table.parts() && ids.size() < enough; ++part) {
      const std::vector<std::uint64_t> more = table.ids_of_part(part);
      ids.insert(ids.end(), more.begin(), more.end());
    }
  }
  py::array_t<float> values({ids.size(), table.dim()});
  py::array_t<float> slots({ids.size(), table.slot_floats()});
  const std::span<float> value_span(values.mutable_data(), ids.size() * table.dim());
  const std::span<float> slot_span(slots.mutable_data(), ids.size() * table.slot_floats());
  std::size_t rows = 0;
  {
    const GilRelease release;
    rows = table.read_present(ids, value_span, slot_span);
  }
  const py::slice present(py::int_(0), py::int_(rows), py::none());
  return py::make_tuple(py::array_t<std::uint64_t>(rows, ids.data()), values[present],
                        slots[present], part);
}

void bind_row_table(py::module_& m) {
  py::class_<RowTable>(m, "RowTable")
      .def(py::init(&make_row_table), py::arg("dim"), py::arg("rule"), py::kw_only(),
           py::arg("rows") = py::none(), py::arg("memory_bytes") = py::none(),
           py::arg("initializer") = py::make_tuple("constant", 0., 0.), py::arg("seed") = 0,
           py::arg("first_id") = 0, py::arg("storage") = "float32",
           py::arg("max_rows") = py::none(), py::arg("max_age") = py::none())
      .def("pull",
           [](RowTable& t, py::handle ids, py::handle out) {
             call_without_gil(&RowTable::pull, t, Ids(ids), FloatsOut(out));
           })
      .def(
          "push",
          [](RowTable& t, py::handle ids, py::handle gradients, std::optional<double> lr) {
            call_without_gil(&RowTable::push, t, Ids(ids), Floats(gradients, "gradients"), lr);
          },
          py::arg("ids"), py::arg("gradients"), py::arg("lr") = py::none())
      .def(
          "assign",
          [](RowTable& t, py::handle ids, py::handle values, py::handle slots) {
            const auto state = optional_floats(slots, "slots");
            call_without_gil(&RowTable::assign, t, Ids(ids), Floats(values, "values"),
                             span_of(state));
          },
          py::arg("ids"), py::arg("values"), py::arg("slots") = py::none())
      .def("read_parts", &read_parts)
      .def("__len__", &RowTable::size)
      .def("clear", &RowTable::clear, py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("parts", &RowTable::parts)
      .def_property_readonly("dim", &RowTable::dim)
      .def_property_readonly("slots", [](const RowTable& t) { return slot_names(t.rule()); })
      .def_property_readonly("slot_floats", &RowTable::slot_floats)
      .def_property_readonly("nbytes", &RowTable::bytes)
      .def_property("step", &RowTable::step, &RowTable::set_step)
      .def_property("seed", &RowTable::seed, &RowTable::set_seed);
}

std::unique_ptr<DenseVariable> make_dense(py::handle initial, const UpdateRule& rule) {
  return std::make_unique<DenseVariable>(Floats(initial, "initial"), rule);
}

void bind_dense_variable(py::module_& m) {
  py::class_<DenseVariable>(m, "DenseVariable")
      .def(py::init(&make_dense))
      .def("pull",
           [](DenseVariable& v, std::size_t begin, py::handle out) {
             call_without_gil(&DenseVariable::pull, v, begin, FloatsOut(out));
           })
      .def(
          "push",
          [](DenseVariable& v, std::size_t begin, py::handle gradient, std::optional<double> lr) {
            call_without_gil(&DenseVariable::push, v, begin, Floats(gradient, "gradient"), lr);
          },
          py::arg("begin"), py::arg("gradient"), py::arg("lr") = py::none())
      .def(
          "assign",
          [](DenseVariable& v, std::size_t begin, py::handle values, py::handle slots) {
            const auto state = optional_floats(slots, "slots");
            call_without_gil(&DenseVariable::assign, v, begin, Floats(values, "values"),
                             span_of(state));
          },
          py::arg("begin"), py::arg("values"), py::arg("slots") = py::none())
      .def("read_state",
           [](DenseVariable& v, py::handle values, py::handle slots) {
             return call_without_gil(&DenseVariable::read_state, v, FloatsOut(values, "values"),
                                     FloatsOut(slots, "slots"));
           })
      .def_property_readonly("size", &DenseVariable::size)
      .def_property_readonly("nbytes", &DenseVariable::bytes)
      .def_property_readonly("values",
                             [](const py::object& self) {
                               const auto values = self.cast<DenseVariable&>().values();
                               py::array_t<float> view(static_cast<py::ssize_t>(values.size()),
                                                       values.data(), self);
                               view.attr("flags").attr("writeable") = false;
                               return view;
                             })
      .def_property(
          "step", py::cpp_function(&DenseVariable::step, py::call_guard<py::gil_scoped_release>()),
          py::cpp_function(&DenseVariable::set_step, py::call_guard<py::gil_scoped_release>()));
}

py::tuple call_route(const table::Owners& owners, py::handle ids) {
  const table::Routes routes = call_without_gil(&table::route, owners, Ids(ids));
  const auto array = [](const auto& values) {
    return py::array(static_cast<py::ssize_t>(values.size()), values.data());
  };
  py::object positions = py::none();
  if (!routes.positions.empty()) positions = array(routes.positions);
  return py::make_tuple(array(routes.ids), routes.counts, std::move(positions));
}

py::array_t<std::int64_t> owners_of(const table::Owners& owners, py::handle ids) {
  const Ids all(ids);
  const std::span<const std::uint64_t> from = all;
  py::array_t<std::int64_t> found(from.size());
  const std::span<std::int64_t> to(found.mutable_data(), from.size());
  call_without_gil(&table::find_owners, owners, from, to);
  return found;
}

void bind_routing(py::module_& m) {
  py::class_<table::Owners>(m, "Owners")
      .def(py::init([](std::size_t count, std::vector<std::uint64_t> begins, std::uint64_t end) {
             return table::Owners{count, std::move(begins), end};
           }),
           py::arg("count"), py::arg("begins") = std::vector<std::uint64_t>(), py::arg("end") = 0)
      .def("owners_of", &owners_of)
      .def("route", &call_route);
}

void bind_wire(py::module_& m) {
  using table::WireFormat;
  py::class_<WireFormat>(m, "WireFormat")
      .def(py::init<std::string_view, std::size_t>())
      .def("nbytes", &WireFormat::bytes)
      .def("encode",
           [](const WireFormat& f, py::handle values, py::handle message) {
             const Array<std::uint8_t> to(message, Access::kWrite, "message", {DType::kUInt8});
             call_without_gil(&WireFormat::encode, f, Floats(values, "values"), to);
           })
      .def("decode", [](const WireFormat& f, py::handle message, py::handle out) {
        const Array<const std::uint8_t> from(message, Access::kRead, "message", {DType::kUInt8});
        call_without_gil(&WireFormat::decode, f, from, FloatsOut(out));
      });
  m.def("count_nonfinite", [](py::handle values) {
    const Floats given(values, "values");
    const std::span<const float> all = given;
    return call_without_gil(table::kernels().count_nonfinite, all.data(), all.size());
  });
}

}  // namespace

void bind_table(py::module_& m) {
  py::class_<UpdateRule>(m, "UpdateRule")
      .def(py::init(&make_rule))
      .def_property_readonly("slots", &slot_names);
  bind_routing(m);
  bind_wire(m);
  bind_row_table(m);
  bind_dense_variable(m);
}

}  // namespace fastdist::bindings
