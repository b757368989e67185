"""Opens the inputs of `jaxllm data prepare`: files of this machine, and of stores that have an address.

    s3://bucket/texts/**/*.jsonl.zst      obstore: AWS_ACCESS_KEY_ID, AWS_PROFILE, AWS_ENDPOINT_URL ...
    gs://bucket/texts/*.parquet           obstore: GOOGLE_APPLICATION_CREDENTIALS, STORAGE_EMULATOR_HOST ...
    hf://datasets/org/name@revision/*.csv huggingface_hub: HF_TOKEN, HF_ENDPOINT, HF_HOME ...
    https://host/texts.jsonl.gz           httpx2

Credentials are found by these libraries, as each documents, and by buckets.py. What is read is the content that was listed: a
store says a version of it (see InputFile.version), which is compared before and after a part is read. A dataset of the Hub is
read at the commit that its revision was when the files were listed.
"""

import asyncio
import io
import os
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, suppress
from functools import lru_cache
from http import HTTPStatus
from typing import Any, BinaryIO, TypeVar

from jaxllm.config.checks import without_passwords
from jaxllm.config.errors import ConfigError, line_of
from jaxllm.data.buckets import BUCKETS, CREDENTIALS, FIRST_WAIT_S, TRIES, answer, bucket_and_name, listed
from jaxllm.data.parts import InputFile, kind_of
from jaxllm.untrusted import INT64, MIB, reason_of, shown

T = TypeVar("T")
BLOCK, BUFFER = 4 * MIB, MIB
"""Bytes of one question to a store, and what is taken from them at once."""
_AT_ONCE = 8
"""Blocks of a file that are asked for at once to copy it. S3 gives 85 to 90 MB/s by each connection:
https://docs.aws.amazon.com/AmazonS3/latest/userguide/optimizing-performance-design-patterns.html"""
STALL_S, STALL_BYTES = 30.0, 64 * 1024
"""A web server that does not begin to answer in so many seconds, or sends less in as many, is asked again as a busy one."""
_BUSY = {408, 429, 500, 502, 503, 504}
LONGEST_VERSION = 512


def is_address(text: str) -> bool:
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", text) is not None


def find_in_store(pattern: str) -> list[InputFile]:
    """The files that an address names, or a pattern of addresses (* and ** as for files; not for https). Raises ConfigError if
    nothing matches, the store does not answer or refuses, or its library is missing.
    """
    scheme = _scheme(pattern)
    if scheme != "https":
        _require_plain(pattern)
    if scheme == "hf":
        return _find_on_hub(pattern)
    found = _asked(pattern, lambda: _matches(pattern)) if scheme in BUCKETS else {pattern: _info(pattern)}
    if not found:
        raise ConfigError(f"No file matches {shown(pattern)!r}: check the bucket and the pattern.")
    return [_input(address, info) for address, info in found.items()]


def _matches(pattern: str) -> dict[str, dict[str, Any]]:
    """{address: description} of objects of a bucket."""
    bucket, name = bucket_and_name(pattern)
    if not (mark := re.search(r"[^/]*[*?\[].*", name)):
        return {pattern: _info(pattern)}
    from fsspec.utils import glob_translate

    matches = re.compile(glob_translate(name)).fullmatch
    found = answer(lambda: listed(bucket, name[: mark.start()], deep="/" in mark[0] or "**" in mark[0]))
    return {pattern.removesuffix(name) + one["path"]: one for one in found if matches(one["path"])}


def files_below(address: str) -> dict[str, InputFile]:
    """{name below the address: file} of all objects below s3://BUCKET/PREFIX or gs://BUCKET/PREFIX; {} if there are none.
    Raises ConfigError as `find_in_store` does.
    """
    _require_plain(address)
    root = address.rstrip("/") + "/"
    bucket, folder = bucket_and_name(root)
    found = {one["path"].removeprefix(folder): one for one in _asked(address, lambda: answer(lambda: listed(bucket, folder)))}
    return {name: _input(root + name, info) for name, info in found.items()}


