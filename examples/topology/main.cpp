// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#include "drawing.hpp"

#include <heddle/collective/automatic.hpp>
#include <heddle/collective/verify.hpp>

#include <charconv>
#include <cstdio>
#include <functional>
#include <string_view>

namespace hd = heddle;

namespace {

constexpr const char* usage = R"(usage: topology [options] TOPOLOGY RANKS

Proves an all-reduce, prints its rounds, bytes and predicted time, and draws it.

TOPOLOGY is ring, direct, halving_doubling, recursive_doubling, tree, double_tree, torus_2d:WIDTH, leaders:GROUP,
mixed_radix:FACTOR,FACTOR.. (fastest first), hierarchical:GROUP or hierarchical:GROUP,INTRA,INTER (ring, direct or
halving_doubling inside a group, any of these names across), star (a topology of the user's, in this program's source),
or automatic. Behind any of them, /CHUNKS or /CHUNKS/SKEW pipelines it.

  --bytes N     bytes of the buffer (default 26214400)
  --links FILE  what links cost, as links::save writes it (default: machines of 8 ranks, a port of 10 Gbit/s for each)
  --svg FILE    draw the schedule; small numbers of ranks and rounds are readable
)";

// Everybody to rank 0 and back: two rounds, and rank 0 does everything.
struct star {
  hd::schedule all_reduce(int rank, int size, std::size_t count) const {
    hd::schedule s;
    for (const bool back : {false, true}) {
      const hd::action receive = back ? hd::action::copy : hd::action::reduce;
      const bool sends = (rank == 0) == back;
      for (int peer = rank ? 0 : 1; peer < (rank ? 1 : size); ++peer) {
        s.add(sends ? hd::action::send : receive, peer, {0, count});
      }
      s.next();
    }
    return s;
  }
};

struct any {  // a topology that is chosen at run time
  std::function<hd::schedule(int, int, std::size_t)> make;
  hd::schedule all_reduce(int rank, int size, std::size_t count) const { return make(rank, size, count); }
};
template <class Topology> any erased(const Topology& t) {
  return {[t](int rank, int size, std::size_t count) { return t.all_reduce(rank, size, count); }};
}

template <class Number> Number number(std::string_view text, const char* what) {
  Number n{};
  const auto end = std::from_chars(text.data(), text.data() + text.size(), n);
  if (end.ec != std::errc{} || end.ptr != text.data() + text.size()) {
    throw hd::argument_error(std::string(what) + " is '" + std::string(text) + "', a number is needed");
  }
  return n;
}

std::vector<std::string_view> words_of(std::string_view text) {  // what commas separate; of nothing, none
  std::vector<std::string_view> words;
  for (std::size_t at = 0; !text.empty() && at != std::string_view::npos;) {
    const std::size_t end = text.find(',', at);
    words.push_back(text.substr(at, end - at));
    at = end == std::string_view::npos ? end : end + 1;
  }
  return words;
}

any two_levels(int group, std::string_view intra, const any& inter) {
  const auto with = [&](const auto& inside) { return erased(hd::hierarchical{inside, inter, group}); };
  if (intra == "ring") return with(hd::ring{});
  if (intra == "direct") return with(hd::direct{});
  if (intra == "halving_doubling") return with(hd::halving_doubling{});
  throw hd::argument_error("INTRA is '" + std::string(intra) + "', allowed are ring, direct and halving_doubling");
}

