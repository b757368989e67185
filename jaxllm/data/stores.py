"""Opens the inputs of `jaxllm data prepare`: files of this machine, and of stores that have an address.

    s3://bucket/texts/**/*.jsonl.zst      s3fs: AWS_ACCESS_KEY_ID, AWS_PROFILE, AWS_ENDPOINT_URL ...
    gs://bucket/texts/*.parquet           gcsfs: GOOGLE_APPLICATION_CREDENTIALS, STORAGE_EMULATOR_HOST ...
    hf://datasets/org/name@revision/*.csv huggingface_hub: HF_TOKEN, HF_ENDPOINT, HF_HOME ...
    https://host/texts.jsonl.gz           fsspec

Credentials are found by these libraries, as each documents; none passes through here. What is read is the content that was
listed: a store says a version of it (see InputFile.version), which is compared before and after a part is read. A dataset of
the Hub is read at the commit that its revision was when the files were listed.
"""

from __future__ import annotations

import asyncio
import io
import logging
import os
import re
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from http import HTTPStatus
from typing import Any, BinaryIO, NoReturn, TypeVar

from jaxllm.config.checks import without_passwords
from jaxllm.config.errors import ConfigError, line_of
from jaxllm.data.parts import InputFile, kind_of
from jaxllm.untrusted import INT64, MIB, reason_of, shown

T = TypeVar("T")
LIBRARIES = {"s3": "s3fs", "gs": "gcsfs", "hf": "huggingface_hub", "https": "aiohttp", "http": "aiohttp"}
"""What fsspec reads each kind of address with."""
_CREDENTIALS = {
    "s3": "set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; for a public bucket FSSPEC_S3='{\"anon\": true}'",
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS, or run `gcloud auth application-default login`; for a public bucket "
    'FSSPEC_GS=\'{"token": "anon"}\'',
    "hf": "set HF_TOKEN, or run `hf auth login`, and accept the terms of the dataset on its page",
    "https": "give an address that is signed, or copy the file here",
}
BLOCK, BUFFER = 4 * MIB, MIB
"""Bytes of one question to a store, and what is taken from them at once."""
_AT_ONCE = 8
"""Blocks of a file that are asked for at once to copy it. S3 gives 85 to 90 MB/s by each connection:
https://docs.aws.amazon.com/AmazonS3/latest/userguide/optimizing-performance-design-patterns.html"""
TRIES, FIRST_WAIT_S = 5, 1.0
"""Questions to S3 and to web servers until one is answered; the wait doubles each time. gcsfs and huggingface_hub ask again for
half a minute by themselves, s3fs for two seconds."""
STALL_S, STALL_BYTES = 30.0, 64 * 1024
"""A web server that does not begin to answer in so many seconds, or sends less in as many, is asked again as a busy one."""
_BUSY = {408, 429, 500, 502, 503, 504}
LONGEST_VERSION = 512


def is_address(text: str) -> bool:
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", text) is not None


def find_in_store(pattern: str) -> list[InputFile]:
    """The files that an address names, or a pattern of addresses (* and ** as for files; not for https).

    Raises:
      ConfigError: nothing matches, the store does not answer or refuses, or its library is missing.
    """
    scheme = _scheme(pattern)
    if not scheme.startswith("http"):
        _require_no_password(pattern)
    if scheme == "hf":
        return _find_on_hub(pattern)
    if scheme in ("s3", "gs") and any(mark in pattern for mark in "*?["):
        found = _asked(pattern, lambda: filesystem(scheme).glob(pattern, detail=True))
        infos = [(f"{scheme}://{name}", info) for name, info in found.items() if _is_file(name, info)]
    else:
        info = _info(pattern)
        if info["type"] != "file":
            raise ConfigError(f"{pattern} is a folder: name the files in it, such as '{pattern.rstrip('/')}/**/*.jsonl'.")
        infos = [(pattern, info)]
    if not infos:
        raise ConfigError(f"No file matches {shown(pattern)!r}: check the bucket and the pattern.")
    return [_input(address, info) for address, info in infos]


def files_below(address: str) -> dict[str, InputFile]:
    """{name below the address: file} of all objects below s3://BUCKET/PREFIX or gs://BUCKET/PREFIX; {} if there are none.
    Raises ConfigError as `find_in_store` does.
    """
    scheme = _scheme(address)
    _require_no_password(address)
    fs = filesystem(scheme)
    root = str(fs._strip_protocol(address)).rstrip("/") + "/"
    found = _asked(address, lambda: fs.find(root, detail=True))
    files = {path.removeprefix(root): info for path, info in found.items() if _is_file(path, info)}
    return {name: _input(f"{scheme}://{root}{name}", info) for name, info in files.items()}


