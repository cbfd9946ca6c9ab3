// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
//
// Predicts clicks: logistic regression, a factorisation machine or a wide and deep network over a sparse table, trained
// by threads that share it or by workers with parameter servers.

#include <sys/resource.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <tuple>

#include "drawing.hpp"
#include "serving.hpp"

namespace {

using namespace ctr;

/// What a mode is given, and what it leaves.
struct job {
  const options& o;
  const data_set& data;
  meters& measured;
};

/// Says how good the table is and what it takes. Returns whether what was asked for is met.
template <std::size_t Factors, class Table> bool tell(const job& j, Table& table, std::size_t epochs) {
  const options& o = j.o;
  const meters& m = j.measured;
  const score s = trainee<Factors, Table>(o, j.data, table).judge(j.data);
  const double rows = static_cast<double>(m.rows.load());
  std::printf(
      "%s on %s, %s: AUC %.5f, log loss %.5f, accuracy %.3f %% of %zu rows; %.0f rows/s; table %zu rows, %.1f MB, "
      "checksum "
      "%016llx\n",
      o.model.c_str(), o.data.c_str(), o.mode.c_str(), s.auc, s.loss, 100.0 * s.accuracy, s.rows,
      rows / std::max(m.seconds.load(), 1e-9), table.size(), static_cast<double>(table.bytes()) * 1e-6,
      static_cast<unsigned long long>(table.checksum()));
  if (o.mode == "sync")
    std::printf("staleness: none, a step's pushes take effect together\n");
  else if (m.counted > 0)
    std::printf("staleness: %.2f pushes of others on average between a pull and its push, %zu at most\n",
                static_cast<double>(m.staleness) / static_cast<double>(m.counted), static_cast<std::size_t>(m.most));
  if (o.on_death == "reassign") {
    std::printf("of %zu batches %zu were pushed, each once\n", static_cast<std::size_t>(m.batches),
                static_cast<std::size_t>(m.applied));
    if (m.batches != m.applied) throw std::runtime_error("batches were lost, or pushed twice");
  }
  if (m.sent_bytes > 0)
    std::printf("workers sent %.1f bytes and %.5f messages a row\n", static_cast<double>(m.sent_bytes) / rows,
                static_cast<double>(m.sent_messages) / rows);
  if (!o.output.empty()) table.export_text(o.output);
  if (!o.save.empty() && o.mode != "hogwild") save(table, o.save, epochs);
  if (!o.curve.empty()) {
    std::ofstream file(o.curve);
    file << drawn({m.curve, m.curve + m.points}, o.model + " on " + o.data + ", " + o.mode);
    if (!file.flush()) throw hd::file_error("cannot write " + o.curve);
  }
  const bool met = s.auc >= o.least_auc && 100.0 * s.accuracy >= o.least_accuracy;
  if (o.least_auc > 0.0 || o.least_accuracy > 0.0)
    std::printf("asked for AUC %g and accuracy %g %%: %s\n", o.least_auc, o.least_accuracy, met ? "met" : "MISSED");
  return met;
}

/// Threads share a table, which may be bounded.
struct hogwild_mode {
  const char* name;

