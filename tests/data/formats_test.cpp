// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#include <heddle/data/csv.hpp>
#include <heddle/data/integers.hpp>
#include <heddle/data/sparse.hpp>
#include <heddle/data/text.hpp>

#include "../support/catch.hpp"

#include <cstdlib>
#include <random>
#include <set>

namespace hd = heddle;

// example-begin numbers
struct numbers {  // one number a line
  struct batch {
    std::vector<double> values;
    std::size_t size() const { return values.size(); }
    void clear() { values.clear(); }
    void append(const batch& from, std::size_t i) { values.push_back(from.values[i]); }
  };
  std::size_t delimiter(const char* text, std::size_t n) const { return std::find(text, text + n, '\n') - text; }
  hd::parsed parse(std::string_view record, batch& to) const {
    double x;
    if (std::from_chars(record.data(), record.data() + record.size(), x).ec != std::errc{})
      return hd::parsed::malformed(0, "expected a number");
    to.values.push_back(x);
    return {};
  }
};
static_assert(hd::record_format<numbers>);
// example-end

namespace {

using kind = hd::parsed::kind;

struct fault {
  const char* line;
  std::size_t column;
};

// Every fault is found at its column and leaves the batch as it was.
template <class Format> void check_faults(const Format& format, const char* good, std::vector<fault> faults) {
  typename Format::batch batch;
  REQUIRE(format.parse(good, batch).what == kind::record);
  for (const fault& f : faults) {
    INFO("line: " << f.line);
    const hd::parsed p = format.parse(f.line, batch);
    CHECK(p.what == kind::malformed);
    CHECK(p.column == f.column);
    CHECK(p.problem != nullptr);
    CHECK(batch.size() == 1);
    REQUIRE(format.parse(good, batch).what == kind::record);
    typename Format::batch twice;
    twice.append(batch, 0);
    twice.append(batch, 1);
    CHECK(twice.size() == 2);
    batch.clear();
    batch.append(twice, 1);
  }
}

}  // namespace

TEST_CASE("libsvm rows") {
  hd::sparse_batch b;
  const hd::libsvm format;
  CHECK(format.parse("+1 3:0.5 18446744073709551615:-2e-3 0:7", b).what == kind::record);
  CHECK(format.parse("  -1  # nothing else", b).what == kind::record);
  CHECK(format.parse("0.25\t1:1 \r", b).what == kind::record);
  CHECK(format.parse("", b).what == kind::blank);
  CHECK(format.parse(" \r", b).what == kind::blank);
  CHECK(format.parse("# only a comment", b).what == kind::blank);
  CHECK(b.labels == std::vector<float>{1.0f, -1.0f, 0.25f});
  CHECK(b.indices == std::vector<std::uint64_t>{3, ~std::uint64_t{0}, 0, 1});
  CHECK(b.values == std::vector<float>{0.5f, -2e-3f, 7.0f, 1.0f});
  CHECK(b.ends == std::vector<std::size_t>{3, 3, 4});
  CHECK(b.fields.empty());
  check_faults(format, "1 1:1",
               {{"x 1:1", 0},
                {"1,2 1:1", 1},
                {"1 -1:1", 2},
                {"1 1", 2},
                {"1 1:", 4},
                {"1 1:nan", 4},
                {"1 1:1e99", 4},
                {"1 1:2;3", 5},
                {"1 18446744073709551616:1", 2},
                {"inf 1:1", 0},
                {"--1 1:1", 0},
                {". 1:1", 0},
                {"1 5:1 qid:3", 6}});
}

TEST_CASE("libffm rows") {
  hd::sparse_batch b;
  const hd::libffm format;
  CHECK(format.parse("1 0:9:0.5 4294967295:1:1", b).what == kind::record);
  CHECK(format.parse("0", b).what == kind::record);
  CHECK(b.fields == std::vector<std::uint32_t>{0, 4294967295u});
  CHECK(b.indices == std::vector<std::uint64_t>{9, 1});
  CHECK(b.ends == std::vector<std::size_t>{2, 2});
  check_faults(format, "1 2:3:4", {{"1 2:3", 2}, {"1 4294967296:1:1", 2}, {"1 1:1:1 1:1:", 12}});
}

