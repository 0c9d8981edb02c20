"""Walks the #include lines and fails on an arrow between folders that is not allowed.

  proto    imports proto and google protos
  kernels  includes kernels, the standard library and Abseil; no files, no network, no protobuf
  workers  includes proto, kernels' host headers, workers
  service  includes proto, workers but nobody's main, kernels' host headers, service
  tests    includes everything

Headers of HIP and CUDA stand in kernels/hip only. Headers form no cycle. A source file is never
included.
"""

import pathlib
import re
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
SOURCE_SUFFIXES = (".h", ".cc", ".hip")
FOLDERS = ("kernels", "workers", "service", "tests")
ALLOWED_FOLDERS = {
    "kernels": {"kernels"},
    "workers": {"proto", "kernels", "workers"},
    "service": {"proto", "kernels", "workers", "service"},
    "tests": {"proto", "kernels", "workers", "service", "tests"},
}
# Included as if they lay in the tree; made by the build.
GENERATED = {"workers/default_alignment_policy.h"}
PROTO_PREFIXES = ("shardprep/v1/", "google/rpc/")

# What kernels may use besides the C++ standard library: intrinsics.
INTRINSICS = {"immintrin.h", "emmintrin.h", "cpuid.h", "arm_neon.h"}
# Standard headers that open files or reach the world outside.
OUTSIDE_WORLD = {"fstream", "filesystem", "iostream", "cstdio"}
# SP_CHECK says on standard error what is broken before it ends the process.
OUTSIDE_WORLD_EXCEPTIONS = {("kernels/status_macros.h", "cstdio")}

INCLUDE = re.compile(r'^\s*#\s*include\s+(?:"([^"]+)"|<([^>]+)>)', re.MULTILINE)
IMPORT = re.compile(r'^\s*import\s+(?:public\s+|weak\s+)?"([^"]+)"\s*;', re.MULTILINE)


def is_hip_header(name):
    return name.startswith(("hip/", "rocm", "hsa/", "cuda"))


class IncludeGraph:
    """The #include and import lines below a root, and what is wrong with them."""

    def __init__(self, root):
        self.root = pathlib.Path(root)
        self.problems = []
        self.headers = {}  # header -> headers of ours that it includes
        self.file_count = 0

    def check(self):
        for folder in FOLDERS:
            for path in sorted((self.root / folder).rglob("*")):
                if path.suffix in SOURCE_SUFFIXES:
                    self._check_source(path.relative_to(self.root).as_posix(), path.read_text())
        for path in sorted((self.root / "proto").rglob("*.proto")):
            self._check_proto(path.relative_to(self.root).as_posix(), path.read_text())
        self._check_cycles()
        return self.problems

    def _report(self, name, why):
        self.problems.append(f"{name}: {why}")

    def _check_source(self, name, text):
        self.file_count += 1
        ours = []
        for quoted, angled in INCLUDE.findall(text):
            if quoted:
                self._check_quoted(name, quoted, ours)
            else:
                self._check_angled(name, angled)
        if name.endswith(".h"):
            self.headers[name] = ours

    def _check_quoted(self, name, included, ours):
        folder = name.split("/")[0]
        target = included.split("/")[0]
        if is_hip_header(included):
            self._check_hip(name, included)
        elif included.startswith(PROTO_PREFIXES):
            self._check_arrow(name, folder, "proto", included)
        elif target in FOLDERS:
            self._check_arrow(name, folder, target, included)
            self._check_target(name, folder, included)
            ours.append(included)
        elif folder == "kernels" and target != "absl":
            self._report(name, f"includes {included}: kernels use the standard library and Abseil")
        elif "/" not in included:
            self._report(name, f"includes {included}: want the path from the repository's root")

    def _check_target(self, name, folder, included):
        if not included.endswith(".h"):
            self._report(name, f"includes {included}, which is not a header")
        elif included not in GENERATED and not (self.root / included).is_file():
            self._report(name, f"includes {included}, which does not exist")
        if included.startswith("kernels/hip/") and folder in ("workers", "service"):
            self._report(name, f"includes {included}: only kernels know the device")
        if re.search(r"_main\.\w+$", included):
            self._report(name, f"includes {included}: nobody includes a main")

    def _check_angled(self, name, included):
        folder = name.split("/")[0]
        if included.split("/")[0] in FOLDERS or included.startswith(PROTO_PREFIXES):
            self._report(name, f"includes <{included}>: want quotes")
        elif is_hip_header(included):
            self._check_hip(name, included)
        elif folder == "kernels":
            is_standard = "/" not in included and not included.endswith(".h")
            is_outside = included in OUTSIDE_WORLD
            if (name, included) in OUTSIDE_WORLD_EXCEPTIONS:
                return
            if is_outside or not (is_standard or included in INTRINSICS):
                self._report(name, f"includes <{included}>: kernels touch no file and no network")

    def _check_hip(self, name, included):
        if not name.startswith("kernels/hip/"):
            self._report(name, f"includes {included}: HIP headers stand in kernels/hip only")

    def _check_arrow(self, name, folder, target, included):
        if target not in ALLOWED_FOLDERS[folder]:
            self._report(name, f"includes {included}: {folder} may not use {target}")

    def _check_proto(self, name, text):
        self.file_count += 1
        for imported in IMPORT.findall(text):
            if imported.startswith("shardprep/"):
                if not (self.root / "proto" / imported).is_file():
                    self._report(name, f"imports {imported}, which does not exist")
            elif not imported.startswith(("google/protobuf/", "google/rpc/")):
                self._report(name, f"imports {imported}: proto may use google protos only")

    def _check_cycles(self):
        done = set()
        for start in self.headers:
            self._visit(start, [], done)

    def _visit(self, header, path, done):
        if header in path:
            cycle = path[path.index(header):] + [header]
            self._report(header, "headers include each other: " + " -> ".join(cycle))
            return
        if header in done:
            return
        for included in self.headers.get(header, ()):
            self._visit(included, path + [header], done)
        done.add(header)


