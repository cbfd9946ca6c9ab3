# SPDX-FileCopyrightText: The Heddle authors
# SPDX-License-Identifier: Apache-2.0
"""check_trace.py FILE EVENTS: whether FILE is a trace as "Trace Event Format" of the Chromium project defines it, in its
JSON object form, with EVENTS complete events. Reads it with another parser than Heddle's own."""

import json
import sys

path, wanted = sys.argv[1], int(sys.argv[2])
with open(path, encoding="utf-8") as file:
    trace = json.load(file)
assert trace["displayTimeUnit"] in ("ms", "ns")
complete, named = {}, set()
for e in trace["traceEvents"]:
    assert isinstance(e["name"], str) and type(e["pid"]) is int and type(e["tid"]) is int, e
    if e["ph"] == "M":
        assert e["name"] in ("process_name", "thread_name") and isinstance(e["args"]["name"], str), e
        named.add((e["name"], e["pid"], e["tid"] if e["name"] == "thread_name" else None))
        continue
    assert e["ph"] == "X" and isinstance(e["cat"], str) and isinstance(e["args"], dict), e
    for key in ("ts", "dur"):
        assert type(e[key]) in (int, float) and e[key] >= 0, e
    complete.setdefault((e["pid"], e["tid"]), []).append((e["ts"], e["ts"] + e["dur"]))
for (process, thread), events in complete.items():
    assert ("process_name", process, None) in named and ("thread_name", process, thread) in named, (process, thread)
    inside = []  # of what an event is a part: on one thread a viewer can only show what nests
    for start, end in sorted(events, key=lambda x: (x[0], -x[1])):
        while inside and inside[-1] <= start:
            inside.pop()
        assert not inside or end <= inside[-1] + 1e-3, (process, thread, start, end)
        inside.append(end)
processes = {process for process, _ in complete}
assert not processes & {thread for _, thread in complete}, "a thread that viewers take for a main thread"
found = sum(len(events) for events in complete.values())
assert found == wanted, found
print(f"{found} events of {len(complete)} threads")