def _is_file(name: str, info: dict[str, Any]) -> bool:
    # Consoles of buckets mark a folder by an empty object.
    return info["type"] == "file" and not (name.endswith("/") and not info["size"])


def _require_no_password(address: str) -> None:
    if (name := without_passwords(address)) != address:
        raise ConfigError(
            f"{shown(name)} has no user or password before it: remove them, and {_CREDENTIALS[_scheme(address)]}."
        )


def open_input(file: InputFile) -> BinaryIO:
    """Opens a file for reading at any place. Reading one of a store raises ConfigError where the store does not give it."""
    if not file.address:
        return open(file.path, "rb")
    fs = filesystem(_scheme(file.address))
    from fsspec.spec import AbstractBufferedFile

    class Stored(AbstractBufferedFile):
        """Reads ahead: a block and what was asked for last are in memory."""

        def _fetch_range(self, start: int, end: int) -> bytes:
            return _read(file, start, end)

    # Its annotation names the one default that is a text.
    return io.BufferedReader(Stored(fs, file.address, block_size=BLOCK, size=file.size), BUFFER)  # type: ignore[arg-type]


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
    scheme = address.partition("://")[0].lower()
    if scheme not in LIBRARIES:
        raise ConfigError(
            f"{shown(address)} is not an address that jaxllm reads: use s3://, gs://, hf:// or https://, or a file."
        )
    return scheme


def _info(address: str) -> dict[str, Any]:
    if address.lower().startswith("http"):
        return _asked(address, lambda: _from_web(address, 0, 1)[1])
    return _asked(address, lambda: filesystem(_scheme(address)).info(address))


def _input(address: str, info: dict[str, Any], path: str | None = None) -> InputFile:
    path = without_passwords(address) if path is None else path
    size, scheme = info.get("size"), _scheme(address)
    if not isinstance(size, int) or not 0 <= size <= INT64:
        raise ConfigError(f"The store of {path} does not say how long it is: download it, and give the copy.")
    version = next((str(info[key]) for key in _VERSIONS[scheme] if info.get(key)), "")
    kind = kind_of(re.split(r"[?#;]", address)[0] if scheme.startswith("http") else path)
    return InputFile(path, size, 0, kind, address, shown(version, LONGEST_VERSION))


_VERSIONS = {
    "s3": ("ETag",),
    "gs": ("generation", "etag"),
    "hf": ("sha256", "blob_id"),
    "https": ("ETag", "Last-Modified"),
    "http": ("ETag", "Last-Modified"),
}
"""Where fsspec's description of a file has what changes with its content; the first that is there counts."""


def _find_on_hub(pattern: str) -> list[InputFile]:
    fs = _asked(pattern, lambda: filesystem("hf"))
    from huggingface_hub import HfApi

    if not pattern.startswith("hf://datasets/"):
        raise ConfigError(f"{shown(pattern)} is not a dataset: write hf://datasets/ORG/NAME/FILES, or ORG/NAME@REVISION.")
    place = _asked(pattern, lambda: fs.resolve_path(pattern))
    if not place.path_in_repo:
        raise ConfigError(f"{pattern} is a dataset: name files in it, such as '{pattern.rstrip('/')}/**/*.parquet'.")
    commit = _asked(pattern, lambda: HfApi().dataset_info(place.repo_id, revision=place.revision).sha)
    root, name = f"datasets/{place.repo_id}@{commit}", f"hf://datasets/{place.repo_id}"
    found = _asked(pattern, lambda: fs.glob(f"{root}/{place.path_in_repo}", detail=True))
    files = []
    for there, info in found.items():
        if info["type"] == "file":
            checksum = {"sha256": info["lfs"].sha256} if info.get("lfs") else {}
            files.append(_input(f"hf://{there}", {**info, **checksum}, name + there.removeprefix(root)))
    if not files:
        raise ConfigError(f"No file matches {shown(pattern)!r} at commit {commit}: check the pattern.")
    return files


