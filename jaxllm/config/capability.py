"""What a GPU can compute, by its CUDA compute capability. The estimates and the runs both ask here.

require_runs(config.model, gpu.chip.compute_capability, gpu.name)      ConfigError for bfloat16 on a V100
why_not_cudnn(config.model, (8, 9), "l40s-48gb")                       None: it can
"""

from __future__ import annotations

from jaxllm.config.errors import ConfigError
from jaxllm.config.model_config import ModelConfig

Capability = tuple[int, int] | None
"""CUDA compute capability; None: not a GPU, or unknown."""
AMPERE, HOPPER = (8, 0), (9, 0)
FIRST_WITH = {"bfloat16": AMPERE, "fp8": (8, 9), "mxfp8": (10, 0)}
"""The first compute capability whose tensor cores multiply a dtype (CUDA programming guide, compute capabilities). Before
Ampere XLA converts bfloat16 to float32 for each matmul: not faster than float32, and with copies that no estimate counts, so it
is refused there."""
GENERATION = {"bfloat16": "Ampere", "fp8": "Ada, Hopper", "mxfp8": "Blackwell"}


def has_tf32(capability: Capability) -> bool:
    """Whether float32 matrices are multiplied in TF32 on tensor cores, not on the CUDA cores."""
    return capability is None or capability >= AMPERE


def widest_head(capability: Capability) -> int:
    """The largest head size of cuDNN's backward pass (cuDNN documentation, Attention, support matrix of 9.18)."""
    return 256 if capability is not None and capability[0] == 9 else 128


def why_not_cudnn(model: ModelConfig, capability: Capability, name: str) -> str | None:
    """The reason cuDNN attention cannot run this model on a GPU of this name, or None. Unknown capabilities are Ampere or
    later."""
    if capability is not None and capability < AMPERE:
        return f"it needs Ampere (compute capability 8.0) or newer and {name} has {_text(capability)}"
    if model.compute_dtype != "bfloat16":
        return f"it computes in bfloat16 and model.compute_dtype is {model.compute_dtype}"
    widest = widest_head(capability)
    if model.head_dim % 8 or model.head_dim > widest:
        return f"it takes head sizes that are multiples of 8 up to {widest} here and model.head_dim is {model.head_dim}"
    return None


def require_runs(model: ModelConfig, capability: Capability, name: str) -> None:
    """Raises ConfigError if a GPU of this name cannot multiply the dtypes of a model, or run the attention that it names."""
    for key, fix in (("compute_dtype", "float32"), ("matmul_dtype", "compute_dtype")):
        dtype = getattr(model, key)
        needed = FIRST_WITH.get(dtype)
        if needed is not None and capability is not None and capability < needed:
            raise ConfigError(
                f"model.{key}={dtype} needs an NVIDIA GPU of {GENERATION[dtype]} or later (compute capability "
                f"{_text(needed)}), and {name} has {_text(capability)}: set model.{key}={fix}."
            )
    if model.attention.startswith("cudnn") and (reason := why_not_cudnn(model, capability, name)):
        raise no_cudnn(model, reason)


def no_cudnn(model: ModelConfig, reason: str) -> ConfigError:
    """The error for a config that names cuDNN attention where it cannot run."""
    return ConfigError(f"model.attention={model.attention} cannot run here, because {reason}: set model.attention=auto or xla.")


def _text(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"
