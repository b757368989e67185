"""Models in a store, s3:// or gs://, as folders of this host: copied once, verified, and used as long as the objects stay.

    s3://bucket/mine         a folder of Hugging Face (config.json and *.safetensors), or one of jaxllm (model.json)
    s3://bucket/first        a run's checkpoint.store: its newest intact checkpoint
    s3://bucket/first/400    one of its checkpoints

    CACHE/mine-0123456789abcdef/     its name, and a hash of the address and of each object's name, size and version
    CACHE/first-0123456789abcdef/    a run directory with one checkpoint

The folder gets its name when it is whole. Objects that change have another hash, so that a process never sees its model change.
"""

import json
import logging
import re
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Any

from jaxllm.checkpoint.files import FILES, META, STATE, by_step, changed, damage, differs
from jaxllm.checkpoint.store import Store, unusable
from jaxllm.checkpoint.stored_checkpoints import RUN
from jaxllm.cluster import distributed
from jaxllm.config import Config, ConfigError
from jaxllm.config.hf_config import CONFIG, MODEL, TOKENIZER
from jaxllm.config.hub import pin, stays
from jaxllm.config.load import read_recipe
from jaxllm.data.cached import copy_name, is_copy, locked, write_blocks
from jaxllm.data.manifest import placing, remove_leftovers, writing
from jaxllm.data.parts import InputFile
from jaxllm.data.stores import blocks, files_below, is_address, require_unchanged
from jaxllm.terminal import bytes_bar
from jaxllm.untrusted import MIB, RefusedInput, checked, parse_json, shown
from jaxllm.weights.folder import INDEX
from jaxllm.weights.staging import BESIDE, OF_TOKENIZER

Files = Mapping[str, InputFile]
OF_MODEL = {
    MODEL: (MODEL, "*.safetensors", f"{TOKENIZER}/*"),
    CONFIG: (*BESIDE, *OF_TOKENIZER, "additional_chat_templates/*", INDEX, "*.safetensors"),
}
"""By the file that makes a folder a model: patterns of what is copied."""
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
    try:
        folder, size = distributed.cache_folder() / "models", sum(file.size for file in wanted.values())
    except RuntimeError:
        # A user without a home, as in containers.
        raise ConfigError(f"There is no home folder to copy the model of {key} to: set XDG_CACHE_HOME to a folder.") from None
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
    visible = distributed.is_main_process()
    with bytes_bar(f"from {address}", size, visible) as advance, ThreadPoolExecutor(FILES_AT_ONCE) as pool:

        def copy(name: str) -> None:
            (aside / name).parent.mkdir(parents=True, exist_ok=True)
            write_blocks(aside / name, blocks(wanted[name]), advance)
            require_unchanged(wanted[name])

        list(pool.map(copy, wanted))


# ----------------------------------------------------------------------------------------------------------- pinned names
# What a run began with, for good: the commits of names of the Hub, and the step of a run in a store.
#
# Process 0 asks, once for a run, and all take its answer. The run's config holds it. A start that resumes reads it there: in
# run.dir, or where process 0 has none in the newest checkpoint of the store.

META_BYTES = 16 * MIB
PINNED = (("train", "init_from"), ("data", "tokenizer"))


def with_commits(config: Config) -> Config:
    """The config with the commits of names of the Hub in train.init_from and data.tokenizer, and with the step of a run in a
    store: those of the run if it began with the same names, else those of now. All processes that have met call it together.

    Raises:
      ConfigError: on all processes, if the Hub or the store has no such name or does not give it.
    """
    found = distributed.from_main(lambda: _pins(config))
    return config.model_copy(update={key: getattr(config, key).model_copy(update=pins) for key, pins in found.items()})


def _pins(config: Config) -> dict[str, dict[str, str]]:
    """{section: {key: name for good}} of what is set."""
    named = {(section, key): text for section, key in PINNED if (text := getattr(getattr(config, section), key)) is not None}
    if not named:
        return {}
    run_dir, ran = Path(config.run.dir), _config_of_run(config)
    found: dict[str, dict[str, str]] = {}
    for (section, key), text in named.items():
        before, name = ran.get(section), f"{section}.{key}"
        old = before.get(key) if isinstance(before, Mapping) else None
        # What `copied` says of a run at this address.
        a_checkpoint = re.escape(text.rstrip("/")) + r"/\d+"
        # The name that the run stored may be of a folder that is gone, which a resumed run does not read.
        if isinstance(old, str) and (old == text or re.fullmatch(a_checkpoint, old) or stays(name, text, old, run_dir)):
            pinned = old
        else:
            pinned = copied(name, text)[1] if key == "init_from" and is_address(text) else pin(name, text)
        found.setdefault(section, {})[key] = pinned
    return found


def _config_of_run(config: Config) -> Mapping[str, Any]:
    """As it ran so far; {} if it begins now."""
    if (path := Path(config.run.dir) / "config.yaml").is_file():
        return read_recipe(path)
    if (address := config.checkpoint.store) is None:
        return {}
    store = Store(address)
    try:
        for step in reversed(store.committed()):
            with suppress(FileNotFoundError, RefusedInput):
                meta = parse_json(store.read(f"{step}/{META}/metadata", META_BYTES), META_BYTES, finite=False)
                return checked(checked(meta, dict[str, Any]).get("config"), dict[str, Any])
    except OSError as error:
        raise unusable(address, error) from None
    return {}