@lru_cache
def filesystem(scheme: str) -> Any:
    """fsspec's file system for a kind of address. Raises ConfigError if its library is not installed."""
    # It warns on each question where there are no credentials, as for a public bucket.
    logging.getLogger("gcsfs").setLevel(logging.ERROR)
    try:
        import fsspec

        # Each question is about what is there now. The Hub's listings are of a commit.
        return fsspec.filesystem(scheme, **({} if scheme == "hf" else {"use_listings_cache": False}))
    except (ImportError, ValueError) as error:
        missing = error.name if isinstance(error, ImportError) and error.name else LIBRARIES[scheme]
        raise ConfigError(f"{scheme}:// needs {missing}: pip install 'jaxllm[stores]'.") from None


# ----------------------------------------------------------------------------------------------------------- reading


def _read(file: InputFile, start: int, stop: int) -> bytes:
    """Bytes [start, stop). Raises ConfigError if the store gives others."""
    scheme = _scheme(file.address)
    fs = filesystem(scheme)

    def ask() -> bytes:
        if scheme in ("s3", "gs"):
            return fs.cat_file(file.address, start=start, end=stop)
        if scheme != "hf":
            content, there = _from_web(file.address, start, stop)
            return content if there["size"] == file.size else b""
        with fs.open(file.address, "rb", block_size=stop - start, cache_type="none") as opened:
            opened.seek(start)
            return opened.read(stop - start)

    content = _asked(file.address, ask)
    if len(content) != stop - start:
        raise has_changed(file)
    return content


class _Stalled(OSError):
    """A web server does not end its answer. The message says how."""


def _from_web(address: str, start: int, stop: int) -> tuple[bytes, dict[str, Any]]:
    """Bytes [start, stop) of a file of the web, and what _input takes. Nothing that its server says of itself is believed:
    fsspec reads what follows to its end, decompressed, and takes the length of an answer for that of the file.

    Raises:
      ConfigError: the server answers something else.
    """
    from fsspec.asyn import sync

    fs, name = filesystem(_scheme(address)), shown(address, 300)

    def refused(why: str) -> ConfigError:
        return ConfigError(f"The server of {name} {why}: download it, and give the copy.")

    async def within(waited_for: Awaitable[T]) -> T:
        try:
            return await asyncio.wait_for(waited_for, STALL_S)
        except TimeoutError:
            raise _Stalled(f"it sends less than {STALL_BYTES >> 10} KiB in {STALL_S:g} seconds") from None

    async def ask() -> tuple[bytes, dict[str, Any]]:
        from aiohttp import ClientPayloadError, ClientTimeout

        async def send(request: Any, onward: Callable[[Any], Awaitable[Any]]) -> Any:
            to = request.url
            if to.scheme != "https" and (to.scheme, to.host) != (url.scheme, url.host):
                raise ConfigError(f"{name} leads to {shown(str(to), 300)}: give that address, if it is the right one.")
            return await onward(request)

        headers = {**fs.kwargs.get("headers", {}), "Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"}
        session, url = await fs.set_session(), fs.encode_url(address)
        no_total = ClientTimeout(total=None)
        options = {**fs.kwargs, "headers": headers, "auto_decompress": False, "timeout": no_total, "middlewares": (send,)}
        async with await within(session.get(url, **options)) as answer:
            given = answer.headers
            there = {"type": "file", **{key: given.get(key) for key in _VERSIONS["https"]}}
            if given.get("Content-Range") == "bytes */0" or (
                answer.status == HTTPStatus.OK and given.get("Content-Length") == "0"
            ):
                return b"", {**there, "size": 0}
            answer.raise_for_status()
            if answer.content_type == "text/html" and kind_of(name) != "text":
                raise ConfigError(f"{name} is a web page, not that file: look at it in a browser, and give the file's address.")
            found = re.fullmatch(r"bytes (\d{1,19})-\d{1,19}/(\d{1,19})", given.get("Content-Range", ""))
            if answer.status != HTTPStatus.PARTIAL_CONTENT or found is None:
                raise refused("sends no parts of a file")
            if given.get("Content-Encoding", "identity") != "identity" and not name.endswith(".gz"):
                raise refused("compresses what it sends")

            async def some(count: int) -> bytes:
                try:
                    return await answer.content.readexactly(count)
                except asyncio.IncompleteReadError as ended:
                    return ended.partial
                except ClientPayloadError:
                    raise _Stalled("its answers break off") from None

            first, size, content = int(found[1]), int(found[2]), bytearray()
            # One byte more than asked for, which may not be there.
            while piece := await within(some(min(STALL_BYTES, stop - start + 1 - len(content)))):
                content += piece
            if size >= stop and (first, len(content)) != (start, stop - start):
                raise refused("sends other bytes than it is asked for")
            return bytes(content), {**there, "size": size}

    return sync(fs.loop, ask)  # type: ignore[return-value]