class RepositoryTest(unittest.TestCase):
    def test_every_arrow_is_allowed(self):
        graph = IncludeGraph(ROOT)
        problems = graph.check()
        self.assertGreater(graph.file_count, 30, "the walk found no sources")
        self.assertEqual(problems, [], "\n" + "\n".join(problems))


class FakeTreeTest(unittest.TestCase):
    """The walk itself: small trees with one fault each."""

    def problems(self, files):
        with tempfile.TemporaryDirectory() as root:
            for name, text in files.items():
                path = pathlib.Path(root) / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
            return IncludeGraph(root).check()

    def test_allowed_tree_has_no_problem(self):
        self.assertEqual(self.problems({
            "proto/shardprep/v1/plan.proto": 'import "google/rpc/status.proto";\n',
            "kernels/layout.h": '#include <cstdint>\n#include "absl/status/status.h"\n',
            "kernels/tiles.cc": '#include <immintrin.h>\n#include "kernels/layout.h"\n',
            "kernels/hip/device.cc": '#include <hip/hip_runtime_api.h>\n',
            "workers/plan.h": '#include "kernels/layout.h"\n#include "shardprep/v1/plan.pb.h"\n',
            "workers/worker_main.cc": '#include "workers/plan.h"\n#include <fcntl.h>\n',
            "service/queue.h": '#include "workers/plan.h"\n#include "kernels/layout.h"\n',
            "tests/service/queue_test.cc": '#include "service/queue.h"\n',
        }), [])

    def test_forbidden_arrows_are_found(self):
        headers = {
            "kernels/layout.h": "", "kernels/hip/device.h": "", "workers/plan.h": "",
            "workers/worker_main.h": "", "service/queue.h": "", "tests/support/fake.h": "",
        }
        cases = [
            ("kernels/a.cc", '#include "workers/plan.h"', "kernels may not use workers"),
            ("kernels/a.cc", '#include "service/queue.h"', "kernels may not use service"),
            ("kernels/a.cc", '#include "shardprep/v1/plan.pb.h"', "kernels may not use proto"),
            ("kernels/a.h", '#include "nlohmann/json.hpp"', "standard library and Abseil"),
            ("kernels/a.h", "#include <nlohmann/json.hpp>", "no file and no network"),
            ("kernels/a.cc", "#include <fstream>", "no file and no network"),
            ("kernels/a.cc", "#  include <fcntl.h>", "no file and no network"),
            ("kernels/a.cc", "#include <hip/hip_runtime.h>", "kernels/hip only"),
            ("workers/a.h", '#include "service/queue.h"', "workers may not use service"),
            ("workers/a.cc", '#include "tests/support/fake.h"', "workers may not use tests"),
            ("workers/a.cc", '#include "kernels/hip/device.h"', "only kernels know the device"),
            ("workers/a.cc", "#include <hip/hip_runtime.h>", "kernels/hip only"),
            ("service/a.cc", '#include "kernels/hip/device.h"', "only kernels know the device"),
            ("service/a.cc", '#include "hip/hip_runtime.h"', "kernels/hip only"),
            ("service/a.cc", '#include "workers/worker_main.h"', "nobody includes a main"),
            ("service/a.cc", '#include "tests/support/fake.h"', "service may not use tests"),
            ("service/a.cc", '#include "workers/plan.cc"', "not a header"),
            ("service/a.cc", '#include "workers/gone.h"', "does not exist"),
            ("service/a.cc", '#include "queue.h"', "path from the repository's root"),
            ("service/a.cc", "#include <workers/plan.h>", "want quotes"),
            ("tests/a_test.cc", "#include <hip/hip_runtime.h>", "kernels/hip only"),
            ("tests/a_test.cc", "#include <cuda_runtime_api.h>", "kernels/hip only"),
            ("proto/shardprep/v1/a.proto", 'import "other/b.proto";', "google protos only"),
            ("proto/shardprep/v1/a.proto", 'import "shardprep/v1/b.proto";', "does not exist"),
        ]
        for name, line, want in cases:
            with self.subTest(name=name, line=line):
                problems = self.problems({**headers, name: "// a file\n" + line + "\n"})
                self.assertEqual(len(problems), 1, problems)
                self.assertTrue(problems[0].startswith(name + ": "), problems[0])
                self.assertIn(want, problems[0])

    def test_cycles_of_headers_are_found(self):
        problems = self.problems({
            "workers/a.h": '#include "workers/b.h"\n',
            "workers/b.h": '#include "workers/c.h"\n',
            "workers/c.h": '#include "workers/a.h"\n',
            "workers/a.cc": '#include "workers/a.h"\n',
        })
        self.assertEqual(len(problems), 1, problems)
        self.assertIn("workers/a.h -> workers/b.h -> workers/c.h -> workers/a.h", problems[0])


if __name__ == "__main__":
    sys.dont_write_bytecode = True
    unittest.main()
