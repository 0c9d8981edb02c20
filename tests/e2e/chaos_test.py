"""Faults at random moments of real jobs: nothing is lost, nothing wrong becomes visible.

  SHARDPREP_BIN=DIR chaos_test.py                             the short version, as in ctest;
                    SHARDPREP_CHAOS_SEED=N repeats the run that printed N
  SHARDPREP_BIN=DIR chaos_test.py --rounds 200 [--seed N]     the long one; prints the seed
                    [--parallel N] [--only FAULT]

A round runs one small job, does it one harm at a random moment, lets whoever is responsible go on
(the controller by itself, an operator who starts a killed command again), and then demands:

 - the job is SUCCEEDED with bytes equal to an undisturbed run, or FAILED with a cause;
 - of a job that FAILED, nothing is at the destination but what its journal accounts for;
 - parts that were recorded when the harm was done are not written again, and what has to be is at
   most the parts of the leases in hand.

Some jobs have several targets, and all of this holds for each of them: its bytes are those of an
undisturbed job of its own.

A failing round prints its seed and number; the same seed chooses the same faults, moments and
targets.
"""

import argparse
import concurrent.futures
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unittest

sys.dont_write_bytecode = True
from controller import Controller
from support import (Process, describe, file_hashes, is_alive, make_checkpoint, read_json, run,
                     tree_bytes, wait_until, workers_of)

# Fields of shardprep.v1.Target. A job with one target has the first.
TARGETS = [
    {"parallel_layout": {"tensor_parallel_size": 4}},
    {"parallel_layout": {"tensor_parallel_size": 2},
     "kernel_target": {"profile": "aiter-interleaved"}},
    {"parallel_layout": {"tensor_parallel_size": 2, "expert_parallel_size": 2}},
]
SEVERAL_TARGETS = 0.4  # of the rounds
LOCAL_WORKERS = 2
SHORT_PARALLEL = 4
RECORD_BYTES = 1 << 14  # more than the record of a part has, which may be unfinished too
LEASE = "20s"  # the shortest that a controller takes
END_TIMEOUT_S = 240
PROGRAM_FAILED = (1, 130)
SUCCEEDED, FAILED, CANCELLED = "STATE_SUCCEEDED", "STATE_FAILED", "STATE_CANCELLED"


def make_source(directory):
    return make_checkpoint(directory, hidden=512, intermediate=1024, experts=8, layers=12, files=6)


class Undisturbed:
    """A job of its own that makes one target: its bytes, and how long it takes."""

    def __init__(self, source, target, directory):
        self.target = target
        self.ranks = target["parallel_layout"]["tensor_parallel_size"]
        self.destination = directory / "prepared"
        start = time.monotonic()
        result = run("shardprep", *prepare_targets(source, {self.destination: self}, directory))
        if result.returncode != 0:
            raise AssertionError(describe(result))
        self.seconds = time.monotonic() - start
        self.hashes = file_hashes(self.destination)
        self.content_id = read_json(self.destination / "manifest.json")["content_id"]
        self.total_bytes = tree_bytes(self.destination)
        self.part_bytes = max(path.stat().st_size
                              for path in self.destination.glob("*.safetensors"))


class Yardstick:
    """The source, and undisturbed jobs on it, one for each of TARGETS."""

    def __init__(self, directory):
        self.source = make_source(directory / "source")
        self.jobs = []
        for number, target in enumerate(TARGETS):
            own = directory / str(number)
            own.mkdir()
            self.jobs.append(Undisturbed(self.source, target, own))

    def choose(self, chance):
        """The jobs whose targets a round has together."""
        if chance.random() >= SEVERAL_TARGETS:
            return self.jobs[:1]
        return chance.sample(self.jobs, chance.choice([2, 3]))