def _asked(address: str, question: Callable[[], T]) -> T:
    """The answer of a store, asked again while it is busy. Raises ConfigError if there is none."""
    tries = 1 if _scheme(address) in ("gs", "hf") else TRIES
    for wait_s in (*(FIRST_WAIT_S * 2**number for number in range(tries - 1)), None):
        try:
            return question()
        except ConfigError:
            raise
        except Exception as error:
            if wait_s is None or not _is_busy(error):
                _refuse(address, error)
            time.sleep(wait_s)
    raise AssertionError("the last try returns or raises")


def status_of(error: BaseException) -> int | None:
    """The HTTP status that an error of aiohttp, gcsfs, huggingface_hub or botocore is about."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        response = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    of_error = getattr(error, "status" if hasattr(error, "status") else "code", None)
    found = of_error or getattr(response, "status_code", response)
    if isinstance(found, int | str) and str(found).isdecimal():
        return int(found)
    if type(error) is OSError and str(error).startswith("Forbidden: "):
        # gcsfs has a status for all others.
        return HTTPStatus.FORBIDDEN
    return status_of(error.__cause__) if error.__cause__ is not None else None


def _is_busy(error: BaseException) -> bool:
    error = _cause(error)
    if (status := status_of(error)) is not None:
        return status in _BUSY
    if isinstance(error, FileNotFoundError | PermissionError):
        return False
    return isinstance(error, OSError) or re.search("connect|timeout|payload", type(error).__name__, re.IGNORECASE) is not None


def may_pass(error: BaseException) -> bool:
    """Whether a store that did not answer may do so later by itself. One that refuses, is not there or is full does not."""
    error = _cause(error)
    if (status := status_of(error)) is not None:
        return status in _BUSY or (status >= 500 and status != HTTPStatus.INSUFFICIENT_STORAGE)
    return not isinstance(error, FileNotFoundError | PermissionError) and "Credential" not in type(error).__name__


def is_full(error: BaseException) -> bool:
    """Whether a store has no space left, or the account none: 507, and of Ceph and others a 403 or 400 with such words."""
    status = status_of(error)
    if status not in (HTTPStatus.BAD_REQUEST, HTTPStatus.FORBIDDEN):
        return status == HTTPStatus.INSUFFICIENT_STORAGE
    said = str(error.__cause__ or error)
    return re.search(r"quota ?exceeded|exceeded\b.*\bquota|storage ?full", said, re.IGNORECASE) is not None


def _cause(error: BaseException) -> BaseException:
    """fsspec says "not found" of whatever a web server answers."""
    return error.__cause__ if isinstance(error, FileNotFoundError) and error.__cause__ is not None else error


def refusal(address: str, error: BaseException) -> tuple[str, str]:
    """Why a store of files did not answer, and what to do about it, as phrases. Texts of the libraries may hold the address
    with its signature, or be pages long.
    """
    error = _cause(error)
    scheme, status, kind = _scheme(address), status_of(error), type(error).__name__
    if isinstance(error, FileNotFoundError) or status in (404, 410):
        return "it is not there", "check the address"
    if is_full(error):
        return "it is full", "free space there"
    if isinstance(error, PermissionError) or status in (401, 403) or "Credential" in kind:
        why = "no credentials were found" if "NoCredential" in kind or "DefaultCredential" in kind else "access is refused"
        return why, _CREDENTIALS[scheme.replace("http", "https")[:5]]
    if _is_busy(error):
        said = f"it answers {status} again and again" if status else f"it does not answer, {kind}"
        said = str(error) if isinstance(error, _Stalled) else said
        return said, "run the command again to resume"
    said = re.sub(r"[?]\S*", "", without_passwords(shown(line_of(error), 200)))
    return f"answer {status}" if status else f"{kind}: {said}", "check the address, or copy the file here"


def _refuse(address: str, error: BaseException) -> NoReturn:
    name, error = shown(address, 300), _cause(error)
    if type(error).__name__ == "RepositoryNotFoundError":
        # To strangers the Hub says no more of what is private.
        raise ConfigError(f"{name} is not there, or is private: check its name, or set HF_TOKEN.") from None
    why, fix = refusal(address, error)
    if why == "it is not there":
        raise ConfigError(f"{name} is not there: {fix}.") from None
    raise ConfigError(f"{name} cannot be read ({why}): {fix}.") from None
