// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
//
// about: encode and decode of each compressor on the host, against a loop that moves the same bytes
// driver: script
//
// Prints its lines itself, medians of interleaved runs on one thread; the ratio is the median of those of neighbours:
//   RATIO <compressor>.encode.floor <GB/s> <GB/s of the loop> GB/s <ratio>
//   RATIO <compressor>.decode.floor ...
// and before each the bytes that it moves per element. The loop of the floor reads and writes as many streams of as
// many bytes, in one pass over memory that does not fit into the cache. Of decoders of packets, whose work is by entry,
// the floor adds the same values at the same places from plain arrays. All memory lies in huge pages where the system
// gives them, else what a pass costs depends on where it put thousands of small ones.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <heddle/compress/cast.hpp>
#include <heddle/compress/dgc.hpp>
#include <heddle/compress/power_sgd.hpp>
#include <heddle/compress/quantize.hpp>
#include <heddle/compress/random_k.hpp>
#include <heddle/compress/sign.hpp>
#include <heddle/compress/top_k.hpp>
#include <new>
#include <string>
#include <vector>
#ifdef __linux__
#include <sys/mman.h>
#endif

namespace hd = heddle;

namespace {

constexpr std::size_t elements = std::size_t{32} << 20;
constexpr int repetitions = 11;

// Memory for both sides: in huge pages, and each array begins elsewhere in its first one, so that streams side by side
// don't meet in the same sets of the cache.
template <class Element> struct huge_pages {
  using value_type = Element;
  huge_pages() = default;
  template <class Other> huge_pages(const huge_pages<Other>&) noexcept {}
  Element* allocate(std::size_t n) {
    static std::size_t turn = 0;
    const std::size_t first = ++turn % 16 * 4160, bytes = (first + n * sizeof(Element) + page - 1) / page * page;
    auto* const start = static_cast<std::byte*>(std::aligned_alloc(page, bytes));
    if (!start) throw std::bad_alloc();
#ifdef __linux__
    madvise(start, bytes, MADV_HUGEPAGE);
#endif
    return reinterpret_cast<Element*>(start + first);
  }
  void deallocate(Element* p, std::size_t) noexcept {
    std::free(reinterpret_cast<void*>(reinterpret_cast<std::uintptr_t>(p) / page * page));
  }
  template <class Other> bool operator==(const huge_pages<Other>&) const noexcept { return true; }

 private:
  static constexpr std::size_t page = std::size_t{2} << 20;
};
template <class Element> using memory = std::vector<Element, huge_pages<Element>>;

// Bytes that a pass moves per element: read only, read and written in place, written only.
struct traffic {
  double read = 0, update = 0, write = 0;
  double bytes() const { return read + 2 * update + write; }
};

// Of this thread: what other programs take of the processor doesn't count.
double now() {
  timespec t{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}
template <class Work>
double seconds_of(Work&& work) {
  const double start = now();
  work();
  return now() - start;
}

double median(std::vector<double> v) {
  std::sort(v.begin(), v.end());
  return v[v.size() / 2];
}

#if defined(__x86_64__)
#define WIDE __attribute__((target("avx2"), optimize("O3")))
#else
#define WIDE
#endif
WIDE void add_to(float* lanes, const float* x, std::size_t n) {  // 64 lanes
  std::size_t i = 0;
  for (; i + 64 <= n; i += 64) {
    for (std::size_t k = 0; k < 64; ++k) lanes[k] += x[i + k];
  }
  for (std::size_t k = 0; i + k < n; ++k) lanes[k] += x[i + k];
}
WIDE void halve(float* x, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) x[i] *= 0.5f;
}
WIDE void set(float* x, std::size_t n, float value) {
  for (std::size_t i = 0; i < n; ++i) x[i] = value;
}

// The floor: streams of the given sizes, side by side, in pieces that alternate as a pass over elements would. At most
// three streams are read, two updated and one written, 4 bytes per element each.
class streams {
  static constexpr std::size_t piece = 128;

 public:
  void run(const traffic& t) {
    for (std::size_t at = 0; at < elements; at += piece) {
      each(t.read, [&](std::size_t k, std::size_t n) { add_to(keep_, read_[k].data() + at * n / piece, n); });
      each(t.update, [&](std::size_t k, std::size_t n) { halve(update_[k].data() + at * n / piece, n); });
      each(t.write, [&](std::size_t, std::size_t n) { set(write_.data() + at * n / piece, n, keep_[0]); });
    }
  }

