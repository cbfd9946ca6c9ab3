# SPDX-FileCopyrightText: The Heddle authors
# SPDX-License-Identifier: Apache-2.0
"""overhead.py BINARY JSON: runs BINARY under callgrind, compiles heddle.hpp and the standard headers alone, prints RATIO
lines and adds them to JSON (Google Benchmark's file) under the key "ratios". docs/bench.md says what is measured."""

import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile

SIZES = ["64", "4096", "1M"]
RANKS = 4
FIXED = 300  # instructions at 64 elements
SLOWER = 1.05  # instructions at 1 M elements
INCLUDE = 1.35  # compile time

ratios = []


def ratio(case, ours, other, unit, value=None):
    value = other / ours if value is None else value
    ratios.append({"case": case, "ours": ours, "other": other, "unit": unit, "ratio": value})
    print(f"RATIO {case} {ours:.6g} {other:.6g} {unit} {value:.3f}", flush=True)


def skip(case, why):
    print(f"SKIP {case} {why}", flush=True)


def count(binary):
    """Instructions by name, without what the marks themselves cost."""
    with tempfile.TemporaryDirectory() as folder:
        out = os.path.join(folder, "count")
        run = subprocess.run(["valgrind", "--tool=callgrind", f"--callgrind-out-file={out}", binary],
                             stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if run.returncode != 0:
            sys.exit(f"overhead.py: {binary} under callgrind: exit code {run.returncode}\n{run.stdout}")
        counted = {}
        for name in os.listdir(folder):
            with open(os.path.join(folder, name)) as file:
                text = file.read()
            mark = re.search(r"^desc: Trigger: Client Request: (\S+)", text, re.M)
            if mark:
                counted[mark[1]] = int(re.search(r"^totals: (\d+)", text, re.M)[1])
    empty = counted.pop("empty", 0)
    return {name: n - empty for name, n in counted.items()}


def instructions(binary):
    if not shutil.which("valgrind"):
        return skip("overhead.instructions", "there is no valgrind")
    n = count(binary)
    if not n:
        return skip("overhead.instructions", "built without valgrind/callgrind.h: remove build/bench and run this again")
    kinds = {"1rank": ["1rank"], "4ranks": [f"4ranks{r}.inlined" for r in range(RANKS)],
             "4ranks.called": [f"4ranks{r}" for r in range(RANKS)]}
    for kind, names in kinds.items():
        for size in SIZES:
            pairs = [(n[f"{x}.ours.{size}"], n[f"{x}.hand.{size}"]) for x in names]
            ours, hand = max(pairs, key=lambda p: p[0] / p[1])  # the rank that is worst off
            ratio(f"overhead.{kind}.{size}.instructions", ours, hand, "instructions")
            if size == "1M":
                ratio(f"overhead.{kind}.{size}.bound", ours, SLOWER * hand, "instructions")
            if size == "64":
                more = max(ours - hand for ours, hand in pairs)
                ratio(f"overhead.{kind}.{size}.fixed", more, FIXED, "instructions", FIXED / max(more, 1))
    for size in SIZES:  # equal by construction; the bound on time is 0.95
        ratio(f"overhead.userop.{size}.builtin", n[f"hop.userop.{size}"], n[f"hop.sum.{size}"], "instructions")
    for size in SIZES:  # no bound: it also agrees on samples, looks for values that aren't finite, and keeps figures
        ratio(f"overhead.1rank.{size}.data_parallel", n[f"1rank.step.{size}"], n[f"1rank.hand.{size}"], "instructions")


def seconds(command):
    """Processor time of a command."""
    child = subprocess.Popen(command)
    _, status, usage = os.wait4(child.pid, 0)
    if status != 0:
        sys.exit(f"overhead.py: {' '.join(command)}: failed")
    return usage.ru_utime + usage.ru_stime


def include_cost(repetitions=9):
    compiler = os.environ.get("CXX", "g++")
    with tempfile.TemporaryDirectory() as folder:
        ours, standard = os.path.join(folder, "ours.cpp"), os.path.join(folder, "standard.cpp")
        with open(ours, "w") as file:
            file.write("#include <heddle/heddle.hpp>\n")
        command = [compiler, "-std=c++20", "-O3", "-DNDEBUG", "-I", "include"]
        listed = subprocess.run(command + ["-MM", ours], check=True, stdout=subprocess.PIPE, text=True).stdout
        headers = set()
        for path in re.findall(r"include/heddle/\S+", listed):
            with open(path) as file:
                headers |= set(re.findall(r"^#include <((?!heddle/)[^>]+)>", file.read(), re.M))
        with open(standard, "w") as file:
            file.writelines(f"#include <{h}>\n" for h in sorted(headers))
        times = {ours: [], standard: []}
        for _ in range(repetitions):  # interleaved
            for source in times:
                times[source].append(seconds(command + ["-c", source, "-o", os.path.join(folder, "out.o")]))
        a, b = (statistics.median(times[x]) for x in (ours, standard))
    print(f"heddle.hpp {a:.3f} s, its {len(headers)} standard headers {b:.3f} s: {a / b:.3f} times")
    ratio("include.heddle", a, INCLUDE * b, "s")


def main():
    binary, path = sys.argv[1:3]
    instructions(binary)
    include_cost()
    try:
        with open(path) as file:
            report = json.load(file)
    except FileNotFoundError:
        report = {}
    report["ratios"] = ratios
    with open(path, "w") as file:
        json.dump(report, file, indent=1)
        file.write("\n")


main()
