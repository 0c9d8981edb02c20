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

A failing round prints its seed and number; the same seed chooses the same faults and moments.
"""

import argparse
import concurrent.futures
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
from support import (Process, describe, file_hashes, is_alive, make_checkpoint, prepare_arguments,
                     read_json, run, wait_until, workers_of)

RANKS = 4
LOCAL_WORKERS = 2
SHORT_PARALLEL = 4
LEASE = "20s"  # the shortest that a controller takes
END_TIMEOUT_S = 240
PROGRAM_FAILED = (1, 130)
SUCCEEDED, FAILED, CANCELLED = "STATE_SUCCEEDED", "STATE_FAILED", "STATE_CANCELLED"


def make_source(directory):
    return make_checkpoint(directory, hidden=512, intermediate=1024, experts=8, layers=12, files=6)


class Yardstick:
    """An undisturbed run: its bytes, and how long it takes."""

    def __init__(self, directory):
        self.source = make_source(directory / "source")
        self.destination = directory / "undisturbed"
        start = time.monotonic()
        result = run("shardprep", *prepare_arguments(self.source, self.destination, RANKS))
        if result.returncode != 0:
            raise AssertionError(describe(result))
        self.seconds = time.monotonic() - start
        self.hashes = file_hashes(self.destination)
        self.content_id = read_json(self.destination / "manifest.json")["content_id"]
        self.part_bytes = max(path.stat().st_size
                              for path in self.destination.glob("*.safetensors"))


class Round:
    """One job with one fault, in a directory of its own. Stands in for a TestCase in support.py."""

    def __init__(self, yardstick, seed, number, fault):
        self.yardstick, self.number, self.fault = yardstick, number, fault
        self.random = random.Random(f"{seed}/{number}")
        self.dir = pathlib.Path(tempfile.mkdtemp(prefix="shardprep-chaos-"))
        self.destination = self.dir / "prepared"
        self.source = yardstick.source
        self.redone_bytes = 0
        self.recorded = {}
        self.source_is_harmed = False
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

    # --- what lies at the destination -------------------------------------------------------------

    def journal(self):
        """Key of each recorded part that is there as recorded -> its version."""
        found = {}
        for path in self.destination.glob("_shardprep/*/*.json"):
            try:
                record = read_json(path)
                part = self.destination / record["file"]["key"]
                if version_of(part) == record["etag"]:
                    found[part.name] = record["etag"]
            except (KeyError, OSError, ValueError):
                pass  # a commit's intent, or gone since the listing
        return found

    def note_harm(self):
        """Taken when the fault has happened and its victim writes no more: what is recorded, and
        what is not and therefore made again (of workers that live, it may still be finished)."""
        if (self.destination / "manifest.json").exists():
            return
        self.recorded = self.journal()
        self.redone_bytes = sum(
            size_of(path) for pattern in ("_shardprep/tmp/*", "*.safetensors")
            for path in self.destination.glob(pattern) if path.name not in self.recorded)

    def check_redone(self):
        """Recorded parts were taken as they are; what was lost is in the leases in hand."""
        for name, version in self.recorded.items():
            path = self.destination / name
            self.check(path.exists() and version_of(path) == version,
                       f"{name} was recorded, and yet made again")
        bound = LOCAL_WORKERS * RANKS * self.yardstick.part_bytes
        self.check(self.redone_bytes <= bound,
                   f"{self.redone_bytes} bytes were lost, at most {bound} may be")

    def is_undisturbed(self):
        """Whether the files are those of an undisturbed run. The manifest of a copied source names
        other file versions."""
        found = file_hashes(self.destination)
        manifest = read_json(self.destination / "manifest.json")
        own = {"manifest.json": found["manifest.json"]} if self.source != self.yardstick.source \
            else {}
        return (found == {**self.yardstick.hashes, **own}
                and manifest["content_id"] == self.yardstick.content_id)

    def check_success(self):
        if self.is_undisturbed():
            return
        # Harmed before it was read, a source is another source, and this its artefact.
        verified = self.source_is_harmed and run("shardprep", "verify", self.destination,
                                                 "--source", self.source).returncode == 0
        self.check(verified, "the files differ from those of an undisturbed run")

    def check_failure(self, cause):
        """`cause` is what the user is told."""
        self.check(cause.strip(), "no cause is given")
        self.check(not (self.destination / "manifest.json").exists(),
                   f"a manifest in spite of: {cause}")
        accounted = set()
        for path in self.destination.glob("_shardprep/*/*.json"):
            document = read_json(path)
            if "file" in document:
                accounted.add(document["file"]["key"])
            else:  # what an unfinished commit was about to create
                accounted.update(file["key"] for name in ("rank_manifests", "copied_files")
                                 for file in document[name])
        for name in file_hashes(self.destination) if self.destination.exists() else ():
            self.check(name.startswith("_shardprep/") or name in accounted,
                       f"{name} is at the destination of a job that failed with: {cause}")

    def check_gone(self):
        """After a cancellation."""
        left = sorted(file_hashes(self.destination)) if self.destination.exists() else []
        self.check(not left, f"a cancelled job left {left[:5]}")

    # --- the course of a round --------------------------------------------------------------------

    def moment(self):
        """Waits for a random moment of a job that was just started."""
        time.sleep(self.random.uniform(0.05, 1.1) * self.yardstick.seconds)

    def own_source(self):
        self.source = self.dir / "source"
        shutil.copytree(self.yardstick.source, self.source)

    def start_prepare(self):
        return Process(self, "shardprep", *prepare_arguments(
            self.source, self.destination, RANKS, "--workers", LOCAL_WORKERS))

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
        client.create(job_id, client.spec(self.source, self.destination, RANKS))

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
            # The operator puts the file right.
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
        for path in self.destination.glob("_shardprep/tmp/*"):
            path.unlink(missing_ok=True)
        if not self.finish_prepare(process):
            self.must_succeed(self.start_prepare())

    def fault_parts_removed(self):
        process = self.start_prepare()
        self.moment()
        for path in sorted(self.destination.glob("*.safetensors"))[:2]:
            path.unlink(missing_ok=True)
        code = process.wait(END_TIMEOUT_S)
        # Found before the commit, or removed from a whole artefact, which another run makes whole.
        if code != 0:
            self.check_failure(process.log())
        again = self.start_prepare()
        self.check(self.finish_prepare(again), again.log())

    def fault_disk_full(self):
        total = sum(path.stat().st_size for path in self.yardstick.destination.glob("*"))
        with Tmpfs(self.dir / "small", int(self.random.uniform(0.2, 0.9) * total)) as small:
            if not small:
                self.fault = "prepare_killed"  # this user may not mount
                return self.fault_prepare_killed()
            self.destination = small / "prepared"
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
        report(f"round {number:3} {one.fault:20} ok {time.monotonic() - start:6.1f} s"
               f"   {len(one.recorded):2} parts recorded, {one.redone_bytes:9} bytes redone")
        return one.redone_bytes
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
