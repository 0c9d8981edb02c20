"""Several targets in one job: each gets the artefact of a job of its own, the source is read once."""

import json
import sys
import unittest

sys.dont_write_bytecode = True
from support import TestCase, file_hashes, make_checkpoint, run

TARGETS = [
    {"parallelLayout": {"tensorParallelSize": 8}},
    {"parallelLayout": {"tensorParallelSize": 4},
     "kernelTarget": {"profile": "aiter-interleaved"}, "naming": "sglang"},
    {"parallelLayout": {"tensorParallelSize": 8, "expertParallelSize": 8},
     "kernelTarget": {"profile": "aiter-interleaved"}},
]
# The same as flags of a job with one target.
FLAGS = [
    ["--tensor-parallel-size", 8],
    ["--tensor-parallel-size", 4, "--profile", "aiter-interleaved", "--naming", "sglang"],
    ["--tensor-parallel-size", 8, "--expert-parallel-size", 8, "--profile", "aiter-interleaved"],
]


class TargetsTest(TestCase):
    def setUp(self):
        super().setUp()
        self.source = make_checkpoint(self.dir / "source", hidden=256, intermediate=512, experts=8,
                                      layers=2)

    def write_targets(self, name, targets=None):
        """A targets file with destinations below `name`."""
        path = self.dir / f"{name}.json"
        path.write_text(json.dumps([
            {**target, "destinationUri": str(self.dir / name / str(number))}
            for number, target in enumerate(targets or TARGETS)]))
        return path

    def prepare(self, targets, *more):
        return self.run_ok("shardprep", "prepare", "--source", self.source, "--targets", targets,
                           "--include-mtp", "--part-size", "1MiB", "--device", "cpu", *more)

    def own_hashes(self):
        """The files that jobs of their own make, by target."""
        hashes = []
        for number, flags in enumerate(FLAGS):
            own = self.dir / "own" / str(number)
            self.run_ok("shardprep", "prepare", "--source", self.source, "--destination", own,
                        "--include-mtp", "--part-size", "1MiB", "--device", "cpu", *flags)
            hashes.append(file_hashes(own))
        return hashes

    def plan(self, targets, *more):
        return json.loads(self.run_ok("shardprep", "plan", "--source", self.source, "--targets",
                                      targets, "--include-mtp", "--part-size", "1MiB", "--format",
                                      "json", *more).stdout)

    def test_each_target_gets_the_artefact_of_a_job_of_its_own(self):
        targets = self.write_targets("joint")
        joint = self.plan(targets)["joint"]
        self.assertEqual(joint["read_bytes"], joint["needed_bytes"])
        result = self.prepare(targets)
        own = self.own_hashes()
        for number, hashes in enumerate(own):
            place = self.dir / "joint" / str(number)
            self.assertGreater(len(hashes), 20)
            self.assertEqual(file_hashes(place), hashes, f"target {number}")
            self.assertIn(str(place), result.stdout)
            self.run_ok("shardprep", "verify", place, "--source", self.source)

    def test_a_budget_for_one_target_at_a_time_makes_the_same_bytes(self):
        targets = self.write_targets("joint")
        least = int(self.plan(targets)["joint"]["minimum_memory_budget_bytes"])
        tight = self.plan(targets, "--memory-budget", least)["joint"]
        self.assertGreater(tight["read_amplification"], 1)
        self.prepare(targets, "--memory-budget", least)
        for number, hashes in enumerate(self.own_hashes()):
            self.assertEqual(file_hashes(self.dir / "joint" / str(number)), hashes)

    def test_a_target_that_is_there_already_is_left_alone_and_the_others_are_made(self):
        first = self.write_targets("joint", TARGETS[:1])
        self.prepare(first)
        before = {path.name: path.stat().st_mtime_ns
                  for path in (self.dir / "joint" / "0").iterdir()}
        targets = self.write_targets("joint")
        self.prepare(targets)
        after = {path.name: path.stat().st_mtime_ns
                 for path in (self.dir / "joint" / "0").iterdir()}
        self.assertEqual(after, before)
        for number, hashes in enumerate(self.own_hashes()):
            self.assertEqual(file_hashes(self.dir / "joint" / str(number)), hashes)
        again = self.prepare(targets)
        self.assertIn("already complete", again.stdout)

    def test_a_target_that_cannot_be_made_refuses_the_job_before_anything_is_written(self):
        wrong = [TARGETS[0], {"parallelLayout": {"tensorParallelSize": 5}}]
        targets = self.write_targets("joint", wrong)
        result = run("shardprep", "prepare", "--source", self.source, "--targets", targets)
        self.assertNotEqual(result.returncode, 0)
        self.assertIn("targets[1]: intermediate size 512 does not divide among 5", result.stderr)
        self.assertFalse((self.dir / "joint").exists())

    def test_a_foreign_artefact_at_one_destination_refuses_the_job_naming_it(self):
        other = self.dir / "joint" / "1"
        self.run_ok("shardprep", "prepare", "--source", self.source, "--destination", other,
                    "--tensor-parallel-size", 2, "--device", "cpu")
        before = file_hashes(other)
        targets = self.write_targets("joint")
        result = run("shardprep", "prepare", "--source", self.source, "--targets", targets,
                     "--include-mtp", "--device", "cpu")
        self.assertNotEqual(result.returncode, 0)
        self.assertIn(str(other), result.stderr)
        self.assertEqual(file_hashes(other), before)
        self.assertFalse((self.dir / "joint" / "0").exists())


if __name__ == "__main__":
    unittest.main()
