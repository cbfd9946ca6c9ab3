# SPDX-FileCopyrightText: The Heddle authors
# SPDX-License-Identifier: Apache-2.0
"""word2vec_scale.py SECONDS <MEASURED: words per second and efficiency of 1, 2, 4, 8 workers, simulated. SECONDS: of a
worker alone for a batch of 10,000 words; MEASURED: lines "<mode> <workers> <bytes a worker sends per batch>", with what it
sends to the server that it has itself, which needs no link.

Every worker is a machine with one processor and one link, on which its messages, and those of the server that it has,
wait for each other. Batches take up to a tenth longer at random. A push goes to each server, half of the bytes; each
answers with as much: under sync when all have pushed, else at once. Workers under sync and geo compute the next batch
meanwhile, those under async wait."""

import heapq
import random
import sys

LINKS = {"10gbit": 1e10, "1gbit": 1e9, "100mbit": 1e8}
LATENCY = 100e-6
BATCHES = 200
WORDS = 10000


def simulate(mode, workers, seconds, sent, rate):
    """Seconds until all workers have trained on BATCHES batches each."""
    events, order, free = [], 0, [0.0] * workers
    part = sent / 2 / workers  # of a push or an answer
    computed, pushed, answered = [0] * workers, [0] * workers, [0] * workers
    waiting = [0] * workers  # answers to come of each worker's pushes
    arrived = [[[] for _ in range(BATCHES + 1)] for _ in range(workers)]  # under sync, at each server
    draw = random.Random(1)

    def at(time, what, *about):
        nonlocal order
        order += 1
        heapq.heappush(events, (time, order, what, about))

    def send(now, source, target, what, *about):
        if source == target:
            return at(now, what, *about)
        free[source] = max(free[source], now) + 8.0 * part / rate
        at(free[source] + LATENCY, what, *about)

    def compute(now, w):
        at(now + seconds * (1.0 + 0.1 * draw.random()), "computed", w)

    def go_on(now, w):  # pushes what is computed, if the push before is answered, and computes on
        if computed[w] == pushed[w] or answered[w] < pushed[w]:
            return
        pushed[w] += 1
        waiting[w] = workers
        for k in range(workers):
            send(now, w, k, "push", k, w, pushed[w])
        if mode != "async" and computed[w] < BATCHES:
            compute(now, w)

    for w in range(workers):
        compute(0.0, w)
    last = 0.0
    while events:
        last, _, what, about = heapq.heappop(events)
        if what == "computed":
            computed[about[0]] += 1
            go_on(last, about[0])
        elif what == "push":
            server, w, number = about
            arrived[server][number].append(w)
            ready = [w]
            if mode == "sync":
                ready = arrived[server][number] if len(arrived[server][number]) == workers else []
            for to in ready:
                send(last, server, to, "answer", to)
        else:
            w = about[0]
            waiting[w] -= 1
            if waiting[w] == 0:
                answered[w] += 1
                if mode == "async" and computed[w] < BATCHES:
                    compute(last, w)
                go_on(last, w)
    return last


def main():
    seconds = float(sys.argv[1])
    measured = {}
    for line in sys.stdin:
        mode, workers, sent = line.split()
        measured[mode, int(workers)] = float(sent)
    counts = sorted({workers for _, workers in measured})
    print(f"simulated, {1e3 * seconds:.1f} ms a batch; words/s, and of it per worker against one alone")
    lines = []
    for link, rate in LINKS.items():
        print(f"{link:<10}" + "".join(f"{n:>15} workers" for n in [1] + counts))
        for mode in ["sync", "async", "geo"]:
            alone = simulate(mode, 1, seconds, 0.0, rate)
            row = f"{mode:<10}{BATCHES * WORDS / alone:>16.0f} 100 %"
            for n in counts:
                taken = simulate(mode, n, seconds, measured[mode, n], rate)
                row += f"{n * BATCHES * WORDS / taken:>17.0f} {100 * alone / taken:>3.0f} %"
                lines.append(f"RATIO scale.{link}.{mode}.{n} {n * BATCHES * WORDS / taken:.0f} "
                             f"{n * BATCHES * WORDS / alone:.0f} words/s {alone / taken:.3f}")
            print(row)
    print("\n".join(lines))


main()
