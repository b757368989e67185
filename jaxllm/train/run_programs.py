"""The XLA programs of a training run, by name, so that all can be compiled before the run (compile/save.py).

A Trainer takes the same functions with its arrays; here they get shapes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxllm.config import Config
from jaxllm.config.rounds import exchanges_beside_steps, sends_codes, without_rounds
from jaxllm.mesh import batch_sharding, replicated
from jaxllm.runtime.xla_flags import compile_options
from jaxllm.train import diloco
from jaxllm.train.build import Training, build_trainings
from jaxllm.train.rounds import Rounds, layout_of_number
from jaxllm.train.saved_programs import step_name

INITIAL_STATE, EVALUATION, TOKEN_LOSSES = "initial state", "evaluation", "token losses"
FIRST_ROUND = "start of the first round"


def jit_evaluation(training: Training, mesh: Mesh) -> Any:
    """(weights, batch) -> the sum of losses and the number of tokens."""
    return jax.jit(training.functions.loss_sum, out_shardings=replicated(mesh))


def jit_token_losses(training: Training, mesh: Mesh) -> Any:
    """(weights, batch) -> the loss of each token."""
    return jax.jit(training.functions.token_losses, out_shardings=replicated(mesh))


def layer_norms_name(length: int | None) -> str:
    """length: of the sequences, if others differ."""
    return f"layer norms{f', sequences of {length}' if length else ''}"


def jit_layer_norms(training: Training, mesh: Mesh) -> Any:
    """(weights, batch) -> the norm of each layer's output."""
    return jax.jit(training.functions.layer_norms, out_shardings=replicated(mesh))


def jit_first_round(training: Training, config: Config) -> Any:
    """State of ordinary steps -> the state in rounds (diloco.py), which `training` is for."""
    begin = partial(diloco.begin, replicas=config.parallel.replica, codes=sends_codes(config))
    return jax.jit(begin, out_shardings=training.shardings)


def batch_layout(
    config: Config, mesh: Mesh, microbatches: int, rows: int, trains: bool = True
) -> dict[str, jax.ShapeDtypeStruct]:
    """A batch [microbatch, sequence, position] as shapes with shardings: one that a step trains on, or one to evaluate."""
    dtypes = {"tokens": jnp.int32, "targets": jnp.int32, "positions": jnp.int32, "mask": jnp.bool_}
    if config.data.mask_documents:
        dtypes["segments"] = jnp.int32
    if config.train.loss == "dpo" and trains:
        dtypes["reference"] = jnp.float32
    shape, sharding = (microbatches, rows, config.train.sequence_length), batch_sharding(mesh)
    return {name: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for name, dtype in dtypes.items()}


@dataclass(frozen=True)
class RunProgram:
    """A program before it is lowered."""

    name: str
    jitted: Any
    arguments: tuple[Any, ...]
    """Shapes with shardings."""
    options: dict[str, Any] = field(default_factory=dict)
    """Compiler options."""
    exchanges: bool = False
    """Whether it is a step with an exchange between replicas."""


def run_programs(config: Config, mesh: Mesh) -> Iterator[RunProgram]:
    """The programs of a run of a resolved config, from its initial state to its last evaluation. Sampling text at the end, and
    reading a checkpoint, compile small programs of their own.
    """
    of_first = build_trainings(without_rounds(config), mesh)
    first = of_first[1]
    yield RunProgram(INITIAL_STATE, first.jit_create(), (config.train.seed,))
    trainings, outer = [(of_first, 0, config.train.steps)], cast(Any, None)
    if config.train.diloco_steps is not None:
        of_rounds, begin = build_trainings(config, mesh), config.train.diloco_after_steps
        trainings, rounds = [(of_first, 0, begin), (of_rounds, begin, config.train.steps)], of_rounds[1]
        yield RunProgram(FIRST_ROUND, jit_first_round(rounds, config), (first.layout(),))
        outer = Rounds(config, mesh, rounds.shardings)  # type: ignore[arg-type]
        yield RunProgram(outer.name, outer.jitted_step, (rounds.layout(), layout_of_number(mesh)))
    ends = [*(phase.first_step for phase in config.phases[1:]), config.train.steps]
    for by_parts, begin, end in trainings:
        for phase, phase_end in zip(config.phases, ends, strict=True):
            if max(begin, phase.first_step) >= min(end, phase_end):
                continue
            of_phase = config.in_phase(phase) if config.has_phases else config
            options, M = compile_options(of_phase, mesh.devices.flat[0]), of_phase.num_microbatches
            batch = batch_layout(of_phase, mesh, M, of_phase.microbatch_rows)
            training, length = by_parts[phase.parts], config.length_of(phase)
            steps, of_step = range(max(begin, phase.first_step), min(end, phase_end)), (training.layout(), batch)
            # Whether a step synchronises a fragment.
            kinds = {False} if training.outer is None else {outer.fragment_beside(step) is not None for step in steps}
            for step, exchanges in itertools.product(filter(None, (training.step, training.measuring_step)), sorted(kinds)):
                name = step_name(M, length, step is training.measuring_step, exchanges)
                number = (layout_of_number(mesh),) if exchanges else ()
                crosses = exchanges and exchanges_beside_steps(config)
                yield RunProgram(name, training.jit_step(step, exchanges), (*of_step, *number), options, crosses)
            if config.log.layer_norms_every is not None:
                yield RunProgram(layer_norms_name(length), jit_layer_norms(training, mesh), (training.layout().params, batch))
    last = trainings[-1][0][1]
    batch = batch_layout(config, mesh, config.parallel.pipe, config.microbatch_rows, trains=False)
    if config.train.loss == "dpo":
        yield RunProgram(TOKEN_LOSSES, jit_token_losses(last, mesh), (last.layout().params, batch))
    else:
        yield RunProgram(EVALUATION, jit_evaluation(last, mesh), (last.layout().params, batch))
