"""`shardprep fetch` hands out what fits, and refuses what does not."""

import shutil
import subprocess
import sys
import unittest

sys.dont_write_bytecode = True
from support import TestCase, file_hashes, make_checkpoint, prepare_arguments

EXPECT_NATIVE = "profile=aiter-separated,width=384"


class FetchTest(TestCase):
    """Artefacts of one layer with the extents of V4-Pro, for eight ranks."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.place = cls.class_directory()
        cls.source = make_checkpoint(cls.place / "source", hidden=7168, intermediate=3072,
                                     experts=2, layers=1, mtp_layers=0, files=2)

    def prepared(self, backend):
        destination = self.place / backend
        self.run_ok("shardprep", *prepare_arguments(self.source, destination, 8, "--backend",
                                                    backend, "--profile", "aiter-separated"))
        return destination

    def fetch_arguments(self, artefact, into, expect, ranks=3):
        return ["fetch", artefact, "--rank", ranks, "--into", into, "--expect", expect]

    def test_a_512_wide_artefact_is_refused_by_a_384_wide_engine(self):
        artefact, into = self.prepared("AITER_MXFP4_MXFP4"), self.dir / "model"
        self.run_refused("shardprep", *self.fetch_arguments(artefact, into, EXPECT_NATIVE),
                         want=["FAILED_PRECONDITION", "width", "384", "512"])
        self.assertFalse(into.exists())
        self.run_ok("shardprep", *self.fetch_arguments(artefact, into,
                                                       "profile=aiter-separated,width=512"))

    def test_a_fitting_artefact_arrives_whole_and_once(self):
        artefact, into = self.prepared("AITER_MXFP4_BF16"), self.dir / "model"
        arguments = self.fetch_arguments(artefact, into, EXPECT_NATIVE + ",tp=8,activation=SILU")
        self.run_ok("shardprep", *arguments)
        fetched, published = file_hashes(into), file_hashes(artefact)
        own = {name for name in published
               if not name.startswith(("model-rank-", "rank-")) or
               name.startswith(("model-rank-3-", "rank-3."))}
        self.assertEqual(set(fetched), own)
        for name in own:
            self.assertEqual(fetched[name], published[name], name)
        before = {path: path.stat().st_mtime_ns for path in into.iterdir()}
        self.run_ok("shardprep", *arguments)
        self.assertEqual({path: path.stat().st_mtime_ns for path in into.iterdir()}, before)

    def test_expectations_must_be_stated_and_met(self):
        artefact, into = self.prepared("AITER_MXFP4_BF16"), self.dir / "model"
        cases = [
            ("width=384", "profile"),
            ("profile=aiter-separated", "width"),
            (EXPECT_NATIVE + ",backend=AITER_MXFP4_FP8", "backend"),
            (EXPECT_NATIVE + ",gate_mode=INTERLEAVE", "gate_mode"),
            (EXPECT_NATIVE + ",tp=4", "tp"),
            (EXPECT_NATIVE + ",aiter=0.1.15", "aiter"),
        ]
        for expect, field in cases:
            with self.subTest(expect):
                self.run_refused("shardprep", *self.fetch_arguments(artefact, into, expect),
                                 want=field)
                self.assertFalse(into.exists())
        misspelt = self.fetch_arguments(artefact, into, EXPECT_NATIVE + ",witdh=384")
        self.run_refused("shardprep", *misspelt, want="witdh", code=2)
        self.run_ok("shardprep", *self.fetch_arguments(artefact, into,
                                                       EXPECT_NATIVE + ",aiter=0.1.16"))

    def test_too_little_space_is_known_before_the_first_byte(self):
        artefact, place = self.prepared("AITER_MXFP4_BF16"), self.dir / "small"
        place.mkdir()
        mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(place)],
                                 capture_output=True, text=True)
        if mounted.returncode != 0:
            self.skipTest(f"no file system may be mounted here: {mounted.stderr.strip()}")
        self.addCleanup(subprocess.run, ["umount", str(place)], check=True)
        self.run_refused("shardprep", *self.fetch_arguments(artefact, place / "model",
                                                            EXPECT_NATIVE),
                         want=["RESOURCE_EXHAUSTED", "bytes free", "want"])
        self.assertEqual([path.name for path in (place / "model.shardprep-partial").iterdir()
                          if path.suffix == ".safetensors"], [])

    def test_a_rank_outside_the_world_is_refused(self):
        artefact = self.prepared("AITER_MXFP4_BF16")
        self.run_refused("shardprep", *self.fetch_arguments(artefact, self.dir / "model",
                                                            EXPECT_NATIVE, ranks=8), want="8")

    def test_only_what_a_trusted_key_signed_is_handed_out(self):
        keys = {name: self.make_key(name) for name in ("ours", "next", "foreign")}
        artefact = self.dir / "signed"
        arguments = prepare_arguments(self.source, artefact, 8, "--backend", "AITER_MXFP4_BF16",
                                      "--sign-key", keys["ours"][0])
        self.run_ok("shardprep", *arguments)

        def fetch(into, *keys):
            trust = [word for key in keys for word in ("--trust", key)]
            return [*self.fetch_arguments(artefact, self.dir / into, EXPECT_NATIVE), *trust]

        self.run_ok("shardprep", *fetch("first", keys["next"][1], keys["ours"][1]))
        self.run_refused("shardprep", *fetch("none", keys["foreign"][1]),
                         want=["PERMISSION_DENIED", "manifest.json.sig"])
        self.run_refused("shardprep", "verify", artefact, "--trust", keys["foreign"][1],
                         want="PERMISSION_DENIED")
        # The job is known to be done by its own key, and by another key it is not.
        self.assertIn("already complete", self.run_ok("shardprep", *arguments).stdout)
        other = [keys["next"][0] if word == keys["ours"][0] else word for word in arguments]
        self.run_refused("shardprep", *other, want=["FAILED_PRECONDITION", "shardprep sign"])
        self.run_ok("shardprep", "sign", artefact, "--sign-key", keys["next"][0], "--source",
                    self.source)
        self.run_ok("shardprep", "verify", artefact, "--trust", keys["next"][1])
        (artefact / "manifest.json.sig").unlink()
        self.run_refused("shardprep", *fetch("none", keys["next"][1]),
                         want=["FAILED_PRECONDITION", "is not signed"])
        self.assertFalse((self.dir / "none").exists())

    def test_a_source_behind_links_is_signed_for_only_where_they_may_lead(self):
        key, public = self.make_key("ours")
        source, artefact = self.dir / "linked", self.dir / "prepared"
        source.mkdir()
        for path in self.source.iterdir():
            (source / path.name).symlink_to(path)
        roots = ["--allow-source-root", self.source]
        self.run_ok("shardprep", *prepare_arguments(source, artefact, 8, *roots))
        sign = ["sign", artefact, "--sign-key", key, "--source", source]
        self.run_refused("shardprep", *sign, want=["FAILED_PRECONDITION", str(source)])
        self.assertFalse((artefact / "manifest.json.sig").exists())
        self.run_ok("shardprep", *sign, *roots)
        self.run_ok("shardprep", "verify", artefact, "--trust", public, "--source", source, *roots)

    def test_a_key_that_cannot_be_used_is_refused_before_the_first_byte(self):
        (self.dir / "bad.pem").write_text("no key")
        destination = self.dir / "prepared"
        for key in (self.dir / "bad.pem", self.dir / "absent.pem", self.make_key("ours")[1]):
            with self.subTest(key.name):
                self.run_refused("shardprep", *prepare_arguments(self.source, destination, 8,
                                                                 "--sign-key", key), want=str(key))
                self.assertFalse(destination.exists())
                self.run_refused("shardprep-controller", "--listen=127.0.0.1:0",
                                 f"--sign_key={key}", want=str(key))

    def make_key(self, name):
        private, public = self.dir / f"{name}.pem", self.dir / f"{name}.pub.pem"
        subprocess.run(["openssl", "genpkey", "-algorithm", "ED25519", "-out", private], check=True)
        subprocess.run(["openssl", "pkey", "-in", private, "-pubout", "-out", public], check=True)
        return private, public

    def test_a_flipped_bit_is_not_handed_out(self):
        artefact = self.prepared("AITER_MXFP4_BF16")
        copy = self.dir / "copy"
        shutil.copytree(artefact, copy)
        path = copy / "model-rank-3-part-0.safetensors"
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 0x10
        path.write_bytes(data)
        into = self.dir / "model"
        self.run_refused("shardprep", *self.fetch_arguments(copy, into, EXPECT_NATIVE),
                         want=["DATA_LOSS", path.name])
        self.assertFalse(into.exists())
        self.run_refused("shardprep", "verify", copy, want=["DATA_LOSS", path.name])


if __name__ == "__main__":
    unittest.main(verbosity=2)