def _require_plain(address: str) -> None:
    if (name := without_passwords(address)) != address:
        raise ConfigError(f"{shown(name)} has no user or password before it: remove them, and {CREDENTIALS[_scheme(address)]}.")
    if "//" in address.partition("://")[2]:
        raise ConfigError(f"{shown(address)} has two slashes beside each other: give the objects other names.")


def open_input(file: InputFile) -> BinaryIO:
    """Opens a file for reading at any place. Reading one of a store raises ConfigError where the store does not give it."""
    if not file.address:
        return open(file.path, "rb")
    from fsspec.spec import AbstractBufferedFile

    class Stored(AbstractBufferedFile):
        """Reads ahead: a block and what was asked for last are in memory."""

        def _fetch_range(self, start: int, end: int) -> bytes:
            return _read(file, start, end)

    # Its annotation names the one default that is a text. No file system is asked for what is read.
    return io.BufferedReader(Stored(None, file.address, block_size=BLOCK, size=file.size), BUFFER)  # type: ignore[arg-type]


def blocks(file: InputFile) -> Iterator[bytes]:
    """The content of a file of a store from its start, by several questions at once. Raises as reading it does."""
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        for begin in range(0, file.size, BLOCK * _AT_ONCE):
            stop = min(begin + BLOCK * _AT_ONCE, file.size)
            yield from pool.map(lambda start: _read(file, start, min(start + BLOCK, file.size)), range(begin, stop, BLOCK))


def require_unchanged(file: InputFile) -> None:
    """Raises ConfigError if the file is not the one that was listed, and OSError if a local file cannot be read."""
    if not file.address:
        found = os.stat(file.path)
        if (found.st_size, found.st_mtime_ns) != (file.size, file.modified_ns):
            raise has_changed(file)
    # A commit of the Hub does not change.
    elif _scheme(file.address) != "hf":
        there = _input(file.address, _info(file.address))
        if (there.size, there.version) != (file.size, file.version):
            raise has_changed(file)


def has_changed(file: InputFile) -> ConfigError:
    return ConfigError(f"{file.path} has changed while it was being read: run the command again when it is finished.")


def unreadable(path: str, error: OSError) -> ConfigError:
    return ConfigError(f"{path} cannot be read ({reason_of(error)}): fix it or leave it out.")


# ---------------------------------------------------------------------------------------------------------- listings


def _scheme(address: str) -> str:
    scheme = re.sub("^http$", "https", address.partition("://")[0].lower())
    if scheme not in _VERSIONS:
        raise ConfigError(
            f"{shown(address)} is not an address that jaxllm reads: use s3://, gs://, hf:// or https://, or a file."
        )
    return scheme


def _info(address: str) -> dict[str, Any]:
    def of_bucket() -> dict[str, Any]:
        bucket, name = bucket_and_name(address)
        with suppress(FileNotFoundError):
            if name:
                return answer(lambda: bucket.head_async(name))
        if not answer(lambda: listed(bucket, name)):
            raise FileNotFoundError(address)
        raise ConfigError(f"{address} is a folder: name the files in it, such as '{address.rstrip('/')}/**/*.jsonl'.")

    return _asked(address, of_bucket if _scheme(address) in BUCKETS else lambda: _from_web(address, 0, 1)[1])


def _input(address: str, info: dict[str, Any], path: str | None = None) -> InputFile:
    path = without_passwords(address) if path is None else path
    size, scheme = info.get("size"), _scheme(address)
    if not isinstance(size, int) or not 0 <= size <= INT64:
        raise ConfigError(f"The store of {path} does not say how long it is: download it, and give the copy.")
    version = next((str(info[key]) for key in _VERSIONS[scheme] if info.get(key)), "")
    kind = kind_of(re.split(r"[?#;]", address)[0] if scheme == "https" else path)
    return InputFile(path, size, 0, kind, address, shown(version, LONGEST_VERSION))


_VERSIONS = {"s3": ("e_tag",), "gs": ("e_tag",), "hf": ("sha256", "blob_id"), "https": ("ETag", "Last-Modified")}
"""Where the description of a file has what changes with its content; the first that is there counts."""


