// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
//
// All-reduce of fp32 sums on MPI processes: schedules through MPI's point-to-point messages, and native, against
// MPI_Allreduce, and some with an operation of the user's own against MPI's and against the same with sum{}.
// bench/allreduce.sh starts it under mpirun: allreduce_mpi JSON [REPETITIONS [BYTES...]]
// Or, with two processes, allreduce_mpi overlap JSON: how much of communication is hidden behind backward.
// All contenders take turns in one run, in place, five times as many below 8 MiB. A time is that of the slowest rank,
// from a barrier; medians are compared.
#include "../support/overlap.hpp"

#include <heddle/collective/all_reduce.hpp>
#include <heddle/collective/mixed_radix.hpp>
#include <heddle/collective/pipelined.hpp>
#include <heddle/comm/mpi.hpp>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace hd = heddle;

namespace {
struct add {  // as a user writes it
  float operator()(float a, float b) const { return a + b; }
};

extern "C" void add_floats(void* in, void* out, int* count, MPI_Datatype*) {
  const float* const x = static_cast<const float*>(in);
  float* const y = static_cast<float*>(out);
  for (int i = 0; i < *count; ++i) y[i] += x[i];
}

struct contender {
  std::string name;
  std::function<void()> run;
  std::vector<double> seconds;
  double median() const { return median_of(seconds); }
  static double median_of(std::vector<double> v) {
    std::sort(v.begin(), v.end());
    return v[v.size() / 2];
  }
};

void ratio(std::FILE* json, const std::string& name, double ours, double theirs, const char* unit, double value) {
  std::printf("RATIO %s %.4g %.4g %s %.3f\n", name.c_str(), ours, theirs, unit, value);
  std::fflush(stdout);
  std::fprintf(json, "%s\n {\"case\": \"%s\", \"ours\": %.6g, \"other\": %.6g, \"unit\": \"%s\", \"ratio\": %.4f}",
               std::ftell(json) > 12 ? "," : "", name.c_str(), ours, theirs, unit, value);
}

// The median of the ratios of turns, so that what disturbs one of them counts once.
void ratio_of_turns(std::FILE* json, const std::string& name, const contender& ours, const contender& other) {
  std::vector<double> ratios;
  for (std::size_t i = 0; i < ours.seconds.size(); ++i) ratios.push_back(other.seconds[i] / ours.seconds[i]);
  ratio(json, name, ours.median() * 1e6, other.median() * 1e6, "us", contender::median_of(ratios));
}

// Runs f with the JSON that it adds ratios to, on rank 0; the others' go nowhere.
template <class Function> void with_json(const char* path, int rank, Function&& f) {
  std::FILE* const json = std::fopen(rank == 0 ? path : "/dev/null", "w");
  if (!json) throw hd::argument_error(std::string("can't write ") + path);
  std::fputs("{\"ratios\": [", json);
  f(json);
  std::fputs("\n]}\n", json);
  std::fclose(json);
}

class contest {
 public:
  contest(hd::mpi::communicator& comm, std::size_t count) : comm_(comm), data_(count) {
    MPI_Op_create(add_floats, 1, &mpi_add_);
    topology("ring", hd::ring{});
    topology("halving_doubling", hd::halving_doubling{});
    topology("torus_2d", hd::torus_2d{});
    topology("direct", hd::direct{});
    // Eight parts one after the other, each of which stays in the caches that the ranks share.
    topology("ring_in_8", hd::pipelined<hd::ring>{{}, 8, 2 * (comm_.size() - 1)});
    topology("native", hd::native{});
    enter("userop.ring", hd::ring{}, add_);
    enter("userop.halving_doubling", hd::halving_doubling{}, add_);
    enter("userop.torus_2d", hd::torus_2d{}, add_);
    all_.push_back({"MPI_Allreduce", [this] { call_mpi(MPI_SUM); }, {}});
    all_.push_back({"MPI_Allreduce, user's operation", [this] { call_mpi(mpi_add_); }, {}});
  }
  contest(const contest&) = delete;
  ~contest() { MPI_Op_free(&mpi_add_); }

  // Whether all gave the right sums; on rank 0.
  bool run(int repetitions) {
    bool right = true;
    for (int i = -1; i < repetitions; ++i) {
      for (std::size_t turn = 0; turn < all_.size(); ++turn) {
        contender& c = all_[(turn + static_cast<std::size_t>(i + 1)) % all_.size()];
        const auto fill = [&] {
          for (std::size_t k = 0; k < data_.size(); ++k) data_[k] = static_cast<float>(comm_.rank() + 1);
        };
        fill();
        c.run();  // what one leaves in caches and heap would be the next one's: each begins from its own
        fill();
        MPI_Barrier(MPI_COMM_WORLD);
        const double start = MPI_Wtime();
        c.run();
        double mine = MPI_Wtime() - start, slowest = 0;
        MPI_Reduce(&mine, &slowest, 1, MPI_DOUBLE, MPI_MAX, 0, MPI_COMM_WORLD);
        if (i >= 0) {
          c.seconds.push_back(slowest);
          continue;
        }
        const float expected = static_cast<float>(comm_.size() * (comm_.size() + 1) / 2);  // exact in any order
        for (const float x : data_) right &= x == expected;
      }
    }
    return right;
  }

