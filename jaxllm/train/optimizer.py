"""The optimizers, Muon's matrices among owners, and the learning-rate schedule, counted in tokens."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from optax.contrib import MuonDimensionNumbers

from jaxllm.config import Config, ConfigError
from jaxllm.config.model_spec import ParameterSpec, layer_parameters
from jaxllm.config.types import GIVEN
from jaxllm.mesh.axes import PIPE, TENSOR, ZERO_AXES
from jaxllm.mesh.sharding import Parameter, layout, stack_dims, weight_rules

LearningRate = Callable[[jax.Array], jax.Array]


def make_optimizer(
    config: Config, table: Any, given: optax.GradientTransformation | None = None, mesh: Mesh | None = None
) -> optax.GradientTransformation:
    """The optimizer of optimizer.name without the learning rate, which the step multiplies in; weight decay applies only to
    matrices. Or the one that is given, which has both: its updates come out negated, for a learning rate of 1.

    Args:
      table: nested dict of Parameter.
      mesh: over which Muon shares out its matrices. None: it leaves them as they are sharded.
    """
    o = config.optimizer
    if o.name == GIVEN:
        if given is None:
            raise ConfigError("optimizer.name=given needs an optimizer: call Trainer or fit with optimizer=, or name another.")
        return optax.chain(given, optax.scale(-1.0))
    momentum = optax.trace(o.momentum) if o.momentum else optax.identity()
    scale = {
        "adamw": lambda: optax.scale_by_adam(o.beta1, o.beta2, o.epsilon),
        "muon": lambda: _muon(config, table, mesh),
        "lion": lambda: optax.scale_by_lion(o.beta1, o.beta2),
        "sgd": lambda: momentum,
    }[o.name]()
    decayed = jax.tree.map(lambda p: p.is_matrix, table)
    return optax.chain(scale, optax.add_decayed_weights(o.weight_decay, mask=decayed))


# ------------------------------------------------------------------------------------------------------------------- Muon
# Muon (Jordan, 2024) orthogonalises the momentum of each matrix of the blocks. Momentum is sharded as ZeRO has it, by parts of
# matrices. So each rank of a stage gets whole matrices of some layers, and gives its updates back:
#
#     momentum [layers, in / ranks, out] --- all-to-all ---> [layers / ranks, in, out] --- all-to-all ---> update as momentum
#
# A rank sends and receives its part of the matrices twice in the compute dtype, in which their owner also computes. As XLA
# partitions the update otherwise, every rank gathers every matrix (8 layers of Llama 3.1 8B on 8 GPUs: 64 GiB a step).

MUON_RMS = 0.2
"""Root mean square of its updates, that of AdamW's (Liu et al., 2025, arXiv 2502.16982), as both have one learning rate."""


def _muon(config: Config, table: Any, mesh: Mesh | None) -> optax.GradientTransformation:
    """Muon for the blocks' matrices, each for itself, and Adam for all else."""
    o, specs = config.optimizer, {spec.path: spec for spec in layer_parameters(config.model) if spec.inputs}

    def of_matrices(function: Any) -> Any:
        return jax.tree.map(lambda p: function(p, specs[p.path]) if p.path in specs else optax.MaskedNode(), table)

    # The dims before those of the spec count layers.
    of_dims = of_matrices(lambda parameter, spec: _dims(spec, len(parameter.shape) - len(spec.shape)))
    owned = of_matrices(lambda parameter, spec: _by_owner(config, parameter, spec, mesh))
    # Without an iteration it is the momentum, divided by each matrix's norm. A norm needs no whole matrix.
    momentum = optax.contrib.scale_by_muon(ns_steps=0, beta=o.momentum, weight_dimension_numbers=lambda _: of_dims)
    orthogonal = optax.stateless(lambda updates, _: jax.tree.map(lambda own, u: own(u), owned, updates))
    kinds: Any = {"muon": optax.chain(momentum, orthogonal), "adam": optax.scale_by_adam(o.beta1, o.beta2, o.epsilon)}
    return optax.partition(kinds, jax.tree.map(lambda p: "muon" if p.path in specs else "adam", table))


def _dims(spec: ParameterSpec, first: int) -> MuonDimensionNumbers:
    """The dims of a stack that are rows and columns of its matrices, of which the first is `first`."""
    rows, end = first + spec.inputs, first + len(spec.shape)
    return MuonDimensionNumbers(tuple(range(first, rows)), tuple(range(rows, end)))


