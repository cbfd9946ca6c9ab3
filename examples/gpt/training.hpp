// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
//
// The training loop: one function, whatever the strategy. This is what a user of the library writes.

#pragma once

#include <heddle/heddle.hpp>
#include <heddle/memory/tracking.hpp>
#include <heddle/recompute/chain.hpp>
#include <heddle/recompute/sqrt.hpp>
#ifdef GPT_MPI
#include <heddle/comm/mpi.hpp>
#endif

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdio>
#include <fstream>
#include <iomanip>
#include <numbers>
#include <span>
#include <string>
#include <vector>

#include "data.hpp"
#include "model.hpp"
#include "options.hpp"
#include "report.hpp"

namespace gpt {

/// What to train, but not by which strategy.
struct job {
  const options& settings;
  const corpus& text;
  const std::atomic<bool>& interrupted;
  bool progress = false;  // whether somebody watches
  std::string name;
  std::string about;
  std::size_t steps = 0;
  std::size_t layers = 0;
  bool timeline = false;  // record the memory of a step
};

using seconds = std::chrono::duration<double>;

/// The highest and the last learning rate.
struct rates {
  double highest = 0, last = 0;
};

/// Warm-up over the first steps, then half a cosine down to the last rate.
inline double learning_rate(const rates& r, std::size_t step, std::size_t steps) {
  const auto at = static_cast<double>(step);
  const auto end = static_cast<double>(steps);
  const double warm_up = std::min(100.0, end / 10);
  if (at < warm_up) return r.highest * (at + 1) / warm_up;
  const double cosine = std::cos(std::numbers::pi * (at - warm_up) / (end - warm_up));
  return r.last + (r.highest - r.last) * (1 + cosine) / 2;
}

/// How far a saved run had come; beside the files that the library writes.
struct bookmark {
  std::size_t step = 0;
  double seconds = 0, bytes = 0;
  std::vector<curve_point> curve;

  static std::string signature(const job& j) {
    const options& o = j.settings;
    return j.name + " ranks " + std::to_string(o.ranks) + " steps " + std::to_string(j.steps) + " batch " +
           std::to_string(o.batch) + " context " + std::to_string(o.context) + " width " + std::to_string(o.width) +
           " heads " + std::to_string(o.heads) + " layers " + std::to_string(j.layers) + " seed " +
           std::to_string(o.seed) + " rates " + text_of("%.17g ", o.rate) + text_of("%.17g", o.sgd_rate);
  }

  void save(const job& j, const std::string& directory) const {
    std::ofstream file(directory + "/bookmark.txt");
    file << signature(j) << "\n" << std::setprecision(17) << step << " " << seconds << " " << bytes << "\n";
    for (const curve_point& p : curve)
      file << p.step << " " << p.training << " " << p.validation << " " << p.bytes << "\n";
    if (!file.flush()) throw std::runtime_error("cannot write " + directory + "/bookmark.txt");
  }

