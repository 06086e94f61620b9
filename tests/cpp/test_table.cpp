// Tables used by many threads, their index and memory, and the loops of every instruction set.

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "check.h"
#include "core/instruction_set.h"
#include "table/dense_variable.h"
#include "table/format.h"
#include "table/kernels.h"
#include "table/mixing.h"
#include "table/routing.h"
#include "table/row_index.h"
#include "table/row_table.h"

namespace fastdist::test {
namespace {

using namespace fastdist::table;
using Floats = std::vector<float>;
using Ids = std::vector<std::uint64_t>;

constexpr std::size_t kDim = 19;

RowTableOptions options(const char* rule = "SGD") {
  return {kDim, UpdateRule(rule, {{"lr", 1.0}}), Initializer("constant", 0, 0), 0, 0, {}, {}, {},
          {}};
}

Ids range(std::uint64_t begin, std::uint64_t end) {
  Ids ids;
  for (std::uint64_t id = begin; id < end; ++id) ids.push_back(id);
  return ids;
}

Floats pulled(RowTable& table, const Ids& ids) {
  Floats values(ids.size() * table.dim());
  table.pull(ids, values);
  return values;
}

// Makes a step in which all elements have the same gradient.
void push_all(DenseVariable& variable, float gradient) {
  variable.push(0, Floats(variable.size(), gradient), {});
}

// Checks that all elements of each row are equal, as in every push of these tests.
void check_whole(std::span<const float> values, std::size_t dim) {
  for (std::size_t i = 0; i < values.size(); ++i) CHECK(values[i] == values[i / dim * dim]);
}

// Runs every function for `rounds` rounds in its own thread, with its own random generator.
using Work = std::function<void(std::mt19937&)>;
void run_together(const std::vector<Work>& works, int rounds) {
  std::atomic<int> failures{0};
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < works.size(); ++i) {
    threads.emplace_back([&, i] {
      std::mt19937 random(static_cast<unsigned>(i));
      try {
        for (int round = 0; round < rounds; ++round) works[i](random);
      } catch (const std::exception& error) {
        std::printf("%s\n", error.what());
        ++failures;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(failures == 0);
}

Ids random_ids(std::mt19937& random, std::size_t count, std::uint64_t end) {
  Ids ids(count);
  for (std::uint64_t& id : ids) id = random() % end;
  return ids;
}

Floats equal_in_rows(std::mt19937& random, std::size_t rows) {
  Floats values(rows * kDim);
  for (std::size_t r = 0; r < rows; ++r) {
    std::fill_n(values.begin() + static_cast<std::ptrdiff_t>(r * kDim), kDim,
                static_cast<float>(random() % 5));
  }
  return values;
}

std::vector<const Kernels*> instruction_sets() {
  std::vector<const Kernels*> sets{&generic::kKernels};
#if defined(__x86_64__)
  if (instruction_set() != InstructionSet::kGeneric) sets.push_back(&avx2::kKernels);
  if (instruction_set() == InstructionSet::kAvx512) sets.push_back(&avx512::kKernels);
#endif
  return sets;
}

Floats random_floats(std::mt19937& random, std::size_t count) {
  std::normal_distribution<float> normal;
  Floats values(count);
  for (float& value : values) value = normal(random);
  return values;
}

}  // namespace

// --- loops ---------------------------------------------------------------------------------------

CASE(every_instruction_set_gives_the_same_bits) {
  const std::vector<UpdateRule> rules{
      UpdateRule("SGD", {{"weight_decay", 0.1}}),
      UpdateRule("SGD", {{"momentum", 0.9}, {"dampening", 0.5}, {"maximize", 1}}),
      UpdateRule("SGD", {{"momentum", 0.9}, {"nesterov", 1}}),
      UpdateRule("Adagrad", {{"lr_decay", 0.1}}),
      UpdateRule("Adam", {}),
      UpdateRule("AdamW", {}),
      UpdateRule("RMSprop", {}),
      UpdateRule("RMSprop", {{"momentum", 0.9}, {"centered", 1}}),
      UpdateRule("RowWiseAdagrad", {{"weight_decay", 0.1}}),
  };
  for (const std::size_t count : {1, 7, 8, 33, 64, 257}) {
    std::vector<Floats> results;
    for (const Kernels* set : instruction_sets()) {
      std::mt19937 random(1);
      Floats result;
      for (const UpdateRule& rule : rules) {
        Floats values = random_floats(random, count);
        std::array<Floats, 3> slots;  // a row-wise rule uses the first float of each
        std::array<float*, 3> pointers{};
        for (std::size_t i = 0; i < rule.slots().size(); ++i) {
          slots[i].assign(count, rule.slots()[i].initial);
          pointers[i] = slots[i].data();
        }
        for (std::uint64_t step = 1; step < 5; ++step) {
          const Coefficients c = rule.coefficients(step, 0.1, Gradients::kDense);
          set->updates[rule.index()](c, values.data(), random_floats(random, count).data(),
                                     pointers.data(), count);
        }
        result.insert(result.end(), values.begin(), values.end());
      }
      Floats made(count);
      set->uniform(made.data(), count, 12345, -1, 1);
      result.insert(result.end(), made.begin(), made.end());
      set->normal(made.data(), count, 12345, 0, 1);
      result.insert(result.end(), made.begin(), made.end());
      const auto narrow = [&](Format format) {
        std::vector<std::uint32_t> row(count + 1);
        auto* const bytes = reinterpret_cast<std::byte*>(row.data());
        set->codec(format).narrow(bytes, made.data(), count);
        set->codec(format).widen(made.data(), bytes, count);
        result.insert(result.end(), made.begin(), made.end());
      };
      narrow(Format::kInt8);
      narrow(Format::kBFloat16);
      set->normal(made.data(), count, 77, 0, 1e-5F);
      narrow(Format::kFloat16);
      made[count / 2] = std::numeric_limits<float>::infinity();
      result.push_back(static_cast<float>(set->count_nonfinite(made.data(), count)));
      results.push_back(std::move(result));
    }
    for (const Floats& result : results) {
      CHECK(std::memcmp(result.data(), results[0].data(), result.size() * sizeof(float)) == 0);
    }
  }
}

CASE(normal_numbers_are_exact_to_a_few_bits) {
  // Compares with the C++ library's functions on the same uniform numbers.
  constexpr std::size_t kCount = 4096;
  Floats unit(2 * kCount);
  Floats made(kCount);
  for (const std::uint64_t key : {1U, 77U, 4000000000U}) {
    kernels().uniform(unit.data(), 2 * kCount, key, 0, 1);
    kernels().normal(made.data(), kCount, key, 0, 1);
    for (std::size_t i = 0; i < kCount; ++i) {
      const double radius = std::sqrt(-2 * std::log(unit[2 * i] + std::ldexp(1.0, -24)));
      const double expected = radius * std::cos(2 * M_PI * unit[2 * i + 1]);
      CHECK_THAT(std::fabs(made[i] - expected) < 2e-6, made[i] << " for " << expected);
    }
  }
}

CASE(int8_rows_come_back_the_same_for_every_scale) {
  std::mt19937 random(2);
  for (int i = 0; i < 200000; ++i) {
    const std::uint32_t bits = random() & 0x7FFFFFFFU;
    std::array<float, 3> values{};
    std::memcpy(&values[0], &bits, sizeof(bits));
    if (!std::isfinite(values[0])) continue;
    values[1] = -values[0] / 3;
    values[2] = values[0] / 300;
    alignas(float) std::array<std::byte, 8> first{}, second{};
    const Codec& codec = kernels().codec(Format::kInt8);
    codec.narrow(first.data(), values.data(), 3);
    codec.widen(values.data(), first.data(), 3);
    codec.narrow(second.data(), values.data(), 3);
    CHECK(first == second);
  }
}

// --- index ---------------------------------------------------------------------------------------

CASE(an_index_finds_what_was_put_and_not_erased) {
  std::mt19937_64 random(3);
  RowIndex index;
  std::unordered_map<std::uint64_t, RowNumber> expected;
  for (int i = 1; i < 60000; ++i) {
    // Few distinct low bits, so that there are long runs that wrap around.
    const std::uint64_t key = (random() % 3000) << 32 | (random() % 4 == 0 ? ~0U : random() % 64);
    RowIndex::Entry* found = index.find(key);
    CHECK((found != nullptr) == expected.contains(key));
    if (found != nullptr) {
      CHECK(found->row == expected[key]);
      if (random() % 2 == 0) {
        index.erase(*found);
        expected.erase(key);
      }
    } else if (expected.size() < 500) {
      index.reserve_one();
      index.insert(key, static_cast<RowNumber>(i), 0);
      expected[key] = static_cast<RowNumber>(i);
    }
    if (i % 5000 == 0) {
      index.erase_if([](const RowIndex::Entry& entry) { return entry.row % 2 == 0; });
      std::erase_if(expected, [](const auto& entry) { return entry.second % 2 == 0; });
      std::size_t visited = 0;
      index.for_each([&](const RowIndex::Entry& entry) {
        CHECK(expected.at(entry.key) == entry.row);
        ++visited;
      });
      CHECK(visited == expected.size() && index.size() == visited);
    }
  }
}

CASE(ids_and_keys_go_both_ways) {
  std::mt19937_64 random(4);
  for (int i = 0; i < 10000; ++i) {
    const std::uint64_t id = random();
    CHECK(id_of(key_of(id)) == id);
  }
}

// --- threads -------------------------------------------------------------------------------------

CASE(rows_stay_whole_while_all_is_done_at_once) {
  constexpr int kRounds = 300;
  for (const bool limited : {false, true}) {
    RowTableOptions o = options("Adagrad");
    if (limited) {
      o.max_rows = 300;
      o.max_age = 7;
    }
    const auto table = std::make_shared<RowTable>(o);
    const Work push = [&](std::mt19937& random) {
      table->push(random_ids(random, 100, 500), equal_in_rows(random, 100), {});
    };
    const Work pull = [&](std::mt19937& random) {
      check_whole(pulled(*table, random_ids(random, 100, 500)), kDim);
    };
    const Work assign = [&](std::mt19937& random) {
      const Ids ids = random_ids(random, 50, 2000);
      table->assign(ids, equal_in_rows(random, 50), equal_in_rows(random, 50));
    };
    const Work snapshot = [&](std::mt19937&) {
      for (std::size_t part = 0; part < table->parts(); ++part) {
        Ids ids = table->ids_of_part(part);
        Floats values(ids.size() * kDim), slots(ids.size() * kDim);
        const std::size_t count = table->read_present(ids, values, slots);
        check_whole(std::span(values).first(count * kDim), kDim);
        check_whole(std::span(slots).first(count * kDim), kDim);
      }
    };
    run_together({push, push, pull, pull, assign, snapshot}, kRounds);
    CHECK(table->step() == 2 * kRounds);
    if (limited) CHECK(table->size() <= 300);
  }
}

CASE(no_push_is_lost_while_the_index_grows) {
  RowTable table(options());
  constexpr std::uint64_t kRows = 5000;
  const Work push = [&](std::mt19937&) {
    table.push(range(0, kRows), Floats(kRows * kDim, -1.0F), {});
  };
  const Work grow = [&](std::mt19937& random) {
    const Ids ids = random_ids(random, 2000, std::uint64_t{1} << 30);
    table.assign(ids, Floats(ids.size() * kDim), {});
  };
  run_together({push, push, grow}, 10);
  // An id of `grow` is one of `push` with a probability of 5000 in 2³⁰.
  const Floats values = pulled(table, range(0, kRows));
  CHECK(std::count(values.begin(), values.end(), 20.0F) >=
        static_cast<std::ptrdiff_t>((kRows - 1) * kDim));
}

CASE(rows_of_a_fixed_table_are_created_by_concurrent_pushes) {
  RowTableOptions o = options("Adagrad");
  constexpr std::uint64_t kRows = 5000;
  o.rows = kRows;
  o.initializer = Initializer("uniform", -1, 1);
  RowTable table(o);
  const Floats before = pulled(table, range(0, kRows));
  CHECK(table.size() == 0);
  // Different threads create rows whose bits are in the same word.
  std::atomic<std::uint64_t> next{0};
  const Work push = [&](std::mt19937&) {
    const std::uint64_t id = next++ % kRows;
    table.push(Ids{id}, Floats(kDim, 0.0F), {});
    (void)pulled(table, Ids{id ^ 1});
  };
  run_together({push, push, push, push}, kRows / 4);
  CHECK(table.size() == kRows);
  CHECK(pulled(table, range(0, kRows)) == before);
  table.clear();
  CHECK(table.size() == 0);
}

CASE(a_hashed_table_can_be_cleared_and_used_again) {
  RowTable table(options());
  table.assign(range(0, 3000), Floats(3000 * kDim, 1.0F), {});
  const std::size_t bytes = table.bytes();
  table.clear();
  CHECK(table.size() == 0);
  RowTable fresh(options());
  CHECK(pulled(table, range(0, 3000)) == pulled(fresh, range(0, 3000)));
  table.assign(range(5000, 8000), Floats(3000 * kDim, 2.0F), {});
  CHECK(table.size() == 3000);
  CHECK(table.bytes() <= 2 * bytes);  // the memory of removed rows is used again
}

CASE(the_parts_have_every_row_that_stays) {
  for (const bool fixed : {false, true}) {
    RowTableOptions o = options();
    if (fixed) {
      o.rows = 3000;
    } else {
      o.max_age = 20;
    }
    const auto table = std::make_shared<RowTable>(o);
    table->push(range(0, 3000), Floats(3000 * kDim), {});
    // A pull keeps the first 3000 rows from expiring; other rows are added and expire.
    const Work push = [&](std::mt19937& random) {
      const Ids others = range(3000 + random() % 5000, 9000);
      if (!fixed) table->assign(others, Floats(others.size() * kDim), {});
      for (int i = 0; i < 30; ++i) {
        (void)pulled(*table, range(0, 3000));
        table->push(random_ids(random, 100, 3000), equal_in_rows(random, 100), {});
      }
    };
    const Work snapshot = [&](std::mt19937&) {
      std::vector<int> seen(9000);
      for (std::size_t part = 0; part < table->parts(); ++part) {
        Ids ids = table->ids_of_part(part);
        Floats values(ids.size() * kDim);
        const std::size_t count = table->read_present(ids, values, {});
        for (const std::uint64_t id : std::span(ids).first(count)) ++seen[id];
      }
      CHECK(std::all_of(seen.begin(), seen.begin() + 3000, [](int n) { return n == 1; }));
      CHECK(std::all_of(seen.begin(), seen.end(), [](int n) { return n <= 1; }));
    };
    run_together({push, push, snapshot}, 5);
  }
}

CASE(a_dense_variable_is_whole_chunk_by_chunk) {
  constexpr std::size_t kChunk = DenseVariable::kChunk;
  DenseVariable variable(Floats(2 * kChunk + 5),
                         UpdateRule("SGD", {{"lr", 1.0}, {"momentum", 0.5}}));
  const Work push = [&](std::mt19937& random) {
    push_all(variable, static_cast<float>(random() % 3));
  };
  const Work pull = [&](std::mt19937&) {
    Floats values(variable.size());
    variable.pull(0, values);
    check_whole(std::span(values).first(2 * kChunk), kChunk);
    check_whole(std::span(values).last(5), 5);
    Floats slots(variable.size());
    variable.read_state(values, slots);
    check_whole(std::span(values).first(2 * kChunk), kChunk);
    check_whole(std::span(slots).first(2 * kChunk), kChunk);
  };
  run_together({push, push, pull, pull}, 50);
  CHECK(variable.step() == 100);
}

// Every push is of ones, so that Adagrad's slot counts the pushes and determines the value.
CASE(a_value_belongs_to_its_slots_and_to_the_step) {
  DenseVariable variable(Floats(9 * DenseVariable::kChunk + 5),
                         UpdateRule("Adagrad", {{"lr", 1}, {"eps", 0}}));
  constexpr std::size_t kPushes = 100;
  Floats belongs(1);
  for (std::size_t n = 1; n <= kPushes; ++n) {
    belongs.push_back(belongs.back() - 1 / std::sqrt(static_cast<float>(n)));
  }
  const Work push = [&](std::mt19937&) { push_all(variable, 1); };
  const Work read = [&](std::mt19937&) {
    Floats values(variable.size());
    Floats slots(variable.size());
    const std::uint64_t step = variable.read_state(values, slots);
    CHECK(static_cast<float>(step) >= *std::max_element(slots.begin(), slots.end()));
    CHECK(step <= variable.step());
    for (std::size_t i = 0; i < values.size(); ++i) {
      CHECK(std::fabs(values[i] - belongs[static_cast<std::size_t>(slots[i])]) < 1e-3F);
    }
  };
  run_together({push, push, read}, kPushes / 2);
  variable.set_step(7);
  Floats values(variable.size());
  Floats slots(variable.size());
  CHECK(variable.read_state(values, slots) == 7);
  variable.push(DenseVariable::kChunk, Floats(3, 1), {});
  CHECK(variable.read_state(values, slots) == 8);
  DenseVariable empty({}, UpdateRule("SGD", {{"lr", 1.0}}));
  empty.set_step(3);
  CHECK(empty.read_state({}, {}) == 3);
}

// --- the edges -----------------------------------------------------------------------------------

CASE(ranges_of_gradients_come_from_many_threads) {
  constexpr std::size_t kPart = DenseVariable::kChunk;
  constexpr std::size_t kParts = 8;
  DenseVariable variable(Floats(kParts * kPart), UpdateRule("SGD", {{"lr", 1}}));
  const Floats gradient(kPart, -1);
  const Work work = [&](std::mt19937& random) {
    Floats seen(kPart);
    const std::size_t first = random() % kParts;
    for (std::size_t part = 0; part < kParts; ++part) {
      const std::size_t begin = (part + first) % kParts * kPart;
      variable.push(begin, gradient, std::nullopt);
      variable.pull(begin, seen);
    }
  };
  run_together(std::vector<Work>(8, work), 50);
  Floats values(kParts * kPart);
  variable.pull(0, values);
  for (const float value : values) CHECK(value == 400);
  CHECK(variable.step() == 400);
}

CASE(routes_and_messages_of_any_size) {
  std::mt19937_64 random(4);
  for (const std::size_t count : {0, 1, 3, 100, 1000}) {
    std::vector<std::uint64_t> ids(count);
    for (std::uint64_t& id : ids) id = random() % 300;
    for (const Owners& owners :
         {Owners{1, {}}, Owners{3, {}}, Owners{1, {0}, 300}, Owners{3, {0, 7, 200}, 300}}) {
      const Routes routes = route(owners, ids);
      CHECK(routes.ids.size() == count);
      std::vector<std::uint64_t> given;
      for (std::size_t o = 0; o < owners.count; ++o) {
        for (std::size_t i = 0; i < routes.counts[o]; ++i) {
          const std::uint64_t local = routes.ids[given.size()];
          given.push_back(owners.begins.empty() ? local : local + owners.begins[o]);
          CHECK(owners.owner_of(given.back()) == o);
        }
      }
      for (std::size_t i = 0; i < count; ++i) {
        const auto at =
            routes.positions.empty() ? i : static_cast<std::size_t>(routes.positions[i]);
        CHECK(given[i] == ids[at]);
      }
    }
    const Floats values(count, 3);
    for (const char* name : {"bfloat16", "float16", "int8"}) {
      for (const std::size_t dim : {1, 5, 64}) {
        const WireFormat format(name, dim);
        std::vector<std::uint8_t> message(format.bytes(count));
        Floats back(count);
        format.encode(values, message);
        format.decode(message, back);
        for (const float value : back) CHECK(std::fabs(value - 3) < 1e-3);
      }
    }
  }
}

CASE(empty_calls_and_empty_tables) {
  RowTableOptions o = options();
  o.rows = 0;
  for (const bool fixed : {true, false}) {
    RowTable table(fixed ? o : options());
    table.pull({}, {});
    table.push({}, {}, {});
    table.assign({}, {}, {});
    CHECK(table.step() == 1 && table.size() == 0);
    const Floats row(kDim);
    if (fixed) CHECK_THROWS(ErrorCode::kIndex, table.push(Ids{0}, row, {}));
  }
  DenseVariable nothing({}, UpdateRule("Adam", {}));
  push_all(nothing, 1);
  CHECK(nothing.size() == 0 && nothing.bytes() == 0);
}

CASE(memory_of_expired_rows_is_used_again) {
  RowTableOptions o = options();
  o.max_age = 1;
  RowTable table(o);
  const Floats values(1000 * kDim, 3.0F);
  table.assign(range(0, 1000), values, {});
  const std::size_t bytes = table.bytes();
  for (int i = 0; i < 20; ++i) {
    CHECK(table.size() == 1000);
    table.push({}, {}, {});
    table.push({}, {}, {});
    CHECK(table.size() == 0);
    table.assign(range(0, 1000), values, {});
  }
  CHECK(table.bytes() == bytes);
  table.push({}, {}, {});
  table.push({}, {}, {});
  table.push(range(500, 501), Floats(kDim, 1.0F), {});
  CHECK(pulled(table, {500})[0] == -1.0F);  // starts from the initial value, not the old one
}

CASE(ages_survive_the_wrap_around_of_steps) {
  RowTableOptions o = options();
  o.max_age = 2;
  RowTable table(o);
  table.set_step(std::numeric_limits<std::uint32_t>::max() - 1ULL);
  const Floats one(kDim, 1.0F);
  table.push(Ids{1}, one, {});
  table.push({}, {}, {});
  table.push({}, {}, {});
  CHECK(pulled(table, {1})[0] == -1.0F);  // touches the row
  table.push({}, {}, {});
  table.push({}, {}, {});
  CHECK(pulled(table, {1})[0] == -1.0F);
  for (int i = 0; i < 3; ++i) table.push({}, {}, {});
  CHECK(pulled(table, {1})[0] == 0.0F);
}

CASE(huge_tables_are_refused) {
  RowTableOptions o = options();
  o.dim = 1 << 20;
  o.rows = std::uint64_t{1} << 31;
  CHECK_THROWS(ErrorCode::kMemory, RowTable table(o));
  o.rows = (std::uint64_t{1} << 31) + 1;
  CHECK_THROWS(ErrorCode::kValue, RowTable table(o));
}

}  // namespace fastdist::test
