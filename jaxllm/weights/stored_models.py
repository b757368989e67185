"""Models in a store, s3:// or gs://, as folders of this host: copied once, verified, and used as long as the objects stay.

    s3://bucket/mine         a folder of Hugging Face (config.json and *.safetensors), or one of jaxllm (model.json)
    s3://bucket/first        a run's checkpoint.store: its newest intact checkpoint
    s3://bucket/first/400    one of its checkpoints

    CACHE/mine-0123456789abcdef/     its name, and a hash of the address and of each object's name, size and version
    CACHE/first-0123456789abcdef/    a run directory with one checkpoint

The folder gets its name when it is whole. Objects that change have another hash, so that a process never sees its model change.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath

from jaxllm.checkpoint.checksums import changed
from jaxllm.checkpoint.files import FILES, META, STATE, by_step, damage, differs
from jaxllm.checkpoint.stored_checkpoints import RUN
from jaxllm.cluster import distributed
from jaxllm.config import ConfigError
from jaxllm.config.hf_config import CONFIG, MODEL, TOKENIZER
from jaxllm.data.cached import copy_name, is_copy, locked, write_blocks
from jaxllm.data.parts import InputFile
from jaxllm.data.shards import placing, remove_leftovers, writing
from jaxllm.data.stores import blocks, files_below, require_unchanged
from jaxllm.stderr import bytes_bar
from jaxllm.untrusted import shown
from jaxllm.weights.folder import INDEX
from jaxllm.weights.staging import BESIDE, OF_TOKENIZER

Files = Mapping[str, InputFile]
OF_MODEL = {
    MODEL: (MODEL, "*.safetensors", f"{TOKENIZER}/*", "weights/*"),
    CONFIG: (*BESIDE, *OF_TOKENIZER, "additional_chat_templates/*", INDEX, "*.safetensors"),
}
"""By the file that makes a folder a model: patterns of what is copied. The weights/ of format 1 are Orbax's."""
OTHER_FORMATS = "consolidated*"
FILES_AT_ONCE = 4

log = logging.getLogger(__name__)


class DamagedCopy(Exception):
    """Why a checkpoint that was copied is damaged."""


def copied(key: str, address: str, step: int | None = None) -> tuple[Path, str]:
    """The local copy of the model at an address, and the address that names it for good: of a run, that of the checkpoint.

    Args:
      key: the option or key that the user set to `address`, for error messages.
      step: the checkpoint of a run; default: the newest intact one.

    Raises:
      ConfigError: there is no model, the store does not give it, it is damaged, or the cache cannot be written.
    """
    if not re.fullmatch(r"(s3|gs)://[^/*?#\[\]]+(/[^*?#\[\]]*)?", address):
        raise ConfigError(
            f"{key}={shown(address)} is not the address of a model: write s3://BUCKET/FOLDER or gs://BUCKET/FOLDER, or "
            f"ORG/NAME for one of the Hub."
        )
    address = address.rstrip("/")
    files, name = files_below(address), address.rpartition("/")[2]
    marker = next((marker for marker in OF_MODEL if marker in files), None)
    steps = {one: inner for one, inner in by_step(files).items() if FILES in inner}
    if step is not None and not steps:
        raise ConfigError(f"--step={step} selects a checkpoint of a run, and {address} is not a run: leave it out.")
    if marker is not None:
        return _kept(key, address, name, {one: files[one] for one in files if _is_part(one, OF_MODEL[marker])}), address
    if FILES in files:
        try:
            return _checkpoint(key, address, name, files, name) / "checkpoints" / name, address
        except DamagedCopy as error:
            raise ConfigError(f"{key}={address} is damaged ({error}): give another checkpoint.") from None
    if step is not None and step not in steps:
        raise ConfigError(f"{key}={address} has no checkpoint of step {step}: it has {', '.join(map(str, steps))}.")
    damaged = {}
    for found in [step] if step is not None else sorted(steps, reverse=True):
        try:
            return _checkpoint(key, f"{address}/{found}", name, steps[found], str(found)), f"{address}/{found}"
        except DamagedCopy as error:
            damaged[found] = error
            log.warning("The checkpoint %s/%d is damaged (%s): it is not used.", address, found, error)
    if damaged:
        listed = ", ".join(f"{one} ({reason})" for one, reason in damaged.items())
        raise ConfigError(f"{key}: no checkpoint in {address} is intact: {listed}; give another.")
    raise ConfigError(
        f"{key}={address} holds no model: there is neither {CONFIG} (Hugging Face) nor {MODEL} (jaxllm) nor STEP/{FILES} (a "
        f"run's checkpoint.store) below it" + ("." if files else ", nor anything else.")
    )


