// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/compress/concept.hpp>
#include <heddle/core/archive.hpp>
#include <heddle/optim/concept.hpp>
#include <heddle/trainer/options.hpp>
#include <heddle/trainer/tensor.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <vector>

namespace heddle {
inline namespace v0 {
namespace detail {

// Throws argument_error unless x is a finite number of 0 or above.
inline void check_not_negative(const char* where, const char* what, double x) {
  if (!(x >= 0.0) || !std::isfinite(x)) {
    throw argument_error(std::string("heddle::") + where + ": " + what + " is " + std::to_string(x) +
                         ", allowed is a finite number of 0 or above");
  }
}

inline void check_group(const group_options& g) {
  check_not_negative("data_parallel::groups", "lr_scale", g.lr_scale);
  check_not_negative("data_parallel::groups", "decay_scale", g.decay_scale);
}
inline void check_begin(const begin_options& o) {
  check_not_negative("data_parallel::begin", "samples", o.samples);
  if (o.samples > 1e290)  // the sum over all ranks is finite
    throw argument_error("heddle::data_parallel::begin: samples is " + std::to_string(o.samples) +
                         ", allowed is 0 .. 1e290");
  check_not_negative("data_parallel::begin", "lr", o.lr);
}

// Rates of steps, where begin() is told the next one.
struct known_rate {
  float last = 0.0f, next = 0.0f;  // 0: not known
  float held_scale() const noexcept { return held_scale(next); }
  float held_scale(float lr) const noexcept { return last > 0.0f && lr > 0.0f ? last / lr : 1.0f; }
};

// Throws argument_error for numbers of a step that can't be; `refuses`: why there may be no limits, or null; `told`:
// the rate that begin() was told, or 0.
inline void check_step(const step_options& o, const char* refuses, float told = 0.0f) {
  check_not_negative("data_parallel::step", "lr", o.lr);
  check_not_negative("data_parallel::step", "max_norm", o.max_norm);
  check_not_negative("data_parallel::step", "max_value", o.max_value);
  if (told > 0.0f && o.lr != told)
    throw argument_error("heddle::data_parallel::step: lr is " + std::to_string(o.lr) + ", begin() was told " +
                         std::to_string(told));
  if (refuses && o.max_norm + o.max_value > 0.0f)
    throw argument_error("heddle::data_parallel::step: max_norm is " + std::to_string(o.max_norm) +
                         " and max_value is " + std::to_string(o.max_value) + ", allowed is 0, since " + refuses +
                         "; use clip{} | before it");
  if (o.max_norm > 0.0f && o.max_value > 0.0f)
    throw argument_error("heddle::data_parallel::step: max_norm and max_value are both above 0, allowed is one");
}

// Calls check() where a part of a strategy, or an update rule, has one: it throws on numbers outside their ranges.
template <class Part> void check_part(const Part& p) {
  if constexpr (requires { p.check(); }) p.check();
}
template <class First, class Second> void check_part(const chain<First, Second>& c) {
  check_part(c.first);
  check_part(c.second);
}

// The name of a part for checkpoints and messages.
template <class Part> std::string name_or(const Part& p, const char* otherwise) {
  if constexpr (requires { std::string(p.name()); })
    return p.name();
  else
    return otherwise;
}

// The tensors, if they can be trained: pointers, types, alignment, names, and no two share an element.
// An update rule that has a rule for each group has one for theirs.
template <class Tensor, class Rule>
std::vector<Tensor> checked(std::span<const Tensor> tensors, dtype type, const Rule&) {
  struct range {
    std::uintptr_t begin, end;
    std::size_t of;
  };
  const auto fail = [&](std::size_t i, const std::string& why) {
    throw argument_error("heddle::data_parallel: tensor \"" + tensors[i].name + "\" " + why);
  };
  std::vector<range> ranges;
  std::vector<decltype(Tensor::name)> names;
  std::size_t total = 0;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const Tensor& t = tensors[i];
    if (t.count && (!t.parameter || !t.gradient))
      fail(i, "has count " + std::to_string(t.count) + " and a null pointer");
    if constexpr (has_groups<Rule>)
      if (t.group >= Rule::groups)
        fail(i, "is of group " + std::to_string(t.group) + ", the update rule has " + std::to_string(Rule::groups) +
                    " groups");
    if (t.type != type) fail(i, std::string("is ") + name_of(t.type) + ", allowed is " + name_of(type));
    if (t.count > (std::numeric_limits<std::size_t>::max)() / 64 - total)
      fail(i, "makes the model larger than memory can be");
    total += t.count;
    names.push_back(t.name);
    const void* const both[] = {t.parameter, t.gradient};
    for (const void* p : both) {
      const auto at = reinterpret_cast<std::uintptr_t>(p);
      if (at % bytes_of(type)) fail(i, std::string("has a pointer that isn't aligned to an ") + name_of(type));
      if (t.count) ranges.push_back({at, at + t.count * bytes_of(type), i});
    }
  }
  std::sort(names.begin(), names.end());
  const auto twice = std::adjacent_find(names.begin(), names.end());
  if (twice != names.end()) throw argument_error("heddle::data_parallel: two tensors are named \"" + *twice + "\"");
  std::sort(ranges.begin(), ranges.end(), [](const range& a, const range& b) { return a.begin < b.begin; });
  for (std::size_t k = 1; k < ranges.size(); ++k) {
    if (ranges[k].begin < ranges[k - 1].end) {
      fail(ranges[k].of, "shares memory with \"" + tensors[ranges[k - 1].of].name + "\"; list a tied weight once");
    }
  }
  return {tensors.begin(), tensors.end()};
}

// An update rule in checkpoints: state of one means nothing to another, nor in a tensor of another group.
template <class Rule> std::string rule_signature(const Rule& rule, std::size_t slots, const auto& tensors) {
  std::string s = name_or(rule, "rule") + " with " + std::to_string(slots) + " slots";
  if constexpr (has_groups<Rule>) {
    s += " for groups";
    for (const auto& t : tensors) s += ' ' + std::to_string(t.group);
  }
  return s;
}

// Throws argument_error if a mode can't have so many servers, or no worker that may die.
template <class Mode> void check_servers(const Mode& m, int ranks) {
  if (m.servers > ranks)
    throw argument_error("heddle::data_parallel: servers is " + std::to_string(m.servers) + ", allowed is 0 .. " +
                         std::to_string(ranks) + ", the number of ranks");
  if constexpr (requires { m.on_death; })
    if (m.on_death == decltype(m.on_death)::go_on && (m.servers == 0 || m.servers == ranks))
      throw argument_error(
          "heddle::data_parallel: on_death is go_on, allowed where some ranks aren't servers: servers "
          "from 1 on and below " +
          std::to_string(ranks));
}

// Throws argument_error for a limit on a norm that nobody knows: where servers wait for all, each has a part of the mean.
template <class Mode> void check_limits(const Mode& m, const step_options& o, int ranks) {
  if constexpr (requires { m.staleness; })
    if (m.staleness == 0 && ranks > 1 && o.max_norm > 0.0f)
      throw argument_error("heddle::data_parallel::step: max_norm is " + std::to_string(o.max_norm) +
                           ", allowed is 0 where staleness is 0, since no server has all of the mean; use max_value");
}

// The same on all ranks that train the same thing in the same way; numbers of the strategy are not compared.
inline std::uint64_t fingerprint(const std::vector<tensor>& tensors, const std::string& signature) {
  std::uint64_t h = fnv1a(signature.data(), signature.size());
  for (const tensor& t : tensors) {
    h = fnv1a(t.name.data(), t.name.size(), h);
    const std::uint64_t n[3] = {t.count, static_cast<std::uint64_t>(t.type), t.rows};
    h = fnv1a(n, sizeof n, h);
  }
  return h;
}

}  // namespace detail
}  // namespace v0
}  // namespace heddle
