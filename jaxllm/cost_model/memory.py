"""Closed-form memory of one train step per device: persistent state, and the peak of temporary buffers.

    estimate = estimate_memory(config)             # config resolved: parallel.data a number
    estimate.peak_bytes, estimate.stages[0].terms_bytes

It describes jaxllm's own program as XLA compiles it for NVIDIA GPUs, and is compared with XLA's figures
(benchmarks/memory_accuracy.py). State, weights, gradients, named activations and pipeline slots follow from shapes and
shardings, to the byte. The other buffers of one layer's backward are counted in tensors: layer_backward.py. No JAX.

Transfer buffers count with their data: gathered weights in `weights`, `waiting_layer` and `working_set`, pipeline messages in
`stage_messages`. NCCL's own buffers are outside XLA's memory and belong to the reserve (cost_model/hardware.py). cuDNN's
workspace, which XLA learns only from a real GPU, is counted where attention runs backward.

All stages of a pipeline run one program in lockstep. XLA therefore allocates the same memory for each stage, used or not: their
terms are equal.

A step is fullest at one of a few moments, whose sums are compared:

    gather      the weights arrive in the compute dtype, some of them in two layouts
    loss        all activations of a microbatch are live, and the logits of a chunk of tokens
    feed_forward, feed_forward_end, attention
                all activations, the gradients, and one layer's backward at its three fullest moments
    head        the head's gradient is reduce-scattered beside all activations (ZeRO 2 and 3)
    embedding   the embedding's gradient exists with all rows, in float32, before it is reduce-scattered (ZeRO 2 and 3)
    reduce      the gradients are summed over ranks in float32, beside the last of them (ZeRO 0, one microbatch, with
                unrolled layers or where the noise scale is measured)
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxllm.config import Config
from jaxllm.config.attention import Capability
from jaxllm.config.model_spec import has_experts, layer_matmuls
from jaxllm.cost_model.hardware import Gpu, compute_capability, gpu_from_device_kind
from jaxllm.cost_model.layer_backward import layer_backward
from jaxllm.cost_model.step_sizes import FLOAT32, StepSizes

MANY_RANKS = {2: 128, 3: 96}
"""For ZeRO 2 and 3 the number of ranks from which XLA plans buffers differently (Llama 3 8B, 70B): of level 2, 96 are few, 128
many; of level 3, 88 and 96, where XLA starts transfers late: elsewhere a layer's transfers are combined."""
Terms = dict[str, int]
"""Name of a term -> bytes."""


@dataclass(frozen=True)
class StageMemory:
    """One device of a pipeline stage, at its fullest moment."""

    stage: int
    terms_bytes: Terms

    @property
    def total_bytes(self) -> int:
        return sum(self.terms_bytes.values())


@dataclass(frozen=True)
class MemoryEstimate:
    devices: int
    stages: tuple[StageMemory, ...]
    host_bytes: int
    """Bytes per device in pinned host memory."""
    moment: str = ""
    """The fullest moment; '' for a convention without moments."""

    @property
    def peak_stage(self) -> StageMemory:
        return max(self.stages, key=lambda stage: stage.total_bytes)

    @property
    def peak_bytes(self) -> int:
        return self.peak_stage.total_bytes


EstimateMemory = Callable[[Config], MemoryEstimate]
"""Estimator of a resolved config."""


def estimate_memory(
    config: Config, gpu: Gpu | None = None, *, capability: Capability = None, on_device: bool = True
) -> MemoryEstimate:
    """Memory of the train step of a resolved config on a GPU.

    Args:
      gpu: the kind. For an A100, XLA starts transfers later and needs fewer buffers for them. Default: a later kind.
      capability: of a GPU whose kind has no figures.
      on_device: as XLA compiles it on the GPU itself. Elsewhere it does not know cuDNN's workspace.
    """
    step = Step(config, gpu, capability, on_device)
    moment, held = max(step.moments().items(), key=lambda item: sum(item[1].values()))
    terms = {name: round(size) for name, size in {**step.resident(), **held}.items() if size}
    stages = tuple(StageMemory(stage, terms) for stage in range(config.parallel.pipe))
    return MemoryEstimate(config.devices, stages, round(step.on_host()), moment)


def may_fit(config: Config, device: Any, capacity_bytes: int | None = None) -> bool:
    """Whether the estimate of a step fits into a `jax.Device`, as far as its memory is known.

    Args:
      capacity_bytes: the most that a step may use on a device; default: by the table of GPUs, if it has this kind.
    """
    gpu = gpu_from_device_kind(device.device_kind)
    capacity_bytes = capacity_bytes or (gpu.capacity_bytes if gpu else None)
    if capacity_bytes is None:
        return True
    return estimate_memory(config, gpu, capability=compute_capability(device)).peak_bytes <= capacity_bytes


