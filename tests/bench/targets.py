#!/usr/bin/python3
"""Measures the speed targets of this project and says of each whether it is met.

  targets.py [--bin DIR] [--work-dir DIR] [--tmpfs-dir DIR] [--size-gib N] [--repetitions N]
             [--rows WORD,...] [--full] [--quick] [--json FILE]

Every figure is a ratio of medians, or a size, within this run on this machine; what is compared is
measured in turn, after a round that does not count. Others on the machine disturb both sides, and
not equally: how many processors they took is printed, and beside seconds by the clock those of
processors, which they disturb less. --rows picks rows by their names. --full goes
to 8 GiB in the growth row and to a source of 20 GiB in the memory row. --quick runs everything once
on sources too small to judge, to see that it runs, and judges nothing.

The durable copy is `cp -r` and an fsync of every copied file and directory. Cold means that the
pages of the source were dropped from the page cache (posix_fadvise) before. The torch script is
torch_yardstick.py; its shuffled bytes are compared with those of the job.
"""

import argparse
import collections
import concurrent.futures
import contextlib
import hashlib
import json
import os
import pathlib
import re
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

sys.dont_write_bytecode = True
HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "e2e"))

RANKS = 8
GIB = 1 << 30
MIB = 1 << 20
EXPERT_BYTES = 35_094_528  # of one routed expert of the quickstart geometry
HASHED_BYTES_PER_THREAD = 256 << 20
MEMORY_SLACK = 64 * MIB
PYTHON = "/usr/bin/python3"


# --- running and timing ---------------------------------------------------------------------------

def run(*command):
    result = subprocess.run([str(word) for word in command], capture_output=True, text=True,
                            check=False)
    if result.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))}\nexit {result.returncode}\n{result.stderr}")
    return result.stdout


def sync_tree(directory):
    for parent, _, files in os.walk(directory):
        for name in [*files, "."]:
            handle = os.open(os.path.join(parent, name), os.O_RDONLY)
            os.fsync(handle)
            os.close(handle)


def drop_pages(directory):
    for path in directory.iterdir():
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


class Sample(collections.namedtuple("Sample", "wall processor")):
    """Seconds that something took, by the clock and of processors."""

    def __str__(self):
        return f"{self.wall:.2f} s, {self.processor:.2f} s of processors"


def processor_seconds():
    """Of this process and all that it has waited for."""
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def timed(function, destination, before=None):
    """Sample of one call that makes `destination`, which is removed afterwards."""
    if before:
        before()
    start, processor = time.monotonic(), processor_seconds()
    function()
    sample = Sample(time.monotonic() - start, processor_seconds() - processor)
    shutil.rmtree(destination)
    os.sync()
    return sample


def medians(samples):
    return Sample(*map(statistics.median, zip(*samples)))


def medians_in_turn(repetitions, *measures):
    """The medians of each measure, taken one after the other, after an uncounted round."""
    rounds = [[measure() for measure in measures] for _ in range(1 + repetitions)]
    return [medians(samples) for samples in zip(*rounds[1:])]


def sha256_rate():
    """Bytes per second of all processors together."""
    threads = len(os.sched_getaffinity(0))
    block = bytes(HASHED_BYTES_PER_THREAD)
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        start = time.monotonic()
        list(pool.map(lambda _: hashlib.sha256(block).digest(), range(threads)))
        return threads * len(block) / (time.monotonic() - start)


class OtherLoad:
    """Processors that processes other than ours took since this was made."""

    def __init__(self):
        self.start = time.monotonic(), self.busy(), processor_seconds()

    @staticmethod
    def busy():
        words = pathlib.Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
        user, nice, system, _, _, irq, softirq = map(int, words[:7])
        return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")

    def average(self):
        start, busy, own = self.start
        return (self.busy() - busy - (processor_seconds() - own)) / (time.monotonic() - start)


# --- what is measured -----------------------------------------------------------------------------

