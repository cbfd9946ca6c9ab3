// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#include <heddle/data/integers.hpp>
#include <heddle/data/reader.hpp>
#include <heddle/data/sparse.hpp>
#include <heddle/data/text.hpp>

#include "../support/catch.hpp"

#include <atomic>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <future>
#include <map>
#include <random>

namespace hd = heddle;

namespace {

using records = std::vector<std::string>;
using reader = hd::multi_queue_reader<hd::lines>;

// Files in a directory of their own, removed at the end.
class files {
 public:
  files() {
    std::string name = (std::filesystem::temp_directory_path() / "heddle-data-XXXXXX").string();
    REQUIRE(::mkdtemp(name.data()) != nullptr);
    directory_ = name;
  }
  ~files() {
    std::error_code ignored;
    std::filesystem::remove_all(directory_, ignored);
  }
  std::string add(const std::string& text) {
    paths_.push_back((directory_ / std::to_string(paths_.size())).string());
    std::ofstream(paths_.back(), std::ios::binary) << text;
    return paths_.back();
  }
  const records& paths() const { return paths_; }
  std::string directory() const { return directory_.string(); }

 private:
  std::filesystem::path directory_;
  records paths_;
};

// What lines there are in a text, by the definition alone.
records lines_of(const std::string& text) {
  records found;
  std::string line;
  for (const char c : text) {
    if (c == '\n') {
      if (!line.empty() && line.back() == '\r') line.pop_back();
      found.push_back(std::exchange(line, {}));
    } else {
      line += c;
    }
  }
  if (!line.empty() && line.back() == '\r') line.pop_back();
  if (!text.empty() && text.back() != '\n') found.push_back(line);
  return found;
}

std::string random_text(std::mt19937& random, std::size_t count, std::size_t longest, bool ended) {
  std::string text;
  for (std::size_t i = 0; i < count; ++i) {
    const std::size_t n = random() % 3 == 0 ? 0 : random() % longest;
    for (std::size_t k = 0; k < n; ++k) text += static_cast<char>('a' + random() % 26);
    if (i + 1 < count || ended) text += random() % 4 == 0 ? "\r\n" : "\n";
  }
  return text;
}

// Everything that one queue gives in one epoch.
template <class Reader> records drain(Reader& r, std::size_t queue, std::size_t batch = ~std::size_t{0}) {
  records all;
  typename Reader::batch b;
  while (r.pop(queue, b)) {
    CHECK(b.size() > 0);
    CHECK(b.size() <= batch);
    for (std::size_t i = 0; i < b.size(); ++i) all.emplace_back(b[i]);
  }
  CHECK(b.size() == 0);
  return all;
}

// Everything that all queues give in one epoch, each read by a thread of its own.
template <class Reader> std::vector<records> drain_all(Reader& r, std::size_t queues) {
  std::vector<std::future<records>> parts;
  for (std::size_t q = 0; q < queues; ++q) {
    parts.push_back(std::async(std::launch::async, [&r, q] {
      records all;
      typename Reader::batch b;
      while (r.pop(q, b)) {
        for (std::size_t i = 0; i < b.size(); ++i) all.emplace_back(b[i]);
      }
      return all;
    }));
  }
  std::vector<records> found;
  for (auto& part : parts) found.push_back(part.get());
  return found;
}

records sorted(records r) {
  std::sort(r.begin(), r.end());
  return r;
}

}  // namespace

