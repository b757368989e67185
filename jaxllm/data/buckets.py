"""Buckets of S3 and Google by obstore: servers, credentials, and errors.

obstore reads the variables of AWS and Google: https://developmentseed.org/obstore/latest/authentication/. What else the
libraries of AWS, Google and fsspec read is applied here or refused by name: ~/.aws, AWS_PROFILE, AWS_CA_BUNDLE,
CLOUDSDK_CONFIG, STORAGE_EMULATOR_HOST, FSSPEC_S3 and FSSPEC_GS.
"""

import atexit
import configparser
import json
import os
import re
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from jaxllm.config.errors import ConfigError
from jaxllm.untrusted import shown

T = TypeVar("T")
BUCKETS = ("s3", "gs")
CREDENTIALS = {
    "s3": "set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; for a public bucket AWS_SKIP_SIGNATURE=true",
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS, or run `gcloud auth application-default login`; for a public bucket "
    "GOOGLE_SKIP_SIGNATURE=true",
    "hf": "set HF_TOKEN, or run `hf auth login`, and accept the terms of the dataset on its page",
    "https": "give an address that is signed, or copy the file here",
}
TRIES, FIRST_WAIT_S = 5, 1.0
"""Requests to a bucket or web server until one is answered: after 5xx, 408, 429, and connections that break off. The wait about
doubles each time. huggingface_hub asks again for half a minute by itself."""
STALL_S = 120.0
"""Seconds without a byte, after which a request is asked again."""
_OF_FSSPEC = {
    "s3": {"anon": "skip_signature", "requester_pays": "request_payer", "region_name": "region"}
    | {"key": "aws_access_key_id", "secret": "aws_secret_access_key", "token": "aws_session_token"},
    "gcs": {"endpoint_url": "base_url", "token": "application_credentials"},
}
"""Options of s3fs and gcsfs, and obstore's. obstore refuses others by name."""
_SERVERS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
_SERVER_KEYS = {"endpoint_url", "services", "use_accelerate_endpoint", "use_dualstack_endpoint", "use_fips_endpoint"}
_NOT_READ = {"role_arn", "sso_session", "sso_start_url", "login_session", "credential_process"}


@lru_cache
def open_bucket(address: str) -> Any:
    """obstore's store of the objects below s3://BUCKET[/PREFIX] or gs://BUCKET[/PREFIX]. Raises ConfigError if a library is not
    installed, or the address or a setting is wrong.
    """
    scheme, _, place = address.partition("://")
    name, _, prefix = place.partition("/")
    try:
        from obstore import exceptions, store
    except ImportError:
        raise ConfigError(f"{scheme}:// needs obstore: pip install 'jaxllm[stores]'.") from None
    # A server without encryption is one that the user names. An object may take long, if it only moves.
    client: Any = {"allow_http": True, "timeout": timedelta(days=1), "read_timeout": timedelta(seconds=STALL_S)}
    try:
        kind, settings = (store.S3Store, _s3_settings()) if scheme == "s3" else (store.GCSStore, _gs_settings())
        if bundle := settings.pop("ca_bundle", None) or (scheme == "s3" and os.getenv("AWS_CA_BUNDLE")):
            client["root_certificate"] = Path(bundle).read_bytes()
        for server in filter(None, (settings.get("endpoint_url"), settings.get("base_url"), *map(os.getenv, _SERVERS))):
            if not re.fullmatch(r"https?://[\w.:\[\]-]+(/\S*)?", server):
                # The first request would end in a panic.
                raise ValueError(f"{shown(server)} is no plain https://HOST")
        retries: Any = {"max_retries": TRIES - 1, "backoff": {"init_backoff": timedelta(seconds=FIRST_WAIT_S)}}
        # Python (3.13) aborts if a thread of obstore's, which may still put the last answer away, needs it while it ends.
        atexit.register(time.sleep, 0.1)
        return kind(name, prefix=prefix or None, client_options=client, retry_config=retries, **settings)
    except ConfigError:
        raise
    except (exceptions.BaseError, configparser.Error, OSError, ValueError, TypeError) as error:
        # A line of ~/.aws may be a key.
        said = f"{error.source} has a line that sets nothing" if isinstance(error, configparser.ParsingError) else _words(error)
        why = f"{shown(address)} cannot be opened ({shown(said, 200)})"
        raise ConfigError(f"{why}: correct the address, or the variable or file that says so.") from None


