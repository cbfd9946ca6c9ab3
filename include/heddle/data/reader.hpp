// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/core/philox.hpp>
#include <heddle/data/detail/cutter.hpp>
#include <heddle/data/reader_options.hpp>

#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>

namespace heddle {
inline namespace v0 {

/// @brief Reads records from files by several threads into several bounded queues, each record once an epoch.
///
/// Files are cut into pieces. A record belongs to the piece in which it begins, so none is cut and none is read twice.
/// Ranks take pieces in turn; a rank's readers take whichever of its pieces is next, parse, and hand batches to queues.
///
///     hd::multi_queue_reader reader{hd::libsvm{}, {"train.svm"}, {.readers = 2, .queues = threads, .epochs = 3}};
///     // thread q:
///     hd::sparse_batch batch;
///     for (int epoch = 0; epoch < 3; ++epoch) {
///       while (reader.pop(q, batch)) train(batch);    // false: the epoch is over
///     }
///
/// A batch goes to the shortest queue that has room; a reader waits while all are full. With `deterministic`, batch k
/// of an epoch goes to queue k modulo their number, and its contents depend on the files, the options that aren't
/// `readers`, `capacity` or `block`, and nothing else. Readers go on with the next epoch while queues are still read.
///
/// State:   capacity batches a queue, a few a reader; `block` bytes a reader and more while a record is longer; with
///          `deterministic` also a parsed piece a reader; with `shuffle` a window a reader and 4 bytes a piece.
/// Traffic: a file's byte is copied from the system once, looked at for a delimiter, hashed, parsed; all but the first
///          within `block`, so in cache. Batches move by pointer, and their memory is used again.
/// Sync:    pop() blocks until there is a batch or the epoch is over. All members may be called from any thread.
/// Throws:  argument_error for options outside their range; record_error if a file can't be opened. What happens to a
///          reader later is thrown by the next pop of every queue, whatever else is in it, and by all after it.
/// @tparam Format A record_format.
template <class Format> class multi_queue_reader {
  static_assert(record_format<Format>,
                "heddle::multi_queue_reader: the first argument must be a record format: batch, parse(), and one of "
                "delimiter() and width(); see docs/data.md");

 public:
  /// What queues carry.
  using batch = typename Format::batch;

  /// Opens every file for its size and starts the readers. @param format How records look. @param files Regular files;
  /// on all ranks the same ones in the same order. @param options See there.
  explicit multi_queue_reader(Format format, std::vector<std::string> files, const reader_options& options = {})
      : format_(checked(std::move(format))),
        options_(checked(options)),
        pieces_(cut(std::move(files), options_)),
        queues_(options_.queues) {
    const std::uint64_t count = pieces_.count(), ranks = options_.ranks;
    mine_ = count / ranks + (options_.rank < count % ranks);
    spare_.reserve(options_.queues * (std::min)(options_.capacity, std::size_t{64}));
    report_.pieces = mine_;
    report_.files = fingerprint_;
    begin_epoch();
    crew_.reader = this;
    for (std::size_t i = 0; i < options_.readers; ++i) crew_.threads.emplace_back([this, i] { work(i); });
  }

  multi_queue_reader(const multi_queue_reader&) = delete;
  multi_queue_reader& operator=(const multi_queue_reader&) = delete;

  /// @brief Takes the next batch of a queue. False: its epoch is over, and the next call is about the next one; after
  /// the last epoch, and after stop(), always false.
  /// @param queue From 0; for one consumer, since only one pop reports the end of an epoch. @param into Receives the
  /// batch; what it held before is used again. Empty after false.
  /// Throws: argument_error if there is no such queue; what a reader threw.
  bool pop(std::size_t queue, batch& into) {
    if (queue >= queues_.size()) {
      throw argument_error("heddle::multi_queue_reader::pop: queue " + std::to_string(queue) + " of " +
                           std::to_string(queues_.size()));
    }
    into.clear();
    std::unique_lock lock(mutex_);
    one& q = queues_[queue];
    const auto settled = [&] { return stopped_ || !q.items.empty() || q.epoch == options_.epochs; };
    report_.empty_waits += !settled();
    q.filled.wait(lock, settled);
    if (failure_) std::rethrow_exception(failure_);
    if (stopped_ || q.items.empty()) return false;
    item& first = q.items.front();
    if (first.end) {
      q.items.pop_front();
      ++q.epoch;
      lock.unlock();
      room_.notify_all();
      return false;
    }
    std::swap(into, first.records);
    if (spare_.size() < spare_.capacity()) spare_.push_back(std::move(first.records));
    q.items.pop_front();
    --q.batches;
    report_.epochs[q.epoch].delivered += into.size();
    lock.unlock();
    room_.notify_all();
    return true;
  }

  /// Ends reading early: every pop that waits and every later one returns false. A consumer that leaves before the end
  /// calls it, if others wait for batches that would have been behind its own.
  void stop() noexcept {
    {
      std::lock_guard lock(mutex_);
      stopped_ = true;
    }
    wake();
  }

  /// What was read and handed out so far; final for epochs that are complete.
  reader_report report() const {
    std::lock_guard lock(mutex_);
    return report_;
  }

 private:
  struct item {
    batch records;
    bool end = false;  // of an epoch
  };
  struct one {
    std::deque<item> items;
    std::size_t batches = 0;  // items that are no ends
    std::uint64_t epoch = 0;  // the one that its consumer is in
    std::condition_variable filled;
  };
  struct interrupted {};                          // ends a reader after stop()
  static constexpr std::size_t most_ends = 1024;  // of epochs in a queue

  // Joins the readers before anything that they use goes.
  struct crew {
    ~crew() {
      if (reader) reader->stop();
      for (std::thread& t : threads) t.join();
    }
    multi_queue_reader* reader = nullptr;
    std::vector<std::thread> threads;
  };

  // What one reader holds.
  struct worker {
    worker(const multi_queue_reader& r, std::size_t n)
        : number(n), text(r.format_, r.options_.block, r.options_.longest) {}
    std::size_t number;
    std::uint64_t epoch = 0;
    std::uint64_t turn = 0, piece = 0;  // the piece among those of this rank, and among all
    detail::cutter<Format> text;
    batch open, window;
    std::vector<std::uint32_t> order;
    std::uint64_t windows = 0;
    std::vector<batch> waiting;  // deterministic: for this piece's turn
    epoch_report counted;        // not yet in the report
  };

  static Format checked(Format format) {
    if constexpr (requires { format.check(); }) format.check();
    return format;
  }
  static const reader_options& checked(const reader_options& o) {
    o.check();
    return o;
  }

  detail::file_pieces cut(std::vector<std::string> paths, const reader_options& o) {
    std::vector<std::uint64_t> sizes;
    std::uint64_t total = 0;
    for (const std::string& path : paths) {
      sizes.push_back(detail::input_file(path).size());
      total += sizes.back();
      fingerprint_ = record_hash(std::to_string(fingerprint_) + ' ' + std::to_string(sizes.back()));
    }
    std::uint64_t length = o.piece;
    if (length == 0) length = std::clamp(total / 16 / o.ranks, std::uint64_t{1} << 16, std::uint64_t{1} << 22);
    detail::file_pieces pieces(std::move(paths), std::move(sizes), length);
    if (pieces.count() >> 32) {
      throw argument_error("heddle::multi_queue_reader: " + std::to_string(pieces.count()) + " pieces of " +
                           std::to_string(length) + " bytes, allowed are less than 2^32");
    }
    return pieces;
  }

  // Under the lock, or before there are readers.
  void begin_epoch() {
    next_ = turn_ = batches_ = 0;
    if (epoch_ == options_.epochs) return;
    report_.epochs.emplace_back();
    if (options_.shuffle == 0) return;
    permute(order_, pieces_.count(), random_stream(~0u, epoch_number(epoch_)), 0);
  }
  std::uint32_t epoch_number(std::uint64_t epoch) const noexcept {
    return static_cast<std::uint32_t>(options_.first_epoch + epoch);
  }

  // A random order of n numbers, the same for the same stream and window.
  void permute(std::vector<std::uint32_t>& order, std::uint64_t n, std::uint64_t stream, std::uint64_t window) const {
    order.resize(n);
    for (std::uint32_t i = 0; i < n; ++i) order[i] = i;
    philox4x32::block random{};
    for (std::uint32_t i = 0; i + 1 < n; ++i) {
      if (i % 4 == 0) random = philox(options_.seed, stream, window << 32 | i);
      const std::uint64_t rest = n - i;
      std::swap(order[i], order[i + static_cast<std::uint32_t>(random.word[i % 4] * rest >> 32)]);
    }
  }

  void work(std::size_t number) noexcept {
    try {
      worker w(*this, number);
      for (; w.epoch < options_.epochs; ++w.epoch) {
        while (take_piece(w)) {
          w.text.read(
              pieces_, w.piece, [&](std::string_view record, std::uint64_t offset) { take(w, record, offset); },
              [&](std::uint64_t offset) {
                skip(w, {}, parsed::malformed(0, "expected a multiple of the records' width to the file's end"),
                     offset);
              });
          w.counted.bytes += pieces_.length(w.piece);
          if (options_.deterministic) flush(w);
          finish_piece(w);
        }
        flush(w);
        w.windows = 0;
        finish_epoch(w);
      }
    } catch (const interrupted&) {
    } catch (...) {  // for the consumers
      {
        std::lock_guard lock(mutex_);
        if (!stopped_) failure_ = std::current_exception();
        stopped_ = true;
      }
      wake();
    }
  }

  void wake() noexcept {
    for (one& q : queues_) q.filled.notify_all();
    room_.notify_all();
  }

  bool take_piece(worker& w) {
    std::lock_guard lock(mutex_);
    if (stopped_) throw interrupted{};
    if (next_ == mine_) return false;
    w.turn = next_++;
    w.piece = w.turn * options_.ranks + options_.rank;
    if (options_.shuffle) w.piece = order_[w.piece];
    if (options_.deterministic) w.windows = 0;
    return true;
  }

  // Counts a piece, and hands on what waited for its turn.
  void finish_piece(worker& w) {
    std::unique_lock lock(mutex_);
    report_.epochs[w.epoch] += w.counted;
    w.counted = {};
    if (!options_.deterministic) return;
    wait(lock, [&] { return turn_ == w.turn; });
    hand_in_turn(w, lock);
    ++turn_;
    lock.unlock();
    room_.notify_all();
  }

  // The last reader to come ends the epoch; the others wait for it.
  void finish_epoch(worker& w) {
    std::unique_lock lock(mutex_);
    if (++arrived_ < options_.readers) {
      wait(lock, [&] { return epoch_ != w.epoch; });
      return;
    }
    // Ends take no room; but epochs without a record must not run away from their consumers.
    wait(lock, [&] {
      for (const one& q : queues_) {
        if (q.items.size() - q.batches >= most_ends) return false;
      }
      return true;
    });
    arrived_ = 0;
    report_.epochs[epoch_].complete = true;
    ++epoch_;
    begin_epoch();
    for (one& q : queues_) q.items.push_back({batch{}, true});
    lock.unlock();
    wake();
  }

  // Waits for room or a turn.
  template <class Condition> void wait(std::unique_lock<std::mutex>& lock, Condition condition) {
    const auto settled = [&] { return stopped_ || condition(); };
    report_.full_waits += !settled();
    room_.wait(lock, settled);
    if (stopped_) throw interrupted{};
  }

  // Hands a batch on and leaves an empty one in its place.
  void hand(worker& w, batch& records) {
    if (records.size() == 0) return;
    std::unique_lock lock(mutex_);
    if (options_.deterministic) {
      w.waiting.push_back(std::move(records));
      if (turn_ == w.turn) hand_in_turn(w, lock);
    } else {
      one* to = nullptr;
      wait(lock, [&] {
        to = &queues_[w.number % queues_.size()];
        for (one& q : queues_) to = q.batches < to->batches ? &q : to;
        return to->batches < options_.capacity;
      });
      push(*to, std::move(records));
    }
    records = batch{};
    if (!spare_.empty()) {
      records = std::move(spare_.back());
      spare_.pop_back();
    }
    records.clear();
  }
  void hand_in_turn(worker& w, std::unique_lock<std::mutex>& lock) {
    for (batch& b : w.waiting) {
      one& to = queues_[batches_ % queues_.size()];
      wait(lock, [&] { return to.batches < options_.capacity; });
      push(to, std::move(b));
      ++batches_;
    }
    w.waiting.clear();
  }
  void push(one& to, batch&& records) {
    to.items.push_back({std::move(records), false});
    report_.most_queued = (std::max)(report_.most_queued, ++to.batches);
    to.filled.notify_one();
  }

  void flush(worker& w) {
    if (options_.shuffle) spill(w);
    hand(w, w.open);
  }

  // Hands the window on in a random order.
  void spill(worker& w) {
    const std::size_t n = w.window.size();
    const std::uint64_t who = options_.deterministic ? w.piece : options_.rank * options_.readers + w.number;
    permute(w.order, n, random_stream(static_cast<std::uint32_t>(who), epoch_number(w.epoch)), w.windows++);
    for (const std::uint32_t i : w.order) {
      w.open.append(w.window, i);
      if (w.open.size() >= options_.batch) hand(w, w.open);
    }
    w.window.clear();
  }

  void take(worker& w, std::string_view record, std::uint64_t offset) {
    batch& to = options_.shuffle ? w.window : w.open;
    const parsed p = format_.parse(record, to);
    if (p.what == parsed::kind::record) {
      ++w.counted.records;
      if (options_.hash) w.counted.hash += record_hash(record);
      if (to.size() >= (options_.shuffle ? options_.shuffle : options_.batch))
        options_.shuffle ? spill(w) : hand(w, w.open);
    } else if (p.what == parsed::kind::blank) {
      ++w.counted.blank;
    } else {
      skip(w, record, p, offset);
    }
  }

  // Counts a record that can't be parsed. Throws record_error if there are more than are allowed.
  void skip(worker& w, std::string_view record, const parsed& p, std::uint64_t offset) {
    std::string detail = std::string(p.problem) + ", found \"";
    for (const char c : record.substr((std::min)(p.column, record.size()), 24)) detail += c < ' ' || c > '~' ? '?' : c;
    detail += '"';
    {
      std::lock_guard lock(mutex_);
      std::uint64_t& count = report_.epochs[w.epoch].malformed;
      if (count < options_.skip) {
        if (report_.first_malformed.empty())
          report_.first_malformed = record_error(w.text.path(), offset + p.column, 0, detail).what();
        ++count;
        return;
      }
    }
    if (options_.skip) detail += "; " + std::to_string(options_.skip) + " were left out before, the option `skip`";
    w.text.fail(offset, p.column, detail);
  }

  Format format_;
  reader_options options_;
  std::uint64_t fingerprint_ = 0;
  detail::file_pieces pieces_;
  std::uint64_t mine_ = 0;    // pieces of this rank
  mutable std::mutex mutex_;  // guards all below
  std::condition_variable room_;
  std::vector<one> queues_;
  std::vector<batch> spare_;
  std::vector<std::uint32_t> order_;
  std::uint64_t epoch_ = 0, next_ = 0, turn_ = 0, batches_ = 0;  // batches_: handed out in this epoch, in turns
  std::size_t arrived_ = 0;
  bool stopped_ = false;
  std::exception_ptr failure_;
  reader_report report_;
  crew crew_;  // last: its destructor ends the readers
};

}  // namespace v0
}  // namespace heddle
