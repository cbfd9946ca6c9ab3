// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
// about: what composing costs: mean over a ring, cast<float16>, sgd, against hand-written loops; compile time
// wants: valgrind valgrind/callgrind.h

// One training step of a flat buffer: round the gradient to float16, average it over the ranks on a ring, widen it, apply
// plain SGD. "ours" is composed from the library's parts, "hand" is what somebody writes who needs exactly this. Both
// leave the same bits in the wire buffer, the gradient and the parameters; the program ends with exit code 3 where not.
//
// Four ranks are measured without waiting: a real run on threads is recorded, and `replay` hands each rank the messages
// that its peers sent there. Under callgrind (bench/overhead.sh) the benchmark `count` marks what is to be counted.
#include <heddle/heddle.hpp>

#include <benchmark/benchmark.h>
#if __has_include(<valgrind/callgrind.h>)
#include <valgrind/callgrind.h>
#define HAS_CALLGRIND 1
#else
#define HAS_CALLGRIND 0
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <type_traits>
#include <vector>

namespace hd = heddle;

namespace {

constexpr int ranks = 4;
constexpr float rate = 0.1f;
constexpr std::size_t sizes[] = {64, 4096, std::size_t{1} << 20};

std::string label(std::size_t n) { return n == std::size_t{1} << 20 ? "1M" : std::to_string(n); }

[[noreturn]] void differ(const std::string& what) {
  std::fprintf(stderr, "overhead: the composed and the hand-written step differ: %s\n", what.c_str());
  std::exit(3);
}

// ---- The hand-written step

#if defined(__x86_64__)
#define WITH_AVX2 __attribute__((target("avx2,f16c")))
#define WITH_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx2,f16c")))

WITH_AVX2 void encode_avx2(const float* g, hd::float16* w, std::size_t n) {
  const std::size_t whole = n / 8 * 8;
  std::size_t i = 0;
  for (; i < whole; i += 8) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(w + i), _mm256_cvtps_ph(_mm256_loadu_ps(g + i), 0));
  }
  for (; i < n; ++i) w[i] = hd::float16(g[i]);
}
WITH_AVX512 void encode_avx512(const float* g, hd::float16* w, std::size_t n) {
  const std::size_t whole = n / 16 * 16;
  std::size_t i = 0;
  for (; i < whole; i += 16) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(w + i), _mm512_maskz_cvtps_ph(0xffff, _mm512_loadu_ps(g + i), 0));
  }
  for (; i < n; ++i) w[i] = hd::float16(g[i]);
}
WITH_AVX2 __m256 load_halves(const hd::float16* w) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(w)));
}
WITH_AVX2 void decode_avx2(const hd::float16* w, float* g, std::size_t n) {
  const std::size_t whole = n / 8 * 8;
  std::size_t i = 0;
  for (; i < whole; i += 8) _mm256_storeu_ps(g + i, load_halves(w + i));
  for (; i < n; ++i) g[i] = static_cast<float>(w[i]);
}
WITH_AVX512 void decode_avx512(const hd::float16* w, float* g, std::size_t n) {
  const std::size_t whole = n / 16 * 16;
  std::size_t i = 0;
  for (; i < whole; i += 16) {
    _mm512_storeu_ps(g + i, _mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w + i))));
  }
  for (; i < n; ++i) g[i] = static_cast<float>(w[i]);
}
WITH_AVX2 void descend_avx2(float* p, const float* g, float lr, std::size_t n) {
  const __m256 l = _mm256_set1_ps(lr);
  const std::size_t whole = n / 8 * 8;
  std::size_t i = 0;
  for (; i < whole; i += 8) {
    _mm256_storeu_ps(p + i, _mm256_sub_ps(_mm256_loadu_ps(p + i), _mm256_mul_ps(l, _mm256_loadu_ps(g + i))));
  }
  for (; i < n; ++i) p[i] -= lr * g[i];
}
// mine = mine fm + theirs ft; true if a result isn't finite.
WITH_AVX2 bool hop_avx2(hd::float16* mine, float fm, const hd::float16* theirs, float ft, std::size_t n) {
  const __m256 vm = _mm256_set1_ps(fm), vt = _mm256_set1_ps(ft);
  const __m128i exponent = _mm_set1_epi16(0x7c00);
  __m128i bad = _mm_setzero_si128();
  const std::size_t whole = n / 8 * 8;
  std::size_t i = 0;
  for (; i < whole; i += 8) {
    const __m256 sum = _mm256_add_ps(_mm256_mul_ps(load_halves(mine + i), vm), _mm256_mul_ps(load_halves(theirs + i), vt));
    const __m128i h = _mm256_cvtps_ph(sum, 0);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(mine + i), h);
    bad = _mm_or_si128(bad, _mm_cmpeq_epi16(_mm_and_si128(h, exponent), exponent));
  }
  bool any = !_mm_testz_si128(bad, bad);
  for (; i < n; ++i) {
    mine[i] = hd::float16(static_cast<float>(mine[i]) * fm + static_cast<float>(theirs[i]) * ft);
    any |= (mine[i].bits & 0x7c00) == 0x7c00;
  }
  return any;
}
#endif

