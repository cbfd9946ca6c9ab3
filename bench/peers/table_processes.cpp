// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0

// bench/table.sh runs this under mpirun: table_processes SERVERS. Workers pull batches of 1,024 rows of 16 floats, keys
// Zipf 1.05 over 1 M, and push gradients; once each batch for itself, once with four batches gathered.
#include <heddle/comm/mpi_messenger.hpp>
#include <heddle/table/sharded_table.hpp>
#include <heddle/table/table_server.hpp>

#include <cmath>
#include <cstdio>
#include <cstdlib>

namespace hd = heddle;

namespace {
constexpr std::size_t dim = 16, batch = 1024;
constexpr int steps = 200;
using table_type = hd::sparse_table<std::uint64_t, hd::row<dim>, hd::rule::row_adagrad>;

struct figures {
  double rows_per_second = 0, bytes = 0, messages = 0;  // sent by a worker, per row pushed
};

figures run(int servers, std::size_t gather) {
  const table_type::settings how{.seed = 1};
  int rank, size;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  figures f;
  double elapsed = 0, counts[2] = {};
  {
    hd::mpi::messenger m({}, MPI_COMM_WORLD);
    if (rank < servers) {
      table_type part(hd::settings_of_server(how, rank, servers));
      hd::table_server server(part, m, {.servers = servers, .workers = size - servers});
      server.run();
    } else {
      hd::worker_options o;
      o.servers = servers;
      o.gather = gather;
      hd::sharded_table<table_type, hd::mpi::messenger> t(how, m, o);
      std::vector<std::uint64_t> keys(batch);
      std::vector<float> rows(batch * dim);
      const double tail = std::pow(1e6, -0.05);
      const auto start = std::chrono::steady_clock::now();
      const auto before = m.counts();
      for (int s = 0; s < steps; ++s) {
        for (std::size_t i = 0; i < batch; ++i) {
          const auto b = hd::philox(5, static_cast<std::uint64_t>(rank * steps + s), i);
          keys[i] = static_cast<std::uint64_t>(std::pow(tail + (b.word[0] + 1.0) * 0x1p-32 * (1 - tail), -20.0));
        }
        if (gather == 0) t.pull(keys, rows);  // a pull would send what was gathered
        t.push(keys, rows, {.lr = 0.01f});
      }
      t.flush();
      elapsed = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
      const auto after = m.counts();
      counts[0] = static_cast<double>(after.bytes_sent - before.bytes_sent);
      counts[1] = static_cast<double>(after.messages_sent - before.messages_sent);
      t.finish();
    }
  }
  double longest = 0, sums[2] = {};
  MPI_Allreduce(&elapsed, &longest, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
  MPI_Allreduce(counts, sums, 2, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
  const double rows = static_cast<double>(size - servers) * steps * static_cast<double>(batch);
  f.rows_per_second = rows / longest;
  f.bytes = sums[0] / rows;
  f.messages = sums[1] / rows;
  return f;
}
}  // namespace

int main(int argc, char** argv) {
  int provided = 0, rank, size;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &provided);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  const int servers = argc > 1 ? std::atoi(argv[1]) : 1;
  const figures each = run(servers, 0), one = run(servers, 1), four = run(servers, 4 * batch);
  if (rank == 0) {
    const int workers = size - servers;
    std::printf("server.%d+%d: %.0f rows/s pulled and pushed, %.0f pushed\n", servers, workers, each.rows_per_second,
                one.rows_per_second);
    // The floor is what travels without merging: key and gradient of each row, a message per batch and server.
    std::printf("RATIO server.%d+%d.bytes %.1f %.1f bytes/row %.3f\n", servers, workers, four.bytes, 8.0 + 4.0 * dim,
                (8.0 + 4.0 * dim) / four.bytes);
    std::printf("RATIO server.%d+%d.messages %.5f %.5f messages/row %.3f\n", servers, workers, four.messages,
                one.messages, one.messages / four.messages);
  }
  MPI_Finalize();
  return 0;
}
