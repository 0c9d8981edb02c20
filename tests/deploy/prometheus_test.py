"""A real Prometheus scrapes a real controller and worker while a job runs, loads the alerts, and
answers every query of the dashboard."""

import json
import pathlib
import shutil
import sys
import unittest
import urllib.parse
import urllib.request

import yaml

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "e2e"))
import metrics
import support
from controller import HTTP_TIMEOUT_S, Controller
from monitoring_test import dashboard_queries, scaling_query
from support import TestCase, make_checkpoint, wait_until

SCRAPES = "1s"
_why_not = None if shutil.which("prometheus") else "no Prometheus: install_packages.sh deploy-check"


class Prometheus:
    """A Prometheus on a free loopback port that scrapes the given addresses, name -> address."""

    def __init__(self, test, targets):
        directory = test.dir / "prometheus"
        directory.mkdir()
        (directory / "rules.yaml").write_text(yaml.safe_dump(metrics.rule_groups()))
        (directory / "prometheus.yaml").write_text(yaml.safe_dump({
            "global": {"scrape_interval": SCRAPES, "evaluation_interval": SCRAPES},
            "rule_files": ["rules.yaml"],
            "scrape_configs": [{"job_name": name, "static_configs": [{"targets": [address]}]}
                               for name, address in targets.items()]}))
        self.process = support.Process(
            test, shutil.which("prometheus"), f"--config.file={directory}/prometheus.yaml",
            f"--storage.tsdb.path={directory}/data", "--web.listen-address=127.0.0.1:0")
        self.address = self.process.wait_for_log(
            r'msg="Listening on" address=(127\.0\.0\.1:\d+)').group(1)
        wait_until(self._is_ready, "Prometheus to be ready")

    def _is_ready(self):
        try:
            return self._get("/-/ready")
        except OSError:
            return None

    def _get(self, path):
        with urllib.request.urlopen(f"http://{self.address}{path}", timeout=HTTP_TIMEOUT_S) as page:
            return page.read()

    def api(self, path, **parameters):
        """The data of an API call that succeeds."""
        answer = json.loads(self._get(f"/api/v1/{path}?" + urllib.parse.urlencode(parameters)))
        return answer["data"]

    def value(self, expression):
        """The one value of an expression, or None."""
        result = self.api("query", query=expression)["result"]
        return float(result[0]["value"][1]) if result else None

    def settled_rules(self):
        """The rules of the one group, or None while one is not evaluated yet or is pending."""
        (group,) = self.api("rules")["groups"]
        unsettled = any(rule["health"] == "unknown" or rule["state"] == "pending"
                        for rule in group["rules"])
        return None if unsettled else group["rules"]


@unittest.skipIf(_why_not, _why_not)
class PrometheusTest(TestCase):
    def test_a_job_is_seen_from_outside(self):
        source = make_checkpoint(self.dir / "source", hidden=512, intermediate=512)
        controller = Controller(self)
        worker = controller.start_worker()
        prometheus = Prometheus(self, {"controller": controller.metrics_address,
                                       "worker": worker.metrics_address})
        wait_until(lambda: prometheus.value("sum(up)") == 2, "both to be scraped")
        self.assertEqual(prometheus.value('shardprep_jobs_completed_total{result="succeeded"}'), 0)
        client = controller.client
        client.create("seen", client.spec(source, self.dir / "prepared", 4))
        last = client.watch("seen")[-1]
        self.assertEqual(last.state, client.prep.PrepJob.STATE_SUCCEEDED, last.error)
        wait_until(lambda: prometheus.value(
            'shardprep_jobs_completed_total{result="succeeded"}') == 1, "the job to be counted")
        wait_until(lambda: prometheus.value("shardprep_ranks_completed_total")
                   == last.progress.rank_tasks_total, "its tasks to be counted")
        self.assertEqual(prometheus.value("shardprep_read_bytes_total"),
                         last.progress.bytes_read)

        for _, query in [*dashboard_queries(), ("scaling", scaling_query())]:
            prometheus.api("query", query=query)
        wait_until(lambda: prometheus.value(scaling_query()) == 0, "the queue to be empty")
        # A scrape during the job saw work and nothing finished, so an alert may be pending until
        # the next evaluation. One that fires stays, and fails below.
        rules = wait_until(prometheus.settled_rules, "the rules to be evaluated")
        self.assertEqual(len(rules), len(metrics.alerts()))
        for rule in rules:
            self.assertEqual((rule["health"], rule["state"]), ("ok", "inactive"), rule["name"])


if __name__ == "__main__":
    unittest.main()