class Bench:
    """Options and places, and the rows as they are found."""

    def __init__(self, options, stack):
        self.options = options
        self.stack = stack
        self.rows = []

    def place(self, parent):
        directory = tempfile.mkdtemp(prefix="shardprep-targets-", dir=parent)
        self.stack.callback(shutil.rmtree, directory, ignore_errors=True)
        return pathlib.Path(directory)

    def binary(self, name):
        return self.options.bin / name

    def row(self, what, target, figure, met):
        verdict = "not judged" if self.options.quick else "met" if met else "NOT MET"
        command = f"tests/bench/targets.py --rows {self.row_name}"
        if self.options.full:
            command += " --full"
        self.rows.append({"what": what, "target": target, "figure": figure, "verdict": verdict,
                          "command": command})
        print(f"{what}\n  target   {target}\n  figure   {figure}\n  verdict  {verdict}\n"
              f"  command  {command}", flush=True)


class Job:
    """A source in a place, and what can be done with it."""

    def __init__(self, bench, parent, size_bytes):
        self.bench = bench
        self.place = bench.place(parent)
        self.source, self.destination = self.place / "source", self.place / "destination"
        shape = ["quickstart", "--experts", max(1, round(size_bytes / 3 / EXPERT_BYTES))]
        if bench.options.quick:
            shape = ["tiny", "--hidden", 512, "--intermediate", 1024]
        run(bench.binary("make-checkpoint"), "--out", self.source, "--preset", *shape)
        self.bytes = sum(path.stat().st_size for path in self.source.iterdir())

    def remove(self):
        shutil.rmtree(self.place)

    def copy(self):
        run("cp", "-r", self.source, self.destination)

    def copy_durably(self):
        self.copy()
        sync_tree(self.destination)

    def prepare(self, ranks=RANKS):
        run(self.bench.binary("shardprep"), "prepare", "--source", self.source, "--destination",
            self.destination, "--tensor-parallel-size", ranks, "--include-mtp", "--device", "cpu")

    def torch(self):
        text = run(PYTHON, HERE / "torch_yardstick.py", "job", "--source", self.source,
                   "--destination", self.destination, "--ranks", RANKS)
        return json.loads(text)

    def timed(self, function, cold=False):
        return timed(function, self.destination,
                     (lambda: drop_pages(self.source)) if cold else None)


def job_on_disk(bench):
    job = Job(bench, bench.options.work_dir, bench.options.size_gib * GIB)
    for cold, limit in ((False, 1.0), (True, 1.15)):
        copied, done = medians_in_turn(bench.options.repetitions,
                                       lambda: job.timed(job.copy_durably, cold),
                                       lambda: job.timed(job.prepare, cold))
        bench.row(f"durable job on disk, {'cold' if cold else 'warm'} / cp -r + fsync",
                  f"<= {limit} x the time",
                  f"{done.wall / copied.wall:.2f} x ({job.bytes / GIB:.2f} GiB: job {done}; copy "
                  f"{copied})", done.wall <= limit * copied.wall)
    job.remove()


def job_in_tmpfs(bench):
    job = Job(bench, bench.options.tmpfs_dir, bench.options.size_gib * GIB)
    copied, done, hashed = medians_in_turn(
        bench.options.repetitions, lambda: job.timed(job.copy), lambda: job.timed(job.prepare),
        lambda: Sample(job.bytes / sha256_rate(), 0))
    allowed = 1.5 * copied.wall + hashed.wall
    bench.row("job in tmpfs, warm / (1.5 x cp -r + bytes / SHA-256 rate of all processors)", "<= 1",
              f"{done.wall / allowed:.2f} ({job.bytes / GIB:.2f} GiB: job {done}; copy {copied}; "
              f"SHA-256 {hashed.wall:.2f} s)", done.wall <= allowed)
    job.remove()


def job_and_torch(bench):
    job = Job(bench, bench.options.work_dir, bench.options.size_gib * GIB)
    compare_with_torch(job)
    works = []

    def torch():
        works.append(job.torch()["seconds"])

    script, done = medians_in_turn(bench.options.repetitions, lambda: job.timed(torch),
                                   lambda: job.timed(job.prepare))
    work = statistics.median(works[1:])
    for what, seconds, least in (("whole command", script.wall, 6),
                                 ("without torch's import", work, 4)):
        bench.row(f"durable job on disk / torch script, {what}", f">= {least} x faster",
                  f"{seconds / done.wall:.1f} x ({job.bytes / GIB:.2f} GiB: job {done}; script "
                  f"{seconds:.2f} s, {script.processor:.2f} s of processors with its import)",
                  seconds >= least * done.wall)
    job.remove()


