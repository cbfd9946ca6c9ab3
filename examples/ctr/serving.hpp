// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
//
// Training by workers with parameter servers: threads, processes over ZeroMQ, or processes over MPI.

#pragma once

#include <heddle/comm/threads_messenger.hpp>
#include <heddle/table/geo_table.hpp>
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
    // All of them before any is used: where one can't be made, no other one waits for it.
    std::vector<std::unique_ptr<hd::threads::messenger>> messengers;
    for (int r = 0; r < ranks; ++r) messengers.push_back(std::make_unique<hd::threads::messenger>(prompt(), place, r));
    {
      std::vector<std::jthread> threads;
      std::promise<void> all;  // is broken where a thread can't be started: then no other one waits for it
      const std::shared_future<void> start = all.get_future().share();
      for (int r = 0; r < ranks; ++r) {
        threads.emplace_back([&, start, r] {
          try {
            start.get();
            const auto m = std::move(messengers[static_cast<std::size_t>(r)]);  // says goodbye when this ends
            f(r, *m);
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
    std::atomic<std::uint64_t>* const all[] = {&m.rows,          &m.pushes,  &m.sent_bytes,
                                               &m.sent_messages, &m.counted, &m.staleness};
    for (auto* const count : all) {
      std::uint64_t mine = *count, sum = 0;
      MPI_Allreduce(&mine, &sum, 1, MPI_UINT64_T, MPI_SUM, MPI_COMM_WORLD);
      *count = sum;
    }
    double mine[] = {m.seconds, static_cast<double>(m.most)}, longest[2] = {};
    MPI_Allreduce(mine, longest, 2, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
    m.seconds = longest[0];
    m.most = static_cast<std::uint64_t>(longest[1]);
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
      for (auto& p : all) busy = (p && !p->ended()) || busy;
      if (o.kill_worker_at != 0 && all.back() && m.pushes >= o.kill_worker_at && !all.back()->ended()) {
        all.back().reset();
        std::printf("worker %zu killed after %zu pushes, %zu of its own\n", o.workers - 1, o.kill_worker_at,
                    static_cast<std::size_t>(m.steps[o.workers - 1]));
        std::fflush(stdout);
      }
      if (o.kill_at != 0 && then.empty() && m.pushes >= o.kill_at && !all[0]->ended()) {
        all[0].reset();
        killed = clock::now();
        for (std::size_t w = 0; w < o.workers; ++w) then.push_back(m.steps[w]);
        start(0);
        waiting = true;
      }
      // A step may have had its answers before. A later one needs the server.
      for (std::size_t w = 0; waiting && w < o.workers; ++w) {
        auto& p = all[o.servers + w];
        if (m.steps[w] < then[w] + 2 && p && !p->ended()) break;
        if (w + 1 < o.workers) continue;
        std::printf("server 0 killed after %zu pushes; all workers at work again after %.3f s\n", o.kill_at,
                    since(killed));
        std::fflush(stdout);
        waiting = false;
      }
    }
    if (o.kill_worker_at != 0 && all.back())
      throw usage_error("--kill-worker-at " + std::to_string(o.kill_worker_at) + " was not reached: there were " +
                        std::to_string(m.pushes) + " pushes");
    if (o.kill_at != 0 && then.empty())
      throw usage_error("--kill-server-at " + std::to_string(o.kill_at) + " was not reached: there were " +
                        std::to_string(m.pushes) + " pushes");
    return true;
  }
};
#endif
/// @}

/// A worker's view of the table: a sharded_table, or the replica of geo_sgd.
template <class Table, class Messenger>
auto store_of(const options& o, Messenger& messenger, const hd::worker_options& wo) {
  using key = typename Table::key_type;
  using row = typename Table::row_type;
  if constexpr (std::is_same_v<Table, table_of_sums<Table::dim - 1>>)
    return hd::geo_table<key, row, hd::rule::adagrad, beginning, Messenger>(
        settings_of<Table>(o), {}, messenger, wo, {.workers = static_cast<int>(o.workers), .period = o.period});
  else
    return hd::sharded_table<Table, Messenger>(settings_of<Table>(o), messenger, wo);
}

/// Trains on a worker's share of the rows, behind what has been pushed of it.
template <std::size_t Factors, class Store, class Messenger>
void work(const options& o, const data_set& d, std::size_t share_of, bool prints, std::size_t done, Store& store,
          Messenger& messenger, meters& m) {
  trainee<Factors, Store> mine(o, d, store);
  const auto training = d.open(true, {.rank = share_of,
                                      .ranks = o.workers,
                                      .epochs = o.epochs,
                                      .first_epoch = done,
                                      .shuffle = 1 << 16,
                                      .batch = o.batch});
  const auto sent = messenger.counts();
  progress line;
  double seconds = 0.0;
  std::uint64_t batches = 0;
  for (std::size_t epoch = done + 1; epoch <= done + o.epochs; ++epoch) {
    const auto start = clock::now();
    const std::uint64_t before = m.rows;
    double sum = 0.0, count = 0.0;
    for (rows r; training->pop(0, r);) {
      if (batches++ < store.pushed_before()) continue;
      sum += mine.learn(r, m);
      count += static_cast<double>(r.size());
      m.steps[share_of].fetch_add(1, std::memory_order_relaxed);
      if (prints) line.tell(epoch, sum / count, m);
    }
    const double now = since(start);
    seconds += now;
    if (!prints) continue;
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
  m.batches += batches;
  store.finish();
}

/// A worker: its share of the rows, and then those of workers that have died, where the others take these over.
template <std::size_t Factors, class Table, class Messenger>
void work_all(const options& o, const data_set& d, std::size_t worker, std::size_t done, Messenger& messenger,
              meters& m) {
  hd::worker_options wo;
  wo.servers = static_cast<int>(o.servers);
  wo.gather = o.gather;
  wo.half = o.half;
  wo.retry = std::chrono::milliseconds(20);
  for (int share_of = static_cast<int>(worker); share_of >= 0;) {
    auto store = store_of<Table>(o, messenger, wo);
    const auto number = static_cast<std::size_t>(share_of);
    work<Factors>(o, d, number, worker == 0 && number == 0, done, store, messenger, m);
    share_of = -1;
    if constexpr (requires { store.next_orphan(); })
      if (o.on_death == "reassign") share_of = store.next_orphan();
    if (share_of >= 0) std::printf("worker %zu takes over the rows of worker %d\n", worker, share_of);
    wo.stands_for = share_of;
    wo.resumes = true;
  }
}

/// Trains by servers and workers, and loads what the servers have saved into `table`. Returns whether this process
/// tells the result.
/// @param parts What the servers' files are called, but for a number. @param done Epochs that are in what is resumed.
template <std::size_t Factors, class Table, class Transport>
bool train_served(const options& o, const data_set& d, bool ordered, std::size_t done, Table& table,
                  const std::string& parts, const folder& dir, meters& m, const Transport& transport) {
  std::vector<std::string> files;
  for (std::size_t s = 0; s < o.servers; ++s) files.push_back(parts + std::to_string(s));
  const bool tells = transport.run(o, dir, m, [&](int rank, auto& messenger) {
    const auto r = static_cast<std::size_t>(rank);
    if (r >= o.servers) return work_all<Factors, Table>(o, d, r - o.servers, done, messenger, m);
    Table mine(hd::settings_of_server(table.options(), rank, static_cast<int>(o.servers)));
    if (!o.resume.empty() && access(files[r].c_str(), F_OK) != 0) {
      mine.load(o.resume);
      mine.forget_sequences();  // these workers count from 1
    }
    hd::server_options so;
    so.servers = static_cast<int>(o.servers);
    so.workers = static_cast<int>(o.workers);
    if (ordered || o.staleness != 0) so.staleness = ordered ? 0 : o.staleness;
    so.ordered = ordered;
    if (o.on_death == "reassign") so.on_death = hd::worker_death::reassign;
    so.path = files[r];
    so.save_every = o.save_every;
    so.join = std::chrono::seconds(20);  // less than workers wait, who may wait for one that died unknown to this life
    hd::table_server server(mine, messenger, so);
    server.run();
    const hd::table_staleness& s = server.staleness();
    m.note_staleness(s.pushes, s.sum, s.most);
    for (std::size_t w = 0; r == 0 && w < o.workers; ++w) m.applied += server.applied(static_cast<int>(w)) - 1;
  });
  if (tells) table.load(files);
  return tells;
}

}  // namespace ctr