class Round:
    """One job with one fault, in a directory of its own. Stands in for a TestCase in support.py."""

    def __init__(self, yardstick, seed, number, fault):
        self.yardstick, self.number, self.fault = yardstick, number, fault
        self.random = random.Random(f"{seed}/{number}")
        self.dir = pathlib.Path(tempfile.mkdtemp(prefix="shardprep-chaos-"))
        jobs = yardstick.choose(self.random)
        self.lie_below(self.dir, jobs)
        # Targets that are made together share the reading, and the start.
        self.seconds = jobs[0].seconds * (1 + len(jobs)) / 2
        self.source = yardstick.source
        self.redone_bytes = {}  # by destination
        self.recorded = {}
        self.source_is_harmed = False
        self.robbed = set()  # destinations of which files were removed
        self._cleanups = []

    def addCleanup(self, function, *arguments, **options):
        self._cleanups.append(lambda: function(*arguments, **options))

    def close(self):
        while self._cleanups:
            self._cleanups.pop()()
        shutil.rmtree(self.dir, ignore_errors=True)

    def check(self, condition, what):
        if not condition:
            raise AssertionError(f"round {self.number} ({self.fault}): {what}")

    # --- what lies at the destinations ------------------------------------------------------------

    def lie_below(self, directory, jobs):
        """Destination of each target -> the undisturbed job that made it, in the job's order."""
        self.places = {directory / f"prepared-{number}": job for number, job in enumerate(jobs)}

    def find(self, pattern):
        """What the destinations have by that pattern."""
        return sorted(path for place in self.places for path in place.glob(pattern))

    def note_harm(self):
        """Taken when the fault has happened and its victim writes no more: what is recorded, and
        what is not and therefore made again (of workers that live, it may still be finished)."""
        for place in self.places:
            if (place / "manifest.json").exists():
                continue
            recorded = journal(place)
            self.recorded.update(recorded)
            self.redone_bytes[place] = sum(
                size_of(path) for pattern in ("_shardprep/tmp/*", "*.safetensors")
                for path in place.glob(pattern) if path not in recorded)

    def check_redone(self):
        """Recorded parts were taken as they are; what was lost is in the leases in hand."""
        for path, version in self.recorded.items():
            self.check(path.exists() and version_of(path) == version,
                       f"{path} was recorded, and yet made again")
        for place, lost in self.redone_bytes.items():
            job = self.places[place]
            bound = LOCAL_WORKERS * job.ranks * (job.part_bytes + RECORD_BYTES)
            self.check(lost <= bound, f"{lost} bytes of {place} were lost, at most {bound} may be")

    def is_undisturbed(self, place):
        """Whether the files are those of an undisturbed run. The manifest of a copied source names
        other file versions."""
        job = self.places[place]
        found = file_hashes(place)
        manifest = read_json(place / "manifest.json")
        own = {"manifest.json": found["manifest.json"]} if self.source != self.yardstick.source \
            else {}
        return found == {**job.hashes, **own} and manifest["content_id"] == job.content_id

    def check_whole(self, place):
        if self.is_undisturbed(place):
            return
        # Harmed before it was read, a source is another source, and this its artefact.
        verified = self.source_is_harmed and run("shardprep", "verify", place, "--source",
                                                 self.source).returncode == 0
        self.check(verified, f"the files of {place} differ from those of an undisturbed run")

    def check_success(self):
        for place in self.places:
            self.check_whole(place)

    def published(self):
        """Targets that were published before a job came to its end without all of them: they stay,
        whole."""
        places = [place for place in self.places if (place / "manifest.json").exists()]
        for place in places:
            if place not in self.robbed:
                self.check_whole(place)
        return places

    def check_failure(self, cause):
        """`cause` is what the user is told."""
        self.check(cause.strip(), "no cause is given")
        published = self.published()
        self.check(len(published) < len(self.places), f"every manifest in spite of: {cause}")
        for place in self.places.keys() - published:
            accounted = accounted_for(place)
            for name in file_hashes(place) if place.exists() else ():
                self.check(name.startswith("_shardprep/") or name in accounted,
                           f"{name} is in {place} after: {cause}")

    def check_gone(self):
        """After a cancellation."""
        published = self.published()
        self.check(len(published) < len(self.places), "a cancelled job left every target")
        for place in self.places.keys() - published:
            left = sorted(file_hashes(place)) if place.exists() else []
            self.check(not left, f"a cancelled job left {left[:5]} in {place}")

    # --- the course of a round --------------------------------------------------------------------

    def moment(self):
        """Waits for a random moment of a job that was just started."""
        time.sleep(self.random.uniform(0.05, 1.1) * self.seconds)

    def own_source(self):
        self.source = self.dir / "source"
        shutil.copytree(self.yardstick.source, self.source)

    def start_prepare(self):
        return Process(self, "shardprep", *prepare_targets(
            self.source, self.places, self.dir, "--workers", LOCAL_WORKERS))

    def finish_prepare(self, process):
        """Waits for `prepare`; True when it succeeded, with everything checked either way."""
        code = process.wait(END_TIMEOUT_S)
        if code == 0:
            self.check_success()
            return True
        self.check(code in PROGRAM_FAILED, f"prepare exits with {code}:\n{process.log()}")
        self.check_failure(process.log())
        return False

    def must_succeed(self, process):
        self.check(self.finish_prepare(process), process.log())
        self.check_redone()

    def run(self):
        getattr(self, "fault_" + self.fault)()

    # --- faults of processes ----------------------------------------------------------------------

    def fault_worker_killed(self):
        process = self.start_prepare()
        self.moment()
        workers = sorted(workers_of(process.pid))
        if workers:
            victim = self.random.choice(workers)
            kill(victim)
            wait_until(lambda: not is_alive(victim), "the end of a killed worker")
            self.note_harm()
        self.must_succeed(process)

    def fault_prepare_killed(self):
        self.end_prepare(signal.SIGKILL)

    def fault_prepare_interrupted(self):
        self.end_prepare(self.random.choice([signal.SIGINT, signal.SIGTERM]))

    def end_prepare(self, ending):
        process = self.start_prepare()
        self.moment()
        workers = workers_of(process.pid)
        process.signal(ending)
        process.wait()
        wait_until(lambda: not any(map(is_alive, workers)), "the end of the workers")
        self.note_harm()
        self.must_succeed(self.start_prepare())

    def start_controller(self):
        return Controller(self, local_workers=LOCAL_WORKERS, lease_duration=LEASE,
                          state_dir=self.dir / "state")

    def create(self, controller, job_id="job"):
        client = controller.client
        client.create(job_id, client.target.PrepJobSpec(source_uri=str(self.source), targets=[
            client.target.Target(**target) for target in targets_of(self.places)]))

    def finish_job(self, controller, job_id="job"):
        """The name of the job's final state, with everything checked."""
        job = controller.wait_for_state(job_id, "SUCCEEDED", "FAILED", "CANCELLED")
        state = controller.client.prep.PrepJob.State.Name(job.state)
        if state == SUCCEEDED:
            self.check_success()
        elif state == FAILED:
            self.check_failure(job.error.message)
        else:
            self.check_gone()
        return state

    def fault_controller_killed(self):
        controller = self.start_controller()
        self.create(controller)
        self.moment()
        workers = workers_of(controller.process.pid)
        controller.process.process.kill()
        controller.process.process.wait()
        wait_until(lambda: not any(map(is_alive, workers)), "the end of the workers")
        self.note_harm()
        again = self.start_controller()
        state = self.finish_job(again)
        self.check(state == SUCCEEDED, state)
        self.check_redone()

    def fault_controller_drained(self):
        controller = self.start_controller()
        self.create(controller)
        self.moment()
        controller.process.signal(signal.SIGTERM)
        code = controller.process.wait(END_TIMEOUT_S)
        self.check(code == 0, f"a drained controller exits with {code}")
        self.note_harm()
        state = self.finish_job(self.start_controller())
        self.check(state == SUCCEEDED, state)
        self.check_redone()

    def fault_cancelled(self):
        controller = self.start_controller()
        self.create(controller)
        self.moment()
        try:
            controller.client.cancel("job")
        except Exception as error:  # too late is FAILED_PRECONDITION
            self.check("FAILED_PRECONDITION" in str(error), error)
        state = self.finish_job(controller)
        self.check(state in (SUCCEEDED, CANCELLED), state)
        self.create(controller, "again")
        state = self.finish_job(controller, "again")
        self.check(state == SUCCEEDED, state)

    def fault_worker_asleep(self):
        """Long version only: a worker sleeps past its lease, and wakes."""
        controller = Controller(self, lease_duration=LEASE)
        workers = [controller.start_worker() for _ in range(LOCAL_WORKERS)]
        self.create(controller)
        self.moment()
        asleep = self.random.choice(workers)
        asleep.signal(signal.SIGSTOP)
        try:
            time.sleep(self.random.choice([1, 15, 25, 40]))
        finally:
            asleep.signal(signal.SIGCONT)
        state = self.finish_job(controller)
        self.check(state == SUCCEEDED, state)

    # --- faults of the stores ---------------------------------------------------------------------

    def harm_source(self, harm):
        self.own_source()
        process = self.start_prepare()
        self.moment()
        self.source_is_harmed = True
        harm(self.random.choice(sorted(self.source.glob("*.safetensors"))))
        if not self.finish_prepare(process):
            # The operator puts the file right, and removes what was published of the source before.
            for place in self.published():
                shutil.rmtree(place)
            shutil.rmtree(self.source)
            self.own_source()
            self.source_is_harmed = False
            again = self.start_prepare()
            self.check(self.finish_prepare(again), again.log())

    def fault_source_truncated(self):
        self.harm_source(lambda path: os.truncate(path, path.stat().st_size // 2))

    def fault_source_replaced(self):
        def replace(path):
            data = bytearray(path.read_bytes())
            data[-self.random.randrange(1, 1000)] ^= 0x10
            other = path.with_name("other")
            other.write_bytes(data)
            other.rename(path)
        self.harm_source(replace)

    def fault_source_rewritten(self):
        def rewrite(path):
            with open(path, "r+b") as file:
                file.seek(-self.random.randrange(1, 100_000), os.SEEK_END)
                file.write(b"\xff")
        self.harm_source(rewrite)

    def fault_source_removed(self):
        self.harm_source(lambda path: path.unlink())

    def fault_source_a_directory(self):
        def replace(path):
            path.unlink()
            path.mkdir()
        self.harm_source(replace)

    def fault_temporaries_removed(self):
        process = self.start_prepare()
        self.moment()
        for path in self.find("_shardprep/tmp/*"):
            path.unlink(missing_ok=True)
        if not self.finish_prepare(process):
            self.must_succeed(self.start_prepare())

    def fault_parts_removed(self):
        process = self.start_prepare()
        self.moment()
        parts = self.find("*.safetensors")
        for path in (parts[0], parts[-1]) if parts else ():
            path.unlink(missing_ok=True)
            self.robbed.add(path.parent)
        code = process.wait(END_TIMEOUT_S)
        # Found before the commit, or removed from a whole artefact, which another run makes whole.
        if code != 0:
            self.check_failure(process.log())
        again = self.start_prepare()
        self.check(self.finish_prepare(again), again.log())

    def fault_disk_full(self):
        total = sum(job.total_bytes for job in self.places.values())
        with Tmpfs(self.dir / "small", int(self.random.uniform(0.2, 0.9) * total)) as small:
            if not small:
                self.fault = "prepare_killed"  # this user may not mount
                return self.fault_prepare_killed()
            self.lie_below(small, list(self.places.values()))
            refused = self.start_prepare()
            self.check(not self.finish_prepare(refused), "a job fits where it cannot")
            resize(small, 2 * total)
            process = self.start_prepare()
            self.moment()
            # Space that the plan saw is taken by somebody else.
            fill(small / "ballast")
            if self.finish_prepare(process):
                return
            self.check("RESOURCE_EXHAUSTED" in process.log(), process.log())
            (small / "ballast").unlink()
            again = self.start_prepare()
            self.check(self.finish_prepare(again), again.log())


QUICK_FAULTS = ["worker_killed", "prepare_killed", "prepare_interrupted", "source_truncated",
                "source_replaced", "source_rewritten", "source_removed", "source_a_directory",
                "temporaries_removed", "parts_removed", "disk_full", "cancelled"]
# These wait for fences and leases.
SLOW_FAULTS = ["controller_killed", "controller_drained", "worker_asleep"]


# --- what rounds use ------------------------------------------------------------------------------

def targets_of(places):
    return [{**job.target, "destination_uri": str(place)} for place, job in places.items()]


def prepare_targets(source, places, directory, *more):
    """The arguments of a `prepare`, whose targets file lies in `directory`."""
    file = directory / "targets.json"
    file.write_text(json.dumps(targets_of(places)))
    return ["prepare", "--source", source, "--targets", file, *more]


def journal(place):
    """Each recorded part that is there as recorded -> its version."""
    found = {}
    for path in place.glob("_shardprep/*/*.json"):
        try:
            record = read_json(path)
            part = place / record["file"]["key"]
            if version_of(part) == record["etag"]:
                found[part] = record["etag"]
        except (KeyError, OSError, ValueError):
            pass  # a commit's intent, or gone since the listing
    return found


def accounted_for(place):
    """Keys of which the journal knows."""
    keys = set()
    for path in place.glob("_shardprep/*/*.json"):
        document = read_json(path)
        if "file" in document:
            keys.add(document["file"]["key"])
        else:  # what an unfinished commit was about to create
            keys.update(file["key"] for name in ("rank_manifests", "copied_files")
                        for file in document[name])
    return keys


def version_of(path):
    """As the directory store says it."""
    status = path.stat()
    return f"{status.st_size}-{status.st_mtime_ns}-{status.st_ino}"


def size_of(path):
    try:
        return path.stat().st_size
    except OSError:
        return 0


def kill(pid):
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # the job was done before


class Tmpfs:
    """A small file system of its own; None where this user may not mount one."""

    def __init__(self, path, size):
        self.path, self.size = path, size

    def __enter__(self):
        self.path.mkdir()
        mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={self.size}", "shardprep",
                                  str(self.path)], capture_output=True)
        self.mounted = mounted.returncode == 0
        return self.path if self.mounted else None

    def __exit__(self, *_):
        if self.mounted:
            subprocess.run(["umount", "-l", str(self.path)], check=True)


