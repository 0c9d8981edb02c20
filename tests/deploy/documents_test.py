"""What the documents show is run, and what they name exists."""

import json
import os
import pathlib
import re
import subprocess
import sys
import unittest

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "e2e"))
import rpc
from certificates import make_certificates
from controller import Controller
from support import TestCase, describe, make_checkpoint, prepare_arguments, run

ROOT = pathlib.Path(__file__).resolve().parents[2]
API_GUIDE = ROOT / "proto/README.md"
FORMAT = ROOT / "workers/FORMAT.md"
DOCUMENTS = [ROOT / "README.md", API_GUIDE, FORMAT, *sorted(ROOT.glob("deploy/**/*.md")),
             ROOT / "kernels/EXTENDING.md", ROOT / "workers/EXTENDING.md"]
PROFILES = ("aiter-separated", "aiter-interleaved", "aiter-gfx1250", "logical")
ARCHITECTURES = {"aiter-gfx1250": "gfx1250"}
BACKEND = "AITER_MXFP4_BF16"
PYTHON = "/usr/bin/python3"
FLAGS_OF_OTHERS = {"build-arg"}
SERVERS = ("shardprep-controller", "shardprep-worker")

BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
GRPCURL = re.compile(r"^grpcurl .*?(?:-d '(.*)' )?127\.0\.0\.1:7070 (\S+)(?: (\S+))?$",
                     re.MULTILINE)


def blocks(path, language):
    """Text of each block of a language, in order."""
    return [text for name, text in BLOCK.findall(path.read_text()) if name == language]


def commands_of(path):
    """(binary, arguments) of each command of ours in a document: what stands in shell blocks, after
    a prompt in a session, or after the `--` of kubectl exec."""
    text = path.read_text()
    lines = "\n".join(blocks(path, "sh")).replace("\\\n", " ").splitlines()
    lines += re.findall(r"^\$ (.*)$", text.replace("\\\n", " "), re.MULTILINE)
    for line in lines:
        words = line.split("#")[0].split()
        if words[:1] == ["kubectl"] and "--" in words:
            words = words[words.index("--") + 1:]
        if words and pathlib.PurePath(words[0]).name in ("shardprep", *SERVERS):
            yield pathlib.PurePath(words[0]).name, words[1:]


def anchors(path):
    """Anchors of headings as the usual renderers make them."""
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")
            for heading in HEADING.findall(path.read_text())}


class ApiGuideTest(TestCase):
    """proto/README.md, block for block."""

    def setUp(self):
        super().setUp()
        (self.dir / "proto").symlink_to(ROOT / "proto")
        (shell,) = [block for block in blocks(API_GUIDE, "sh") if "protoc" in block]
        subprocess.run(["bash", "-euo", "pipefail", "-c", shell], cwd=self.dir, check=True)
        self.source = make_checkpoint(self.dir / "source", hidden=512, intermediate=512)

    def run_guide(self, address, more="", **environment):
        program = "\n".join([*blocks(API_GUIDE, "python"), more])
        result = subprocess.run(
            [PYTHON, "-c", program], cwd=self.dir, capture_output=True, text=True, timeout=120,
            check=False, env={**os.environ, "CONTROLLER": address, "SOURCE": str(self.source),
                              "DESTINATION": str(self.dir / "prepared"), **environment})
        self.assertEqual(result.returncode, 0, describe(result))
        return result.stdout

    def test_the_examples_run_in_their_order(self):
        controller = Controller(self, local_workers=1)
        output = self.run_guide(controller.address)
        for line in (r"^64 of 512 a rank, padded to 128 by aiter-mxfp4-bf16/silu/128$",
                     r"^STATE_SUCCEEDED 25/25 rank tasks$|^STATE_SUCCEEDED (\d+)/\1 rank tasks$",
                     r"^INVALID_ARGUMENT .*\b7\b", r"^STATE_(CANCELLED|SUCCEEDED)$"):
            self.assertRegex(output, re.compile(line, re.MULTILINE))
        # The command that the guide prints for an engine is one that works.
        (fetch,) = re.findall(r"^shardprep (fetch .*)$", output, re.MULTILINE)
        self.run_ok("shardprep", *fetch.replace("DIR", str(self.dir / "rank3")).split())

    def test_the_secure_channel_is_one_that_a_controller_takes(self):
        certificates = make_certificates(self.dir / "certificates")
        server = certificates / "controller"
        controller = Controller(self, tls_cert=server / "tls.crt", tls_key=server / "tls.key",
                                tls_ca=server / "ca.crt")
        guide = blocks(API_GUIDE, "python")
        connect, secure = guide[0], next(block for block in guide if "def secure_channel" in block)
        program = "\n".join([connect, secure, f"""
channel = secure_channel(os.environ["CONTROLLER"], {str(certificates / "client")!r})
prep = prep_pb2_grpc.PrepServiceStub(channel)
print(len(prep.ListPrepJobs(prep_pb2.ListPrepJobsRequest(), timeout=SECONDS).prep_jobs), "jobs")
"""])
        result = subprocess.run([PYTHON, "-c", program], cwd=self.dir, capture_output=True,
                                text=True, timeout=120, check=False,
                                env={**os.environ, "CONTROLLER": controller.address})
        self.assertEqual(result.stdout, "0 jobs\n", describe(result))

    def test_every_call_is_explained(self):
        text = API_GUIDE.read_text()
        service = rpc.modules()[0].DESCRIPTOR.services_by_name["PrepService"]
        for method in service.methods:
            self.assertTrue(f"| `{method.name}` |" in text, method.name)
            self.assertTrue(f"shardprep.v1.PrepService/{method.name}\n" in text,
                            f"no grpcurl line for {method.name}")

    def test_grpcurl_lines_name_calls_and_fields_that_exist(self):
        from google.protobuf import json_format
        prep = rpc.modules()[0]
        service = prep.DESCRIPTOR.services_by_name["PrepService"]
        requests = {f"shardprep.v1.PrepService/{method.name}":
                    getattr(prep, method.input_type.name) for method in service.methods}
        found = GRPCURL.findall("\n".join(blocks(API_GUIDE, "sh")))
        self.assertGreater(len(found), 8)
        for body, verb, symbol in found:
            with self.subTest(verb):
                if verb in requests:
                    json_format.Parse(body, requests[verb]())
                elif verb == "describe":
                    self.assertEqual(symbol, "shardprep.v1.PrepJobSpec")
                else:
                    self.assertIn(verb, ("list", "grpc.health.v1.Health/Check"))
                    self.assertLessEqual(json.loads(body or "{}").keys(), {"service"})


