# SPDX-FileCopyrightText: The Heddle authors
# SPDX-License-Identifier: Apache-2.0
"""allreduce_sim.py PROGRAM JSON [CLUSTER...]: runs the MPI build of bench/peers/allreduce_sim.cpp on simulated clusters
(SimGrid's SMPI), and prints RATIO lines; writes JSON and beside it an SVG. docs/bench.md says what is measured."""

import json
import math
import os
import subprocess
import sys
import tempfile

SIZES = {"64K": 65536, "1M": 1000000, "25M": 25000000}
SELECTORS = ["ompi", "mpich"]
ALWAYS = "automatic"
XML = ("<?xml version='1.0'?>\n<!DOCTYPE platform SYSTEM \"https://simgrid.org/simgrid.dtd\">\n"
       '<platform version="4.1">\n{}</platform>\n')
# Looking at a request takes no time, computation takes what the program says.
SETTINGS = ["smpi/simulate-computation:no", "smpi/iprobe:0", "smpi/test:0", "smpi/wtime:0", "smpi/host-speed:1Gf",
            "smpi/grow-injected-times:no", "network/crosstraffic:no"]
# Messages of any size have the link's latency and 95 % of its bandwidth; SMPI's own factors are those of TCP.
PLAIN = ["smpi/lat-factor:0:1", "smpi/bw-factor:0:0.95"]


def flat(hosts, bandwidth, latency, more=""):
    """Hosts with one port each, on a switch that carries everything unless `more` describes another network."""
    xml = (f'<cluster id="c" prefix="h" suffix="" radical="0-{hosts - 1}" speed="1Gf" bw="{bandwidth}Bps" '
           f'lat="{latency}s" {more}/>\n')
    return XML.format(xml), [f"h{i}" for i in range(hosts)]


def machines(count, ranks, bandwidth, latency, port_bandwidth, port_latency):
    """Machines whose ranks have a port each inside, and share one port of the machine to a switch."""
    out = ['<zone id="all" routing="Full">\n']
    for m in range(count):
        out.append(f'<cluster id="m{m}" prefix="m{m}r" suffix="" radical="0-{ranks - 1}" speed="1Gf" '
                   f'bw="{bandwidth}Bps" lat="{latency}s" router_id="m{m}router"/>\n')
    for m in range(count):
        out.append(f'<link id="port{m}" bandwidth="{port_bandwidth}Bps" latency="{port_latency}s" '
                   'sharing_policy="SPLITDUPLEX"/>\n')
    for a in range(count):
        for b in range(count):
            if a != b:
                out.append(f'<zoneRoute src="m{a}" dst="m{b}" gw_src="m{a}router" gw_dst="m{b}router" '
                           f'symmetrical="NO"><link_ctn id="port{a}" direction="UP"/>'
                           f'<link_ctn id="port{b}" direction="DOWN"/></zoneRoute>\n')
    return XML.format("".join(out + ["</zone>\n"])), [f"m{m}r{r}" for m in range(count) for r in range(ranks)]


def fat_tree(down, up, bandwidth, latency):
    """Two levels: `up` switches above `down` switches that have `down` hosts each."""
    return flat(down * down, bandwidth, latency, f'topology="FAT_TREE" topo_parameters="2;{down},{down};1,{up};1,1"')


