"""How far predicted speeds may be off: ranges from published runs that were left out of the fit.

    found = error_range(config, GPUS["h100-80gb"], gpus_per_host=8)
    found.of(tokens_per_s)                     (low, high)
    found.beyond                               ("4,096 GPUs, beyond the 2,048 of the data",)

Two errors add up. The layout's: the constants of Megatron's convention were fitted to one table of published runs but for one
group (larger clusters, longer sequences, another kind of host), and predicted that group. LAYOUT_ERRORS is what holds HELD of
its rows, by kind of layout (`python benchmarks/step_time.py --ranges`). It alone decides between two layouts on one machine.
The program's: PUBLISHED was fitted to all published programs of jaxllm's kind but for one project's, and predicted those
(benchmarks/published_speeds.py). PROGRAM_ERRORS, wider for attention and narrow layers, hold HELD of the rows of every kind of
GPU. jaxllm itself has run on one H100 alone: there the range is what holds its own steps (ONE_GPU_ERROR).
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jaxllm.config import Config
from jaxllm.config.attention import AMPERE, HOPPER, takes_cudnn, window_shares
from jaxllm.config.layer_stack import has_own_layers
from jaxllm.config.model_spec import has_experts
from jaxllm.config.remat_policy import policy_of
from jaxllm.cost_model.flops import attention_flops_per_token, train_flops_per_token
from jaxllm.cost_model.hardware import Gpu
from jaxllm.cost_model.network import group_of

HELD = 0.8
"""Share of runs that a range should hold."""
LAYOUT_ERRORS: Mapping[str, float] = {
    "plain": 0.048,
    "pipeline": 0.056,
    "context": 0.099,
    "pipeline and context": 0.147,
    # Its left-out rows are within 0.053, but they wait for attention masks and not for the ring: taken as twice `context`.
    "context across hosts": 0.198,
}
"""Kind of layout -> largest absolute log(measured / predicted) of HELD of its rows in the group that is predicted worst."""
PROGRAM_ERRORS: Mapping[str, Mapping[str, tuple[float, float]]] = {
    "jaxllm": {"bf16": (0.20, 0.25), "fp8": (0.40, 0.40)},
    "megatron": {"bf16": (0.287, 0.287), "fp8": (0.377, 0.377)},
}
"""Convention -> precision of the matmuls -> log(predicted / low), log(high / predicted)."""
ATTENTION_ERROR = 0.8
"""By which the former is larger, for each share of the model FLOPs that attention has: jaxllm's own was not measured on several
GPUs, and kernels and rings of other programs differ by a factor of two."""
NARROW_ERROR, NARROW = 0.4, 2048
"""The same for layers below this width, whose short kernels the programs differ in."""
EXPERTS_ERROR = 0.4
"""The same both ways for mixtures. A guess: the two steps of a mixture that a GPU ran are 10 to 15% slower than predicted, and
no mixture is among the data."""
ONE_GPU_ERROR = 0.065
"""On one Hopper GPU, where `was_measured`: the largest absolute log(measured / predicted) of four steps of jaxllm on an
H100 (benchmarks/RESULTS.md, "On one H100"), three of which gave the constants. It is that of packed documents, whose shorter
attention the model leaves out; the others are within 0.021. A fifth, in FP8, ran as another program."""
UNTIMED_FP8 = 0.09
"""By which FP8's low end is lower there: what its step saves by the model since it ran (docs/precision.md)."""
LIMITS: Mapping[str, Mapping[tuple[int, int], tuple[int, int, int]]] = {
    "jaxllm": {AMPERE: (256, 8, 8192), HOPPER: (2048, 8, 8192)},
    "megatron": {AMPERE: (256, 8, 8192), HOPPER: (128, 4, 16384)},
}
"""Convention -> compute capability -> most GPUs, GPUs per host, and tokens of a sequence, of the fitted runs."""


@dataclass(frozen=True)
class ErrorRange:
    low: float
    """Factor on predicted tokens/s: HELD of measured runs should be between it and `high`."""
    high: float
    beyond: tuple[str, ...]
    """What the prediction is extrapolated by; () if it is within the data."""
    layout_error: float = 0.0
    """Two layouts on one machine whose predicted speeds differ by less than this share may be in the other order."""
    evidence: str = "should hold four of five runs (as of published ones)"

    def of(self, tokens_per_s: float) -> tuple[float, float]:
        """(low, high) of a predicted speed."""
        return self.low * tokens_per_s, self.high * tokens_per_s