 private:
  // f(stream, floats of it for each piece)
  template <class Function> static void each(double bytes, Function&& f) {
    for (std::size_t k = 0; bytes > 0; ++k, bytes -= 4)
      f(k, static_cast<std::size_t>(std::min(bytes, 4.0) * piece / 4));
  }
  std::vector<memory<float>> read_ = std::vector<memory<float>>(4, memory<float>(elements, 1.0f));
  std::vector<memory<float>> update_ = std::vector<memory<float>>(3, memory<float>(elements, 1.0f));
  memory<float> write_ = memory<float>(elements, 1.0f);
  float keep_[64] = {};
};

streams& all_streams() {  // a gigabyte, for all cases
  static streams one;
  return one;
}

struct row {
  std::string name;
  double ours, floor, bytes;
};
std::vector<row> rows;
std::string only;  // cases whose names don't begin so are left out

// Runs both in turn. What else the machine does slows down neighbours alike, so their ratio counts.
template <class Work, class Floor>
void compare(const std::string& name, double bytes_per_element, double bytes, Work&& work, Floor&& floor) {
  if (name.rfind(only, 0) != 0) return work();  // what follows may need what it makes
  std::vector<double> ours, ratios;
  for (int k = 0; k <= repetitions; ++k) {
    const double before = seconds_of(floor), a = seconds_of(work), after = seconds_of(floor);
    if (k == 0) continue;  // the first time memory is touched
    ours.push_back(a);
    ratios.push_back((before + after) / 2 / a);
  }
  const double speed = bytes / median(ours) / 1e9, ratio = median(ratios);
  rows.push_back({name, speed, speed / ratio, bytes_per_element});
  std::printf("%s moves %.3g bytes per element\nRATIO %s.floor %.4g %.4g GB/s %.3f\n", name.c_str(), bytes_per_element,
              name.c_str(), speed, speed / ratio, ratio);
  std::fflush(stdout);
}

// A case: `work` goes once over `elements` elements and moves `t`. One line for each half of a compressor.
template <class Work>
void measure(const std::string& name, const traffic& t, Work&& work) {
  compare(name, t.bytes(), t.bytes() * elements, work, [&] { all_streams().run(t); });
}

// What a rank sends of a tensor, apart from what a pass moves.
void tell_packet(const std::string& name, std::size_t bytes) {
  std::printf("%s packet: %.4g bytes per element\n", name.c_str(), static_cast<double>(bytes) / elements);
}

// Decoding entries: 8 bytes of one read, and 32 read and written where it belongs. `head`: bytes of the packet before
// the list of entries.
template <class Compressor>
void measure_packet_decode(const std::string& name, const Compressor& c, hd::slice<const std::byte> packet,
                           std::size_t head, memory<float>& sum) {
  memory<std::uint32_t> index;
  memory<float> value;
  hd::for_each_entry(packet.subslice(head, packet.count - head), elements, [&](std::uint32_t i, float v) {
    index.push_back(i);
    value.push_back(v);
  });
  const double bytes = 72.0 * static_cast<double>(index.size());
  compare(
      name, bytes / elements, bytes, [&] { c.decode_add(packet, {sum.data(), sum.size()}); },
      [&] {
        for (std::size_t j = 0; j < index.size(); ++j) sum[index[j]] += value[j];
      });
}

// Steps of a packet compressor; the gradient is another one each time.
struct training {
  explicit training(int slots, std::size_t extra)
      : state(static_cast<std::size_t>(slots), memory<float>(elements, 0.0f)), numbers(extra, 0.0f) {
    std::uint64_t s = 1;
    for (float& x : g) {  // a sum of four uniform numbers: nearly normal
      float sum = -2.0f;
      for (int k = 0; k < 4; ++k) {
        s = s * 6364136223846793005ull + 1442695040888963407ull;
        sum += static_cast<float>(s >> 40) * 0x1p-24f;
      }
      x = sum;
    }
    for (auto& v : state) pointers.push_back(v.data());
    pointers.push_back(numbers.data());
  }
  hd::slice<const float> gradient() { return {g.data() + (turn++ * 7919 * 16) % elements, elements}; }
  hd::encode_context context() const { return {.ranks = 4, .momentum = 0.9f}; }