def _find_on_hub(pattern: str) -> list[InputFile]:
    if not pattern.startswith("hf://datasets/"):
        raise ConfigError(f"{shown(pattern)} is not a dataset: write hf://datasets/ORG/NAME/FILES, or ORG/NAME@REVISION.")
    place = _asked(pattern, lambda: _hub().resolve_path(pattern))
    from huggingface_hub import HfApi

    if not place.path_in_repo:
        raise ConfigError(f"{pattern} is a dataset: name files in it, such as '{pattern.rstrip('/')}/**/*.parquet'.")
    commit = _asked(pattern, lambda: HfApi().dataset_info(place.repo_id, revision=place.revision).sha)
    root, name = f"datasets/{place.repo_id}@{commit}", f"hf://datasets/{place.repo_id}"
    found = _asked(pattern, lambda: _hub().glob(f"{root}/{place.path_in_repo}", detail=True))
    files = []
    for there, info in found.items():
        if info["type"] == "file":
            checksum = {"sha256": info["lfs"].sha256} if info.get("lfs") else {}
            files.append(_input(f"hf://{there}", {**info, **checksum}, name + there.removeprefix(root)))
    if not files:
        raise ConfigError(f"No file matches {shown(pattern)!r} at commit {commit}: check the pattern.")
    return files


def _hub() -> Any:
    """The Hub as fsspec's file system."""
    from huggingface_hub import HfFileSystem

    return HfFileSystem()


@lru_cache
def _web() -> Any:
    """The client of all web servers, with the headers that FSSPEC_HTTPS gives. Raises ConfigError if that says more."""
    from fsspec.config import conf
    from httpx2 import AsyncClient

    given = {**conf.get("http", {}), **conf.get("https", {})}
    given |= given.pop("client_kwargs", {})
    if others := sorted(given.keys() - {"headers", "trust_env"}):
        raise ConfigError(
            f"FSSPEC_HTTPS or a file of fsspec's sets {others[0]}, which has no effect: leave headers alone there."
        )

    async def require_encryption(request: Any) -> None:
        first, to = request.extensions["first"], request.url
        if to.scheme != "https" and (to.scheme, to.host) != (first.scheme, first.host):
            raise ConfigError(
                f"{shown(str(first), 300)} leads to {shown(str(to), 300)}: give that address, if it is the right one."
            )

    return AsyncClient(**given, follow_redirects=True, timeout=None, event_hooks={"request": [require_encryption]})


# ----------------------------------------------------------------------------------------------------------- reading


def _read(file: InputFile, start: int, stop: int) -> bytes:
    """Bytes [start, stop). Raises ConfigError if the store gives others."""
    scheme = _scheme(file.address)

    def ask() -> bytes:
        if scheme in BUCKETS:
            bucket, name = bucket_and_name(file.address)
            return bytes(answer(lambda: bucket.get_range_async(name, start=start, end=stop)))
        if scheme != "hf":
            content, there = _from_web(file.address, start, stop)
            return content if there["size"] == file.size else b""
        with _hub().open(file.address, "rb", block_size=stop - start, cache_type="none") as opened:
            opened.seek(start)
            return opened.read(stop - start)

    content = _asked(file.address, ask)
    if len(content) != stop - start:
        raise has_changed(file)
    return content