any parse(std::string_view text) {
  const auto cut = [&text](char at) {  // what is behind the last `at`, which goes
    const std::size_t k = text.rfind(at);
    if (k == std::string_view::npos) return std::string_view{};
    const std::string_view behind = text.substr(k + 1);
    text = text.substr(0, k);
    return behind;
  };
  std::string_view chunks = cut('/'), skew = chunks;
  if (const std::string_view before = cut('/'); !before.empty())
    chunks = before;
  else
    skew = "1";
  if (!chunks.empty())
    return erased(hd::pipelined<any>{parse(text), number<int>(chunks, "CHUNKS"), number<int>(skew, "SKEW")});
  const std::vector<std::string_view> settings = words_of(cut(':'));
  if (text == "mixed_radix") {
    hd::mixed_radix t;
    if (settings.size() > t.radices.size()) throw hd::argument_error("mixed_radix takes 12 factors at most");
    for (std::size_t i = 0; i < settings.size(); ++i) t.radices[i] = number<int>(settings[i], "a FACTOR");
    return erased(t);
  }
  const int width = settings.empty() ? 0 : number<int>(settings[0], "WIDTH or GROUP");
  if (text == "hierarchical" && settings.size() == 3) return two_levels(width, settings[1], parse(settings[2]));
  if (settings.size() > 1) throw hd::argument_error(std::string(text) + " takes another number of settings");
  if (text == "ring") return erased(hd::ring{});
  if (text == "direct") return erased(hd::direct{});
  if (text == "halving_doubling") return erased(hd::halving_doubling{});
  if (text == "recursive_doubling") return erased(hd::recursive_doubling{});
  if (text == "tree") return erased(hd::tree{});
  if (text == "double_tree") return erased(hd::double_tree{});
  if (text == "torus_2d") return erased(hd::torus_2d{width});
  if (text == "hierarchical") return erased(hd::hierarchical<>{.group = width});
  if (text == "leaders") return erased(hd::leaders<>{.group = width});
  if (text == "star") return erased(star{});
  throw hd::argument_error("no topology is called '" + std::string(text) + "'");
}

int run(int argc, char** argv) {
  std::size_t bytes = 25u << 20;
  std::string svg;
  hd::links costs{{{1e-6, 1.0 / 40e9}, hd::sharing::rank}, {{2e-5, 1.0 / 1.25e9}, hd::sharing::node}, 1.0 / 20e9, 8};
  std::vector<std::string> words;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    if (word == "-h" || word == "--help") return std::fputs(usage, stdout), 0;
    if (word.starts_with("-")) {
      if (i + 1 == argc) throw hd::argument_error(word + " needs a value");
      const std::string value = argv[++i];
      if (word == "--bytes")
        bytes = number<std::size_t>(value, "--bytes");
      else if (word == "--links")
        costs = hd::links::load(value);
      else if (word == "--svg")
        svg = value;
      else
        throw hd::argument_error("there is no option " + word);
    } else {
      words.push_back(word);
    }
  }
  if (words.size() != 2) throw hd::argument_error("TOPOLOGY and RANKS are needed; --help says more");
  const int size = number<int>(words[1], "RANKS");
  if (size < 1 || size > 4096) throw hd::argument_error("RANKS is " + words[1] + ", allowed is 1 to 4096");

  std::string name = words[0];
  any topology;
  if (name == "automatic") {
    const auto candidates = hd::automatic{costs}.explain(size, bytes);
    std::fputs(hd::table(candidates).c_str(), stdout);
    name = candidates.front().name();
    topology = erased(candidates.front());
  } else {
    topology = parse(name);
  }
  const std::size_t count = (bytes + 3) / 4;
  std::vector<hd::schedule> all;
  for (int r = 0; r < size; ++r) all.push_back(topology.all_reduce(r, size, count));
  const hd::verdict v = hd::detail::prove(all, count, {});
  std::size_t most = 0, total = 0, messages = 0;
  for (const hd::schedule& s : all) {
    std::size_t sent = 0;
    for (const hd::operation& o : s.operations()) {
      if (o.act != hd::action::send) continue;
      sent += 4 * o.range.count;
      ++messages;
    }
    most = most > sent ? most : sent;
    total += sent;
  }
  std::printf("%s on %d ranks, %zu bytes of float\n", name.c_str(), size, bytes);
  if (v)
    std::printf("proven: every rank ends with every contribution once\n");
  else
    std::printf("WRONG: %s, rank %d, round %zu\n", hd::name_of(v.what), v.rank, v.round);
  std::printf("rounds    %zu\nmessages  %zu\nsent      %zu bytes in all, %zu by the busiest rank\n", all[0].rounds(),
              messages, total, most);
  std::printf("predicted %.6f ms\n", hd::detail::price_of(all, 4, costs) * 1e3);
  if (!svg.empty()) {
    draw(svg, name + " on " + std::to_string(size) + " ranks", all, count);
    std::printf("drawn to  %s\n", svg.c_str());
  }
  return v ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "topology: %s\n", e.what());
    return 2;
  }
}