def compare_with_torch(job):
    """Ends the run unless both made the same bytes of every weight of the first layer."""
    from support import read_all_tensors, read_safetensors
    job.prepare()
    ours = {rank: read_all_tensors(job.destination, f"model-rank-{rank}-part-*.safetensors")
            for rank in (0, RANKS - 1)}
    shutil.rmtree(job.destination)
    job.torch()
    for rank, tensors in ours.items():
        theirs, _ = read_safetensors(job.destination / f"layers.0-rank-{rank}.safetensors")
        for name in ("w13_weight", "w2_weight", "w13_weight_scale"):
            (mine,) = [tensor for key, tensor in tensors.items()
                       if key.endswith(f"layers.0.ffn.experts.{name}")]
            if mine.data[:len(theirs[name].data)] != theirs[name].data:
                sys.exit(f"rank {rank}: {name} of the torch script and of the job differ")
    shutil.rmtree(job.destination)


def shuffles(bench):
    binary = bench.binary("shuffle_bench")
    names = {"w13": "w13/aiter-16x16", "w2": "w2/aiter-16x16",
             "w13_scale": "w13_scale/aiter-e8m0", "w2_scale": "w2_scale/aiter-e8m0"}
    listed = run(binary, "--benchmark_list_tests")
    best = re.search(r"^(cpu/[^/]+)/.*/all", listed, re.MULTILINE).group(1)
    pattern = f"{best}/({'|'.join(names.values())})/(whole|all)"
    repetitions = bench.options.repetitions
    ours, ratios, torch = {}, {}, {}
    for _ in range(repetitions):
        page = json.loads(run(binary, "--benchmark_format=json", f"--benchmark_filter={pattern}"))
        for entry in page["benchmarks"]:
            name = re.match(rf"{best}/(.*/(whole|all))", entry["name"]).group(1)
            ours.setdefault(name, []).append(entry["shuffle_GBps"])
            ratios.setdefault(name, []).append(entry["ratio"])
        rates = json.loads(run(PYTHON, HERE / "torch_yardstick.py", "shuffle", "--repetitions",
                               repetitions))
        for name, rate in rates.items():
            torch.setdefault(name, []).append(rate / 1e9)

    def row(what, least, values, kinds):
        found = {kind: values(kind) for kind in kinds}
        figure = ", ".join(f"{kind} {value:.2f}" for kind, value in found.items())
        bench.row(what, f">= {least}", figure, all(value >= least for value in found.values()))

    def ratio(how):
        return lambda kind: statistics.median(ratios[f"{names[kind]}/{how}"])

    def torch_ratio(kind):
        return (statistics.median(ours[f"{names[kind]}/whole"])
                / statistics.median(torch[kind]))

    weights, scales = ("w13", "w2"), ("w13_scale", "w2_scale")
    row(f"weight shuffle ({best}) / memcpy, one thread", 1.0, ratio("whole"), weights)
    row(f"weight shuffle ({best}) / memcpy, all threads", 0.9, ratio("all"), weights)
    row(f"weight shuffle ({best}) / torch, one thread", 9, torch_ratio, weights)
    row(f"scale shuffle ({best}) / memcpy, one thread", 0.5, ratio("whole"), scales)
    row(f"scale shuffle ({best}) / torch, one thread", 40, torch_ratio, scales)


class Cluster:
    """A controller and one worker, which stays after its job so that it can be looked at."""

    def __init__(self, bench, place, budget_bytes):
        from controller import Controller
        self.dir = place
        self.addCleanup = bench.stack.callback
        self.controller = Controller(self, state_dir=place / f"state-{time.monotonic_ns()}")
        self.worker = self.controller.start_worker(memory_budget=budget_bytes, device="cpu")

    def prepare(self, source, destination):
        client = self.controller.client
        spec = client.spec(source, destination, RANKS)
        spec.include_mtp = True
        client.create("job", spec)
        job = self.controller.wait_for_state("job", "SUCCEEDED", "FAILED")
        if job.state != client.prep.PrepJob.STATE_SUCCEEDED:
            sys.exit(f"the job failed: {job.error}")
        return job

    def end(self):
        self.worker.kill()
        self.controller.process.kill()


