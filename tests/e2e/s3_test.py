"""The whole way over object storage: prepare, verify and fetch, undisturbed and disturbed.

Runs against the server that tests/support/s3_servers/rgw.sh starts.
"""

import contextlib
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import unittest
import uuid

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "support" / "s3_servers"))
from access_log import AccessLog
from controller import Controller
from holding_proxy import HoldingProxy
from s3_client import S3Client
from support import (Process, TestCase, file_hashes, is_alive, make_checkpoint, prepare_arguments,
                     read_json, tree_bytes, wait_until, workers_of)

CHUNK_BYTES = 16 << 20
RANKS = 2
# A part of 50 MB for each rank and layer, so that each is uploaded in several pieces.
GEOMETRY = {"hidden": 4096, "intermediate": 2048, "experts": 8, "layers": 2, "mtp_layers": 0,
            "files": 1}
EXPECT = "profile=aiter-separated,width=1024"


class S3TestCase(TestCase):
    """A prefix of its own in the server's bucket. Nothing may be left unfinished below it."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.client = S3Client.from_environment()
        cls.bucket_prefix = f"e2e-{uuid.uuid4()}"
        cls.place = cls.class_directory()
        cls.addClassCleanup(cls.remove, "")

    def setUp(self):
        super().setUp()
        self.test_name = self.id().rpartition(".")[2]
        self.addCleanup(self.remove, f"{self.test_name}/")

    @classmethod
    def remove(cls, below):
        for key in cls.client.list(f"{cls.bucket_prefix}/{below}"):
            cls.client.delete(key)

    @classmethod
    def key(cls, *names):
        return "/".join([cls.bucket_prefix, *map(str, names)])

    @classmethod
    def uri(cls, *names):
        return f"s3://{cls.client.bucket}/{cls.key(*names)}"

    def own(self, *names):
        """Names below which only this test writes."""
        return (self.test_name, *names)

    @classmethod
    def upload(cls, directory, *names):
        for path in pathlib.Path(directory).iterdir():
            cls.client.put(cls.key(*names, path.name), path.read_bytes())
        return cls.uri(*names)

    def objects(self, *names):
        """Name below -> size."""
        prefix = self.key(*names) + "/"
        return {key[len(prefix):]: size for key, size in self.client.list(prefix).items()}

    def download(self, into, *names):
        """The objects below as files, by the test's own client."""
        for name in self.objects(*names):
            path = into / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(self.client.get(self.key(*names, name)))
        return into

    def assert_nothing_unfinished(self, *names):
        prefix = self.key(*names) + "/"
        self.assertEqual(self.client.uploads(prefix), [])
        self.assertEqual(self.client.list(prefix + "_shardprep/"), {})

    def assert_same_artefact(self, found, want):
        """Two directories with equal artefacts. Manifests differ in the source's versions only."""
        found_hashes, want_hashes = file_hashes(found), file_hashes(want)
        manifests = [read_json(directory / "manifest.json") for directory in (found, want)]
        for manifest in manifests:
            manifest.pop("source_token"), manifest.pop("document_sha256")
        self.assertEqual(*manifests)
        found_hashes.pop("manifest.json"), want_hashes.pop("manifest.json")
        self.assertEqual(found_hashes, want_hashes)


