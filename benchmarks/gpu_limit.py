"""Steps near the limit of one GPU's memory: does what the estimate and XLA say hold there, and what does a user read beyond it?

Llama 3.1 8B with as many layers, and the remat policy, whose estimate is nearest to a share of what a step may take, from 85 to
102%; then steps that differ in kind. Sizes rise, because the allocator's peak cannot be reset: each case then has its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cache
from typing import Any

from gpu_cases import Figures, Tell, config_of, train

from jaxllm.config import ConfigError
from jaxllm.cost_model.hardware import gpu_from_device_kind
from jaxllm.cost_model.memory import estimate_memory

SHARES = (0.85, 0.94, 0.97, 1.0, 1.02)
MANY = 20
"""Number of shares with `many`; every fifth step then offloads."""
LENGTH, SEQUENCES, STEPS = 8192, 2, 3
REMATS = ("selective", "full", "none")
WIDTHS = (10_240, 12_288, 14_336)
"""Feed-forward widths, so that some step is near any share. 14,336 is the model's."""
EXPECTED_S = 16
"""Compiling ten layers took 6 to 8 s on a GPU machine (gpu_h100.jsonl), and some cases have more; six steps take 3 s."""


def cases(found: dict[str, Any], dry: bool, many: bool = False) -> list[dict[str, Any]]:
    """Name, kind, options and about of each case. Args: found: the row of the ceilings, for the GPU and its capacity."""
    if dry:
        tiny = ["model.num_layers=1", "model.hidden_size=32", "model.intermediate_size=64", "model.num_heads=4"]
        tiny += ["model.num_kv_heads=2", "model.head_dim=8", "model.vocab_size=256"]
        return [_case("100%", [*_of(length=32), *tiny], steps=2)]
    kind, capacity = found["device"], found["capacity_bytes"]
    shares = [0.85 + 0.17 * n / (MANY - 1) for n in range(MANY)] if many else SHARES
    remats = [("offload",) if many and n % 5 == 4 else REMATS for n in range(len(shares))]
    near = [_case(f"{s:.1%}", _nearest(s * capacity, kind, among)) for s, among in zip(shares, remats, strict=True)]
    offload = "parallel.remat=offload"
    kinds = {
        "offload": [*_most_layers(capacity, kind, offload), offload],
        "looped": [*_most_layers(capacity, kind, "model.scan_layers=true"), "model.scan_layers=true"],
        "S 32768, full": [*_most_layers(capacity, kind, "parallel.remat=full", length=4 * LENGTH), "parallel.remat=full"],
    }
    size = lambda case: _bytes(tuple(case["options"]["overrides"]), kind)  # noqa: E731
    return [*near, *sorted((_case(name, overrides) for name, overrides in kinds.items()), key=size)]


def _case(name: str, overrides: Sequence[str], steps: int = STEPS) -> dict[str, Any]:
    return {
        "name": f"near the limit, {name}",
        "kind": "limit",
        "options": {"overrides": list(overrides), "steps": steps},
        "expected_s": EXPECTED_S,
    }


def _of(layers: int | None = None, length: int = LENGTH) -> list[str]:
    of_layers = [] if layers is None else [f"model.num_layers={layers}"]
    of_batch = [f"train.sequence_length={length}", f"train.global_batch_sequences={SEQUENCES}"]
    return ["model.name=llama-3.1-8b", *of_layers, *of_batch]


@cache
def _bytes(overrides: tuple[str, ...], device_kind: str) -> int:
    return estimate_memory(config_of(overrides, microbatch_sequences=1), gpu_from_device_kind(device_kind)).peak_bytes


def _nearest(wanted_bytes: float, device_kind: str, remats: Sequence[str]) -> Sequence[str]:
    """The layers, width and policy whose estimate is nearest."""
    all_of = [
        (*_of(layers), f"model.intermediate_size={width}", f"parallel.remat={remat}")
        for layers, width, remat in itertools.product(range(2, 33), WIDTHS, remats)
    ]
    return min(all_of, key=lambda overrides: abs(_bytes(overrides, device_kind) - wanted_bytes))


def _most_layers(capacity_bytes: int, device_kind: str, *keys: str, length: int = LENGTH) -> list[str]:
    """The most layers that the estimate allows with these keys."""
    fits = (of for layers in range(32, 1, -1) if _bytes((*(of := _of(layers, length)), *keys), device_kind) <= capacity_bytes)
    return next(fits, _of(1, length))


def limit(tell: Tell, overrides: Sequence[str], steps: int) -> Figures:
    """Measures a step as `train` does, of one sequence a microbatch, whether it fits or not. If it does not, `sentence` is what
    a user reads."""
    from jaxllm.run.memory_check import explain_out_of_memory

    trainers: list[Any] = []
    try:
        with explain_out_of_memory(config_of(overrides, microbatch_sequences=1)) as advice:

            def made(trainer: Any) -> None:
                advice.trainer = trainer
                trainers.append(trainer)

            return train(tell, overrides, steps, microbatch=1, made=made)
    except ConfigError as error:
        tell(sentence=str(error))
        raise
    finally:
        for trainer in trainers:
            trainer.close()
