"""A secret that credentials hold is in no output, whatever fails and whoever repeats it."""

import http.server
import sys
import threading
import unittest

sys.dont_write_bytecode = True
from controller import Controller, page_of
from support import TestCase, make_checkpoint, prepare_arguments, run

KEY_ID = "AKIAPLANTED"
SECRET = "planted/secret+key0123456789"
TOKEN = "planted-session-token-0123456789"


class Repeater(http.server.BaseHTTPRequestHandler):
    """Refuses every request, and repeats in its answer all that it was sent, as debugging proxies
    do."""

    def refuse(self):
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        said = "; ".join(f"{name}: {value}" for name, value in self.headers.items())
        body = ("<?xml version='1.0'?><Error><Code>AccessDenied</Code><Message>Refused: "
                f"{said}</Message><RequestId>{TOKEN}</RequestId></Error>").encode()
        self.send_response(403)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = refuse

    def log_message(self, *_):
        pass


class SecretsTest(TestCase):
    def setUp(self):
        super().setUp()
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Repeater)
        self.addCleanup(server.server_close)
        self.addCleanup(server.shutdown)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        self.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
        self.source = make_checkpoint(self.dir / "source")
        variables = {"AWS_ENDPOINT_URL": self.endpoint, "AWS_REGION": "us-east-1"}
        credentials = self.dir / "credentials"
        credentials.write_text(f"[default]\naws_access_key_id = {KEY_ID}\n"
                               f"aws_secret_access_key = {SECRET}\naws_session_token = {TOKEN}\n")
        self.by_variables = {**variables, "AWS_ACCESS_KEY_ID": KEY_ID,
                             "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_SESSION_TOKEN": TOKEN}
        self.by_file = {**variables, "AWS_SHARED_CREDENTIALS_FILE": str(credentials)}

    def check(self, what, text):
        for secret in (SECRET, TOKEN):
            self.assertNotIn(secret, text, what)

    def check_result(self, result, want):
        self.assertNotEqual(result.returncode, 0)
        self.assertIn(want, result.stderr)
        self.check(result.args, result.stdout + result.stderr)

    def test_commands(self):
        expectation = ["--expect", "profile=aiter-separated,width=384"]
        commands = [
            prepare_arguments(self.source, "s3://bucket/out", 4, "--verbose"),
            prepare_arguments("s3://bucket/in", self.dir / "out", 4, "--verbose"),
            ["verify", "s3://bucket/out"],
            ["fetch", "s3://bucket/out", "--rank", 0, "--into", self.dir / "rank", *expectation],
        ]
        for environment in (self.by_variables, self.by_file):
            for command in commands:
                with self.subTest(command[0], by_file=environment is self.by_file):
                    result = run("shardprep", *command, environment=environment)
                    self.check_result(result, "AccessDenied")

    def test_a_broken_credentials_file(self):
        broken = self.dir / "broken"
        broken.write_text(f"[default]\naws_access_key_id = {KEY_ID}\n{SECRET}\n"
                          f"aws_session_token {TOKEN}\n")
        result = run("shardprep", "verify", "s3://bucket/out",
                     environment={**self.by_file, "AWS_SHARED_CREDENTIALS_FILE": str(broken)})
        self.check_result(result, str(broken))

    def test_a_job_of_controller_and_worker(self):
        controller = Controller(self, environment=self.by_variables)
        worker = controller.start_worker(environment=self.by_variables)
        common = ["--controller", controller.address]
        self.check_result(
            run("shardprep", "submit", *common, "--job-id", "a", "--source", self.source,
                "--destination", f"s3://{KEY_ID}:{SECRET}@bucket/out", "--tensor-parallel-size", 4),
            "INVALID_ARGUMENT")
        for destination in ("s3://bucket/out", self.dir / "out"):
            source = "s3://bucket/in" if destination == self.dir / "out" else self.source
            result = run("shardprep", "submit", *common, "--job-id", "b", "--source", source,
                         "--destination", destination, "--tensor-parallel-size", 4, "--watch")
            self.check_result(result, "AccessDenied")
        for command in (["list"], ["list", "--format", "json"]):
            self.check(command, run("shardprep", *command, *common).stdout)
        self.check("audit", controller.process.log())
        self.assertIn("level=audit", controller.process.log())
        self.check("worker", worker.log())
        self.check("metrics", page_of(controller.metrics_address) + page_of(worker.metrics_address))


if __name__ == "__main__":
    unittest.main()