  template <std::size_t Factors> bool run(const job& j) const {
    const options& o = j.o;
    const options standard;
    for (const auto& [option, given] : {std::pair{"over", o.over != standard.over},
                                        {"servers", o.servers != standard.servers},
                                        {"workers", o.workers != standard.workers},
                                        {"staleness", o.staleness != standard.staleness},
                                        {"gather", o.gather != standard.gather},
                                        {"half", o.half},
                                        {"period", o.period != standard.period},
                                        {"on-death", o.on_death != standard.on_death},
                                        {"kill-server-at", o.kill_at != 0},
                                        {"kill-worker-at", o.kill_worker_at != 0},
                                        {"save-every", o.save_every != standard.save_every}})
      if (given) throw usage_error(std::string("--") + option + " needs servers: --mode async_ps, sync or geo_sgd");
    if (o.memory == 0) {
      table_of_rows<Factors> table(settings_of<table_of_rows<Factors>>(o));
      return train<Factors>(j, table);
    }
    using bounded = table_of_rows<Factors, hd::admit::counting_bloom, hd::evict::lfu>;
    auto how = settings_of<bounded>(o);
    how.admission.n = static_cast<std::uint32_t>(o.sightings);
    how.admission.cells = o.cells << 20;
    how.eviction.bytes = o.memory << 20;
    bounded table(how);
    const bool met = train<Factors>(j, table);
    const hd::table_counts c = table.counts();
    // Refusals are at least as many as distinct refused keys.
    const double cells = static_cast<double>(o.cells << 20), u = static_cast<double>(c.refused);
    std::printf("%zu rows made, %zu dropped; %zu sightings refused: of new keys at most %.3g %% got a row early\n",
                static_cast<std::size_t>(c.created), static_cast<std::size_t>(c.evicted),
                static_cast<std::size_t>(c.refused), 100.0 * std::pow(1.0 - std::exp(-4.0 * u / cells), 4.0));
    rusage used{};
    getrusage(RUSAGE_SELF, &used);
    std::printf("the process had %.1f MB at most\n", static_cast<double>(used.ru_maxrss) * 1024e-6);
    return met;
  }

 private:
  template <std::size_t Factors, class Table> static bool train(const job& j, Table& table) {
    const std::size_t done = j.o.resume.empty() ? 0 : resume(table, j.o.resume);
    print_head();
    train_shared<Factors>(j.o, j.data, table, done, j.measured);
    return tell<Factors>(j, table, done + j.o.epochs);
  }
};

/// Workers with parameter servers.
struct served_mode {
  const char* name;
  bool ordered = false, replicas = false;

  template <std::size_t Factors> bool run(const job& j) const {
    check(j.o);
    return replicas ? train<Factors, table_of_sums<Factors>>(j) : train<Factors, table_of_rows<Factors>>(j);
  }

 private:
  void check(const options& o) const {
    if (o.memory != 0) throw usage_error("--memory goes with --mode hogwild");
    if ((ordered || replicas) && (o.gather != 0 || o.staleness != 0))
      throw usage_error("--gather and --staleness go with --mode async_ps");
    if (o.staleness != 0 && o.gather != 0) throw usage_error("--staleness and --gather exclude each other");
    if (!replicas && o.period != options{}.period) throw usage_error("--period goes with --mode geo_sgd");
    if (o.on_death != "report" && o.on_death != "reassign")
      throw usage_error("--on-death is '" + o.on_death + "', allowed are report, reassign");
    if (o.on_death == "reassign" && (replicas || o.gather != 0))
      throw usage_error("--on-death reassign needs a push a batch: not with --mode geo_sgd or --gather");
    if (o.kill_worker_at != 0 && o.workers == 1)
      throw usage_error("--kill-worker-at needs another worker, which goes on: --workers 2");
    if ((o.kill_at != 0 || o.kill_worker_at != 0) && o.over != "processes")
      throw usage_error("--kill-server-at and --kill-worker-at kill a process: --over processes");
    if (o.over == "mpi" && o.on_death != "report")
      throw usage_error("--on-death reassign isn't for MPI, which ends the job with a process");
  }

