// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#include <heddle/comm/mpi_messenger.hpp>
#include <heddle/comm/throttled.hpp>
#include <heddle/mode/zero1.hpp>
#include <heddle/trainer/server.hpp>

#include "../trainer/support.hpp"

#include "support.hpp"

namespace {

// Parameters after training on this rank, and on each rank of as many threads: the same bits.
template <class Plan, class Rule> void same_as_threads(const char* name, const Plan& plan, const Rule& rule) {
  INFO(name);
  const int p = world_size();
  const std::size_t steps = 12;
  const auto expected = train(plan, rule, p, steps, 0.05f);
  hd::report done;
  on_ranks(p, settings(), [&](auto& comm) {
    quadratic m;
    hd::data_parallel dp{plan, comm, m.tensors(), rule};
    for (std::size_t s = 0; s < steps; ++s) train_step(dp, m, first_sample(s, comm.rank(), p, 2), 2, 0.05f);
    dp.join();
    CHECK(m.w == expected[static_cast<std::size_t>(comm.rank())]);
    CHECK(quadratic::loss(m.w) < quadratic::loss(std::vector<float>(quadratic::count, 0.5f)));
    done = dp.report();
  });
  CHECK(done.steps == steps);
}

}  // namespace

TEST_CASE("data_parallel over mpi trains bit for bit as on threads", "[threads]") {
  same_as_threads("ring, sgd", hd::strategy{.topology = hd::ring{}}, hd::sgd{.momentum = 0.9f});
  same_as_threads("four lanes", hd::strategy{.topology = hd::ring{}, .buckets = {.first = 1, .cap = 64}, .lanes = 4},
                  hd::sgd{.momentum = 0.9f});
  same_as_threads(
      "hierarchical, float16, adamw",
      hd::strategy{.topology = hd::hierarchical{hd::ring{}, hd::ring{}}, .compressor = hd::cast<hd::float16>{}},
      hd::adamw{});
  same_as_threads("direct, dgc",
                  hd::strategy{.topology = hd::direct{}, .compressor = hd::dgc{.sparsity = 0.9, .dense_below = 500}},
                  hd::sgd{.momentum = 0.9f});
  same_as_threads("local_sgd", hd::strategy{.topology = hd::halving_doubling{}, .mode = hd::local_sgd{.period = 4}},
                  hd::sgd{});
  same_as_threads("torus_2d, zero1", hd::strategy{.topology = hd::torus_2d{}, .mode = hd::zero1{}}, hd::adamw{});
}

TEST_CASE("data_parallel over mpi through wrappers", "[threads]") {
  const auto plan = hd::strategy{.topology = hd::ring{}};
  const int p = world_size();
  const auto expected = train(plan, hd::sgd{}, p, 5, 0.05f);
  on_ranks(p, settings(), [&](auto& comm) {
    hd::counting<hd::throttled<hd::mpi::communicator>> slow(hd::throttled(comm, hd::link_cost{.alpha = 1e-5}));
    quadratic m;
    hd::data_parallel dp{plan, slow, m.tensors(), hd::sgd{}};
    for (std::size_t s = 0; s < 5; ++s) train_step(dp, m, first_sample(s, comm.rank(), p, 2), 2, 0.05f);
    CHECK(m.w == expected[static_cast<std::size_t>(comm.rank())]);
  });
}

TEST_CASE("a rank that leaves its training loop by an exception ends the others'", "[threads]") {
  const int p = world_size();
  const ended e = outcome(p, settings(), [&](auto& comm) {
    quadratic m;
    hd::data_parallel dp{hd::strategy{.topology = hd::ring{}}, comm, m.tensors(), hd::sgd{}};
    for (std::size_t s = 0; s < 20; ++s) {
      if (comm.rank() == p - 1 && s == 3) throw std::runtime_error("no such batch");
      train_step(dp, m, first_sample(s, comm.rank(), p, 2), 2, 0.05f);
    }
  });
  INFO(e.text);
  if (world_rank() == p - 1) {
    CHECK(e.text == "no such batch");
  } else {
    REQUIRE(e.error);
    CHECK(e.error->peer() == p - 1);
    CHECK(has(e.text, "left its training loop by an exception"));
  }
}

TEST_CASE("a checkpoint written over mpi is read on threads", "[threads]") {
  const int p = world_size();
  const auto plan = hd::strategy{.topology = hd::ring{}};
  const hd::sgd rule{.momentum = 0.9f};
  const auto expected = train(plan, rule, p, 8, 0.05f);
  char path[] = "/tmp/heddle-mpi-XXXXXX";
  on_ranks(p, settings(), [&](auto& comm) {
    std::string text;
    if (comm.rank() == 0) text = ::mkdtemp(path);
    hd::broadcast(comm, std::span<char>(path));
    quadratic m;
    hd::data_parallel dp{plan, comm, m.tensors(), rule};
    for (std::size_t s = 0; s < 4; ++s) train_step(dp, m, first_sample(s, comm.rank(), p, 2), 2, 0.05f);
    dp.save(path);
    if (comm.rank() == 0) {
      hd::threads::run(p, [&](auto& thread) {
        quadratic again;
        hd::data_parallel next{plan, thread, again.tensors(), rule};
        next.load(path);
        for (std::size_t s = 4; s < 8; ++s) train_step(next, again, first_sample(s, thread.rank(), p, 2), 2, 0.05f);
        RANK_CHECK(again.w == expected[static_cast<std::size_t>(thread.rank())]);
      });
      [[maybe_unused]] const int rc = std::system((std::string("rm -rf '") + path + "'").c_str());
    }
  });
}

