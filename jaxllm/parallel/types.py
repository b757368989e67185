"""Types that the strategies of this folder and the train step share. It imports nothing of jaxllm."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

Tree = Any
"""Nested dict of arrays."""
Params = Any
"""Nested dict of arrays: parameters, or gradients."""
Batch = dict[str, jax.Array]
"""Arrays [microbatch, sequence, position]: tokens, targets, positions int32, mask bool, and segments int32 if packed."""
Rows = dict[str, jax.Array]
"""One microbatch of a Batch: arrays [sequence, position]."""
Loss = Callable[[jax.Array, jax.Array, Rows], tuple[jax.Array, jax.Array]]
"""(final hidden states [sequence, position, width], head [vocab_size, width], rows) -> (sum, count), two scalars of one
microbatch. The loss of a step is the sum of all sums, divided by the sum of all counts (docs/extending.md)."""


class LossScale(NamedTuple):
    """Factors of losses in the mean of a step, float32."""

    targets: Any
    """That of a target's loss."""
    positions: Any
    """That of the losses of layers, which every position has, with a target or not."""


UNSCALED = LossScale(1.0, 0.0)
"""For the forward pass alone, whose losses are summed."""


@dataclass(frozen=True)
class WeightAccess:
    """How a layer's weights are read and its gradients reduced. By default weights and gradients stay on the rank."""

    gather: Callable[[Tree], Tree] | None = None
    """A rank's shard of one layer -> the layer's full weights. It starts one layer ahead."""
    once: bool = False
    """For one microbatch of a step that sends each layer once: what is gathered is kept for the whole step, and what is made of
    a layer's gradients is not added to `sums` but takes its place there."""
    scatter: Callable[[Tree], Tree] | None = None
    """One layer's gradients -> the rank's shard of their sum over ranks, float32. It runs behind the next layer's compute."""
    token: Callable[[Tree], jax.Array] | None = None
    """Where layers are on the host, so that `gather` fetches and sums are HostSums (layer_loop.py): arrays of one layer ->
    their token (ordering.py)."""

    @property
    def on_host(self) -> bool:
        return self.token is not None


class Accumulators(NamedTuple):
    """Inputs of the forward pass for the sake of their cotangents (accumulate.py)."""

    sums: Tree
    """The gradients of a tree of weights so far; a rank's shards of them where ZeRO scatters. The cotangents are the new sums.
    float32, or of full layers with a single microbatch the compute dtype."""
    squares: Any = None
    """Zeros whose cotangent is the squares of a microbatch's gradients, which autodiff adds up over the places that take them
    (grad_square_norms.py); None without a tap."""


class NoiseParts(NamedTuple):
    """Sums over the parts of one step, for the gradient noise scale. A part has n of the step's N targets. G is the gradient of
    the part's mean loss; the part adds n/N of G to the step's gradient."""

    mean_square: jax.Array
    """Sum of n/N |G|^2."""
    count: jax.Array
    """Number of parts that have a target, float32."""
    tokens: jax.Array
    """Positions in the step's batch, with or without a target, float32."""


GradientRegion = Callable[[Params, Batch], tuple[jax.Array, Params, NoiseParts | None]]
"""(weights, batch) -> (mean loss over the batch of all ranks along loss_axes; float32 gradients summed over the rank's
microbatches; NoiseParts if a tap was given). Gradients that the region reduces are the rank's part of the sum over ranks. All
others are the rank's own partial sums, with a leading dim of 1."""
LossRegion = Callable[[Params, Batch], tuple[jax.Array, jax.Array]]
"""(weights, batch) -> (sum of token losses over the batch of all ranks along batch_axes, number of targets)"""


TokenLossRegion = Callable[[Params, Batch], jax.Array]
"""(weights, batch) -> -log p of each target, float32 [microbatch, sequence, position]"""


LAYER_ACTIVATION_NORM = "layer_activation_norm"


@dataclass(frozen=True)
class Parallelized:
    """The functions that training needs of a model on one mesh."""

    value_and_grad: Callable[[Params, Batch], tuple[jax.Array, Params]]
    """(master params, batch) -> (loss, float32 gradients of the trained parameters in the master layout). Loss: nats, mean over
    valid targets. With train.diloco_steps all three have a leading replica dim, and each replica's loss is the mean over its
    own targets."""
    value_grad_and_parts: Callable[[Params, Batch], tuple[jax.Array, Params, NoiseParts]]
    """value_and_grad, and the sums from which the gradient noise scale is measured. Costs a little more
    (grad_square_norms.py)."""
    loss_sum: Callable[[Params, Batch], tuple[jax.Array, jax.Array]]
    """(master params, batch) -> (sum of -log p over valid targets, number of targets), without gradients."""
    token_losses: Callable[[Params, Batch], jax.Array]
    """(master params, batch) -> -log p of each target, float32 [microbatch, sequence, position], without gradients."""
    layer_norms: Callable[[Params, Batch], dict[str, jax.Array]]
    """(master params, batch) -> float32 [num_layers] by name: root mean square of each layer's output in the first microbatch,
    and with experts how evenly it spreads its rows (model/experts.py)."""
    initialize: Callable[[jax.Array], Params]
    """key -> master params. Jit it with master_shardings, so that no device ever holds more than its shard."""
    master: Any
    """Nested dict of ShapeDtypeStruct: the master params as stored, with ZeRO's padding and shardings."""
    table: Any
    """Nested dict of Parameter, with the shapes that the train step computes with."""
    trained: Callable[[Any], Any]
    """A nested dict with an entry for each parameter -> its part with the trained parameters (parameters.py)."""
    attention: str
    """How attention is computed: xla or cudnn, and over several context ranks ring or all_gather."""

    @property
    def master_shardings(self) -> Any:
        return jax.tree.map(lambda x: x.sharding, self.master)