def io_of(pid):
    """/proc/PID/io as a dictionary."""
    lines = pathlib.Path(f"/proc/{pid}/io").read_text().splitlines()
    return {name: int(value) for name, value in (line.split(": ") for line in lines)}


def bytes_moved(bench):
    from controller import metric_sum, page_of
    job = Job(bench, bench.options.work_dir, bench.options.size_gib * GIB)
    cluster = Cluster(bench, job.place, 512 * MIB)
    drop_pages(job.source)
    before = io_of(cluster.worker.pid)
    plan = cluster.prepare(job.source, job.destination).plan
    after = io_of(cluster.worker.pid)
    page = page_of(cluster.worker.metrics_address)
    cluster.end()
    stored = sum(path.stat().st_size for path in job.destination.glob("*.safetensors"))
    moved = {"read by calls": (after["rchar"] - before["rchar"]) / plan.needed_bytes,
             "read from disk": (after["read_bytes"] - before["read_bytes"]) / plan.needed_bytes,
             "read by metric": metric_sum(page, "shardprep_read_bytes_total")
                               / metric_sum(page, "shardprep_needed_bytes_total"),
             "written by calls": (after["wchar"] - before["wchar"]) / stored,
             "written to disk": (after["write_bytes"] - before["write_bytes"]) / stored}
    bench.row(f"bytes moved / needed, {RANKS} ranks, cold", "<= 1.01",
              ", ".join(f"{name} {ratio:.4f}" for name, ratio in moved.items()),
              max(moved.values()) <= 1.01)
    job.remove()


def memory(bench):
    quick, full = bench.options.quick, bench.options.full
    place = bench.place(bench.options.work_dir)
    worst, lines = 0, []
    for gib in (0,) if quick else (1, 20 if full else 4):
        source = place / f"source-{gib}"
        shape = ["tiny"] if quick else ["quickstart", "--experts",
                                        round(gib * GIB / 3 / EXPERT_BYTES), "--sparse"]
        run(bench.binary("make-checkpoint"), "--out", source, "--preset", *shape)
        plan = json.loads(run(
            bench.binary("shardprep"), "plan", "--source", source, "--destination", place / "none",
            "--tensor-parallel-size", RANKS, "--format", "json"))
        least = int(plan["minimum_memory_budget_bytes"])
        # The least budget reads shared rows once for each rank, so it is for the small source.
        budgets = [least, 64 * MIB, 512 * MIB, 2 * GIB] if gib <= 1 else [512 * MIB]
        for budget in budgets[:1] if quick else budgets:
            cluster = Cluster(bench, place, budget)
            cluster.prepare(source, place / "prepared")
            from support import high_water_bytes
            peak = high_water_bytes(cluster.worker.pid)
            cluster.end()
            shutil.rmtree(place / "prepared")
            worst = max(worst, peak - budget)
            lines.append(f"{peak / MIB:.0f} of {budget / MIB:.1f} MiB at {gib} GiB")
    bench.row("peak memory of the worker (VmHWM) - budget", "<= 64 MiB",
              f"{worst / MIB:.0f} MiB at most ({', '.join(lines)})", worst <= MEMORY_SLACK)
    shutil.rmtree(place)


# Runs a command in a process that is small itself: the peak of a process counts what its parent had
# in memory when it was made.
MEASURE = """
import json, os, subprocess, sys, time
start = time.monotonic()
process = subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL)
_, status, usage = os.wait4(process.pid, 0)
if status != 0:
    sys.exit(f"{sys.argv[1:]}: status {status}")
print(json.dumps([time.monotonic() - start, usage.ru_utime + usage.ru_stime,
                  usage.ru_maxrss * 1024]))
"""


