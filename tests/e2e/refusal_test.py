"""What cannot be prepared is refused with a reason, before anything is written."""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import unittest

sys.dont_write_bytecode = True
from support import TestCase, edit_json, file_hashes, make_checkpoint, prepare_arguments, read_json

INDEX = "model.safetensors.index.json"
EXPERT_TENSOR = "layers.1.ffn.experts.2.w1.weight"


def rewrite_header(path, change):
    """Changes a data file's header through a function on its value; the data stays."""
    data = pathlib.Path(path).read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8:8 + size])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size:])


def rename_expert_tensor(header):
    header["renamed"] = header.pop(EXPERT_TENSOR)


class RefusalTest(TestCase):
    def setUp(self):
        super().setUp()
        self.source = make_checkpoint(self.dir / "source")  # hidden 256, intermediate 256
        self.destination = self.dir / "prepared"

    def refuse(self, want, *more, ranks=4, destination=None, source=None, code=1):
        """`prepare` and `plan` refuse alike, and nothing appears at the destination."""
        destination = destination or self.destination
        before = file_hashes(destination) if destination.is_dir() else destination.exists()
        arguments = prepare_arguments(source or self.source, destination, ranks, *more)
        self.run_refused("shardprep", *arguments, want=want, code=code)
        after = file_hashes(destination) if destination.is_dir() else destination.exists()
        self.assertEqual(after, before)
        return arguments

    def refuse_plan_too(self, want, *more, **options):
        arguments = self.refuse(want, *more, **options)
        self.run_refused("shardprep", "plan", *arguments[1:], want=want,
                         code=options.get("code", 1))

    def file_of(self, tensor):
        return self.source / read_json(self.source / INDEX)["weight_map"][tensor]

    def test_intermediate_size_that_does_not_divide(self):
        self.refuse_plan_too(["INVALID_ARGUMENT", "256", "3", "1, 2, 4, 8"], ranks=3)

    def test_native_width_that_cuts_a_block_scale(self):
        # 256 / 16 = 16 divides, but a block scale covers 32 elements.
        self.refuse_plan_too(["INVALID_ARGUMENT", "256", "16", "32", "1, 2, 4, 8"], ranks=16)

    def test_missing_expert_tensor(self):
        path = self.file_of(EXPERT_TENSOR)
        edit_json(self.source / INDEX, lambda index: index["weight_map"].pop(EXPERT_TENSOR))
        rewrite_header(path, rename_expert_tensor)
        self.refuse_plan_too(["FAILED_PRECONDITION", EXPERT_TENSOR])

    def test_stale_index_entry_of_an_expert_tensor(self):
        path = self.file_of(EXPERT_TENSOR)
        rewrite_header(path, rename_expert_tensor)
        self.refuse_plan_too([EXPERT_TENSOR, path.name])

    def test_gap_in_the_experts(self):
        gone = "layers.1.ffn.experts.1."

        def drop(index):
            index["weight_map"] = {name: file for name, file in index["weight_map"].items()
                                   if not name.startswith(gone)}
        edit_json(self.source / INDEX, drop)
        self.refuse_plan_too(gone.rstrip("."))

    def test_unknown_family(self):
        def rename(config):
            config["model_type"] = "llama"
            config["architectures"] = ["LlamaForCausalLM"]
        edit_json(self.source / "config.json", rename)
        self.refuse_plan_too(["FAILED_PRECONDITION", "llama"])

    def test_index_that_names_a_missing_file(self):
        gone = self.file_of(EXPERT_TENSOR)
        gone.unlink()
        self.refuse_plan_too(["FAILED_PRECONDITION", gone.name])

    def test_index_that_leaves_the_directory(self):
        outside = self.dir / "outside.safetensors"
        shutil.copy(self.file_of(EXPERT_TENSOR), outside)
        for name in ("../outside.safetensors", str(outside), "a/../../outside.safetensors",
                     "..\\outside.safetensors"):
            with self.subTest(name):
                edit_json(self.source / INDEX,
                          lambda index: index["weight_map"].__setitem__(EXPERT_TENSOR, name))
                self.refuse_plan_too(["INVALID_ARGUMENT", INDEX])

    def test_link_out_of_the_source(self):
        inside = self.file_of(EXPERT_TENSOR)
        outside = self.dir / "outside.safetensors"
        inside.rename(outside)
        inside.symlink_to(outside)
        self.refuse_plan_too([inside.name])

    def test_activation_against_the_config(self):
        self.refuse_plan_too(["INVALID_ARGUMENT", "SITU", "SILU"], "--activation", "SITU")

    def test_backend_and_profile_that_do_not_go_together(self):
        self.refuse_plan_too(["FAILED_PRECONDITION", "TRITON_UNFUSED", "logical"],
                             "--backend", "TRITON_UNFUSED", "--profile", "aiter-separated")

    def test_unknown_words(self):
        self.refuse_plan_too(["INVALID_ARGUMENT", "AITER_MXFP4_BF61"],
                             "--backend", "AITER_MXFP4_BF61")
        self.refuse_plan_too(["INVALID_ARGUMENT", "SILLY"], "--activation", "SILLY")
        self.refuse_plan_too("aiter-seperated", "--profile", "aiter-seperated", code=2)

    def test_destination_below_a_file(self):
        (self.dir / "file").write_text("in the way")
        self.refuse("file", destination=self.dir / "file" / "prepared")

    def test_destination_that_is_a_file(self):
        self.destination.write_text("in the way")
        self.refuse("prepared")
        self.assertEqual(self.destination.read_text(), "in the way")

    @unittest.skipIf(os.geteuid() == 0, "root may write everywhere")
    def test_destination_that_is_read_only(self):
        self.destination.mkdir(mode=0o555)
        self.refuse("prepared")

    def test_destination_that_is_the_source(self):
        self.refuse_plan_too(["INVALID_ARGUMENT", "source"], destination=self.source)
        self.refuse_plan_too(["INVALID_ARGUMENT", "source"],
                             destination=self.source / ".." / "source")

    def test_destination_inside_the_source_is_allowed(self):
        inside = self.source / "prepared-tp4"
        self.run_ok("shardprep", *prepare_arguments(self.source, inside, 4))
        self.run_ok("shardprep", "verify", inside, "--source", self.source)

    def test_prepared_output_is_no_source(self):
        self.run_ok("shardprep", *prepare_arguments(self.source, self.destination, 4))
        self.refuse_plan_too("FAILED_PRECONDITION", source=self.destination,
                             destination=self.dir / "again")

    def test_artefact_of_another_job(self):
        self.run_ok("shardprep", *prepare_arguments(self.source, self.destination, 4))
        self.refuse("FAILED_PRECONDITION", ranks=2)
        self.run_ok("shardprep", "verify", self.destination)

    def test_name_that_somebody_elses_file_has(self):
        self.destination.mkdir()
        (self.destination / "model-rank-1-part-0.safetensors").write_text("somebody else's")
        self.refuse(["FAILED_PRECONDITION", "model-rank-1-part-0.safetensors"])

    def test_directory_where_a_file_is_wanted(self):
        for flag in ("--expert-map", "--state-dict"):
            self.refuse_plan_too(["INVALID_ARGUMENT", "is a directory"], flag, self.dir)

    def test_too_little_memory_states_the_minimum(self):
        self.refuse_plan_too("INVALID_ARGUMENT", "--memory-budget", "1KiB")

    def test_device_that_is_unknown_or_not_there(self):
        self.refuse(["INVALID_ARGUMENT", "'gpu'", "want cpu, hip, hip:N"], "--device", "gpu")
        self.refuse(["FAILED_PRECONDITION", "hip:4095", "--device cpu"], "--device", "hip:4095")

    def test_unknown_and_repeated_flags_are_usage_errors(self):
        self.refuse_plan_too("--tensor-paralel-size", "--tensor-paralel-size", 4, code=2)
        self.refuse_plan_too("--profile", "--profile", "logical", "--profile", "logical", code=2)

    def test_no_space(self):
        if os.geteuid() != 0:
            self.skipTest("needs root for a small file system")
        self.destination.mkdir()
        mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs",
                                  str(self.destination)], capture_output=True, text=True)
        if mounted.returncode != 0:
            self.skipTest(f"no file system may be mounted here: {mounted.stderr.strip()}")
        self.addCleanup(subprocess.run, ["umount", str(self.destination)], check=True)
        self.refuse("RESOURCE_EXHAUSTED")


if __name__ == "__main__":
    unittest.main(verbosity=2)
