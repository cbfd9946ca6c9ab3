// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
//
// Messengers between processes against loops of MPI's and ZeroMQ's own calls: all other ranks send to rank 0, which
// takes whatever comes. bench/messenger.sh starts it under mpirun: messenger_processes FOLDER [REPETITIONS]
// All contenders take turns in one run. A sender fills each message, the receiver looks at its first byte; a time is
// the receiver's, from a barrier to the last message. Medians are compared.
#include <heddle/comm/mpi_messenger.hpp>
#include <heddle/comm/zmq.hpp>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

namespace hd = heddle;

namespace {
struct contender {
  std::string name;
  std::function<void(std::size_t bytes, std::size_t count)> send;
  std::function<void(std::size_t bytes, std::size_t count)> receive;
  std::vector<double> seconds;
  double median() {
    std::sort(seconds.begin(), seconds.end());
    return seconds[seconds.size() / 2];
  }
};

int failures = 0;
void look(const void* data) {
  if (*static_cast<const char*>(data) != 'x') ++failures;
}

template <class M> contender ours(const std::string& name, M& m) {
  return {name,
          [&m](std::size_t bytes, std::size_t count) {
            for (std::size_t i = 0; i < count; ++i) {
              hd::payload p(bytes);
              std::memset(p.data(), 'x', bytes);
              m.send(0, 1, i, std::move(p));
            }
          },
          [&m](std::size_t, std::size_t count) {
            while (count > 0) {
              const auto got = m.receive(std::chrono::seconds(60));
              if (!got) MPI_Abort(MPI_COMM_WORLD, 1);
              if (got->kind != hd::message_kind::data) continue;
              look(got->body.data());
              --count;
            }
          },
          {}};
}

// Messages of ZeroMQ's, as ps-lite exchanges them (DEALER to ROUTER), or without a router's identity frame.
contender raw_zmq(const std::string& name, void* context, int to, int from, const std::string& address, bool receiver) {
  void* const s = zmq_socket(context, receiver ? from : to);
  if (receiver ? zmq_bind(s, address.c_str()) : zmq_connect(s, address.c_str())) std::perror(address.c_str());
  return {name,
          [s](std::size_t bytes, std::size_t count) {
            for (std::size_t i = 0; i < count; ++i) {
              zmq_msg_t m;
              zmq_msg_init_size(&m, bytes);
              std::memset(zmq_msg_data(&m), 'x', bytes);
              zmq_msg_send(&m, s, 0);
            }
          },
          [s, from](std::size_t, std::size_t count) {
            for (; count > 0; --count) {
              zmq_msg_t m;
              zmq_msg_init(&m);
              if (from == ZMQ_ROUTER) zmq_msg_recv(&m, s, 0);
              zmq_msg_recv(&m, s, 0);
              look(zmq_msg_data(&m));
              zmq_msg_close(&m);
            }
          },
          {}};
}

contender raw_mpi() {
  auto buffer = std::make_shared<std::vector<char>>(std::size_t{1} << 20);
  return {"mpi.raw",
          [buffer](std::size_t bytes, std::size_t count) {
            for (std::size_t i = 0; i < count; ++i) {
              std::memset(buffer->data(), 'x', bytes);
              MPI_Send(buffer->data(), static_cast<int>(bytes), MPI_BYTE, 0, 1, MPI_COMM_WORLD);
            }
          },
          [buffer](std::size_t bytes, std::size_t count) {
            for (; count > 0; --count) {
              MPI_Recv(buffer->data(), static_cast<int>(bytes), MPI_BYTE, MPI_ANY_SOURCE, 1, MPI_COMM_WORLD,
                       MPI_STATUS_IGNORE);
              look(buffer->data());
            }
          },
          {}};
}
}  // namespace