def resize(path, size):
    subprocess.run(["mount", "-o", f"remount,size={size}", str(path)], check=True)


def fill(path):
    """Writes until there is no space."""
    with open(path, "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(1 << 20))
        except OSError:
            pass


# --- running rounds -------------------------------------------------------------------------------

def run_round(yardstick, seed, number, fault, report):
    start = time.monotonic()
    one = Round(yardstick, seed, number, fault)
    try:
        one.run()
        redone = sum(one.redone_bytes.values())
        report(f"round {number:3} {one.fault:20} ok {time.monotonic() - start:6.1f} s"
               f"   {len(one.places)} targets, {len(one.recorded):2} parts recorded,"
               f" {redone:9} bytes redone")
        return redone
    finally:
        one.close()


def run_rounds(rounds, seed, parallel, faults, report):
    """Runs all rounds; the failures, each as text, and the bytes that were redone."""
    directory = pathlib.Path(tempfile.mkdtemp(prefix="shardprep-chaos-"))
    failures, redone = [], 0
    try:
        yardstick = Yardstick(directory)
        order = random.Random(seed)
        chosen = []
        while len(chosen) < rounds:  # each fault as often as any other
            chosen += order.sample(faults, len(faults))
        with concurrent.futures.ThreadPoolExecutor(parallel) as pool:
            running = {pool.submit(run_round, yardstick, seed, number, fault, report):
                       (number, fault) for number, fault in enumerate(chosen[:rounds])}
            for future in concurrent.futures.as_completed(running):
                error = future.exception()
                if error is None:
                    redone += future.result()
                    continue
                number, fault = running[future]
                failures.append(f"seed {seed} round {number} ({fault}): {error}")
                report(failures[-1])
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return failures, redone


class ChaosTest(unittest.TestCase):
    def test_a_fault_at_a_random_moment_loses_nothing(self):
        seed = int(os.environ.get("SHARDPREP_CHAOS_SEED", random.SystemRandom().randrange(1 << 32)))
        print(f"seed {seed}", flush=True)
        faults = ["controller_killed", *QUICK_FAULTS]
        failures, redone = run_rounds(len(faults), seed, SHORT_PARALLEL, faults, print_line)
        print(f"{redone} bytes redone", flush=True)
        self.assertEqual(failures, [])


PRINT_LOCK = threading.Lock()


def print_line(text):
    with PRINT_LOCK:
        print(text, flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    parser.add_argument("--parallel", type=int, default=3)
    parser.add_argument("--only", choices=QUICK_FAULTS + SLOW_FAULTS)
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    faults = [arguments.only] if arguments.only else QUICK_FAULTS + SLOW_FAULTS
    failures, redone = run_rounds(arguments.rounds, arguments.seed, arguments.parallel, faults,
                                  print_line)
    print(f"{arguments.rounds} rounds, {len(failures)} failed, {redone} bytes redone")
    return 1 if failures else 0


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1].startswith("--"):
        sys.exit(main())
    unittest.main(verbosity=2)
