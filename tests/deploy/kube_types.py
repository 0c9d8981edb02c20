"""Strict types for rendered Kubernetes documents: unknown fields, wrong types, missing fields.

Types of the core API are those of Debian's python3-kubernetes, whose models are generated from
Kubernetes' own OpenAPI document (1.22). What came later, and the custom resources that we use, is
stated below.
"""

import re

import kubernetes.client.models as models

QUANTITY = re.compile(r"^\d+(\.\d+)?([EPTGMk]i?|m)?$")
DNS_LABEL = re.compile(r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$")
DNS_NAME = re.compile(r"^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$")
LABEL_VALUE = re.compile(r"^([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?$")
DURATION = re.compile(r"^(\d+(ms|[smhdwy]))+$")

# Fields that are younger than the models. gRPC probes: stable since Kubernetes 1.27.
ADDED_FIELDS = {"V1Probe": {"grpc": {"port!": int, "service": str}}}

# The models say "str" where the API wants a quantity.
QUANTITY_MAPS = {("V1ResourceRequirements", "limits"), ("V1ResourceRequirements", "requests")}

# Custom resources. A dict is an object with exactly these fields, "!" marks required ones, "*" is
# any name; a string is a type of the core API; a pattern is a string that matches it.
_OPERATOR_RULE = {"alert!": str, "expr!": str, "for": DURATION, "labels": {"*": str},
                  "annotations": {"*": str}}
_ISSUER = {"selfSigned": {}, "ca": {"secretName!": DNS_NAME}}
CUSTOM = {
    ("monitoring.coreos.com/v1", "PodMonitor"): {
        "selector!": "V1LabelSelector", "podTargetLabels": [str],
        "podMetricsEndpoints!": [{"port!": str, "path": str, "interval": DURATION,
                                  "scrapeTimeout": DURATION, "scheme": str}]},
    ("monitoring.coreos.com/v1", "PrometheusRule"): {
        "groups!": [{"name!": str, "interval": DURATION, "rules!": [_OPERATOR_RULE]}]},
    ("keda.sh/v1alpha1", "ScaledObject"): {
        "scaleTargetRef!": {"apiVersion": str, "kind": str, "name!": DNS_NAME},
        "minReplicaCount": int, "maxReplicaCount": int, "pollingInterval": int,
        "cooldownPeriod": int,
        "advanced": {"horizontalPodAutoscalerConfig": {
            "behavior": "V2beta2HorizontalPodAutoscalerBehavior"}},
        "triggers!": [{"type!": str, "metadata!": {"*": str}}]},
    ("cert-manager.io/v1", "Issuer"): _ISSUER,
    ("cert-manager.io/v1", "Certificate"): {
        "isCA": bool, "commonName": str, "secretName!": DNS_NAME, "duration": DURATION,
        "renewBefore": DURATION, "usages": [str], "dnsNames": [str], "ipAddresses": [str],
        "privateKey": {"algorithm": str, "size": int, "rotationPolicy": str},
        "issuerRef!": {"name!": DNS_NAME, "kind": str, "group": str}},
}

# apiVersion and kind of the core documents that we use.
CORE = {("v1", "Namespace"), ("v1", "ServiceAccount"), ("v1", "Service"), ("v1", "ConfigMap"),
        ("v1", "PersistentVolumeClaim"), ("apps/v1", "StatefulSet"), ("apps/v1", "Deployment"),
        ("networking.k8s.io/v1", "NetworkPolicy"), ("policy/v1", "PodDisruptionBudget")}


def problems_of(document):
    """What is wrong with one document, as `kind/name: path: problem`; empty when nothing is."""
    found = []
    kind = (document.get("apiVersion"), document.get("kind"))
    if kind in CORE:
        _check(document, "V1" + kind[1], "", found)
    elif kind in CUSTOM:
        _check(document, {"apiVersion!": str, "kind!": str, "metadata!": "V1ObjectMeta",
                          "spec!": CUSTOM[kind]}, "", found)
    else:
        found.append(f"unknown kind {kind}")
    metadata = document.get("metadata") or {}
    if not DNS_NAME.match(str(metadata.get("name", ""))):
        found.append(f"metadata.name {metadata.get('name')!r} is no name")
    _check_labels(document, "", found)
    name = f"{kind[1]}/{metadata.get('name')}"
    return [f"{name}: {problem}" for problem in found]


def _check(value, wanted, path, found):
    if isinstance(wanted, str):
        _check_core(value, wanted, path, found)
    elif isinstance(wanted, re.Pattern):
        if not isinstance(value, str) or not wanted.match(value):
            found.append(f"{path}: {value!r} does not match {wanted.pattern}")
    elif isinstance(wanted, list):
        if not isinstance(value, list):
            found.append(f"{path}: {value!r} is no list")
            return
        for index, item in enumerate(value):
            _check(item, wanted[0], f"{path}[{index}]", found)
    elif isinstance(wanted, dict):
        _check_object(value, wanted, path, found)
    elif type(value) is not wanted:
        found.append(f"{path}: {value!r} is no {wanted.__name__}")


def _check_object(value, fields, path, found):
    if not isinstance(value, dict):
        found.append(f"{path}: {value!r} is no object")
        return
    known = {name.rstrip("!"): wanted for name, wanted in fields.items()}
    for name in fields:
        if name.endswith("!") and name[:-1] not in value:
            found.append(f"{path}: no {name[:-1]}")
    for name, item in value.items():
        wanted = known.get(name, known.get("*"))
        if wanted is None:
            found.append(f"{path}: unknown field {name}")
        else:
            _check(item, wanted, f"{path}.{name}", found)


def _check_core(value, type_name, path, found):
    """A value against a type as the models name it: V1Probe, list[str], dict(str, str), object."""
    inner = re.fullmatch(r"list\[(.+)\]", type_name)
    if inner:
        _check(value, [inner.group(1)], path, found)
        return
    inner = re.fullmatch(r"dict\(str, (.+)\)", type_name)
    if inner:
        _check(value, {"*": inner.group(1)}, path, found)
        return
    plain = {"str": str, "int": int, "bool": bool}.get(type_name)
    if plain:
        _check(value, plain, path, found)
    elif type_name == "object":  # a number or a name, in all that we use
        if type(value) not in (int, str):
            found.append(f"{path}: {value!r} is neither a number nor a name")
    else:
        _check_model(value, type_name, path, found)


def _check_model(value, type_name, path, found):
    model = getattr(models, type_name)
    if not isinstance(value, dict):
        found.append(f"{path}: {value!r} is no {type_name}")
        return
    json_names = {json: attribute for attribute, json in model.attribute_map.items()}
    added = ADDED_FIELDS.get(type_name, {})
    attributes = {}
    for name, item in value.items():
        where = f"{path}.{name}"
        if name in added:
            _check(item, added[name], where, found)
        elif name not in json_names:
            found.append(f"{path}: {type_name} has no field {name}")
        else:
            attribute = json_names[name]
            attributes[attribute] = item
            _check_core(item, model.openapi_types[attribute], where, found)
            if (type_name, attribute) in QUANTITY_MAPS:
                _check(item, {"*": QUANTITY}, where, found)
    try:
        model(**attributes)  # required fields and allowed values
    except ValueError as error:
        found.append(f"{path}: {error}")


def _check_labels(value, path, found):
    if isinstance(value, list):
        for index, item in enumerate(value):
            _check_labels(item, f"{path}[{index}]", found)
    elif isinstance(value, dict):
        for name, item in value.items():
            if name in ("labels", "matchLabels") and isinstance(item, dict):
                found += [f"{path}.{name}: {label!r} is no label value"
                          for label in item.values() if not LABEL_VALUE.match(str(label))]
            _check_labels(item, f"{path}.{name}", found)
