"""deploy/consumers/shardprep_artifact.py hands out what fits, as it stands in the files."""

import ast
import hashlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import unittest

sys.dont_write_bytecode = True
ROOT = pathlib.Path(__file__).resolve().parents[2]
CONSUMERS = ROOT / "deploy" / "consumers"
sys.path[:0] = [str(ROOT / "tests" / "e2e"), str(CONSUMERS)]
from shardprep_artifact import ArtifactError, compare_versions, open_artifact
from support import TestCase, make_checkpoint, prepare_arguments, read_all_tensors, read_json

try:
    import torch
except ImportError:
    torch = None
# Set where torch is known to be installed, so that nothing is left out unseen.
NEED_TORCH = bool(os.environ.get("SHARDPREP_REQUIRE_TORCH"))

RANKS, RANK = 2, 1
# At two ranks 96 native columns are padded to 128, so pads are there to be seen.
HIDDEN, INTERMEDIATE, EXPERTS, WIDTH = 128, 192, 3, 128
NATIVE_WIDTH = INTERMEDIATE // RANKS
EXPECT = {"separated": {"profile": "aiter-separated", "width": WIDTH},
          "interleaved": {"profile": "aiter-interleaved", "width": WIDTH}}
PREFIX = "model.layers.1.ffn.experts."
DATA_START = 4096
PART = f"model-rank-{RANK}-part-0.safetensors"


