"""A `prepare` that dies is resumed by the next, and ends in the same bytes."""

import os
import signal
import sys
import unittest

sys.dont_write_bytecode = True
from support import (Process, TestCase, file_hashes, is_alive, make_checkpoint, prepare_arguments,
                     read_json, wait_until, workers_of)


class ResumeTest(TestCase):
    ATTEMPTS = 5

    def setUp(self):
        super().setUp()
        self.source = make_checkpoint(self.dir / "source", hidden=2048, intermediate=2048,
                                      experts=8, layers=6)
        self.undisturbed = self.dir / "undisturbed"
        self.run_ok("shardprep", *prepare_arguments(self.source, self.undisturbed, 8))

    def journal(self, destination):
        return list(destination.glob("_shardprep/*/*.json"))

    def interrupted(self, ending):
        """A destination at which `prepare` got the signal after some parts, before the end."""
        for attempt in range(self.ATTEMPTS):
            destination = self.dir / f"prepared-{ending.name}-{attempt}"
            process = Process(self, "shardprep", *prepare_arguments(self.source, destination, 8))
            wait_until(lambda: self.journal(destination) or process.process.poll() is not None,
                       "a first recorded part")
            workers = workers_of(process.pid)
            process.signal(ending)
            code = process.wait()
            wait_until(lambda: not any(map(is_alive, workers)), "the end of the workers")
            if not (destination / "manifest.json").exists():
                self.assertTrue(self.journal(destination))
                return destination, code, process.log()
        self.fail(f"{self.ATTEMPTS} times the job was done before the signal came")

    def finish(self, destination):
        again = self.run_ok("shardprep", *prepare_arguments(self.source, destination, 8))
        self.assertIn("resum", (again.stdout + again.stderr).lower())
        self.assertEqual(file_hashes(destination), file_hashes(self.undisturbed))

    def test_a_killed_prepare_is_resumed(self):
        destination, _, _ = self.interrupted(signal.SIGKILL)
        self.finish(destination)

    def test_an_interrupted_prepare_says_how_to_go_on(self):
        destination, code, log = self.interrupted(signal.SIGINT)
        self.assertEqual(code, 130)
        self.assertIn("again", log)
        self.finish(destination)

    def test_a_recorded_part_that_rots_is_made_again_where_that_is_asked(self):
        destination, _, _ = self.interrupted(signal.SIGKILL)
        record = read_json(next(path for path in self.journal(destination)
                                if path.name != "commit.json"))
        key, size_bytes = record["file"]["key"], int(record["file"]["size_bytes"])
        part = destination / key
        before = part.stat()
        with part.open("r+b") as file:
            file.seek(size_bytes // 2)
            byte = file.read(1)[0]
            file.seek(size_bytes // 2)
            file.write(bytes([byte ^ 0x10]))
        # Size, time and inode are what the record says, so only its bytes tell.
        os.utime(part, ns=(before.st_atime_ns, before.st_mtime_ns))
        again = self.run_ok("shardprep", *prepare_arguments(self.source, destination, 8),
                            "--verify-after-write")
        self.assertRegex(again.stdout + again.stderr, f"damaged.*{key}")
        self.assertEqual(file_hashes(destination), file_hashes(self.undisturbed))

    def test_a_changed_source_is_not_mixed_in(self):
        destination, _, _ = self.interrupted(signal.SIGKILL)
        changed = sorted(self.source.glob("*.safetensors"))[0]
        os.utime(changed, ns=(1, 1))
        self.run_ok("shardprep", *prepare_arguments(self.source, destination, 8))
        self.run_ok("shardprep", "verify", destination, "--source", self.source)
        os.utime(changed, ns=(2, 2))
        self.run_refused("shardprep", *prepare_arguments(self.source, destination, 8),
                         want=["FAILED_PRECONDITION", changed.name])


if __name__ == "__main__":
    unittest.main(verbosity=2)