def cudnn_workspace(config: Config, gpu: Gpu) -> int:
    """Bytes by which cuDNN's workspace raises the estimate's peak above that of a step compiled elsewhere; 0 if another moment
    is fuller."""
    return estimate_memory(config, gpu).peak_bytes - estimate_memory(config, gpu, on_device=False).peak_bytes


class Step(StepSizes):
    """Combines the sizes of a train step at each moment."""

    # ------------------------------------------------------------------------------------------------ vocabulary

    def waiting_head_gradient(self) -> float:
        """The part of the head gradient that is live while layers run backward, with ZeRO 2 and 3: the float32 sum, or one
        product in the compute dtype, as with several context ranks (by compiled steps)."""
        summed = self.parallel.context == 1 or self.model.tie_embeddings
        return (FLOAT32 if summed else self.itemsize) * self.trained_head.compute

    def embedding_gradient(self) -> float:
        """Bytes of the embedding gradient, allocated before it is needed (by compiled steps; why is not known). With ZeRO 2
        and 3 only where XLA starts transfers early and the head is tied or ranks are many; since JAX 0.12 only with `none`."""
        if self.zero >= 2:
            early = (self.is_older_xla or self.policy.everything) and self.runs_ahead and not self.layers_on_host
            early = early and (self.model.tie_embeddings or self.many_ranks)
        else:
            early = (self.shared_out or self.parallel.tensor > 1) and self.runs_ahead and not self.accumulates
            early = early and not self.sends_once
        return FLOAT32 * self.trained_embedding.compute if early else 0

    def scattered(self) -> float:
        """The embedding gradient with all rows and a rank's share of it, and the head gradient in transfer."""
        size = FLOAT32 * (self.trained_embedding.compute + self.trained_embedding.master)
        if self.loss_chunks > 1:
            # The sum over chunks, and the same in another layout.
            return size + 2 * FLOAT32 * self.trained_head.compute
        product = self.itemsize * self.trained_head.compute
        if self.model.tie_embeddings:
            return size + FLOAT32 * self.trained_embedding.compute + product
        return size + (FLOAT32 * self.trained_head.compute if self.runs_ahead or self.many_ranks else product)

    def head_shared_out(self) -> dict[str, float]:
        """Terms while the head gradient is reduce-scattered: as if in float32, beside the product it comes from."""
        size, alone = FLOAT32 * self.trained_head.compute, self.loss_chunks == 1
        if alone and not self.many_ranks:
            product_and_logits = self.itemsize * (self.head.compute + self.tokens * self.rows)
            return {"weights": self.weights(loss=True), "vocabulary_gradients": size + product_and_logits}
        if alone or self.accumulates:
            size += self.itemsize * self.trained_head.compute + self.embedding_gradient()
        return {"weights": self.weights(), "vocabulary_gradients": size}

    @property
    def many_ranks(self) -> bool:
        return self.ranks >= MANY_RANKS.get(self.zero, math.inf) and not (self.zero == 3 and self.runs_ahead)

    @property
    def multiplies_early(self) -> bool:
        """Whether the head gradient of a single chunk of tokens is computed before the layers run backward. XLA keeps the
        smaller of the product and the gradient of the logits."""
        tokens, width = self.tokens, self.model.hidden_size
        return tokens > width or (tokens == width and not self.runs_ahead) or self.many_ranks

    # --------------------------------------------------------------------------------------------------- moments

    def moments(self) -> dict[str, dict[str, float]]:
        """Terms of each moment that may be the fullest."""
        held = {"weights": self.weights(), **self.gradients(), **self.activations()}
        gather = self.gather(held)
        moments = {"gather": gather} if gather else {}
        if self.pipelined:
            moments["loss"] = {**held, "logits": self.logits(), "noise_scale": self.noise_scale(at_loss=True)}
            return moments | {name: {**held, **more} for name, more in layer_backward(self).items()}
        # Below ZeRO 2 they are added to the sums where they are made, if there are sums.
        is_apart = self.loss_chunks > 1 if self.zero >= 2 else not self.accumulates
        head, embedding = FLOAT32 * self.trained_head.compute if is_apart else 0, self.embedding_gradient()
        at_loss = {**held, "weights": self.weights(loss=True), "vocabulary_gradients": head + embedding}
        if self.zero < 2 or not (self.runs_ahead or self.policy.offload):
            at_loss["microbatch_gradients"] = 0
        if not self.runs_ahead:
            at_loss["activations.fetched"] = 0
        at_loss["waiting_layer"] = self.waiting_layers() * self.units["trained_layer" if self.zero == 2 else "layer"]
        # The head's input and its gradient; where the head is trained, other moments are fuller by far more than these.
        hidden = 0 if self.trained_head.compute else 2 * self.units["whole"]
        moments["loss"] = {**at_loss, "logits": self.logits(), "hidden_states": hidden}
        if self.images.count:
            # XLA keeps what ZeRO 3 gathers of a tower until its backward pass.
            gathered = self.itemsize * self.tower.compute if self.zero == 3 else 0
            held = {**held, "tower_weights": gathered if self.trained_tower.compute else 0}
            moments["loss"]["tower_weights"] = held["tower_weights"]
            rest = {"weights": self.weights(), **self.gradients(), "images": self.images.kept_bytes}
            moments["images"] = {**rest, "tower_weights": gathered, "tower": self.images.layer_bytes}
        waits = self.zero >= 2 or (self.layers_on_host and self.accumulates and self.loss_chunks == 1)
        at_end = {"vocabulary_gradients": self.waiting_head_gradient() if waits else head + embedding}
        moments |= {name: {**held, **at_end, **more} for name, more in layer_backward(self).items()}
        if self.layers_on_host:
            moments["update"] = self.streamed_update()
        if self.zero == 0 and not self.accumulates and self.shared_out and (self.has_own_layers or not self.sends_once):
            moments["reduce"] = {"gradients": FLOAT32 * self.trained.compute + self.itemsize * self.largest_stack}
        if self.zero >= 2:
            if self.trained_head.compute and (self.loss_chunks > 1 or self.multiplies_early):
                moments["head"] = {**at_loss, **self.head_shared_out()}
            at_end = {**self.gradients(), "vocabulary_gradients": self.scattered()}
            if self.accumulates:
                at_end |= {"weights": self.weights(), "waiting_layer": self.units["layer"]}
            if self.trained_embedding.compute:
                moments["embedding"] = at_end
        return moments

    def waiting_layers(self) -> int:
        """Layers whose weights, or with ZeRO 2 gradients, are there at the loss; a single microbatch with frozen weights has
        fewer (by compiled steps)."""
        if self.zero == 3 and self.config.frozen and not self.accumulates:
            return 1
        return {2: 1, 3: 2}.get(self.zero, int(self.layers_on_host))

    def gather(self, held: dict[str, float]) -> dict[str, float]:
        """Terms while the weights arrive; empty if that is never the fullest moment, as where XLA takes them in one layout."""
        if self.zero in (1, 2) and not (self.is_older_xla or has_experts(self.model)):
            return {}
        if self.zero in (1, 2) and self.accumulates and self.runs_ahead and not self.sends_once:
            if self.pipelined:
                # Gathered weights in a second layout for the matmuls: the largest stack and a vocabulary matrix.
                both = self.itemsize * (self.largest_stack + self.trained_embedding.compute)
                return {**held, "microbatch_gradients": 0, "relayout": both}
            stack = {"relayout": 0 if self.has_own_layers else self.itemsize * self.largest_stack}
            return {"weights": self.weights(), **self.gradients(), "microbatch_gradients": 0, **stack}
        if self.zero == 2 and not self.accumulates and (has_experts(self.model) or not self.policy.offload):
            # Layers only: a single microbatch gathers the vocabulary when it is needed.
            weights = {"weights": self.itemsize * self.trained_layers.compute, "relayout": self.itemsize * self.largest_stack}
            return {**self.activations(), **weights}
        if self.zero == 3 and not self.runs_ahead and not self.pipelined:
            gathered = self.embedding.compute + (0 if self.model.tie_embeddings else self.head.compute)
            arriving = {"vocabulary_weights": self.itemsize * gathered, "waiting_layer": 2 * self.units["layer"]}
            return {"weights": self.weights(), **self.gradients(), **arriving}
        return {}

    def streamed_update(self) -> dict[str, float]:
        """Terms while a layer is updated: its new weights and moments, which are written when all are made, what a matrix's
        are made of, and the gradients that wait on the device."""
        last = min(self.table[spec.path].master for spec in layer_matmuls(self.model))
        return {"gradients": FLOAT32 * self.vocabulary.master, "update": FLOAT32 * (3 * self.layer.master + 4 * last)}

    def logits(self) -> float:
        """Logits of a chunk of tokens: float32, and their gradient in the compute dtype."""
        # Interleaved steps have the gradient in two layouts, by their buffer listings.
        layouts = 1 + (self.parallel.virtual_stages > 1)
        return (FLOAT32 + layouts * self.itemsize) * -(-self.tokens // self.loss_chunks) * self.rows
