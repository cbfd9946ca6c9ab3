# SPDX-FileCopyrightText: The Heddle authors
# SPDX-License-Identifier: Apache-2.0
"""allreduce.py BINARY PEERS JSON [ROUNDS]: runs BINARY and the programs in the folder PEERS in turn, ROUNDS times (7), and
prints RATIO lines of the medians; writes JSON and beside it an SVG. docs/bench.md says what is measured."""

import json
import os
import statistics
import subprocess
import sys
import tempfile

KIB, MIB = 1 << 10, 1 << 20
SIZES = [KIB, 4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB]
MANY = [KIB, 64 * KIB, MIB]  # sizes with more ranks than cores
MANY_RANKS = 8
FLOOR_FROM = MIB  # below, memory's bandwidth isn't what limits
TOGETHER = ["native", "ring", "halving_doubling"]

ratios = []
samples = {}


def label(size):
    return f"{size // MIB}M" if size >= MIB else f"{size // KIB}K"


def ratio(case, ours, other, unit="us"):
    ratios.append({"case": case, "ours": ours, "other": other, "unit": unit, "ratio": other / ours})
    print(f"RATIO {case} {ours:.6g} {other:.6g} {unit} {other / ours:.3f}", flush=True)


def skip(case, why):
    print(f"SKIP {case} {why}", flush=True)


def work(sizes, ranks, slow):
    """BYTES CALLS SAMPLES of one run, for a program that takes `slow` times our time. Samples of small sizes are short and
    many, so that few of them are disturbed by what else runs."""
    words = []
    for size in sizes:
        seconds = (1e-6 + size * ranks / 10e9) * slow
        calls = max(1, int((0.003 if size < MIB else 0.03) / seconds))
        words += [str(size), str(calls), "15" if size < MIB else "3" if size < 64 * MIB else "2"]
    return words