class Artifacts(TestCase):
    """A checkpoint of two layers, prepared in two profiles and fetched for one rank."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.place = cls.class_directory()
        cls.source = make_checkpoint(cls.place / "source", hidden=HIDDEN, experts=EXPERTS,
                                     intermediate=INTERMEDIATE, layers=2, mtp_layers=0)
        test = cls("run_ok")
        for name, expect in EXPECT.items():
            prepared = cls.place / f"prepared-{name}"
            test.run_ok("shardprep", *prepare_arguments(cls.source, prepared, RANKS, "--profile",
                                                        expect["profile"]))
            test.run_ok("shardprep", "fetch", prepared, "--rank", RANK, "--into", cls.place / name,
                        "--expect", ",".join(f"{key}={value}" for key, value in expect.items()))

    def open(self, name="separated"):
        return open_artifact(self.place / name, RANK, EXPECT[name])

    def copy(self, name="separated"):
        return pathlib.Path(shutil.copytree(self.place / name, self.dir / "copy"))

    def refuse(self, directory, *texts, rank=RANK, expect=EXPECT["separated"], digests=False):
        """The refusal of a directory, whose message has all of the texts."""
        with self.assertRaises(ArtifactError) as caught:
            artifact = open_artifact(directory, rank, expect)
            if digests:
                artifact.check_digests()
        for text in texts:
            self.assertIn(text, str(caught.exception))
        return caught.exception


class OpenTest(Artifacts):
    def test_a_fitting_artefact_says_what_it_is_for(self):
        artifact = self.open()
        artifact.check_digests()
        self.assertEqual((artifact.profile, artifact.gate_mode, artifact.backend, artifact.naming),
                         ("aiter-separated", "SEPARATED", "AITER_MXFP4_BF16", "vllm"))
        self.assertEqual((artifact.intermediate, artifact.padded_intermediate), (96, 128))
        self.assertEqual((artifact.hidden_pad, artifact.intermediate_pad), (0, 32))
        self.assertTrue(artifact.is_shuffled)
        self.assertEqual(len(artifact.experts()), 2 * 4)
        weight = artifact.info(PREFIX + "w13_weight")
        self.assertEqual((weight.layout, weight.shape, weight.native_rows, weight.padded_rows),
                         ("aiter-16x16", (EXPERTS, 2 * WIDTH, HIDDEN // 2), 192, 256))
        self.assertTrue(weight.is_expert and weight.is_shuffled)
        gate = artifact.info("layers.1.ffn.gate.weight")
        self.assertFalse(gate.is_expert or gate.is_shuffled)

    def test_tensors_are_those_of_the_files(self):
        artifact, want = self.open(), read_all_tensors(self.place / "separated")
        self.assertEqual(set(artifact.tensors), set(want))
        for name, tensor in want.items():
            info = artifact.info(name)
            self.assertEqual((info.dtype, list(info.shape)), (tensor.dtype, tensor.shape), name)
            self.assertEqual(bytes(artifact.read(name)), tensor.data, name)

    def test_a_tensor_goes_into_memory_of_the_caller(self):
        artifact, name = self.open(), PREFIX + "w2_weight"
        block = bytearray(b"\xa5" * (artifact.info(name).size_bytes + 16))
        artifact.read_into(name, memoryview(block)[8:-8])
        self.assertEqual(bytes(block[8:-8]), bytes(artifact.read(name)))
        self.assertEqual(block[:8] + block[-8:], b"\xa5" * 16)
        with self.assertRaisesRegex(ArtifactError, "w2_weight"):
            artifact.read_into(name, bytearray(8))
        with self.assertRaisesRegex(ArtifactError, "nothing.like.it"):
            artifact.read("nothing.like.it")

    def test_expectations_are_those_of_fetch(self):
        prepared = self.place / "prepared-separated"
        native = "profile=aiter-separated,width=128"
        cases = [
            ("profile=aiter-separated,width=256", "width", "256", "128"),
            ("profile=aiter-interleaved,width=128", "profile", "aiter-interleaved",
             "aiter-separated"),
            (native + ",backend=AITER_MXFP4_FP8", "backend", "AITER_MXFP4_FP8",
             "AITER_MXFP4_BF16"),
            (native + ",gate_mode=INTERLEAVE", "gate_mode", "INTERLEAVE", "SEPARATED"),
            (native + ",activation=SITU", "activation", "SITU", "SILU"),
            (native + ",arch=gfx942", "arch", "gfx942", "gfx950"),
            (native + ",tp=8", "tp", "8", "2"),
            (native + ",ep=2", "ep", "2", "1"),
            (native + ",hidden=256", "hidden", "256", "128"),
            (native + ",aiter=0.1.15", "aiter", "0.1.15", "0.1.16"),
            (native + ",fingerprint=" + "0" * 64, "fingerprint", "0" * 64, self.open().fingerprint),
            (native + ",content=" + "0" * 64, "content", "0" * 64, self.open().content_id),
        ]
        for expect, field, expected, found in cases:
            with self.subTest(expect):
                error = self.refuse(prepared, expected, found, expect=expect)
                self.assertEqual(error.field, field)
                self.run_refused("shardprep", "fetch", prepared, "--rank", RANK, "--into",
                                 self.dir / "none", "--expect", expect, want=[field, found])
        open_artifact(prepared, RANK, native + ",aiter=0.1.16,hidden=128,tp=2,ep=1,arch=gfx950")

    def test_a_version_is_refused_where_none_is_needed(self):
        prepared = self.dir / "logical"
        self.run_ok("shardprep", *prepare_arguments(self.source, prepared, RANKS, "--profile",
                                                    "logical"))
        stated = f"profile=logical,width={WIDTH}"
        open_artifact(prepared, RANK, stated)
        error = self.refuse(prepared, "states no version", expect=stated + ",aiter=9.9")
        self.assertEqual(error.field, "aiter")

    def test_profile_and_width_must_be_stated(self):
        for expect, field in [("width=128", "profile"), ({"profile": "aiter-separated"}, "width"),
                              ("", "profile")]:
            with self.subTest(expect):
                error = self.refuse(self.place / "separated", expect=expect)
                self.assertEqual(error.field, field)
                open_artifact(self.place / "separated", RANK, expect, allow_unstated=True)

    def test_expectations_that_mean_nothing_are_refused(self):
        for expect in ("witdh=128", "width", "width=0128", "width=-1", "profile=", "aiter=new",
                       "fingerprint=ABC", "width=128,width=128"):
            with self.subTest(expect):
                self.assertEqual(self.refuse(self.place / "separated", expect=expect).field,
                                 "expect")

    def test_versions_are_ordered_as_in_pep_440(self):
        ascending = ["0.1.6.dev1", "0.1.6a1", "0.1.6rc1", "0.1.6", "0.1.6.post2", "0.1.16", "0.2"]
        for older, newer in zip(ascending, ascending[1:]):
            self.assertLess(compare_versions(older, newer), 0, (older, newer))
            self.assertGreater(compare_versions(newer, older), 0, (older, newer))
        self.assertEqual(compare_versions("0.1.6", "0.1.6.0+rocm6.4"), 0)

    def test_a_rank_that_is_not_there_is_named(self):
        error = self.refuse(self.place / "separated", rank=0)
        self.assertEqual((error.field, error.expected, error.found), ("rank", 0, str(RANK)))
        self.refuse(self.place / "separated", "rank", "0 to 1", rank=2)
        self.refuse(self.place / "separated", "rank", "0 to 1", rank=-1)
        self.refuse(self.dir, "manifest.json")

    def test_it_works_where_torch_does_not_exist(self):
        program = ("import sys; sys.modules['torch'] = sys.modules['numpy'] = None\n"
                   f"sys.path.insert(0, {str(CONSUMERS)!r})\n"
                   "from shardprep_artifact import open_artifact\n"
                   f"artifact = open_artifact({str(self.place / 'separated')!r}, {RANK}, "
                   f"{EXPECT['separated']!r})\n"
                   "artifact.check_digests(threads=2)\n"
                   "print(sum(artifact.read(name).nbytes for name in artifact.tensors))\n")
        done = subprocess.run([sys.executable, "-B", "-c", program], capture_output=True, text=True,
                              timeout=60)
        self.assertEqual(done.returncode, 0, done.stderr)
        tensors = read_all_tensors(self.place / "separated").values()
        want = sum(len(tensor.data) for tensor in tensors)
        self.assertEqual(int(done.stdout), want)


class DamageTest(Artifacts):
    """Every damage is found, and named, by opening or, in the data, by digesting."""

    def edit(self, path, change):
        data = bytearray(path.read_bytes())
        changed = change(data)
        path.write_bytes(data if changed is None else changed)

    def seal(self, path, change):
        """Edits the manifest as somebody would who knows how to seal it again."""
        text = path.read_text()
        changed = change(text)
        self.assertNotEqual(changed, text)
        digest = re.compile(r'(?<="document_sha256": ")[0-9a-f]+')
        empty = digest.sub("", changed)
        path.write_text(empty.replace('"document_sha256": "', '"document_sha256": "' +
                                      hashlib.sha256(empty.encode()).hexdigest()))

    def test_a_tampered_manifest(self):
        for change in (lambda text: text.replace(b'"padded_intermediate": "128"',
                                                 b'"padded_intermediate": "256"'),
                       lambda text: text.replace(b'"SEPARATED"', b'"INTERLEAVE"', 1),
                       lambda text: text.replace(b'"is_shuffled": true', b'"is_shuffled": false'),
                       lambda text: text + b" "):
            copy = self.copy()
            self.edit(copy / "manifest.json", change)
            self.refuse(copy, "manifest.json", "document_sha256")
            shutil.rmtree(copy)

    def test_a_manifest_that_was_sealed_again(self):
        cases = [
            (lambda text: text.replace('"profile": "aiter-separated"',
                                       '"profile": "aiter-interleaved"'),
             [PART, "shardprep.profile", "aiter-interleaved", "aiter-separated"]),
            (lambda text: text.replace('"format_version": "1"', '"format_version": "2"'),
             ["format_version", "'2'"]),
            (lambda text: text.replace('"stage": "prepared"', '"stage": "raw"'), ["stage"]),
            (lambda text: text.replace('"layout_fingerprint": "', '"layout_fingerprint": "0'),
             ["layout_fingerprint"]),
            (lambda text: text.replace('"rank_count": 2', '"rank_count": "x"'), ["rank_count"]),
            (lambda text: text.replace('"extents"', '"extent"'), ["extents"]),
            (lambda text: text.replace('"key": "config.json"', '"key": "../config.json"'),
             ["../config.json"]),
        ]
        for change, texts in cases:
            with self.subTest(texts):
                copy = self.copy()
                self.seal(copy / "manifest.json", change)
                self.refuse(copy, *texts, expect={"width": WIDTH, "profile": "aiter-interleaved"}
                            if "aiter-interleaved" in texts else EXPECT["separated"])
                shutil.rmtree(copy)

    def with_fields(self, copy, **fields):
        """Adds fields to the manifest and seals it again."""
        manifest = read_json(copy / "manifest.json")
        manifest.pop("document_sha256")
        text = json.dumps({**manifest, **fields, "document_sha256": "0"}, indent=1) + "\n"
        (copy / "manifest.json").write_text(text)
        self.seal(copy / "manifest.json", lambda text: text.replace('_sha256": "0"',
                                                                    '_sha256": "1"'))

    def test_an_expert_map_is_of_its_rank_and_artefact(self):
        copy = self.copy()
        self.assertIsNone(open_artifact(copy, RANK, EXPECT["separated"]).expert_map)
        name = f"expert-map-rank-{RANK}.json"
        good = {"format_version": "1", "rank": RANK, "logical_experts": [2, 0, 1],
                "layout_fingerprint": self.open().fingerprint}
        cases = [(good, None), ({**good, "rank": 0}, "rank"),
                 ({**good, "layout_fingerprint": "0" * 64}, "layout_fingerprint")]
        for document, field in cases:
            with self.subTest(field):
                text = json.dumps(document).encode()
                (copy / name).write_bytes(text)
                reference = {"key": name, "size_bytes": str(len(text)),
                             "sha256": hashlib.sha256(text).hexdigest()}
                self.with_fields(copy, expert_maps=[reference])
                if field:
                    self.assertEqual(self.refuse(copy, name).field, field)
                else:
                    artifact = open_artifact(copy, RANK, EXPECT["separated"])
                    self.assertEqual(artifact.expert_map, good)
        (copy / name).unlink()
        self.refuse(copy, name)
        self.with_fields(copy, expert_maps=[{**reference, "key": "expert-map-rank-0.json"}])
        self.refuse(copy, "expert_maps", name)

    def test_ranks_that_differ_have_pads_of_their_own(self):
        copy = self.copy()
        self.with_fields(copy, rank_shapes=[{"ranks": [0], "intermediate": "96"},
                                            {"ranks": [1], "intermediate": "64"}])
        artifact = open_artifact(copy, RANK, EXPECT["separated"])
        self.assertEqual((artifact.intermediate, artifact.intermediate_pad), (64, 64))

    def test_documents_that_are_no_json(self):
        for text in (b"", b"[]", b"{", b'{"a": NaN}', b'{"a": 1, "a": 2}', b"\xff{}",
                     b"[" * 100000):
            with self.subTest(text[:20]):
                copy = self.copy()
                (copy / "manifest.json").write_bytes(text)
                self.refuse(copy, "manifest.json", "content")
                shutil.rmtree(copy)

    def test_a_changed_small_file(self):
        for name in (f"rank-{RANK}.json", "replicated.json", "config.json"):
            with self.subTest(name):
                copy = self.copy()
                self.edit(copy / name, lambda data: data.replace(b"1", b"2", 1))
                self.refuse(copy, name, "SHA-256")
                (copy / name).unlink()
                self.refuse(copy, name if "rank-" not in name else "rank")
                shutil.rmtree(copy)

    def test_a_flipped_bit(self):
        copy = self.copy()

        def flip(data):
            data[len(data) // 2] ^= 0x10

        self.edit(copy / PART, flip)
        open_artifact(copy, RANK, EXPECT["separated"])
        self.refuse(copy, PART, "chunk 0", digests=True)

    def test_swapped_granules(self):
        copy = self.copy()

        def swap(data):
            first, second = data[DATA_START:DATA_START + 16], data[DATA_START + 16:DATA_START + 32]
            self.assertNotEqual(first, second)
            data[DATA_START:DATA_START + 32] = second + first

        self.edit(copy / PART, swap)
        self.refuse(copy, PART, "chunk 0", digests=True)

    def test_a_truncated_or_grown_file(self):
        for change in (lambda data: data[:-1], lambda data: data[:100], lambda data: data[:0],
                       lambda data: data + b"\0"):
            copy = self.copy()
            self.edit(copy / PART, change)
            self.refuse(copy, PART, "size")
            shutil.rmtree(copy)
        copy = self.copy()
        (copy / PART).unlink()
        self.refuse(copy, PART)

    def test_a_file_that_shrinks_after_it_was_opened(self):
        copy = self.copy()
        artifact = open_artifact(copy, RANK, EXPECT["separated"])
        self.edit(copy / PART, lambda data: data[:8192])
        with self.assertRaisesRegex(ArtifactError, PART):
            artifact.read("model.layers.0.ffn.experts.w2_weight_scale")

    def test_a_file_of_another_rank(self):
        copy = self.copy()
        shutil.copy(self.place / "prepared-separated" / "model-rank-0-part-0.safetensors",
                    copy / PART)
        error = self.refuse(copy, PART, "shardprep.rank")
        self.assertEqual((error.expected, error.found), ("1", "0"))

    def test_a_file_of_another_artefact(self):
        copy = self.copy()
        shutil.copy(self.place / "interleaved" / PART, copy / PART)
        self.refuse(copy, PART)

    def test_a_header_that_lies(self):
        name = PREFIX.replace("1", "0") + "w13_weight"
        self.assertIn(name.encode(), (self.place / "separated" / PART).read_bytes())
        cases = [
            (b'"dtype":"U8"', b'"dtype":"I8"', "header of " + name),
            (b'"shape":[3,256,64]', b'"shape":[3,64,256]', "header of " + name),
            (name.encode(), name.replace("w13_weight", "w31_weight").encode(), "header of " + name),
            (b'{"__metadata__"', b' "__metadata__"', "header"),
            (b'"shardprep.fingerprint":"', b'"shardprep.fingerprint":"0', "shardprep.fingerprint"),
        ]
        for old, new, want in cases:
            with self.subTest(new):
                copy = self.copy()

                def change(data):
                    size = int.from_bytes(data[:8], "little")
                    header = bytes(data[8:8 + size]).replace(old, new, 1)
                    data[8:8 + size] = header[:size]

                self.edit(copy / PART, change)
                self.refuse(copy, PART, want)
                shutil.rmtree(copy)
        copy = self.copy()
        self.edit(copy / PART, lambda data: b"\xff" * 8 + data[8:])
        self.refuse(copy, PART, "header length")


@unittest.skipUnless(torch or NEED_TORCH, "torch is not installed")
class TorchTest(Artifacts):
    """Tensors as an engine gets them."""

    def source_slices(self, kind):
        """[expert, rows, columns] of this rank's part of w1, w3 or w2, in bytes."""
        tensors = read_all_tensors(self.source)
        slices = []
        for expert in range(EXPERTS):
            found = tensors[f"layers.1.ffn.experts.{expert}.{kind}"]
            matrix = torch.frombuffer(bytearray(found.data), dtype=torch.uint8).view(
                found.shape[0], -1)
            axis = 1 if kind.startswith("w2") else 0
            extent = matrix.shape[axis] // RANKS
            slices.append(matrix.narrow(axis, RANK * extent, extent))
        return torch.stack(slices)

    def padded(self, suffix):
        """w13 and w2 of this rank as an engine allocates them: gate, pad, up, pad; zeros behind."""
        gate, up, down = (self.source_slices(f"{name}.{suffix}") for name in ("w1", "w3", "w2"))
        w13 = torch.zeros(EXPERTS, 2 * WIDTH, gate.shape[2], dtype=torch.uint8)
        w13[:, :NATIVE_WIDTH], w13[:, WIDTH:WIDTH + NATIVE_WIDTH] = gate, up
        w2 = torch.zeros(EXPERTS, HIDDEN, down.shape[2] * WIDTH // NATIVE_WIDTH, dtype=torch.uint8)
        w2[:, :, :down.shape[2]] = down
        return w13, w2

    @staticmethod
    def unshuffled_weight(tensor):
        """The inverse of AITER's shuffle_weight(w, (16, 16))."""
        experts, rows, columns = tensor.shape
        tiles = tensor.view(experts, rows // 16, columns // 32, 2, 16, 16)
        return tiles.permute(0, 1, 4, 2, 3, 5).reshape(tensor.shape)

    @staticmethod
    def unshuffled_gate_up(tensor):
        """The inverse of AITER's shuffle_weight_a16w4(w, 16, True)."""
        experts, rows, columns = tensor.shape
        tiles = tensor.view(experts, rows // 32, 2, columns // 64, 4, 16, 16)
        return tiles.permute(0, 2, 1, 5, 3, 4, 6).reshape(tensor.shape)

    @staticmethod
    def unshuffled_scale(tensor):
        """The inverse of AITER's e8m0_shuffle(s)."""
        rows, columns = tensor.shape
        tiles = tensor.view(rows // 32, columns // 8, 4, 16, 2, 2)
        return tiles.permute(0, 5, 3, 1, 4, 2).reshape(rows, columns)

    def assert_equal(self, found, want, what):
        self.assertEqual(tuple(found.shape), tuple(want.shape), what)
        self.assertTrue(torch.equal(found, want), what)

    def test_unshuffled_weights_are_the_slice_of_the_source(self):
        w13, w2 = self.padded("weight")
        artifact = self.open()
        for role, want in (("w13_weight", w13), ("w2_weight", w2)):
            tensor = artifact.torch_tensor(PREFIX + role)
            self.assert_equal(self.unshuffled_weight(tensor), want, role)
            self.assertFalse(torch.equal(tensor, want), role)
        tensor = self.open("interleaved").torch_tensor(PREFIX + "w13_weight")
        self.assert_equal(self.unshuffled_gate_up(tensor), w13, "interleaved w13_weight")

    def test_unshuffled_scales_are_the_slice_of_the_source(self):
        w13, w2 = self.padded("scale")
        artifact = self.open()
        for role, want in (("w13_weight_scale", w13), ("w2_weight_scale", w2)):
            matrix = self.unshuffled_scale(artifact.torch_tensor(PREFIX + role))
            want = want.reshape(-1, want.shape[2])
            self.assert_equal(matrix[:want.shape[0], :want.shape[1]], want, role)
            self.assertEqual(int(matrix[want.shape[0]:].sum() + matrix[:, want.shape[1]:].sum()), 0)

    def test_every_tensor_has_the_dtype_and_bytes_of_its_file(self):
        artifact, files = self.open(), read_all_tensors(self.place / "separated")
        dtypes = {"U8": "uint8", "I8": "int8", "BF16": "bfloat16", "F32": "float32",
                  "F8_E8M0": "uint8", "F8_E4M3": "float8_e4m3fn", "I64": "int64", "I32": "int32"}
        seen = set()
        for name, file in files.items():
            dtype = getattr(torch, dtypes[file.dtype], None)
            if dtype is None:
                with self.assertRaisesRegex(ArtifactError, name):
                    artifact.torch_tensor(name)
                continue
            tensor = artifact.torch_tensor(name)
            self.assertEqual((tensor.dtype, list(tensor.shape)), (dtype, file.shape), name)
            self.assertEqual(bytes(tensor.reshape(-1).view(torch.uint8).tolist()), file.data, name)
            seen.add(file.dtype)
        self.assertGreaterEqual(seen, {"U8", "BF16", "F32"})

    def test_shuffled_tensors_say_so(self):
        artifact = self.open()
        names = [name for name, tensor in artifact.torch_tensors(artifact.experts())
                 if getattr(tensor, "is_shuffled", False)]
        self.assertEqual(names, [tensor.name for tensor in artifact.experts()])
        gate = artifact.torch_tensor("layers.1.ffn.gate.weight")
        self.assertFalse(hasattr(gate, "is_shuffled"))

    def test_bytes_go_into_the_tensor_that_the_caller_gives(self):
        artifact, name = self.open(), PREFIX + "w2_weight"
        block = torch.full((artifact.info(name).size_bytes,), 0xa5, dtype=torch.uint8)
        tensor = artifact.torch_tensor(name, out=block)
        self.assertEqual(tensor.data_ptr(), block.data_ptr())
        self.assert_equal(tensor, artifact.torch_tensor(name), name)
        for wrong in (torch.empty(3, dtype=torch.uint8),
                      torch.empty(block.numel(), 2, dtype=torch.uint8)[:, 0]):
            with self.assertRaisesRegex(ArtifactError, "w2_weight"):
                artifact.torch_tensor(name, out=wrong)


class ExamplesTest(unittest.TestCase):
    def test_the_module_and_the_examples_are_python_3_9(self):
        for path in sorted(CONSUMERS.glob("*.py")):
            ast.parse(path.read_text(), str(path), feature_version=(3, 9))

    def test_the_module_needs_the_standard_library_only(self):
        tree = ast.parse((CONSUMERS / "shardprep_artifact.py").read_text())
        imported = {name.split(".")[0] for node in tree.body
                    for name in ([alias.name for alias in node.names]
                                 if isinstance(node, ast.Import) else
                                 [node.module] if isinstance(node, ast.ImportFrom) else [])}
        self.assertGreater(len(imported), 3)
        self.assertLessEqual(imported, set(sys.stdlib_module_names))

    def test_examples_say_that_they_were_not_run(self):
        for name in ("vllm_loader.py", "sglang_loader.py"):
            doc = ast.get_docstring(ast.parse((CONSUMERS / name).read_text()))
            self.assertIn("NOT RUN HERE", doc.splitlines()[0], name)


if __name__ == "__main__":
    unittest.main(verbosity=2)