  static bookmark load(const job& j, const std::string& directory) {
    std::ifstream file(directory + "/bookmark.txt");
    std::string line;
    if (!std::getline(file, line)) throw usage_error("--resume: nothing was saved in " + directory);
    if (line != signature(j)) {
      throw usage_error("--resume: " + directory + " was saved with other options (" + line + ")");
    }
    bookmark out;
    file >> out.step >> out.seconds >> out.bytes;
    if (!file) throw std::runtime_error(directory + "/bookmark.txt is damaged");
    for (curve_point p; file >> p.step >> p.training >> p.validation >> p.bytes;) out.curve.push_back(p);
    return out;
  }
};

/// Sequences of held-out text with which every rank has a batch to judge.
inline std::size_t windows_needed(const options& o) { return o.ranks * ((o.batch + o.ranks - 1) / o.ranks); }

/// Throws: usage_error if the text is too short for these options.
inline void check_length(const corpus& text, const options& o) {
  const std::size_t have = text.training().size() + text.validation().size();
  const std::size_t held_out = windows_needed(o) * o.context + 1;
  if (have < 10 * held_out) {
    throw usage_error("--data: " + o.data + " has " + std::to_string(have) + " characters; with --context " +
                      std::to_string(o.context) + " and --batch " + std::to_string(o.batch) + " it takes " +
                      std::to_string(10 * held_out));
  }
}

/// One rank of a training run.
template <class Comm, class Plan, class Rule> class trainer {
 public:
  trainer(const job& j, Comm& comm, const Plan& plan, const Rule& rule)
      : job_{j},
        comm_{comm.duplicate()},
        rank_{static_cast<std::size_t>(comm.rank())},
        model_{dimensions(j, rank_), j.settings.seed},
        memory_{hd::host_resource{}, {.log = j.timeline}},
        chain_{plan.recompute, memory_, layers()},
        replica_{plan, comm, tensors(), rule} {
    model_.shared().ready = [this](std::size_t i) { replica_.ready(i); };
  }

  /// Trains; returns on every rank, and what rank 0 returns is complete.
  outcome run(bookmark from, const rates& rate) {
    const options& o = job_.settings;
    const std::string directory = "/" + job_.name;
    if (!o.resume.empty()) replica_.load(o.resume + directory);
    bool stop = false;
    double loss_sum = 0, loss_steps = 0;
    std::size_t step = from.step;
    if (step == 0) from.curve.push_back({0, NAN, validate(false), 0});
    for (; step < job_.steps && !stop; ++step) {
      const auto start = std::chrono::steady_clock::now();
      if (job_.timeline) memory_.clear_samples();
      draw(job_.text, model_.shared().dims, o.seed, step, first_sequence(job_, rank_), batch_);
      loss_sum += learn(learning_rate(rate, step, job_.steps));
      if (job_.timeline) timeline_ = memory_.samples();
      loss_steps += 1;
      if (step % 10 == 9 || step + 1 == job_.steps) stop = agree_to_stop();
      if (o.stop_after == step + 1) stop = true;
      from.seconds += seconds(std::chrono::steady_clock::now() - start).count();
      if ((step + 1) % o.evaluate_every == 0 || step + 1 == job_.steps || stop) {
        const double training = total(loss_sum) / total(loss_steps);
        from.curve.push_back({step + 1, training, validate(false), from.bytes + sent()});
        loss_sum = loss_steps = 0;
        show(from.curve.back(), from.seconds);
      }
    }
    if (!o.save.empty()) save(from, step, o.save + directory);
    replica_.synchronize();
    return result(std::move(from), step);
  }

 private:
  static std::size_t first_sequence(const job& j, std::size_t rank) {
    return j.settings.batch * rank / j.settings.ranks;
  }

  static shape dimensions(const job& j, std::size_t rank) {
    return {j.text.vocabulary(), j.settings.context, j.settings.width,
            j.settings.heads,    j.layers,           first_sequence(j, rank + 1) - first_sequence(j, rank)};
  }

  std::vector<hd::recompute::layer> layers() {
    std::vector<hd::recompute::layer> out;
    model_.for_each_layer([&](auto& layer, std::string name) { out.emplace_back(layer, std::move(name)); });
    return out;
  }

  std::vector<hd::tensor> tensors() {
    std::vector<hd::tensor> out;
    for (std::size_t i = 0; i < model_.plan().size(); ++i) {
      const tensor_plan& t = model_.plan()[i];
      out.push_back({model_.shared().parameters[i], model_.shared().gradients[i], t.count, hd::dtype::f32, t.name, 0});
    }
    return out;
  }

  /// One training step on batch_; the loss before it.
  double learn(double rate) {
    read_parameters();
    replica_.begin({.samples = static_cast<double>(model_.shared().dims.batch)});
    model_.shared().targets = batch_.targets.data();
    const double loss = *static_cast<const double*>(chain_.forward(batch_.inputs.data()));
    const double one = 1;
    chain_.backward(&one, nullptr);  // calls ready() as gradients become final
    replica_.step({.lr = static_cast<float>(rate)});
    return loss;
  }

  void read_parameters() {
    const auto now = replica_.parameters();
    std::copy(now.begin(), now.end(), model_.shared().parameters.begin());
  }

  /// The mean loss on the held-out text, each rank judging its share; a tenth of it along the way, all of it at the
  /// end.
  double validate(bool whole) {
    read_parameters();
    const shape& s = model_.shared().dims;
    const auto text = job_.text.validation();
    const std::size_t windows = (text.size() - 1) / s.context;
    const std::size_t batches = windows / windows_needed(job_.settings);  // at least 1
    const std::size_t stride = job_.settings.ranks * (whole ? 1 : std::min<std::size_t>(batches, 10));
    double sum = 0, count = 0;
    sequences judged;
    std::size_t filled = 0;
    for (std::size_t w = rank_; w < windows; w += stride) {
      judged.set(filled++, text, w * s.context, s.context);
      if (filled < s.batch) continue;
      double loss = 0;
      model_.shared().targets = judged.targets.data();
      chain_.infer(judged.inputs.data(), &loss);
      sum += loss * static_cast<double>(s.batch);
      count += static_cast<double>(s.batch);
      filled = 0;
    }
    return total(sum) / total(count);
  }

  double total(double x) {
    hd::all_reduce(comm_, hd::ring{}, std::span(&x, 1), hd::sum{});
    return x;
  }

  /// Whether any rank saw an interruption: all must leave the loop after the same step.
  bool agree_to_stop() { return total(job_.interrupted.load(std::memory_order_relaxed) ? 1 : 0) > 0; }

  double sent() const { return static_cast<double>(replica_.report().bytes_sent); }

  void show(const curve_point& p, double time) const {
    if (!job_.progress || rank_ != 0) return;
    std::fprintf(stderr, "\r\033[K%-18s step %zu of %zu  training %.3f  validation %.3f  %.0f s", job_.name.c_str(),
                 p.step, job_.steps, p.training, p.validation, time);
    std::fflush(stderr);
  }

  void save(const bookmark& now, std::size_t step, const std::string& directory) {
    replica_.save(directory);
    if (rank_ != 0) return;
    bookmark mark = now;
    mark.step = step;
    mark.bytes += sent();
    mark.save(job_, directory);
  }

  outcome result(bookmark now, std::size_t step) {
    const auto report = replica_.report();
    outcome out;
    out.name = job_.name;
    out.about = job_.about;
    out.steps = step;
    out.complete = step == job_.steps;
    out.seconds = now.seconds;
    out.tokens = static_cast<double>(step * job_.settings.batch * job_.settings.context);
    out.bytes = now.bytes + static_cast<double>(report.bytes_sent);
    out.hidden = report.hidden();
    out.executor = report.executor;
    out.peak_bytes = memory_.peak_bytes();
    out.curve = std::move(now.curve);
    for (const auto& s : timeline_) {
      out.memory.emplace_back(static_cast<double>(s.nanoseconds - timeline_.front().nanoseconds) * 1e-6,
                              static_cast<double>(s.bytes));
    }
    out.loss = validate(true);
    return out;
  }

  const job& job_;
  Comm comm_;  // for losses and agreements, beside the gradients' traffic
  std::size_t rank_;
  model<float> model_;
  hd::tracking<hd::host_resource> memory_;
  hd::recompute::chain<decltype(Plan::recompute), hd::tracking<hd::host_resource>> chain_;
  hd::data_parallel<Plan, Comm, Rule> replica_;
  sequences batch_;
  decltype(std::declval<hd::tracking<hd::host_resource>&>().samples()) timeline_;  // of the last step
};

#ifdef GPT_MPI
inline constexpr const char* ranks_are = "processes";
/// Runs f(comm) as the rank that this process is.
template <class Function> void on_ranks(std::size_t, Function&& f) { hd::mpi::run(f); }
#else
inline constexpr const char* ranks_are = "threads";
/// Runs f(comm) on as many threads.
template <class Function> void on_ranks(std::size_t ranks, Function&& f) {
  hd::threads::run(static_cast<int>(ranks), f);
}
#endif

/// Trains on all ranks by one strategy.
template <class Plan, class Rule> outcome train(const job& j, const Plan& plan, const Rule& rule, const rates& rate) {
  bookmark from;
  if (!j.settings.resume.empty()) from = bookmark::load(j, j.settings.resume + "/" + j.name);
  outcome out;
  on_ranks(j.settings.ranks, [&](auto& comm) {
    trainer<std::remove_cvref_t<decltype(comm)>, Plan, Rule> t{j, comm, plan, rule};
    outcome mine = t.run(from, rate);
    if (comm.rank() == j.settings.shown_rank) out = std::move(mine);
  });
  if (j.progress) std::fprintf(stderr, "\r\033[K");
  return out;
}

}  // namespace gpt