def plan_of_v4_pro(bench):
    place = bench.place(bench.options.work_dir)
    preset = "tiny" if bench.options.quick else "v4-pro"
    run(bench.binary("make-checkpoint"), "--out", place / "source", "--preset", preset)
    samples, peaks = [], []
    for _ in range(1 + bench.options.repetitions):
        wall, processor, peak = json.loads(run(
            PYTHON, "-c", MEASURE, bench.binary("shardprep"), "plan", "--source", place / "source",
            "--destination", place / "none", "--tensor-parallel-size", RANKS))
        samples.append(Sample(wall, processor))
        peaks.append(peak)
    median, peak = medians(samples[1:]), max(peaks)
    bench.row(f"plan of the full V4-Pro geometry ({preset})", "<= 1 s, <= 200 MiB",
              f"{median}, {peak / MIB:.0f} MiB", median.wall <= 1 and peak <= 200 * MIB)
    shutil.rmtree(place)


def growth(bench):
    sizes = [0.25, 0.5, 1, 2, 4, 8] if bench.options.full else [0.25, 0.5, 1, 2]
    found = {}
    for size in sizes[:1] if bench.options.quick else sizes:
        job = Job(bench, bench.options.work_dir, size * GIB)
        (done,) = medians_in_turn(bench.options.repetitions, lambda job=job: job.timed(job.prepare))
        found[job.bytes / GIB] = done
        job.remove()
    each = [done.wall / gib for gib, done in found.items()]
    # What a job costs besides its bytes shrinks with size, so only growth counts against it.
    worst = each[-1] / min(each)
    bench.row("time for each GiB at the largest size / the least at any size", "<= 1.15",
              f"{worst:.2f} ({'; '.join(f'{gib:.2f} GiB {done}' for gib, done in found.items())})",
              worst <= 1.15)


def ranks_flat(bench):
    job = Job(bench, bench.options.work_dir, bench.options.size_gib * GIB / 2)
    counts = [2, 4, 8]  # sixteen would pad each slice and so write more
    found = medians_in_turn(bench.options.repetitions,
                            *[lambda n=n: job.timed(lambda: job.prepare(n)) for n in counts])
    walls = [done.wall for done in found]
    spread = max(walls) / min(walls)
    bench.row("slowest / fastest of jobs for 2, 4 and 8 ranks", "<= 1.15",
              f"{spread:.2f} ({'; '.join(f'{n} ranks {done}' for n, done in zip(counts, found))})",
              spread <= 1.15)
    job.remove()


ROWS = {"shuffle": shuffles, "disk": job_on_disk, "tmpfs": job_in_tmpfs, "torch": job_and_torch,
        "bytes": bytes_moved, "memory": memory, "plan": plan_of_v4_pro, "growth": growth,
        "ranks": ranks_flat}


# --- command line ---------------------------------------------------------------------------------

def parse_options():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--bin", type=absolute_path, default="build/release/bin")
    parser.add_argument("--work-dir", type=absolute_path, default="build", help="on a disk")
    parser.add_argument("--tmpfs-dir", type=absolute_path, default="/dev/shm")
    parser.add_argument("--size-gib", type=float, default=2, help="of the sources of jobs")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--rows", default=",".join(ROWS), help=f"of {', '.join(ROWS)}")
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=pathlib.Path, help="file for the rows")
    options = parser.parse_args()
    options.rows = options.rows.split(",")
    unknown = set(options.rows) - set(ROWS)
    if unknown:
        parser.error(f"--rows: {', '.join(sorted(unknown))}, want {', '.join(ROWS)}")
    if options.quick:
        options.repetitions = 1
    options.bin = options.bin.resolve()
    return options


def absolute_path(text):
    """Jobs are given places as controllers take them."""
    return pathlib.Path(text).resolve()


def main():
    options = parse_options()
    os.environ["SHARDPREP_BIN"] = str(options.bin)
    with contextlib.ExitStack() as stack:
        bench = Bench(options, stack)
        load = OtherLoad()
        for name in options.rows:
            bench.row_name = name
            ROWS[name](bench)
        others = load.average()
    print(f"{os.cpu_count()} processors; other processes used {others:.1f} of them on average")
    if options.json:
        options.json.write_text(json.dumps({"other_load": others, "rows": bench.rows}, indent=2))


if __name__ == "__main__":
    main()