def bucket_and_name(address: str) -> tuple[Any, str]:
    """The bucket of an address, and the name of the object in it. Raises ConfigError as `open_bucket` does."""
    scheme, _, place = address.partition("://")
    bucket, _, name = place.partition("/")
    return open_bucket(f"{scheme.lower()}://{bucket}"), name


def _s3_settings() -> dict[str, Any]:
    # All servers that speak S3 know a request for one object.
    given = {"disable_bulk_delete": True, **_of_fsspec("s3", "s3a")}
    chosen = given.pop("profile", None)
    profile = _profile(chosen or os.getenv("AWS_PROFILE") or os.getenv("AWS_DEFAULT_PROFILE"))
    profile |= re.findall(r"(use_\w+) *= *(\S+)", profile.get("s3", ""))
    profile |= {key: value for key in _SERVER_KEYS if (value := os.getenv(f"AWS_{key.upper()}"))}
    unless = {("AWS_CA_BUNDLE",): {"ca_bundle"}, ("AWS_REGION", "AWS_DEFAULT_REGION"): {"region"}, _SERVERS: _SERVER_KEYS}
    wanted = {key for variables, keys in unless.items() if not any(map(os.getenv, variables)) for key in keys}
    others = any(map(os.getenv, ("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_SKIP_SIGNATURE")))
    if (chosen or not others) and not (given.get("aws_access_key_id") or given.get("skip_signature")):
        wanted |= {"aws_access_key_id", "aws_secret_access_key", "aws_session_token", *_NOT_READ}
    found = {key: value for key, value in profile.items() if key in wanted and value.lower() != "false"}
    if unread := sorted((_SERVER_KEYS - {"endpoint_url"} | _NOT_READ) & found.keys()):
        raise ConfigError(
            f"What is set for s3:// has {unread[0]}, which jaxllm does not follow: set AWS_ENDPOINT_URL_S3 to the server, "
            'and the keys by `eval "$(aws configure export-credentials --format env)"`.'
        )
    settings = found | given
    if os.getenv("AWS_SESSION_TOKEN") and "aws_access_key_id" in settings and "aws_session_token" not in settings:
        # The token of the variable is of other keys: obstore would send it with these.
        keys = {name: settings.pop(f"aws_{name}", "") for name in ("access_key_id", "secret_access_key")}
        settings["credential_provider"] = lambda: {**keys, "expires_at": None}
    return settings


def _profile(name: str | None) -> dict[str, str]:
    """What ~/.aws says of a profile; None is `default`, which may not be there."""
    files = (("AWS_CONFIG_FILE", "config"), ("AWS_SHARED_CREDENTIALS_FILE", "credentials"))
    parser = configparser.RawConfigParser(strict=False)
    parser.read(Path(os.getenv(variable) or f"~/.aws/{file}").expanduser() for variable, file in files)
    sections = filter(parser.has_section, (f"profile {name or 'default'}", name or "default"))
    found = {key: value for section in sections for key, value in parser[section].items()}
    if name and not found:
        raise ConfigError(f"The profile {shown(name)} is not in ~/.aws: {CREDENTIALS['s3']}.")
    return found


