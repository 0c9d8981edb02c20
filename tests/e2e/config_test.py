"""Where the two servers take their configuration from, and which of the places wins."""

import pathlib
import re
import sys
import unittest

sys.dont_write_bytecode = True
from controller import Controller
from support import TestCase, make_checkpoint, prepare_arguments, run

SERVERS = ("shardprep-controller", "shardprep-worker")
SAMPLES = {server: pathlib.Path(__file__).resolve().parents[2] / "deploy/k8s/base" /
           f"{server.removeprefix('shardprep-')}.conf" for server in SERVERS}
NOT_IN_FILES = {"config", "validate_config"}


def values_of(text):
    """name -> (value, where it comes from), of what --validate_config prints."""
    return {name: (value, source)
            for source, name, value in re.findall(r"^# (.*)\n(\w+) = ?(.*)$", text, re.MULTILINE)}


class ConfigTest(TestCase):
    def effective(self, binary, *arguments, environment=None):
        return values_of(self.run_ok(binary, *arguments, "--validate_config",
                                     environment=environment).stdout)

    def config(self, text):
        path = self.dir / "config"
        path.write_text(text)
        return path

    def test_command_line_then_environment_then_file_then_default(self):
        path = self.config("max-queued-jobs = 1\nmax_finished_jobs = 1\nlease_duration = 1m1s\n")
        found = self.effective("shardprep-controller", "--config", path, "--max-queued-jobs=3",
                               environment={"SHARDPREP_FLAG_MAX_QUEUED_JOBS": "2",
                                            "SHARDPREP_FLAG_MAX_FINISHED_JOBS": "2"})
        self.assertEqual(found["max_queued_jobs"], ("3", "command line"))
        self.assertEqual(found["max_finished_jobs"], ("2", "SHARDPREP_FLAG_MAX_FINISHED_JOBS"))
        self.assertEqual(found["lease_duration"], ("1m1s", f"{path}:3"))
        self.assertEqual(found["drain_grace"], ("25s", "default"))
        # The file itself may be named by a variable, and --noname is a flag of the command line.
        found = self.effective("shardprep-controller", "--noreflection",
                               environment={"SHARDPREP_FLAG_CONFIG": str(path)})
        self.assertEqual(found["max_queued_jobs"], ("1", f"{path}:1"))
        self.assertEqual(found["reflection"], ("false", "command line"))

    def test_what_is_printed_is_a_file_that_means_the_same(self):
        for server in SERVERS:
            more = ["--controller=127.0.0.1:1", "--device=cpu"] if server.endswith("worker") else [
                "--listen=127.0.0.1:0,127.0.0.1:0"]
            printed = self.run_ok(server, *more, "--validate_config").stdout
            again = self.effective(server, "--config", self.config(printed))
            self.assertEqual({name: value for name, (value, _) in again.items()},
                             {name: value for name, (value, _) in values_of(printed).items()})

    def test_what_is_unknown_or_malformed_is_refused_by_name(self):
        for text, want in (("listne = x", "listne"), ("threads = many", "threads"),
                           ("config = x", "config"), ("help = true", "help"),
                           ("threads", "want name = value")):
            with self.subTest(text):
                path = self.config(f"# comment\n{text}\n")
                self.run_refused("shardprep-controller", "--config", path,
                                 want=[f"{path}:2: ", want])
        for name, value in (("LISTNE", "x"), ("THREADS", "many")):
            with self.subTest(name):
                self.run_refused("shardprep-controller", "--validate_config",
                                 environment={f"SHARDPREP_FLAG_{name}": value},
                                 want=[f"SHARDPREP_FLAG_{name}", name.lower()])
        self.run_refused("shardprep-worker", "--config", self.dir / "none", want="none")

    def test_validation_finds_what_a_start_would_refuse(self):
        for arguments, want in ((["--listen=0.0.0.0:7070"], "--allow-source"),
                                (["--listen=nonsense"], "nonsense"),
                                (["--lease_duration=1s"], "lease duration"),
                                (["--device=tpu"], "tpu"),
                                (["--sign_key=/none"], "/none"),
                                (["--caller_names=a"], "worker names"),
                                (["--log_level=loud"], "loud")):
            with self.subTest(arguments):
                self.run_refused("shardprep-controller", *arguments, "--validate_config", want=want)
        self.run_refused("shardprep-worker", "--validate_config", "--controller=example:1",
                         want="--allow-insecure")

    def test_validation_touches_nothing(self):
        state = self.dir / "state"
        self.effective("shardprep-controller", f"--state_dir={state}")
        self.assertFalse(state.exists())

    def test_uris_are_shown_without_secrets(self):
        shown = run("shardprep-controller", "--validate_config",
                    "--s3_endpoint=https://user:hunter2@host").stdout
        self.assertNotIn("hunter2", shown)
        self.assertEqual(values_of(shown)["s3_endpoint"][0], "https://host")

    def test_a_controller_by_variables_starts_workers_of_its_own(self):
        controller = Controller(self, environment={"SHARDPREP_FLAG_LOCAL_WORKERS": "1",
                                                   "SHARDPREP_FLAG_MAX_QUEUED_JOBS": "5"})
        source = make_checkpoint(self.dir / "source")
        self.run_ok("shardprep", "submit", *prepare_arguments(source, self.dir / "out", 4)[1:],
                    "--controller", controller.address, "--watch")

    def test_the_samples_name_every_flag_with_its_default(self):
        for server, path in SAMPLES.items():
            text = path.read_text()
            named = dict(re.findall(r"^#? ?([a-z_0-9]+) = ?(.*)$", text, re.MULTILINE))
            arguments = ["--controller=127.0.0.1:1"] if server.endswith("worker") else []
            defaults = self.effective(server, *arguments)
            self.assertEqual(named.keys(), defaults.keys() - NOT_IN_FILES, server)
            commented = dict(re.findall(r"^# ([a-z_0-9]+) = ?(.*)$", text, re.MULTILINE))
            for name, value in commented.items():
                if defaults[name][1] == "default":
                    self.assertEqual(value, defaults[name][0], f"{server} {name}")
            self.effective(server, *arguments, "--config", path)


if __name__ == "__main__":
    unittest.main()
