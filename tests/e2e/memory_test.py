"""A worker keeps to its memory budget, whatever the size of the model."""

import json
import sys
import unittest

sys.dont_write_bytecode = True
from controller import Controller
from support import TestCase, high_water_bytes, make_checkpoint

SLACK_BYTES = 64 << 20
RANKS = 8


class MemoryTest(TestCase):
    def peak_bytes(self, name, budget_bytes, **geometry):
        """VmHWM of a worker that has prepared a checkpoint."""
        source = make_checkpoint(self.dir / name, files=4, **geometry)
        controller = Controller(self)
        worker = controller.start_worker(memory_budget=budget_bytes, device="cpu")
        client = controller.client
        client.create(name, client.spec(source, self.dir / f"{name}-prepared", RANKS))
        job = controller.wait_for_state(name, "SUCCEEDED", "FAILED")
        self.assertEqual(job.state, client.prep.PrepJob.STATE_SUCCEEDED, job.error)
        return high_water_bytes(worker.pid), job.plan

    def test_budget_holds_at_two_model_sizes(self):
        small = {"hidden": 2048, "intermediate": 2048, "experts": 4, "layers": 2}
        large = {"hidden": 7168, "intermediate": 3072, "experts": 6, "layers": 3}
        for name, geometry in (("small", small), ("large", large)):
            with self.subTest(name):
                budget = self.read_once_budget(name, geometry)
                peak, plan = self.peak_bytes(name, budget, **geometry)
                print(f"{name}: {plan.needed_bytes >> 20} MiB of source, budget "
                      f"{budget >> 20} MiB, peak {peak >> 20} MiB", file=sys.stderr)
                self.assertGreater(peak, 0)
                self.assertLessEqual(peak, budget + SLACK_BYTES)

    def read_once_budget(self, name, geometry):
        """The smallest budget with which the source is read once."""
        source = make_checkpoint(self.dir / f"{name}-headers", files=4, sparse=True, **geometry)
        plan = self.run_ok("shardprep", "plan", "--source", source, "--destination",
                           self.dir / "never", "--tensor-parallel-size", RANKS, "--format", "json")
        return int(json.loads(plan.stdout)["read_once_memory_budget_bytes"])


if __name__ == "__main__":
    unittest.main(verbosity=2)