int main(int argc, char** argv) {
  int level = 0, rank = 0, size = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &level);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  const std::string folder = argc > 1 ? argv[1] : "/tmp";
  const int repetitions = argc > 2 ? std::atoi(argv[2]) : 7;
  {
    hd::messenger_options o;
    o.silence = std::chrono::hours(1);  // contenders that don't have their turn aren't dead
    o.thread = false;
    hd::mpi::messenger by_mpi(o, MPI_COMM_WORLD);
    o.thread = true;
    const auto addresses = [&](const std::string& kind) {
      std::vector<std::string> a(static_cast<std::size_t>(size));
      a[0] = kind == "tcp" ? "tcp://127.0.0.1:47110" : "ipc://" + folder + "/ours";
      if (rank)
        a[static_cast<std::size_t>(rank)] =
            kind == "tcp" ? "tcp://127.0.0.1:*" : "ipc://" + folder + "/" + std::to_string(rank);
      return a;
    };
    hd::zmq::messenger by_ipc(o, rank, addresses("ipc")), by_tcp(o, rank, addresses("tcp"));
    void* const context = zmq_ctx_new();
    std::vector<contender> all;
    const bool takes = rank == 0;
    all.push_back(ours("mpi", by_mpi));
    all.push_back(raw_mpi());
    all.push_back(ours("zmq.ipc", by_ipc));
    all.push_back(raw_zmq("zmq.ipc.raw", context, ZMQ_PUSH, ZMQ_PULL, "ipc://" + folder + "/raw", takes));
    all.push_back(raw_zmq("zmq.ipc.router", context, ZMQ_DEALER, ZMQ_ROUTER, "ipc://" + folder + "/router", takes));
    all.push_back(ours("zmq.tcp", by_tcp));
    all.push_back(raw_zmq("zmq.tcp.raw", context, ZMQ_PUSH, ZMQ_PULL, "tcp://127.0.0.1:47111", takes));
    for (const std::size_t bytes :
         {std::size_t{64}, std::size_t{4} << 10, std::size_t{64} << 10, std::size_t{1} << 20}) {
      const std::size_t count = (bytes <= 4096    ? 60'000
                                 : bytes <= 65536 ? 4'000
                                                  : 300) /
                                static_cast<std::size_t>(size - 1);
      for (contender& c : all) c.seconds.clear();
      for (int i = 0; i <= repetitions; ++i) {
        for (contender& c : all) {
          const std::size_t n = i ? count : 1;
          MPI_Barrier(MPI_COMM_WORLD);
          const double start = MPI_Wtime();
          if (rank)
            c.send(bytes, n);
          else
            c.receive(bytes, n * static_cast<std::size_t>(size - 1));
          if (i) c.seconds.push_back(MPI_Wtime() - start);
          MPI_Barrier(MPI_COMM_WORLD);
        }
      }
      if (rank) continue;
      const double messages = static_cast<double>(count) * (size - 1);
      const std::string where = "." + std::to_string(size - 1) + "-1." +
                                (bytes < 1024        ? std::to_string(bytes)
                                 : bytes < (1 << 20) ? std::to_string(bytes >> 10) + "K"
                                                     : "1M");
      const auto rate = [&](const char* name) {
        for (contender& c : all) {
          if (c.name == name)
            return bytes > 4096 ? messages * static_cast<double>(bytes) / c.median() / 1e6 : messages / c.median();
        }
        return 0.0;
      };
      const char* const unit = bytes > 4096 ? "MB/s" : "messages/s";
      for (const auto& [name, peer] : {std::pair("mpi", "mpi.raw"),
                                       {"zmq.ipc", "zmq.ipc.raw"},
                                       {"zmq.ipc", "zmq.ipc.router"},
                                       {"zmq.tcp", "zmq.tcp.raw"}}) {
        const bool router = std::string(peer).ends_with("router");
        std::printf("RATIO %s%s%s %.6g %.6g %s %.3f\n", name, where.c_str(), router ? ".router" : "", rate(name),
                    rate(peer), unit, rate(name) / rate(peer));
      }
      std::fflush(stdout);
    }
    MPI_Barrier(MPI_COMM_WORLD);
  }
  if (failures) std::printf("%d wrong messages\n", failures);
  MPI_Finalize();
  return failures != 0;
}