class PlacesTest(S3TestCase):
    """Directories and S3 in any mix, with the bytes of a job from directory to directory."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.source = make_checkpoint(cls.place / "source", **GEOMETRY)
        cls.source_uri = cls.upload(cls.source, "source")
        cls.want = cls.place / "want"
        cls("run_ok").run_ok("shardprep", *prepare_arguments(cls.source, cls.want, RANKS))
        cls.artefact_uri = cls.upload(cls.want, "artefact")

    def fetch_arguments(self, uri, into, *more):
        return ["fetch", uri, "--rank", 1, "--into", into, "--expect", EXPECT, *more]

    def test_prepare_to_s3(self):
        for name, source in (("from-directory", self.source), ("from-s3", self.source_uri)):
            with self.subTest(name):
                names = self.own(name)
                arguments = prepare_arguments(source, self.uri(*names), RANKS)
                self.run_ok("shardprep", *arguments)
                self.assert_nothing_unfinished(*names)
                self.assert_same_artefact(self.download(self.dir / name, *names), self.want)
                self.run_ok("shardprep", "verify", self.uri(*names), "--source", source)
                before = {key: self.client.head(self.key(*names, key))["etag"]
                          for key in self.objects(*names)}
                self.run_ok("shardprep", *arguments)
                self.assertEqual(before, {key: self.client.head(self.key(*names, key))["etag"]
                                          for key in self.objects(*names)})

    def test_prepare_from_s3_to_a_directory(self):
        destination = self.dir / "prepared"
        self.run_ok("shardprep", *prepare_arguments(self.source_uri, destination, RANKS))
        self.assert_same_artefact(destination, self.want)
        self.run_ok("shardprep", "verify", destination, "--source", self.source_uri)

    def test_doctor_finds_a_sound_store_and_leaves_nothing(self):
        names = self.own("doctor")
        found = self.run_ok("shardprep", "doctor", "--device", "cpu", "--destination",
                            self.uri(*names), "--source", self.source_uri).stdout
        for subject in ("clock", "source", "put", "conditional put", "list after write",
                        "large object", "ranged reads", "delete"):
            self.assertRegex(found, rf"(?m)^(ok|warn) +{subject} ")
        self.assertNotIn("fail ", found)
        self.assertEqual(self.objects(*names), {})
        self.assert_nothing_unfinished(*names)

    def test_plan_reads_headers_only(self):
        log = AccessLog(os.environ["SHARDPREP_TEST_S3_ACCESS_LOG"], self.client)
        plans = [json.loads(self.run_ok(
            "shardprep", "plan", "--source", source, "--destination", self.uri(*self.own("never")),
            "--tensor-parallel-size", RANKS, "--format", "json").stdout)
            for source in (self.source, self.source_uri)]
        self.assertEqual(*[{key: value for key, value in plan.items()
                            if key in ("layout_fingerprint", "needed_bytes", "output_bytes",
                                       "routed_bytes_per_rank")} for plan in plans])
        read = sum(request.body_bytes for request in log.requests() if request.method == "GET")
        self.assertLess(read, 0.02 * tree_bytes(self.source))
        self.assertEqual(self.objects(*self.own("never")), {})

    def test_verify_reads_from_s3(self):
        self.run_ok("shardprep", "verify", self.artefact_uri, "--source", self.source)

    def test_a_missing_bucket_or_artefact_is_named(self):
        for uri, names in (("s3://no-such-bucket/place", "no bucket no-such-bucket"),
                           (self.uri(*self.own()), "manifest.json")):
            for command in (["verify", uri], self.fetch_arguments(uri, self.dir / "never")):
                with self.subTest(command=command):
                    self.run_refused("shardprep", *command, code=1,
                                     want=["NOT_FOUND", f"no artefact at {uri}", names])
            self.assertFalse((self.dir / "never").exists())

    def assert_read_once(self, source, source_uri, *flags):
        """A job from S3 asks for each byte of its source once, in large ranges."""
        log = AccessLog(os.environ["SHARDPREP_TEST_S3_ACCESS_LOG"], self.client)
        into = self.dir / str(uuid.uuid4())
        self.run_ok("shardprep", "prepare", "--source", source_uri, "--destination", into, *flags)
        prefix = source_uri.split("/", 3)[3]
        gets = [request for request in log.requests() if request.method == "GET" and
                request.key.startswith(prefix) and request.key.endswith(".safetensors")]
        read = sum(request.body_bytes for request in gets)
        needed = sum(path.stat().st_size for path in source.glob("*.safetensors"))
        # Headers stand at the start, and are read by whoever plans: each time a small piece.
        data = sum(request.body_bytes for request in gets if request.range_begin > 0)
        self.assertLessEqual(data, needed)
        print(f"{' '.join(map(str, flags))}: {len(gets)} GETs, {read} of {needed} bytes, "
              f"{read / needed:.4f}", file=sys.stderr)
        self.assertGreaterEqual(read, 0.99 * needed)
        self.assertLessEqual(read, 1.01 * needed)
        self.assertLessEqual(len(gets), 20 + needed / (1 << 20))

    def test_eight_ranks_read_each_source_byte_once_in_large_ranges(self):
        self.assert_read_once(self.source, self.source_uri, "--tensor-parallel-size", 8)

    def test_groups_of_experts_read_each_source_byte_once_in_large_ranges(self):
        for name, flags in (
                ("one rank a group", ("--tensor-parallel-size", 2, "--data-parallel-size", 4,
                                      "--expert-parallel-size", 8)),
                ("two ranks a group, dealt in turn", (
                    "--tensor-parallel-size", 8, "--expert-parallel-size", 4,
                    "--expert-placement", "round-robin"))):
            with self.subTest(name):
                self.assert_read_once(self.source, self.source_uri, *flags)

    def test_rows_that_alternate_are_read_once_in_large_ranges(self):
        """Stacked experts whose gate and up rows alternate: a rank's rows lie apart."""
        source = make_checkpoint(self.dir / "stacked", preset="gpt-oss", hidden=2880,
                                 intermediate=2880, experts=8, layers=2, mtp_layers=0, files=1)
        uri = self.upload(source, *self.own("stacked"))
        for flags in (("--tensor-parallel-size", 8),
                      ("--tensor-parallel-size", 8, "--expert-parallel-size", 4)):
            with self.subTest(flags=flags):
                self.assert_read_once(source, uri, *flags, "--profile", "aiter-interleaved")

    def test_fetch_from_s3_is_fetch_from_a_directory(self):
        want = self.dir / "want"
        self.run_ok("shardprep", *self.fetch_arguments(self.want, want))
        into = self.dir / "fetched"
        arguments = self.fetch_arguments(self.artefact_uri, into)
        self.run_ok("shardprep", *arguments)
        self.assertEqual(file_hashes(into), file_hashes(want))
        log = AccessLog(os.environ["SHARDPREP_TEST_S3_ACCESS_LOG"], self.client)
        self.run_ok("shardprep", *arguments)
        self.assertEqual([request for request in log.requests() if request.method == "GET" and
                          request.key.endswith(".safetensors")], [])
        both = self.dir / "both"
        self.run_ok("shardprep", "fetch", self.artefact_uri, "--rank", "0-1", "--into", both,
                    "--expect", EXPECT, "--parallel", 8)
        self.assertEqual(file_hashes(both), file_hashes(self.want))

    def test_a_killed_fetch_reads_again_a_chunk_a_stream_at_most(self):
        parallel, into = 2, self.dir / "fetched"
        with HoldingProxy(self.client.endpoint) as proxy:
            proxy.hold_after(received=5 * CHUNK_BYTES + CHUNK_BYTES // 2)
            process = Process(self, "shardprep", *self.fetch_arguments(
                self.artefact_uri, into, "--parallel", parallel, "--s3-endpoint", proxy.url))
            self.assertTrue(proxy.held.wait(60), process.log())
            process.kill()
        self.assertFalse(into.exists())
        log = AccessLog(os.environ["SHARDPREP_TEST_S3_ACCESS_LOG"], self.client)
        self.run_ok("shardprep", *self.fetch_arguments(self.artefact_uri, into, "--parallel",
                                                       parallel))
        again = sum(request.body_bytes for request in log.requests() if request.method == "GET")
        whole = tree_bytes(into)
        # Held with 5.5 chunks received: at most one a stream of them was not finished.
        self.assertLessEqual(again, whole - (5 - parallel) * CHUNK_BYTES)
        self.assertGreater(again, whole - 6 * CHUNK_BYTES)
        want = self.dir / "want"
        self.run_ok("shardprep", *self.fetch_arguments(self.want, want))
        self.assertEqual(file_hashes(into), file_hashes(want))


class TlsTest(S3TestCase):
    """Over TLS, with buckets in the host's name and payloads that nobody hashes to sign them."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.source = make_checkpoint(cls.place / "source", **GEOMETRY)
        cls.want = cls.place / "want"
        cls("run_ok").run_ok("shardprep", *prepare_arguments(cls.source, cls.want, RANKS))

    def flags(self, ca_bundle=os.environ.get("SHARDPREP_TEST_S3_CA_BUNDLE")):
        return ["--s3-endpoint", os.environ["SHARDPREP_TEST_S3_TLS_ENDPOINT"], "--s3-addressing",
                "virtual", "--s3-payload", "unsigned"] + (
                    ["--s3-ca-bundle", ca_bundle] if ca_bundle else [])

    def test_the_whole_way_with_buckets_in_host_names(self):
        names = self.own("prepared")
        log = AccessLog(os.environ["SHARDPREP_TEST_S3_ACCESS_LOG"], self.client)
        self.run_ok("shardprep", *prepare_arguments(self.source, self.uri(*names), RANKS,
                                                    *self.flags()))
        self.assert_nothing_unfinished(*names)
        self.assert_same_artefact(self.download(self.dir / "downloaded", *names), self.want)
        self.run_ok("shardprep", "verify", self.uri(*names), "--source", self.source,
                    *self.flags())
        into = self.dir / "fetched"
        self.run_ok("shardprep", "fetch", self.uri(*names), "--rank", "0-1", "--into", into,
                    "--expect", EXPECT, *self.flags())
        self.assert_same_artefact(into, self.want)
        # With the bucket in the host's name the path is the key alone, so that the log, which shows
        # paths, has requests of this test's client only under the bucket's.
        self.assertEqual({request.method for request in log.requests()
                          if request.key.startswith(self.key(*names))} & {"PUT", "POST"}, set())

    def test_who_signed_by_nobody_we_know_is_refused(self):
        other = self.dir / "other.pem"
        subprocess.run(["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt",
                        "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2", "-subj",
                        "/CN=other-authority", "-keyout", self.dir / "other.key", "-out", other],
                       check=True, capture_output=True)
        for name, ca_bundle in (("another authority", other), ("the system's", None)):
            with self.subTest(name):
                names = self.own("never")
                self.run_refused("shardprep", *prepare_arguments(
                    self.source, self.uri(*names), RANKS, *self.flags(ca_bundle)),
                    want=["FAILED_PRECONDITION", "certificate"])
                self.assertEqual(self.objects(*names), {})

    def test_unsigned_payloads_want_tls(self):
        self.run_refused("shardprep", *prepare_arguments(
            self.source, self.uri(*self.own("never")), RANKS, "--s3-payload", "unsigned"),
            want=["INVALID_ARGUMENT", "unsigned"])


class DisturbedUploadTest(S3TestCase):
    """Whatever ends a job, no multipart upload stays behind."""

    HELD_AFTER_BYTES = 70 << 20

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.source = make_checkpoint(cls.place / "source", **GEOMETRY)
        cls.want = cls.place / "want"
        cls("run_ok").run_ok("shardprep", *prepare_arguments(cls.source, cls.want, RANKS))

    @contextlib.contextmanager
    def held_in_an_upload(self, destination):
        """(`prepare` with traffic held in the middle of an upload, the proxy that holds it)."""
        with HoldingProxy(self.client.endpoint) as proxy:
            proxy.hold_after(sent=self.HELD_AFTER_BYTES)
            process = Process(self, "shardprep", *prepare_arguments(
                self.source, destination, RANKS, "--s3-endpoint", proxy.url))
            self.assertTrue(proxy.held.wait(60), process.log())
            prefix = self.key(*self.own()) + "/"
            wait_until(lambda: self.client.uploads(prefix), "an upload that is under way")
            yield process, proxy

    def assert_finished(self, *names):
        self.assert_nothing_unfinished(*names)
        self.assert_same_artefact(self.download(self.dir / "downloaded", *names), self.want)

    def test_a_killed_prepare_is_finished_by_the_next(self):
        names = self.own("prepared")
        with self.held_in_an_upload(self.uri(*names)) as (process, _):
            workers = workers_of(process.pid)
            process.signal(signal.SIGKILL)
            process.wait()
            wait_until(lambda: not any(map(is_alive, workers)), "the end of the workers")
        self.assertNotIn("manifest.json", self.objects(*names))
        self.run_ok("shardprep", *prepare_arguments(self.source, self.uri(*names), RANKS))
        self.assert_finished(*names)

    def test_a_killed_worker_is_replaced(self):
        names = self.own("prepared")
        with self.held_in_an_upload(self.uri(*names)) as (process, proxy):
            for worker in workers_of(process.pid):
                os.kill(worker, signal.SIGKILL)
                wait_until(lambda worker=worker: not is_alive(worker), "the end of the worker")
            proxy.release()
            self.assertEqual(process.wait(), 0, process.log())
        self.assert_finished(*names)

    def test_an_interrupted_prepare_leaves_no_upload(self):
        names = self.own("prepared")
        with self.held_in_an_upload(self.uri(*names)) as (process, proxy):
            process.signal(signal.SIGINT)
            proxy.release()
            self.assertEqual(process.wait(), 130, process.log())
        self.assertEqual(self.client.uploads(self.key(*names) + "/"), [])
        self.run_ok("shardprep", *prepare_arguments(self.source, self.uri(*names), RANKS))
        self.assert_finished(*names)

    def test_a_cancelled_job_leaves_nothing(self):
        names = self.own("prepared")
        with HoldingProxy(self.client.endpoint) as proxy:
            proxy.hold_after(sent=self.HELD_AFTER_BYTES)
            controller = Controller(self, s3_endpoint=proxy.url)
            controller.start_worker(s3_endpoint=proxy.url)
            client = controller.client
            client.create("job-1", client.spec(self.source, self.uri(*names), RANKS))
            self.assertTrue(proxy.held.wait(60), controller.process.log())
            client.cancel("job-1")
            proxy.release()
            controller.wait_for_state("job-1", "CANCELLED")
        self.assertEqual(self.client.uploads(self.key(*names) + "/"), [])
        self.assertEqual(self.objects(*names), {})


class DamageTest(S3TestCase):
    """What was changed at the store is not handed out, and the message says what it is."""

    RANK = 1
    PART = "model-rank-1-part-0.safetensors"
    DATA_START = 4096

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        # 96 native columns at two ranks, padded to 128 or, for another kernel, to 256.
        cls.source = make_checkpoint(cls.place / "source", hidden=256, intermediate=192)
        test = cls("run_ok")
        for name, backend, profile in (("good", "AITER_MXFP4_BF16", "aiter-separated"),
                                       ("wide", "AITER_MXFP4_MXFP4", "aiter-separated"),
                                       ("interleaved", "AITER_MXFP4_BF16", "aiter-interleaved")):
            test.run_ok("shardprep", *prepare_arguments(
                cls.source, cls.uri(name), RANKS, "--backend", backend, "--profile", profile))

    def assert_refused(self, name, *texts, rank=RANK, code=1):
        into = self.dir / "fetched"
        self.run_refused("shardprep", "fetch", self.uri(name), "--rank", rank, "--into", into,
                         "--expect", "profile=aiter-separated,width=128", want=list(texts),
                         code=code)
        self.assertFalse(into.exists())

    def changed(self, name, change):
        """Replaces an object of the good artefact until the end of the test."""
        key = self.key("good", name)
        before = self.client.get(key)
        data = bytearray(before)
        after = change(data)
        self.client.put(key, data if after is None else after)
        self.assertNotEqual(self.client.get(key), before)
        self.addCleanup(self.client.put, key, before)

    def test_a_fitting_artefact_is_handed_out(self):
        self.run_ok("shardprep", "fetch", self.uri("good"), "--rank", self.RANK, "--into",
                    self.dir / "fetched", "--expect", "profile=aiter-separated,width=128")

    def test_stale_width(self):
        self.assert_refused("wide", "FAILED_PRECONDITION", "width", "128", "256")

    def test_other_profile(self):
        self.assert_refused("interleaved", "FAILED_PRECONDITION", "profile", "aiter-separated",
                            "aiter-interleaved")

    def test_wrong_rank(self):
        self.assert_refused("good", "INVALID_ARGUMENT", "rank 7", "2 ranks", rank=7)
        other = self.client.get(self.key("good", "rank-0.json"))
        self.changed("rank-1.json", lambda data: other)
        self.assert_refused("good", "DATA_LOSS", "rank-1.json")

    def test_flipped_bit(self):
        def flip(data):
            data[len(data) // 2] ^= 0x10

        self.changed(self.PART, flip)
        self.assert_refused("good", "DATA_LOSS", self.PART)

    def test_swapped_granules(self):
        def swap(data):
            first = data[self.DATA_START:self.DATA_START + 16]
            second = data[self.DATA_START + 16:self.DATA_START + 32]
            data[self.DATA_START:self.DATA_START + 32] = second + first

        self.changed(self.PART, swap)
        self.assert_refused("good", "DATA_LOSS", self.PART)

    def test_truncated_object(self):
        self.changed(self.PART, lambda data: data[:-16])
        self.assert_refused("good", "DATA_LOSS", self.PART)

    def test_replaced_object(self):
        other = self.client.get(self.key("good", "model-rank-0-part-0.safetensors"))
        self.changed(self.PART, lambda data: other)
        self.assert_refused("good", "DATA_LOSS", self.PART)

    def test_missing_object(self):
        key = self.key("good", self.PART)
        self.addCleanup(self.client.put, key, self.client.get(key))
        self.client.delete(key)
        self.assert_refused("good", "DATA_LOSS", self.PART)

    def test_tampered_manifest(self):
        self.changed("manifest.json", lambda data: re.sub(
            rb'"padded_intermediate": "\d+"', b'"padded_intermediate": "256"', bytes(data)))
        self.assert_refused("good", "DATA_LOSS", "manifest.json")

    def test_tampered_rank_manifest(self):
        self.changed("rank-1.json", lambda data: data.replace(b'"fill": 0', b'"fill": 1', 1))
        self.assert_refused("good", "DATA_LOSS", "rank-1.json")


if __name__ == "__main__":
    unittest.main(verbosity=2)