class FormatTest(TestCase):
    """workers/FORMAT.md, run on artefacts."""

    def test_the_specification_holds_for_every_profile(self):
        source = make_checkpoint(self.dir / "source", hidden=512, intermediate=512)
        program = "\n".join(blocks(FORMAT, "python"))
        for profile in PROFILES:
            with self.subTest(profile):
                artifact = self.dir / profile
                self.run_ok("shardprep", *prepare_arguments(
                    source, artifact, 8, "--profile", profile, "--backend", BACKEND,
                    "--architecture", ARCHITECTURES.get(profile, "gfx950")))
                result = subprocess.run(
                    [PYTHON, "-c", program], capture_output=True, text=True, timeout=120,
                    check=False, env={**os.environ, "ARTIFACT": str(artifact)})
                self.assertEqual(result.returncode, 0, describe(result))
                self.assertRegex(result.stdout, "^8 tensors of rank 0 hold")

    def test_the_specification_holds_for_dense_tensors_of_ranks(self):
        source = make_checkpoint(self.dir / "source", preset="small-v4")
        artifact = self.dir / "artifact"
        self.run_ok("shardprep", *prepare_arguments(source, artifact, 4, "--slice-dense",
                                                    "--self-contained"))
        self.assertEqual(list(artifact.glob("*replicated*")), [])
        self.run_ok("shardprep", "verify", artifact, "--source", source)
        result = subprocess.run([PYTHON, "-c", "\n".join(blocks(FORMAT, "python"))],
                                capture_output=True, text=True, timeout=120, check=False,
                                env={**os.environ, "ARTIFACT": str(artifact)})
        self.assertEqual(result.returncode, 0, describe(result))

    def test_the_specification_holds_under_expert_parallelism(self):
        source = make_checkpoint(self.dir / "source", hidden=512, intermediate=512)
        controller = Controller(self, local_workers=1)
        client = controller.client
        spec = client.spec(source, self.dir / "artifact", 4)
        spec.targets[0].parallel_layout.expert_parallel_size = 2
        client.create("experts", spec)
        last = client.watch("experts")[-1]
        self.assertEqual(last.state, client.prep.PrepJob.STATE_SUCCEEDED, last.error)
        self.assertEqual(len(list((self.dir / "artifact").glob("expert-map-rank-*.json"))), 4)
        result = subprocess.run([PYTHON, "-c", "\n".join(blocks(FORMAT, "python"))],
                                capture_output=True, text=True, timeout=120, check=False,
                                env={**os.environ, "ARTIFACT": str(self.dir / "artifact")})
        self.assertEqual(result.returncode, 0, describe(result))

    def test_the_program_sees_a_changed_byte(self):
        source = make_checkpoint(self.dir / "source", hidden=512, intermediate=512)
        artifact = self.dir / "artifact"
        self.run_ok("shardprep", *prepare_arguments(source, artifact, 2))
        data = artifact / "model-rank-0-part-0.safetensors"
        content = bytearray(data.read_bytes())
        content[5000] ^= 1
        data.write_bytes(content)
        result = subprocess.run([PYTHON, "-c", "\n".join(blocks(FORMAT, "python"))],
                                capture_output=True, text=True, timeout=120, check=False,
                                env={**os.environ, "ARTIFACT": str(artifact)})
        self.assertIn("AssertionError: model-rank-0-part-0", result.stderr)

    def test_layouts_and_profiles_are_those_of_the_binary(self):
        text = FORMAT.read_text()
        listed = re.findall(r"^\s*((?:aiter-|row-)[\w-]+)",
                            run("shardprep", "layout", "list").stdout, re.MULTILINE)
        table = re.findall(r"^\| `((?:aiter-|row-)[\w-]+)` \|.*\*R", text, re.MULTILINE)
        self.assertEqual(sorted(table), sorted(set(listed)))
        for profile in PROFILES:
            self.assertIn(f"| `{profile}` | ", text)