def names_same_run(address: str, pinned: str) -> bool:
    """Whether the second is what `copied` says of a run at the first address."""
    return re.fullmatch(re.escape(address.rstrip("/")) + r"/\d+", pinned) is not None


def _is_part(name: str, patterns: tuple[str, ...]) -> bool:
    """Whether a folder's file is copied. A * of these patterns stands for more than one name only behind a slash."""
    return not fnmatch(name, OTHER_FORMATS) and any(
        fnmatch(name, pattern) and ("/" in pattern or "/" not in name) for pattern in patterns
    )


def _checkpoint(key: str, address: str, name: str, files: Files, step: str) -> Path:
    """A run directory with one checkpoint. Raises DamagedCopy."""
    at, companions = f"checkpoints/{step}", (f"{RUN}/config.yaml", f"{RUN}/{TOKENIZER}/")
    wanted = {f"{at}/{one}": file for one, file in files.items() if one == FILES or one.startswith((f"{STATE}/", f"{META}/"))}
    wanted |= {one.removeprefix(f"{RUN}/"): file for one, file in files.items() if one.startswith(companions)}
    sizes = {one: file.size for one, file in files.items()}

    def damaged(home: Path) -> str | None:
        return differs(home / at, sizes) or damage(home / at) or changed(home / at)

    return _kept(key, address, name, wanted, damaged)


def _kept(key: str, address: str, name: str, wanted: Files, damaged: Callable[[Path], str | None] = lambda home: None) -> Path:
    """The folder of these files in the cache, copied if it is not there. Raises DamagedCopy for what `damaged` says."""
    for one in wanted:
        if not set(PurePosixPath(one).parts).isdisjoint(("..", "/")) or "\\" in one or "\0" in one:
            raise ConfigError(f"{key}={address} holds {shown(one)}, which is no name of a file: remove it.")
    described = json.dumps([address, sorted((one, file.size, file.version) for one, file in wanted.items())])
    folder, size = _cache(key), sum(file.size for file in wanted.values())
    home = folder / copy_name(re.sub(r"[^A-Za-z0-9_.-]", "-", name), described.encode())

    def unwritable(reason: str) -> ConfigError:
        return ConfigError(
            f"{key}={address} cannot be stored in {folder} ({reason}): fix that, or set XDG_CACHE_HOME to another folder."
        )

    with writing(unwritable):
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder / f".{home.name}.lock", wait=True):
            if all(is_copy(home / one, file) for one, file in wanted.items()):
                return home
            remove_leftovers(folder, names=(home.name,))
            if (free := shutil.disk_usage(folder).free) < size:
                raise ConfigError(
                    f"{key}={address} needs {size / 1e9:.3g} GB, and the disk of {folder} has {free / 1e9:.3g} GB left: make "
                    f"room, or set XDG_CACHE_HOME to a folder of another disk."
                )
            with placing(folder, home.name) as aside:
                _copy(address, wanted, aside, size)
                if reason := damaged(aside):
                    raise DamagedCopy(reason)
    return home


def _copy(address: str, wanted: Files, aside: Path, size: int) -> None:
    with bytes_bar(f"from {address}", size) as advance, ThreadPoolExecutor(FILES_AT_ONCE) as pool:

        def copy(name: str) -> None:
            (aside / name).parent.mkdir(parents=True, exist_ok=True)
            write_blocks(aside / name, blocks(wanted[name]), advance)
            require_unchanged(wanted[name])

        aside.mkdir()
        list(pool.map(copy, wanted))


def _cache(key: str) -> Path:
    try:
        return distributed.cache_folder() / "models"
    except RuntimeError:
        # A user without a home, as in containers.
        raise ConfigError(f"There is no home folder to copy the model of {key} to: set XDG_CACHE_HOME to a folder.") from None
