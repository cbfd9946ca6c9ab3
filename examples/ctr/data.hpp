// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
//
// Where rows come from: adult, mushroom, files of three formats, a generator. All become features with 63-bit keys.

#pragma once

#include <heddle/core/philox.hpp>
#include <heddle/data/csv.hpp>
#include <heddle/data/reader.hpp>
#include <heddle/data/sparse.hpp>

#include <unistd.h>
#include <zlib.h>

#include <array>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "options.hpp"

namespace ctr {

namespace hd = heddle;

/// Rows: indices are keys of the table; features of fields from `fields()` on are crosses.
using rows = hd::sparse_batch;

/// Keys with the top bit are the models' own: of features that are in no data.
inline std::uint64_t key_of(std::uint64_t field, std::uint64_t value) { return hd::feature_key(field, value) >> 1; }

/// Gives batches to several consumers, epoch after epoch; false ends an epoch of a consumer.
class source {
 public:
  virtual ~source() = default;
  virtual bool pop(std::size_t queue, rows& to) = 0;
  /// Lets all others end too.
  virtual void stop() noexcept {}
};

/// Which part of the rows a source gives to how many.
struct share {
  std::size_t queues = 1, rank = 0, ranks = 1, epochs = 1, first_epoch = 0, shuffle = 0, batch = 1024;
};

/// What a gzipped file holds, as a file without a name that goes away with this.
class unpacked {
 public:
  explicit unpacked(const std::string& path) : file_(std::tmpfile(), std::fclose) {
    const std::unique_ptr<gzFile_s, int (*)(gzFile)> in{gzopen(path.c_str(), "rb"), gzclose};
    if (!in) throw hd::file_error("cannot read " + path);
    if (!file_) throw hd::file_error("no temporary file can be made");
    std::array<char, 1 << 16> block;
    int n;
    while ((n = gzread(in.get(), block.data(), block.size())) > 0) {
      if (std::fwrite(block.data(), 1, static_cast<std::size_t>(n), file_.get()) != static_cast<std::size_t>(n))
        throw hd::file_error("the temporary file of " + path + " can't be written");
    }
    if (n < 0 || std::fflush(file_.get()) != 0) throw hd::file_error(path + " is damaged, or can't be unpacked");
  }
  /// For processes that come of this one, too.
  std::string path() const { return "/proc/self/fd/" + std::to_string(fileno(file_.get())); }

 private:
  std::unique_ptr<std::FILE, int (*)(std::FILE*)> file_;
};

/// Numbers become categories: whole ones up to 100 are kept apart, larger ones by the square of their logarithm.
inline std::uint64_t bucket_of(float x) {
  if (std::isnan(x)) return hd::table_batch::missing;
  if (x < 0.0f) return 1'000'000;
  const double l = std::log(static_cast<double>(x));
  return static_cast<std::uint64_t>(x <= 100.0f ? static_cast<double>(x) : 100.0 + l * l);
}

/// Rows of numbers and categories become features of value 1, a field per column; with crosses also one per pair of
/// categories.
struct encoder {
  bool crosses = false;

  void encode(const hd::table_batch& from, rows& to) const {
    const std::size_t n = from.number_columns, c = from.category_columns;
    to.clear();
    for (std::size_t i = 0; i < from.size(); ++i) {
      const auto add = [&](std::size_t field, std::uint64_t value) {
        to.indices.push_back(key_of(field, value));
        to.fields.push_back(static_cast<std::uint32_t>(field));
        to.values.push_back(1.0f);
      };
      for (std::size_t k = 0; k < n; ++k) add(k, bucket_of(from.numbers_of(i)[k]));
      const std::uint64_t* const x = from.categories_of(i);
      for (std::size_t k = 0; k < c; ++k) add(n + k, x[k]);
      std::size_t field = n + c;
      for (std::size_t a = 0; crosses && a < c; ++a)
        for (std::size_t b = a + 1; b < c; ++b) add(field++, hd::feature_key(a, x[a]) ^ hd::feature_key(c + b, x[b]));
      to.labels.push_back(from.labels[i]);
      to.ends.push_back(to.indices.size());
    }
  }
};

/// Sparse rows: an index of one field isn't that of another, and labels are 0 or 1.
struct keyed {
  std::size_t fields = 1;