TEST_CASE("Each record is read exactly once an epoch, whatever the borders") {  // R1, R2
  std::mt19937 random(1);
  const auto pick = [&](std::initializer_list<std::size_t> of) { return of.begin()[random() % of.size()]; };
  for (int round = 0; round < 300; ++round) {
    files f;
    records expected;
    std::uint64_t hash = 0, bytes = 0;
    for (std::size_t count = pick({0, 1, 2, 5}); count > 0; --count) {
      const std::size_t n = pick({0, 1, 1, 2, 17, 60});
      const std::string text = random_text(random, n, pick({2, 5, 30, 700}), random() % 2 == 0);
      f.add(text);
      bytes += text.size();
      for (const std::string& line : lines_of(text)) expected.push_back(line);
    }
    const std::size_t queues = pick({1, 2, 3}), ranks = pick({1, 1, 2, 3, 7});
    hd::reader_options o{.readers = pick({1, 2, 5}),
                         .queues = queues,
                         .capacity = pick({1, 2, 8}),
                         .batch = pick({1, 3, 1024}),
                         .epochs = 2,
                         .shuffle = pick({0, 0, 1, 5, 1000}),
                         .seed = random(),
                         .deterministic = random() % 2 == 0,
                         .ranks = ranks,
                         .block = pick({1, 2, 7, 64, 1 << 18}),
                         .piece = pick({0, 1, 2, 3, 17, 1000})};
    INFO("round " << round << ", piece " << o.piece << ", block " << o.block);
    std::vector<records> found(2);
    hd::epoch_report sum[2];
    for (o.rank = 0; o.rank < ranks; ++o.rank) {
      reader r(hd::lines{}, f.paths(), o);
      for (int epoch = 0; epoch < 2; ++epoch) {
        for (const records& part : drain_all(r, queues))
          found[epoch].insert(found[epoch].end(), part.begin(), part.end());
      }
      hd::text_batch none;
      CHECK_FALSE(r.pop(0, none));
      const hd::reader_report report = r.report();
      REQUIRE(report.epochs.size() == 2);
      for (int epoch = 0; epoch < 2; ++epoch) {
        CHECK(report.epochs[epoch].complete);
        CHECK(report.epochs[epoch].delivered == report.epochs[epoch].records);
        sum[epoch] += report.epochs[epoch];
      }
      CHECK(report.most_queued <= o.capacity);
    }
    for (int epoch = 0; epoch < 2; ++epoch) {
      REQUIRE(sorted(found[epoch]) == sorted(expected));
      CHECK(sum[epoch].records == expected.size());
      CHECK(sum[epoch].bytes == bytes);
      if (epoch) CHECK(sum[epoch].hash == hash);
      hash = sum[epoch].hash;
    }
  }
}

TEST_CASE("The sum of hashes is that of the records' bytes") {
  files f;
  f.add("one\ntwo\n\nthree");
  reader r(hd::lines{}, f.paths(), {.piece = 2});
  drain(r, 0);
  const hd::epoch_report e = r.report().epochs[0];
  CHECK(e.hash == hd::record_hash("one") + hd::record_hash("two") + hd::record_hash("") + hd::record_hash("three"));
  CHECK(e.records == 4);
  reader without(hd::lines{}, f.paths(), {.hash = false});
  drain(without, 0);
  CHECK(without.report().epochs[0].hash == 0);
}

TEST_CASE("Without shuffling one queue gives the files' order, and always full batches") {
  std::mt19937 random(2);
  files f;
  const std::string a = random_text(random, 1000, 20, false), b = random_text(random, 1023, 20, true);
  f.add(a);
  f.add("");
  f.add(b);
  records expected = lines_of(a);
  for (const std::string& line : lines_of(b)) expected.push_back(line);
  reader r(hd::lines{}, f.paths(), {.readers = 1, .batch = 100, .piece = 333});
  hd::text_batch batch;
  records found;
  while (r.pop(0, batch)) {
    CHECK((batch.size() == 100 || found.size() + batch.size() == expected.size()));
    for (std::size_t i = 0; i < batch.size(); ++i) found.emplace_back(batch[i]);
  }
  CHECK(found == expected);
}

