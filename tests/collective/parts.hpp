// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/collective/all_reduce.hpp>
#include <heddle/collective/hierarchical.hpp>
#include <heddle/collective/pipelined.hpp>
#include <heddle/comm/detail/wrapper.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

/// @file
/// All-reduces whose messages come in parts, on any communicator that makes parts of them.
namespace heddle_test {
namespace hd = heddle;

struct chosen_late {  // one type for all topologies, which compiles once
  std::function<hd::schedule(int, int, std::size_t)> make;
  hd::schedule all_reduce(int rank, int size, std::size_t count) const { return make(rank, size, count); }
};
template <class Topology> chosen_late late(const Topology& t) {
  return {[t](int rank, int size, std::size_t count) { return t.all_reduce(rank, size, count); }};
}

/// Counts the parts that the communicator underneath makes, and the rounds that it doesn't cut.
template <class Comm> class counting_parts : public hd::detail::wrapper<Comm> {
 public:
  explicit counting_parts(Comm inner) : hd::detail::wrapper<Comm>(std::move(inner)) {}
  counting_parts duplicate() { return counting_parts(this->inner_.duplicate()); }

  template <class Apply>
  void exchange(hd::header h, std::span<const hd::outgoing> out, std::span<const hd::incoming> in, Apply&& apply) {
    this->inner_.exchange(h, out, in, counted<std::remove_reference_t<Apply>>{*this, apply});
  }

  std::size_t parts = 0, whole = 0;  // calls of `part`, and of the function itself

 private:
  template <class Apply> struct counted {
    counting_parts& all;
    Apply& apply;
    void operator()(std::span<const hd::arrival> got) const {
      ++all.whole;
      apply(got);
    }
    bool takes(std::size_t n) const
      requires hd::takes_parts<Apply>
    {
      return apply.takes(n);
    }
    void part(std::span<const hd::arrival> got, std::size_t offset, std::size_t n) const
      requires hd::takes_parts<Apply>
    {
      ++all.parts;
      apply.part(got, offset, n);
    }
    template <class Function>
    void expects(std::size_t above, Function&& f) const
      requires hd::takes_parts<Apply>
    {
      apply.expects(above, f);
    }
  };
};

/// Passes a mere function on, so that nothing comes in parts.
template <class Comm> class whole_only : public hd::detail::wrapper<Comm> {
 public:
  explicit whole_only(Comm inner) : hd::detail::wrapper<Comm>(std::move(inner)) {}
  whole_only duplicate() { return whole_only(this->inner_.duplicate()); }
  template <class Apply>
  void exchange(hd::header h, std::span<const hd::outgoing> out, std::span<const hd::incoming> in, Apply&& apply) {
    this->inner_.exchange(h, out, in, [&](std::span<const hd::arrival> got) { apply(got); });
  }
};

/// A schedule for two ranks in which each gets two messages at once, which it reduces.
inline chosen_late two_at_once() {
  return {[](int rank, int, std::size_t count) {
    hd::schedule s;
    for (const std::size_t first : {std::size_t{0}, count / 2}) {
      s.add(hd::action::send, 1 - rank, {first, count / 2});
      s.add(hd::action::reduce, 1 - rank, {first, count / 2});
    }
    s.next();
    return s;
  }};
}

// ---- What is reduced, and what must come out

struct add {  // without members: the loop has a form of its own
  float operator()(float a, float b) const { return a + b; }
};
struct add_beyond {  // with one
  double zero;
  double operator()(double a, double b) const { return a + b + zero; }
};

// Of magnitude 0.5 to 1.5, or small integers: products of a few ranks stay in every type's range.
template <class Element> Element value_of(int rank, std::size_t i) {
  std::uint64_t z = (static_cast<std::uint64_t>(rank + 1) << 40) + i;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  z >>= 32;
  if constexpr (sizeof(Element) == 1)
    return static_cast<Element>(z % 40);
  else if constexpr (std::is_integral_v<Element>)
    return static_cast<Element>(static_cast<std::int64_t>(z % 2001) - 1000);
  const double x = (0.5 + static_cast<double>(z % 4096) / 4096) * (z & 8192 ? 1 : -1);
  if constexpr (sizeof(Element) == 2)
    return Element(static_cast<float>(x));
  else
    return static_cast<Element>(x);
}
template <class Element> std::vector<Element> input_of(int rank, std::size_t n) {
  std::vector<Element> v(n);
  for (std::size_t i = 0; i < n; ++i) v[i] = value_of<Element>(rank, i);
  return v;
}
template <class Element> long double wide_of(Element x) {
  if constexpr (sizeof(Element) == 2)
    return static_cast<float>(x);
  else
    return static_cast<long double>(x);
}
// Half of the distance between neighbours, relative.
template <class Element> inline constexpr long double rounding = 0;
template <> inline constexpr long double rounding<float> = 0x1p-24L;
template <> inline constexpr long double rounding<double> = 0x1p-53L;
template <> inline constexpr long double rounding<hd::float16> = 0x1p-11L;
template <> inline constexpr long double rounding<hd::bfloat16> = 0x1p-8L;

// Element i of `got`, which may be rounded once per rank, against all ranks' values in a wider type.
template <class Element, class Op> bool is_right(Element got, int ranks, std::size_t i) {
  using plain = typename hd::detail::operation_parts<Op>::plain;
  long double sum = 0, magnitude = 0, product = 1, least = 1e9L, most = -1e9L;
  std::uint64_t whole = 1;
  for (int r = 0; r < ranks; ++r) {
    const Element e = value_of<Element>(r, i);
    const long double x = wide_of(e);
    sum += x;
    magnitude += std::abs(x);
    product *= x;
    least = std::min(least, x);
    most = std::max(most, x);
    if constexpr (std::is_integral_v<Element>) whole *= static_cast<std::uint64_t>(e);
  }
  const long double x = wide_of(got), units = 1.02L * (ranks + 1) * rounding<Element>;
  if constexpr (std::is_same_v<plain, hd::min>) return x == least;
  if constexpr (std::is_same_v<plain, hd::max>) return x == most;
  if constexpr (std::is_same_v<plain, hd::product>) {
    if constexpr (std::is_integral_v<Element>)
      return got == static_cast<Element>(whole);  // wraps around
    else
      return std::abs(x - product) <= units * std::abs(product);
  }
  const long double least_half = std::is_same_v<Element, hd::float16> ? ranks * 0x1p-24L : 0;
  if constexpr (!std::is_same_v<plain, hd::mean>) return std::abs(x - sum) <= units * magnitude + least_half;
  const long double mean = std::is_integral_v<Element> ? std::trunc(sum / ranks) : sum / ranks;
  return std::abs(x - mean) <= (units * magnitude + least_half) / ranks;
}

inline constexpr std::size_t any = ~std::size_t{0};

/// @brief All-reduces through `parted`, twice by one plan, and then by it through `plain`: right, and the bits that
/// `plain` gives alone.
/// @param parts How many parts this rank must have been given, or any where it is `any`.
/// Throws: std::runtime_error with what is wrong.
template <class Element, class Parted, class Plain, class Op>
void check_in_parts(Parted& parted, Plain& plain, const char* name, const chosen_late& t, std::size_t n, const Op& op,
                    std::size_t parts = any) {
  const int rank = parted.rank(), ranks = parted.size();
  std::string wrong;
  const hd::leaf l = hd::leaf_of<Element>(op);
  hd::all_reduce_plan<chosen_late> plan(t, rank, ranks, n);
  counting_parts<Parted> counted(parted);
  std::vector<Element> data, reference = input_of<Element>(rank, n);
  bool left = hd::all_reduce(plain, t, std::span(reference), op);
  const auto look = [&](const char* run) {
    if (n && std::memcmp(data.data(), reference.data(), n * sizeof(Element)) != 0)
      wrong += std::string(" other bits in the ") + run + " run,";
  };
  for (const char* run : {"first", "second"}) {  // which knows what the messages say, and has another buffer
    std::vector<Element> next = input_of<Element>(rank, n);
    left |= plan(counted, next.data(), l);
    data.swap(next);
    look(run);
  }
  if (left) wrong += " left the range,";
  const std::size_t every = n > 300000 ? 7 : 1;  // enough to see each part
  for (std::size_t i = 0; i < n; i += every) {
    if (is_right<Element, Op>(data[i], ranks, i)) continue;
    wrong += " element " + std::to_string(i) + " is wrong,";
    break;
  }
  for (std::size_t i = 0; i < n; ++i) data[i] = value_of<Element>(rank, i);
  plan(plain, data.data(), l);
  look("third");
  if (parts != any && counted.parts != 2 * parts) {
    wrong += " " + std::to_string(counted.parts) + " parts in two runs instead of 2 x " + std::to_string(parts) + ",";
  }
  if (wrong.empty()) return;
  std::ostringstream s;
  s << name << " of " << n << " " << hd::name_of(l.type) << ", reduction " << int{l.id} << ", rank " << rank << " of "
    << ranks << ":" << wrong;
  throw std::runtime_error(s.str());
}

/// @brief Runs a ring's first round and the others in two calls, so that the second begins with a reduction that comes
/// in parts. Throws: std::runtime_error if an all-reduce through `plain` gives other bits, or nothing came in parts.
template <class Parted, class Plain> void check_rounds_apart(Parted& parted, Plain& plain, std::size_t n) {
  const int rank = parted.rank(), ranks = parted.size();
  const hd::schedule s = hd::ring{}.all_reduce(rank, ranks, n);
  const hd::leaf l = hd::leaf_of<float>(hd::mean{});
  const hd::interval all{0, n};
  hd::executor x;
  x.prepare(rank, s, sizeof(float), std::span(&all, 1));
  counting_parts<Parted> counted(parted);
  for (int run = 0; run < 2; ++run) {
    std::vector<float> data = input_of<float>(rank, n), reference = data;
    for (const auto& [from, to] : {std::pair{std::size_t{0}, std::size_t{1}}, std::pair{std::size_t{1}, s.rounds()}}) {
      const hd::header h = hd::begin_call(counted, {hd::operation_kind::all_reduce, l.type, l.id, 0, 0, 1, n});
      const std::size_t before = counted.parts;
      x.run_prepared(counted, s, from, to, h, reinterpret_cast<std::byte*>(data.data()), &l, 1.0 / ranks);
      if (counted.parts == before) throw std::runtime_error("nothing came in parts");
    }
    hd::all_reduce(plain, hd::ring{}, std::span(reference), hd::mean{});
    if (std::memcmp(data.data(), reference.data(), n * sizeof(float)) != 0)
      throw std::runtime_error("rounds from " + std::string(run ? "a second run" : "a first run") + " give other bits");
  }
}

}  // namespace heddle_test
