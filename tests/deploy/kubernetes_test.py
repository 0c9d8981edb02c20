"""deploy/k8s renders, has no field or type that Kubernetes does not know, and agrees with itself
and with the binaries."""

import copy
import functools
import pathlib
import re
import signal
import sys
import unittest

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "e2e"))
import kustomize
from certificates import make_certificates
from controller import Controller
from kube_types import problems_of
from kustomize import (DEPLOYABLE, RENDERED, bytes_of, containers_of, documents_of, find, flags_of,
                       pod_of, pod_owners, seconds_of)
from rpc import SERVING, Client
from support import Process, TestCase, make_checkpoint, run

# Made by whoever installs, never by us: their content is secret, or is another's.
SECRETS_FROM_OUTSIDE = {"shardprep-s3", "shardprep-controller-tls", "shardprep-worker-tls"}
# What a pod may still need after the process has promised to be gone.
GRACE_MARGIN_S = 15
DRAIN_TIMEOUT_S = 60

_why_not = kustomize.why_not()


def each_rendering(names):
    """A test of (self, name, documents) for each rendering, as a subtest."""
    def test_of(check):
        @functools.wraps(check)
        def test(self):
            for name in names:
                with self.subTest(name):
                    check(self, name, documents_of(name))
        return test
    return test_of


def each_container(check):
    """A test of (self, pod, container) for each container of each rendering, as a subtest."""
    @functools.wraps(check)
    def test(self):
        for name in RENDERED:
            for owner in pod_owners(documents_of(name)):
                for container in containers_of(owner):
                    with self.subTest(name, container=container["name"]):
                        check(self, pod_of(owner), container)
    return test


def flag_names(binary):
    """The flags that a server of ours takes, by its own account."""
    text = run(binary, "--helpfull").stdout
    return set(re.findall(r"^ +--(?:\[no\])?(\w+) \(", text, re.MULTILINE))


def container_of(name, owner):
    kind = "StatefulSet" if owner == "shardprep-controller" else "Deployment"
    (container,) = pod_of(find(documents_of(name), kind, owner))["containers"]
    return container


def select(documents, selector):
    """Owners of pods that a label selector with matchLabels only takes."""
    wanted = selector.get("matchLabels", {}).items()
    return [owner for owner in pod_owners(documents)
            if wanted <= owner["spec"]["template"]["metadata"]["labels"].items()]


