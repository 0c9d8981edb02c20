"""A controller with workers, driven over gRPC from another language."""

import json
import os
import pathlib
import signal
import sys
import unittest
import urllib.request

sys.dont_write_bytecode = True
import grpc
from controller import HTTP_TIMEOUT_S, Controller, metric_sum, metric_types, page_of
from rpc import SERVING, error_info
from support import (TestCase, file_hashes, is_alive, make_checkpoint, prepare_arguments,
                     wait_until, workers_of)

GOLDEN_NAMES = pathlib.Path(__file__).resolve().parents[1] / "service" / "metrics_golden.txt"
DRAIN_TIMEOUT_S = 20


def golden_types(process):
    """(name, type) of the metrics that a process exposes by the golden list."""
    lines = [line.split() for line in GOLDEN_NAMES.read_text().splitlines()]
    return {(words[1], words[2]) for words in lines if words and words[0] == process}


class ControllerTest(TestCase):
    def setUp(self):
        super().setUp()
        self.source = make_checkpoint(self.dir / "source", hidden=512, intermediate=512)
        self.controller = Controller(self)
        self.client = self.controller.client
        self.workers = [self.controller.start_worker() for _ in range(2)]

    def assert_error(self, code, reason, call, *arguments):
        with self.assertRaises(grpc.RpcError) as caught:
            call(*arguments)
        self.assertEqual(caught.exception.code(), code, caught.exception.details())
        info = error_info(caught.exception, self.client.details)
        self.assertIsNotNone(info, "no google.rpc.ErrorInfo")
        self.assertEqual(info[1], "shardprep")
        if reason:
            self.assertEqual(info[0], reason)
        return caught.exception

    def test_a_job_from_creation_to_its_manifest(self):
        client, destination = self.client, self.dir / "prepared"
        spec = client.spec(self.source, destination, 4)
        created = client.create("job-1", spec)
        self.assertEqual(created.prep_job_id, "job-1")
        self.assertEqual(created.plan.rank_count, 4)
        states = client.watch("job-1")
        self.assertEqual(states[-1].state, client.prep.PrepJob.STATE_SUCCEEDED, states[-1].error)
        done = [state.progress.rank_tasks_done for state in states]
        self.assertEqual(done, sorted(done))
        self.assertEqual(done[-1], states[-1].progress.rank_tasks_total)
        manifest = client.manifest("job-1")
        self.assertEqual(manifest.rank_count, 4)
        self.assertEqual(manifest.sha256, file_hashes(destination)["manifest.json"])
        self.assertEqual(client.create("job-1", spec).state, states[-1].state)
        self.assert_error(grpc.StatusCode.ALREADY_EXISTS, "", client.create, "job-1",
                          client.spec(self.source, destination, 2))

        alone = self.dir / "alone"
        self.run_ok("shardprep", *prepare_arguments(self.source, alone, 4))
        self.assertEqual(file_hashes(destination), file_hashes(alone))

    def test_lists_are_paged_and_filtered(self):
        client = self.client
        for number in range(3):
            client.create(f"job-{number}", client.spec(self.source, self.dir / f"p{number}", 2))
            self.controller.wait_for_state(f"job-{number}", "SUCCEEDED")
        first = client.list(page_size=2)
        self.assertEqual([job.prep_job_id for job in first.prep_jobs], ["job-2", "job-1"])
        second = client.list(page_size=2, page_token=first.next_page_token)
        self.assertEqual([job.prep_job_id for job in second.prep_jobs], ["job-0"])
        self.assertEqual(second.next_page_token, "")
        failed = client.list(states=[client.prep.PrepJob.STATE_FAILED])
        self.assertEqual(len(failed.prep_jobs), 0)

    def test_errors_say_what_the_caller_should_do(self):
        client, destination = self.client, self.dir / "prepared"
        code = grpc.StatusCode
        self.assert_error(code.NOT_FOUND, "", client.get, "no-such-job")
        self.assert_error(code.NOT_FOUND, "", client.plan,
                          client.spec(self.dir / "absent", destination, 4))
        self.assert_error(code.INVALID_ARGUMENT, "", client.create, "Not An Id",
                          client.spec(self.source, destination, 4))
        refused = self.assert_error(code.INVALID_ARGUMENT, "", client.create, "job-3",
                                    client.spec(self.source, destination, 3))
        self.assertIn("512", refused.details())
        self.assert_error(code.FAILED_PRECONDITION, "", client.create, "job-4", client.spec(
            self.source, destination, 4, backend="TRITON_UNFUSED", profile="aiter-separated"))
        self.assertFalse(destination.exists())
        self.assertEqual(len(client.list().prep_jobs), 0)

    def test_health_reflection_and_metrics(self):
        client = self.client
        for service in ("", "shardprep.v1.PrepService", "liveness"):
            self.assertEqual(client.health(service), SERVING, service)
        reflected = client.reflected_services()
        for service in (b"shardprep.v1.PrepService", b"shardprep.v1.WorkerService",
                        b"grpc.health.v1.Health"):
            self.assertIn(service, reflected)
        client.create("job-1", client.spec(self.source, self.dir / "prepared", 4))
        self.controller.wait_for_state("job-1", "SUCCEEDED")
        self.assertEqual(metric_types(page_of(self.controller.metrics_address)),
                         golden_types("controller"))
        for worker in self.workers:
            self.assertEqual(metric_types(page_of(worker.metrics_address)), golden_types("worker"))
        for worker in self.workers:
            with urllib.request.urlopen(f"http://{worker.metrics_address}/livez",
                                        timeout=HTTP_TIMEOUT_S) as reply:
                self.assertEqual(reply.status, 200)

    def test_read_bytes_are_what_eight_ranks_need(self):
        client = self.client
        client.create("job-1", client.spec(self.source, self.dir / "prepared", 8))
        job = self.controller.wait_for_state("job-1", "SUCCEEDED")
        self.assertEqual(job.plan.read_amplification, 1.0)
        pages = [page_of(worker.metrics_address) for worker in self.workers]
        read = sum(metric_sum(page, "shardprep_read_bytes_total") for page in pages)
        self.assertGreaterEqual(read, job.plan.needed_bytes)
        self.assertLessEqual(read, 1.01 * job.plan.needed_bytes)
        self.assertLessEqual(job.progress.bytes_read, 1.01 * job.plan.needed_bytes)

    def test_a_cancelled_job_leaves_nothing(self):
        client = self.client
        for worker in self.workers:
            worker.signal(signal.SIGSTOP)  # so that the job cannot end before it is cancelled
        destination = self.dir / "prepared"
        client.create("job-1", client.spec(self.source, destination, 4))
        client.cancel("job-1")
        for worker in self.workers:
            worker.signal(signal.SIGCONT)
        self.controller.wait_for_state("job-1", "CANCELLED")
        self.assertEqual(file_hashes(destination), {})
        self.assert_error(grpc.StatusCode.FAILED_PRECONDITION, "", client.manifest, "job-1")

    def test_the_command_line_drives_a_controller(self):
        destination, at = self.dir / "prepared", ["--controller", self.controller.address]
        spec = prepare_arguments(self.source, destination, 4)[1:]
        self.run_ok("shardprep", "submit", *at, "--job-id", "cli-1", *spec)
        self.run_ok("shardprep", "watch", *at, "--job-id", "cli-1")
        self.run_ok("shardprep", "submit", *at, "--job-id", "cli-1", *spec)
        job = json.loads(self.run_ok("shardprep", "get", *at, "--job-id", "cli-1", "--format",
                                     "json").stdout)
        self.assertEqual(job["state"], "STATE_SUCCEEDED")
        self.assertEqual(job["manifest"]["sha256"], file_hashes(destination)["manifest.json"])
        self.assertIn("cli-1", self.run_ok("shardprep", "list", *at).stdout)
        self.run_refused("shardprep", "cancel", *at, "--job-id", "cli-1",
                         want="FAILED_PRECONDITION")
        self.run_refused("shardprep", "get", *at, "--job-id", "cli-2", want="NOT_FOUND")

    def test_processes_drain_on_sigterm(self):
        for worker in self.workers:
            worker.signal(signal.SIGTERM)
            self.assertEqual(worker.wait(DRAIN_TIMEOUT_S), 0, worker.log())
        self.controller.process.signal(signal.SIGTERM)
        self.assertEqual(self.controller.process.wait(DRAIN_TIMEOUT_S), 0,
                         self.controller.process.log())


