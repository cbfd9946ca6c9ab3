// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
//
// Training by workers with parameter servers: threads, processes over ZeroMQ, or processes over MPI.

#pragma once

#include <heddle/comm/threads_messenger.hpp>
#include <heddle/table/sharded_table.hpp>
#include <heddle/table/table_server.hpp>
#if defined(CTR_MPI)
#include <heddle/comm/mpi_messenger.hpp>
#elif defined(CTR_ZMQ)
#include <heddle/comm/zmq.hpp>

#include <sys/prctl.h>
#include <sys/wait.h>

#include <csignal>
#endif

#include <dirent.h>

#include <cstdlib>
#include <future>
#include <mutex>
#include <optional>

#include "training.hpp"

namespace ctr {

/// A folder that goes away with what is in it.
class folder {
 public:
  folder() {
    if (!mkdtemp(path_)) throw hd::file_error("no folder can be made in /tmp");
  }
  folder(const folder&) = delete;
  folder& operator=(const folder&) = delete;
  ~folder() {
    if (DIR* const all = opendir(path_)) {
      while (const dirent* const e = readdir(all)) unlink(file(e->d_name).c_str());
      closedir(all);
    }
    rmdir(path_);
  }
  std::string file(const std::string& name) const { return std::string(path_) + "/" + name; }

 private:
  char path_[32] = "/tmp/heddle_ctr_XXXXXX";
};

inline hd::messenger_options prompt() {
  hd::messenger_options o;
  o.beat = std::chrono::milliseconds(50);
  return o;
}

/// @name What servers and workers are. run(f) calls f(rank, messenger) for each; true where the result is to be told.
/// @{

struct as_threads {
  template <class Function> bool run(const options& o, const folder&, meters&, Function f) const {
    const auto ranks = static_cast<int>(o.servers + o.workers);
    const hd::threads::meeting_place place(ranks);
    std::mutex mutex;
    std::exception_ptr failure;
    {
      std::vector<std::jthread> threads;
      std::promise<void> all;  // is broken where a thread can't be started: then no other one waits for it
      const std::shared_future<void> start = all.get_future().share();
      for (int r = 0; r < ranks; ++r) {
        threads.emplace_back([&, start, r] {
          try {
            start.get();
            hd::threads::messenger m(prompt(), place, r);
            f(r, m);
          } catch (...) {
            const std::lock_guard lock(mutex);
            if (!failure) failure = std::current_exception();
          }
        });
      }
      all.set_value();
    }
    if (failure) std::rethrow_exception(failure);
    return true;
  }
};

#if defined(CTR_MPI)
struct as_mpi {
  template <class Function> bool run(const options& o, const folder&, meters& m, Function f) const {
    int rank = 0;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    {
      hd::mpi::messenger messenger(prompt(), MPI_COMM_WORLD);
      f(rank, messenger);
    }
    std::uint64_t counts[] = {m.rows, m.pushes, m.sent_bytes, m.sent_messages}, sums[4] = {};
    MPI_Allreduce(counts, sums, 4, MPI_UINT64_T, MPI_SUM, MPI_COMM_WORLD);
    m.rows = sums[0], m.pushes = sums[1], m.sent_bytes = sums[2], m.sent_messages = sums[3];
    double mine = m.seconds, longest = 0.0;
    MPI_Allreduce(&mine, &longest, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
    m.seconds = longest;
    return rank == static_cast<int>(o.servers);
  }
};
#elif defined(CTR_ZMQ)
/// A process that runs f and ends; it is killed with this one, and when this goes away.
class process {
 public:
  template <class Function> explicit process(Function f) {
    const pid_t parent = getpid();
    std::fflush(stdout);
    pid_ = fork();
    if (pid_ < 0) throw std::runtime_error("no process can be started");
    if (pid_ > 0) return;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(3);
    try {
      f();
      std::fflush(stdout);
      _exit(0);
    } catch (const std::exception& e) {
      std::fprintf(stderr, "ctr: %s\n", e.what());
    }
    _exit(1);
  }
  process(const process&) = delete;
  process& operator=(const process&) = delete;
  ~process() {
    if (pid_ <= 0) return;
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  /// Whether it has ended. Throws: runtime_error if it has failed.
  bool ended() {
    int status = 0;
    if (pid_ > 0 && waitpid(pid_, &status, WNOHANG) == pid_) {
      pid_ = 0;
      if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) throw std::runtime_error("a server or a worker has failed");
    }
    return pid_ == 0;
  }