void encode_plain(const float* g, hd::float16* w, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) w[i] = hd::float16(g[i]);
}
void decode_plain(const hd::float16* w, float* g, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) g[i] = static_cast<float>(w[i]);
}
void descend_plain(float* p, const float* g, float lr, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) p[i] -= lr * g[i];
}
bool hop_plain(hd::float16* mine, float fm, const hd::float16* theirs, float ft, std::size_t n) {
  bool any = false;
  for (std::size_t i = 0; i < n; ++i) {
    mine[i] = hd::float16(static_cast<float>(mine[i]) * fm + static_cast<float>(theirs[i]) * ft);
    any |= (mine[i].bits & 0x7c00) == 0x7c00;
  }
  return any;
}

struct loops {
  void (*encode)(const float*, hd::float16*, std::size_t) = encode_plain;
  void (*decode)(const hd::float16*, float*, std::size_t) = decode_plain;
  void (*descend)(float*, const float*, float, std::size_t) = descend_plain;
  bool (*hop)(hd::float16*, float, const hd::float16*, float, std::size_t) = hop_plain;
};

// Chosen once, at start-up.
loops choose_loops() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl")) {
    return {encode_avx512, decode_avx512, descend_avx2, hop_avx2};
  }
  if (__builtin_cpu_supports("avx2")) return {encode_avx2, decode_avx2, descend_avx2, hop_avx2};
#endif
  return {};
}

// The ring: P - 1 rounds that add, P - 1 that copy. Sums of k ranks travel divided by 2^ceil(log2 k).
template <class Comm>
bool hand_all_reduce(Comm& comm, const loops& run, hd::float16* w, std::size_t n) {
  const int p = comm.size(), me = comm.rank(), next = (me + 1) % p, previous = (me + p - 1) % p;
  const auto begin = [&](int block) {
    const auto b = static_cast<std::size_t>(block), q = n / static_cast<std::size_t>(p), rest = n % static_cast<std::size_t>(p);
    return b * q + (b < rest ? b : rest);
  };
  const auto logarithm = [](int k) {
    int e = 0;
    while ((1 << e) < k) ++e;
    return e;
  };
  hd::header h{hd::operation_kind::all_reduce, hd::dtype::f16, 2, 0, comm.next_sequence(), 1, n};
  bool found_inf = false;
  for (int step = 0; step < p - 1; ++step) {
    const int gives = (me - step - 1 + p) % p, takes = (me - step - 2 + 2 * p) % p;
    const std::size_t from = begin(gives), to = begin(takes), count = begin(takes + 1) - to;
    const hd::outgoing out{next, w + from, (begin(gives + 1) - from) * 2, static_cast<std::uint16_t>(step + 1)};
    const hd::incoming in{previous, nullptr, count * 2};
    const bool last = step == p - 2;
    const int before = logarithm(step + 1), after = last ? 0 : logarithm(step + 2);
    const float scale = last ? 1.0f / static_cast<float>(p) : 1.0f / static_cast<float>(1 << after);
    comm.exchange(h, std::span(&out, 1), std::span(&in, 1), [&](std::span<const hd::arrival> got) {
      found_inf |= run.hop(w + to, scale, static_cast<const hd::float16*>(got[0].data),
                           scale * static_cast<float>(1 << before), count);
    });
    ++h.round;
  }
  for (int step = 0; step < p - 1; ++step) {
    const int gives = (me - step + p) % p, takes = (me - step - 1 + p) % p;
    const std::size_t from = begin(gives), to = begin(takes);
    const hd::outgoing out{next, w + from, (begin(gives + 1) - from) * 2, 1};
    const hd::incoming in{previous, w + to, (begin(takes + 1) - to) * 2};
    comm.exchange(h, std::span(&out, 1), std::span(&in, 1), [](std::span<const hd::arrival>) {});
    ++h.round;
  }
  return found_inf;
}

