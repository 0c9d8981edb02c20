"""deploy/Dockerfile as far as it can be checked without a container engine: what it names is there,
what it installs is what the binaries need, and what runs has no rights."""

import fnmatch
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "e2e"))
from support import BIN

ROOT = pathlib.Path(__file__).resolve().parents[2]
PACKAGES = ROOT / "deploy/install_packages.sh"
RUN_TARGETS = {"controller": ("shardprep", "shardprep-controller"),
               "worker-cpu": ("shardprep", "shardprep-worker"),
               "worker-rocm": ("shardprep", "shardprep-worker")}
USER = "65532"
# In every Debian system: glibc, and what dpkg itself is linked with.
ESSENTIAL = {"libc6", "libgcc-s1"}
# Not linked with: the certificate authorities that sign S3 endpoints.
DATA_PACKAGES = {"ca-certificates"}
HIP_LIBRARY = "libamdhip64.so"
INSTRUCTION = re.compile(r"^([A-Z]+)\s+(.*)$")


def instructions():
    """(stage or None, instruction, rest) of every instruction, with continued lines joined."""
    text = (ROOT / "deploy/Dockerfile").read_text()
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    stage, found = None, []
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        word, rest = INSTRUCTION.match(line).groups()
        if word == "FROM":
            stage = rest.split(" AS ")[1]
        found.append((stage, word, re.sub(r"\s+", " ", rest)))
    return found


def of_stage(stage):
    return [(word, rest) for name, word, rest in instructions() if name == stage]


def bases():
    """stage -> what it is built on."""
    return {stage: rest.split(" AS ")[0] for stage, word, rest in instructions() if word == "FROM"}


def lineage(stage):
    """The stage and those that it is built on."""
    names = []
    while stage in bases():
        names.append(stage)
        stage = bases()[stage]
    return names


def groups_of(stage):
    """Groups of install_packages.sh that a stage and its bases install."""
    return [group for name in lineage(stage) for word, rest in of_stage(name) if word == "RUN"
            for groups in re.findall(r"install_packages\.sh ((?:[a-z-]+ ?)+?)(?= &&|$)", rest)
            for group in groups.split()]


def packages_of(*groups):
    listed = subprocess.run([str(PACKAGES), "--list", *groups], capture_output=True, text=True,
                            check=True).stdout
    return set(listed.split())


def linked_packages(binary):
    """Debian packages of the libraries that a binary names itself; library -> package."""
    dynamic = subprocess.run(["readelf", "-d", str(BIN / binary)], capture_output=True, text=True,
                             check=True).stdout
    names = re.findall(r"\(NEEDED\).*\[(.+)\]", dynamic)
    paths = dict(re.findall(r"^\s*(\S+) => (/\S+)", subprocess.run(
        ["ldd", str(BIN / binary)], capture_output=True, text=True, check=True).stdout,
        re.MULTILINE))
    # Debian 12 owns a library under /lib or under /usr/lib, whichever its package was built for.
    resolved = {name: str(pathlib.Path(paths[name]).resolve()) for name in names}
    either = [path for library in resolved.values()
              for path in (library, library.removeprefix("/usr"))]
    owners = dict(line.split(": ")[::-1] for line in subprocess.run(
        ["dpkg", "-S", *either], capture_output=True, text=True, check=False).stdout.splitlines())
    found = {}
    for name, path in resolved.items():
        owner = owners.get(path) or owners.get(path.removeprefix("/usr"))
        if owner is None:
            raise AssertionError(f"no package owns {name} at {path}")
        found[name] = owner.split(":")[0]
    return found


