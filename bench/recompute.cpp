// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
//
// about: recomputation on the GPT example with 24 layers, measured: peak, step time, and the batch that fits in 1 GiB
// driver: script
//
// Prints its lines itself:
//   RATIO peak.<layers>.<policy> <measured> <simulated> bytes <simulated / measured>     equal, or exit code 3
//   RATIO placed.<layers>.<policy> <one buffer> <simulated> bytes <simulated / buffer>   what fragmentation costs
//   RATIO optimal.<layers>.at_<policy> <optimal> <policy> ms <policy / optimal>          step times within one budget
//   RATIO batch.<layers>.<f>x <buffer> <1 GiB> bytes <1 GiB / buffer>                    it ran inside 1 GiB
//   RATIO slowdown.<layers>.<f>x <slowdown> <bound> times <bound / slowdown>             per token, against no policy
//   RATIO offload.<none|serial> <overlapped> <that> ms <that / overlapped>               copies on a lane of their own
// <layers> is `block` (one layer per transformer block) or `fine` (eight).
#include <heddle/memory/limiting.hpp>
#include <heddle/memory/planned.hpp>
#include <heddle/memory/tracking.hpp>
#include <heddle/recompute/chain.hpp>
#include <heddle/recompute/offload.hpp>
#include <heddle/recompute/optimal.hpp>
#include <heddle/recompute/profile.hpp>
#include <heddle/recompute/promise.hpp>
#include <heddle/recompute/selective.hpp>

#include "../examples/gpt/data.hpp"
#include "../examples/gpt/fine.hpp"
#include "../examples/gpt/model.hpp"
#include "support/offloaded.hpp"
#include "support/results.hpp"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

namespace hd = heddle;
namespace rc = heddle::recompute;

namespace {

constexpr std::size_t limit = std::size_t{1} << 30;
constexpr gpt::shape dims{.vocabulary = 65, .context = 64, .width = 128, .heads = 4, .layers = 24, .batch = 4};

/// Memory whose pages are there before a clock runs.
struct touched {
  hd::host_resource upstream{};
  void* allocate_sync(std::size_t bytes, std::size_t alignment) {
    void* const p = upstream.allocate_sync(bytes, alignment);
    if (p) std::memset(p, 0, bytes);
    return p;
  }
  void deallocate_sync(void* p, std::size_t bytes, std::size_t alignment) noexcept {
    upstream.deallocate_sync(p, bytes, alignment);
  }
  void* allocate(hd::host::queue, std::size_t bytes, std::size_t alignment) { return allocate_sync(bytes, alignment); }
  void deallocate(hd::host::queue, void* p, std::size_t bytes, std::size_t alignment) noexcept {
    deallocate_sync(p, bytes, alignment);
  }
  friend bool operator==(const touched&, const touched&) = default;
};

bench::results found;

/// The model with its layers in one of two cuts, and their measured times.
class subject {
 public:
  subject(std::string name, bool fine) : name_(std::move(name)), model_(dims, 1), fine_(model_) {
    if (fine) {
      layers_ = fine_.list();
    } else {
      model_.for_each_layer([&](auto& l, std::string n) { layers_.emplace_back(l, std::move(n)); });
    }
    batch(dims.batch);
    measured_ = rc::profile(layers_, tokens_.inputs.data(), hd::tracking{hd::host_resource{}}, {.repetitions = 7});
  }

  const std::string& name() const { return name_; }
  const std::vector<rc::layer>& layers() const { return layers_; }
  const void* input() const { return tokens_.inputs.data(); }

  /// Another number of sequences.
  void batch(std::size_t n) {
    if (tokens_.inputs.size() != n * dims.context) {
      std::vector<std::int32_t> text(n * dims.context + 1);
      for (std::size_t i = 0; i < text.size(); ++i)
        text[i] = static_cast<std::int32_t>(gpt::hash(5, i) % dims.vocabulary);
      tokens_ = {};
      for (std::size_t b = 0; b < n; ++b) tokens_.set(b, text, b * dims.context, dims.context);
    }
    model_.shared().dims.batch = n;
    model_.shared().targets = tokens_.targets.data();
  }