  void print(std::FILE* json) {
    const std::string bytes = std::to_string(data_.size() * sizeof(float));
    const double mpi = all_[all_.size() - 2].median(), mpi_user = all_.back().median();
    for (std::size_t i = 0; i + 2 < all_.size(); ++i) {
      contender& c = all_[i];
      const bool users = c.name.starts_with("userop");
      const auto against_mpi = [&](const std::string& name) {
        const double theirs = users ? mpi_user : mpi;
        ratio(json, name + "." + bytes + ".openmpi", c.median() * 1e6, theirs * 1e6, "us", theirs / c.median());
      };
      against_mpi((users ? "" : "mpi.") + c.name);
      if (c.name != "userop.torus_2d") continue;  // what docs/comm.md recommends for ranks of one machine
      against_mpi("userop");
      ratio_of_turns(json, "userop." + bytes + ".builtin", c, all_[torus_]);
    }
  }

 private:
  template <class Topology> void topology(const char* name, const Topology& t) { enter(name, t, sum_); }
  template <class Topology, class Op> void enter(const char* name, const Topology& t, const Op& op) {
    auto plan = std::make_shared<hd::all_reduce_plan<Topology>>(t, comm_.rank(), comm_.size(), data_.size());
    all_.push_back({name, [this, plan, l = hd::leaf_of<float>(op)] { (*plan)(comm_, data_.data(), l); }, {}});
  }
  void call_mpi(MPI_Op op) {
    MPI_Allreduce(MPI_IN_PLACE, data_.data(), static_cast<int>(data_.size()), MPI_FLOAT, op, MPI_COMM_WORLD);
  }

  hd::mpi::communicator& comm_;
  std::vector<float> data_;
  std::vector<contender> all_;
  static constexpr std::size_t torus_ = 2;  // its place in all_
  MPI_Op mpi_add_ = MPI_OP_NULL;
  hd::sum sum_;
  add add_;
};
// hidden = 1 - (overlapped - compute) / (serial - compute), with a thread that communicates and without.
void overlap(std::FILE* json) {
  for (const auto p : {hd::progress::thread, hd::progress::polled}) {
    hd::mpi::options o;
    o.progress = p;
    hd::mpi::communicator comm(MPI_COMM_WORLD, o);
    std::map<std::string, contender> steps;
    overlapped_training(comm, [&](const char* what, double seconds) { steps[what].seconds.push_back(seconds); });
    if (comm.rank() != 0) continue;
    const double alone = steps["compute"].median(), serial = steps["serial"].median(),
                 together = steps["overlapped"].median(), hidden = 1 - (together - alone) / (serial - alone);
    const char* const name = p == hd::progress::thread ? "thread" : "polled";
    std::printf("overlap.mpi.%s: compute %.1f ms, serial %.1f ms, overlapped %.1f ms\n", name, alone * 1e3,
                serial * 1e3, together * 1e3);
    if (p == hd::progress::thread) {
      ratio(json, "overlap.mpi", hidden, 0.8, "hidden", hidden / 0.8);
    } else {
      std::printf("overlap.mpi.polled: hidden %.3f\n", hidden);
      ratio(json, "overlap.mpi.polled.serial", together * 1e3, serial * 1e3, "ms", serial / together);
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) return 2;
  if (std::string(argv[1]) == "overlap") {
    if (argc < 3) return 2;
    const auto world = hd::mpi::world();
    with_json(argv[2], world.rank(), overlap);
    return 0;
  }
  const int repetitions = argc > 2 ? std::atoi(argv[2]) : 21;
  std::vector<std::size_t> sizes;
  for (int i = 3; i < argc; ++i) sizes.push_back(std::strtoull(argv[i], nullptr, 10));
  if (sizes.empty()) sizes = {1u << 16, 1u << 20, 1u << 22, 25'000'000, 1u << 26};
  bool right = true;
  hd::mpi::run([&](auto& comm) {
    with_json(argv[1], comm.rank(), [&](std::FILE* json) {
      for (const std::size_t bytes : sizes) {
        contest c(comm, bytes / sizeof(float));
        int mine = c.run(bytes < 8u << 20 ? 5 * repetitions : repetitions), all = 0;
        MPI_Allreduce(&mine, &all, 1, MPI_INT, MPI_MIN, MPI_COMM_WORLD);
        right &= all != 0;
        if (comm.rank() == 0) c.print(json);
      }
    });
    if (comm.rank() == 0 && !right) std::printf("a sum is wrong\n");
  });
  return right ? 0 : 3;
}
