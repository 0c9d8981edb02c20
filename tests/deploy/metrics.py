"""Names of metrics: those that our processes expose by the golden list, those in expressions."""

import pathlib
import re

import yaml

ROOT = pathlib.Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests/service/metrics_golden.txt"
COMPONENTS = ROOT / "deploy/k8s/components"

# Exposed by others: the kubelet.
OUTSIDE = {"kubelet_volume_stats_available_bytes", "kubelet_volume_stats_capacity_bytes"}
_STRING = re.compile(r'"[^"]*"')
_NAME = re.compile(r"\b((?:shardprep|kubelet)_\w+|up)\b")
_SELECTOR = re.compile(r"\b(shardprep_\w+)\{([^}]*)\}")
_MATCHER = re.compile(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"')


def golden():
    """series name -> {label: set of values}; a histogram has three series."""
    found = {}
    for line in GOLDEN.read_text().splitlines():
        words = line.split(" # ")[0].split()
        name, kind, labels = words[1], words[2], words[3:]
        values = {label: set(text.split("|"))
                  for label, text in (word.split("=") for word in labels)}
        suffixes = ("_bucket", "_sum", "_count") if kind == "histogram" else ("",)
        for suffix in suffixes:
            found.setdefault(name + suffix, {}).update(values)
    return found


def problems_of(expression):
    """Names, labels and label values of an expression that no process of ours exposes."""
    known = golden()
    problems = [f"no metric {name}" for name in _NAME.findall(_STRING.sub('""', expression))
                if name not in known and name not in OUTSIDE]
    for name, matchers in _SELECTOR.findall(expression):
        for label, operator, value in _MATCHER.findall(matchers):
            have = known.get(name, {}).get(label)
            wanted = value.split("|") if "~" in operator else [value]
            if have is None:
                problems.append(f"{name} has no label {label}")
            else:
                problems += [f"{name} has no {label}={one}" for one in wanted if one not in have]
    return problems


def rule_groups():
    text = (COMPONENTS / "monitoring/prometheus-rule.yaml").read_text()
    return yaml.safe_load(text)["spec"]


def alerts():
    return [rule for group in rule_groups()["groups"] for rule in group["rules"]]
