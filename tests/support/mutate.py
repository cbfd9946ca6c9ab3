# SPDX-FileCopyrightText: The Heddle authors
# SPDX-License-Identifier: Apache-2.0
"""Deletes one ordering call of the CUDA code at a time and sees whether a test fails.

Called by tests/mutate.sh with the repository and a scratch copy of it whose presets are configured.
"""
import argparse
import pathlib
import re
import subprocess
import sys
import time

# What orders work, and what a deleted call gives instead: a wait or an event success, a barrier that counts what its
# own thread brought, a barrier or fence nothing.
SUCCESS, OWN, NOTHING = "(auto&&...) { return cudaSuccess; }", "(int own) { return int(own != 0); }", "(auto&&...) {}"
RESULT = {name: SUCCESS for name in (
    "cudaEventRecord", "cudaEventRecordWithFlags", "cudaStreamWaitEvent", "cudaEventSynchronize", "cudaEventQuery",
    "cudaStreamSynchronize", "cudaStreamQuery", "cudaDeviceSynchronize")}
RESULT |= {"__syncthreads_" + kind: OWN for kind in ("count", "and", "or")}
RESULT |= {name: NOTHING for name in (
    "__syncthreads", "__syncwarp", "__threadfence", "__threadfence_block", "__threadfence_system")}
# The same through a queue or an event of heddle/core/cuda.cuh: a statement `q.wait(e);`.
METHODS = r"(?<=[;{})\s])((?:\w+(?:\.|->))+)(wait|record|synchronize)"
CALL = re.compile(r"(?:\b(" + "|".join(RESULT) + r")|" + METHODS + r")\s*\(")
HOST_SIDE = re.compile(r"\bcuda(Stream|Event)\w+\(|\bcuda_order\b")  # a .hpp that is CUDA code too
REASON = re.compile(r"mutation survives: *(.*)")


def sites(text):
    """(position, end, name, line) of each call outside of comments."""
    code = re.sub(r"//[^\n]*|/\*.*?\*/", lambda m: re.sub(r"[^\n]", " ", m.group()), text, flags=re.S)
    for match in CALL.finditer(code):
        depth, end = 1, match.end()
        while depth:
            depth += {"(": 1, ")": -1}.get(code[end], 0)
            end += 1
        name = match.group(1) or match.group(2) + match.group(3)
        yield match.start(), end, name, code.count("\n", 0, match.start()) + 1


def without(text, begin, end, name):
    """The text with one call deleted; its arguments are still evaluated, so that nothing is unused."""
    arguments = text[text.index("(", begin) + 1:end - 1]
    called_on = re.match(r"(.*?)(?:\.|->)\w+$", name)
    kept = f"static_cast<void>({called_on.group(1)}), " if called_on else ""
    return f"{text[:begin]}{kept}[]{RESULT.get(name, NOTHING)}({arguments}){text[end:]}"


def run(command, cwd, limit=900):
    try:
        done = subprocess.run(command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=limit)
        return done.returncode, done.stdout.decode(errors="replace")
    except subprocess.TimeoutExpired:
        return 124, "did not end"


def verdict(scratch, presets, jobs):
    """Which preset's tests fail, or None."""
    for preset in presets:
        built, log = run(["cmake", "--build", "--preset", preset, "-j", jobs, "--target", "emulated_tests"], scratch)
        if built != 0:
            return "does not compile", log
        wrap = ["setarch", "-R"] if preset == "tsan" else []
        failed, log = run(wrap + ["ctest", "--preset", preset, "-L", "emulated", "-E", "^emulated_device"], scratch)
        if failed != 0:
            return "fails under " + preset, log
    return None, ""


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("root", type=pathlib.Path)
    parser.add_argument("scratch", type=pathlib.Path)
    parser.add_argument("--presets", default="release,tsan")
    parser.add_argument("--jobs", default="2")
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    presets = options.presets.split(",")

    mutations = []
    for path in sorted((options.root / "include").rglob("*.*")):
        text = path.read_text()
        if path.suffix != ".cuh" and not HOST_SIDE.search(text):
            continue
        lines = text.split("\n")
        for begin, end, name, line in sites(text):
            reason = REASON.search(lines[line - 1]) or (line > 1 and REASON.search(lines[line - 2]))
            mutations.append((path, begin, end, name, line, reason.group(1) if reason else None))
    if options.list:
        for path, _, _, name, line, reason in mutations:
            print(f"{path.relative_to(options.root)}:{line} {name}" + (f"  (survives: {reason})" if reason else ""))
        return 0

    wrong, log = verdict(options.scratch, presets, options.jobs)
    if wrong:
        print(log)
        sys.exit(f"the tests fail without any mutation: {wrong}")
    found, survivors = 0, []
    for number, (path, begin, end, name, line, reason) in enumerate(mutations, 1):
        relative = path.relative_to(options.root)
        target = options.scratch / relative
        text = path.read_text()
        start = time.monotonic()
        target.write_text(without(text, begin, end, name))
        try:
            said, log = verdict(options.scratch, presets, options.jobs)
        finally:
            target.write_text(text)
        if said == "does not compile":
            print(log)
            sys.exit(f"{relative}:{line}: the mutation of {name} does not compile; mend tests/support/mutate.py")
        found += said is not None
        if said is None:
            survivors.append(f"{relative}:{line} {name}: {reason or 'no reason given'}")
        print(f"{number}/{len(mutations)} {relative}:{line} without {name}: {said or 'SURVIVES'}"
              f" ({time.monotonic() - start:.0f} s)", flush=True)
    print(f"{found} of {len(mutations)} deletions fail a test")
    for line in survivors:
        print("survives: " + line)
    return 0 if found >= 0.95 * len(mutations) else 1


if __name__ == "__main__":
    sys.exit(main())
