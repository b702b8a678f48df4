"""Compares a host call with asyncio on uvloop: UDP echo of 64 bytes, the same clients (`serval bench`), interleaved pairs.

    make -C python bench PROFILE=release ARGS="--client-cores 1 --server-cores 0"

Both servers get the same cores. uvloop has a process for each of them (SO_REUSEPORT), and both ways of writing it (uvloop_echo.py) are tried first;
the pairs use the faster one. A pair is one run of each, in alternating order. The result is the median of the ratios of the pairs, with the
interval that contains the true median with a probability of at least 95 % (order statistics). Prints one object as the last line.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from pathlib import Path

from serval._engine import binary

HERE = Path(__file__).resolve().parent


def interval(values):
    """The narrowest pair of order statistics around the median with at least 95 % confidence; all values if they are too few."""
    ordered, n = sorted(values), len(values)
    for k in range((n - 1) // 2, -1, -1):
        outside = 2 * sum(math.comb(n, i) for i in range(k + 1)) / 2**n
        if outside <= 0.05:
            return ordered[k], ordered[n - 1 - k]
    return ordered[0], ordered[-1]


class Servers:
    """The processes of one server; ended when the block is left."""

    def __init__(self, commands, cores, together):
        self.commands, self.cores, self.together = commands, cores, together

    def __enter__(self):
        self.processes, self.url = [], None
        for number, command in enumerate(self.commands):
            cores = self.cores if self.together else [self.cores[number]]
            command = [part.replace("PORT", self.url.rpartition(":")[2] if self.url else "0") for part in command]
            process = subprocess.Popen(
                [sys.executable, *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                preexec_fn=lambda cores=cores: os.sched_setaffinity(0, cores),
            )
            self.processes.append(process)
            self.url = process.stdout.readline().strip()
        return self

    def __exit__(self, *_):
        self.last = ""
        for process in self.processes:
            process.stdin.close()
            if self.together:
                self.last = process.stdout.read()
            else:
                process.terminate()
            process.wait(30)
            process.stdout.close()


def measure(servers, options):
    """Replies a second, and what the server said at its end."""
    with servers:
        command = [binary(), "bench", servers.url, "--json", "--workload", "echo:64", "--class", options.client]
        command += ["--window", str(options.window), "--duration", f"{options.seconds}s", "--core", options.client_cores]
        command += ["--stolen-max", str(options.stolen_max)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    result = json.loads(done.stdout.splitlines()[-1])
    return rate(result), servers.last


def rate(result):
    run = result["runs"][0] if "runs" in result else result
    if not run.get("trusted", True):
        print(f"not trusted: {run}", file=sys.stderr)
    return run["rate"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--window", type=int, default=256, help="requests in flight")
    parser.add_argument("--client", default="T0", choices=["T0", "T2"], help="the class of the client")
    parser.add_argument("--client-cores", default="1")
    parser.add_argument("--server-cores", default="0")
    parser.add_argument("--stolen-max", type=int, default=5)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--max-delay-us", type=int, default=50)
    options = parser.parse_args()
    cores = [int(core) for core in options.server_cores.split(",")]

    def uvloop(way):
        return Servers([[str(HERE / "uvloop_echo.py"), "127.0.0.1", "PORT", way]] * len(cores), cores, False)

    host_call = Servers([[str(HERE / "host_call_echo.py"), str(options.batch), str(options.max_delay_us)]], cores, True)
    tried = {way: measure(uvloop(way), options)[0] for way in ("protocol", "reader")}
    best = max(tried, key=tried.get)
    print(f"uvloop: protocol {tried['protocol']:.0f}/s, reader {tried['reader']:.0f}/s")
    pairs, stats = [], ""
    for number in range(options.pairs):
        runs = {}
        for name in ["host", "uvloop"] if number % 2 == 0 else ["uvloop", "host"]:
            runs[name], last = measure(host_call if name == "host" else uvloop(best), options)
            stats = last or stats
        pairs.append((runs["host"], runs["uvloop"]))
        print(f"pair {number + 1}: host call {runs['host']:.0f}/s, uvloop {runs['uvloop']:.0f}/s, ratio {runs['host'] / runs['uvloop']:.2f}", flush=True)
    ratios = [ours / theirs for ours, theirs in pairs]
    low, high = interval(ratios)
    summary = {
        "ratio": statistics.median(ratios),
        "low": low,
        "high": high,
        "host_call_rate": statistics.median(ours for ours, _ in pairs),
        "uvloop_rate": statistics.median(theirs for _, theirs in pairs),
        "uvloop_way": best,
        "client": options.client,
        "window": options.window,
        "client_cores": options.client_cores,
        "server_cores": options.server_cores,
        "pairs": pairs,
        "last_stats": json.loads(stats) if stats else None,
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