TEST_CASE("Numbers are those of the C library") {
  std::mt19937 random(5);
  for (int i = 0; i < 20000; ++i) {
    char text[64];
    const double x = (static_cast<double>(random()) - 2e9) * std::pow(10.0, static_cast<int>(random() % 40) - 20);
    std::snprintf(text, sizeof text,
                  i % 3 == 0   ? "%.*g"
                  : i % 3 == 1 ? "%.*f"
                               : "%+.*e",
                  static_cast<int>(random() % 18), x);
    const char* p = text;
    float value = -1.0f;
    INFO(text);
    REQUIRE(hd::detail::read_number(p, text + std::strlen(text), value));
    REQUIRE(value == static_cast<float>(std::strtod(text, nullptr)));
    REQUIRE(*p == 0);
  }
  hd::sparse_batch b;
  for (const char* tiny : {"1e-400", "-4.9e-325", "1e-99999999999999999999", "1e-50"}) {
    b.clear();
    REQUIRE(hd::libsvm{}.parse("1 1:" + std::string(tiny), b).what == kind::record);
    CHECK(b.values == std::vector<float>{0.0f});
  }
  b.clear();
  CHECK(hd::libsvm{}.parse("1 1:0." + std::string(400, '0') + "1", b).what == kind::record);
  CHECK(hd::libsvm{}.parse("1 1:1" + std::string(400, '0') + "e-1", b).what == kind::malformed);
  CHECK(hd::libsvm{}.parse("1 1:1e400", b).what == kind::malformed);
}

TEST_CASE("csv rows") {
  using hd::column;
  const hd::csv format{.columns = {column::number, column::text, column::skip, column::hex, column::label},
                       .positive = ">50K"};
  hd::table_batch b;
  CHECK(format.parse("1.5,Private,x,ff,>50K\r", b).what == kind::record);
  CHECK(format.parse(" ? , ? ,, ? , <=50K ", b).what == kind::record);
  CHECK(format.parse(",\"a,\"\"b\"\"\" ,\"\",\"1\",\">50K\"", b).what == kind::record);
  CHECK(format.parse("", b).what == kind::blank);
  CHECK(b.labels == std::vector<float>{1.0f, 0.0f, 1.0f});
  REQUIRE(b.numbers.size() == 3);
  CHECK(b.numbers[0] == 1.5f);
  CHECK(std::isnan(b.numbers[1]));
  CHECK(std::isnan(b.numbers[2]));
  const std::uint64_t missing = hd::table_batch::missing;
  CHECK(b.categories ==
        std::vector<std::uint64_t>{hd::record_hash("Private"), 255, missing, missing, hd::record_hash("a,\"b\""), 1});
  check_faults(format, "1,a,b,c,x",
               {{"1,a,b,c", 7},
                {"1,a,b,c,", 8},
                {"1,a,b,c,x,", 8},
                {"one,a,b,c,x", 0},
                {"1,a,b,c g,x", 6},
                {"1,a,b,1000000000000000,x", 6},
                {"1,\"a,b,c,x", 2},
                {"1, \"a\"b,b,c,x", 3}});
  CHECK_THROWS_AS(hd::csv{}.check(), hd::argument_error);
  CHECK_THROWS_AS((hd::csv{.columns = {column::label, column::label}}.check()), hd::argument_error);
  CHECK_THROWS_AS((hd::csv{.columns = {column::label}, .separator = '"'}.check()), hd::argument_error);
}

TEST_CASE("Criteo's layout, with fields missing") {
  std::string line = "1", empty = "0";
  for (int i = 0; i < 13; ++i) line += "\t" + std::to_string(i - 2);
  for (int i = 0; i < 26; ++i) line += "\t68fd1e6" + std::string(1, "0123456789abcdef"[i % 16]);
  empty.append(39, '\t');
  hd::table_batch b;
  const hd::csv format = hd::criteo();
  REQUIRE(format.parse(line, b).what == kind::record);
  REQUIRE(format.parse(empty, b).what == kind::record);
  CHECK(b.labels == std::vector<float>{1.0f, 0.0f});
  CHECK(b.number_columns == 13);
  CHECK(b.category_columns == 26);
  CHECK(b.numbers_of(0)[0] == -2.0f);
  CHECK(b.numbers_of(0)[12] == 10.0f);
  CHECK(b.categories_of(0)[25] == 0x68fd1e69u);
  for (int i = 0; i < 13; ++i) CHECK(std::isnan(b.numbers_of(1)[i]));
  for (int i = 0; i < 26; ++i) CHECK(b.categories_of(1)[i] == hd::table_batch::missing);
  CHECK(format.parse(empty.substr(1), b).what == kind::malformed);  // no label
  CHECK(format.parse(empty + '\t', b).what == kind::malformed);
  hd::table_batch test;
  CHECK(hd::criteo(false).parse(line.substr(2), test).what == kind::record);
  CHECK(test.labels == std::vector<float>{0.0f});
}

