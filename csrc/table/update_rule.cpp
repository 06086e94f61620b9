#include "table/update_rule.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>

#include "core/error.h"

namespace fastdist::table {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNone = -1;  // where a rule lacks a hyperparameter
constexpr std::array<std::string_view, kRules> kRuleNames{"SGD",   "Adagrad", "Adam",
                                                          "AdamW", "RMSprop", "RowWiseAdagrad"};
static_assert(!kRuleNames.back().empty());

RuleKind kind_of(std::string_view name) {
  std::string known;
  for (std::size_t i = 0; i < kRuleNames.size(); ++i) {
    if (kRuleNames[i] == name) return static_cast<RuleKind>(i);
    known += (i == 0 ? "" : ", ") + std::string(kRuleNames[i]);
  }
  refuse(ErrorCode::kValue, "unknown update rule: expected one of ", known, ", got ", name);
}

}  // namespace

struct UpdateRule::Parameter {
  std::string_view name;
  double Values::* value;
  double end;  // the range is [0, end); booleans have end 2
  std::array<double, kRules> initial;
};

std::span<const UpdateRule::Parameter> UpdateRule::parameters() noexcept {
  using V = Values;
  static constexpr Parameter kAll[]{
      // SGD, Adagrad, Adam, AdamW, RMSprop, RowWiseAdagrad
      {"lr", &V::lr, kInfinity, {1e-3, 1e-2, 1e-3, 1e-3, 1e-2, 1e-2}},
      {"momentum", &V::momentum, kInfinity, {0, kNone, kNone, kNone, 0, kNone}},
      {"dampening", &V::dampening, kInfinity, {0, kNone, kNone, kNone, kNone, kNone}},
      {"nesterov", &V::nesterov, 2, {0, kNone, kNone, kNone, kNone, kNone}},
      {"lr_decay", &V::lr_decay, kInfinity, {kNone, 0, kNone, kNone, kNone, 0}},
      {"initial_accumulator_value",
       &V::initial_accumulator_value,
       kInfinity,
       {kNone, 0, kNone, kNone, kNone, 0}},
      {"beta1", &V::beta1, 1, {kNone, kNone, 0.9, 0.9, kNone, kNone}},
      {"beta2", &V::beta2, 1, {kNone, kNone, 0.999, 0.999, kNone, kNone}},
      {"alpha", &V::alpha, kInfinity, {kNone, kNone, kNone, kNone, 0.99, kNone}},
      {"eps", &V::eps, kInfinity, {kNone, 1e-10, 1e-8, 1e-8, 1e-8, 1e-10}},
      {"eps_hat", &V::eps_hat, 2, {kNone, kNone, 0, 0, kNone, kNone}},
      {"centered", &V::centered, 2, {kNone, kNone, kNone, kNone, 0, kNone}},
      {"weight_decay", &V::weight_decay, kInfinity, {0, 0, 0, 1e-2, 0, 0}},
      {"maximize", &V::maximize, 2, {0, 0, 0, 0, 0, 0}},
  };
  return kAll;
}

UpdateRule::UpdateRule(std::string_view name, const std::vector<Hyperparameter>& hyperparameters)
    : kind_(kind_of(name)) {
  for (const Parameter& p : parameters()) values_.*p.value = std::max(p.initial[index()], 0.0);
  for (const Hyperparameter& given : hyperparameters) set(given);
  if (values_.nesterov != 0 && (values_.momentum == 0 || values_.dampening != 0)) {
    refuse(ErrorCode::kValue, "nesterov needs a momentum above 0 and no dampening, got momentum ",
           values_.momentum, " and dampening ", values_.dampening);
  }
  choose_slots();
}

std::string_view UpdateRule::name() const noexcept { return kRuleNames[index()]; }

void UpdateRule::set(const Hyperparameter& given) {
  const auto& [name, value] = given;
  std::string known;
  for (const Parameter& p : parameters()) {
    if (p.initial[index()] == kNone) continue;
    known += (known.empty() ? "" : ", ") + std::string(p.name);
    if (p.name != name) continue;
    if (value >= 0 && value < p.end) {
      values_.*p.value = value;
      return;
    }
    const char* expected =
        p.end == 2 ? "true or false"
                   : (p.end == 1 ? "a number from 0 to below 1" : "a finite number, 0 or more");
    refuse(ErrorCode::kValue, this->name(), "'s ", name, " must be ", expected, ", got ", value);
  }
  refuse(ErrorCode::kValue, "unknown hyperparameter of ", this->name(), ": expected one of ", known,
         ", got ", name);
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
    case RuleKind::kRowWiseAdagrad:
      slots_.push_back({is_row_wise() ? "row_sum" : "sum",
                        static_cast<float>(values_.initial_accumulator_value)});
      return;
    case RuleKind::kAdam:
    case RuleKind::kAdamW:
      slots_ = {{"exp_avg", 0}, {"exp_avg_sq", 0}};
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
  refuse(ErrorCode::kValue, "lr must be a finite number, 0 or more, got ", lr);
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
