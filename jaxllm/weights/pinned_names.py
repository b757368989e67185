"""What a run began with, for good: the commits of names of the Hub, and the step of a run in a store.

Process 0 asks, once for a run, and all take its answer. The run's config holds it. A start that resumes reads it there: in
run.dir, or where process 0 has none in the newest checkpoint of the store.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax

from jaxllm.checkpoint.files import META, committed_steps
from jaxllm.checkpoint.store import Store, unusable
from jaxllm.cluster import distributed
from jaxllm.cluster.distributed import raise_together
from jaxllm.config import Config, ConfigError
from jaxllm.config.hub import pin, stays
from jaxllm.config.load import read_recipe
from jaxllm.data.stores import is_address
from jaxllm.untrusted import MIB, RefusedInput, checked, parse_json
from jaxllm.weights.stored_models import copied, names_same_run

META_BYTES = 16 * MIB
PINNED = (("train", "init_from"), ("data", "tokenizer"))


def with_commits(config: Config) -> Config:
    """The config with the commits of names of the Hub in train.init_from and data.tokenizer, and with the step of a run in a
    store: those of the run if it began with the same names, else those of now. All processes that have met call it together.

    Raises:
      ConfigError: on all processes, if the Hub or the store has no such name or does not give it.
    """
    if not jax.distributed.is_initialized():
        return _with(config, _pins(config))
    found, refusal = {}, None
    if distributed.is_main_process():
        try:
            found = _pins(config)
        except ConfigError as error:
            refusal = error
    raise_together(refusal)
    return _with(config, parse_json(distributed.broadcast(json.dumps(found))))


def _with(config: Config, pins: Mapping[str, Mapping[str, str]]) -> Config:
    sections = {section: getattr(config, section).model_copy(update=dict(values)) for section, values in pins.items()}
    return config.model_copy(update=sections)


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
        # The name that the run stored may be of a folder that is gone, which a resumed run does not read.
        if isinstance(old, str) and (old == text or names_same_run(text, old) or stays(name, text, old, run_dir)):
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
        for step in reversed(committed_steps(store.steps())):
            with suppress(FileNotFoundError, RefusedInput):
                meta = parse_json(store.read(f"{step}/{META}/metadata", META_BYTES), META_BYTES, finite=False)
                return checked(checked(meta, dict[str, Any]).get("config"), dict[str, Any])
    except OSError as error:
        raise unusable(address, error) from None
    return {}