class DockerfileTest(unittest.TestCase):
    def test_stages_are_there_and_based_on_a_dated_image(self):
        self.assertLessEqual(RUN_TARGETS.keys(), bases().keys())
        (base,) = [rest for stage, word, rest in instructions() if word == "ARG" and not stage]
        # No registry's name: the engine's own default, or a mirror given with --build-arg.
        self.assertRegex(base, r"^BASE=debian:bookworm-20\d{6}-slim$")
        outside = {base for base in bases().values() if base not in bases()}
        self.assertEqual(outside, {"${BASE}"})

    def test_images_run_without_rights_as_process_one(self):
        for target, binaries in RUN_TARGETS.items():
            with self.subTest(target):
                words = dict(of_stage(target))
                self.assertEqual(words["USER"], f"{USER}:{USER}")
                # The exec form: a shell as process 1 would keep SIGTERM to itself.
                self.assertEqual(words["ENTRYPOINT"], f'["/usr/local/bin/{binaries[1]}"]')
                self.assertNotIn("CMD", words)
        self.assertEqual(dict(of_stage("run"))["STOPSIGNAL"], "SIGTERM")

    def test_what_is_copied_is_in_the_tree_and_in_the_context(self):
        ignored = (ROOT / ".dockerignore").read_text().splitlines()
        kept = [line[1:] for line in ignored if line.startswith("!")]
        self.assertIn("*", ignored)
        for stage, word, rest in instructions():
            if word != "COPY":
                continue
            sources = rest.split()[:-1]
            with self.subTest(stage, copy=rest):
                if sources[0].startswith("--from="):
                    self.assertIn(sources[0][len("--from="):], bases())
                    self.assertTrue(all(source.startswith("/out/") for source in sources[1:]))
                    continue
                for source in sources:
                    self.assertTrue((ROOT / source).exists(), source)
                    self.assertTrue(any(fnmatch.fnmatch(source, pattern) for pattern in kept),
                                    f"{source} is not in the context")
        for pattern in kept:
            self.assertTrue((ROOT / pattern).exists(), pattern)

    def test_the_build_stage_has_all_that_cmake_reads(self):
        copied = {source for word, rest in of_stage("build") if word == "COPY"
                  for source in rest.split()[:-1]}
        listed = set(re.findall(r"^\s*add_subdirectory\((\w+)\)",
                                (ROOT / "CMakeLists.txt").read_text(), re.MULTILINE))
        self.assertEqual({"CMakeLists.txt", "CMakePresets.json", *listed - {"tests"}} - copied,
                         set())

    def test_the_context_alone_can_be_configured(self):
        """CMake reads nothing that the image does not have."""
        with tempfile.TemporaryDirectory(prefix="shardprep-image-") as directory:
            for word, rest in of_stage("build"):
                if word == "COPY":
                    for source in rest.split()[:-1]:
                        copy = pathlib.Path(directory, source)
                        copy.parent.mkdir(parents=True, exist_ok=True)
                        if (ROOT / source).is_dir():
                            shutil.copytree(ROOT / source, copy)
                        else:
                            shutil.copy(ROOT / source, copy)
            flags = re.search(r"cmake --preset release ([^&]*)",
                              dict(of_stage("build"))["RUN"]).group(1).split()
            done = subprocess.run(["cmake", "--preset", "release", *flags], cwd=directory,
                                  capture_output=True, text=True, check=False)
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def test_each_image_has_the_binaries_that_it_starts(self):
        for target, binaries in RUN_TARGETS.items():
            copied = [rest for word, rest in of_stage(target)
                      if word == "COPY" and rest.startswith("--from=")]
            self.assertEqual(len(copied), 1)
            self.assertEqual({pathlib.PurePath(path).name for path in copied[0].split()[1:-1]},
                             set(binaries))

    def test_the_ports_are_those_of_the_manifests(self):
        exposed = {target: dict(of_stage(target))["EXPOSE"].split() for target in RUN_TARGETS}
        for target, manifest in (("controller", "controller.yaml"), ("worker-cpu", "worker.yaml"),
                                 ("worker-rocm", "worker.yaml")):
            text = (ROOT / "deploy/k8s/base" / manifest).read_text()
            self.assertEqual(exposed[target], re.findall(r"containerPort: (\d+)", text), target)

    def test_package_lists_do_not_stay_behind(self):
        for stage, word, rest in instructions():
            if word == "RUN" and "install_packages.sh" in rest:
                self.assertIn("rm -rf /var/lib/apt/lists/*", rest, stage)


class RuntimePackagesTest(unittest.TestCase):
    """What the images install is what the binaries are linked with: no more and no less."""

    @classmethod
    def setUpClass(cls):
        cls.linked = {}
        for binary in ("shardprep", "shardprep-controller", "shardprep-worker"):
            cls.linked.update(linked_packages(binary))
        cls.hip = {package for library, package in cls.linked.items()
                   if library.startswith(HIP_LIBRARY)}

    def test_images_install_what_the_binaries_need(self):
        wanted = set(self.linked.values()) - ESSENTIAL - self.hip
        self.assertEqual(packages_of("run"), wanted | DATA_PACKAGES)
        for target in RUN_TARGETS:
            self.assertIn("run", groups_of(target), target)

    def test_the_gpu_runtime_is_in_the_gpu_image_only(self):
        if not self.hip:
            self.skipTest("this build has no GPU kernels")
        self.assertEqual(packages_of("run-hip"), self.hip)
        self.assertEqual([target for target in RUN_TARGETS if "run-hip" in groups_of(target)],
                         ["worker-rocm"])
        built = {target: rest.split()[0] for target in RUN_TARGETS
                 for word, rest in of_stage(target) if word == "COPY" and "--from" in rest}
        self.assertEqual(built, {"controller": "--from=build", "worker-cpu": "--from=build",
                                 "worker-rocm": "--from=build-rocm"})


if __name__ == "__main__":
    unittest.main()
