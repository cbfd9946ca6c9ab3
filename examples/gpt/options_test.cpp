// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
//
// What the command line takes and refuses.

#include "options.hpp"

#include <initializer_list>
#include <string>
#include <vector>

#include "catch.hpp"

namespace {

gpt::options read(std::initializer_list<const char*> arguments, std::size_t processes = 0) {
  std::vector<std::string> kept{"gpt"};
  kept.insert(kept.end(), arguments.begin(), arguments.end());
  std::vector<char*> pointers;
  for (std::string& a : kept) pointers.push_back(a.data());
  return gpt::read_options(static_cast<int>(pointers.size()), pointers.data(), "text", processes);
}

}  // namespace

TEST_CASE("options: values come with a space or an equals sign, names are gathered") {
  const gpt::options o = read({"--ranks", "3", "--rate=0.5", "--strategy", "a,b", "--strategy=c", "--check"});
  CHECK(o.ranks == 3);
  CHECK(o.rate == 0.5);
  CHECK(o.strategies == std::vector<std::string>{"a", "b", "c"});
  CHECK(o.check);
  CHECK(o.data == "text");
  CHECK_FALSE(o.standard());
  CHECK(read({}).standard());
}

TEST_CASE("options: what is wrong is refused") {
  for (const auto& wrong : std::initializer_list<std::initializer_list<const char*>>{
           {"--rank", "3"}, {"ranks"}, {"--ranks"}, {"--ranks", "0"}, {"--ranks", "65"}, {"--ranks", "3x"},
           {"--ranks", "-1"}, {"--ranks", ""}, {"--rate", "nan"}, {"--rate", "inf"}, {"--check=yes"},
           {"--strategy", "a,,b"}, {"--heads", "5"}, {"--batch", "3"}, {"--long", "--strategy", "dgc"}}) {
    CHECK_THROWS_AS(read(wrong), gpt::usage_error);
  }
}

TEST_CASE("options: what is given beside --long counts") {
  CHECK(read({"--long"}).steps == 14000);
  CHECK(read({"--long"}).standard());
  const gpt::options o = read({"--steps", "7", "--long", "--ranks", "6"});
  CHECK(o.steps == 7);
  CHECK(o.batch == 6);
  CHECK(o.layers == 4);
  CHECK(o.strategies == std::vector<std::string>{"ring-adamw"});
  CHECK_FALSE(o.standard());
}

TEST_CASE("options: under mpirun the number of processes is the number of ranks") {
  CHECK(read({}, 5).ranks == 5);
  CHECK_THROWS_AS(read({"--ranks", "4"}, 5), gpt::usage_error);
}
