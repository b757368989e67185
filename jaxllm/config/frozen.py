"""Which parameters a config trains: with model.lora only its adapters, else all that train.freeze does not name."""

from __future__ import annotations

import fnmatch
from functools import lru_cache
from typing import Any, cast

from jaxllm.config.errors import refuse
from jaxllm.config.model_config import ModelConfig
from jaxllm.config.model_spec import parameters
from jaxllm.config.sections import LogConfig, ParallelConfig, TrainConfig
from jaxllm.untrusted import shown


def frozen_parameters(model: ModelConfig, train: TrainConfig) -> frozenset[str]:
    """Paths of the parameters that are not trained."""
    # Type checkers do not know that a frozen model of pydantic is hashable.
    return _frozen(cast(Any, model), train.freeze)


@lru_cache(maxsize=64)
def _frozen(model: Any, patterns: tuple[str, ...]) -> frozenset[str]:
    if model.lora is not None:
        return frozenset(spec.path for spec in parameters(model) if not spec.is_lora)
    paths = [spec.path for spec in parameters(model)]
    return frozenset(path for pattern in patterns for path in _matching(paths, pattern))


def _matching(paths: list[str], pattern: str) -> list[str]:
    # All layers are one stack, so "layers.*.mlp.*" means layers.mlp.*; and a name alone means all below it.
    pattern = pattern.replace("layers.*.", "layers.", 1)
    return [path for path in paths if fnmatch.fnmatchcase(path, pattern) or path.startswith(pattern + ".")]


def check_frozen(model: ModelConfig, parallel: ParallelConfig, train: TrainConfig, log: LogConfig) -> None:
    """Raises if nothing would be trained, a pattern has no effect, or the config has what frozen parameters do not support."""
    if train.init_adapter is not None and model.lora is None:
        raise refuse("train.init_adapter has no effect without model.lora: set model.lora.rank, or leave it out.")
    if model.lora is not None and train.freeze:
        raise refuse("model.lora freezes all other parameters already: leave train.freeze out.")
    paths = [spec.path for spec in parameters(model)]
    for pattern in train.freeze:
        if not _matching(paths, pattern):
            raise refuse(
                f"train.freeze={shown(pattern)} is the name of no parameter: use patterns of {', '.join(paths)}. All layers "
                f"are one stack, so none can be frozen alone."
            )
    if not (frozen := frozen_parameters(model, train)):
        return
    if len(frozen) == len(paths):
        raise refuse("train.freeze leaves no parameter to train: remove one of its patterns.")
    what = "model.lora" if model.lora is not None else "train.freeze"
    unlike = {
        f"train.diloco_steps={train.diloco_steps}": train.diloco_steps is not None,
        f"parallel.offload_state={parallel.offload_state}": parallel.offload_state == "all"
        or (parallel.offload_state != "none" and not any(p.startswith("layers.") for p in set(paths) - frozen)),
        f"log.noise_scale_every={log.noise_scale_every}": log.noise_scale_every is not None and parallel.pipe > 1,
        "parallel.tensor_ring=true": model.lora is not None and parallel.tensor_ring is True,
    }
    if found := next((key for key, is_set in unlike.items() if is_set), None):
        raise refuse(f"{found} does not go together with {what}: leave one of them out.")