// ---- Buffers of a rank

struct buffers {
  explicit buffers(std::size_t n, int rank) : p(n), g(n), given(n), w(n) {
    std::uint64_t state = 88172645463325252ull + static_cast<std::uint64_t>(rank) * 7919;
    const auto next = [&] {
      state ^= state << 13, state ^= state >> 7, state ^= state << 17;
      return static_cast<float>(static_cast<double>(state >> 11) * 0x1p-52 - 1.0);
    };
    std::uint64_t same = 1;
    for (std::size_t i = 0; i < n; ++i) {
      same = same * 6364136223846793005ull + 1442695040888963407ull;
      p[i] = static_cast<float>(static_cast<double>(same >> 11) * 0x1p-52 - 1.0);
      given[i] = std::ldexp(next(), static_cast<int>(i % 29) - 14);  // from subnormal on the wire to 16384
    }
    restore();
  }
  void restore() { g = given; }

  std::vector<float> p, g, given;
  std::vector<hd::float16> w;
};

bool same(const buffers& a, const buffers& b) {
  const std::size_t n = a.p.size();
  return std::memcmp(a.p.data(), b.p.data(), n * 4) == 0 && std::memcmp(a.g.data(), b.g.data(), n * 4) == 0 &&
         std::memcmp(static_cast<const void*>(a.w.data()), b.w.data(), n * 2) == 0;
}

using plan = hd::all_reduce_plan<hd::ring>;

// ---- The two steps

template <class Comm>
[[gnu::noinline]] bool ours(Comm& comm, plan& reduce, buffers& b) {
  const std::size_t n = b.p.size();
  const hd::cast<hd::float16> codec;
  codec.encode({b.g.data(), n}, b.w.data(), 1.0f);
  const bool left_range = reduce(comm, b.w.data(), hd::leaf_of<hd::float16>(hd::mean{}));
  codec.decode(b.w.data(), {b.g.data(), n});
  hd::sgd{}.update(b.p.data(), b.g.data(), nullptr, n, {.lr = rate});
  return left_range;
}

template <class Comm>
[[gnu::noinline]] bool hand(Comm& comm, const loops& run, buffers& b) {
  const std::size_t n = b.p.size();
  run.encode(b.g.data(), b.w.data(), n);
  const bool found_inf = hand_all_reduce(comm, run, b.w.data(), n);
  run.decode(b.w.data(), b.g.data(), n);
  run.descend(b.p.data(), b.g.data(), rate, n);
  return found_inf;
}

// ---- Recording and replaying

struct message {
  std::vector<std::byte> bytes;
  std::uint16_t contributors;
};
struct script {
  std::vector<std::vector<message>> sent, received;  // round by round
};

