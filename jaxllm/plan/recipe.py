"""The winner of a plan as a recipe for `jaxllm train`.

write_recipe(plan, "best.yaml", command="jaxllm plan ...")
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from jaxllm.config import Config, ConfigError, load_config
from jaxllm.cost_model.hardware import FIT_SHARE
from jaxllm.cost_model.hosts import hosts_text
from jaxllm.display import readable
from jaxllm.plan.plan_result import Plan


def recipe(config: Config) -> dict[str, Any]:
    """The set values by section: load_config(recipe(config)) == config. Sizes that follow from model.name are left out."""
    values = config.model_dump(mode="json", exclude_unset=True)
    name = config.model.name
    if name is not None:
        train = {"steps": 1, "sequence_length": 1, "global_batch_sequences": 1}
        published, model = load_config({"model": {"name": name}, "train": train}).model, values["model"]
        differs = {key for key in model if getattr(config.model, key) != getattr(published, key)}
        values["model"] = {key: value for key, value in model.items() if key == "name" or key in differs}
    return {section: keys for section, keys in values.items() if keys}


def check_new(path: str | Path) -> Path:
    """Checks that a file can be created there and returns its path.

    Raises:
      ConfigError: the file exists, or its folder does not.
    """
    path = Path(path)
    if path.exists():
        raise ConfigError(f"--out={path} exists already, and a plan never overwrites a file: choose another file.")
    if not path.parent.is_dir():
        raise ConfigError(f"--out={path}: the folder {path.parent} does not exist; create it, or choose another.")
    return path


def write_recipe(plan: Plan, path: str | Path, command: str) -> None:
    """Writes plan.best with a comment on its origin.

    Raises:
      ConfigError: nothing fits, or the file exists or cannot be written.
    """
    text = yaml.safe_dump(recipe(plan.best), sort_keys=False)
    heading = "".join(f"# {line}".rstrip() + "\n" for line in heading_lines(plan, Path(path), command))
    try:
        # Exclusive creation: another process may have created the file since the check.
        with check_new(path).open("x", encoding="utf-8") as file:
            file.write(heading + text)
    except OSError as error:
        raise ConfigError(f"--out={path} cannot be written ({error.strerror}): choose another file.") from None


def heading_lines(plan: Plan, path: Path, command: str) -> Iterator[str]:
    best = plan.candidates[0]
    how = "predicted" if best.scheduled_transfers_s is None else "predicted with the transfers of XLA's schedule"
    xla = "not compiled" if best.compiled_bytes is None else f"by XLA {readable(best.compiled_bytes)}"
    yield f"{plan.config.model.name or 'A model'}: {best.choice}."
    yield ""
    yield f"  command    jaxllm train {path}"
    yield f"  planned    {command}"
    yield f"  hardware   {plan.gpus} x {plan.gpu.name}, {hosts_text(plan.gpus, plan.gpus_per_host)}"
    yield (
        f"  memory     estimate {readable(best.estimate_bytes)} (at most {FIT_SHARE:.0%} of {readable(plan.capacity_bytes)}), "
        f"{xla}"
    )
    if (other := plan.without_host) is not None:
        yield f"  no host    {other.tokens_per_s_per_gpu:,.0f} tokens/s/GPU with nothing in the host's memory: {other.choice}"
    yield (
        f"  expect     {best.tokens_per_s_per_gpu:,.0f} tokens/s/GPU, {best.tflops_per_gpu:,.0f} TFLOP/s/GPU (causal), "
        f"{how}, not measured"
    )