TEST_CASE("Deterministic batches don't depend on readers, blocks and capacity, and feed consumers in step") {
  std::mt19937 random(3);
  files f;
  const std::string text = random_text(random, 2000, 30, true);
  f.add(text);
  for (const std::size_t shuffle : {0, 50}) {
    std::vector<std::vector<std::vector<records>>> first;
    for (const std::size_t readers : {1, 2, 5}) {
      reader r(hd::lines{}, f.paths(),
               {.readers = readers,
                .queues = 3,
                .capacity = readers,
                .batch = 16,
                .epochs = 2,
                .shuffle = shuffle,
                .seed = 9,
                .deterministic = true,
                .block = 100 * readers,
                .piece = 1500});
      std::vector<std::vector<std::vector<records>>> found(2, std::vector<std::vector<records>>(3));
      for (int epoch = 0; epoch < 2; ++epoch) {
        bool open[3] = {true, true, true};
        while (open[0] || open[1] || open[2]) {  // one batch each, in turn, by one thread
          for (std::size_t q = 0; q < 3; ++q) {
            hd::text_batch b;
            if (!open[q] || !(open[q] = r.pop(q, b))) continue;
            records one;
            for (std::size_t i = 0; i < b.size(); ++i) one.emplace_back(b[i]);
            found[epoch][q].push_back(one);
          }
        }
        CHECK(found[epoch][0].size() - found[epoch][2].size() <= 1);
      }
      if (first.empty()) first = found;
      CHECK(found == first);
    }
    CHECK((first[0] == first[1]) == (shuffle == 0));
  }
}

TEST_CASE("The shuffle window moves records, differently in each epoch, the same way again") {
  std::mt19937 random(4);
  files f;
  std::string text;
  for (int i = 0; i < 1000; ++i) text += std::to_string(i) + "\n";
  f.add(text);
  const auto read = [&](std::uint64_t first, std::uint64_t epochs, std::size_t shuffle, std::uint64_t seed) {
    reader r(hd::lines{}, f.paths(),
             {.readers = 1,
              .batch = 7,
              .epochs = epochs,
              .first_epoch = first,
              .shuffle = shuffle,
              .seed = seed,
              .piece = 1 << 20});
    std::vector<records> all;
    for (std::uint64_t e = 0; e < epochs; ++e) all.push_back(drain(r, 0, 7));
    return all;
  };
  const auto both = read(0, 2, 100, 1);
  CHECK(sorted(both[0]) == sorted(lines_of(text)));
  CHECK(both[0] != both[1]);
  CHECK(read(1, 1, 100, 1)[0] == both[1]);  // goes on where it was left
  CHECK(read(0, 1, 100, 2)[0] != both[0]);
  CHECK(read(0, 1, 1, 1)[0] == lines_of(text));
  double moved = 0.0;
  for (int i = 0; i < 1000; ++i) {
    const int from = std::stoi(both[0][i]);
    CHECK(from / 100 == i / 100);  // within its window
    moved += std::abs(from - i);
  }
  CHECK(moved / 1000 == Approx(100.0 / 3).epsilon(0.1));  // the mean distance of two places
}

TEST_CASE("Ranks that shuffle divide each epoch anew, and go on from its beginning wherever they were left") {
  files f;
  std::string text;
  for (int i = 0; i < 1000; ++i) text += std::to_string(i) + "\n";
  f.add(text);
  const records expected = sorted(lines_of(text));
  for (const std::size_t ranks : {1, 2, 3}) {
    for (const std::size_t shuffle : {1, 50}) {
      CAPTURE(ranks, shuffle);
      std::vector<records> found(3);
      hd::epoch_report sum[3];
      bool other_part = false;
      for (std::size_t rank = 0; rank < ranks; ++rank) {
        hd::reader_options o{.readers = 1,
                             .batch = 7,
                             .epochs = 3,
                             .shuffle = shuffle,
                             .seed = 5,
                             .rank = rank,
                             .ranks = ranks,
                             .piece = 100};
        reader whole(hd::lines{}, f.paths(), o);
        std::vector<records> mine;
        for (std::uint64_t e = 0; e < 3; ++e) {
          mine.push_back(drain(whole, 0, 7));
          found[e].insert(found[e].end(), mine[e].begin(), mine[e].end());
        }
        for (std::uint64_t e = 0; e < 3; ++e) sum[e] += whole.report().epochs[e];
        other_part |= whole.report().epochs[0].hash != whole.report().epochs[1].hash;
        o.first_epoch = 1;
        o.epochs = 2;
        {
          reader left(hd::lines{}, f.paths(), o);
          hd::text_batch b;
          for (int k = 0; k < 10; ++k) REQUIRE(left.pop(0, b));
          left.stop();
        }
        reader again(hd::lines{}, f.paths(), o);
        CHECK(drain(again, 0, 7) == mine[1]);
        CHECK(drain(again, 0, 7) == mine[2]);
        CHECK(mine[0] != mine[1]);
      }
      for (std::uint64_t e = 0; e < 3; ++e) {
        CHECK(sorted(found[e]) == expected);
        CHECK(sum[e].hash == sum[0].hash);
      }
      CHECK(other_part == (ranks > 1));
    }
  }
}

