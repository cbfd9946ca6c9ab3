// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
//
// Many tensors in one pass of the device, against the host's rule tensor by tensor.
#include "../support/catch.hpp"

#include <heddle/core/cuda.cuh>
#include <heddle/core/host.hpp>
#include <heddle/optim/adagrad.hpp>
#include <heddle/optim/adam.hpp>
#include <heddle/optim/adamw.hpp>
#include <heddle/optim/ftrl.hpp>
#include <heddle/optim/lamb.hpp>
#include <heddle/optim/lars.hpp>
#include <heddle/optim/multi_tensor.hpp>
#include <heddle/optim/sgd.hpp>

#if __has_include(<emulated/control.h>)
#include <emulated/control.h>
#endif

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include <unistd.h>

namespace hd = heddle;

namespace {
const std::size_t counts[] = {0, 7, 1, 0, 300, 33, 0, 5000};
constexpr std::size_t total = 5341;

template <class Element> std::vector<Element> numbers(unsigned seed, float scale) {
  std::mt19937 random(seed);
  std::vector<Element> v(total);
  for (Element& x : v) x = Element(scale * std::normal_distribution<float>()(random));
  return v;
}

// Memory that runs out after `left` blocks.
template <class Backend> struct scarce {
  using queue = typename Backend::queue;
  typename Backend::memory memory{};
  int left = 1000;
  void* allocate(queue q, std::size_t bytes, std::size_t alignment) {
    if (left-- == 0) throw hd::memory_error("scarce", bytes);
    return memory.allocate(q, bytes, alignment);
  }
  void deallocate(queue q, void* p, std::size_t bytes, std::size_t alignment) {
    memory.deallocate(q, p, bytes, alignment);
  }
};

template <class Backend, class Rule, class Element> void check(const Rule& rule) {
  const typename Backend::queue q{};
  scarce<Backend> memory;
  const auto start = numbers<Element>(1, 1.0f);
  std::vector<float> master(start.begin(), start.end()), a(total, 0.0f), b(total, 0.0f);
  const float loss_scale = 64.0f;
  const std::size_t bytes = total * sizeof(Element);
  auto* const p = static_cast<Element*>(memory.allocate(q, bytes, 256));
  auto* const g = static_cast<Element*>(memory.allocate(q, bytes, 256));
  auto* const norm = static_cast<double*>(memory.allocate(q, sizeof(double), 256));
  {
    std::vector<hd::update_item<Element>> items;
    std::size_t at = 0;
    for (const std::size_t n : counts) {
      items.push_back({p + at, g + at, n, items.size() == 5 ? 0.0f : 1.0f, items.size() == 4 ? 0.0f : 1.0f});
      at += n;
    }
    Backend::copy(start.data(), p, total, q);
    using update_type = hd::multi_tensor<Backend, Rule, Element, scarce<Backend>>;
    auto running = std::make_unique<update_type>(rule, items, memory, q);
    for (std::size_t step = 0; step < 5; ++step) {
      const auto gradients = numbers<Element>(static_cast<unsigned>(step) + 2, loss_scale);
      Backend::copy(gradients.data(), g, total, q);
      double squares = 0.0, exact = 0.0;
      if (step == 2) {  // goes on from a file, whatever 16-bit parameters were left behind
        char folder[] = "/tmp/heddle-test-XXXXXX";
        REQUIRE(::mkdtemp(folder) != nullptr);
        const std::string file = std::string(folder) + "/state";
        running->save(file, q);
        if (sizeof(Element) == 2) Backend::fill(p, total, Element(7.0f), q);
        running = std::make_unique<update_type>(rule, items, memory, q);
        running->load(file, q);
        CHECK(running->steps() == 2);
        const auto some = std::span<const hd::update_item<Element>>(items).first(5);
        update_type other(rule, some, memory, q);
        CHECK_THROWS_AS(other.load(file, q), hd::file_error);
        CHECK(other.steps() == 0);
        std::remove(file.c_str());
        CHECK_THROWS_AS(running->load(file, q), hd::file_error);
        ::rmdir(folder);
      }
      update_type& update = *running;
      update.squares(norm, memory, q);
      const float lr = step == 3 ? 0.0f : 0.01f;  // at a rate of 0 moments move, ftrl's state doesn't
      if (hd::has_layer_step<Rule>) {  // what has no memory for its norms moves nothing
        memory.left = 0;
        CHECK_THROWS_AS(update.step(lr, 1.0f / loss_scale, q), hd::memory_error);
        memory.left = 1000;
      }
#if __has_include(<emulated/control.h>)
      constexpr bool on_device = std::is_same_v<Backend, hd::cuda>;
      if (on_device) emulated::fail_launch(hd::has_layer_step<Rule> ? 2 : 1);  // the next one
#endif
      update.step(lr, 1.0f / loss_scale, q);
#if __has_include(<emulated/control.h>)
      if (on_device) CHECK_THROWS_AS(Backend::fill(norm, 1, 0.0, q), hd::cuda_error);
      update.squares(norm, memory, q);
#endif
      Backend::copy(norm, &squares, 1, q);
      q.synchronize();
      at = 0;
      for (const hd::update_item<Element>& item : items) {
        std::vector<float> wide(item.count);
        for (std::size_t k = 0; k < item.count; ++k) {
          wide[k] = static_cast<float>(gradients[at + k]) / loss_scale;
          exact += static_cast<double>(wide[k]) * wide[k] * loss_scale * loss_scale;
        }
        float* const state[2] = {a.data() + at, b.data() + at};
        rule.update(master.data() + at, wide.data(), state, item.count, {.lr = lr * item.lr_scale, .step = step, .decay_scale = item.decay_scale});
        at += item.count;
      }
      CHECK(squares == Approx(exact).epsilon(1e-12));
    }
    update_type& update = *running;
    CHECK(update.steps() == 5);
    if constexpr (Rule::slots > 0) {
      std::vector<float> slot(total);
      Backend::copy(update.state(0), slot.data(), total, q);
      q.synchronize();
      for (std::size_t i = 0; i < total; ++i) CHECK(slot[i] == Approx(a[i]).margin(1e-5));
    }
    std::vector<Element> end(total);
    Backend::copy(p, end.data(), total, q);
    q.synchronize();
    double worst = 0.0;
    for (std::size_t i = 0; i < total; ++i) {
      const double roundoff = std::is_same_v<Element, float> ? 0.0 : std::fabs(master[i]) * 0x1p-8;
      worst = std::max(worst, std::fabs(static_cast<double>(static_cast<float>(end[i])) - master[i]) - roundoff);
    }
    CHECK(worst < 2e-6);
    CHECK_THROWS_AS(update.step(-1.0f, 1.0f, q), hd::argument_error);
    CHECK_THROWS_AS(update.step(0.0f, 1.0f, INFINITY, q), hd::argument_error);
    CHECK_NOTHROW(update.step(0.0f, 1.0f, 3e38f, q));  // every finite number is legal
    q.synchronize();
  }
  memory.deallocate(q, p, bytes, 256);
  memory.deallocate(q, g, bytes, 256);
  memory.deallocate(q, norm, sizeof(double), 256);
  q.synchronize();
}
}  // namespace