def _gs_settings() -> dict[str, Any]:
    given = _of_fsspec("gcs", "gs")
    if server := os.getenv("STORAGE_EMULATOR_HOST"):
        # Without a token obstore asks Google's servers for one before it writes.
        anybody = {"credential_provider": lambda: {"token": "none", "expires_at": None}}
        given = {"base_url": server if "://" in server else f"http://{server}"} | given | anybody
    login = Path(os.getenv("CLOUDSDK_CONFIG") or "~/.config/gcloud").expanduser() / "application_default_credentials.json"
    if login.is_file() and not os.getenv("GOOGLE_APPLICATION_CREDENTIALS"):
        given.setdefault("application_credentials", str(login))
    token = given.get("application_credentials")
    if token in ("anon", "google_default"):
        given["skip_signature"] = given.pop("application_credentials") == "anon"
    elif isinstance(token, dict):
        given["service_account_key"] = json.dumps(given.pop("application_credentials"))
    return given


def _of_fsspec(*protocols: str) -> dict[str, Any]:
    """What FSSPEC_S3 or FSSPEC_GS, and fsspec's files of settings, say to s3fs or gcsfs."""
    from fsspec.config import conf

    given: dict[str, Any] = {key: value for one in protocols for key, value in conf.get(one, {}).items()}
    given |= given.pop("client_kwargs", {})
    return {_OF_FSSPEC[protocols[0]].get(key, key): value for key, value in given.items() if value is not None}


def answer(request: Callable[[], Awaitable[T]]) -> T:
    """As `asked`, from any thread. Who waits can be interrupted."""
    from fsspec.asyn import get_loop, sync

    return sync(get_loop(), asked, request)  # type: ignore[return-value]


async def asked(request: Callable[[], Awaitable[T]]) -> T:
    """The answer of a bucket. Raises FileNotFoundError, FileExistsError, PermissionError, ConnectionError where the cause may
    pass by itself, and else ValueError, with the reason as a phrase."""
    from obstore import exceptions

    try:
        return await request()
    except (exceptions.AlreadyExistsError, exceptions.PreconditionError) as error:
        raise FileExistsError(_words(error)) from error
    except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError) as error:
        raise PermissionError("access is refused") from error
    except exceptions.InvalidPathError as error:
        raise ValueError(_words(error)) from error
    except exceptions.BaseError as error:
        if re.search(r"/latest/(api/token|meta-data)|/computeMetadata/", _words(error)):
            raise PermissionError("no credentials were found") from error
        if re.search("<Code>(ExpiredToken|InvalidToken)<", _words(error)):
            raise PermissionError("the session token has expired") from error
        # What a server sends beside the status may repeat the token.
        said = re.split("[<{]", _words(error))[0].rpartition(" - ")[2].rstrip(": ")
        lasts = re.search(r"code: (4(?!08|29)|501)|redirect", said) and "RequestTimeout" not in _words(error)
        raise (ValueError if lasts else ConnectionError)(said) from error


async def listed(bucket: Any, folder: str = "", deep: bool = True) -> list[dict[str, Any]]:
    """path, size and e_tag of all objects below a folder, by path; with `deep` false of those in it. Raises FileNotFoundError
    if the bucket is not there, and obstore's errors.
    """
    from obstore.exceptions import GenericError

    below = folder.strip("/") or None
    try:
        found = await bucket.list(below).collect_async() if deep else (await bucket.list_with_delimiter_async(below))["objects"]
    except GenericError as error:
        if "NoSuchBucket" in str(error):
            raise FileNotFoundError("the bucket is not there") from error
        # Errors of a request for one object alone have types.
        with suppress(FileNotFoundError, GenericError):
            await bucket.head_async("listed")
        raise

    async def is_object(name: str) -> bool:
        with suppress(FileNotFoundError):
            return bool(await bucket.head_async(name))
        return False

    # Consoles mark a folder by an empty object, from whose name obstore takes the slash at the end.
    return sorted([one for one in found if one["size"] or await is_object(one["path"])], key=lambda one: one["path"])


def _words(error: BaseException) -> str:
    """The text of an error on one line, without the dump of its fields."""
    return " ".join(str(error).partition("\n\nDebug source")[0].split())
