"""`shardprep prepare`: the bytes it writes, and that nothing but the job decides them."""

import json
import pathlib
import sys
import tempfile
import unittest

sys.dont_write_bytecode = True
import layouts
from layouts import PROFILES, ROLES, round_up
from support import (TestCase, file_hashes, make_checkpoint, prepare_arguments, read_all_tensors,
                     read_json, read_safetensors)

HIDDEN, INTERMEDIATE, EXPERTS, LAYERS = 224, 256, 3, 2
LAYERS_WITH_MTP = LAYERS + 1
ALIGNMENT = 128  # AITER_MXFP4_BF16 with SILU
SCALE_BLOCK = 32


class Geometry:
    """Byte extents of one rank's matrices, from the rules alone."""

    def __init__(self, ranks):
        self.ranks = ranks
        self.native = INTERMEDIATE // ranks
        self.padded = round_up(self.native, ALIGNMENT)
        self.padded_hidden = round_up(HIDDEN, ALIGNMENT)

    def columns(self, elements, role):
        return elements // SCALE_BLOCK if role.endswith("_scale") else elements // 2


def source_name(layer, expert, projection, kind):
    block = f"layers.{layer}" if layer < LAYERS else f"mtp.{layer - LAYERS}"
    return f"{block}.ffn.experts.{expert}.{projection}.{kind}"


def prepared_name(layer, role):
    return f"model.layers.{layer}.ffn.experts.{role}"


def expected_expert(source, geometry, layer, expert, role, rank):
    """One expert's padded matrix before the shuffle, cut from the checkpoint's tensors."""
    kind = "scale" if role.endswith("_scale") else "weight"
    native, padded = geometry.native, geometry.padded
    if role.startswith("w13"):
        columns = geometry.columns(HIDDEN, role)
        return b"".join(layouts.pad_matrix(
            layouts.matrix_part(source[source_name(layer, expert, projection, kind)].data, columns,
                                range(rank * native, (rank + 1) * native), range(columns)),
            native, columns, padded, geometry.columns(geometry.padded_hidden, role))
            for projection in ("w1", "w3"))
    width = geometry.columns(native, role)
    part = layouts.matrix_part(source[source_name(layer, expert, "w2", kind)].data,
                               geometry.columns(INTERMEDIATE, role), range(HIDDEN),
                               range(rank * width, (rank + 1) * width))
    return layouts.pad_matrix(part, HIDDEN, width, geometry.padded_hidden,
                              geometry.columns(padded, role))


def padded_extents(geometry, role):
    """Rows and byte columns of one expert's padded matrix."""
    if role.startswith("w13"):
        return 2 * geometry.padded, geometry.columns(geometry.padded_hidden, role)
    return geometry.padded_hidden, geometry.columns(geometry.padded, role)