  memory<float> g = memory<float>(2 * elements);
  std::size_t turn = 0;
  std::vector<memory<float>> state;
  std::vector<float> numbers;
  std::vector<float*> pointers;
  memory<std::byte> packet;
};

void dgc(const std::string& name, const hd::dgc& c) {
  training t(hd::dgc::slots, hd::dgc::extra(elements));
  const auto fused = [&] {
    t.packet.clear();
    c.fused(t.gradient(), 1.0f, t.pointers.data(), t.context(), t.packet);
  };
  for (int k = 0; k < 5; ++k) fused();
  measure(name + ".encode", {.read = 4, .update = 8}, fused);
  measure(name + ".prepare", {.read = 12}, [&] {
    t.packet.clear();
    c.encode(t.gradient(), 1.0f, t.pointers.data(), t.context(), t.packet);
  });
  measure(name + ".commit", {.read = 4, .update = 8},
          [&] { c.commit(t.gradient(), 1.0f, t.pointers.data(), t.context(), {t.packet.data(), t.packet.size()}); });
  tell_packet(name, t.packet.size());
  t.g.resize(elements);
  measure_packet_decode(name + ".decode", c, {t.packet.data(), t.packet.size()}, 0, t.g);
}

template <class Wire>
void cast(const std::string& name) {
  memory<float> g(elements, 0.3f);
  memory<Wire> wire(elements);
  const hd::cast<Wire> c;
  measure(name + ".encode", {.read = 4, .write = 2}, [&] { c.encode({g.data(), g.size()}, wire.data(), 0.5f); });
  measure(name + ".decode", {.read = 2, .write = 4}, [&] { c.decode(wire.data(), {g.data(), g.size()}); });
}

// A codec that sends `wire` bytes per element, with error feedback or without.
template <class Compressor>
void packets(const std::string& name, const Compressor& compressor, double wire) {
  const auto c = hd::detail::carried(compressor);
  training t(c.slots, 0);
  const double held = 4.0 * c.slots;
  measure(name + ".encode", {.read = 4 + held, .write = wire}, [&] {
    t.packet.clear();
    c.encode(t.gradient(), 1.0f, t.pointers.data(), t.context(), t.packet);
  });
  const hd::slice<const std::byte> packet{t.packet.data(), t.packet.size()};
  if (c.slots) {
    measure(name + ".commit", {.read = 4 + wire, .update = 4},
            [&] { c.commit(t.gradient(), 1.0f, t.pointers.data(), t.context(), packet); });
  }
  tell_packet(name, packet.count);
  memory<float> sum(elements);
  if (wire > 0.1)  // all elements
    measure(name + ".decode", {.read = wire, .update = 4}, [&] { c.decode_add(packet, {sum.data(), elements}); });
  else
    measure_packet_decode(name + ".decode", c, packet, c.head, sum);
}

// What travels as sums.
template <class Compressor>
void sums(const std::string& name, const Compressor& compressor) {
  const auto c = hd::detail::carried(compressor);
  training t(c.slots, c.extra(elements, {}));
  std::vector<memory<float>> rounds;
  std::vector<float*> pointers;
  for (int r = 0; r < c.rounds; ++r)
    pointers.push_back(rounds.emplace_back(c.sum_count(r, elements, t.context())).data());
  memory<float> g(elements, 0.5f);
  for (int r = 0; r < c.rounds; ++r) {
    measure(name + ".encode" + (r ? "." + std::to_string(r + 1) : ""), {.read = 8},
            [&] { c.send(r, t.gradient(), 1.0f, t.pointers.data(), t.context(), pointers.data()); });
  }
  measure(name + ".decode", {.update = 8},
          [&] { c.commit({g.data(), elements}, 1.0f, t.pointers.data(), t.context(), pointers.data()); });
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 2 && count != 3) {
    std::fprintf(stderr, "usage: compress JSON [BEGINNING-OF-A-CASE]\n");
    return 2;
  }
  if (count == 3) only = arguments[2];
  cast<hd::float16>("cast<f16>");
  cast<hd::bfloat16>("cast<bf16>");
  dgc("dgc", {});
  dgc("dgc.sampled", {.selection = hd::selection::sampled, .values = hd::sparse_values::f16});
  dgc("dgc.warmup", {.sparsity = 0.9375});
  packets("top_k", hd::error_feedback{hd::top_k{.density = 0.001}}, 0.008);
  packets("sign", hd::error_feedback{hd::sign{}}, 0.126);
  packets("quantize<8>", hd::quantize<8>{}, 1.004);
  packets("quantize<4>", hd::error_feedback{hd::quantize<4, hd::rounding::nearest>{}}, 0.504);
  sums("random_k", hd::error_feedback{hd::random_k{.density = 0.01}});
  sums("power_sgd", hd::power_sgd{});
  std::FILE* const file = std::fopen(arguments[1], "w");
  if (!file) {
    std::fprintf(stderr, "compress: cannot write %s\n", arguments[1]);
    return 1;
  }
  std::fprintf(file, "{\"benchmarks\": [");
  for (std::size_t i = 0; i < rows.size(); ++i) {
    std::fprintf(
        file,
        "%s\n  {\"name\": \"%s\", \"ours\": %.6g, \"floor\": %.6g, \"unit\": \"GB/s\", \"bytes_per_element\": %.6g}",
        i ? "," : "", rows[i].name.c_str(), rows[i].ours, rows[i].floor, rows[i].bytes);
  }
  std::fprintf(file, "\n]}\n");
  return std::fclose(file) == 0 ? 0 : 1;
}