class KilledWorkerTest(TestCase):
    """A worker that dies in the middle of its lease costs time, never a byte."""

    ATTEMPTS = 5

    def setUp(self):
        super().setUp()
        self.source = make_checkpoint(self.dir / "source", hidden=2048, intermediate=2048,
                                      experts=8, layers=6)

    def test_a_killed_local_worker_does_not_change_the_bytes(self):
        alone = self.dir / "alone"
        self.run_ok("shardprep", *prepare_arguments(self.source, alone, 8))
        controller = Controller(self, local_workers=2)
        for attempt in range(self.ATTEMPTS):
            destination = self.dir / f"prepared-{attempt}"
            job = self.kill_during_job(controller, f"job-{attempt}", destination)
            self.assertEqual(file_hashes(destination), file_hashes(alone))
            if job.progress.attempts_failed > 0:
                return
        self.fail(f"in {self.ATTEMPTS} jobs no kill hit a worker that held a lease")

    def kill_during_job(self, controller, job_id, destination):
        """Stops every worker once bytes are written, kills one, lets the others go on."""
        client = controller.client
        workers = wait_until(lambda: workers_of(controller.process.pid), "local workers")
        client.create(job_id, client.spec(self.source, destination, 8))
        wait_until(lambda: client.get(job_id).progress.bytes_written > 0 or
                   client.get(job_id).end_time.seconds, "first bytes")
        for pid in workers:
            os.kill(pid, signal.SIGSTOP)
        os.kill(workers[0], signal.SIGKILL)
        for pid in workers[1:]:
            os.kill(pid, signal.SIGCONT)
        wait_until(lambda: not is_alive(workers[0]), "the end of the killed worker")
        return controller.wait_for_state(job_id, "SUCCEEDED", "FAILED")

    def test_workers_end_with_their_controller(self):
        controller = Controller(self, local_workers=2)
        workers = wait_until(lambda: len(workers_of(controller.process.pid)) == 2 and
                             workers_of(controller.process.pid), "two local workers")
        os.kill(controller.process.pid, signal.SIGKILL)
        wait_until(lambda: not any(map(is_alive, workers)), "the end of the orphans")


if __name__ == "__main__":
    unittest.main(verbosity=2)
