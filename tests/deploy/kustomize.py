"""Rendering of deploy/k8s, as `kubectl apply -k` would, without a cluster."""

import functools
import os
import pathlib
import re
import subprocess
import tempfile

import yaml

ROOT = pathlib.Path(__file__).resolve().parents[2]
K8S = ROOT / "deploy/k8s"

# What is rendered: a kustomization, and the components put on top of it.
RENDERED = {
    "base": ("base", ()),
    "local": ("overlays/local", ()),
    "local, monitored and scaled": ("overlays/local", ("monitoring", "keda")),
    "rocm": ("overlays/rocm", ()),
    "rocm, monitored, scaled, certificates": ("overlays/rocm",
                                              ("monitoring", "keda", "cert-manager")),
    "examples": ("examples", ()),
}
# Those that run as they are; base is missing what an overlay adds.
DEPLOYABLE = [name for name in RENDERED if name not in ("base", "examples")]


def why_not():
    """Why rendering is not possible here, or None. Components came with kustomize 3.7, which
    kubectl has since 1.21; Debian 12's kubernetes-client is 1.20."""
    try:
        text = subprocess.run(["kubectl", "version", "--client"], capture_output=True, text=True,
                              check=False).stdout
    except FileNotFoundError:
        return "no kubectl"
    version = re.search(r"^Kustomize Version: v(\d+)", text, re.MULTILINE)
    if not version or int(version.group(1)) < 4:
        return "kubectl is older than 1.21 and knows no kustomize components"
    return None


def _build(directory):
    done = subprocess.run(["kubectl", "kustomize", str(directory)], capture_output=True, text=True,
                          check=False)
    if done.returncode != 0 or done.stderr:
        raise AssertionError(f"kubectl kustomize {directory}: {done.stdout}{done.stderr}")
    return done.stdout


@functools.lru_cache(maxsize=None)
def text_of(name):
    kustomization, components = RENDERED[name]
    if not components:
        return _build(K8S / kustomization)
    with tempfile.TemporaryDirectory(prefix="shardprep-k8s-") as directory:
        def relative(path):
            return os.path.relpath(K8S / path, os.path.realpath(directory))
        pathlib.Path(directory, "kustomization.yaml").write_text(yaml.safe_dump({
            "apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization",
            "namespace": "shardprep", "resources": [relative(kustomization)],
            "components": [relative(f"components/{name}") for name in components]}))
        return _build(directory)


def documents_of(name):
    return list(yaml.safe_load_all(text_of(name)))


def find(documents, kind, name):
    """The one document of a kind and name."""
    found = [document for document in documents
             if document["kind"] == kind and document["metadata"]["name"] == name]
    if len(found) != 1:
        raise AssertionError(f"{len(found)} documents {kind}/{name}, want one")
    return found[0]


def pod_owners(documents):
    return [document for document in documents if document["kind"] in ("StatefulSet", "Deployment")]


def pod_of(owner):
    return owner["spec"]["template"]["spec"]


def containers_of(owner):
    return pod_of(owner).get("initContainers", []) + pod_of(owner)["containers"]


def flags_of(container):
    """{"listen": ["0.0.0.0:7070"], ...}; a flag without a value is "true"."""
    flags = {}
    for argument in container.get("args", []):
        if argument.startswith("--"):
            name, _, value = argument[2:].partition("=")
            flags.setdefault(name, []).append(value if "=" in argument else "true")
    return flags


def bytes_of(text):
    """A Kubernetes quantity (2Gi) or a size of our flags (2GiB) in bytes."""
    number, unit = re.fullmatch(r"(\d+)([KMGT]i)?B?", text).groups()
    return int(number) * 1024 ** " KMGT".index(unit[0] if unit else " ")


def seconds_of(text):
    number, unit = re.fullmatch(r"(\d+)([smh])", text).groups()
    return int(number) * {"s": 1, "m": 60, "h": 3600}[unit]