TEST_CASE("data_parallel without a thread of its own gives the same, at any level of threads") {
  const auto plan = hd::strategy{.topology = hd::ring{}, .buckets = {.first = 1, .cap = 64}, .lanes = 2};
  const hd::sgd rule{.momentum = 0.9f};
  const auto expected = train(plan, rule, world_size(), 8, 0.05f);
  hd::mpi::options o = settings();
  o.progress = hd::progress::polled;
  on_ranks(world_size(), o, [&](auto& comm) {
    quadratic m;
    hd::counting counted(comm);  // a wrapper says the same
    CHECK(counted.progress() == hd::progress::polled);
    hd::data_parallel dp{plan, counted, m.tensors(), rule};
    for (std::size_t s = 0; s < 8; ++s) train_step(dp, m, first_sample(s, comm.rank(), comm.size(), 2), 2, 0.05f);
    CHECK(m.w == expected[static_cast<std::size_t>(comm.rank())]);
  });
}

TEST_CASE("data_parallel is refused by name where only one thread may call MPI") {
  int given = 0;
  MPI_Query_thread(&given);
  const int p = world_size();
  if (given >= MPI_THREAD_SERIALIZED || p == 1) return;
  const ended e = outcome(p, settings(), [&](auto& comm) {
    quadratic m;
    hd::data_parallel dp{hd::strategy{.topology = hd::ring{}}, comm, m.tensors(), hd::sgd{}};
    train_step(dp, m, 0, 2, 0.05f);
  });
  // Who finds out first tells the others, and they may hear of it before they try themselves.
  const bool by_name = has(e.text, std::string("MPI gives ") + name_of(static_cast<hd::mpi::thread_level>(given))) &&
                       has(e.text, "needs MPI_THREAD_SERIALIZED");
  const bool told = has(e.text, "left its training loop by an exception");
  INFO(e.text);
  CHECK((by_name || told));
  const int mine = by_name;
  int any = 0;
  MPI_Allreduce(&mine, &any, 1, MPI_INT, MPI_MAX, MPI_COMM_WORLD);
  CHECK(any == 1);
}

// example-begin train
void train_over_mpi(std::size_t steps) {
  hd::mpi::run([&](auto& comm) {  // initialises MPI if the program hasn't, and then finalises it
    quadratic model;
    hd::data_parallel dp{hd::strategy{.topology = hd::ring{}}, comm, model.tensors(), hd::sgd{.momentum = 0.9f}};
    for (std::size_t s = 0; s < steps; ++s) {
      quadratic::gradient(model.w.data(), model.g.data(), first_sample(s, comm.rank(), comm.size(), 2), 2);
      for (std::size_t i = model.sizes.size(); i-- > 0;) dp.ready(i);
      dp.step({.lr = 0.02f});
    }
    if (comm.rank() == 0) std::printf("loss %.3f, trained on %s\n", quadratic::loss(model.w), comm.host().c_str());
  });
}
// example-end

TEST_CASE("the program of docs/comm.md trains", "[threads]") {
  train_over_mpi(20);
  SUCCEED();
}

TEST_CASE("servers on mpi processes: synchronous bit for bit as on threads, and replicas that never wait",
          "[threads][multiple]") {
  const int p = world_size();
  const auto expected = train(hd::strategy{.topology = hd::native{}}, hd::sgd{}, p, 8, 0.05f);
  on_ranks(p, settings(), [&](auto& comm) {
    const auto trained = [&](const auto& mode, std::size_t steps, float lr) {
      quadratic m;
      hd::data_parallel dp{hd::strategy{.mode = mode}, comm, m.tensors(), hd::sgd{}};
      for (std::size_t s = 0; s < steps; ++s) train_step(dp, m, first_sample(s, comm.rank(), p, 2), 2, lr);
      dp.join();
      return m.w;
    };
    CHECK(trained(hd::async_ps<hd::mpi::connection>{.servers = (p + 1) / 2, .staleness = 0}, 8, 0.05f) ==
          expected[0]);
    const auto w = trained(hd::async_geo_sgd<hd::mpi::connection>{.period = 4}, 40, 0.02f / static_cast<float>(p));
    CHECK(quadratic::loss(w) < 0.3 * quadratic::loss(quadratic{}.w));
  });
}