message copy_of(const void* data, std::size_t bytes, std::uint16_t contributors) {
  const auto* p = static_cast<const std::byte*>(data);
  return {{p, p + bytes}, contributors};
}

template <class Comm>
class recorder {
 public:
  recorder(Comm& inner, script& to) : inner_(&inner), to_(&to) {}
  int rank() const { return inner_->rank(); }
  int size() const { return inner_->size(); }
  std::uint16_t next_sequence() { return inner_->next_sequence(); }
  recorder duplicate() { return *this; }
  void fail(const std::string& text) { inner_->fail(text); }
  template <class Apply>
  void exchange(hd::header h, std::span<const hd::outgoing> out, std::span<const hd::incoming> in, Apply&& apply) {
    auto& sent = to_->sent.emplace_back();
    auto& received = to_->received.emplace_back();
    for (const hd::outgoing& m : out) sent.push_back(copy_of(m.data, m.bytes, m.contributors));
    inner_->exchange(h, out, in, [&](std::span<const hd::arrival> got) {
      for (std::size_t k = 0; k < got.size(); ++k) received.push_back(copy_of(got[k].data, in[k].bytes, got[k].contributors));
      apply(got);
    });
  }

 private:
  Comm* inner_;
  script* to_;
};

// One rank of a recorded run, again and again: it never waits. A message costs instructions too. With Inlined the
// compiler may specialise them for the caller, which favours the hand-written loop: it knows that a round is one message
// out and one in. Without, both steps run the same code there, as with a communicator that calls into a library.
template <bool Inlined>
class replay {
 public:
  replay(int rank, const script& s) : rank_(rank), script_(&s) {}
  int rank() const noexcept { return rank_; }
  int size() const noexcept { return ranks; }
  std::uint16_t next_sequence() noexcept { return sequence_++; }
  replay duplicate() { return *this; }
  void fail(const std::string&) {}
  template <class Apply>
  void exchange(hd::header, std::span<const hd::outgoing> out, std::span<const hd::incoming> in, Apply&& apply) {
    hd::arrival got[2];
    if constexpr (Inlined) deliver(out, in, got);
    else deliver_by_call(out, in, got);
    apply(std::span<const hd::arrival>(got, in.size()));
  }

  bool check = false;  // whether what is sent must be what was sent in the recorded run

 private:
  [[gnu::noipa]] void deliver_by_call(std::span<const hd::outgoing> out, std::span<const hd::incoming> in,
                                      hd::arrival* got) {
    deliver(out, in, got);
  }

  [[gnu::always_inline]] inline void deliver(std::span<const hd::outgoing> out, std::span<const hd::incoming> in,
                                      hd::arrival* got) {
    if (check) compare(out);
    const std::vector<message>& round = script_->received[at_];
    if (++at_ == script_->received.size()) at_ = 0;
    for (std::size_t k = 0; k < in.size(); ++k) {
      const message& m = round[k];
      if (in[k].into) std::memcpy(in[k].into, m.bytes.data(), m.bytes.size());
      got[k] = {in[k].into ? in[k].into : m.bytes.data(), m.contributors};
    }
  }

  void compare(std::span<const hd::outgoing> out) const {
    const std::vector<message>& sent = script_->sent[at_];
    if (out.size() != sent.size()) differ("number of messages");
    for (std::size_t k = 0; k < out.size(); ++k) {
      if (out[k].bytes != sent[k].bytes.size() || out[k].contributors != sent[k].contributors ||
          std::memcmp(out[k].data, sent[k].bytes.data(), out[k].bytes) != 0) {
        differ("message of round " + std::to_string(at_));
      }
    }
  }

  int rank_;
  const script* script_;
  std::size_t at_ = 0;
  std::uint16_t sequence_ = 0;
};
static_assert(hd::communicator<replay<true>> && hd::communicator<replay<false>>);

// ---- Cases: a rank of 1 or of 4, at one size. `ours` and `hand` have been compared, on threads and in the replay.