@unittest.skipIf(_why_not, _why_not)
class RenderedTest(unittest.TestCase):
    """What holds for each rendering, whatever it is put together from."""

    @each_rendering(RENDERED)
    def test_every_field_is_one_that_kubernetes_knows(self, _, documents):
        self.assertGreater(len(documents), 0)
        self.assertEqual([p for document in documents for p in problems_of(document)], [])

    def test_the_check_of_types_sees_what_is_wrong(self):
        good = find(documents_of("local"), "StatefulSet", "shardprep-controller")
        container = ("spec", "template", "spec", "containers", 0)
        cases = [((*container, "imagee"), "x", "no field imagee"),
                 ((*container, "image"), 7, "is no str"),
                 ((*container, "ports", 0, "containerPort"), "7070", "is no int"),
                 ((*container, "readinessProbe", "grpc", "port"), "grpc", "is no int"),
                 ((*container, "resources", "limits", "memory"), "2GiB", "does not match"),
                 (("spec", "selector"), None, "is no V1LabelSelector"),
                 (("metadata", "labels", "x"), "a b", "no label value")]
        for path, value, want in cases:
            with self.subTest(path):
                bad = copy.deepcopy(good)
                place = bad
                for step in path[:-1]:
                    place = place[step]
                place[path[-1]] = value
                self.assertIn(want, "\n".join(problems_of(bad)))

    @each_rendering(DEPLOYABLE)
    def test_everything_of_a_namespace_lies_in_it(self, _, documents):
        for document in documents:
            if document["kind"] != "Namespace":
                self.assertEqual(document["metadata"].get("namespace"), "shardprep",
                                 document["metadata"]["name"])

    @each_rendering(DEPLOYABLE)
    def test_what_pods_refer_to_is_there(self, _, documents):
        there = {(d["kind"], d["metadata"]["name"]) for d in documents}
        for owner in pod_owners(documents):
            pod = pod_of(owner)
            self.assertIn(("ServiceAccount", pod["serviceAccountName"]), there)
            claims = {c["metadata"]["name"]
                      for c in owner["spec"].get("volumeClaimTemplates", [])}
            volumes = {v["name"] for v in pod["volumes"]} | claims
            for volume in pod["volumes"]:
                if "secret" in volume:
                    self.assertIn(volume["secret"]["secretName"], SECRETS_FROM_OUTSIDE)
                if "configMap" in volume:
                    self.assertIn(("ConfigMap", volume["configMap"]["name"]), there)
                if "persistentVolumeClaim" in volume:
                    self.assertIn(("PersistentVolumeClaim",
                                   volume["persistentVolumeClaim"]["claimName"]), there)
            mounted = set()
            for container in containers_of(owner):
                mounted |= {mount["name"] for mount in container["volumeMounts"]}
                for source in container.get("envFrom", []):
                    self.assertIn(("ConfigMap", source["configMapRef"]["name"]), there)
            self.assertEqual(mounted, volumes)

    @each_rendering(DEPLOYABLE)
    def test_every_selector_takes_a_pod(self, _, documents):
        for document in documents:
            spec = document.get("spec", {})
            if document["kind"] == "Service":
                selector = {"matchLabels": spec["selector"]}
            else:
                selector = spec.get("selector") or spec.get("podSelector")
            if isinstance(selector, dict):
                self.assertTrue(select(documents, selector), document["metadata"]["name"])

    @each_container
    def test_containers_have_no_rights_beyond_their_work(self, pod, container):
        context = {**pod["securityContext"], **container["securityContext"]}
        self.assertIs(context["runAsNonRoot"], True)
        self.assertIs(context["allowPrivilegeEscalation"], False)
        self.assertEqual(context["capabilities"], {"drop": ["ALL"]})
        self.assertEqual(context["seccompProfile"], {"type": "RuntimeDefault"})
        self.assertIs(pod["automountServiceAccountToken"], False)
        for forbidden in ("hostNetwork", "hostPID", "hostIPC"):
            self.assertNotIn(forbidden, pod)
        if container["image"].startswith("shardprep"):
            self.assertIs(context["readOnlyRootFilesystem"], True)
        for volume in pod["volumes"]:
            self.assertNotIn("hostPath", volume)

    @each_rendering(RENDERED)
    def test_no_secret_is_part_of_the_manifests(self, _, documents):
        self.assertNotIn("Secret", [document["kind"] for document in documents])

    @each_container
    def test_secrets_come_as_files_that_can_change(self, _, container):
        for variable in container.get("env", []):
            self.assertNotIn("secretKeyRef", variable.get("valueFrom", {}))
            self.assertNotRegex(variable["name"], "SECRET_ACCESS_KEY|SESSION_TOKEN")
        # A file mounted by subPath never changes, so a rotated secret would not arrive.
        for mount in container["volumeMounts"]:
            self.assertNotIn("subPath", mount)

    @each_rendering(RENDERED)
    def test_scratch_is_on_disk_and_bounded(self, _, documents):
        for owner in pod_owners(documents):
            for volume in pod_of(owner)["volumes"]:
                if "emptyDir" in volume:
                    self.assertNotIn("medium", volume["emptyDir"])
                    self.assertIn("sizeLimit", volume["emptyDir"])

    @each_container
    def test_memory_limits_are_requests(self, _, container):
        if container["image"].startswith("shardprep"):
            resources = container["resources"]
            self.assertEqual(resources["requests"]["memory"], resources["limits"]["memory"])

    @each_container
    def test_no_image_is_without_a_version(self, _, container):
        if container["image"].startswith("shardprep"):
            self.assertRegex(container["image"], r"^shardprep-[a-z-]+:\d+\.\d+\.\d+$")