  /// Sizes for this batch, and times in proportion to it.
  std::vector<rc::layer_cost> costs(std::size_t n) {
    model_.shared().dims.batch = n;
    std::vector<rc::layer_cost> all = measured_.costs;
    const double times = static_cast<double>(n) / static_cast<double>(dims.batch);
    for (std::size_t i = 0; i < all.size(); ++i) {
      all[i].output_bytes = layers_[i].cost().output_bytes;
      all[i].saved_bytes = layers_[i].cost().saved_bytes;
      for (double* t : {&all[i].forward_time, &all[i].backward_time, &all[i].restore_time}) *t *= times;
    }
    return all;
  }

 private:
  std::string name_;
  gpt::model<float> model_;
  gpt::fine_layers<float> fine_;
  std::vector<rc::layer> layers_;
  gpt::sequences tokens_;
  rc::chain_profile measured_;
};

/// One schedule at one batch, in a buffer of the promised size.
class run {
 public:
  run(std::string name, subject& of, rc::schedule s, std::size_t batch)
      : name_(std::move(name)), of_(&of), batch_(batch), costs_(of.costs(batch)), schedule_(std::move(s)) {
    placed_ = rc::promise(schedule_, costs_);
  }

  const std::string& name() const { return name_; }
  std::size_t batch() const { return batch_; }
  std::size_t buffer() const { return placed_.peak; }
  rc::simulation simulated() const { return rc::simulate(schedule_, costs_); }
  double seconds() const { return bench::median(times_); }
  std::size_t peak() const { return peak_; }
  const std::vector<hd::memory_sample>& samples() const { return samples_; }

  void measure(std::size_t steps) {
    of_->batch(batch_);
    hd::planned places{hd::limiting{touched{}, placed_.peak}};
    places.expect(rc::lifetimes(schedule_, costs_), placed_);
    hd::tracking memory{places, {.log = true}};
    rc::chain chain{schedule_, memory, of_->layers(), rc::offload_store<>{}};
    for (std::size_t k = 0; k < steps; ++k) {
      places.begin_step();
      memory.clear_samples();
      const double start = bench::processor_seconds();
      chain.forward(of_->input());
      const double one = 1;
      chain.backward(&one, nullptr);
      times_.push_back(bench::processor_seconds() - start);
    }
    peak_ = memory.peak_bytes();
    samples_ = memory.samples();
    deviations_ = places.deviations();
  }

  /// Whether the chain did what was simulated, in the buffer that was promised.
  bool kept_promise() const { return deviations_ == 0 && peak_ == simulated().peak_bytes; }