def _by_owner(config: Config, parameter: Parameter, spec: ParameterSpec, mesh: Mesh | None) -> Callable:
    """A function that orthogonalises a stack of matrices, each in the rank that owns its layer. Layers are padded with zeros to
    a multiple of the ranks; a zero matrix stays zero.
    """
    # By the spec: stored shapes have ZeRO's padding, with which the update would depend on the mesh.
    scale = MUON_RMS * math.sqrt(max(math.prod(spec.shape[: spec.inputs]), math.prod(spec.shape[spec.inputs :])))
    leading, stages, dtype = stack_dims(parameter.dims), config.parallel.pipe, jnp.dtype(config.model.compute_dtype)
    ranks = math.prod(mesh.shape[axis] for axis in (*ZERO_AXES, TENSOR)) if mesh else 1
    sharded = layout(parameter, weight_rules(config.model, config.parallel), config.parallel)
    # One transfer moves one axis: first over the ranks of ZeRO, then over tensor.
    stored, used = (spec[leading:] for spec in (sharded.master, sharded.compute))
    steps = (PIPE, None, *stored), (PIPE, ZERO_AXES, *used), (PIPE, (*ZERO_AXES, TENSOR))
    # Five iterations of Newton and Schulz, without momentum.
    orthogonal: Any = optax.contrib.scale_by_muon(beta=0.0, nesterov=False, weight_dimension_numbers=_dims(spec, 2))

    def sent(x: jax.Array, specs: Any) -> jax.Array:
        if mesh is not None:
            for spec in specs:
                x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*spec)))
        return x

    def update(momentum: jax.Array) -> jax.Array:
        x, matrix = momentum.astype(dtype), momentum.shape[leading:]
        # [virtual stages, stages, layers, ...] -> [stages, layers of a stage, ...]
        x = x if leading == 1 else jnp.moveaxis(x, 0, 1)
        layers = x.reshape(stages, -1, *matrix)
        zeros = -layers.shape[1] % ranks
        owned = sent(jnp.pad(layers, [(0, 0), (0, zeros), *[(0, 0)] * len(matrix)]), steps)
        made, _ = orthogonal.update(owned, orthogonal.init(owned))
        back = sent(scale * made, steps[::-1])[:, : layers.shape[1]].reshape(x.shape)
        return (back if leading == 1 else jnp.moveaxis(back, 1, 0)).astype(momentum.dtype)

    return update


def make_learning_rate(config: Config) -> LearningRate:
    """Makes the schedule: step (int, the first is 0) -> learning rate, from the tokens consumed at the end of that step.

    Warm-up is linear from 0. Let p be the fraction of the tokens after warm-up: cosine is f + (1-f)(1+cos(pi p))/2, linear is
    1-(1-f)p, wsd is constant and then linear to f over decay_tokens, with f = final_learning_rate_fraction. The result is
    multiplied by (batch / last batch of train.batch_schedule, or train.batch_grows_to) to the power that train.batch_lr names.
    """
    o = config.optimizer
    if o.name == GIVEN:
        return lambda step: jnp.ones((), jnp.float32)
    # Floats, because int32 would overflow at 2 billion tokens.
    total, warmup_tokens = float(config.total_tokens), float(o.warmup_tokens)
    decay_tokens = float(o.decay_tokens if o.decay_tokens is not None else total / 5)
    final = o.final_learning_rate_fraction
    phases, power = config.phases, {"none": 0.0, "sqrt": 0.5, "linear": 1.0}[config.train.batch_lr]
    # One entry per phase. float32 is exact to 1e-7 of the run.
    first_step = np.array([min(phase.first_step, 2**31 - 1) for phase in phases], np.int32)
    first_token = np.array([config.tokens_before(phase.first_step) for phase in phases], np.float32)
    step_tokens = np.array([phase.sequences * config.train.sequence_length for phase in phases], np.float32)
    last = config.train.batch_grows_to or phases[-1].sequences
    factor = np.array([(phase.sequences / last) ** power for phase in phases], np.float32)

    def learning_rate(step: jax.Array) -> jax.Array:
        phase = (step >= first_step).sum() - 1
        done = (step - jnp.asarray(first_step)[phase]).astype(jnp.float32) + 1.0
        tokens = jnp.asarray(first_token)[phase] + done * jnp.asarray(step_tokens)[phase]
        progress = jnp.clip((tokens - warmup_tokens) / max(total - warmup_tokens, 1.0), 0.0, 1.0)
        decay = {
            "cosine": final + (1 - final) * 0.5 * (1 + jnp.cos(jnp.pi * progress)),
            "linear": 1 - (1 - final) * progress,
            "wsd": 1 - (1 - final) * jnp.clip((tokens - (total - decay_tokens)) / max(decay_tokens, 1.0), 0.0, 1.0),
            "constant": jnp.ones_like(progress),
        }[o.schedule]
        warmup = jnp.minimum(tokens / max(warmup_tokens, 1.0), 1.0)
        return o.learning_rate * warmup * decay * jnp.asarray(factor)[phase]

    return learning_rate
