// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/core/backend.hpp>
#include <heddle/core/philox.hpp>

#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

/// @file
/// @brief The laws of a backend, checked against naive computations on the host. Needs no test framework:
///
///     for (const std::string& failure : heddle_test::backend_failures<my_backend>({})) FAIL_CHECK(failure);
namespace heddle_test {

struct multiply_index {
  std::uint64_t* to;
  HEDDLE_HD void operator()(std::size_t i) const { to[i] = 3 * i + 1; }
};
struct load_u64 {
  const std::uint64_t* from;
  HEDDLE_HD std::uint64_t operator()(std::size_t i) const { return from[i]; }
};
struct plus_u64 {
  HEDDLE_HD std::uint64_t operator()(std::uint64_t a, std::uint64_t b) const { return a + b; }
};
// x -> a x + b modulo 2^32, composed: associative, not commutative, so a backend that swaps operands is found.
struct affine {
  std::uint32_t a, b;
  friend bool operator==(const affine&, const affine&) = default;
};
struct affine_of {
  const std::uint64_t* from;
  HEDDLE_HD affine operator()(std::size_t i) const {
    return {static_cast<std::uint32_t>(from[i]) | 1u, static_cast<std::uint32_t>(from[i] >> 32)};
  }
};
struct compose {
  HEDDLE_HD affine operator()(affine f, affine g) const { return {f.a * g.a, g.a * f.b + g.b}; }
};
struct segment_begins {
  const std::size_t* at;
  HEDDLE_HD std::size_t operator()(std::size_t s) const { return at[s]; }
};
struct weighted_by_segment {
  const std::uint64_t* from;
  HEDDLE_HD std::uint64_t operator()(std::size_t s, std::size_t i) const { return (s + 1) * from[i]; }
};
struct store_segment {
  std::uint64_t* to;
  HEDDLE_HD void operator()(std::size_t s, std::uint64_t sum) const { to[s] = sum; }
};
struct keep_some {
  const std::uint64_t* from;
  std::uint64_t modulus, rest;  // modulus 1, rest 0 keeps everything; rest 1 nothing
  HEDDLE_HD bool operator()(std::size_t i) const { return from[i] % modulus == rest; }
};
struct write_both {
  std::uint64_t* index;
  std::uint64_t* value;
  const std::uint64_t* from;
  HEDDLE_HD void operator()(std::size_t k, std::size_t i) const {
    index[k] = i;
    value[k] = from[i];
  }
};

/// A resource that counts what is out, so that a leak of temporary memory is found.
template <class Backend> struct counting_memory {
  typename Backend::memory upstream;
  std::size_t out = 0;

  void* allocate(typename Backend::queue q, std::size_t bytes, std::size_t alignment) {
    void* p = upstream.allocate(q, bytes, alignment);
    out += bytes;
    return p;
  }
  void deallocate(typename Backend::queue q, void* p, std::size_t bytes, std::size_t alignment) noexcept {
    out -= bytes;
    upstream.deallocate(q, p, bytes, alignment);
  }
};

/// An array in a backend's memory, readable and writable from the host.
template <class Backend, class Value> class array {
 public:
  array(typename Backend::queue q, std::size_t n) : q_(q), n_(n), data_(allocate()) {}
  array(typename Backend::queue q, const std::vector<Value>& from) : array(q, from.size()) {
    Backend::copy(from.data(), data_, n_, q_);
    q_.synchronize();
  }
  array(const array&) = delete;
  array& operator=(const array&) = delete;
  ~array() { memory_.deallocate(q_, data_, n_ * sizeof(Value), 256); }

  Value* data() const { return data_; }
  std::vector<Value> get() const {
    std::vector<Value> to(n_);
    Backend::copy(data_, to.data(), n_, q_);
    q_.synchronize();
    return to;
  }

 private:
  Value* allocate() { return static_cast<Value*>(memory_.allocate(q_, n_ * sizeof(Value), 256)); }

  typename Backend::queue q_;
  std::size_t n_;
  typename Backend::memory memory_;
  Value* data_;
};

/// Collects what failed.
struct failures {
  std::string where;
  std::vector<std::string> list;
  void require(bool good, const char* law) {
    if (!good) list.push_back(where + ": " + law);
  }
};

template <class Backend> std::vector<std::uint64_t> random_words(std::size_t n, std::uint64_t stream) {
  std::vector<std::uint64_t> v(n);
  for (std::size_t i = 0; i < n; ++i) {
    const auto b = heddle::philox(2026, stream, i);
    v[i] = (std::uint64_t{b.word[0]} << 32) | b.word[1];
  }
  return v;
}

template <class Backend> void check_bulk(std::size_t n, typename Backend::queue q, failures& f) {
  array<Backend, std::uint64_t> a(q, n), b(q, n);
  Backend::for_each(n, multiply_index{a.data()}, q);
  Backend::copy(a.data(), b.data(), n, q);
  Backend::fill(a.data(), n, std::uint64_t{42}, q);
  bool filled = true, copied = true;
  for (std::uint64_t x : a.get()) filled = filled && x == 42;
  const auto got = b.get();
  for (std::size_t i = 0; i < n; ++i) copied = copied && got[i] == 3 * i + 1;
  f.require(copied, "for_each visits every index once and copy follows it in queue order");
  f.require(filled, "fill sets every element, after the copy");
}

template <class Backend> void check_reduce_and_scan(std::size_t n, typename Backend::queue q, failures& f) {
  counting_memory<Backend> m;
  const auto v = random_words<Backend>(n, n);
  array<Backend, std::uint64_t> in(q, v), sum(q, 1);
  Backend::transform_reduce(n, 7, plus_u64{}, load_u64{in.data()}, sum.data(), m, q);
  std::uint64_t want = 7;
  for (std::uint64_t x : v) want += x;
  f.require(sum.get()[0] == want, "transform_reduce is init plus everything");

  array<Backend, affine> to(q, n);
  Backend::scan(n, affine{3, 5}, compose{}, affine_of{in.data()}, to.data(), m, q);
  const auto got = to.get();
  affine running{3, 5};
  bool good = true;
  for (std::size_t i = 0; i < n; ++i) {
    good = good && got[i] == running;
    running = compose{}(running, affine_of{v.data()}(i));
  }
  f.require(good, "scan is exclusive and keeps the order of operands");

  Backend::scan(n, 0, plus_u64{}, load_u64{in.data()}, in.data(), m, q);
  const auto sums = in.get();
  std::uint64_t before = 0;
  good = true;
  for (std::size_t i = 0; i < n; ++i) {
    good = good && sums[i] == before;
    before += v[i];
  }
  f.require(good, "scan works in place");
  f.require(m.out == 0, "transform_reduce and scan give back temporary memory");
}

/// Segments of many sizes, empty ones at both ends and between.
template <class Backend> void check_segments(std::size_t n, typename Backend::queue q, failures& f) {
  counting_memory<Backend> m;
  const auto v = random_words<Backend>(n, n + 3);
  std::vector<std::size_t> at{0, 0};
  const std::size_t cuts[] = {n / 1000, n / 1000, n / 100, n / 10, n / 9, n / 3, n / 3, n, n};
  for (const std::size_t cut : cuts) at.push_back(cut);
  const std::size_t segments = at.size() - 1;
  array<Backend, std::uint64_t> in(q, v), sum(q, segments);
  array<Backend, std::size_t> begins(q, at);
  Backend::reduce_segments(segments, n, segment_begins{begins.data()}, std::uint64_t{0}, plus_u64{},
                           weighted_by_segment{in.data()}, store_segment{sum.data()}, m, q);
  const auto got = sum.get();
  bool good = true;
  for (std::size_t s = 0; s < segments; ++s) {
    std::uint64_t want = 0;
    for (std::size_t i = at[s]; i < at[s + 1]; ++i) want += (s + 1) * v[i];
    good = good && got[s] == want;
  }
  f.require(good, "reduce_segments adds up each segment");
  f.require(m.out == 0, "reduce_segments gives back temporary memory");
}

template <class Backend> void check_select(std::size_t n, typename Backend::queue q, failures& f) {
  counting_memory<Backend> m;
  const auto v = random_words<Backend>(n, n + 1);
  array<Backend, std::uint64_t> in(q, v), index(q, n), value(q, n);
  array<Backend, std::size_t> count(q, std::vector<std::size_t>{99});
  const std::uint64_t cases[][2] = {{1, 0}, {1, 1}, {2, 0}, {37, 5}};
  for (const auto& c : cases) {
    const std::uint64_t untouched = ~std::uint64_t{0};
    Backend::fill(index.data(), n, untouched, q);
    Backend::select(n, keep_some{in.data(), c[0], c[1]}, write_both{index.data(), value.data(), in.data()},
                    count.data(), m, q);
    const auto got_index = index.get(), got_value = value.get();
    std::size_t k = 0;
    bool good = true;
    for (std::size_t i = 0; i < n; ++i) {
      if (v[i] % c[0] != c[1]) continue;
      good = good && got_index[k] == i && got_value[k] == v[i];
      ++k;
    }
    f.require(good, "select keeps the chosen indices in order");
    f.require(count.get()[0] == k, "select counts");
    f.require(k == n || got_index[k] == untouched, "select writes nothing behind the last");
  }
  f.require(m.out == 0, "select gives back temporary memory");
}

/// Keys from few values, so that equal ones are many; values are the places they came from.
template <class Backend, class Key>
void check_sort(std::size_t n, typename Backend::queue q, const std::vector<Key>& choice, failures& f) {
  counting_memory<Backend> m;
  const auto random = random_words<Backend>(n, n + 2);
  std::vector<std::size_t> picked(n);
  std::vector<Key> key(n);
  std::vector<std::uint32_t> place(n);
  for (std::size_t i = 0; i < n; ++i) {
    picked[i] = random[i] % choice.size();
    key[i] = choice[picked[i]];
    place[i] = static_cast<std::uint32_t>(i);
  }
  array<Backend, Key> keys(q, key);
  array<Backend, std::uint32_t> values(q, place);
  Backend::sort_pairs(keys.data(), values.data(), n, m, q);
  const auto got = values.get();
  const auto got_keys = keys.get();
  std::size_t k = 0;  // `choice` is ascending: expect all places of the first choice, then of the second ..
  bool good = true;
  for (std::size_t c = 0; c < choice.size(); ++c)
    for (std::size_t i = 0; i < n; ++i)
      if (picked[i] == c) {
        const bool same = got_keys[k] == key[i] || (got_keys[k] != got_keys[k] && key[i] != key[i]);
        good = good && got[k] == i && same;
        ++k;
      }
  f.require(good && k == n, "sort_pairs is ascending and stable, pairs stay together");
  f.require(m.out == 0, "sort_pairs gives back temporary memory");
}

/// -0 and 0 are one key: they stay in the order they came in.
template <class Backend> void check_sort_zeros(typename Backend::queue q, failures& f) {
  counting_memory<Backend> m;
  array<Backend, float> keys(q, std::vector<float>{0.0f, -0.0f, -1.0f, 0.0f, -0.0f});
  array<Backend, std::uint32_t> values(q, std::vector<std::uint32_t>{0, 1, 2, 3, 4});
  Backend::sort_pairs(keys.data(), values.data(), 5, m, q);
  f.require(values.get() == std::vector<std::uint32_t>{2, 0, 1, 3, 4}, "sort_pairs takes -0 and 0 as equal");
}

/// @brief Every broken law, empty for a good backend. @param q The queue to run on.
template <class Backend> std::vector<std::string> backend_failures(typename Backend::queue q) {
  static_assert(heddle::backend<Backend>);
  failures f;
  for (std::size_t n : {0, 1, 2, 7, 17, 255, 256, 257, 1023, 1024, 1025, 10007, 300007}) {
    f.where = "n = " + std::to_string(n);
    check_bulk<Backend>(n, q, f);
    check_reduce_and_scan<Backend>(n, q, f);
    check_segments<Backend>(n, q, f);
    check_select<Backend>(n, q, f);
    if (n > 20000) continue;  // the expected order is computed in (choices x n) steps
    constexpr float infinity = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
    check_sort<Backend, std::uint32_t>(n, q, {0, 1, 255, 256, 65536, 0x7fffffffu, 0x80000000u, 0xffffffffu}, f);
    check_sort<Backend, std::int32_t>(n, q, {-2147483647 - 1, -70000, -1, 0, 1, 70000, 2147483647}, f);
    check_sort<Backend, std::uint64_t>(n, q, {0, 5, std::uint64_t{1} << 40, ~std::uint64_t{0}}, f);
    check_sort<Backend, std::uint8_t>(n, q, {0, 3, 200, 255}, f);
    check_sort<Backend, std::int16_t>(n, q, {-32768, -1, 0, 300, 32767}, f);
    check_sort<Backend, float>(n, q, {-nan, -infinity, -1.5f, -1e-40f, 0.0f, 1e-40f, 2.0f, infinity, nan}, f);
    check_sort<Backend, double>(n, q, {-1e300, -1.0, 0.0, 1e-300, 3.0}, f);
  }
  f.where = "zeros";
  check_sort_zeros<Backend>(q, f);

  f.where = "events";
  typename Backend::event e;
  f.require(e.ready(), "an event that was never recorded is ready");
  q.wait(e);
  e.record(q);
  q.wait(e);
  e.synchronize();
  f.require(e.ready(), "an event is ready after synchronize");
  typename Backend::event moved = static_cast<typename Backend::event&&>(e);
  f.require(moved.ready() && e.ready(), "events can be moved");
  return f.list;
}

}  // namespace heddle_test
