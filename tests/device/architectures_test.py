"""What CMake's SHARDPREP_HIP_ARCHITECTURES accepts, asked of kernels/hip/architectures.cmake alone.

    architectures_test.py CMAKE COMPILER ROCM_ROOT
"""

import pathlib
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
SCRIPT = """
include({root}/kernels/hip/architectures.cmake)
sp_choose_hip_architectures("{compiler}" "{rocm_root}" "{wanted}" chosen problem)
if(problem)
  message(FATAL_ERROR "${{problem}}")
endif()
message("chosen=${{chosen}}")
"""
# A compiler that also knows gfx950, in as far as a probe can tell.
NEWER_COMPILER = """#!/bin/sh
for argument; do
  case $argument in
    --offload-arch=gfx90a|--offload-arch=gfx942|--offload-arch=gfx950) exit 0 ;;
    --offload-arch=*) echo "unknown target ${argument#*=}" >&2; exit 1 ;;
  esac
done
"""


class ArchitecturesTest(unittest.TestCase):
    cmake = compiler = rocm_root = None

    def choose(self, wanted, compiler=None):
        with tempfile.TemporaryDirectory() as folder:
            script = pathlib.Path(folder) / "choose.cmake"
            script.write_text(SCRIPT.format(root=ROOT, compiler=compiler or self.compiler,
                                            rocm_root=self.rocm_root, wanted=wanted))
            return subprocess.run([self.cmake, "-P", script], cwd=folder, check=False,
                                  capture_output=True, text=True)

    def assert_chosen(self, result, want):
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertIn(f"chosen={want}\n", result.stderr)

    def test_stated_architectures_are_taken_as_they_are(self):
        self.assert_chosen(self.choose("gfx942"), "gfx942")
        self.assert_chosen(self.choose("gfx942;gfx90a"), "gfx942;gfx90a")

    def test_one_that_the_compiler_does_not_know_is_an_error_that_names_it(self):
        result = self.choose("gfx942;gfx9999")
        self.assertNotEqual(result.returncode, 0)
        message = " ".join(result.stderr.split())
        self.assertIn("cannot compile for 'gfx9999'", message)
        self.assertIn(str(self.compiler), message)

    def test_default_has_gfx950_exactly_where_the_compiler_knows_it(self):
        knows = self.choose("gfx950").returncode == 0
        self.assert_chosen(self.choose(""), "gfx90a;gfx942;gfx950" if knows else "gfx90a;gfx942")
        with tempfile.TemporaryDirectory() as folder:
            newer = pathlib.Path(folder) / "clang++"
            newer.write_text(NEWER_COMPILER)
            newer.chmod(0o755)
            self.assert_chosen(self.choose("", newer), "gfx90a;gfx942;gfx950")
            self.assertIn("unknown target gfx1", self.choose("gfx1", newer).stderr)


if __name__ == "__main__":
    ArchitecturesTest.cmake, ArchitecturesTest.compiler, ArchitecturesTest.rocm_root = sys.argv[1:]
    sys.dont_write_bytecode = True
    unittest.main(argv=sys.argv[:1], verbosity=2)