def error_range(config: Config, gpu: Gpu, gpus_per_host: int, convention: str = "jaxllm") -> ErrorRange:
    """The range of a predicted speed of a resolved config."""
    layout = LAYOUT_ERRORS[kind_of_layout(config, gpus_per_host)]
    if convention == "jaxllm" and was_measured(config, gpu):
        low, high = math.exp(-ONE_GPU_ERROR - UNTIMED_FP8 * config.model.multiplies_fp8), math.exp(ONE_GPU_ERROR)
        return ErrorRange(low, high, (), layout, "holds jaxllm's own five on an H100")
    below, above = PROGRAM_ERRORS[convention]["fp8" if config.model.multiplies_fp8 else "bf16"]
    if convention == "jaxllm":
        model, length = config.model, config.train.sequence_length
        attention = 3 * attention_flops_per_token(model, length, causal=True) / train_flops_per_token(model, length)
        below += ATTENTION_ERROR * attention + NARROW_ERROR * (model.hidden_size < NARROW)
        below, above = (error + EXPERTS_ERROR * has_experts(model) for error in (below, above))
    low, high = math.exp(-math.hypot(layout, below)), math.exp(math.hypot(layout, above))
    return ErrorRange(low, high, tuple(extrapolations(config, gpu, gpus_per_host, convention)), layout)


def was_measured(config: Config, gpu: Gpu) -> bool:
    """Whether steps of this kind ran: one H100 with 80 GB, unrolled layers at least as wide as 1B's, bfloat16 or FP8, cuDNN,
    `selective` or `none`, nothing on the host, and microbatches and sequences of about those sizes."""
    model, parallel, train = config.model, config.parallel, config.train
    usual = parallel.remat in ("selective", "none") and parallel.offload_state == "none" and not config.run.deterministic
    unrolled = has_own_layers(config, gpu.chip.compute_capability) and takes_cudnn(model, gpu.chip.compute_capability)
    wide = model.hidden_size >= 2048 and model.compute_dtype == "bfloat16" and set(window_shares(model, 8192)) == {None}
    long = 4096 <= train.sequence_length <= 16384 and config.microbatch_sequences * train.sequence_length >= 8192
    measured = config.devices == 1 and gpu.name == "h100-80gb" and not has_experts(model)
    return measured and usual and unrolled and wide and long


def range_lines(tokens_per_s_per_gpu: float, found: ErrorRange) -> Iterator[str]:
    """The range of a predicted speed in words, and what it is extrapolated by."""
    low, high = found.of(tokens_per_s_per_gpu)
    yield f"range {low:,.0f} to {high:,.0f} tokens/s/GPU, which {found.evidence}"
    if found.beyond:
        yield f"extrapolated: {'; '.join(found.beyond)}"


def range_json(tokens_per_s_per_gpu: float, found: ErrorRange) -> dict[str, Any]:
    """The same for `--json`."""
    return {
        "tokens_per_s_per_gpu_range": list(found.of(tokens_per_s_per_gpu)),
        "extrapolated": list(found.beyond),
        "layout_error": found.layout_error,
    }


def kind_of_layout(config: Config, gpus_per_host: int) -> str:
    """The key of LAYOUT_ERRORS."""
    p = config.parallel
    if group_of(p.context, p.tensor, gpus_per_host).hosts > 1:
        return "context across hosts"
    names = [name for name, size in (("pipeline", p.pipe), ("context", p.context)) if size > 1]
    return " and ".join(names) or "plain"


def extrapolations(config: Config, gpu: Gpu, gpus_per_host: int, convention: str) -> Iterator[str]:
    """What the fitted runs do not have, in words."""
    p, devices, length, of_kind = config.parallel, config.devices, config.train.sequence_length, LIMITS[convention]
    limits = of_kind.get(gpu.chip.compute_capability)
    if limits is None:
        yield f"{gpu.name}, whose generation the data do not have"
    most_gpus, most_per_host, longest = limits or [max(column) for column in zip(*of_kind.values(), strict=True)]
    if devices > most_gpus:
        yield f"{devices:,} GPUs, beyond the {most_gpus:,} of the data"
    if (per_host := min(gpus_per_host, devices)) > most_per_host:
        yield f"hosts of {per_host} GPUs, beyond the {most_per_host} of the data"
    if length > longest:
        yield f"sequences of {length:,} tokens, beyond the {longest:,} of the data"
    if has_experts(config.model):
        yield "experts, which only one GPU has trained"
    if config.model.multiplies_fp8:
        yield f"model.matmul_dtype={config.model.matmul_dtype}, which the data do not have"
    if policy_of(p.remat, config.model).offload or p.offload_state != "none":
        yield "copies to the host, which the data do not have"
    if p.names_replica_network:
        yield "a network between replicas, which the data do not have"