def _from_web(address: str, start: int, stop: int) -> tuple[bytes, dict[str, Any]]:
    """Bytes [start, stop) of a file of the web, and what _input takes. Nothing that its server says of itself is believed.
    Raises ConfigError if it answers something else, and TimeoutError if it does not end its answer.
    """
    from fsspec.asyn import get_loop, sync
    from httpx2 import URL

    name = shown(address, 300)

    def refused(why: str) -> ConfigError:
        return ConfigError(f"The server of {name} {why}: download it, and give the copy.")

    async def ask() -> tuple[bytes, dict[str, Any]]:
        headers = {"Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"}
        request = _web().build_request("GET", address, headers=headers, extensions={"first": URL(address)})
        async with asyncio.timeout(STALL_S):
            reply = await _web().send(request, stream=True)
        async with aclosing(reply):
            given = reply.headers
            there = {key: given.get(key) for key in _VERSIONS["https"]}
            if given.get("Content-Range") == "bytes */0" or (
                reply.status_code == HTTPStatus.OK and given.get("Content-Length") == "0"
            ):
                return b"", {**there, "size": 0}
            reply.raise_for_status()
            if given.get("Content-Type", "").startswith("text/html") and kind_of(name) != "text":
                raise ConfigError(f"{name} is a web page, not that file: look at it in a browser, and give the file's address.")
            found = re.fullmatch(r"bytes (\d{1,19})-\d{1,19}/(\d{1,19})", given.get("Content-Range", ""))
            if reply.status_code != HTTPStatus.PARTIAL_CONTENT or found is None:
                raise refused("sends no parts of a file")
            if given.get("Content-Encoding", "identity") != "identity" and not name.endswith(".gz"):
                raise refused("compresses what it sends")
            first, size, content, before, pieces = int(found[1]), int(found[2]), bytearray(), -1, reply.aiter_raw()
            while before < len(content) <= stop - start:
                before = len(content)
                async with asyncio.timeout(STALL_S):
                    async for piece in pieces:
                        content += piece
                        if len(content) >= min(before + STALL_BYTES, stop - start + 1):
                            break
            if size >= stop and (first, len(content)) != (start, stop - start):
                raise refused("sends other bytes than it is asked for")
            return bytes(content), {**there, "size": size}

    try:
        return sync(get_loop(), ask)  # type: ignore[return-value]
    except TimeoutError:
        raise TimeoutError(f"less than {STALL_BYTES >> 10} KiB came in {STALL_S:g} seconds") from None


def _asked(address: str, question: Callable[[], T]) -> T:
    """The answer of a store, asked again while it is busy. Raises ConfigError if there is none, or a library is missing."""
    scheme, name = _scheme(address), shown(address, 300)
    tries = TRIES if scheme == "https" else 1
    for number in range(tries):
        try:
            return question()
        except ConfigError:
            raise
        except ImportError as error:
            raise ConfigError(f"{scheme}:// needs {error.name}: pip install 'jaxllm[stores]'.") from None
        except Exception as error:
            why, fix, passes = refusal(address, error)
            if not passes or number == tries - 1:
                says = "is not there" if why == "it is not there" else f"cannot be read ({why})"
                raise ConfigError(f"{name} {says}: {fix}.") from None
            time.sleep(FIRST_WAIT_S * 2**number)
    raise AssertionError("the last try returns or raises")


def refusal(address: str, error: BaseException) -> tuple[str, str, bool]:
    """Why a store did not do what it was asked to, and what to do about it, as phrases; whether that may pass by itself. Texts
    of the libraries may hold the address with its signature, or be pages long.
    """
    from httpx2 import TransportError

    scheme = _scheme(address)
    if scheme == "hf":
        # HfFileSystem says "not found" of whatever the Hub answers.
        error = error.__cause__ or error
    status, words = getattr(getattr(error, "response", None), "status_code", None), str(error.__cause__ or error)
    said = re.sub(r"[?]\S*", "", without_passwords(shown(line_of(error), 200))) or type(error).__name__
    if scheme == "hf" and status == HTTPStatus.UNAUTHORIZED:
        # To strangers the Hub says no more of what is private.
        raise ConfigError(f"{shown(address, 300)} is not there, or is private: check its name, or set HF_TOKEN.") from None
    if isinstance(error, FileNotFoundError) or status in (404, 410):
        return "it is not there", "check the address", False
    # Ceph and Google answer 403 or 400, with such words.
    if re.search(r"quota ?exceeded|exceeded\b.*\bquota|storage ?full|insufficient ?storage", words, re.IGNORECASE):
        return "it is full", "free space there", False
    if isinstance(error, PermissionError) or status in (401, 403):
        return "access is refused" if status else said, CREDENTIALS[scheme], False
    if not (status in _BUSY if status else isinstance(error, OSError | TransportError)):
        fix = "check the address, " + ("set AWS_REGION to the bucket's, " if scheme == "s3" else "") + "or copy the file here"
        return f"answer {status}" if status else said, fix, False
    says = f"it answers {status} again and again" if status else f"it does not answer as it should, {said}"
    return says, "run the command again to resume", True