struct recorded {
  explicit recorded(std::size_t n) : scripts(ranks) {
    std::vector<buffers> results;
    for (int r = 0; r < ranks; ++r) results.emplace_back(n, r);
    std::vector<buffers> by_hand = results;
    const loops run = choose_loops();
    hd::threads::run(ranks, [&](auto& comm) {
      const auto me = static_cast<std::size_t>(comm.rank());
      plan reduce(hd::ring{}, comm.rank(), comm.size(), n);
      recorder tape(comm, scripts[me]);
      if (ours(tape, reduce, results[me]) || hand(comm, run, by_hand[me])) differ("a value left the range");
    });
    for (std::size_t r = 0; r < ranks; ++r) {
      if (!same(results[r], by_hand[r])) differ("rank " + std::to_string(r) + " on threads, n " + std::to_string(n));
      if (std::memcmp(results[r].g.data(), results[0].g.data(), n * 4) != 0) differ("ranks among each other");
    }
    for (int r = 0; r < ranks; ++r) {
      replay<false> comm(r, scripts[static_cast<std::size_t>(r)]);
      comm.check = true;
      plan reduce(hd::ring{}, r, ranks, n);
      buffers a(n, r), b(n, r);
      ours(comm, reduce, a);
      hand(comm, run, b);
      if (!same(a, results[static_cast<std::size_t>(r)]) || !same(a, b)) differ("replay of rank " + std::to_string(r));
    }
  }
  std::vector<script> scripts;
};

struct alone {
  explicit alone(std::size_t n) {
    hd::self comm;
    plan reduce(hd::ring{}, 0, 1, n);
    buffers a(n, 0), b(n, 0);
    ours(comm, reduce, a);
    hand(comm, choose_loops(), b);
    if (!same(a, b)) differ("one rank, n " + std::to_string(n));
  }
};

// ---- Time

template <class Step>
void time_steps(benchmark::State& state, std::size_t n, int rank, Step&& step) {
  buffers b(n, rank);
  for (auto _ : state) {
    step(b);
    benchmark::ClobberMemory();
  }
}

void register_times(std::size_t n) {
  const std::string end = "/" + label(n);
  const auto add = [&](const std::string& name, auto f) { benchmark::RegisterBenchmark((name + end).c_str(), f); };
  add("overhead/1rank/ours", [n](benchmark::State& s) {
    const alone checked(n);
    hd::self comm;
    plan reduce(hd::ring{}, 0, 1, n);
    time_steps(s, n, 0, [&](buffers& b) { ours(comm, reduce, b); });
  });
  add("overhead/1rank/peer_hand", [n](benchmark::State& s) {
    hd::self comm;
    const loops run = choose_loops();
    time_steps(s, n, 0, [&](buffers& b) { hand(comm, run, b); });
  });
  add("overhead/4ranks/ours", [n](benchmark::State& s) {
    const recorded tape(n);
    replay<false> comm(0, tape.scripts[0]);
    plan reduce(hd::ring{}, 0, ranks, n);
    time_steps(s, n, 0, [&](buffers& b) { ours(comm, reduce, b); });
  });
  add("overhead/4ranks/peer_hand", [n](benchmark::State& s) {
    const recorded tape(n);
    replay<false> comm(0, tape.scripts[0]);
    const loops run = choose_loops();
    time_steps(s, n, 0, [&](buffers& b) { hand(comm, run, b); });
  });
  add("overhead/1rank/data_parallel", [n](benchmark::State& s) {
    hd::self comm;
    buffers b(n, 0);
    const std::vector<hd::tensor> tensors{{b.p.data(), b.g.data(), n, hd::dtype::f32, "w", 0}};
    const hd::strategy strategy{.topology = hd::ring{}, .compressor = hd::cast<hd::float16>{}};
    hd::data_parallel dp(strategy, comm, std::span<const hd::tensor>(tensors), hd::sgd{});
    for (auto _ : s) {
      dp.ready(0);
      dp.step({.lr = rate});
      benchmark::ClobberMemory();
    }
  });
}