  template <std::size_t Factors, class Table> bool train(const job& j) const {
    const options& o = j.o;
    Table table(settings_of<Table>(o));
    const std::size_t done = o.resume.empty() ? 0 : resume(table, o.resume);
    const folder dir;
    bool tells;
#if defined(CTR_MPI)
    int rank = 0, ranks = 0;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    if (static_cast<std::size_t>(ranks) != o.servers + o.workers)
      throw usage_error(std::to_string(o.servers) + " servers and " + std::to_string(o.workers) + " workers are not " +
                        std::to_string(ranks) + " processes");
    std::string parts = dir.file("part-");  // where the first process says
    parts.resize(64, '\0');
    MPI_Bcast(parts.data(), 64, MPI_CHAR, 0, MPI_COMM_WORLD);
    parts = parts.c_str();
    if (rank == static_cast<int>(o.servers)) print_head();
    tells = train_served<Factors>(o, j.data, ordered, done, table, parts, dir, j.measured, as_mpi{});
    const bool met = !tells || tell<Factors>(j, table, done + o.epochs);
    MPI_Barrier(MPI_COMM_WORLD);  // the files go away with the first process's folder
    return met;
#else
    print_head();
    const std::string parts = dir.file("part-");
    if (o.over == "threads") {
      tells = train_served<Factors>(o, j.data, ordered, done, table, parts, dir, j.measured, as_threads{});
    } else {
#if defined(CTR_ZMQ)
      tells = train_served<Factors>(o, j.data, ordered, done, table, parts, dir, j.measured, as_processes{});
#else
      throw usage_error("--over processes needs ZeroMQ, which wasn't found when this was built (libzmq3-dev)");
#endif
    }
    return !tells || tell<Factors>(j, table, done + o.epochs);
#endif
  }
};

// One more mode is one more entry: a name and run<Factors>(job).
constexpr std::tuple modes{hogwild_mode{"hogwild"}, served_mode{"async_ps"},
                           served_mode{.name = "sync", .ordered = true},
                           served_mode{.name = "geo_sgd", .replicas = true}};

template <std::size_t Factors> bool run(const options& o, const data_set& data, meters& m) {
  bool found = false, met = false;
  std::string names;
  std::apply(
      [&](const auto&... mode) {
        ((names += std::string(names.empty() ? "" : ", ") + mode.name,
          o.mode == mode.name ? (found = true, met = mode.template run<Factors>(job{o, data, m})) : false),
         ...);
      },
      modes);
  if (!found) throw usage_error("--mode is '" + o.mode + "', allowed are " + names);
  return met;
}

/// What would else be found at the end alone: files without a row, and places where nothing can be written.
void check_files(const options& o, const data_set& data) {
  for (const bool training : {true, false}) {
    rows first;
    if (!data.open(training, {})->pop(0, first)) throw hd::file_error((training ? o.data : o.test) + " has no row");
  }
  for (const std::string& path : {o.save, o.output, o.curve}) {
    const std::size_t slash = path.rfind('/');
    const std::string place = slash == std::string::npos ? "." : path.substr(0, slash + 1);
    if (!path.empty() && access(place.c_str(), W_OK) != 0)
      throw hd::file_error("cannot write " + path + ": " + std::strerror(errno));
  }
}

int main_of(int argc, char** argv) {
  options o;
  const std::string help = "ctr [OPTIONS]\n" + table_of(o).help();
  try {
    table_of(o).parse(argc, argv);
    if (o.help) {
      std::fputs(help.c_str(), stdout);
      return 0;
    }
#if defined(CTR_MPI)
    o.over = "mpi";
    if (o.mode == "hogwild")
      throw usage_error("ctr_mpi has --mode async_ps, sync and geo_sgd; hogwild is for threads of one process");
#else
    if (o.over != "threads" && o.over != "processes")
      throw usage_error("--over is '" + o.over + "', allowed are threads, processes");
#endif
    const kind k = kind_of(o);
    const data_set data(o);
    check_files(o, data);
    const shared_meters m;
    return (k == kind::linear ? run<0>(o, data, *m) : run<8>(o, data, *m)) ? 0 : 1;
  } catch (const usage_error& e) {
    std::fprintf(stderr, "ctr: %s; --help lists all options\n", e.what());
    return 2;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "ctr: %s\n", e.what());
    return 1;
  }
}

}  // namespace

int main(int argc, char** argv) {
#if defined(CTR_MPI)
  int given = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &given);
  const int status = main_of(argc, argv);
  if (status != 0) MPI_Abort(MPI_COMM_WORLD, status);
  MPI_Finalize();
  return status;
#else
  return main_of(argc, argv);
#endif
}