TEST_CASE("optim: a pass over many tensors is the rule on each") {
  check<hd::cuda, hd::sgd, float>({.momentum = 0.9f, .nesterov = true, .weight_decay = 0.1f});
  check<hd::cuda, hd::adamw, hd::bfloat16>({.weight_decay = 0.1f});
  check<hd::cuda, hd::adagrad, float>({.weight_decay = 0.1f});
  check<hd::cuda, hd::ftrl, float>({.l1 = 0.1f});
  check<hd::cuda, hd::lars, float>({.weight_decay = 0.1f, .trust = 0.1f});
  check<hd::cuda, hd::lamb, hd::bfloat16>({.weight_decay = 0.1f});
}

TEST_CASE("optim: the same on the host", "[host]") {
  check<hd::host, hd::adam, hd::float16>({.weight_decay = 0.1f});
}

TEST_CASE("optim: a tensor whose ratio is 1 keeps it when its step is scaled once more", "[host]") {
  const auto check_ratio = [](auto step) {
    CHECK(step.ratio(4.0, 1.0) == 1.0);
    step.scale(0.5f, 1.0f);
    CHECK(step.ratio(4.0, 1.0) == 1.0);
  };
  check_ratio(hd::lamb{}.layer_step({.decay_scale = 0.0f}));
  check_ratio(hd::lars{}.layer_step({.decay_scale = 0.0f}));
}

TEST_CASE("optim: a null tensor is refused", "[host]") {
  hd::host::memory memory;
  const hd::update_item<float> bad[1] = {{nullptr, nullptr, 3}};
  using update = hd::multi_tensor<hd::host, hd::sgd>;
  CHECK_THROWS_AS(update(hd::sgd{}, bad, memory, {}), hd::argument_error);
}
