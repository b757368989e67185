"""Types of sections and keys of a config, among them `Remat` and the names of a block's tensors."""

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from jaxllm.config.errors import nearest, refuse
from jaxllm.config.model_spec import EXPERTS, MATMUL_OUTPUTS, Shape, norms_after
from jaxllm.untrusted import INT32, INT64, shown

PositiveInt = Annotated[int, Field(ge=1, le=INT32, strict=True)]
"""An array of int32 counts it: steps, token ids, positions, sequences."""
Count = Annotated[int, Field(ge=0, le=INT64, strict=True)]
Tokens = Annotated[int, Field(ge=1, le=INT64, strict=True)]
PositiveFloat = Annotated[float, Field(gt=0, le=1e15, allow_inf_nan=False)]
"""Not infinite as float32, in which a step computes."""
Switch = Annotated[bool, Field(strict=True)]
GIVEN = "given"
DOCUMENTS = "documents"
NEEDS_DOCUMENTS = "data.source=documents needs them: call jaxllm.Trainer or jaxllm.fit with documents=, or name a text."
"""The value of a key in whose place Trainer is given a Python object."""
GPIPE, ONE_F_ONE_B, INTERLEAVED = SCHEDULES = ("gpipe", "1f1b", "interleaved")
"""Pipeline schedules."""
AUTO = "auto"
BLOCK_INPUT = "block_input"
ATTENTION_RESULTS = ("attention_output", "attention_lse")
_AT = MATMUL_OUTPUTS.index("attention_out")
BLOCK_TENSORS = (BLOCK_INPUT, *MATMUL_OUTPUTS[:_AT], *ATTENTION_RESULTS, *MATMUL_OUTPUTS[_AT:-1])
"""Tensors that a block may keep for its backward pass, in order of computation. The model gives its tensors these names."""
LAST_OUTPUT = MATMUL_OUTPUTS[-1]
"""The output of a block's last matmul, beside them only if the backward pass of a norm reads it; else only the addition that
ends the block does."""
EXPERT_CHOICE = "expert_choice"
"""The experts of each token and the order of rows, which every policy keeps: integers, 12 bytes for a token and expert."""
EXPERT_UNIT = 64
"""On GPUs both sides of an expert's matrices, as split over tensor, are multiples of this."""
ZERO_DIMS = (EXPERTS, "embed", "mlp", "vocab", "head_dim", "heads", "kv_heads", "tower_embed", "projector")
"""The dims that ZeRO may shard. None counts layers, because ZeRO 3 gathers layer by layer."""
FEW_ZEROS = 1 / 16
"""Share of a dim. Up to it the order of ZERO_DIMS decides, also against a vocabulary that divides: sharded by rows it takes
2 GiB more in the step of Llama 3 8B, because XLA sums its gradient in two layouts."""
RematAction = Literal["keep", "recompute", "offload"]

OFFLOAD_STATES = ("none", "optimizer", "optimizer_and_master", "all")
"""The values of parallel.offload_state, each with more on the host than the one before it."""
MASTER_ON_HOST = OFFLOAD_STATES[2:]


def block_tensors(model: Shape) -> tuple[str, ...]:
    """The names that parallel.remat may use with this network."""
    return (*BLOCK_TENSORS, LAST_OUTPUT) if norms_after(model) else BLOCK_TENSORS


def _check_remat(remat: Any) -> Any:
    if not isinstance(remat, Mapping):
        return remat
    for name, action in remat.items():
        if name not in (*BLOCK_TENSORS, LAST_OUTPUT):
            hint = nearest(shown(name), BLOCK_TENSORS, f"the tensors of a block are {', '.join(BLOCK_TENSORS)}.")
            raise refuse(f"parallel.remat.{shown(name)} is not a tensor of a block: {hint}")
        if action not in get_args(RematAction):
            choices = ", ".join(get_args(RematAction))
            raise refuse(f"parallel.remat.{name}={shown(action)} is not one of the choices: use {choices}.")
    if remat.get(BLOCK_INPUT) == "recompute":
        raise refuse("parallel.remat.block_input=recompute is impossible, as all starts from it: use keep or offload.")
    held = [name for name in ATTENTION_RESULTS if remat.get(name, "recompute") != "recompute"]
    if len(held) == 1:
        other = next(name for name in ATTENTION_RESULTS if name not in held)
        raise refuse(f"parallel.remat.{held[0]}={remat[held[0]]} gains nothing alone: keep or offload {other} too.")
    return dict(remat)


Remat = Annotated[Literal["none", "selective", "full", "offload"] | dict[str, RematAction], BeforeValidator(_check_remat)]


def zero_shard(sizes: Mapping[str, int], split: Mapping[str, int], ranks: int, is_matrix: bool) -> tuple[str, int] | None:
    """(dim, zeros): the dim of a parameter that ZeRO shards over `ranks`, and how many zeros at its end make it divide.
    It is the first of ZERO_DIMS that needs none, else the first that needs few, else the one that needs the smallest share.
    None: the parameter is replicated, because other axes shard all such dims, or because it needs zeros and is no matrix but a
    norm's scale or a bias, of a few kilobytes.

    Args:
      sizes: of the parameter's dims.
      split: into how many parts other axes split a dim; 1 where it says nothing. A split dim is not used: a rank would then
        hold every t-th piece of the gathered array.
    """

    def cost(shard: tuple[str, int]) -> float:
        dim, zeros = shard
        return 0.0 if zeros == 0 and dim != "vocab" else max(FEW_ZEROS, zeros / sizes[dim])

    dims = [dim for dim in ZERO_DIMS if dim in sizes]
    found = min(((dim, -sizes[dim] % ranks) for dim in dims if split.get(dim, 1) == 1), key=cost, default=None)
    return None if found is None or (found[1] and not is_matrix) else found


def zero_text(zero: int, expert: int) -> str:
    return f"ZeRO {zero}" if expert == 1 else f"ZeRO {zero}, expert {expert}"


def one_or_more(given: Any) -> Any:
    return (given,) if isinstance(given, str) else given


@lru_cache(maxsize=4096)
def divisors(number: int) -> tuple[int, ...]:
    """All divisors, ascending. It takes time proportional to the square root, so even a mistyped, much larger size is fast."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return tuple(small + [number // n for n in reversed(small) if n * n != number])


ITEMSIZE = {"bfloat16": 2, "float32": 4}
"""Bytes of a number, by model.compute_dtype."""

FP8_ROUNDING = "fp8_rounding"
"""Name scope of arrays that are scaled and rounded to FP8."""


class Section(BaseModel):
    """A part of a config, with its keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), use_attribute_docstrings=True)
    retired: ClassVar[Mapping[str, tuple[Any, str]]] = {}
    """Keys that the last version had: the value that changed nothing, which stored configs have and which is left out, and the
    sentence that refuses any other."""

    @model_validator(mode="before")
    @classmethod
    def _check_retired(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        for key, (unchanged, sentence) in cls.retired.items():
            if values.get(key, unchanged) != unchanged:
                raise refuse(sentence)
        return {key: value for key, value in values.items() if key not in cls.retired}
