"""A certificate authority and certificates of its making, in the form of Kubernetes TLS secrets."""

import subprocess


def _openssl(directory, *arguments):
    subprocess.run(["openssl", *arguments], cwd=directory, check=True, capture_output=True)


def make_certificates(directory):
    """`directory`/{controller,worker,client}/{tls.crt,tls.key,ca.crt}; the controller's is for
    loopback."""
    directory.mkdir()
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    _openssl(directory, "req", "-x509", *curve, "-days", "2", "-subj", "/CN=test-ca",
             "-keyout", "ca.key", "-out", "ca.crt")
    for name, subject in (("controller", "DNS:localhost,IP:127.0.0.1"),
                          ("worker", "DNS:shardprep-worker"),
                          ("client", "DNS:shardprep-client")):
        (directory / name).mkdir()
        _openssl(directory, "req", *curve, "-subj", f"/CN=shardprep-{name}",
                 "-keyout", f"{name}/tls.key", "-out", f"{name}/request.pem")
        (directory / name / "extensions").write_text(f"subjectAltName={subject}\n")
        _openssl(directory, "x509", "-req", "-in", f"{name}/request.pem", "-CA", "ca.crt", "-CAkey",
                 "ca.key", "-CAcreateserial", "-days", "1", "-extfile", f"{name}/extensions",
                 "-out", f"{name}/tls.crt")
        (directory / name / "ca.crt").write_bytes((directory / "ca.crt").read_bytes())
    return directory
