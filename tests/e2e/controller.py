"""A real controller with real workers beside a test, on ports that the system chooses."""

import re
import urllib.request

from rpc import Client
from support import Process, wait_until

HTTP_TIMEOUT_S = 10


def _flags(values):
    """{"local_workers": 2} as --local_workers=2, the way the two servers spell their flags."""
    return [f"--{name}={value}" for name, value in values.items()]


class Controller:
    """shardprep-controller on a free loopback port, with flags such as local_workers=2."""

    def __init__(self, test, environment=None, **flags):
        self.test = test
        self.process = Process(test, "shardprep-controller", *_flags(
            {"listen": "127.0.0.1:0", "metrics_listen": "127.0.0.1:0", **flags}),
            environment=environment)
        self.address = self.process.wait_for_log(r"\blistening\b.*?\b(127\.0\.0\.1:\d+)").group(1)
        self.metrics_address = self.process.wait_for_log(
            r"\bmetrics\b.*?\b(127\.0\.0\.1:\d+)").group(1)
        self.client = Client(self.address)
        test.addCleanup(self.client.close)

    def start_worker(self, environment=None, **flags):
        worker = Process(self.test, "shardprep-worker", *_flags(
            {"controller": self.address, "metrics_listen": "127.0.0.1:0", **flags}),
            environment=environment)
        worker.metrics_address = worker.wait_for_log(
            r"\bmetrics\b.*?\b(127\.0\.0\.1:\d+)").group(1)
        return worker

    def wait_for_state(self, job_id, *names):
        """The job once it is in one of the named states."""
        states = self.client.prep.PrepJob.State
        wanted = {states.Value("STATE_" + name) for name in names}

        def find():
            job = self.client.get(job_id)
            return job if job.state in wanted else None
        return wait_until(find, f"{job_id} {names}, log:\n{self.process.log()[-2000:]}")


def page_of(address):
    """The text of a Prometheus page."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=HTTP_TIMEOUT_S) as page:
        return page.read().decode()


def metric_types(page):
    """(name, type) of every metric on a page."""
    return set(re.findall(r"^# TYPE (\S+) (\S+)$", page, re.MULTILINE))


def metric_sum(page, name):
    """The sum over all label sets of one metric."""
    values = re.findall(rf"^{name}(?:\{{[^}}]*\}})? (\S+)$", page, re.MULTILINE)
    return sum(map(float, values))