class PreparedBytesTest(TestCase):
    def prepared(self, ranks, *more):
        source = make_checkpoint(self.dir / "source", hidden=HIDDEN, intermediate=INTERMEDIATE,
                                 experts=EXPERTS, layers=LAYERS)
        destination = pathlib.Path(tempfile.mkdtemp(dir=self.dir, prefix="prepared-"))
        self.run_ok("shardprep", *prepare_arguments(source, destination, ranks, *more))
        return source, destination

    def test_every_shard_is_the_layout_of_its_padded_slice(self):
        for profile in PROFILES:
            with self.subTest(profile):
                source, destination = self.prepared(
                    4, "--include-mtp", "--profile", profile, "--backend", "AITER_MXFP4_BF16",
                    "--architecture", "gfx1250" if profile == "aiter-gfx1250" else "gfx950")
                self.check_shards(read_all_tensors(source), destination, profile, Geometry(4))
                self.run_ok("shardprep", "verify", destination, "--source", source)

    def check_shards(self, source, destination, profile, geometry):
        for rank in range(geometry.ranks):
            shards = read_all_tensors(destination, f"model-rank-{rank}-part-*.safetensors")
            self.assertEqual(len(shards), LAYERS_WITH_MTP * len(ROLES))
            for layer in range(LAYERS_WITH_MTP):
                for role, layout in zip(ROLES, PROFILES[profile]):
                    rows, columns = padded_extents(geometry, role)
                    matrices = [expected_expert(source, geometry, layer, expert, role, rank)
                                for expert in range(EXPERTS)]
                    if profile == "aiter-gfx1250" and role.startswith("w13"):
                        matrices = [layouts.alternate_halves(matrix, rows, columns)
                                    for matrix in matrices]
                    want = layouts.shuffle(layout, b"".join(matrices), EXPERTS, rows, columns)
                    name = prepared_name(layer, role)
                    self.assertTrue(shards[name].data == want, f"rank {rank}: {name} differs")

    def test_slices_of_all_ranks_joined_are_the_source(self):
        for ranks in (1, 2, 4, 8):
            with self.subTest(ranks=ranks):
                source_dir, destination = self.prepared(ranks, "--include-mtp")
                self.check_rejoined(read_all_tensors(source_dir), destination, ranks)

    def check_rejoined(self, source, destination, ranks):
        geometry = Geometry(ranks)
        shards = [read_all_tensors(destination, f"model-rank-{rank}-part-*.safetensors")
                  for rank in range(ranks)]
        for layer in range(LAYERS_WITH_MTP):
            for role, layout in zip(ROLES, PROFILES["aiter-separated"]):
                matrices = [layouts.unshuffle(layout, shard[prepared_name(layer, role)].data,
                                              EXPERTS, *padded_extents(geometry, role))
                            for shard in shards]
                for expert in range(EXPERTS):
                    self.check_expert(source, geometry, layer, expert, role, matrices)

    def check_expert(self, source, geometry, layer, expert, role, matrices):
        kind = "scale" if role.endswith("_scale") else "weight"
        rows, columns = padded_extents(geometry, role)
        own = [matrix[expert * rows * columns:(expert + 1) * rows * columns] for matrix in matrices]
        native = geometry.native
        if role.startswith("w13"):
            width = geometry.columns(HIDDEN, role)
            for projection, first in (("w1", 0), ("w3", geometry.padded)):
                joined = b"".join(layouts.matrix_part(matrix, columns, range(first, first + native),
                                                      range(width)) for matrix in own)
                name = source_name(layer, expert, projection, kind)
                self.assertTrue(joined == source[name].data, f"{name} is not joined again")
        else:
            width = geometry.columns(native, role)
            joined = b"".join(layouts.matrix_part(matrix, columns, range(row, row + 1),
                                                  range(width))
                              for row in range(HIDDEN) for matrix in own)
            name = source_name(layer, expert, "w2", kind)
            self.assertTrue(joined == source[name].data, f"{name} is not joined again")

    def test_other_tensors_are_stored_once_and_unchanged(self):
        source_dir, destination = self.prepared(2)
        source = read_all_tensors(source_dir)
        stored = read_all_tensors(destination, "model-replicated-part-*.safetensors")
        want = {name: tensor for name, tensor in source.items()
                if ".ffn.experts." not in name and not name.startswith("mtp.")}
        self.assertEqual(sorted(stored), sorted(want))
        for name, tensor in want.items():
            self.assertEqual(stored[name], tensor, name)
        for name in ("config.json", "tokenizer.json"):
            self.assertEqual((destination / name).read_bytes(), (source_dir / name).read_bytes())
        left = {entry["name"] for entry in read_json(destination / "manifest.json")["not_carried"]}
        self.assertEqual(left, {name for name in source if name.startswith("mtp.")})

    def test_data_files_say_what_they_are(self):
        _, destination = self.prepared(2)
        manifest = read_json(destination / "manifest.json")
        for rank in range(2):
            path = destination / f"model-rank-{rank}-part-0.safetensors"
            data = path.read_bytes()
            header_end = 8 + int.from_bytes(data[:8], "little")
            self.assertEqual(header_end % 4096, 0)
            self.assertTrue(data[8:].startswith(b'{"__metadata__":'))
            _, metadata = read_safetensors(path)
            self.assertEqual(metadata["shardprep.fingerprint"], manifest["layout_fingerprint"])
            self.assertEqual(metadata["shardprep.rank"], str(rank))
            self.assertEqual(metadata["shardprep.profile"], "aiter-separated")


    def test_manifests_say_what_a_consumer_must_know(self):
        _, destination = self.prepared(4)
        manifest, geometry = read_json(destination / "manifest.json"), Geometry(4)
        self.assertTrue(manifest["is_shuffled"])
        self.assertEqual(manifest["gate_mode"], "SEPARATED")
        self.assertEqual(manifest["fp4_nibble_order"], "low-nibble-first")
        self.assertIn("E8M0", manifest["scale_format"].upper())
        self.assertEqual(manifest["alignment"]["rule_id"], "aiter-mxfp4-bf16/silu/128")
        self.assertEqual(int(manifest["hidden_pad"]), geometry.padded_hidden - HIDDEN)
        self.assertEqual(int(manifest["intermediate_pad"]), geometry.padded - geometry.native)
        for rank in range(4):
            records = {record["name"]: record
                       for file in read_json(destination / f"rank-{rank}.json")["files"]
                       for record in file["tensors"]}
            for role in ROLES:
                record = records[prepared_name(0, role)]
                rows, columns = padded_extents(geometry, role)
                self.assertEqual(int(record["padded_rows"]), rows)
                self.assertEqual(int(record["padded_row_bytes"]), columns)
                native = (2 * geometry.native, HIDDEN) if role.startswith("w13") else (
                    HIDDEN, geometry.native)
                self.assertEqual(tuple(map(int, record["native_extent"])), native)
                self.assertEqual(int(record["native_rows"]), native[0])
                self.assertEqual(int(record["native_row_bytes"]),
                                 geometry.columns(native[1], role))
                self.assertEqual(record["block_size"], SCALE_BLOCK)
                self.assertEqual(record["layout"],
                                 "aiter-e8m0" if role.endswith("_scale") else "aiter-16x16")


