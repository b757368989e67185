"""Shrinks a config, so that its run trains on CPU devices of one machine in a fraction of a second a step.

    small = shrink(config, hosts=4, steps=40, folder=Path("..."))
    changes(config, small)                       # "model: num_layers 32 -> 4, ..."

Mesh, ZeRO level, pipeline schedule, remat, optimizer, DiLoCo and packing stay. Every size becomes the smallest that the mesh
splits in the same way: ragged pipelines, repeated key-value heads and windows that alternate stay what they are. No JAX.
"""

import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxllm.config import AUTO, Config, ConfigError, divisors, load_config, sequence_unit
from jaxllm.config.file_patterns import MOST_ENTRIES, Listing
from jaxllm.config.rounds import fragments_of
from jaxllm.untrusted import MIB, RefusedInput

MOST_DEVICES = 64
"""The sum over all hosts. Each CPU device of a process is a thread or two."""
MOST_VOCABULARY = 8192
MOST_TEXT_BYTES = 16 * MIB
"""Every process reads the text; a larger one would take most of each start."""
CHECKPOINT_STEPS = 5
PEER_TIMEOUT_S = 20
"""A frozen process is named after so long. Processes that share few cores may be silent for some seconds."""
SEQUENCE_TOKENS, HEAD_DIM, LEAST_WIDTH = 16, 8, 32
WORDS = ("law", "mesh", "ring", "axis", "shard", "gather", "tick", "stage")


