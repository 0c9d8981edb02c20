"""Compiles the kernels to assembly, per architecture, and reads what they do to memory: weights move
16 bytes a lane, every result is stored 16 bytes at a time, nothing is spilled.

    isa_test.py COMPILER ROCM_ROOT ARCHITECTURE...
"""

import pathlib
import re
import subprocess
import sys
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
SOURCE = ROOT / "kernels/hip/lane_launch.hip"
# Kernels by the number of their TileKind, as the compiler writes it into their names.
WEIGHTS, SCALES, SCALES_N32K4 = "ILNS_8TileKindE1E", "ILNS_8TileKindE2E", "ILNS_8TileKindE3E"
KERNELS = (WEIGHTS, SCALES, SCALES_N32K4)
LOAD_16 = re.compile(r"^\s+global_load_(?:dwordx4|b128)\s", re.MULTILINE)
STORE = re.compile(r"^\s+((?:global|flat|buffer)_store_\w+)\s", re.MULTILINE)
STORE_16 = ("global_store_dwordx4", "global_store_b128")
SCRATCH = re.compile(r"^\s+(?:scratch_\w+|buffer_(?:load|store)_\w+)\s", re.MULTILINE)
NOTHING = (".private_segment_fixed_size", ".sgpr_spill_count", ".vgpr_spill_count")


def assembly(compiler, rocm_root, architecture):
    return subprocess.run(
        [compiler, "-x", "hip", f"--rocm-path={rocm_root}", f"--offload-arch={architecture}",
         "--cuda-device-only", "-S", "-std=c++20", "-O3", f"-I{ROOT}",
         '-DSHARDPREP_GPU_ARCHITECTURE_LIST=""', SOURCE, "-o", "-"],
        check=True, capture_output=True, text=True).stdout


def body_of(text, kernel):
    """The instructions of one kernel, and its entry in the metadata."""
    start = re.search(rf"^(_Z\w*{kernel}\w*):", text, re.MULTILINE)
    if start is None:
        return "", ""
    code = text[start.end():text.index("s_endpgm", start.end())]
    entries = re.split(r"^  - ", text[text.rindex("amdhsa.kernels:"):], flags=re.MULTILINE)
    (metadata,) = [entry for entry in entries if f".name:           {start.group(1)}\n" in entry]
    return code, metadata


def problems_of(text):
    found = []
    for kernel in KERNELS:
        code, metadata = body_of(text, kernel)
        if not code:
            found.append(f"{kernel}: no such kernel")
            continue
        if kernel == WEIGHTS and not LOAD_16.search(code):
            found.append(f"{kernel}: no 16-byte load")
        stores = STORE.findall(code)
        if not stores or any(store not in STORE_16 for store in stores):
            found.append(f"{kernel}: stores {stores}, want 16 bytes each")
        if SCRATCH.search(code):
            found.append(f"{kernel}: uses scratch memory")
        for key in NOTHING:
            if not re.search(rf"{re.escape(key)}:\s+0$", metadata, re.MULTILINE):
                found.append(f"{kernel}: {key} is not 0")
    return found


class IsaTest(unittest.TestCase):
    compiler = rocm_root = None
    architectures = ()

    def test_lanes_move_16_bytes_and_spill_nothing(self):
        for architecture in self.architectures:
            with self.subTest(architecture):
                self.assertEqual(problems_of(
                    assembly(self.compiler, self.rocm_root, architecture)), [])

    def test_faults_are_found(self):
        text = assembly(self.compiler, self.rocm_root, "gfx942")
        cases = {
            "no 16-byte load": text.replace("global_load_dwordx4", "global_load_dwordx2"),
            "want 16 bytes each": text.replace("global_store_dwordx4", "global_store_dword"),
            "uses scratch memory": text.replace("global_load_ubyte", "scratch_load_dword"),
            ".vgpr_spill_count is not 0": text.replace(".vgpr_spill_count: 0",
                                                       ".vgpr_spill_count: 4"),
            ".private_segment_fixed_size is not 0": text.replace(
                ".private_segment_fixed_size: 0", ".private_segment_fixed_size: 16"),
            "no such kernel": text.replace("TileKindE3E", "TileKindE9E"),
        }
        for want, changed in cases.items():
            with self.subTest(want):
                self.assertNotEqual(changed, text)
                self.assertIn(want, "\n".join(problems_of(changed)))


if __name__ == "__main__":
    IsaTest.compiler, IsaTest.rocm_root, *IsaTest.architectures = sys.argv[1:]
    sys.dont_write_bytecode = True
    unittest.main(argv=sys.argv[:1], verbosity=2)