class SameJobSameBytesTest(TestCase):
    def setUp(self):
        super().setUp()
        self.source = make_checkpoint(self.dir / "source", hidden=512, intermediate=1024, layers=3)

    def prepare(self, name, *more, **options):
        destination = self.dir / name
        result = self.run_ok("shardprep",
                             *prepare_arguments(self.source, destination, 4, *more), **options)
        return destination, result

    def test_a_finished_job_verifies_and_is_not_done_again(self):
        destination, _ = self.prepare("prepared")
        self.assertFalse((destination / "_shardprep").exists())
        self.run_ok("shardprep", "verify", destination, "--source", self.source)
        before = {path: path.stat().st_mtime_ns for path in destination.iterdir()}
        _, again = self.prepare("prepared")
        self.assertEqual({path: path.stat().st_mtime_ns for path in destination.iterdir()}, before)
        self.assertIn("already", again.stdout + again.stderr)

    def test_it_says_where_workers_shuffle_and_why(self):
        _, asked = self.prepare("asked", "--device", "cpu")
        self.assertRegex(asked.stderr, r"worker: device=cpu/\w+ reason=\"'cpu' was asked for\"\n")
        _, chosen = self.prepare("chosen", "--device", "auto")
        self.assertRegex(chosen.stderr, r"worker: device=\w+\S* reason=\"(no GPU is used, |the faster)")

    def test_workers_budget_and_memory_content_do_not_change_a_byte(self):
        reference, _ = self.prepare("reference")
        want = file_hashes(reference)
        self.assertIn("manifest.json", want)
        plan = self.run_ok("shardprep", "plan", "--source", self.source, "--destination",
                           self.dir / "never", "--tensor-parallel-size", 4, "--format", "json")
        smallest = int(json.loads(plan.stdout)["minimum_memory_budget_bytes"])
        variants = [
            ("three-workers", ["--workers", 3], {}),
            ("small-budget", ["--memory-budget", f"{smallest}"], {}),
            ("poisoned-aa", [], {"MALLOC_PERTURB_": "170"}),
            ("poisoned-55", ["--workers", 2], {"MALLOC_PERTURB_": "85"}),
            ("on-the-cpu", ["--device", "cpu"], {}),
        ]
        for name, flags, environment in variants:
            with self.subTest(name):
                destination, _ = self.prepare(name, *flags, environment=environment)
                self.assertEqual(file_hashes(destination), want)

    def test_part_size_moves_tensors_between_files_and_changes_none(self):
        large, _ = self.prepare("large")
        small, _ = self.prepare("small", "--part-size", "64KiB")
        pattern = "model-*-part-*.safetensors"
        self.assertGreater(len(list(small.glob(pattern))), len(list(large.glob(pattern))))
        for rank in (*range(4), None):
            files = f"model-rank-{rank}-part-*" if rank is not None else "model-replicated-part-*"
            self.assertEqual(read_all_tensors(small, files), read_all_tensors(large, files))


if __name__ == "__main__":
    unittest.main(verbosity=2)
