// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0

#pragma once

#include <cstddef>
#include <string>

#include "../support/option_table.hpp"

#ifndef CTR_DATA
#define CTR_DATA "examples/data"
#endif

namespace ctr {

using examples::usage_error;

struct options {
  std::string data = "adult", test, format = "libffm", folder = CTR_DATA, model = "wide-deep", mode = "hogwild",
              over = "threads", on_death = "report", save, resume, output, curve;
  std::size_t threads = 2, servers = 1, workers = 2, staleness = 0, gather = 0, epochs = 5, batch = 128, hidden = 32,
              period = 8, fields = 64, rows = 200'000, keys = 1'000'000, memory = 0, cells = 128, sightings = 2,
              seed = 1, kill_at = 0, kill_worker_at = 0, save_every = 200;
  double rate = 0.0, l1 = 5.0, l2 = 3.0, least_auc = 0.0, least_accuracy = 0.0;
  bool half = false, plain = false, help = false;
};

/// The table of options over one `options`, in the order of --help.
inline examples::option_table table_of(options& o) {
  examples::option_table t;
  t.text("data", "NAME|FILE", "adult, mushroom, generated (rows like Criteo's), or a file to train on", o.data);
  t.text("test", "FILE", "a file to judge by, of the same format", o.test);
  t.text("format", "NAME", "of these files: libffm, libsvm, criteo", o.format);
  t.text("model", "NAME", "linear, fm (factorisation machine), wide-deep", o.model);
  t.text("mode", "NAME",
         "hogwild: threads share one table; with parameter servers: async_ps, workers push gradients as fast as they "
         "can; sync, in step and repeatable to the bit; geo_sgd, workers train replicas and exchange what these have "
         "moved",
         o.mode);
  t.size("threads", "of hogwild; 1 gives the same result in every run", o.threads, 1, 256);
  t.size("servers", "of async_ps, sync and geo_sgd", o.servers, 1, 64);
  t.size("workers", "of async_ps, sync and geo_sgd", o.workers, 1, 256);
  t.text("over", "NAME", "what servers and workers are: threads, or processes (over ZeroMQ); ctr_mpi: MPI processes",
         o.over);
  t.size("staleness", "most pushes that a worker of async_ps is ahead of another; 0: no bound", o.staleness, 0,
         1000000);
  t.size("gather", "keys that a worker of async_ps sums up before it pushes; 0: each batch's", o.gather, 0, 1 << 24);
  t.size("period", "batches of a worker of geo_sgd between two exchanges", o.period, 1, 1000000);
  t.flag("half", "weights and gradients travel as bfloat16", o.half);
  t.size("kill-server-at", "kill server 0, a process, after so many pushes, and start it again; 0: never", o.kill_at, 0,
         ~std::size_t{0});
  t.size("kill-worker-at", "kill the last worker, a process, for good after so many pushes; 0: never", o.kill_worker_at,
         0, ~std::size_t{0});
  t.text("on-death", "NAME", "what a worker's death means: report, all end; reassign, others take over its rows",
         o.on_death);
  t.size("save-every", "pushes between two saves of a server", o.save_every, 1, 1000000000);
  t.size("epochs", "times through the data", o.epochs, 1, 1000000);
  t.size("batch", "rows of a push", o.batch, 1, 1 << 20);
  t.real("rate", "learning rate; 0: 0.05, of linear 0.2 but with geo_sgd", o.rate, 0.0, 1000.0);
  t.real("l1", "of linear, which FTRL trains: larger ones make more weights 0", o.l1, 0.0, 1e6);
  t.real("l2", "of linear: larger ones make weights smaller", o.l2, 0.0, 1e6);
  t.size("hidden", "width of the first hidden layer of wide-deep; the second has half of it", o.hidden, 2, 4096);
  t.flag("no-crosses", "leave pairs of categories out of linear and wide-deep", o.plain);
  t.size("fields", "of a libffm file; higher ones are taken modulo this", o.fields, 1, 4096);
  t.size("rows", "to generate", o.rows, 1, ~std::size_t{0} >> 8);
  t.size("keys", "that they are drawn from", o.keys, 1000, std::size_t{1} << 40);
  t.size("memory", "MiB that rows and index may take, with hogwild; 0: no bound", o.memory, 0, 1 << 24);
  t.size("cells", "MiB of the filter that keys pass before they get a row, with --memory", o.cells, 1, 1 << 16);
  t.size("sightings", "of a key until it gets a row, with --memory", o.sightings, 1, 255);
  t.size("seed", "of initial values, order and generated rows", o.seed, 0, ~std::size_t{0});
  t.text("save", "FILE", "where the table goes, after each epoch (with servers: at the end)", o.save);
  t.text("resume", "FILE", "go on from what was saved", o.resume);
  t.text("export", "FILE", "where the table goes as text, a key and its weights a line", o.output);
  t.text("svg", "FILE", "where a picture of the epochs goes", o.curve);
  t.real("least-auc", "status 1 if the AUC is lower", o.least_auc, 0, 1);
  t.real("least-accuracy", "status 1 if the accuracy, in percent, is lower", o.least_accuracy, 0, 100);
  t.text("folder", "DIR", "folder of adult and mushroom", o.folder);
  t.flag("help", "print this and end", o.help);
  return t;
}

}  // namespace ctr
