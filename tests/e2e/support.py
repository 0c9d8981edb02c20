"""What the end-to-end tests share: temporary places, the real binaries, and reading their files.

The binaries are those of the directory that SHARDPREP_BIN names.
"""

import collections
import contextlib
import hashlib
import json
import os
import pathlib
import re
import shutil
import signal
import struct
import subprocess
import tempfile
import time
import unittest

BIN = pathlib.Path(os.environ.get("SHARDPREP_BIN", "build/release/bin")).resolve()
COMMAND_TIMEOUT_S = 300
WAIT_TIMEOUT_S = 120
POLL_INTERVAL_S = 0.01


class TestCase(unittest.TestCase):
    """A test with a temporary directory of its own, `self.dir`, gone afterwards."""

    maxDiff = 2000

    def setUp(self):
        self.dir = pathlib.Path(tempfile.mkdtemp(prefix="shardprep-e2e-"))
        self.addCleanup(shutil.rmtree, self.dir, ignore_errors=True)

    @classmethod
    def class_directory(cls):
        """A temporary directory that all tests of the class share, gone after the last."""
        directory = pathlib.Path(tempfile.mkdtemp(prefix="shardprep-e2e-"))
        cls.addClassCleanup(shutil.rmtree, directory, ignore_errors=True)
        return directory

    def run_ok(self, *arguments, **options):
        """Runs a command that must succeed; its result."""
        result = run(*arguments, **options)
        self.assertEqual(result.returncode, 0, describe(result))
        return result

    def run_refused(self, *arguments, want, code=1, **options):
        """Runs a command that must fail, with each of the texts `want` in its message."""
        result = run(*arguments, **options)
        self.assertEqual(result.returncode, code, describe(result))
        for text in [want] if isinstance(want, str) else want:
            self.assertIn(text, result.stderr, describe(result))
        return result


def describe(result):
    return (f"\n$ {' '.join(map(str, result.args))}\nexit {result.returncode}\n"
            f"--- stdout\n{result.stdout}\n--- stderr\n{result.stderr}")


def run(binary, *arguments, environment=None, timeout=COMMAND_TIMEOUT_S, **options):
    """Runs a binary of ours to its end."""
    return subprocess.run([str(BIN / binary), *map(str, arguments)], capture_output=True, text=True,
                          timeout=timeout, env={**os.environ, **(environment or {})}, **options)


def prepare_arguments(source, destination, ranks, *more):
    return ["prepare", "--source", source, "--destination", destination, "--tensor-parallel-size",
            ranks, *more]


def make_checkpoint(directory, **flags):
    """Writes a checkpoint; `hidden=224` becomes --hidden 224, and True a flag without a value."""
    arguments = []
    for name, value in {"preset": "tiny", **flags}.items():
        flag = "--" + name.replace("_", "-")
        arguments += [flag] if value is True else [flag, str(value)]
    result = run("make-checkpoint", "--out", directory, *arguments)
    if result.returncode != 0:
        raise AssertionError(describe(result))
    return directory


def wait_until(condition, what, timeout=WAIT_TIMEOUT_S):
    """Polls until the condition is true, and returns its value."""
    end = time.monotonic() + timeout
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > end:
            raise AssertionError(f"waited {timeout} s in vain: {what}")
        time.sleep(POLL_INTERVAL_S)


# --- processes ------------------------------------------------------------------------------------

class Process:
    """A binary of ours that runs beside the test. Its log is read while it runs."""

    def __init__(self, test, binary, *arguments, environment=None, stdin=subprocess.DEVNULL):
        self.name = binary
        self.log_path = test.dir / f"{binary}-{time.monotonic_ns()}.log"
        with open(self.log_path, "wb") as log:
            self.process = subprocess.Popen(
                [str(BIN / binary), *map(str, arguments)], stdout=log, stderr=log, stdin=stdin,
                env={**os.environ, **(environment or {})})
        self.pid = self.process.pid
        test.addCleanup(self.kill)

    def log(self):
        return self.log_path.read_text(errors="replace")

    def wait_for_log(self, pattern):
        """The match of a regular expression in the log, waited for."""
        def find():
            found = re.search(pattern, self.log())
            if not found and self.process.poll() is not None:
                raise AssertionError(f"{self.name} ended with {self.process.returncode} before its "
                                     f"log matched {pattern}:\n{self.log()}")
            return found
        return wait_until(find, f"{pattern} in the log of {self.name}")

    def wait(self, timeout=COMMAND_TIMEOUT_S):
        return self.process.wait(timeout)

    def signal(self, number):
        self.process.send_signal(number)

    def kill(self):
        """Ends the process and what it started, and reaps it."""
        descendants = [pid for pid, _ in descendants_of(self.pid)]
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for pid in descendants:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _stat_fields(pid):
    text = pathlib.Path(f"/proc/{pid}/stat").read_text()
    return text[text.rindex(")") + 2:].split()


def descendants_of(pid):
    """(pid, program name) of every process below one, children first."""
    children = collections.defaultdict(list)
    for path in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            children[int(_stat_fields(path.name)[1])].append(int(path.name))
    found, queue = [], list(children[pid])
    while queue:
        child = queue.pop(0)
        queue += children[child]
        with contextlib.suppress(OSError):
            found.append((child, os.path.basename(os.readlink(f"/proc/{child}/exe"))))
    return found


def workers_of(pid):
    return [child for child, name in descendants_of(pid) if name == "shardprep-worker"]


def is_alive(pid):
    """Whether the process exists and is no zombie."""
    try:
        return _stat_fields(pid)[0] not in "ZX"
    except OSError:
        return False


def high_water_bytes(pid):
    """VmHWM of a living process, else 0."""
    try:
        status = pathlib.Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    found = re.search(r"^VmHWM:\s+(\d+) kB", status, re.MULTILINE)
    return int(found.group(1)) * 1024 if found else 0


# --- files ----------------------------------------------------------------------------------------

Tensor = collections.namedtuple("Tensor", "dtype shape data")


def read_safetensors(path):
    """(name -> Tensor, metadata) of one file."""
    data = pathlib.Path(path).read_bytes()
    (header_size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8:8 + header_size])
    metadata = header.pop("__metadata__", {})
    start = 8 + header_size
    return {name: Tensor(entry["dtype"], entry["shape"],
                         data[start + entry["data_offsets"][0]:start + entry["data_offsets"][1]])
            for name, entry in header.items()}, metadata


def read_all_tensors(directory, pattern="*.safetensors"):
    """name -> Tensor over all files of a directory; a name stands in one file only."""
    tensors = {}
    for path in sorted(pathlib.Path(directory).glob(pattern)):
        for name, tensor in read_safetensors(path)[0].items():
            if name in tensors:
                raise AssertionError(f"{name} is in two files of {directory}")
            tensors[name] = tensor
    return tensors


def file_hashes(directory):
    """Relative name -> SHA-256 of every file below a directory."""
    root = pathlib.Path(directory)
    return {path.relative_to(root).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(root.rglob("*")) if path.is_file()}


def read_json(path):
    return json.loads(pathlib.Path(path).read_text())


def tree_bytes(directory):
    return sum(path.stat().st_size for path in pathlib.Path(directory).rglob("*")
               if path.is_file())


def edit_json(path, change):
    """Rewrites a JSON file through a function on its value."""
    value = read_json(path)
    change(value)
    pathlib.Path(path).write_text(json.dumps(value))
