"""A small signed S3 client of the tests' own: they do not look at a server through shardprep.

As a program it creates the bucket of the environment that server.sh describes.
"""

import datetime
import hashlib
import hmac
import http.client
import os
import sys
import urllib.parse
import xml.etree.ElementTree

TIMEOUT_S = 60


class S3Error(Exception):
    """An answer other than 2xx: `status` and the body."""

    def __init__(self, what, status, body):
        super().__init__(f"{what}: {status} {body[:500]!r}")
        self.status = status


def _escape(text):
    return urllib.parse.quote(text, safe="-._~")


def _local_name(element):
    return element.tag.rsplit("}", 1)[-1]


class S3Client:
    """Objects of one bucket, addressed by path. One request at a time."""

    def __init__(self, endpoint, region, access_key, secret_key, bucket):
        self.endpoint, self.region, self.bucket = endpoint, region, bucket
        self.access_key, self.secret_key = access_key, secret_key
        self._host = urllib.parse.urlsplit(endpoint).netloc

    @classmethod
    def from_environment(cls, environment=os.environ):
        return cls(environment["SHARDPREP_TEST_S3_ENDPOINT"], environment["AWS_REGION"],
                   environment["AWS_ACCESS_KEY_ID"], environment["AWS_SECRET_ACCESS_KEY"],
                   environment["SHARDPREP_TEST_S3_BUCKET"])

    def request(self, method, key="", query=None, body=b"", headers=None):
        """(status, headers by lower-case name, body) of one exchange, whatever the status."""
        path = f"/{self.bucket}" + (f"/{urllib.parse.quote(key, safe='-._~/')}" if key else "")
        parameters = "&".join(f"{_escape(name)}={_escape(str(value))}"
                              for name, value in sorted((query or {}).items()))
        now = datetime.datetime.now(datetime.timezone.utc).strftime("%Y%m%dT%H%M%SZ")
        payload = hashlib.sha256(body).hexdigest()
        signed = {"host": self._host, "x-amz-content-sha256": payload, "x-amz-date": now}
        names = ";".join(sorted(signed))
        canonical = "\n".join([method, path, parameters,
                               *(f"{name}:{signed[name]}" for name in sorted(signed)), "", names,
                               payload])
        scope = f"{now[:8]}/{self.region}/s3/aws4_request"
        to_sign = "\n".join(["AWS4-HMAC-SHA256", now, scope,
                             hashlib.sha256(canonical.encode()).hexdigest()])
        secret = ("AWS4" + self.secret_key).encode()
        for word in (now[:8], self.region, "s3", "aws4_request", to_sign):
            secret = hmac.new(secret, word.encode(), hashlib.sha256).digest()
        authorization = (f"AWS4-HMAC-SHA256 Credential={self.access_key}/{scope}, "
                         f"SignedHeaders={names}, Signature={secret.hex()}")
        connection = http.client.HTTPConnection(self._host, timeout=TIMEOUT_S)
        try:
            connection.request(method, path + ("?" + parameters if parameters else ""), body,
                               {**(headers or {}), **signed, "authorization": authorization})
            answer = connection.getresponse()
            content = answer.read()
        finally:
            connection.close()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, content

    def _done(self, what, *arguments, **options):
        status, headers, body = self.request(*arguments, **options)
        if not 200 <= status < 300:
            raise S3Error(f"{what} {arguments[1:]}", status, body)
        return headers, body

    def create_bucket(self):
        self._done("create bucket", "PUT")

    def put(self, key, data):
        self._done("put", "PUT", key, body=bytes(data))

    def get(self, key):
        return self._done("get", "GET", key)[1]

    def head(self, key):
        """Headers of an object; None when there is none."""
        status, headers, body = self.request("HEAD", key)
        if status == 404:
            return None
        if status != 200:
            raise S3Error(f"head {key}", status, body)
        return headers

    def delete(self, key):
        self._done("delete", "DELETE", key)

    def list(self, prefix=""):
        """key -> size of every object below a prefix."""
        found, token = {}, None
        while True:
            query = {"list-type": 2, "prefix": prefix}
            if token:
                query["continuation-token"] = token
            root = xml.etree.ElementTree.fromstring(
                self._done("list", "GET", "", query=query)[1])
            token = None
            for element in root:
                if _local_name(element) == "Contents":
                    entry = {_local_name(child): child.text for child in element}
                    found[entry["Key"]] = int(entry["Size"])
                elif _local_name(element) == "NextContinuationToken":
                    token = element.text
            if not token:
                return found

    def uploads(self, prefix=""):
        """(key, upload id) of the multipart uploads that are neither completed nor aborted."""
        body = self._done("list uploads", "GET", "", query={"uploads": "", "prefix": prefix})[1]
        found = []
        for element in xml.etree.ElementTree.fromstring(body):
            if _local_name(element) == "Upload":
                entry = {_local_name(child): child.text for child in element}
                found.append((entry["Key"], entry["UploadId"]))
        return sorted(found)


if __name__ == "__main__":
    if sys.argv[1:] != ["create-bucket"]:
        sys.exit("usage: s3_client.py create-bucket")
    S3Client.from_environment().create_bucket()