TEST_CASE("Every order of a small window is as likely as any other") {
  files f;
  f.add("a\nb\nc\n");
  std::map<std::string, int> seen;
  reader r(hd::lines{}, f.paths(), {.readers = 1, .epochs = 6000, .shuffle = 3, .seed = 7});
  for (int i = 0; i < 6000; ++i) {
    std::string order;
    for (const std::string& s : drain(r, 0)) order += s;
    ++seen[order];
  }
  CHECK(seen.size() == 6);
  for (const auto& [order, count] : seen) CHECK(std::abs(count - 1000) < 150);  // five standard deviations
}

TEST_CASE("A reader's error surfaces at the next pop of every queue, with its place, and again") {  // R3
  files f;
  f.add("1 1:1\n1 2:2\n");
  const std::string bad = f.add("1 1:1\n\n1 2:oops\n1 3:3\n");
  hd::multi_queue_reader r(hd::libsvm{}, f.paths(), {.readers = 2, .queues = 2, .batch = 1, .epochs = 100, .piece = 1});
  hd::sparse_batch b;
  for (std::size_t q : {0, 1, 0}) {
    try {
      for (int i = 0; i < 200; ++i) r.pop(q, b);
      FAIL("no error");
    } catch (const hd::record_error& e) {
      CHECK(e.path() == bad);
      CHECK(e.offset() == 11);
      CHECK(e.line() == 3);
      CHECK(std::string(e.what()) ==
            "heddle::multi_queue_reader: " + bad + ":3: byte 11: expected a value, a finite number, found \"oops\"");
    }
  }
  CHECK_FALSE(r.report().epochs[0].complete);
  std::atomic<int> thrown{0};  // and while several consumers wait
  hd::multi_queue_reader waited(hd::libsvm{}, {bad}, {.queues = 2, .batch = 1000});
  std::vector<std::thread> consumers;
  for (std::size_t q : {0, 1, 1, 0}) {
    consumers.emplace_back([&, q] {
      try {
        hd::sparse_batch mine;
        while (waited.pop(q, mine)) {
        }
      } catch (const hd::record_error& e) {
        thrown += e.line() == 3;
      }
    });
  }
  for (std::thread& t : consumers) t.join();
  CHECK(thrown == 4);
}

TEST_CASE("Malformed records are left out as far as it is allowed") {
  files f;
  f.add("1 1:1\nx\n1 2:2\ny\n");
  hd::multi_queue_reader r(hd::libsvm{}, f.paths(), {.epochs = 2, .skip = 2});
  hd::sparse_batch b;
  for (int epoch = 0; epoch < 2; ++epoch) {
    std::size_t rows = 0;
    while (r.pop(0, b)) rows += b.size();
    CHECK(rows == 2);
    CHECK(r.report().epochs[epoch].malformed == 2);
  }
  CHECK(r.report().first_malformed.find("a label, a finite number, found \"") != std::string::npos);
  hd::multi_queue_reader strict(hd::libsvm{}, f.paths(), {.skip = 1});
  CHECK_THROWS_AS(
      [&] {
        while (strict.pop(0, b)) {
        }
      }(),
      hd::record_error);
}

