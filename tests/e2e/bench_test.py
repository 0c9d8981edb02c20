"""`shardprep bench` measures, adds up, and leaves nothing behind."""

import json
import signal
import sys
import unittest

sys.dont_write_bytecode = True
from support import Process, TestCase, make_checkpoint, wait_until

ROOFLINES = ["memcpy", "file_write", "file_read", "sha256", "crc32c", "weight_shuffle",
             "scale_shuffle"]
STAGES = ["read", "shuffle", "digest", "write", "wait"]


class BenchTest(TestCase):
    def setUp(self):
        super().setUp()
        self.place = self.dir / "place"
        self.place.mkdir()

    def bench(self, *arguments):
        return self.run_ok("shardprep", "bench", self.place, "--repetitions", 1, "--threads", 2,
                           "--device", "cpu", *arguments)

    def assert_nothing_left(self):
        self.assertEqual(list(self.place.iterdir()), [])

    def test_json_of_a_made_source_is_consistent(self):
        result = json.loads(self.bench("--size", "64MiB", "--json").stdout)
        self.assert_nothing_left()
        self.assertEqual(list(result["rooflines"]), ROOFLINES)
        for name, rates in result["rooflines"].items():
            for rate in rates.values():
                self.assertGreater(rate, 1e6, name)
        job = result["job"]
        self.assertEqual(list(job["stages"]), STAGES)
        self.assertAlmostEqual(sum(stage["seconds"] for stage in job["stages"].values()),
                               job["seconds"], places=6)
        self.assertEqual(job["bytes_read"], result["needed_bytes"])
        self.assertLess(abs(result["source_bytes"] - (64 << 20)), 36 << 20)
        self.assertGreaterEqual(job["bytes_written"], result["needed_bytes"])
        for name in STAGES[:-1]:
            stage = job["stages"][name]
            self.assertGreater(stage["bytes"], 0, name)
            self.assertGreater(stage["seconds"], 0, name)
            self.assertAlmostEqual(stage["of_roofline"] * stage["seconds"],
                                   stage["roofline_seconds"], places=6)
        self.assertIn(job["bound_by"], STAGES)
        self.assertEqual(len(result["all_job_seconds"]), 1)
        self.assertGreater(result["copy_seconds"], 0)
        self.assertEqual(result["threads"], 2)

    def test_a_given_source_is_read_and_stays(self):
        source = make_checkpoint(self.dir / "source", hidden=512, intermediate=512)
        before = sorted(path.name for path in source.iterdir())
        text = self.bench("--source", source, "--tensor-parallel-size", 2).stdout
        self.assertIn("bound by", text)
        self.assertIn(str(source), text)
        self.assertEqual(sorted(path.name for path in source.iterdir()), before)
        self.assert_nothing_left()

    def test_too_small_a_disk_is_refused_before_anything_is_written(self):
        self.run_refused("shardprep", "bench", self.place, "--size", "100TiB",
                         want=["RESOURCE_EXHAUSTED", str(self.place), "TiB"])
        self.assert_nothing_left()

    def test_a_missing_directory_and_a_bad_source_are_refused(self):
        self.run_refused("shardprep", "bench", self.dir / "none", want="NOT_FOUND")
        self.run_refused("shardprep", "bench", self.place, "--source", self.dir / "none",
                         want="NOT_FOUND")
        self.assert_nothing_left()

    def test_an_interrupt_removes_what_was_written(self):
        process = Process(self, "shardprep", "bench", self.place, "--size", "256MiB",
                          "--repetitions", 100)
        wait_until(lambda: list(self.place.glob("*/source/config.json")), "a made source")
        process.signal(signal.SIGINT)
        self.assertEqual(process.wait(), 130, process.log())
        self.assert_nothing_left()


if __name__ == "__main__":
    unittest.main(verbosity=2)