@unittest.skipIf(_why_not, _why_not)
class AgreementTest(unittest.TestCase):
    """Numbers and names that stand in two places are the same in both."""

    @each_rendering(DEPLOYABLE)
    def test_ports_are_those_that_the_processes_listen_on(self, name, documents):
        for owner, flags in (("shardprep-controller", {"grpc": "listen",
                                                       "metrics": "metrics_listen"}),
                             ("shardprep-worker", {"metrics": "metrics_listen"})):
            container = container_of(name, owner)
            given = flags_of(container)
            if "health_listen" in given:
                flags["health"] = "health_listen"
            ports = {port["name"]: port["containerPort"] for port in container["ports"]}
            self.assertEqual(ports, {port: int(given[flag][0].rpartition(":")[2])
                                     for port, flag in flags.items()})
            for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
                for check in container.get(probe, {}).values():
                    if isinstance(check, dict):
                        self.assertIn(check["port"], [*ports, *ports.values()], probe)
        target = flags_of(container_of(name, "shardprep-worker"))["controller"][0]
        host, _, port = target.partition(":")
        service = find(documents, "Service", host)
        self.assertIn(int(port), [entry["port"] for entry in service["spec"]["ports"]])

    def test_policies_let_calls_and_scrapes_through(self):
        documents = documents_of("rocm, monitored, scaled, certificates")
        grpc = find(documents, "NetworkPolicy", "shardprep-controller")["spec"]["ingress"][0]
        self.assertEqual([entry["port"] for entry in grpc["ports"]], [7070])
        scrapes = find(documents, "NetworkPolicy", "shardprep-metrics")["spec"]["ingress"][0]
        listening = [port["containerPort"] for owner in ("shardprep-controller", "shardprep-worker")
                     for port in container_of("rocm", owner)["ports"] if port["name"] == "metrics"]
        self.assertEqual(sorted(entry["port"] for entry in scrapes["ports"]), sorted(listening))
        monitor = find(documents, "PodMonitor", "shardprep")["spec"]
        self.assertEqual({owner["metadata"]["name"]
                          for owner in select(documents, monitor["selector"])},
                         {"shardprep-controller", "shardprep-worker"})
        self.assertEqual(monitor["podMetricsEndpoints"][0]["port"], "metrics")

    @each_rendering(DEPLOYABLE)
    def test_the_grace_period_outlasts_the_drain(self, name, documents):
        controller = find(documents, "StatefulSet", "shardprep-controller")
        drain = seconds_of(flags_of(container_of(name, "shardprep-controller"))
                           ["drain_grace"][0])
        self.assertGreaterEqual(pod_of(controller)["terminationGracePeriodSeconds"],
                                drain + GRACE_MARGIN_S)
        # A part of the default size, at 20 MiB/s.
        worker = pod_of(find(documents, "Deployment", "shardprep-worker"))
        self.assertGreater(worker["terminationGracePeriodSeconds"], 2048 / 20)

    @each_rendering(DEPLOYABLE)
    def test_a_workers_memory_is_its_budget_and_the_stated_overhead(self, name, documents):
        container = container_of(name, "shardprep-worker")
        template = find(documents, "Deployment", "shardprep-worker")["spec"]["template"]
        overhead = bytes_of(template["metadata"]["annotations"]["shardprep/memory-overhead"])
        budget = bytes_of(flags_of(container)["memory_budget"][0])
        limits = container["resources"]["limits"]
        self.assertEqual(bytes_of(limits["memory"]), budget + overhead)
        self.assertEqual(limits["cpu"], flags_of(container)["threads"][0])
        planned = flags_of(container_of(name, "shardprep-controller"))["memory_budget"][0]
        self.assertEqual(bytes_of(planned), budget, "what plans assume")

    @each_rendering(DEPLOYABLE)
    def test_state_is_on_a_volume_of_one_node_for_one_controller(self, name, documents):
        controller = find(documents, "StatefulSet", "shardprep-controller")["spec"]
        self.assertEqual(controller["replicas"], 1)
        (claim,) = controller["volumeClaimTemplates"]
        self.assertEqual(claim["spec"]["accessModes"], ["ReadWriteOnce"])
        mounts = {m["mountPath"]: m["name"]
                  for m in container_of(name, "shardprep-controller")["volumeMounts"]}
        state_dir = flags_of(container_of(name, "shardprep-controller"))["state_dir"][0]
        # A directory of its own: the root of a volume has what its file system puts there.
        self.assertEqual(mounts[str(pathlib.PurePath(state_dir).parent)],
                         claim["metadata"]["name"])

    @each_rendering(DEPLOYABLE)
    def test_budgets_never_block_the_drain_of_a_node(self, _, documents):
        for document in documents:
            if document["kind"] == "PodDisruptionBudget":
                self.assertEqual(document["spec"]["maxUnavailable"], 1)

    @each_rendering(DEPLOYABLE)
    def test_traffic_is_encrypted_or_plaintext_is_stated(self, name, _):
        for owner in ("shardprep-controller", "shardprep-worker"):
            container = container_of(name, owner)
            flags = flags_of(container)
            tls = {"tls_cert", "tls_key", "tls_ca"} & flags.keys()
            self.assertIn(len(tls), (0, 3))
            self.assertEqual("allow_insecure" in flags, not tls)
            mounted = {mount["mountPath"] for mount in container["volumeMounts"]}
            for flag in tls:
                self.assertIn(str(pathlib.PurePath(flags[flag][0]).parent), mounted)
            # The kubelet's gRPC probes cannot show a certificate.
            for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
                grpc = container.get(probe, {}).get("grpc")
                if tls and grpc:
                    self.assertEqual(flags["health_listen"], [f"0.0.0.0:{grpc['port']}"], probe)

    def test_roles_are_the_names_in_the_certificates(self):
        documents = documents_of("rocm, monitored, scaled, certificates")
        names = {d["metadata"]["name"]: set(d["spec"]["dnsNames"]) for d in documents
                 if d["kind"] == "Certificate" and "dnsNames" in d["spec"]}
        flags = flags_of(container_of("rocm", "shardprep-controller"))
        callers, workers = (set(flags[flag][0].split(",")) for flag in ("caller_names",
                                                                        "worker_names"))
        self.assertTrue(callers & names["shardprep-client"])
        self.assertTrue(callers & names["shardprep-controller"])
        self.assertFalse(callers & names["shardprep-worker"])
        self.assertTrue(workers & names["shardprep-worker"])
        self.assertFalse(workers & (names["shardprep-client"] | names["shardprep-controller"]))

    def test_certificates_name_what_is_called(self):
        documents = documents_of("rocm, monitored, scaled, certificates")
        called = flags_of(container_of("rocm", "shardprep-worker"))["controller"][0].split(":")[0]
        certificate = find(documents, "Certificate", "shardprep-controller")["spec"]
        self.assertIn(called, certificate["dnsNames"])
        made = {d["spec"]["secretName"] for d in documents if d["kind"] == "Certificate"}
        self.assertLessEqual({"shardprep-controller-tls", "shardprep-worker-tls"}, made)

    def test_the_scaled_deployment_has_no_number_of_its_own(self):
        documents = documents_of("rocm, monitored, scaled, certificates")
        scaled = find(documents, "ScaledObject", "shardprep-worker")["spec"]
        target = find(documents, scaled["scaleTargetRef"]["kind"], scaled["scaleTargetRef"]["name"])
        self.assertNotIn("replicas", target["spec"])
        self.assertEqual(scaled["minReplicaCount"], 0)

    def test_gpus_are_requested_as_they_are_limited(self):
        resources = container_of("rocm", "shardprep-worker")["resources"]
        self.assertEqual(resources["requests"]["amd.com/gpu"], "1")
        self.assertEqual(resources["limits"]["amd.com/gpu"], "1")
        self.assertEqual(container_of("rocm", "shardprep-worker")["image"].split(":")[0],
                         "shardprep-worker-rocm")


