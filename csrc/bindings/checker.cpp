#include "bindings/checker.h"

#include <chrono>
#include <optional>
#include <string>
#include <utility>

#include "bindings/host.h"

namespace py = pybind11;

namespace fastdist::bindings {
namespace {

class HostChecker final : public nccl::Checker {
 public:
  explicit HostChecker(py::object host) : owner_(std::move(host)), host_(owner_.cast<Host&>()) {}
  [[nodiscard]] int size() const override { return host_.communicator().size(); }

  bool agree(const Signature& signature, bool flag, const CallOptions& options) override {
    std::byte answer{static_cast<unsigned char>(flag ? 1 : 0)};
    const TensorView view{&answer, 1, DType::kUInt8, 0};
    host_.run_without_gil(
        [&](HostCommunicator& c, CallOptions each) {
          each.whole = &signature;
          c.all_reduce({&view, 1}, {&view, 1}, ReduceOp::kMin, each);
        },
        options);
    return answer != std::byte{0};
  }
  [[nodiscard]] std::optional<Error> find_lost() const override {
    const auto rank = host_.communicator().find_lost();
    if (!rank) return std::nullopt;
    return Error(ErrorCode::kPeerFailure,
                 "rank " + std::to_string(*rank) +
                     " has died or aborted while calls on GPUs waited for it; the communicator was "
                     "aborted",
                 {*rank});
  }

 private:
  py::object owner_;
  Host& host_;
};

// Compares calls through an engine written in Python: several machines, or threads of several
// processes.
class PythonChecker final : public nccl::Checker {
 public:
  explicit PythonChecker(py::object engine) : engine_(std::move(engine)) {
    size_ = engine_.attr("size").cast<int>();
  }
  [[nodiscard]] int size() const override { return size_; }

  bool agree(const Signature& signature, bool flag, const CallOptions& options) override {
    const std::string site = options.caller->location();
    const py::gil_scoped_acquire gil;
    const auto words = py::make_tuple(signature.packed(), signature.count, signature.list);
    const double timeout_s = std::chrono::duration<double>(options.timeout).count();
    return engine_.attr("agree")(words, flag, site, timeout_s).cast<bool>();
  }
  // Python engines detect lost ranks in their next call.
  [[nodiscard]] std::optional<Error> find_lost() const override { return std::nullopt; }

 private:
  py::object engine_;
  int size_;
};

}  // namespace

std::unique_ptr<nccl::Checker> make_checker(const py::object& hosts) {
  if (hosts.is_none()) return nullptr;
  if (py::isinstance<Host>(hosts)) return std::make_unique<HostChecker>(hosts);
  return std::make_unique<PythonChecker>(hosts);
}

}  // namespace fastdist::bindings