 private:
  pid_t pid_ = 0;
};

struct as_processes {
  template <class Function> bool run(const options& o, const folder& dir, meters& m, Function f) const {
    std::vector<std::string> addresses;
    for (std::size_t r = 0; r < o.servers + o.workers; ++r) addresses.push_back("ipc://" + dir.file(std::to_string(r)));
    std::vector<std::optional<process>> all(addresses.size());
    const auto start = [&](std::size_t r) {
      all[r].emplace([&] {
        hd::zmq::messenger messenger(prompt(), static_cast<int>(r), addresses);
        f(static_cast<int>(r), messenger);
      });
    };
    for (std::size_t r = 0; r < all.size(); ++r) start(r);
    clock::time_point killed;
    std::vector<std::uint64_t> then;  // steps of the workers when the server was killed
    bool waiting = false;
    for (bool busy = true; busy;) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      busy = false;
      for (auto& p : all) busy = !p->ended() || busy;
      if (o.kill_at != 0 && then.empty() && m.pushes >= o.kill_at && !all[0]->ended()) {
        all[0].reset();
        killed = clock::now();
        for (std::size_t w = 0; w < o.workers; ++w) then.push_back(m.steps[w]);
        start(0);
        waiting = true;
      }
      // A step may have had its answers before. A later one needs the server.
      for (std::size_t w = 0; waiting && w < o.workers; ++w) {
        if (m.steps[w] < then[w] + 2 && !all[o.servers + w]->ended()) break;
        if (w + 1 < o.workers) continue;
        std::printf("server 0 killed after %zu pushes; all workers at work again after %.3f s\n", o.kill_at,
                    since(killed));
        std::fflush(stdout);
        waiting = false;
      }
    }
    if (o.kill_at != 0 && then.empty())
      throw usage_error("--kill-server-at " + std::to_string(o.kill_at) + " was not reached: there were " +
                        std::to_string(m.pushes) + " pushes");
    return true;
  }
};
#endif
/// @}

/// A worker: its part of the rows, and pushes to the servers.
template <std::size_t Factors, class Messenger>
void work(const options& o, const data_set& d, std::size_t worker, std::size_t done, Messenger& messenger, meters& m) {
  using table = table_of_rows<Factors>;
  hd::worker_options wo;
  wo.servers = static_cast<int>(o.servers);
  wo.gather = o.gather;
  wo.half = o.half;
  wo.retry = std::chrono::milliseconds(20);
  hd::sharded_table<table, Messenger> store(settings_of<table>(o), messenger, wo);
  trainee<Factors, decltype(store)> mine(o, d, store);
  const auto training = d.open(true, {.rank = worker,
                                      .ranks = o.workers,
                                      .epochs = o.epochs,
                                      .first_epoch = done,
                                      .shuffle = 1 << 16,
                                      .batch = o.batch});
  const auto sent = messenger.counts();
  progress line;
  double seconds = 0.0;
  for (std::size_t epoch = done + 1; epoch <= done + o.epochs; ++epoch) {
    const auto start = clock::now();
    const std::uint64_t before = m.rows;
    double sum = 0.0, count = 0.0;
    for (rows r; training->pop(0, r);) {
      sum += mine.learn(r, m);
      count += static_cast<double>(r.size());
      m.steps[worker].fetch_add(1, std::memory_order_relaxed);
      if (worker == 0) line.tell(epoch, sum / count, m);
    }
    const double now = since(start);
    seconds += now;
    if (worker != 0) continue;
    line.clear();
    const point p{static_cast<double>(epoch), seconds, static_cast<double>(m.rows - before) / now,
                  sum / std::max(count, 1.0), mine.judge(d)};
    print(p);
    m.add(p);
  }
  const auto end = clock::now();
  store.flush();
  meters::raise(m.seconds, seconds + since(end));
  const auto all = messenger.counts();
  m.sent_bytes += all.bytes_sent - sent.bytes_sent;
  m.sent_messages += all.messages_sent - sent.messages_sent;
  store.finish();
}

/// Trains by servers and workers, and loads what the servers have saved into `table`. Returns whether this process
/// tells the result.
/// @param path What to resume from, or nothing. @param done Epochs that are in it.
template <std::size_t Factors, class Transport>
bool train_served(const options& o, const data_set& d, bool ordered, std::size_t done, table_of_rows<Factors>& table,
                  const std::string& parts, const folder& dir, meters& m, const Transport& transport) {
  using part = table_of_rows<Factors>;
  std::vector<std::string> files;
  for (std::size_t s = 0; s < o.servers; ++s) files.push_back(parts + std::to_string(s));
  const bool tells = transport.run(o, dir, m, [&](int rank, auto& messenger) {
    const auto r = static_cast<std::size_t>(rank);
    if (r >= o.servers) return work<Factors>(o, d, r - o.servers, done, messenger, m);
    part mine(hd::settings_of_server(table.options(), rank, static_cast<int>(o.servers)));
    if (!o.resume.empty() && access(files[r].c_str(), F_OK) != 0) mine.load(o.resume);
    hd::server_options so;
    so.servers = static_cast<int>(o.servers);
    so.workers = static_cast<int>(o.workers);
    if (ordered || o.staleness != 0) so.staleness = ordered ? 0 : o.staleness;
    so.ordered = ordered;
    so.path = files[r];
    so.save_every = o.save_every;
    hd::table_server server(mine, messenger, so);
    server.run();
  });
  if (tells) table.load(files);
  return tells;
}

}  // namespace ctr