def run(command, group):
    """Runs a program and keeps the samples that it prints as "<what> <bytes> <value>"."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if done.returncode != 0:
        sys.exit(f"allreduce.py: {' '.join(command)}: exit code {done.returncode}\n{done.stderr}")
    for line in done.stdout.splitlines():
        what, size, value = line.split()
        samples.setdefault((group, what, int(size)), []).append(float(value))


def median(group, what, size=0):
    return statistics.median(samples[group, what, size])


def measure(binary, peers, rounds):
    openmpi, gloo = (os.path.join(peers, "allreduce_" + x) for x in ("openmpi", "gloo"))
    mpirun = ["mpirun", "--allow-run-as-root", "--oversubscribe"]
    for _ in range(rounds):
        run([binary, "2"] + work(SIZES, 2, 2), "threads")
        run([binary, "stream", "2"], "threads")
        if os.path.exists(openmpi):
            run(mpirun + ["-np", "2", openmpi] + work(SIZES, 2, 5), "threads")
        if os.path.exists(gloo):
            with tempfile.TemporaryDirectory() as folder:
                run([gloo, "2", folder] + work(SIZES, 2, 20), "threads")
        run([binary, str(MANY_RANKS)] + work(MANY, MANY_RANKS, 20), "many")
        if os.path.exists(openmpi):
            run(mpirun + ["--mca", "mpi_yield_when_idle", "1", "-np", str(MANY_RANKS), openmpi] +
                work(MANY, MANY_RANKS, 100), "many")
        run([binary, "overlap"], "overlap")
        run([binary, "lanes"], "lanes")
    for _ in range(3):
        run([binary, "proof"], "proof")
    run([binary, "buckets"], "buckets")  # in simulated time, the same every time


def compare(peers):
    for peer in ("openmpi", "gloo"):
        there = os.path.exists(os.path.join(peers, "allreduce_" + peer))
        for size in SIZES:
            if there:
                ratio(f"threads.{label(size)}.{peer}", 1e6 * median("threads", "native", size),
                      1e6 * median("threads", peer, size))
            else:
                skip(f"threads.{label(size)}.{peer}", f"{peer} can't be had here")
    bandwidth = median("threads", "stream")
    print(f"memory: {bandwidth / 1e9:.2f} GB/s read and written by 2 threads")
    for size in SIZES:
        if size < FLOOR_FROM:
            continue
        # One pass reads and writes each buffer once. A schedule on two ranks: half a buffer read and a half read and
        # written while it is reduced, and a half read and a half written while it is gathered.
        for what in TOGETHER:
            case = f"threads.{label(size)}.floor" if what == "native" else f"threads.{what}.{label(size)}.floor"
            moved = 2 * 2 * size if what == "native" else 2 * 2.5 * size
            ratio(case, 1e6 * median("threads", what, size), 1e6 * moved / bandwidth)
        ratio(f"threads.{label(size)}.hand", 1e6 * median("threads", "native", size), 1e6 * median("threads", "hand", size))
    for size in MANY:
        case = f"threads.{MANY_RANKS}ranks.{label(size)}.openmpi"
        if ("many", "openmpi", size) in samples:
            ratio(case, 1e6 * median("many", "native", size), 1e6 * median("many", "openmpi", size))
        else:
            skip(case, "openmpi can't be had here")
    alone, serial, together = (median("overlap", x) for x in ("compute", "serial", "overlapped"))
    hidden = 1 - (together - alone) / (serial - alone)
    ratios.append({"case": "overlap", "ours": hidden, "other": 0.8, "unit": "hidden", "ratio": hidden / 0.8})
    print(f"overlap: compute {alone * 1e3:.1f} ms, serial {serial * 1e3:.1f} ms, overlapped {together * 1e3:.1f} ms")
    print(f"RATIO overlap {hidden:.3f} 0.8 hidden {hidden / 0.8:.3f}")
    for topology in sorted({what for group, what, _ in samples if group == "proof"}):
        ratio(f"proof.{topology}.1024", median("proof", topology, 1024), 1.0, "s")
    for links in ("near", "middle", "far"):
        caps = sorted(size for group, what, size in samples if group == "buckets" and what == links + ".cap")
        best = min(caps, key=lambda cap: median("buckets", links + ".cap", cap))
        print(f"buckets.{links}: " + ", ".join(f"{median('buckets', links + '.cap', cap) * 1e3:.1f} ms at {cap}"
                                               for cap in caps))
        ratio(f"buckets.{links}.best", 1e3 * median("buckets", links + ".automatic"),
              1e3 * median("buckets", links + ".cap", best), "ms")
    for lanes in (2, 4):
        ratio(f"lanes.{lanes}.one", 1e6 * median("lanes", "step", lanes), 1e6 * median("lanes", "step", 1))
    for size in SIZES:
        ratio(f"userop.threads.{label(size)}.builtin", 1e6 * median("threads", "userop", size),
              1e6 * median("threads", "ring", size))
    ratio("lanes.4.floor", 1e6 * median("lanes", "step", 4), 1e6 * median("lanes", "links"))


def draw(path):
    """Bytes reduced per second over the size, both axes logarithmic."""
    lines = {}
    for group, what, size in samples:
        if group == "threads" and size and what not in ("userop", "hand"):
            lines.setdefault(what, []).append((size, size / median(group, what, size) / 1e9))
    left, top, width, height = 60, 20, 560, 300
    low = min(y for line in lines.values() for _, y in line)
    high = max(y for line in lines.values() for _, y in line)

    import math

    def at(x, y):
        across = math.log(x / SIZES[0]) / math.log(SIZES[-1] / SIZES[0])
        up = math.log(y / low) / math.log(high / low)
        return f"{left + width * across:.1f},{top + height * (1 - up):.1f}"

    out = [f'<svg xmlns="http://www.w3.org/2000/svg" width="760" height="{top + height + 50}" font-family="sans-serif" '
           'font-size="12">', '<rect width="100%" height="100%" fill="white"/>']
    for size in SIZES:
        x, y = at(size, low).split(",")
        out.append(f'<line x1="{x}" y1="{top}" x2="{x}" y2="{y}" stroke="#ddd"/>'
                   f'<text x="{x}" y="{float(y) + 16:.1f}" text-anchor="middle">{label(size)}</text>')
    for power in range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1):
        y = at(SIZES[0], 10.0**power).split(",")[1]
        out.append(f'<line x1="{left}" y1="{y}" x2="{left + width}" y2="{y}" stroke="#ddd"/>'
                   f'<text x="{left - 6}" y="{y}" text-anchor="end">{10.0**power:g}</text>')
    out.append(f'<text x="{left + width / 2}" y="{top + height + 40}" text-anchor="middle">bytes per rank; GB/s reduced, '
               '2 ranks</text>')
    colours = ["#0072b2", "#56b4e9", "#009e73", "#d55e00", "#cc79a7"]
    for (what, line), colour in zip(sorted(lines.items()), colours):
        line.sort()
        out.append(f'<polyline points="{" ".join(at(*p) for p in line)}" fill="none" stroke="{colour}" stroke-width="2"/>')
        x, y = at(*line[-1]).split(",")
        out.append(f'<text x="{float(x) + 6:.1f}" y="{y}" fill="{colour}">{what}</text>')
    with open(path, "w") as file:
        file.write("\n".join(out + ["</svg>", ""]))


def main():
    binary, peers, path = sys.argv[1:4]
    rounds = int(sys.argv[4]) if len(sys.argv) > 4 else 7
    measure(binary, peers, rounds)
    compare(peers)
    for part in ("_mpi", "_overlap"):  # what allreduce.sh has measured over MPI
        there = os.path.splitext(path)[0] + part + ".json"
        if os.path.exists(there):
            with open(there) as file:
                ratios.extend(json.load(file)["ratios"])
    with open(path, "w") as file:
        all_samples = [{"group": g, "what": w, "bytes": s, "values": v} for (g, w, s), v in samples.items()]
        json.dump({"ratios": ratios, "samples": all_samples}, file, indent=1)
        file.write("\n")
    draw(os.path.splitext(path)[0] + ".svg")


main()