TEST_CASE("Bytes that aren't text, and lines cut anywhere, are faults with a place or rows") {
  using namespace std::string_literals;
  hd::sparse_batch b;
  CHECK(hd::libsvm{}.parse("1 1:1\0"s, b).what == kind::malformed);
  CHECK(hd::libsvm{}.parse("\0"s, b).what == kind::malformed);
  CHECK(hd::libffm{}.parse("1 1:\0001:1"s, b).what == kind::malformed);
  hd::table_batch t;
  const hd::csv texts{.columns = {hd::column::label, hd::column::text}};
  CHECK(texts.parse("1,a\0b"s, t).what == kind::record);  // any text is a category
  CHECK(texts.parse("1,a"s, t).what == kind::record);
  CHECK(t.categories[0] != t.categories[1]);
  CHECK(texts.parse("1\0,a"s, t).what == kind::malformed);
  CHECK(texts.parse("\r"s, t).what == kind::blank);
  CHECK(texts.parse("1,a\r\r"s, t).what == kind::record);
  CHECK(texts
            .parse("\xef\xbb\xbf"
                   "1,a"s,
                   t)
            .what == kind::malformed);
  CHECK(t.size() == 3);
  // Cut, and with a byte that is another, at every place.
  std::string criteo = "1";
  for (int i = 0; i < 13; ++i) criteo += "\t" + std::to_string(i);
  for (int i = 0; i < 26; ++i) criteo += "\t68fd1e64";
  const auto torment = [](const auto& format, const std::string& line) {
    typename std::decay_t<decltype(format)>::batch batch;
    std::size_t rows = 0, faults = 0;
    const auto parse = [&](const std::string& text) {
      const std::vector<char> exact(text.begin(), text.end());  // so that a sanitizer sees what lies behind
      const hd::parsed p = format.parse(std::string_view(exact.data(), exact.size()), batch);
      rows += p.what == kind::record;
      faults += p.what == kind::malformed;
      CHECK(batch.size() == rows);
      if (p.what == kind::malformed) CHECK((p.column <= text.size() && p.problem != nullptr));
    };
    for (std::size_t n = 0; n < line.size(); ++n) {
      parse(line.substr(0, n));
      for (const char c : {'\0', '\r', '"', '\xff', ':', '9', '-', 'e', '\t', ','}) {
        std::string other = line;
        other[n] = c;
        parse(other);
      }
    }
    CHECK(rows > 0);
    CHECK(faults > 0);
  };
  torment(hd::criteo(), criteo);
  torment(hd::libsvm{}, "1 3:0.5 18446744073709551615:-2e-3 0:7 # end");
  torment(hd::libffm{}, "1 0:9:0.5 4294967295:1:1e-3");
  torment(hd::csv{.columns = {hd::column::number, hd::column::text, hd::column::label}}, "1.5,\"a,\"\"b\",0");
}

TEST_CASE("Keys of features and hashes of records differ") {
  std::set<std::uint64_t> keys, hashes;
  for (std::uint64_t c = 0; c < 40; ++c) {
    for (std::uint64_t v = 0; v < 1000; ++v) keys.insert(hd::feature_key(c, v));
  }
  CHECK(keys.size() == 40000);
  std::string text;
  for (int i = 0; i < 200; ++i) {  // zeros of every length, too
    hashes.insert(hd::record_hash(text));
    for (std::size_t k = 0; k < text.size(); ++k) {
      for (int bit = 0; bit < 8; ++bit) {
        text[k] ^= static_cast<char>(1 << bit);
        hashes.insert(hd::record_hash(text));
        text[k] ^= static_cast<char>(1 << bit);
      }
    }
    text += '\0';
  }
  CHECK(hashes.size() == 200 + 8 * 199 * 200 / 2);
}

TEST_CASE("A format of a user's own") {
  numbers::batch b;
  CHECK(numbers{}.parse("2.5", b).what == kind::record);
  CHECK(numbers{}.parse("x", b).what == kind::malformed);
  CHECK(b.values == std::vector<double>{2.5});
}
