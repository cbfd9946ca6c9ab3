// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
//
// All-reduce of fp32 sums on a simulated cluster: SimGrid's SMPI runs ranks as fibers of one process, and simulates
// their messages. bench/allreduce_sim.py compiles it with smpicxx and starts it under smpirun:
//     allreduce_sim ours NODE GAMMA BYTES...   Heddle's schedules through point-to-point messages; NODE ranks a machine
//     allreduce_sim mpi NODE GAMMA BYTES...    MPI_Allreduce, with the selector that smpirun was given
// print "<what> <bytes> <simulated seconds> <seconds by the model, or 0> <name>" for each; seconds are those of the
// slowest rank, from a moment at which all begin. Sizes and times of messages are real, elements are not: long messages
// aren't copied, and a reduction takes GAMMA simulated seconds a byte, in Heddle's schedules and in MPI's, and computes
// nothing.
#include <heddle/collective/all_reduce.hpp>
#include <heddle/collective/automatic.hpp>
#include <heddle/collective/gather.hpp>
#include <heddle/comm/calibrate.hpp>
#include <heddle/comm/mpi.hpp>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

namespace hd = heddle;

namespace {
constexpr std::size_t copied = 1 << 16;  // shorter messages are; the engine owns a copy of what it sends ahead

void copy_short(smx_activity_t message, void* from, std::size_t bytes) {
  using communication = simgrid::kernel::activity::CommImpl;  // derived from what a message is here, but incomplete
  if (bytes < copied) smpi_comm_copy_buffer_callback(reinterpret_cast<communication*>(message), from, bytes);
}

void pass(double seconds) {  // simulated ones, on this rank
  const double whole = std::floor(seconds);
  const timespec t{static_cast<time_t>(whole), static_cast<long>((seconds - whole) * 1e9)};
  smpi_nanosleep(&t, nullptr);
}

double gamma_of_all = 0.0;  // the same for all ranks, which share a process

bool reduce(const void*, const hd::operand*, int inputs, void*, std::size_t count, int, double) {
  pass(gamma_of_all * static_cast<double>(inputs - 1) * static_cast<double>(count * sizeof(float)));
  return false;
}
void reduce_mpi(void*, void*, int* count, MPI_Datatype*) {
  pass(gamma_of_all * static_cast<double>(static_cast<std::size_t>(*count) * sizeof(float)));
}

struct simulated {  // a clock
  using duration = std::chrono::duration<double>;
  using time_point = std::chrono::time_point<std::chrono::steady_clock, duration>;
  static time_point now() { return time_point(duration(MPI_Wtime())); }
};

class contest {
 public:
  contest(int rank, float* data, std::size_t bytes) : rank_(rank), data_(data), bytes_(bytes) {}

  template <class Function> void run(const std::string& what, const std::string& name, double model, Function&& f) {
    double now = MPI_Wtime(), seconds = 0;
    MPI_Allreduce(&now, &seconds, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
    const double begin = seconds + 1e-2;
    pass(begin - MPI_Wtime());
    f(data_);
    now = MPI_Wtime() - begin;
    MPI_Allreduce(&now, &seconds, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
    if (rank_ != 0) return;
    std::printf("%s %zu %.9g %.9g %s\n", what.c_str(), bytes_, seconds, model, name.c_str());
    std::fflush(stdout);
  }

 private:
  int rank_;
  float* data_;
  std::size_t bytes_;
};

std::vector<float> elements;  // every rank's

void ours(contest& c, hd::mpi::communicator& comm, const hd::links& costs, std::size_t bytes) {
  const int rank = comm.rank(), size = comm.size();
  const auto enter = [&](const std::string& what, const auto& t) {
    using topology = std::remove_cvref_t<decltype(t)>;
    hd::all_reduce_plan<topology> plan(t, rank, size, bytes / sizeof(float));
    hd::leaf l = hd::leaf_of<float>(hd::sum{});
    l.reduce = &reduce;
    const double model = rank == 0 ? hd::price(t, size, bytes, costs) : 0.0;
    c.run(what, t.name(), model, [&](float* data) { plan(comm, data, l); });
  };
  if (size <= 512) enter("ring", hd::ring{});  // millions of messages more than the others'
  enter("halving_doubling", hd::halving_doubling{});
  enter("torus_2d", hd::torus_2d{});
  if (costs.node <= 1) {
    enter("pipelined", hd::pipelined<hd::torus_2d>{{}, 4, 1});
  } else {
    enter("hierarchical", hd::hierarchical{hd::ring{}, hd::ring{}, costs.node});
    enter("pipelined", hd::pipelined<hd::hierarchical<>>{{.group = costs.node}, 8, costs.node - 1});
  }
  // A rank chooses for all: each would choose the same.
  hd::choice chosen;
  if (rank == 0) chosen = hd::automatic{costs}.choose(size, bytes);
  hd::broadcast(comm, std::span(&chosen, 1), 0);
  enter("automatic", chosen);
}
}  // namespace

int main(int argc, char** argv) {
  if (argc < 5) return 2;
  MPI_Init(&argc, &argv);
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  smpi_comm_set_copy_data_callback(&copy_short);
  const bool is_ours = std::string(argv[1]) == "ours";
  const int node = std::atoi(argv[2]);
  gamma_of_all = std::atof(argv[3]);
  {
    hd::mpi::options o;
    o.time = hd::mpi::time_source::simulator;
    o.level = hd::mpi::thread_level::single;
    o.progress = hd::progress::polled;
    hd::mpi::communicator comm(MPI_COMM_WORLD, o);
    hd::links costs{.node = node};
    if (is_ours) {
      costs = hd::calibrate<simulated>(comm, node);
      costs.gamma = gamma_of_all;  // calibrate has no time to see
    }
    MPI_Op op = MPI_OP_NULL;
    MPI_Op_create(&reduce_mpi, 1, &op);
    for (int i = 4; i < argc; ++i) {
      const std::size_t bytes = std::strtoull(argv[i], nullptr, 10);
      if (elements.size() < bytes / sizeof(float)) elements.resize(bytes / sizeof(float));
      MPI_Barrier(MPI_COMM_WORLD);
      contest c(rank, elements.data(), bytes);
      if (is_ours) {
        ours(c, comm, costs, bytes);
        continue;
      }
      c.run("MPI_Allreduce", "MPI_Allreduce", 0.0, [&](float* data) {
        MPI_Allreduce(MPI_IN_PLACE, data, static_cast<int>(bytes / sizeof(float)), MPI_FLOAT, op, MPI_COMM_WORLD);
      });
    }
    MPI_Op_free(&op);
  }
  MPI_Finalize();
  return 0;
}
