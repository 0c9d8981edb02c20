#!/usr/bin/python3
"""Times a whole durable job against copying the same bytes.

  job_bench.py [--bin DIR] [--work-dir DIR] [--tmpfs-dir DIR] [--experts N] [--repetitions N]
               [--smoke]

On disk, `shardprep prepare` from directory to directory is compared with `cp -r` and an fsync of
every copied file and directory. On tmpfs, where nothing waits for a disk, it is compared with
`cp -r` and the time that all processors take for SHA-256 over the bytes. Both sides run in turn,
from a page cache that one uncounted round has warmed; medians are compared. --smoke runs everything
once on a checkpoint too small to compare, to see that it runs.
"""

import argparse
import concurrent.futures
import hashlib
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

RANKS = 8
DISK_TARGET = 1.1
TMPFS_COPY_FACTOR = 1.5
HASHED_BYTES_PER_THREAD = 256 << 20


def run(*command):
    result = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    if result.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))}\nexit {result.returncode}\n{result.stderr}")


def sync_tree(directory):
    for parent, _, files in os.walk(directory):
        for name in [*files, "."]:
            handle = os.open(os.path.join(parent, name), os.O_RDONLY)
            os.fsync(handle)
            os.close(handle)


def timed(function, destination):
    """Seconds of one call that makes `destination`, which is removed afterwards."""
    start = time.monotonic()
    function()
    seconds = time.monotonic() - start
    shutil.rmtree(destination)
    os.sync()
    return seconds


def sha256_rate():
    """Bytes per second of all processors together."""
    threads = len(os.sched_getaffinity(0))
    block = bytes(HASHED_BYTES_PER_THREAD)
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        start = time.monotonic()
        list(pool.map(lambda _: hashlib.sha256(block).digest(), range(threads)))
        return threads * len(block) / (time.monotonic() - start)


class Bench:
    def __init__(self, options, place):
        self.options, self.place = options, place
        self.source, self.destination = place / "source", place / "destination"
        shape = ["tiny"] if options.smoke else ["quickstart", "--experts", options.experts]
        run(options.bin / "make-checkpoint", "--out", self.source, "--preset", *shape)
        self.bytes = sum(path.stat().st_size for path in self.source.iterdir())

    def copy(self, durable):
        run("cp", "-r", self.source, self.destination)
        if durable:
            sync_tree(self.destination)

    def prepare(self):
        run(self.options.bin / "shardprep", "prepare", "--source", self.source, "--destination",
            self.destination, "--tensor-parallel-size", RANKS, "--include-mtp", "--device", "cpu")

    def medians(self, durable):
        """Median seconds of copy and job, measured in turn."""
        copies, jobs = [], []
        for _ in range(1 + self.options.repetitions):
            copies.append(timed(lambda: self.copy(durable), self.destination))
            jobs.append(timed(self.prepare, self.destination))
        return statistics.median(copies[1:]), statistics.median(jobs[1:])


def report(name, size_bytes, copy_s, job_s):
    print(f"{name}: {size_bytes / 1e6:.0f} MB, cp {copy_s:.3f} s ({size_bytes / copy_s / 1e6:.0f} "
          f"MB/s), job {job_s:.3f} s ({size_bytes / job_s / 1e6:.0f} MB/s)")


def bench_disk(options, place):
    bench = Bench(options, place)
    copy_s, job_s = bench.medians(durable=True)
    report("disk, cp with fsync", bench.bytes, copy_s, job_s)
    if not options.smoke:
        print(f"  job / cp = {job_s / copy_s:.3f}, want at most {DISK_TARGET}")


def bench_tmpfs(options, place):
    bench = Bench(options, place)
    copy_s, job_s = bench.medians(durable=False)
    hash_s = bench.bytes / sha256_rate()
    report("tmpfs", bench.bytes, copy_s, job_s)
    allowed_s = TMPFS_COPY_FACTOR * copy_s + hash_s
    if options.smoke:
        return
    print(f"  SHA-256 by all processors {hash_s:.3f} s; job / ({TMPFS_COPY_FACTOR} x cp + SHA-256) "
          f"= {job_s / allowed_s:.3f}, want at most 1")


def parse_options():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--bin", type=pathlib.Path, default="build/release/bin")
    parser.add_argument("--work-dir", type=pathlib.Path, default="build", help="on a disk")
    parser.add_argument("--tmpfs-dir", type=pathlib.Path, default="/dev/shm")
    parser.add_argument("--experts", type=int, default=16, help="0.11 GB of source each")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    if options.smoke:
        options.repetitions = 1
    return options


def main():
    options = parse_options()
    for bench, parent in ((bench_disk, options.work_dir), (bench_tmpfs, options.tmpfs_dir)):
        with tempfile.TemporaryDirectory(prefix="shardprep-bench-", dir=parent) as place:
            bench(options, pathlib.Path(place))


if __name__ == "__main__":
    main()