  void encode(rows& batch, rows& to) const {
    std::swap(batch, to);
    to.fields.resize(to.indices.size());
    for (std::size_t k = 0; k < to.indices.size(); ++k) {
      to.indices[k] = key_of(to.fields[k], to.indices[k]);
      to.fields[k] = static_cast<std::uint32_t>(to.fields[k] % fields);
    }
    for (float& label : to.labels) label = label > 0.0f ? 1.0f : 0.0f;
  }
};

/// Reads files.
template <class Format, class Encoder> class file_source final : public source {
 public:
  file_source(Format format, Encoder encoder, const std::string& path, const share& s, std::uint64_t seed)
      : encoder_(encoder),
        batches_(s.queues),
        reader_(std::move(format), {path},
                {.readers = 1,
                 .queues = s.queues,
                 .batch = s.batch,
                 .epochs = s.epochs,
                 .first_epoch = s.first_epoch,
                 .shuffle = s.shuffle,
                 .seed = seed,
                 .deterministic = s.queues == 1,
                 .rank = s.rank,
                 .ranks = s.ranks}) {}
  bool pop(std::size_t queue, rows& to) override {
    if (!reader_.pop(queue, batches_[queue])) return false;
    encoder_.encode(batches_[queue], to);
    return true;
  }
  void stop() noexcept override { reader_.stop(); }

 private:
  Encoder encoder_;
  std::vector<typename Format::batch> batches_;
  hd::multi_queue_reader<Format> reader_;
};

/// Rows like Criteo's: 13 numbers, 26 categories with Zipf's law over vocabularies of very different sizes, and a click
/// that depends on some of them. A row is a function of the seed and its number.
class generated_source final : public source {
 public:
  static constexpr std::size_t numbers = 13, categories = 26;

  /// @param first,count Rows of an epoch.
  generated_source(const options& o, const share& s, std::size_t first, std::size_t count)
      : seed_(o.seed), share_(s), first_(first), count_(count), at_(s.queues), epoch_(s.queues), batches_(s.queues) {
    double sum = 0.0, weight = 1.0;
    for (std::size_t c = 0; c < categories; ++c, weight *= 0.6) sum += weight_[c] = weight;
    for (double& w : weight_) {
      w = std::max(4.0, std::floor(w / sum * static_cast<double>(o.keys)));
      tail_.push_back(std::pow(w + 1.0, -0.05));
    }
  }
  bool pop(std::size_t queue, rows& to) override {
    const std::size_t stride = share_.queues * share_.ranks;
    const std::size_t first = (at_[queue] * stride + share_.rank * share_.queues + queue) * share_.batch;
    to.clear();
    if (stopped_ || epoch_[queue] == share_.epochs) return false;
    if (first >= count_) {
      at_[queue] = 0;
      ++epoch_[queue];
      return false;
    }
    ++at_[queue];
    hd::table_batch& b = batches_[queue];
    b.clear();
    b.number_columns = numbers;
    b.category_columns = categories;
    for (std::size_t i = first; i < std::min(first + share_.batch, count_); ++i) make(first_ + i, b);
    encoder{}.encode(b, to);
    return true;
  }
  void stop() noexcept override { stopped_ = true; }