# name: what it is, platform, ranks of a machine, seconds that a byte's reduction takes, sizes, further settings
CLUSTERS = {
    "machines16x8": ("16 machines of 8 ranks, 100 GB/s a rank inside, 25 GB/s a machine outside",
                     lambda: machines(16, 8, 100e9, 0.5e-6, 25e9, 1e-6), 8, 1e-11, "64K 1M 25M", PLAIN),
    "fattree16": ("16 hosts, fat tree, 12.5 GB/s", lambda: fat_tree(4, 4, 12.5e9, 0.5e-6), 0, 2e-11, "25M", PLAIN),
    "fattree256": ("256 hosts, fat tree, 12.5 GB/s", lambda: fat_tree(16, 16, 12.5e9, 0.5e-6), 0, 2e-11, "64K 25M",
                   PLAIN),
    "fattree1024": ("1024 hosts, fat tree, 12.5 GB/s", lambda: fat_tree(32, 32, 12.5e9, 0.5e-6), 0, 2e-11, "25M",
                    PLAIN),
    "cloud32": ("32 hosts of a public cloud, TCP, 1.25 GB/s, 100 us",
                lambda: flat(32, 1.25e9, 25e-6, 'bb_bw="20e9Bps" bb_lat="50e-6s"'), 0, 1e-10, "64K 1M 25M", []),
    "machine8": ("8 ranks of one machine, 50 GB/s", lambda: flat(8, 50e9, 1e-6), 0, 1e-11, "64K 1M 25M", PLAIN),
    "machines8x4": ("8 machines of 4 ranks, 12 GB/s inside, 1.25 GB/s outside",
                    lambda: machines(8, 4, 12e9, 2e-6, 1.25e9, 20e-6), 4, 5e-11, "64K 1M 25M", PLAIN),
    "machines5x6": ("5 machines of 6 ranks, 50 GB/s inside, 12.5 GB/s outside",
                    lambda: machines(5, 6, 50e9, 1e-6, 12.5e9, 2e-6), 6, 2e-11, "64K 1M 25M", PLAIN),
    "crossbar100": ("100 hosts on one switch, 3 GB/s", lambda: flat(100, 3e9, 5e-6), 0, 5e-11, "64K 1M 25M", PLAIN),
    "thin64": ("64 hosts, fat tree with a quarter of the links above, 12.5 GB/s",
               lambda: flat(64, 12.5e9, 0.5e-6, 'topology="FAT_TREE" topo_parameters="2;16,4;1,4;1,1"'), 0, 2e-11,
               "64K 1M 25M", PLAIN),
    # Measured for the first time when the model was final.
    "machines6x4": ("6 machines of 4 ranks, 25 GB/s inside, 6 GB/s outside",
                    lambda: machines(6, 4, 25e9, 1.5e-6, 6e9, 5e-6), 4, 3e-11, "64K 1M 25M", PLAIN),
    "machines3x16": ("3 machines of 16 ranks, 8 GB/s inside, 3 GB/s outside",
                     lambda: machines(3, 16, 8e9, 0.8e-6, 3e9, 10e-6), 16, 1e-10, "64K 1M 25M", PLAIN),
    "hosts48": ("48 hosts on one switch, 1.5 GB/s", lambda: flat(48, 1.5e9, 15e-6), 0, 5e-11, "64K 1M 25M", PLAIN),
    "fattree64": ("64 hosts, fat tree with half of the links above, 5 GB/s",
                  lambda: flat(64, 5e9, 1e-6, 'topology="FAT_TREE" topo_parameters="2;8,8;1,4;1,1"'), 0, 2e-11,
                  "64K 1M 25M", PLAIN),
    "cloud12": ("12 hosts of a public cloud, TCP, 0.3 GB/s, 200 us", lambda: flat(12, 0.3e9, 100e-6), 0, 1e-10,
                "64K 1M 25M", []),
    "torus64": ("64 hosts, links to neighbours in three dimensions only, 5 GB/s",
                lambda: flat(64, 5e9, 1e-6, 'topology="TORUS" topo_parameters="4,4,4"'), 0, 2e-11, "64K 1M 25M", PLAIN),
    # Measured for the first time when the model knew distances, for the sake of torus64.
    "torus36": ("36 hosts, links to neighbours in two dimensions only, 2 GB/s",
                lambda: flat(36, 2e9, 2e-6, 'topology="TORUS" topo_parameters="6,6"'), 0, 4e-11, "64K 1M 25M", PLAIN),
    "torus27": ("27 hosts, links to neighbours in three dimensions only, 1 GB/s",
                lambda: flat(27, 1e9, 5e-6, 'topology="TORUS" topo_parameters="3,3,3"'), 0, 5e-11, "64K 1M 25M", PLAIN),
    "thin48": ("48 hosts, fat tree with a quarter of the links above, 10 GB/s",
               lambda: flat(48, 10e9, 1e-6, 'topology="FAT_TREE" topo_parameters="2;12,4;1,3;1,1"'), 0, 2e-11,
               "64K 1M 25M", PLAIN),
}

ratios, times = [], {}


def ratio(case, ours, other, unit="us"):
    ratios.append({"case": case, "ours": ours, "other": other, "unit": unit, "ratio": other / ours})
    print(f"RATIO {case} {ours:.6g} {other:.6g} {unit} {other / ours:.3f}", flush=True)


