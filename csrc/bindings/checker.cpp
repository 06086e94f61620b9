#include "bindings/checker.h"

#include <optional>
#include <string>
#include <utility>

#include "bindings/endpoint.h"

namespace py = pybind11;

namespace fastdist::bindings {
namespace {

class HostChecker final : public nccl::Checker {
 public:
  explicit HostChecker(py::object host)
      : owner_(std::move(host)), host_(owner_.cast<Endpoint&>()) {}
  [[nodiscard]] int size() const override { return host_.communicator().size(); }

  bool agree(const Signature& signature, bool flag, const CallOptions& options) override {
    std::byte answer{static_cast<unsigned char>(flag ? 1 : 0)};
    const TensorView view{&answer, 1, DType::kUInt8, 0};
    host_.run_without_gil(
        [&](BlockingCommunicator& c, CallOptions each) {
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
  Endpoint& host_;
};

}  // namespace

std::unique_ptr<nccl::Checker> make_checker(const py::object& hosts) {
  if (hosts.is_none()) return nullptr;
  return std::make_unique<HostChecker>(hosts);
}

}  // namespace fastdist::bindings