// ---- Instructions

#if HAS_CALLGRIND
struct add {  // as a user writes it
  float operator()(float a, float b) const { return a + b; }
};

// Counts one warm call; callgrind writes a file that bears the name.
template <class Step>
void count(const std::string& name, buffers& b, Step&& step) {
  step();
  b.restore();
  CALLGRIND_ZERO_STATS;
  step();
  CALLGRIND_DUMP_STATS_AT(name.c_str());
}

template <class Comm>
void count_rank(const std::string& name, const std::string& end, Comm comm, std::size_t n) {
  const loops run = choose_loops();
  plan reduce(hd::ring{}, comm.rank(), ranks, n);
  buffers a(n, comm.rank()), b(n, comm.rank());
  count(name + ".ours" + end, a, [&] { ours(comm, reduce, a); });
  count(name + ".hand" + end, b, [&] { hand(comm, run, b); });
  if (!same(a, b)) differ("counted: " + name);
}

// A hop of a ring with sum{} and with an operation of the user's that adds: the same loop.
template <class Op> void count_hop(const std::string& name, const Op& op, std::size_t n) {
  std::vector<float> x(n, 1.0f), y(n, 2.0f);
  const hd::leaf l = hd::leaf_of<float>(op);
  const auto hop = [&] {
    const hd::operand in[] = {{x.data(), 0}, {y.data(), 0}};
    l.reduce(l.context, in, 2, x.data(), n, 0, 1.0);
  };
  hop();
  CALLGRIND_ZERO_STATS;
  hop();
  CALLGRIND_DUMP_STATS_AT(name.c_str());
  if (x[n / 2] != 5.0f) differ(name);
}

void count_everything(benchmark::State& state) {
  const loops run = choose_loops();
  for (auto _ : state) {
    CALLGRIND_ZERO_STATS;
    CALLGRIND_DUMP_STATS_AT("empty");
    for (const std::size_t n : sizes) {
      const std::string end = "." + label(n);
      count_hop("hop.sum" + end, hd::sum{}, n);
      count_hop("hop.userop" + end, add{}, n);
      {
        const alone checked(n);
        hd::self comm;
        plan reduce(hd::ring{}, 0, 1, n);
        buffers a(n, 0), b(n, 0), c(n, 0);
        count("1rank.ours" + end, a, [&] { ours(comm, reduce, a); });
        count("1rank.hand" + end, b, [&] { hand(comm, run, b); });
        if (!same(a, b)) differ("counted on one rank");
        const std::vector<hd::tensor> tensors{{c.p.data(), c.g.data(), n, hd::dtype::f32, "w", 0}};
        const hd::strategy strategy{.topology = hd::ring{}, .compressor = hd::cast<hd::float16>{}};
        hd::data_parallel dp(strategy, comm, std::span<const hd::tensor>(tensors), hd::sgd{});
        count("1rank.step" + end, c, [&] {
          dp.ready(0);
          dp.step({.lr = rate});
        });
        if (std::memcmp(a.p.data(), c.p.data(), n * 4) != 0) differ("data_parallel");
      }
      const recorded tape(n);
      for (int r = 0; r < ranks; ++r) {
        const script& mine = tape.scripts[static_cast<std::size_t>(r)];
        count_rank("4ranks" + std::to_string(r), end, replay<false>(r, mine), n);
        count_rank("4ranks" + std::to_string(r) + ".inlined", end, replay<true>(r, mine), n);
      }
    }
  }
}
#endif

const bool registered = [] {
#if HAS_CALLGRIND
  if (RUNNING_ON_VALGRIND) {
    benchmark::RegisterBenchmark("count", count_everything)->Iterations(1);
    return true;
  }
#endif
  for (const std::size_t n : sizes) register_times(n);
  return true;
}();

}  // namespace