 private:
  void make(std::size_t row, hd::table_batch& b) const {
    double score = -1.0;
    const auto random = [&](std::uint32_t what) {
      return hd::random_uniform(seed_, hd::random_stream(100, what), row);
    };
    for (std::uint32_t k = 0; k < numbers; ++k) {
      const float u = random(k);
      const float x = std::floor(std::exp(8.0f * u * u)) - 1.0f;
      score += (k % 3 == 0 ? 0.5 : 0.0) * (static_cast<double>(u) - 0.5);
      b.numbers.push_back(random(50 + k) < 0.1f ? std::nanf("") : x);
    }
    for (std::uint32_t c = 0; c < categories; ++c) {
      // The law with density x^-1.05 on [1, vocabulary], by the inverse of its distribution function.
      const hd::philox4x32::block r = hd::philox(seed_, hd::random_stream(101, c), row);
      const double u = (static_cast<double>(r.word[0]) + 1.0) * 0x1p-32;
      const auto value = static_cast<std::uint64_t>(std::pow(tail_[c] + u * (1.0 - tail_[c]), -20.0));
      b.categories.push_back(value);
      score += 1.2 * (static_cast<double>(hd::random_uniform(seed_, hd::random_stream(102, c), value)) - 0.5);
    }
    b.labels.push_back(static_cast<double>(random(99)) < 1.0 / (1.0 + std::exp(-score)) ? 1.0f : 0.0f);
  }

  std::uint64_t seed_;
  share share_;
  std::size_t first_, count_;
  std::array<double, categories> weight_{};
  std::vector<double> tail_;
  std::vector<std::size_t> at_, epoch_;
  std::vector<hd::table_batch> batches_;
  std::atomic<bool> stopped_{false};
};

/// Rows to train on and rows to judge by.
class data_set {
 public:
  explicit data_set(const options& o) : options_(o) {
    const bool shipped = o.data == "adult" || o.data == "mushroom";
    if (shipped || o.data == "generated") {
      if (!o.test.empty())
        throw usage_error("--test goes with files of your own, and " + o.data + " has its test rows");
    } else if (o.format != "libffm" && o.format != "libsvm" && o.format != "criteo") {
      throw usage_error("--format is '" + o.format + "', allowed are libffm, libsvm, criteo");
    } else if (o.test.empty()) {
      throw usage_error("--test FILE is missing: rows to judge by");
    }
    if (!shipped) return;
    for (const char* part : {"train", "test"}) {
      files_.push_back(std::make_unique<unpacked>(o.folder + "/" + o.data + "/" + o.data + "." + part + ".gz"));
    }
  }

  /// How many fields there are, without crosses.
  std::size_t fields() const {
    if (options_.data == "adult") return 13;
    if (options_.data == "generated") return generated_source::numbers + generated_source::categories;
    if (options_.data == "mushroom" || options_.format == "libsvm") return 1;
    return options_.format == "criteo" ? 39 : options_.fields;
  }

  std::unique_ptr<source> open(bool training, const share& s) const {
    const options& o = options_;
    if (o.data == "generated") {
      const std::size_t judged = std::min<std::size_t>(o.rows, 50'000);
      return std::make_unique<generated_source>(o, s, training ? 0 : o.rows, training ? o.rows : judged);
    }
    const std::string path = files_.empty() ? training ? o.data : o.test : files_[training ? 0 : 1]->path();
    const bool crosses = !o.plain && o.model != "fm";
    if (o.data == "adult") {
      using enum hd::column;
      const hd::csv format{.columns = {number, text, skip, text, number, text, text, text, text, text, number, number,
                                       number, text, label},
                           .header = !training,
                           .positive = training ? ">50K" : ">50K."};
      return std::make_unique<file_source<hd::csv, encoder>>(format, encoder{crosses}, path, s, o.seed);
    }
    if (o.data != "mushroom" && o.format == "criteo")
      return std::make_unique<file_source<hd::csv, encoder>>(hd::criteo(), encoder{}, path, s, o.seed);
    if (o.data != "mushroom" && o.format == "libffm")
      return std::make_unique<file_source<hd::libffm, keyed>>(hd::libffm{}, keyed{o.fields}, path, s, o.seed);
    return std::make_unique<file_source<hd::libsvm, keyed>>(hd::libsvm{}, keyed{}, path, s, o.seed);
  }

 private:
  options options_;
  std::vector<std::unique_ptr<unpacked>> files_;
};

}  // namespace ctr
