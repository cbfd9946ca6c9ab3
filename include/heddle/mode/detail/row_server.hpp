// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/collective/detail/pieces.hpp>
#include <heddle/comm/detail/numbered.hpp>
#include <heddle/comm/self.hpp>
#include <heddle/mode/detail/row_wire.hpp>

#include <limits>
#include <optional>
#include <utility>

namespace heddle {
inline namespace v0 {
namespace detail {

struct row_server_settings {
  static constexpr std::uint64_t unbounded = (std::numeric_limits<std::uint64_t>::max)();

  std::uint64_t staleness = unbounded;  // see async_ps
  bool background = false;              // workers are a push ahead of their answers
  std::uint32_t merge = 1;
  float compensation = 0.0f;
  bool moves = false;  // pushes are added to the parameters; no rule
  bool half = false;   // they travel as float16
  // Workers from this rank on may leave or die without ending the others' training.
  int dispensable = (std::numeric_limits<int>::max)();
};

// The rule of a server that adds moves.
struct no_rule {
  static constexpr int slots = 0;
  void update(float*, const float*, float* const*, std::size_t, const update_context&) const noexcept {}
};

// One server of rows: the parameters of its rows, the state of the update rule, and what each worker has pushed.
// One thread at a time. Whoever changes a row notes the clock beside it before anybody can ask again, so that no change
// of a row is ever missed: a worker is given the rows that changed after the clock that it has seen.
template <class Rule, class Memory> class row_server {
 public:
  // values: the parameters of all rows, in order.
  row_server(const Rule& rule, const Memory& memory, const row_map& map, int server, int workers, std::size_t tensors,
             const row_server_settings& s)
      : map_(&map),
        server_(server),
        first_(map.first(server)),
        rows_(map.first(server + 1) - first_),
        base_(map.start(first_)),
        settings_(s),
        values_(memory, map.start(first_ + rows_) - base_),
        sent_(memory, s.compensation > 0.0f ? values_.size() * static_cast<std::size_t>(workers) : 0),
        update_(rule, memory, values_.size(), tensors),
        changed_(rows_, 0),
        by_(s.half ? rows_ : 0, -1),
        before_(by_.size(), 0),
        clients_(static_cast<std::size_t>(workers)),
        contexts_(tensors, {.lr = 1.0f}) {
    map.each(first_, first_ + rows_, [&](const row_map::row& r) {
      if (!pieces_.empty() && pieces_.back().tensor == r.tensor &&
          pieces_.back().begin + pieces_.back().count == r.begin)
        pieces_.back().count += r.count;
      else
        pieces_.push_back({.tensor = r.tensor, .begin = r.begin, .count = r.count, .state = r.at - base_});
    });
  }

  // Runs of elements of one tensor each, in order; where their state is.
  const std::vector<piece>& pieces() const noexcept { return pieces_; }
  auto& state() noexcept { return update_; }
  std::size_t bytes() const noexcept {
    return values_.bytes() + sent_.bytes() + update_.bytes() + changed_.size() * sizeof changed_[0] +
           by_.size() * (sizeof by_[0] + sizeof before_[0]);
  }
  std::uint64_t clock() const noexcept { return clock_; }
  // What the rule is told of a tensor, with the factor on its rate.
  void context(std::size_t tensor, const update_context& x) { contexts_[tensor] = x; }
  // New parameters: tensor(i) gives those of tensor i. All workers have them too.
  template <class Tensor> void assign(Tensor&& tensor, std::uint64_t clock) {
    for (const piece& p : pieces_) std::copy_n(tensor(p.tensor) + p.begin, p.count, values_.data() + p.state);
    for (std::size_t at = 0; at < sent_.size(); at += values_.size())
      std::copy_n(values_.data(), values_.size(), sent_.data() + at);
    clock_ = clock;
    std::fill(changed_.begin(), changed_.end(), 0);
    std::fill(by_.begin(), by_.end(), -1);
    std::fill(before_.begin(), before_.end(), 0);
  }

  // A message of a worker, or news of it. send(rank, id, bytes) sends a reply.
  template <class Send> void heed(message& m, Send&& send) {
    if (m.from.rank < 0 || static_cast<std::size_t>(m.from.rank) >= clients_.size()) return;
    client& c = clients_[static_cast<std::size_t>(m.from.rank)];
    if (m.kind == message_kind::died || m.kind == message_kind::left || m.kind == message_kind::refused) {
      forget(c);
      if (failed_by_ >= 0) return;
      if (m.from.rank < settings_.dispensable || m.kind == message_kind::refused)
        return fail(m.from.rank, std::string(m.body.text()), send);
      c.gone = c.joined = true;  // what it has pushed counts
      c.waiting = false;
      c.coming.clear();
      return go_on(send);
    }
    if (m.kind != message_kind::data || c.gone) return;
    try {
      take(c, m, send);
    } catch (const file_error& e) {  // it is damaged
      fail(m.from.rank, e.what(), send);
    }
  }
  // Whether every worker that was told that all have joined has heard it, so that this rank may leave.
  bool heard() const noexcept {
    return std::none_of(clients_.begin(), clients_.end(), [](const client& c) { return c.told; });
  }
  // Asks those who haven't thanked whether they have heard it.
  template <class Send> void remind(Send&& send) {
    for (std::size_t i = 0; i < clients_.size(); ++i)
      if (clients_[i].told) reply(static_cast<int>(i), clients_[i].asked, {.status = row_status::answered}, send);
  }
  // Nobody can go on: all learn why, before this rank leaves for the same reason. But for those who were told that all
  // have joined: they need nothing any more, and their answer may be lost or wait behind this.
  template <class Send> void fail(int rank, const std::string& why, Send&& send) {
    failed_by_ = rank;
    failure_ = why;
    for (std::size_t i = 0; i < clients_.size(); ++i)
      if (static_cast<int>(i) != rank && !clients_[i].told) refuse(static_cast<int>(i), clients_[i].asked, send);
  }

 private:
  struct request {
    row_tag tag;
    payload body;
  };
  struct client : numbered_inbox<request> {
    std::uint64_t asked = 0, pushes = 0;  // the last request with a reply; pushes since all have joined
    std::uint64_t lag = 0;                // staleness of the last gradient
    row_request head{};                   // of the last request with a reply
    std::vector<payload> coming, bodies;  // of the gradient that isn't whole yet, and of one that isn't applied yet
    std::vector<std::byte> last_words;    // the reply to a join, as others may go on and change what it says
    bool waiting = false, joined = false, skipped = false, whole = false;
    bool told = false;  // that all have joined, and hasn't thanked yet
    bool gone = false;  // for good
  };

  template <class Send> void take(client& c, message& m, Send& send) {
    const auto rank = m.from.rank;
    if (static_cast<row_tag>(m.tag) == row_tag::thanks) {
      if (m.id == c.asked) forget(c);
      return;
    }
    const bool answered = m.id == c.asked && !c.waiting;
    // Who leaves after all have joined is no failure for those who were told so; what they said before may come late.
    if (failed_by_ >= 0 && !(c.told && m.id <= c.asked)) return refuse(rank, m.id, send);
    if (static_cast<row_tag>(m.tag) == row_tag::again) {
      if (answered) answer(c, send);
      return;
    }
    if (static_cast<row_tag>(m.tag) == row_tag::probe) {
      const auto probe = byte_reader(m.body.data(), m.body.size(), "a probe").get<std::uint64_t>();
      std::uint64_t number = c.taken + 1;
      for (auto early = c.kept.begin(); early != c.kept.end() && early->first <= m.id; ++early) {
        if (early->first > number) miss(rank, number, early->first, probe, send);
        number = early->first + 1;
      }
      if (number <= m.id)
        miss(rank, number, m.id + 1, probe, send);
      else if (answered)
        reply(rank, m.id, {.staleness = probe, .status = row_status::answered}, send);
      return;
    }
    std::uint64_t number = c.taken + 1;
    const std::uint64_t next = c.kept.empty() ? number : c.kept.rbegin()->first + 1;
    if (!c.put(m.id, {static_cast<row_tag>(m.tag), std::move(m.body)})) return;  // repeated
    // They are mostly lost.
    if (m.id > next) miss(rank, next, m.id, 0, send);
    for (; number <= c.taken; ++number) {
      request r = std::move(c.kept.extract(number).mapped());
      const row_request head = row_head<row_request>(r.body);
      row_reader(r.body, head, *map_, server_);  // refuses a head that doesn't fit
      if (r.tag == row_tag::part)
        c.coming.push_back(std::move(r.body));
      else
        end(c, number, head, std::move(r), send);
    }
  }
  // A worker has said all of a push or a join.
  template <class Send> void end(client& c, std::uint64_t number, const row_request& head, request&& r, Send& send) {
    if (c.whole) apply_whole();  // a worker is in a mean once
    forget(c);
    c.asked = number;
    c.head = head;
    c.waiting = true;
    c.skipped = false;
    c.lag = clock_ - (std::min)(clock_, head.seen);
    c.joined = r.tag == row_tag::join;
    c.pushes += !c.joined;
    const bool counts = !head.bad && head.samples > 0.0;
    c.coming.push_back(std::move(r.body));
    if (settings_.moves && (settings_.staleness > 0 || c.joined)) {
      for (const payload& body : c.coming) add(static_cast<int>(&c - clients_.data()), body);
    } else if (!c.joined && (settings_.staleness == 0 || counts)) {
      c.bodies = std::move(c.coming);
      c.whole = true;
    }
    c.coming.clear();
    go_on(send);
  }
  // It has heard the reply to its join.
  static void forget(client& c) noexcept {
    c.told = false;
    c.last_words = {};
  }

  std::size_t active() const noexcept {
    std::size_t n = 0;
    for (const client& c : clients_) n += !c.joined;
    return n;
  }

  // Applies and answers what can be.
  template <class Send> void go_on(Send& send) {
    const std::size_t n = active();
    if (settings_.staleness == 0) {
      bool all = n > 0;
      for (const client& c : clients_) all &= c.joined || c.whole;
      if (all) apply_whole();
    } else {
      std::size_t whole = 0;
      for (const client& c : clients_) whole += c.whole;
      if (whole > 0 && whole >= (std::min<std::size_t>)(settings_.merge, (std::max<std::size_t>)(n, 1))) apply_whole();
    }
    std::uint64_t least = settings_.unbounded;
    for (const client& c : clients_)
      if (!c.joined) least = (std::min)(least, c.pushes);
    for (client& c : clients_) {
      if (!c.waiting || (c.joined && n > 0)) continue;
      const bool close = c.pushes <= least || c.pushes - least <= settings_.staleness - settings_.background;
      if (c.joined || (settings_.staleness == 0 ? !c.whole : close)) {
        c.waiting = false;
        c.told = c.joined;
        answer(c, send);
      }
    }
    if (n > 0) return;
    for (client& c : clients_) c.joined = c.gone, c.pushes = 0;
  }

  // One update from all gradients that are whole: their mean, weighted by samples, in the order of ranks. Where servers
  // wait for all, weights are rounded as every_step rounds them.
  void apply_whole() {
    double most = 0.0, sum = 0.0;
    bool bad = false;
    for (const client& c : clients_) {
      if (!c.whole) continue;
      bad |= c.head.bad != 0;
      most = (std::max)(most, c.head.samples);
      sum += c.head.samples;
    }
    const double ranks = static_cast<double>(clients_.size());
    rest_ = static_cast<float>(most * ranks / sum);
    const bool skip = bad || !(most > 0.0);
    std::vector<row_reader> from;
    std::vector<const client*> whose;
    row_request last;
    for (client& c : clients_) {
      if (!c.whole) continue;
      c.skipped = skip;
      if (skip || !(c.head.samples > 0.0)) continue;
      for (const payload& body : c.bodies) {
        from.emplace_back(body, row_head<row_request>(body), *map_, server_);
        whose.push_back(&c);
      }
      last = c.head;
    }
    if (!skip) {
      // Readers by their next rows, the first on top; of one row in the order of ranks.
      std::vector<std::pair<std::size_t, std::size_t>> heap;
      const auto later = [](const auto& a, const auto& b) { return a > b; };
      const auto push = [&](std::size_t i) {
        if (from[i].done()) return;
        heap.emplace_back(from[i].row().number, i);
        std::push_heap(heap.begin(), heap.end(), later);
      };
      for (std::size_t i = 0; i < from.size(); ++i) push(i);
      while (!heap.empty()) {
        const row_map::row row = from[heap.front().second].row();
        for (bool begun = false; !heap.empty() && heap.front().first == row.number;) {
          const std::size_t i = heap.front().second;
          std::pop_heap(heap.begin(), heap.end(), later);
          heap.pop_back();
          collect(row, from[i].values(), *whose[i], most, std::exchange(begun, true));
          from[i].next();
          push(i);
        }
        settings_.moves ? move(row) : update(row, 1.0 / (together() ? ranks : sum / most), last);
        note(row, -1);
      }
      ++clock_;
    }
    for (client& c : clients_) {
      c.whole = false;
      c.bodies.clear();
    }
  }

  bool together() const noexcept { return settings_.staleness == 0; }
  void collect(const row_map::row& row, const float* g, const client& c, double most, bool more) {
    total_.resize(row.count);
    const float* const now = values_.data() + (row.at - base_);
    const float* const then =
        sent_.size() ? sent_.data() + static_cast<std::size_t>(&c - clients_.data()) * values_.size() + (row.at - base_)
                     : now;
    const double share = c.head.samples / most, weight = settings_.moves || together() ? 1.0 : share;
    const float factor = (together() && !settings_.moves ? static_cast<float>(share) * rest_ : 1.0f) * c.head.factor;
    for (std::size_t k = 0; k < row.count; ++k) {
      float x = g[k];
      if (factor != 1.0f) x *= factor;
      if (c.head.limit > 0.0f && !together()) x = std::clamp(x, -c.head.limit, c.head.limit);
      if (sent_.size()) x += settings_.compensation * x * x * (now[k] - then[k]);
      const double part = weight * static_cast<double>(x);
      total_[k] = more ? total_[k] + part : part;
    }
  }
  void update(const row_map::row& row, double factor, const row_request& last) {
    gradient_.resize(row.count);
    for (std::size_t k = 0; k < row.count; ++k) gradient_[k] = static_cast<float>(total_[k] * factor);
    const piece p{.tensor = row.tensor, .begin = row.begin, .count = row.count, .state = row.at - base_};
    update_context context = contexts_[row.tensor];
    context.lr *= last.lr;
    context.step = static_cast<std::size_t>(clock_);
    const auto view = [&](const piece& x) { return piece_view<>{values_.data() + x.state, gradient_.data(), context}; };
    const scaling scale{1.0f, together() ? last.limit : 0.0f};
    if constexpr (layerwise<Rule>) update_.advance(static_cast<self*>(nullptr), {p}, view, scale);
    update_.apply(p, view, scale);
  }
  void move(const row_map::row& row) {
    float* const x = values_.data() + (row.at - base_);
    for (std::size_t k = 0; k < row.count; ++k) x[k] += static_cast<float>(total_[k]);
  }
  // A row changes, by the moves of one worker or of several, -1.
  void note(const row_map::row& row, int worker) {
    const std::size_t r = row.number - first_;
    if (!by_.empty() && (worker < 0 || by_[r] != worker)) before_[r] = changed_[r], by_[r] = worker;
    changed_[r] = clock_ + 1;
  }
  // A worker's moves, at once.
  void add(int worker, const payload& body) {
    bool some = false;
    for (row_reader in(body, row_head<row_request>(body), *map_, server_); !in.done(); in.next(), some = true) {
      float* const x = values_.data() + (in.row().at - base_);
      for (std::size_t k = 0; k < in.row().count; ++k) x[k] += in.values()[k];
      note(in.row(), worker);
    }
    clock_ += some;
  }

  template <class Send> void answer(client& c, Send& send) {
    const auto worker = static_cast<std::size_t>(&c - clients_.data());
    if (!c.last_words.empty()) return send(static_cast<int>(worker), c.asked, std::vector<std::byte>(c.last_words));
    row_writer out(c.head.half != 0);
    // It knows what it moved itself. But for rounding: so only where all rows come in the end.
    const bool others = c.head.half && !c.head.whole && !by_.empty();
    map_->each(first_, first_ + rows_, [&](const row_map::row& r) {
      const std::size_t i = r.number - first_;
      const std::uint64_t last = others && by_[i] == static_cast<int>(worker) ? before_[i] : changed_[i];
      if (last <= (c.head.whole ? 0 : c.head.seen)) return;
      const float* const x = values_.data() + (r.at - base_);
      out.add(static_cast<std::uint32_t>(r.number - first_), x, r.count);
      if (sent_.size()) std::copy_n(x, r.count, sent_.data() + worker * values_.size() + (r.at - base_));
    });
    const row_reply head{.clock = clock_, .staleness = c.lag, .skipped = c.skipped, .half = c.head.half};
    std::vector<std::byte> words = out.message(head, rows_);
    if (c.told) c.last_words = words;
    send(static_cast<int>(worker), c.asked, std::move(words));
  }
  template <class Send> void reply(int rank, std::uint64_t id, row_reply head, Send& send) {
    byte_writer out;
    out.put(head);
    send(rank, id, out.release());
  }
  // Requests from the first to before the last haven't come.
  template <class Send> void miss(int rank, std::uint64_t first, std::uint64_t last, std::uint64_t probe, Send& send) {
    const auto rows = static_cast<std::uint32_t>((std::min<std::uint64_t>)(last - first, all_rows));
    reply(rank, last, {.clock = first, .staleness = probe, .status = row_status::missing, .rows = rows}, send);
  }
  template <class Send> void refuse(int rank, std::uint64_t id, Send& send) {
    const row_reply head{.staleness = static_cast<std::uint64_t>(failed_by_), .status = row_status::failed};
    byte_writer out;
    out.put(head);
    out.put(failure_.data(), failure_.size());
    send(rank, id, out.release());
  }

  const row_map* map_;
  int server_;
  std::size_t first_, rows_, base_;
  row_server_settings settings_;
  buffer<float, Memory> values_, sent_;  // sent_: with compensation, what each worker has read
  piecewise<Rule, Rule::slots, Memory> update_;
  std::vector<piece> pieces_;
  std::vector<std::uint64_t> changed_;  // of each row: the clock when it changed last
  std::vector<int> by_;                 // with moves as float16: who changed it last, -1: several
  std::vector<std::uint64_t> before_;   // and when somebody else did last
  std::uint64_t clock_ = 0;
  std::vector<client> clients_;
  std::vector<update_context> contexts_;  // of each tensor
  std::vector<double> total_;
  float rest_ = 1.0f;  // of all weights: what the largest one is short of its share
  std::vector<float> gradient_;
  int failed_by_ = -1;
  std::string failure_;
};

}  // namespace detail
}  // namespace v0
}  // namespace heddle
