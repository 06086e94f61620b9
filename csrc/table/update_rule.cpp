#include "table/update_rule.h"

#include <array>
#include <bit>
#include <cmath>
#include <limits>
#include <sstream>

#include "core/error.h"

namespace fastdist::table {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr std::array<std::string_view, 6> kNames{"SGD",   "Adagrad", "Adam",
                                                 "AdamW", "RMSprop", "RowWiseAdagrad"};

std::string text_of(double value) {
  std::ostringstream text;
  text << value;
  return text.str();
}

RuleKind kind_of(std::string_view name) {
  std::string known;
  for (std::size_t i = 0; i < kNames.size(); ++i) {
    if (kNames[i] == name) return static_cast<RuleKind>(i);
    known += (i == 0 ? "" : ", ") + std::string(kNames[i]);
  }
  throw Error(ErrorCode::kValue,
              "unknown update rule: expected one of " + known + ", got " + std::string(name));
}

}  // namespace

// The range is [0, end); booleans have end 2.
struct UpdateRule::Parameter {
  std::string_view name;
  double Values::* value;
  double initial;
  double end;
};

const std::vector<UpdateRule::Parameter>& UpdateRule::parameters(RuleKind kind) {
  using V = Values;
  static const std::vector<Parameter> sgd{{"lr", &V::lr, 1e-3, kInfinity},
                                          {"momentum", &V::momentum, 0, kInfinity},
                                          {"dampening", &V::dampening, 0, kInfinity},
                                          {"weight_decay", &V::weight_decay, 0, kInfinity},
                                          {"nesterov", &V::nesterov, 0, 2},
                                          {"maximize", &V::maximize, 0, 2}};
  static const std::vector<Parameter> adagrad{
      {"lr", &V::lr, 1e-2, kInfinity},
      {"lr_decay", &V::lr_decay, 0, kInfinity},
      {"weight_decay", &V::weight_decay, 0, kInfinity},
      {"initial_accumulator_value", &V::initial_accumulator_value, 0, kInfinity},
      {"eps", &V::eps, 1e-10, kInfinity},
      {"maximize", &V::maximize, 0, 2}};
  static const auto adam = [](double weight_decay) {
    return std::vector<Parameter>{{"lr", &V::lr, 1e-3, kInfinity},
                                  {"beta1", &V::beta1, 0.9, 1},
                                  {"beta2", &V::beta2, 0.999, 1},
                                  {"eps", &V::eps, 1e-8, kInfinity},
                                  {"weight_decay", &V::weight_decay, weight_decay, kInfinity},
                                  {"eps_hat", &V::eps_hat, 0, 2},
                                  {"maximize", &V::maximize, 0, 2}};
  };
  static const std::vector<Parameter> plain_adam = adam(0);
  static const std::vector<Parameter> adam_w = adam(1e-2);
  static const std::vector<Parameter> rms_prop{
      {"lr", &V::lr, 1e-2, kInfinity},          {"alpha", &V::alpha, 0.99, kInfinity},
      {"eps", &V::eps, 1e-8, kInfinity},        {"weight_decay", &V::weight_decay, 0, kInfinity},
      {"momentum", &V::momentum, 0, kInfinity}, {"centered", &V::centered, 0, 2},
      {"maximize", &V::maximize, 0, 2}};
  switch (kind) {
    case RuleKind::kSgd:
      return sgd;
    case RuleKind::kAdagrad:
    case RuleKind::kRowWiseAdagrad:
      return adagrad;
    case RuleKind::kAdam:
      return plain_adam;
    case RuleKind::kAdamW:
      return adam_w;
    case RuleKind::kRmsProp:
      return rms_prop;
  }
  return sgd;
}

UpdateRule::UpdateRule(std::string_view name, const std::vector<Hyperparameter>& hyperparameters)
    : kind_(kind_of(name)) {
  for (const Parameter& p : parameters(kind_)) values_.*p.value = p.initial;
  for (const Hyperparameter& given : hyperparameters) set(given);
  if (values_.nesterov != 0 && (values_.momentum == 0 || values_.dampening != 0)) {
    throw Error(ErrorCode::kValue,
                "nesterov needs a momentum above 0 and no dampening, got momentum " +
                    text_of(values_.momentum) + " and dampening " + text_of(values_.dampening));
  }
  choose_slots();
}