 private:
  std::string name_;
  subject* of_;
  std::size_t batch_;
  std::vector<rc::layer_cost> costs_;
  rc::schedule schedule_;
  hd::memory_plan placed_;
  std::vector<double> times_;
  std::vector<hd::memory_sample> samples_;
  std::size_t peak_ = 0, deviations_ = 0;
};

/// Held bytes over the time of a step, a line per policy.
void draw(const std::string& path, const std::vector<run>& runs) {
  std::FILE* const f = std::fopen(path.c_str(), "w");
  if (!f) return;
  constexpr double width = 860, height = 420, left = 70, top = 30;
  double longest = 0, most = 0;
  const auto milliseconds = [](const run& r, std::size_t k) {
    return 1e-6 * static_cast<double>(r.samples()[k].nanoseconds - r.samples()[0].nanoseconds);
  };
  for (const run& r : runs) {
    longest = std::max(longest, milliseconds(r, r.samples().size() - 1));
    most = std::max(most, static_cast<double>(r.peak()));
  }
  std::fprintf(f,
               "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%g\" height=\"%g\" font-family=\"sans-serif\" "
               "font-size=\"12\">\n<rect width=\"100%%\" height=\"100%%\" fill=\"white\"/>\n",
               width + left + 170, height + top + 50);
  for (int k = 0; k <= 4; ++k) {
    const double y = top + height * (1 - k / 4.0), x = left + width * k / 4.0;
    std::fprintf(f,
                 "<path d=\"M%g %gh%g\" stroke=\"#ddd\"/><text x=\"%g\" y=\"%g\" text-anchor=\"end\">%.0f MiB</text>\n",
                 left, y, width, left - 6, y + 4, most * k / 4 / (1 << 20));
    std::fprintf(f, "<text x=\"%g\" y=\"%g\" text-anchor=\"middle\">%.0f ms</text>\n", x, top + height + 18,
                 longest * k / 4);
  }
  const char* const colours[] = {"#444", "#d62728", "#1f77b4", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#e377c2"};
  for (std::size_t i = 0; i < runs.size(); ++i) {
    const char* const colour = colours[i % std::size(colours)];
    std::fprintf(f, "<path fill=\"none\" stroke=\"%s\" stroke-width=\"1.3\" d=\"", colour);
    for (std::size_t k = 0; k < runs[i].samples().size(); ++k) {
      std::fprintf(f, k ? "H%.1fV%.1f" : "M%.1f %.1f", left + width * milliseconds(runs[i], k) / longest,
                   top + height * (1 - static_cast<double>(runs[i].samples()[k].bytes) / most));
    }
    std::fprintf(f, "\"/>\n<text x=\"%g\" y=\"%g\" fill=\"%s\">%s</text>\n", left + width + 8,
                 top + 12 + 18 * static_cast<double>(i), colour, runs[i].name().c_str());
  }
  std::fprintf(f,
               "<text x=\"%g\" y=\"%g\">bytes that a chain holds over the time of a step, by policy</text>\n</svg>\n",
               left, top + height + 40);
  std::fclose(f);
}

bool all_kept = true;

void report(const subject& of, const run& r) {
  const std::string at = of.name() + "." + r.name();
  all_kept = all_kept && r.kept_promise();
  found.ratio("peak." + at, static_cast<double>(r.peak()), static_cast<double>(r.simulated().peak_bytes), "bytes");
  found.ratio("placed." + at, static_cast<double>(r.buffer()), static_cast<double>(r.peak()), "bytes");
}

/// Every policy at one batch, taking turns.
std::vector<run> policies(subject& of, std::size_t batch, std::size_t rounds) {
  const std::vector<rc::layer_cost> costs = of.costs(batch);
  std::vector<run> runs;
  const auto add = [&](const std::string& name, rc::schedule s) { runs.emplace_back(name, of, std::move(s), batch); };
  add("none", rc::none{}.plan(costs));
  const std::vector<std::pair<std::string, rc::schedule>> rivals{{"sqrt", rc::sqrt{}.plan(costs)},
                                                                 {"every2", rc::every{2}.plan(costs)},
                                                                 {"full", rc::full{}.plan(costs)},
                                                                 {"revolve3", rc::revolve{3}.plan(costs)},
                                                                 {"revolve8", rc::revolve{8}.plan(costs)}};
  std::vector<std::pair<std::size_t, std::size_t>> pairs;  // a rival and what optimal does in its bytes
  for (const auto& [name, s] : rivals) {
    add(name, s);
    rc::schedule ours = rc::optimal{rc::simulate(s, costs).peak_bytes}.plan(costs);
    const bool same = ours == s;
    if (!same) add("optimal_at_" + name, std::move(ours));
    pairs.emplace_back(runs.size() - (same ? 1 : 2), runs.size() - 1);
  }
  add("leanest", rc::leanest{}.plan(costs));
  add("selective", rc::selective{rc::named{{"norm", "attention", "gelu", "block1"}}}.plan(costs));
  add("offload", rc::offload<>{}.plan(costs));
  add("offload_sqrt", rc::offload{.policy = rc::sqrt{}}.plan(costs));
  for (std::size_t round = 0; round < rounds; ++round) {
    for (run& r : runs) r.measure(1);
  }
  std::printf("%s layers, %zu sequences:\n%-22s %12s %12s %10s %8s %8s\n", of.name().c_str(), batch, "policy",
              "peak MiB", "buffer MiB", "ms", "slower", "again");
  for (const run& r : runs) {
    std::printf("%-22s %12.2f %12.2f %10.1f %7.1f%% %8zu\n", r.name().c_str(),
                static_cast<double>(r.peak()) / (1 << 20), static_cast<double>(r.buffer()) / (1 << 20),
                1e3 * r.seconds(), 100 * (r.seconds() / runs[0].seconds() - 1), r.simulated().extra_forwards);
  }
  for (const run& r : runs) report(of, r);
  for (std::size_t k = 0; k < rivals.size(); ++k) {
    found.ratio("optimal." + of.name() + ".at_" + rivals[k].first, 1e3 * runs[pairs[k].second].seconds(),
                1e3 * runs[pairs[k].first].seconds(), "ms");
  }
  return runs;
}

/// The largest batch whose buffer fits the limit.
template <class Policy> std::size_t largest_batch(subject& of, const Policy& policy) {
  std::size_t fits = 0, step = 4096;
  for (; step > 0; step /= 2) {
    const std::vector<rc::layer_cost> costs = of.costs(fits + step);
    if (rc::promise(policy.plan(costs), costs).peak <= limit) fits += step;
  }
  return fits;
}

}  // namespace

int main(int count, char** arguments) {
  if (count < 3) {
    std::fprintf(stderr, "usage: recompute JSON SVG [ROUNDS]\n");
    return 2;
  }
  const std::size_t rounds = count > 3 ? static_cast<std::size_t>(std::atoi(arguments[3])) : 5;
  subject block("block", false), fine("fine", true);
  const std::vector<run> drawn = policies(block, 8, rounds);
  policies(fine, 8, rounds);
  std::vector<run> chosen;
  for (const run& r : drawn) {
    if (r.name() == "none" || r.name() == "sqrt" || r.name() == "optimal_at_sqrt" || r.name() == "full" ||
        r.name() == "revolve3" || r.name() == "offload_sqrt")
      chosen.push_back(r);
  }
  draw(arguments[2], chosen);

  const bench::offload_times copies = bench::offloaded_steps(24, rounds);
  const double without_copies = bench::median(copies.none), serial = bench::median(copies.serial),
               beside = bench::median(copies.overlapped);
  std::printf("copies of 24 layers over a link: %.3f of their time is hidden\n",
              1 - (beside - without_copies) / (serial - without_copies));
  found.ratio("offload.none", 1e3 * beside, 1e3 * without_copies, "ms");
  found.ratio("offload.serial", 1e3 * beside, 1e3 * serial, "ms");

  // The largest batch without recomputation, then three and six times that with it, in the same 1 GiB.
  struct target {
    subject* of;
    std::size_t times;
    double bound;
    std::size_t baseline;
  };
  std::vector<target> targets;
  std::vector<run> without, with;
  for (subject* s : {&block, &fine}) {
    const std::size_t alone = largest_batch(*s, rc::none{}), most = largest_batch(*s, rc::leanest{});
    std::printf("%s layers in 1 GiB: %zu sequences without recomputation, at most %zu with it\n", s->name().c_str(),
                alone, most);
    found.ratio("largest_batch." + s->name(), 1 / static_cast<double>(most), 1 / static_cast<double>(alone),
                "1/sequences");
    without.emplace_back("none", *s, rc::none{}.plan(s->costs(alone)), alone);
    for (const std::size_t times : {3, 6}) {
      targets.push_back({s, times, times == 6 && s == &block ? 1.33 : 1.25, without.size() - 1});
      with.emplace_back(std::to_string(times) + "x", *s, rc::placed{limit}.plan(s->costs(times * alone)),
                        times * alone);
    }
  }
  for (std::size_t round = 0; round < (rounds + 1) / 2; ++round) {
    for (run& r : without) r.measure(3);
    for (run& r : with) r.measure(1);
  }
  for (std::size_t k = 0; k < with.size(); ++k) {
    const run &r = with[k], &base = without[targets[k].baseline];
    const std::string at = targets[k].of->name() + "." + r.name();
    all_kept = all_kept && r.kept_promise() && base.kept_promise() && r.buffer() <= limit;
    found.ratio("batch." + at, static_cast<double>(r.buffer()), static_cast<double>(limit), "bytes");
    const double slowdown = r.seconds() / (static_cast<double>(targets[k].times) * base.seconds());
    found.ratio("slowdown." + at, slowdown, targets[k].bound, "times");
  }

  if (!found.write(arguments[1])) return 1;
  if (!all_kept) std::fprintf(stderr, "recompute: a chain held other bytes than were simulated\n");
  return all_kept ? 0 : 3;
}
