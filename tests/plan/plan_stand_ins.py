"""Simple estimates for tests of the search, whose results can be checked by hand."""

from dataclasses import dataclass

from jaxllm.config import load_config
from jaxllm.cost_model.flops import parameter_count
from jaxllm.cost_model.hardware import GPUS
from jaxllm.cost_model.step_parts import StepTime

HELD = ("offload_state",)
"""Settings that these estimates do not know, to keep."""
KEPT = {"full": 1, "offload": 2, "selective": 6, "none": 12}
SPEED = {"full": 0.75, "offload": 0.9, "selective": 1.0, "none": 1.05}

SMALL = {
    "model": {
        "num_layers": 6,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_heads": 4,
        "num_kv_heads": 2,
        "vocab_size": 512,
    },
    "train": {"steps": 4, "sequence_length": 64, "global_batch_sequences": 16},
    "optimizer": {"learning_rate": 1e-3},
}


def small(*overrides):
    return load_config(SMALL, overrides)


def gpu_for(step_bytes, like="h100-80gb"):
    """A GPU with about that many bytes for a step."""
    import dataclasses

    from jaxllm.cost_model.hardware import RESERVE_BYTES, XLA_MEMORY_FRACTION

    memory = round((step_bytes + RESERVE_BYTES) / XLA_MEMORY_FRACTION) + 1
    return dataclasses.replace(GPUS[like], name="mine", memory_bytes=memory)


@dataclass(frozen=True)
class Memory:
    peak_bytes: int
    host_bytes: int = 0


@dataclass(frozen=True)
class Compiled:
    """What confirm() reads of a CompileReport."""

    total_bytes: int
    host_bytes: int
    exposed_transfers_s: float | None


def kept_by(mapping):
    actions = list({"block_input": "keep", **mapping}.values())
    return 0.6 * actions.count("keep") + 0.2 * actions.count("offload") + 0.4 * ("block_input" not in mapping)


def estimate(config):
    """State over the ranks that shard it, and activations of the microbatches in flight."""
    p, train = config.parallel, config.train
    parameters = parameter_count(config.model) / (p.pipe * p.tensor)
    shards = int(p.data) * p.context if p.zero else 1
    state = parameters * (2 / (shards if p.zero == 3 else 1) + 4 / (shards if p.zero >= 2 else 1) + 12 / shards)
    in_flight = config.num_microbatches if p.schedule == "gpipe" else min(config.num_microbatches, 2 * p.pipe - 1)
    tokens = config.microbatch_sequences * train.sequence_length / (p.context * p.tensor)
    kept = KEPT[p.remat] if isinstance(p.remat, str) else kept_by(p.remat)
    layers = config.chunk_layers * p.virtual_stages
    # Plus the microbatch in progress, so that larger ones need more under every schedule.
    return Memory(round(state + tokens * layers * config.model.hidden_size * 2 * kept * (in_flight + 1)))


def step_time(config, gpu, gpus_per_host):
    """Slower with every rank to communicate with, with bubbles, and with small microbatches."""
    p = config.parallel
    M = config.num_microbatches
    idle = (p.pipe - 1) / (M * p.virtual_stages + p.pipe - 1)
    talk = 1 + 0.05 * (p.tensor - 1) + 0.07 * (p.context - 1) + 0.02 * p.zero + 0.01 * (int(p.data) - 1)
    size = config.microbatch_sequences / (config.microbatch_sequences + 0.3)
    remat = SPEED[p.remat] if isinstance(p.remat, str) else 0.95
    speed = 1e4 * remat * size * (1 - idle) / talk
    gpus = p.pipe * int(p.data) * p.context * p.tensor
    step_s = config.step_tokens / (speed * gpus)
    return StepTime({"matmuls": step_s / talk, "data": step_s * (1 - 1 / talk)}, {}, speed, 100.0)