def simulate(program, folder, cluster, kind, selector):
    _, platform, node, gamma, sizes, settings = CLUSTERS[cluster]
    xml, hosts = platform()
    paths = [os.path.join(folder, x) for x in ("platform.xml", "hosts")]
    for path, text in zip(paths, (xml, "\n".join(hosts) + "\n")):
        with open(path, "w") as file:
            file.write(text)
    command = ["smpirun", "-no-privatize", "-platform", paths[0], "-hostfile", paths[1], "-np", str(len(hosts))]
    command += ["--cfg=" + s for s in SETTINGS + settings + ["smpi/coll-selector:" + selector]]
    command += ["--log=root.thres:warning", program, kind, str(node), str(gamma)]
    command += [str(SIZES[s]) for s in sizes.split()]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if done.returncode != 0:
        sys.exit(f"allreduce_sim.py: {' '.join(command)}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    for line in done.stdout.splitlines():
        what, size, seconds, model, name = line.split(" ", 4)
        label = next(s for s in SIZES if SIZES[s] == int(size))
        what = selector if kind == "mpi" else what
        times.setdefault((cluster, label), {})[what] = {"us": 1e6 * float(seconds), "model": 1e6 * float(model),
                                                            "name": name}


def compare(cluster):
    print(f"{cluster}: {CLUSTERS[cluster][0]}; us")
    for size in CLUSTERS[cluster][4].split():
        row = times[cluster, size]
        print(f"  {size:>4} " + ", ".join(f"{what} {t['us']:.1f}" for what, t in row.items()) +
              f"; automatic is {row[ALWAYS]['name']}", flush=True)
        ours = row[ALWAYS]["us"]
        for selector in SELECTORS:
            case = f"sim.{cluster}.{size}.{selector}"
            if selector in row:
                ratio(case, ours, row[selector]["us"])
            else:
                print(f"SKIP {case} this selector sends some two million messages, which take the simulator too long")
        ratio(f"sim.{cluster}.{size}.best", ours, min(t["us"] for what, t in row.items() if what not in SELECTORS))


def draw(path):
    """Of 25 MB on each cluster: times over automatic's, the axis logarithmic."""
    rows = [c for c in CLUSTERS if (c, "25M") in times]
    colours = {"ring": "#0072b2", "torus_2d": "#56b4e9", "halving_doubling": "#009e73", "hierarchical": "#f0e442",
               "pipelined": "#e69f00", "automatic": "#000000", "ompi": "#d55e00", "mpich": "#cc79a7"}
    left, top, width, step = 130, 50, 560, 26
    most = max(t["us"] / times[c, "25M"][ALWAYS]["us"] for c in rows for t in times[c, "25M"].values())
    low, high = math.log(0.9), math.log(1.05 * most)

    def across(x):
        return left + width * (math.log(x) - low) / (high - low)

    height = top + step * len(rows) + 40
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + width + 40}" height="{height}" '
           'font-family="sans-serif" font-size="12">', '<rect width="100%" height="100%" fill="white"/>']
    for i, (what, colour) in enumerate(colours.items()):
        x, y = left + 140 * (i % 4), 16 + 16 * (i // 4)
        out.append(f'<circle cx="{x}" cy="{y - 4}" r="5" fill="{colour}"/><text x="{x + 10}" y="{y}">{what}</text>')
    for x in (1, 2, 4, 8, 16):
        if math.log(x) < high:
            out.append(f'<line x1="{across(x):.1f}" y1="{top}" x2="{across(x):.1f}" y2="{height - 40}" stroke="#ddd"/>'
                       f'<text x="{across(x):.1f}" y="{height - 24}" text-anchor="middle">{x}</text>')
    for i, cluster in enumerate(rows):
        y = top + step * (i + 0.5)
        out.append(f'<text x="{left - 10}" y="{y + 4}" text-anchor="end">{cluster}</text>')
        row = times[cluster, "25M"]
        for what, t in row.items():
            out.append(f'<circle cx="{across(t["us"] / row[ALWAYS]["us"]):.1f}" cy="{y}" r="5" fill="{colours[what]}" '
                       'fill-opacity="0.8"/>')
    out.append(f'<text x="{left + width / 2}" y="{height - 6}" text-anchor="middle">25 MB: time over that of automatic'
               '</text>')
    with open(path, "w") as file:
        file.write("\n".join(out + ["</svg>", ""]))


def main():
    program, path = sys.argv[1:3]
    wanted = sys.argv[3:] or list(CLUSTERS)
    with tempfile.TemporaryDirectory() as folder:
        for cluster in wanted:
            simulate(os.path.abspath(program), folder, cluster, "ours", SELECTORS[0])
            for selector in SELECTORS if cluster != "fattree1024" else []:
                simulate(os.path.abspath(program), folder, cluster, "mpi", selector)
            compare(cluster)
    if {"fattree16", "fattree1024"} <= set(wanted):
        small, large = (times[c, "25M"]["pipelined"]["us"] for c in ("fattree16", "fattree1024"))
        ratio("sim.fattree.25M.scaling", large / small, 1.3, "T(1024)/T(16)")
    with open(path, "w") as file:
        table = [{"cluster": c, "size": s, "times": row} for (c, s), row in times.items()]
        json.dump({"ratios": ratios, "times": table}, file, indent=1)
        file.write("\n")
    if any(size == "25M" for _, size in times):
        draw(os.path.splitext(path)[0] + ".svg")


main()
