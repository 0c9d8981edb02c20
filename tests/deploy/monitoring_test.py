"""Alerts, dashboard and scaling use metrics that exist, and fire when they should."""

import json
import pathlib
import re
import shutil
import subprocess
import sys
import unittest

import yaml

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "e2e"))
import metrics
from metrics import COMPONENTS, ROOT
from controller import Controller, page_of
from support import TestCase

HERE = pathlib.Path(__file__).resolve().parent
RUNBOOKS = "deploy/OPERATIONS.md"
_why_not = None if shutil.which("promtool") else "no promtool: install_packages.sh deploy-check"


def promtool(*arguments, **options):
    done = subprocess.run(["promtool", *map(str, arguments)], capture_output=True, text=True,
                          check=False, **options)
    if done.returncode != 0:
        raise AssertionError(f"promtool {arguments}: {done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def panels():
    return json.loads((COMPONENTS / "monitoring/dashboard.json").read_text())["panels"]


def dashboard_queries():
    """(title, expression), with Grafana's own variable replaced as Grafana does."""
    return [(panel["title"], target["expr"].replace("$__rate_interval", "1m"))
            for panel in panels() for target in panel["targets"]]


def scaling_query():
    text = (COMPONENTS / "keda/scaled-object.yaml").read_text()
    (trigger,) = yaml.safe_load(text)["spec"]["triggers"]
    return trigger["metadata"]["query"]


class NamesTest(unittest.TestCase):
    def test_every_expression_uses_series_that_are_exposed(self):
        expressions = {"scaling": scaling_query()}
        expressions |= {rule["alert"]: rule["expr"] for rule in metrics.alerts()}
        expressions |= {f"{title}: {query}": query for title, query in dashboard_queries()}
        self.assertGreater(len(expressions), 30)
        for name, expression in expressions.items():
            with self.subTest(name):
                self.assertEqual(metrics.problems_of(expression), [])

    def test_unknown_names_and_labels_are_seen(self):
        for expression, want in (("sum(shardprep_job)", "no metric shardprep_job"),
                                 ('shardprep_jobs{stat="pending"}', "has no label stat"),
                                 ('shardprep_jobs{state=~"pending|done"}', "no state=done"),
                                 ("shardprep_job_wait_seconds", "no metric")):
            self.assertIn(want, "\n".join(metrics.problems_of(expression)))


class AlertsTest(unittest.TestCase):
    def test_every_alert_has_what_a_reader_needs(self):
        headings = re.findall(r"^### (\w+)$", (ROOT / RUNBOOKS).read_text(), re.MULTILINE)
        names = [rule["alert"] for rule in metrics.alerts()]
        self.assertEqual(len(names), len(set(names)))
        for rule in metrics.alerts():
            with self.subTest(rule["alert"]):
                self.assertRegex(rule["alert"], r"^Shardprep[A-Z]\w+$")
                self.assertIn(rule["labels"]["severity"], ("critical", "warning", "info"))
                self.assertTrue(rule["annotations"]["summary"])
                self.assertEqual(rule["annotations"]["runbook"],
                                 f"{RUNBOOKS}#{rule['alert'].lower()}")
                self.assertIn(rule["alert"], headings)
        self.assertEqual([name for name in headings if name.startswith("Shardprep")
                          and name not in names], [], "runbooks of no alert")

    def test_every_alert_is_shown_to_fire_and_not_to(self):
        cases = yaml.safe_load((HERE / "rules_test.yaml").read_text())["tests"]
        fires, silent = set(), set()
        for case in (case for test in cases for case in test["alert_rule_test"]):
            (fires if case.get("exp_alerts") else silent).add(case["alertname"])
        names = {rule["alert"] for rule in metrics.alerts()}
        self.assertEqual(fires, names)
        self.assertEqual(silent, names)


class DashboardTest(unittest.TestCase):
    def test_panels_are_numbered_and_do_not_overlap(self):
        taken = {}
        for panel in panels():
            place = panel["gridPos"]
            for cell in ((x, y) for x in range(place["x"], place["x"] + place["w"])
                         for y in range(place["y"], place["y"] + place["h"])):
                self.assertNotIn(cell, taken, f"{panel['title']} and {taken.get(cell)}")
                taken[cell] = panel["title"]
            self.assertLessEqual(place["x"] + place["w"], 24)
            self.assertTrue(panel["targets"])
        ids = [panel["id"] for panel in panels()]
        self.assertEqual(ids, sorted(set(ids)))

    def test_panels_ask_the_data_source_that_the_reader_chose(self):
        for panel in panels():
            for part in (panel, *panel["targets"]):
                self.assertEqual(part["datasource"], {"type": "prometheus", "uid": "${datasource}"})


@unittest.skipIf(_why_not, _why_not)
class PromtoolTest(TestCase):
    def test_rules_and_queries_parse(self):
        recorded = [{"record": f"query:{number}", "expr": expression} for number, expression in
                    enumerate([scaling_query(), *(query for _, query in dashboard_queries())])]
        groups = metrics.rule_groups()["groups"] + [{"name": "queries", "rules": recorded}]
        path = self.dir / "rules.yaml"
        path.write_text(yaml.safe_dump({"groups": groups}))
        self.assertIn(f"{len(recorded) + len(metrics.alerts())} rules found",
                      promtool("check", "rules", path))

    def test_alerts_fire_when_they_should(self):
        (self.dir / "rules.yaml").write_text(yaml.safe_dump(metrics.rule_groups()))
        shutil.copy(HERE / "rules_test.yaml", self.dir)
        self.assertIn("SUCCESS", promtool("test", "rules", self.dir / "rules_test.yaml"))

    def test_pages_of_both_processes_are_well_formed(self):
        controller = Controller(self)
        worker = controller.start_worker()
        for address in (controller.metrics_address, worker.metrics_address):
            self.assertEqual(promtool("check", "metrics", input=page_of(address)).strip(), "")


if __name__ == "__main__":
    unittest.main()