class SessionTest(TestCase):
    """The session in README.md, as far as headers say it."""

    def test_the_plan_is_the_one_that_the_binary_makes(self):
        source = make_checkpoint(self.dir / "checkpoint", preset="quickstart", sparse=True)
        plan = "\n" + run("shardprep", "plan", "--source", source, "--destination",
                          self.dir / "prepared", "--tensor-parallel-size", 8,
                          "--include-mtp").stdout
        session = (ROOT / "README.md").read_text().split("$ shardprep plan ", 1)[1]
        shown, prepared = session.split("$ shardprep prepare ", 1)
        lines = [line.removesuffix("...").rstrip() for line in shown.splitlines()[1:]]
        lines = [line for line in lines if line]
        self.assertGreater(len(lines), 10)
        for line in lines:
            self.assertIn("\n" + line, plan)
        fingerprint = re.compile(r"^  fingerprint +([0-9a-f]{64})$", re.MULTILINE)
        self.assertEqual(fingerprint.search(prepared)[1], fingerprint.search(plan)[1])


class ReferencesTest(unittest.TestCase):
    """Commands, flags and links of all documents."""

    def test_links_lead_somewhere(self):
        for document in DOCUMENTS:
            for target in LINK.findall(document.read_text()):
                if re.match(r"https?:", target):
                    continue
                with self.subTest(document.name, link=target):
                    name, _, anchor = target.partition("#")
                    path = (document.parent / name).resolve() if name else document
                    self.assertTrue(path.exists())
                    if anchor:
                        self.assertIn(anchor, anchors(path))

    def test_files_that_are_named_exist(self):
        named = re.compile(r"`((?:proto|kernels|workers|service|deploy|tests)/[\w./-]*\w)`")
        for document in DOCUMENTS:
            for name in named.findall(document.read_text()):
                with self.subTest(document.name, file=name):
                    self.assertTrue((ROOT / name).exists())

    def test_flags_of_commands_are_those_of_the_binaries(self):
        known = {server: set(re.findall(r"--(?:\[no\])?(\w+) \(", run(server, "--helpfull").stdout))
                 for server in SERVERS}
        commands = 0
        for document in DOCUMENTS:
            for binary, arguments in commands_of(document):
                flags = {word[2:].partition("=")[0] for word in arguments if word.startswith("--")}
                if binary in SERVERS:
                    names = known[binary] | {f"no{name}" for name in known[binary]}
                else:
                    help_text = run("shardprep", arguments[0], "--help").stdout
                    names = set(re.findall(r"^  --([\w-]+)", help_text, re.MULTILINE))
                with self.subTest(document.name, command=(binary, *arguments)):
                    self.assertEqual(flags - names, set())
                commands += 1
        self.assertGreater(commands, 10)

    def test_flags_that_text_names_are_those_of_some_binary(self):
        known = set()
        for server in SERVERS:
            known |= set(re.findall(r"--(?:\[no\])?(\w+) \(", run(server, "--helpfull").stdout))
        for command in re.findall(r"^  ([a-z]+)  ", run("shardprep", "--help").stdout,
                                  re.MULTILINE):
            known |= set(re.findall(r"^  --([\w-]+)", run("shardprep", command, "--help").stdout,
                                    re.MULTILINE))
        known |= {f"no{name}" for name in known} | {"version"} | FLAGS_OF_OTHERS
        for document in DOCUMENTS:
            for name in re.findall(r"`--([\w-]+)", document.read_text()):
                with self.subTest(document.name, flag=name):
                    self.assertTrue(name in known, f"no binary has --{name}")


if __name__ == "__main__":
    unittest.main()
