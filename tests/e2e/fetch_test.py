"""`shardprep fetch` hands out what fits, and refuses what does not."""

import shutil
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

    def test_a_rank_outside_the_world_is_refused(self):
        artefact = self.prepared("AITER_MXFP4_BF16")
        self.run_refused("shardprep", *self.fetch_arguments(artefact, self.dir / "model",
                                                            EXPECT_NATIVE, ranks=8), want="8")

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
