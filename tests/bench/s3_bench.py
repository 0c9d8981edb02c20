#!/usr/bin/python3
r"""Times uploads and fetches against the plainest way of moving the same bytes.

  tests/support/s3_servers/rgw.sh run tests/bench/s3_bench.py [--bin DIR] [--yardstick FILE]
      [--tmpfs-dir DIR] [--experts N] [--streams N] [--repetitions N] [--smoke]

Upload: the files of a prepared artefact, through the S3 store as a worker writes them and by
libcurl alone, in multipart PUTs of 16 MiB. The store signs its payload, as it must without TLS, and
what is compared does so too: client and server each hash every byte. The same without signed
payloads, which spares both that, is printed beside it.
Fetch: `shardprep fetch` of every rank, which verifies each chunk and ends in a whole directory,
and ranged GETs of 16 MiB by libcurl alone into files, which look at no byte. All files lie in
tmpfs, so that no disk is measured. All sides are timed as whole processes and run in turn against
the same server after one uncounted round; medians are compared. For information, a whole `prepare`
from a directory to S3 is timed as well. --smoke runs everything once on a checkpoint too small to
compare, to see that it runs.

Client and server share this machine. Where they keep all its cores busy, each second of CPU that
verification takes is a second that the server lacks, and no overlap hides it: the least ratio of
times is then that of the CPU seconds of both sides together. Those are printed, of the clients. To
time clients that take nothing from their server, as in production, give each cores of its own:

  taskset -c 0 tests/support/s3_servers/rgw.sh run taskset -c 1 tests/bench/s3_bench.py \
      --streams 2 --experts 12
"""

import argparse
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import uuid

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "support" / "s3_servers"))
from s3_client import S3Client

RANKS = 8
UPLOAD_TARGET = 0.9  # of the bare rate
FETCH_TARGET = 1.05  # of the bare time


def run(*command):
    """Runs a command that must succeed; (seconds it took, CPU seconds it used)."""
    before, start = os.times(), time.monotonic()
    result = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    seconds, after = time.monotonic() - start, os.times()
    if result.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))}\nexit {result.returncode}\n{result.stderr}")
    return seconds, (after.children_user + after.children_system - before.children_user -
                     before.children_system)


class Bench:
    def __init__(self, options, place):
        self.options, self.place = options, place
        self.client = S3Client.from_environment()
        self.prefix = f"bench-{uuid.uuid4()}"
        self.source, self.artefact = place / "source", place / "artefact"
        shape = ["tiny"] if options.smoke else ["quickstart", "--experts", options.experts]
        run(options.bin / "make-checkpoint", "--out", self.source, "--preset", *shape)
        run(options.bin / "shardprep", "prepare", *self.job(self.artefact))
        self.files = sorted(self.artefact.glob("*.safetensors"))
        self.bytes = sum(path.stat().st_size for path in self.files)
        for path in self.artefact.iterdir():
            self.client.put(f"{self.prefix}/artefact/{path.name}", path.read_bytes())

    def job(self, destination):
        return ["--source", self.source, "--destination", destination, "--tensor-parallel-size",
                RANKS, "--include-mtp", "--device", "cpu"]

    def uri(self, *names):
        return "/".join(["s3:/", self.client.bucket, self.prefix, *names])

    def remove(self, *names):
        for key in self.client.list("/".join([self.prefix, *names]) + "/"):
            self.client.delete(key)

    def put(self, mode):
        spent = run(self.options.yardstick, mode, f"{self.prefix}/put", self.options.streams,
                    *self.files)
        self.remove("put")
        return spent

    def prepare(self):
        spent = run(self.options.bin / "shardprep", "prepare", *self.job(self.uri("job")))
        self.remove("job")
        return spent

    def get_bare(self):
        into = self.place / "got"
        into.mkdir()
        spent = run(self.options.yardstick, "get-bare", f"{self.prefix}/artefact",
                    self.options.streams, into, *(path.name for path in self.files))
        shutil.rmtree(into)
        return spent

    def fetch(self):
        into = self.place / "fetched"
        spent = run(self.options.bin / "shardprep", "fetch", self.uri("artefact"), "--rank",
                    f"0-{RANKS - 1}", "--into", into, "--no-expect", "--parallel",
                    self.options.streams)
        shutil.rmtree(into)
        return spent

    def measure(self, what, **sides):
        """Prints what each side takes, measured in turn; the median seconds by name."""
        spent = {name: [] for name in sides}
        for _ in range(1 + self.options.repetitions):
            for name, side in sides.items():
                spent[name].append(side())
        print(f"{what}: {self.bytes / 1e6:.0f} MB, {self.options.streams} streams, "
              f"{self.options.repetitions} repetitions")
        medians = {}
        for name, found in spent.items():
            seconds = sorted(one[0] for one in found[1:])
            medians[name] = statistics.median(seconds)
            cpu_s = statistics.median(one[1] for one in found[1:])
            print(f"  {name:12} {medians[name]:.3f} s ({seconds[0]:.3f} to {seconds[-1]:.3f}), "
                  f"{self.bytes / medians[name] / 1e6:.0f} MB/s, CPU {cpu_s:.2f} s")
        return medians

    def run(self):
        found = self.measure("upload", signed=lambda: self.put("put-signed"),
                             unsigned=lambda: self.put("put-unsigned"),
                             ours=lambda: self.put("put-store"), job=self.prepare)
        if not self.options.smoke:
            print(f"  rate of ours / bare signed = {found['signed'] / found['ours']:.3f}, "
                  f"want at least {UPLOAD_TARGET}; / unsigned = "
                  f"{found['unsigned'] / found['ours']:.3f}")
        found = self.measure("fetch", bare=self.get_bare, ours=self.fetch)
        if not self.options.smoke:
            print(f"  time of ours / bare = {found['ours'] / found['bare']:.3f}, "
                  f"want at most {FETCH_TARGET}")


def parse_options():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--bin", type=pathlib.Path, default="build/release/bin")
    parser.add_argument("--yardstick", type=pathlib.Path,
                        help="default: s3_yardstick of --bin")
    parser.add_argument("--tmpfs-dir", type=pathlib.Path, default="/dev/shm")
    parser.add_argument("--experts", type=int, default=4, help="0.11 GB of source each")
    parser.add_argument("--streams", type=int, default=max(2, len(os.sched_getaffinity(0))))
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    if options.smoke:
        options.repetitions = 1
    if options.yardstick is None:
        options.yardstick = options.bin / "s3_yardstick"
    return options


def main():
    options = parse_options()
    with tempfile.TemporaryDirectory(prefix="shardprep-bench-", dir=options.tmpfs_dir) as place:
        bench = Bench(options, pathlib.Path(place))
        try:
            bench.run()
        finally:
            bench.remove()


if __name__ == "__main__":
    main()