def shrink(config: Config, hosts: int, steps: int, folder: Path) -> Config:
    """The shrunk config of a run of `steps` steps on `hosts` processes of as many CPU devices each.

    Args:
      folder: gets a text where the config's own is not read.

    Raises:
      ConfigError: the mesh does not divide over the hosts, or has more than MOST_DEVICES devices.
    """
    devices = count_devices(config, hosts)
    parallel = config.parallel
    data = devices // (parallel.replica * parallel.pipe * parallel.context * parallel.tensor)
    # Keys that were not set are left out: some have no effect together with others, and would be refused.
    values = config.model_dump(mode="json", exclude_unset=True)
    values["parallel"] = values.get("parallel", {}) | {"data": data}
    values["model"] |= _model(config)
    values["train"] |= _train(config, data, steps)
    tokens = config.train.steps * config.step_tokens
    share = steps * values["train"]["global_batch_sequences"] * values["train"]["sequence_length"] / tokens
    optimizer = values.get("optimizer", {})
    for key in {"warmup_tokens", "decay_tokens"} & optimizer.keys():
        optimizer[key] = optimizer[key] and math.ceil(optimizer[key] * share)
    values["data"] = values.get("data", {}) | {"held_out_fraction": 0.0}
    if not reads_own_text(config):
        values["model"]["vocab_size"] = 256
        left_out = ("source", "paths", "mixture", "tokenizer", "chat_template")
        kept = {key: value for key, value in values["data"].items() if key not in left_out}
        values["data"] = kept | {"source": "files", "paths": [str(_write_text(folder))]}
    # The hosts of a rehearsal are processes of one machine, which share its memory; and the store is the real run's.
    left_out = ("memory_", "store")
    checkpoint = {key: value for key, value in values.get("checkpoint", {}).items() if not key.startswith(left_out)}
    every = min(config.checkpoint.every_steps or CHECKPOINT_STEPS, CHECKPOINT_STEPS)
    values["checkpoint"] = checkpoint | {"every_steps": every}
    values["log"] = {"every_steps": 1}
    # Every host returns.
    values.pop("launch", None)
    peer_timeout_s = min(config.run.peer_timeout_s, PEER_TIMEOUT_S)
    values["run"] = values.get("run", {}) | {"cpu_devices": devices // hosts, "peer_timeout_s": peer_timeout_s}
    return load_config(values)


def count_devices(config: Config, hosts: int) -> int:
    """Devices of the rehearsal, all hosts together. With parallel.data=auto they are run.cpu_devices, or where these do not
    divide over mesh and hosts, as few as do. Errors are those of shrink()."""
    parallel = config.parallel
    others = parallel.replica * parallel.pipe * parallel.context * parallel.tensor
    is_auto = parallel.data == AUTO
    least, given = math.lcm(others, hosts), config.run.cpu_devices
    devices = (least if given is None or given % least else given) if is_auto else others * int(parallel.data)
    if devices % hosts:
        choices = [count for count in divisors(devices) if 1 < count <= MOST_DEVICES]
        hint = f"use one of {choices}, or other axes" if choices else "make an axis larger"
        raise ConfigError(f"--hosts={hosts} does not divide the {devices} devices of the config's mesh: {hint}.")
    if devices > MOST_DEVICES:
        hint = "use fewer --hosts" if is_auto and others <= MOST_DEVICES else "make an axis smaller, such as parallel.data"
        raise ConfigError(f"The mesh has {devices} devices, and a rehearsal at most {MOST_DEVICES}: {hint}.")
    return devices


def changes(config: Config, small: Config) -> Iterator[str]:
    """A line for each section, with the keys whose values differ."""
    before, after = (one.model_dump(mode="json") for one in (config, small))
    for section in after:
        differing = [key for key, value in after[section].items() if value != before[section][key]]
        if differing:
            yield f"{section}: " + ", ".join(f"{key} {before[section][key]} -> {after[section][key]}" for key in differing)


def reads_own_text(config: Config) -> bool:
    """Whether the rehearsal reads the data that the config names: it is here, small, and of few token ids."""
    if config.model.vocab_size > MOST_VOCABULARY or config.train.loss == "dpo":
        return False
    patterns = [pattern for part in config.data.sources for pattern in part.paths]
    try:
        found = [file for pattern in patterns for file in Listing(MOST_ENTRIES).files(_with_parts(pattern))]
    except RefusedInput:
        return False
    return bool(found) and sum(Path(file).stat().st_size for file in found) <= MOST_TEXT_BYTES


def _with_parts(pattern: str) -> str:
    """The files of a prepared folder, or of Megatron-LM's path without its endings."""
    if Path(pattern).is_dir():
        return f"{pattern}/**"
    return pattern if Path(pattern).is_file() or any(mark in pattern for mark in "*?[") else f"{pattern}*"


def _write_text(folder: Path) -> Path:
    """Made-up words, always the same, as 32 documents; returns their pattern."""
    chance = random.Random(0)
    (folder / "text").mkdir(parents=True, exist_ok=True)
    for number in range(32):
        (folder / "text" / f"{number}.txt").write_text(" ".join(chance.choices(WORDS, k=500)))
    return folder / "text" / "*.txt"


def _model(config: Config) -> dict[str, Any]:
    model, parallel, S = config.model, config.parallel, config.train.sequence_length
    t, chunks = parallel.tensor, parallel.pipe * parallel.virtual_stages
    kv_heads = min(model.num_kv_heads, 2) if t == 1 else min(model.num_kv_heads, t)
    heads = kv_heads if model.num_heads == model.num_kv_heads else 2 * max(kv_heads, t)
    width = max(heads * HEAD_DIM, LEAST_WIDTH)
    values: dict[str, Any] = {"name": None, "num_heads": heads, "num_kv_heads": kv_heads, "head_dim": HEAD_DIM}
    values |= {"hidden_size": width, "intermediate_size": math.lcm(2 * width, t)}
    values |= {"compute_dtype": "float32", "matmul_dtype": "compute_dtype", "attention": "xla"}
    if model.sliding_window is not None and model.sliding_window < S:
        values["sliding_window"] = max(1, min(model.sliding_window, _sequence_length(config) // 2))
    # Windows alternate in each chunk, DiLoCo may cut it, and a last chunk with fewer layers than the others stays one.
    of_some = {key for key in ("full_attention_every", "no_rope_every") if getattr(model, key) is not None}
    alternates, is_ragged = bool(of_some), model.num_layers % chunks > 0
    needs_two = chunks == 1 or alternates or is_ragged or fragments_of(config) > 1
    each = 4 if alternates and model.full_attention_first else 2 if needs_two else 1
    if (layers := each * chunks - is_ragged) < model.num_layers:
        values["num_layers"] = layers
        values |= dict.fromkeys(of_some, 2)
        if model.full_attention_first:
            values["full_attention_first"] = 1
    return values


def _sequence_length(config: Config) -> int:
    unit = sequence_unit(config.parallel.context, config.parallel.tensor)
    return min(config.train.sequence_length, math.ceil(SEQUENCE_TOKENS / unit) * unit)


def _train(config: Config, data: int, steps: int) -> dict[str, Any]:
    train, parallel = config.train, config.parallel
    S, ranks = _sequence_length(config), parallel.replica * data
    microbatches = 1
    if train.microbatch_sequences is not None:
        microbatches = max(1, train.global_batch_sequences // (ranks * train.microbatch_sequences))
    microbatches = min(microbatches, 2 * parallel.pipe)
    if parallel.virtual_stages > 1:
        microbatches = math.ceil(microbatches / parallel.pipe) * parallel.pipe
    batch = ranks * microbatches
    values: dict[str, Any] = dict.fromkeys(("init_from", "init_adapter", "eval_every_steps", "eval_batches", "batch_grows_to"))
    values |= {"steps": steps, "sequence_length": S, "global_batch_sequences": batch, "microbatch_sequences": 1}
    values |= {"loss": "cross_entropy", "length_schedule": ()}
    if train.batch_schedule:
        # As many batch sizes, each for as many steps.
        stage = max(1, steps // (len(train.batch_schedule) + 1))
        schedule, tokens, current = [], 0, batch
        for _, sequences in train.batch_schedule:
            tokens += stage * current * S
            current = batch * min(4, max(1, round(sequences / train.global_batch_sequences)))
            schedule.append([tokens, current])
        values["batch_schedule"] = schedule
    else:
        values["batch_lr"] = "none"
    if train.diloco_steps is not None:
        # The shrunk model may have two layers in a chunk.
        fragments, steps = min(train.diloco_fragments, 2), min(train.diloco_steps, 4)
        values |= {"diloco_fragments": fragments, "diloco_steps": steps // fragments * fragments}
        values |= {"diloco_after_steps": min(train.diloco_after_steps, 4)}
    return values