std::string_view UpdateRule::name() const noexcept {
  return kNames[static_cast<std::size_t>(kind_)];
}

void UpdateRule::set(const Hyperparameter& given) {
  const auto& [name, value] = given;
  std::string known;
  for (const Parameter& p : parameters(kind_)) {
    known += (known.empty() ? "" : ", ") + std::string(p.name);
    if (p.name != name) continue;
    if (value >= 0 && value < p.end) {
      values_.*p.value = value;
      return;
    }
    const std::string expected =
        p.end == 2 ? "true or false"
                   : (p.end == 1 ? "a number from 0 to below 1" : "a finite number, 0 or more");
    throw Error(ErrorCode::kValue, std::string(this->name()) + "'s " + name + " must be " +
                                       expected + ", got " + text_of(value));
  }
  throw Error(ErrorCode::kValue, "unknown hyperparameter of " + std::string(this->name()) +
                                     ": expected one of " + known + ", got " + name);
}

void UpdateRule::choose_slots() {
  switch (kind_) {
    case RuleKind::kSgd:
      if (values_.momentum != 0) {
        const float unset = values_.dampening == 0 ? 0.0F : std::bit_cast<float>(kUnsetMomentum);
        slots_.push_back({"momentum_buffer", unset});
      }
      return;
    case RuleKind::kAdagrad:
      slots_.push_back({"sum", static_cast<float>(values_.initial_accumulator_value)});
      return;
    case RuleKind::kRowWiseAdagrad:
      slots_.push_back({"row_sum", static_cast<float>(values_.initial_accumulator_value)});
      return;
    case RuleKind::kAdam:
    case RuleKind::kAdamW:
      slots_.push_back({"exp_avg", 0});
      slots_.push_back({"exp_avg_sq", 0});
      return;
    case RuleKind::kRmsProp:
      slots_.push_back({"square_avg", 0});
      if (values_.momentum != 0) slots_.push_back({"momentum_buffer", 0});
      if (values_.centered != 0) slots_.push_back({"grad_avg", 0});
      return;
  }
}

double UpdateRule::learning_rate(std::optional<double> other) const {
  const double lr = other.value_or(values_.lr);
  if (lr >= 0 && lr < kInfinity) return lr;
  throw Error(ErrorCode::kValue, "lr must be a finite number, 0 or more, got " + text_of(lr));
}

Coefficients UpdateRule::coefficients(std::uint64_t step, double lr,
                                      Gradients gradients) const noexcept {
  const Values& v = values_;
  const auto number = static_cast<double>(step);
  Coefficients c;
  c.sign = v.maximize != 0 ? -1.0F : 1.0F;
  c.weight_decay = static_cast<float>(v.weight_decay);
  c.momentum = static_cast<float>(v.momentum);
  c.undampened = static_cast<float>(1 - v.dampening);
  c.nesterov = v.nesterov != 0;
  c.centered = v.centered != 0;
  c.eps = static_cast<float>(v.eps);
  c.rate = static_cast<float>(lr);
  switch (kind_) {
    case RuleKind::kSgd:
      break;
    case RuleKind::kAdagrad:
    case RuleKind::kRowWiseAdagrad:
      c.rate = static_cast<float>(lr / (1 + (number - 1) * v.lr_decay));
      break;
    case RuleKind::kAdamW:
      c.shrink = static_cast<float>(1 - lr * v.weight_decay);
      c.weight_decay = 0;
      [[fallthrough]];
    case RuleKind::kAdam: {
      const double correction = std::sqrt(1 - std::pow(v.beta2, number));
      const bool as_sparse_adam = kind_ == RuleKind::kAdam && gradients == Gradients::kRows;
      const bool adds_eps_first = as_sparse_adam || v.eps_hat != 0;
      c.take_first = static_cast<float>(1 - v.beta1);
      c.keep_second = static_cast<float>(v.beta2);
      c.take_second = static_cast<float>(1 - v.beta2);
      c.eps = static_cast<float>(adds_eps_first ? v.eps : v.eps * correction);
      c.rate = static_cast<float>(lr * correction / (1 - std::pow(v.beta1, number)));
      break;
    }
    case RuleKind::kRmsProp:
      c.take_first = static_cast<float>(1 - v.alpha);
      c.keep_second = static_cast<float>(v.alpha);
      c.take_second = static_cast<float>(1 - v.alpha);
      break;
  }
  return c;
}

}  // namespace fastdist::table
