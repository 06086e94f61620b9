// Update rules: the optimizers of torch.optim, with torch's names and arguments, and row-wise
// Adagrad.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace fastdist::table {

enum class RuleKind : std::uint8_t { kSgd, kAdagrad, kAdam, kAdamW, kRmsProp, kRowWiseAdagrad };
inline constexpr std::size_t kRules = 6;
inline constexpr std::size_t kMaxSlots = 3;  // of a rule

// The coefficients of one step, in float32 as in torch.
struct Coefficients {
  float sign = 1;          // -1: maximize
  float weight_decay = 0;  // times the value, added to the gradient
  float shrink = 1;        // AdamW: multiplies the value first
  float rate = 0;
  float momentum = 0;
  float undampened = 1;  // 1 - dampening
  float take_first = 0;  // 1 - beta1; RMSprop: 1 - alpha
  float keep_second = 0;
  float take_second = 0;
  float eps = 0;
  bool nesterov = false;
  bool centered = false;
};

// Optimizer state: one float per element, or per row in row-wise rules.
struct Slot {
  std::string_view name;  // as in torch's state
  float initial;
};

// Dense gradients follow torch.optim's rule, equal up to rounding. Rows follow torch.optim with
// sparse gradients: the dense rule on the touched rows only, and for Adam the rule of SparseAdam,
// which adds eps before correcting the bias.
enum class Gradients : std::uint8_t { kDense, kRows };

class UpdateRule {
 public:
  using Hyperparameter = std::pair<std::string, double>;

  // `name` is torch's class name: SGD, Adagrad, Adam, AdamW or RMSprop; or RowWiseAdagrad, with
  // Adagrad's arguments. Booleans are 0 and 1; betas are called beta1 and beta2. Defaults are
  // torch's. Adam and AdamW have one more: eps_hat adds eps before correcting the bias, as Keras
  // does. Throws kValue.
  UpdateRule(std::string_view name, const std::vector<Hyperparameter>& hyperparameters);

  // Returns the rule's number in the order of RuleKind.
  [[nodiscard]] std::size_t index() const noexcept { return static_cast<std::size_t>(kind_); }
  [[nodiscard]] std::string_view name() const noexcept;
  [[nodiscard]] const std::vector<Slot>& slots() const noexcept { return slots_; }
  // True if a row has one float per slot: the rule is for rows only.
  [[nodiscard]] bool is_row_wise() const noexcept { return kind_ == RuleKind::kRowWiseAdagrad; }
  [[nodiscard]] std::size_t slot_width(std::size_t dim) const noexcept {
    return is_row_wise() ? 1 : dim;
  }
  // Returns `other`, or the rule's own learning rate; throws kValue if it is negative or not
  // finite.
  [[nodiscard]] double learning_rate(std::optional<double> other) const;
  // Returns the coefficients of step number `step`, counted from 1.
  [[nodiscard]] Coefficients coefficients(std::uint64_t step, double learning_rate,
                                          Gradients gradients) const noexcept;

 private:
  struct Values {
    double lr = 0, momentum = 0, dampening = 0, weight_decay = 0, beta1 = 0, beta2 = 0, eps = 0;
    double lr_decay = 0, initial_accumulator_value = 0, alpha = 0;
    double nesterov = 0, centered = 0, maximize = 0, eps_hat = 0;
  };
  struct Parameter;
  static std::span<const Parameter> parameters() noexcept;

  void set(const Hyperparameter& given);
  void choose_slots();

  RuleKind kind_;
  Values values_;
  std::vector<Slot> slots_;
};

// Marks a momentum before the first gradient. torch's first step sets the momentum to the gradient
// itself, without dampening. Arithmetic does not produce this NaN.
inline constexpr std::uint32_t kUnsetMomentum = 0x7FC0F1A5U;

}  // namespace fastdist::table