TEST_CASE("Files that are missing, no files, or shrink") {
  files f;
  CHECK_THROWS_AS(reader(hd::lines{}, {f.directory() + "/none"}), hd::record_error);
  CHECK_THROWS_AS(reader(hd::lines{}, {f.directory()}), hd::record_error);
  const std::string path = f.add(std::string(100000, '\n'));
  reader r(hd::lines{}, f.paths(), {.readers = 1, .capacity = 1, .batch = 10, .block = 64, .piece = 1000});
  hd::text_batch b;
  CHECK(r.pop(0, b));
  std::filesystem::resize_file(path, 5000);
  try {
    while (r.pop(0, b)) {
    }
    FAIL("no error");
  } catch (const hd::record_error& e) {
    CHECK(e.path() == path);
    CHECK(e.offset() == 5000);
  }
}

TEST_CASE("A record longer than the option is an error with its place") {
  files f;
  f.add("ab\n" + std::string(5000, 'x') + "\nc\n");
  hd::text_batch b;
  reader r(hd::lines{}, f.paths(), {.block = 100, .longest = 1000});
  try {
    while (r.pop(0, b)) {
    }
    FAIL("no error");
  } catch (const hd::record_error& e) {
    CHECK(e.offset() == 3);
    CHECK(e.line() == 2);
  }
  for (const std::size_t block : {1, 100, 1 << 18}) {
    reader enough(hd::lines{}, f.paths(), {.block = block, .piece = 10, .longest = 5000});
    CHECK(drain(enough, 0).size() == 3);
    reader one_less(hd::lines{}, f.paths(), {.block = block, .piece = 10, .longest = 4999});
    CHECK_THROWS_AS(
        [&] {
          while (one_less.pop(0, b)) {
          }
        }(),
        hd::record_error);
  }
}

TEST_CASE("Epochs without a record end one by one and wait for their consumers") {
  files f;
  f.add("");
  reader r(hd::lines{}, f.paths(), {.readers = 2, .queues = 2, .epochs = ~std::uint64_t{0}});
  hd::text_batch b;
  for (int epoch = 0; epoch < 3000; ++epoch) {
    CHECK_FALSE(r.pop(0, b));
    CHECK_FALSE(r.pop(1, b));
  }
  CHECK(r.report().epochs.size() < 3000 + 2048);
}

TEST_CASE("Options outside their range are refused by name") {
  files f;
  f.add("a\n");
  const auto refused = [&](const hd::reader_options& o, const char* name) {
    CHECK_THROWS_WITH(reader(hd::lines{}, f.paths(), o), Catch::Matchers::Contains(name));
  };
  refused({.readers = 0}, "readers");
  refused({.queues = 0}, "queues");
  refused({.capacity = 0}, "capacity");
  refused({.batch = 0}, "batch");
  refused({.block = 0}, "block");
  refused({.longest = 0}, "longest");
  refused({.rank = 2, .ranks = 2}, "rank");
  refused({.ranks = 0}, "rank");
  refused({.shuffle = std::size_t{1} << 32}, "shuffle");
  refused({.first_epoch = std::uint64_t{1} << 32}, "first_epoch");
  CHECK_THROWS_AS((hd::multi_queue_reader(hd::integers<int>{0}, f.paths())), hd::argument_error);
  reader r(hd::lines{}, f.paths(), {.epochs = 0});
  hd::text_batch b;
  CHECK_FALSE(r.pop(0, b));
  CHECK_THROWS_AS(r.pop(1, b), hd::argument_error);
}

