"""`shardprep doctor` says what is missing, and leaves a place as it found it."""

import os
import sys
import unittest

sys.dont_write_bytecode = True
from controller import Controller
from support import TestCase, file_hashes, make_checkpoint, run


class DoctorTest(TestCase):
    def doctor(self, *arguments, device="cpu"):
        """What it printed, and (verdict, subject) of each line."""
        result = run("shardprep", "doctor", "--probe-size", "2MiB", "--device", device, *arguments)
        lines = [line for line in result.stdout.splitlines()
                 if line.split()[0] in ("ok", "warn", "fail")]
        for line in lines:
            self.assertEqual(line.startswith("ok"), "; to do: " not in line, line)
        return result, [(line.split()[0], line[6:26].strip()) for line in lines]

    def test_a_machine_where_jobs_can_run(self):
        source = make_checkpoint(self.dir / "source")
        controller = Controller(self)
        result, lines = self.doctor("--source", source, "--destination", self.dir / "a/b/prepared",
                                    "--controller", controller.address)
        self.assertEqual(result.returncode, 0, result.stdout)
        for subject in ("device", "target", "controller", "source", "put", "conditional put",
                        "read after write", "list after write", "delete"):
            self.assertIn(("ok", subject), lines)
        self.assertFalse((self.dir / "a").exists())

    def test_a_directory_with_files_stays_as_it_is(self):
        destination = make_checkpoint(self.dir / "there")
        before = file_hashes(destination)
        self.doctor("--destination", destination)
        self.assertEqual(file_hashes(destination), before)

    def test_what_is_missing_is_said_and_is_an_error(self):
        (self.dir / "file").write_text("x")
        cases = [(["--destination", self.dir / "file"], "destination"),
                 (["--source", self.dir / "none"], "source"),
                 (["--controller", "127.0.0.1:1"], "controller"),
                 (["--backend", "NONE"], "target"),
                 (["--alignment-policy", self.dir / "file"], "alignment policy"),
                 (["--tls-cert", self.dir / "file", "--tls-key", self.dir / "file", "--tls-ca",
                   self.dir / "file"], "certificates")]
        for arguments, subject in cases:
            with self.subTest(subject):
                result, lines = self.doctor(*arguments)
                self.assertEqual(result.returncode, 1, result.stdout)
                self.assertIn(("fail", subject), lines)

    def test_a_device_is_named_as_workers_name_it(self):
        result, lines = self.doctor(device="hip:99")
        self.assertEqual(result.returncode, 1, result.stdout)
        self.assertIn(("fail", "device"), lines)
        result, lines = self.doctor(device="gpu:1")
        self.assertNotEqual(result.returncode, 0)
        self.assertEqual(lines, [])
        self.assertIn("gpu:1", result.stderr)

    @unittest.skipIf(os.geteuid() == 0, "root may write anywhere")
    def test_a_place_without_the_right_to_write(self):
        closed = self.dir / "closed"
        closed.mkdir(mode=0o555)
        result, lines = self.doctor("--destination", closed)
        self.assertEqual(result.returncode, 1)
        self.assertIn(("fail", "put"), lines)


if __name__ == "__main__":
    unittest.main()
