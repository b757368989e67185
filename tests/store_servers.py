"""Stores on loopback: moto's S3, Google's XML API, a server of files, and a Hub that answers as Hugging Face's does."""

import hashlib
import http.client
import itertools
import json
import logging
import re
import threading
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import StreamRequestHandler
from unittest import mock
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from jaxllm.data.buckets import open_bucket

# For all servers here: an answer's second packet would wait 40 ms for a delayed acknowledgement of the first.
StreamRequestHandler.disable_nagle_algorithm = True


class Server(ThreadingHTTPServer):
    """Serves `files` (path -> bytes) with ranges and ETags.

    Attributes:
      failures: statuses that the next requests are answered with, in place of a right answer.
      behind: the port of a server that requests are passed on to.
      rule: None, or a function from method and path to a status that refuses the request, a pair of one and the content of the
        answer, or None. It may wait.
      seen: (method, path with query) of each request.
    """

    daemon_threads = True
    accepts_ranges = "bytes"

    def __init__(self, behind=None):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files, self.failures, self.behind, self.seen, self.rule = {}, [], behind, [], None

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request, client_address):
        """Clients that have enough go away."""

    def pass_on(self, method, path, headers, body):
        """The answer of the server behind: (status, headers, content)."""
        with closing(http.client.HTTPConnection("127.0.0.1", self.behind, timeout=30)) as onward:
            onward.request(method, path, body, headers)
            found = onward.getresponse()
            return found.status, dict(found.getheaders()), found.read()

    def answer(self, method, path, query, headers, body):
        """(status, headers, content) of a request."""
        if path not in self.files:
            return 404, {}, b""
        return self.content(self.files[path], {})

    def content(self, content, headers):
        return (
            200,
            {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "Accept-Ranges": self.accepts_ranges, **headers},
            content,
        )


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def handle_one(self):
        server, parts = self.server, urlsplit(self.path)
        body = self.rfile.read(length := int(self.headers.get("Content-Length", 0)))
        if len(body) < length:
            # The client died.
            self.close_connection = True
            return
        server.seen.append((self.command, self.path))
        refused = server.rule and server.rule(self.command, self.path)
        if server.failures:
            status, headers, content = server.failures.pop(0), {}, b""
        elif refused:
            headers, (status, content) = {}, refused if isinstance(refused, tuple) else (refused, b"")
        elif server.behind:
            status, headers, content = server.pass_on(self.command, self.path, dict(self.headers), body)
        else:
            query = {key: values[0] for key, values in parse_qs(parts.query).items()}
            status, headers, content = server.answer(self.command, unquote(parts.path), query, self.headers, body)
            asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
            if asked and status == 200 and server.accepts_ranges == "bytes":
                first, last = int(asked[1]), min(int(asked[2] or len(content)), len(content) - 1)
                headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
                status, content = 206, content[first : last + 1]
        self.send_response(status)
        kept = {k: v for k, v in headers.items() if k.lower() not in ("connection", "transfer-encoding", "date", "server")}
        if not any(key.lower() == "content-length" for key in kept):
            kept["Content-Length"] = len(content)
        for key, value in kept.items():
            self.send_header(key, str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = handle_one

    def log_message(self, *words):
        pass


class Hub(Server):
    """Repositories of models and datasets, as huggingface_hub asks for them:
    https://huggingface.co/docs/hub/api and the headers of its file_download.py.

    Attributes:
      repos: (models or datasets, ORG/NAME) -> commit -> {path: content}; the last commit is that of main.
      gated: names of repositories whose files want the token `secret-token`.
    """

    def __init__(self):
        super().__init__()
        self.repos, self.gated = {}, set()

    @contextmanager
    def is_the_hub(self, cache=None):
        """As HF_ENDPOINT and HF_HUB_CACHE, which are read when the library is imported, perhaps by another test."""
        from huggingface_hub import constants

        url = self.url + "/{repo_id}/resolve/{revision}/{filename}"
        caches = {} if cache is None else {"HF_HUB_CACHE": str(cache)}
        with mock.patch.multiple(constants, ENDPOINT=self.url, HUGGINGFACE_CO_URL_TEMPLATE=url, **caches):
            yield

    def push(self, kind, name, files):
        """A new commit with these files alone. Returns its 40 digits."""
        commits = self.repos.setdefault((kind, name), {})
        commit = hashlib.sha1(json.dumps([len(commits), sorted(files)]).encode()).hexdigest()
        commits[commit] = files
        return commit

    def answer(self, method, path, query, headers, body):
        if found := re.fullmatch(
            r"/api/(models|datasets)/([^/]+/[^/]+)(?:/(revision|tree|paths-info)/([^/]+)(?:/(.*))?)?", path
        ):
            kind, name, what, revision, below = found.groups()
            if isinstance(commit := self._commit(kind, name, revision or "main", headers), tuple):
                return commit
            files = self.repos[kind, name][commit]
            if what == "tree":
                return self._json(self._entries(files, below or "", query.get("recursive", "").lower() in ("true", "1")))
            if what == "paths-info":
                wanted = parse_qs(body.decode()).get("paths") or json.loads(body)["paths"]
                return self._json([self._entry(one, files[one]) for one in wanted if one in files])
            siblings = [{"rfilename": one} for one in files]
            return self._json({"_id": "1", "id": name, "sha": commit, "siblings": siblings, "private": False, "tags": []})
        if found := re.fullmatch(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            kind, name, revision, file = ("datasets" if found[1] else "models"), found[2], found[3], found[4]
            if isinstance(commit := self._commit(kind, name, revision, headers), tuple):
                return commit
            if name in self.gated and headers.get("Authorization") != "Bearer secret-token":
                return 403, {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted"}, b""
            if file not in self.repos[kind, name][commit]:
                return 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit}, b""
            return self.content(self.repos[kind, name][commit][file], {"X-Repo-Commit": commit})
        return 404, {}, b""

    def _commit(self, kind, name, revision, headers):
        """The commit of a revision, or an answer that there is none."""
        if (kind, name) not in self.repos:
            # The Hub does not tell strangers whether a repository is private or not there.
            return 401, {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"}, b""
        commits = self.repos[kind, name]
        if revision == "main":
            return list(commits)[-1]
        return revision if revision in commits else (404, {"X-Error-Code": "RevisionNotFound"}, b"")

    def _entries(self, files, below, recursive):
        inside = {path: content for path, content in files.items() if not below or path.startswith(below + "/")}
        folders, found = set(), []
        for path, content in inside.items():
            names = path[len(below) + 1 if below else 0 :].split("/")
            for depth in range(1, len(names)) if recursive else range(1, min(2, len(names))):
                folders.add("/".join([*([below] if below else []), *names[:depth]]))
            if recursive or len(names) == 1:
                found.append(self._entry(path, content))
        return [{"type": "directory", "oid": "0" * 40, "size": 0, "path": folder} for folder in sorted(folders)] + found

    def _entry(self, path, content):
        blob = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        large = {"lfs": {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}}
        return {"type": "file", "oid": blob, "size": len(content), "path": path, **(large if path.endswith(LARGE) else {})}

    def _json(self, value):
        return 200, {"Content-Type": "application/json"}, json.dumps(value).encode()


LARGE = (".parquet", ".safetensors")


@contextmanager
def serving(server):
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def s3():
    """The port of moto's server. Clients find it by AWS_ENDPOINT_URL."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        yield server.get_host_and_port()[1]
    finally:
        server.stop()


def s3_environment(url: str) -> dict[str, str]:
    """Variables by which clients find a server that speaks S3. Tries and waits are left to jaxllm."""
    return {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "someone",
        "AWS_SECRET_ACCESS_KEY": "hidden-key",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_MAX_ATTEMPTS": "1",
    }


def committed(store) -> list[int]:
    """The steps that are complete in a jaxllm.checkpoint.store.Store."""
    return [step for step, files in store.steps().items() if "files.json" in files]


@contextmanager
def s3_door(bucket):
    """A server in front of moto's S3, which can refuse and hold requests, with a bucket; `client` is boto3's. The variables of
    this process name it."""
    with pytest.MonkeyPatch.context() as patch, s3() as port, serving(Server(behind=port)) as door:
        for name, value in s3_environment(door.url).items():
            patch.setenv(name, value)
        open_bucket.cache_clear()
        door.client = client_of(door, bucket)
        yield door
    open_bucket.cache_clear()


def client_of(door, bucket):
    """boto3's client, with a new bucket."""
    import boto3

    client = boto3.client("s3", "us-east-1", endpoint_url=door.url, aws_access_key_id="a", aws_secret_access_key="b")
    client.create_bucket(Bucket=bucket)
    return client


class Google(Server):
    """Google's XML API before a server that speaks S3, from which it differs by generations of objects and conditions on them:
    https://cloud.google.com/storage/docs/xml-api/reference-headers and https://cloud.google.com/storage/docs/interoperability"""

    def __init__(self, behind):
        super().__init__(behind)
        self._generations, self._next, self._gate = {}, itertools.count(1000), threading.Lock()

    def pass_on(self, method, path, headers, body):
        name, _, query = unquote(path).partition("?")
        with self._gate:
            wanted = {key.lower(): value for key, value in headers.items()}.get("x-goog-if-generation-match")
            if wanted is not None and int(wanted) != self._generations.get(name, 0):
                return 412, {}, b"<Error><Code>PreconditionFailed</Code></Error>"
            # moto keeps one set of buckets for all its servers.
            status, headers, content = super().pass_on(method, f"/google-{path[1:]}", headers, body)
            is_part = "partNumber=" in query or "uploads" in query
            if method in ("PUT", "POST") and status == 200 and not is_part:
                self._generations[name] = next(self._next)
            elif method == "DELETE" and "uploadId=" not in query:
                status = status if self._generations.pop(name, None) else 404
            if name in self._generations:
                headers["x-goog-generation"] = str(self._generations[name])
            return status, headers, content


@contextmanager
def gcs_door(bucket):
    """As s3_door, of Google's."""
    with pytest.MonkeyPatch.context() as patch, s3() as port, serving(Google(behind=port)) as door:
        patch.setenv("STORAGE_EMULATOR_HOST", door.url)
        open_bucket.cache_clear()
        door.client = client_of(door, bucket)
        yield door
    open_bucket.cache_clear()