TEST_CASE("Stopping wakes consumers, and nothing waits for readers that have no room") {
  files f;
  f.add(std::string(20000, '\n'));
  for (int round = 0; round < 20; ++round) {
    reader r(
        hd::lines{}, f.paths(),
        {.readers = 3, .queues = 2, .capacity = 1, .batch = 10, .epochs = 1000, .deterministic = true, .piece = 500});
    std::thread consumer([&] {  // ahead of queue 0, which nobody reads
      hd::text_batch b;
      for (int i = 0; i < 3; ++i) r.pop(1, b);
    });
    if (round % 2) {
      r.stop();
    } else {
      hd::text_batch b;
      for (int i = 0; i < 3; ++i) r.pop(0, b);
      r.stop();
    }
    consumer.join();
    hd::text_batch b;
    CHECK_FALSE(r.pop(0, b));
  }
  reader left(hd::lines{}, f.paths(), {.readers = 3, .capacity = 1, .batch = 10, .epochs = 1000});  // never read
}

TEST_CASE("Readers wait while all queues are full") {
  files f;
  f.add(std::string(10000, '\n'));
  reader r(hd::lines{}, f.paths(), {.readers = 2, .queues = 2, .capacity = 2, .batch = 10, .piece = 1000});
  while (r.report().full_waits < 2) std::this_thread::yield();
  CHECK(r.report().most_queued == 2);
  CHECK(r.report().epochs[0].delivered == 0);
  std::size_t all = 0;
  for (const records& part : drain_all(r, 2)) all += part.size();
  CHECK(all == 10000);
}

TEST_CASE("Words of a text without line ends, and of one with many blanks") {
  std::mt19937 random(6);
  files f;
  records expected;
  std::string text;
  for (int i = 0; i < 3000; ++i) {
    expected.push_back(std::to_string(random() % 1000));
    text += expected.back() + std::string(1 + random() % 3, " \t\n\r\v\f"[random() % 6]);
  }
  f.add(text);
  for (const std::uint64_t piece : {1, 5, 4096}) {
    hd::multi_queue_reader r(hd::words{}, f.paths(), {.piece = piece});
    CHECK(sorted(drain(r, 0)) == sorted(expected));
  }
}

TEST_CASE("Integers of a binary file, rows never cut; a row that isn't whole is an error") {
  std::vector<std::uint32_t> values(3 * 1025);
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<std::uint32_t>(i * 2654435761u);
  const std::string bytes(reinterpret_cast<const char*>(values.data()), values.size() * 4);
  files f, broken;
  f.add(bytes);
  broken.add(bytes + "12345");
  for (const std::uint64_t piece : {1, 11, 12, 13, 4096}) {
    hd::multi_queue_reader r(hd::integers<std::uint32_t>{3}, f.paths(),
                             {.readers = 2, .batch = 10, .block = 5, .piece = piece});
    hd::integer_batch<std::uint32_t> b;
    std::vector<std::vector<std::uint32_t>> found, expected;
    while (r.pop(0, b)) {
      for (std::size_t i = 0; i < b.size(); ++i) found.emplace_back(b[i], b[i] + 3);
    }
    for (std::size_t i = 0; i < values.size(); i += 3) expected.emplace_back(&values[i], &values[i] + 3);
    std::sort(found.begin(), found.end());
    std::sort(expected.begin(), expected.end());
    CHECK(found == expected);
    CHECK(r.report().epochs[0].records == 1025);
    hd::multi_queue_reader bad(hd::integers<std::uint32_t>{3}, broken.paths(), {.piece = piece});
    try {
      while (bad.pop(0, b)) {
      }
      FAIL("no error");
    } catch (const hd::record_error& e) {
      CHECK(e.offset() == bytes.size());
      CHECK(e.line() == 0);
    }
  }
}

TEST_CASE("A title is left out of every file, whatever its length") {
  struct titled : hd::lines {
    bool header = true;
  };
  files f;
  f.add("title\n1\n2\n");
  f.add("only a title");
  f.add("");
  f.add("a very long title that is longer than a piece\n3");
  for (const std::uint64_t piece : {1, 6, 7, 1000}) {
    hd::multi_queue_reader r(titled{}, f.paths(), {.piece = piece});
    CHECK(sorted(drain(r, 0)) == records{"1", "2", "3"});
  }
}