@unittest.skipIf(_why_not, _why_not)
class BinariesTest(TestCase):
    """The manifests against the real processes."""

    def test_every_flag_is_one_that_the_binary_takes(self):
        known = {owner: flag_names(owner) for owner in ("shardprep-controller", "shardprep-worker")}
        for name in DEPLOYABLE:
            for owner, flags in known.items():
                with self.subTest(name, owner=owner):
                    self.assertGreater(len(flags), 10)
                    self.assertEqual(flags_of(container_of(name, owner)).keys() - flags, set())

    def test_probes_ask_for_services_that_answer(self):
        client = Controller(self).client
        probes = container_of("local", "shardprep-controller")
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            self.assertEqual(client.health(probes[probe]["grpc"]["service"]), SERVING, probe)

    def test_the_fetch_of_the_example_is_one_that_the_command_takes(self):
        engine = find(documents_of("examples"), "StatefulSet", "engine")
        (fetch,) = pod_of(engine)["initContainers"]
        self.assertEqual(fetch["command"], ["shardprep"])
        arguments = [argument.replace("s3://prepared/deepseek-v4-pro-tp8", str(self.dir / "none"))
                     .replace("/model/", f"{self.dir}/") for argument in fetch["args"]]
        # All is well with the command, but for what it is to fetch.
        self.run_refused("shardprep", *arguments, want="NOT_FOUND")
        misspelt = [argument.replace("width=", "witdh=") for argument in arguments]
        self.run_refused("shardprep", *misspelt, want="unknown expectation", code=2)

    def arguments_of(self, name, owner, **changed):
        """The rendered arguments, but for addresses, places and devices that are not here."""
        places = {"/data/": f"{self.dir}/data/",
                  "/etc/shardprep/": f"{kustomize.K8S}/base/",
                  "/var/run/secrets/shardprep/tls/": f"{self.dir}/certificates/{owner}/"}
        arguments = []
        for argument in container_of(name, owner)["args"]:
            flag, _, value = argument.partition("=")
            for place, here in places.items():
                value = re.sub(f"^{place}", here, value)
            value = changed.get(flag.removeprefix("--"), value)
            arguments.append(f"{flag}={value}" if "=" in argument else flag)
        return arguments

    def start(self, name, **changed):
        """Controller and worker of a rendering: (process, address, metrics address), process."""
        (self.dir / "volume").mkdir()
        local = {"listen": "127.0.0.1:0", "metrics_listen": "127.0.0.1:0",
                 "health_listen": "127.0.0.1:0"}
        controller = Process(self, "shardprep-controller", *self.arguments_of(
            name, "shardprep-controller", **local, state_dir=self.dir / "volume/state", **changed))
        port = controller.wait_for_log(r"\blistening\b.*?\b127\.0\.0\.1:(\d+)").group(1)
        metrics = controller.wait_for_log(r"\bmetrics\b.*?\b(127\.0\.0\.1:\d+)").group(1)
        worker = Process(self, "shardprep-worker", *self.arguments_of(
            name, "shardprep-worker", **local, controller=f"localhost:{port}", device="cpu"))
        return (controller, f"localhost:{port}", metrics), worker

    def end(self, *processes):
        """Ends processes as the kubelet does; each must do so by itself."""
        for process in processes:
            process.signal(signal.SIGTERM)
            self.assertEqual(process.wait(DRAIN_TIMEOUT_S), 0, process.log())

    def test_the_local_overlay_prepares_a_checkpoint_and_drains(self):
        source = make_checkpoint(self.dir / "data/checkpoints/tiny", hidden=512, intermediate=512)
        (self.dir / "data/prepared").mkdir()
        (controller, address, _), worker = self.start("local")
        client = Client(address)
        self.addCleanup(client.close)
        client.create("from-the-overlay",
                      client.spec(source, self.dir / "data/prepared/tiny", 4))
        last = client.watch("from-the-overlay")[-1]
        self.assertEqual(last.state, client.prep.PrepJob.STATE_SUCCEEDED, last.error)
        self.end(worker, controller)

    def test_the_tls_component_is_one_that_processes_and_probes_agree_on(self):
        source = make_checkpoint(self.dir / "data/checkpoints/tiny", hidden=512, intermediate=512)
        certificates = make_certificates(self.dir / "certificates")
        for name in ("controller", "worker"):
            (certificates / f"shardprep-{name}").symlink_to(name)
        (self.dir / "data/prepared").mkdir()
        (controller, address, metrics), worker = self.start(
            "rocm", allow_source=self.dir / "data/checkpoints",
            allow_destination=self.dir / "data/prepared")
        probes = container_of("rocm", "shardprep-controller")
        health = Client(controller.wait_for_log(r"\bhealth on (\S+)").group(1))
        self.addCleanup(health.close)
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            self.assertEqual(health.health(probes[probe]["grpc"]["service"]), SERVING, probe)

        def secure(name):
            place = certificates / name
            return ["--controller", address, "--tls-cert", place / "tls.crt", "--tls-key",
                    place / "tls.key", "--tls-ca", place / "ca.crt"]

        # A worker's certificate takes work and asks for none.
        self.run_refused("shardprep", "list", *secure("worker"),
                         want=["PERMISSION_DENIED", "ListPrepJobs", "shardprep-worker"])
        self.assertRegex(controller.log(), "level=audit .*msg=ListPrepJobs who=shardprep-worker "
                                           "outcome=PERMISSION_DENIED")
        submitted = self.run_ok(
            "shardprep", "submit", *secure("client"), "--job-id", "over-tls", "--source", source,
            "--destination", self.dir / "data/prepared/tiny", "--tensor-parallel-size", 4,
            "--watch")
        self.assertIn("succeeded", submitted.stdout.lower())
        self.assertRegex(controller.log(), "level=audit .*msg=CreatePrepJob who=shardprep-client "
                                           f"job=over-tls source={source} .*outcome=OK")
        self.end(worker, controller)


if __name__ == "__main__":
    unittest.main()
