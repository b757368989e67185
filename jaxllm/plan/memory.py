"""Bytes of one train step on each device, in closed form: what lies there from step to step, and what lives at its fullest
moment.

    estimate = estimate_memory(config)             # config resolved: parallel.data a number
    estimate.peak_bytes, estimate.stages[0].terms_bytes

It describes jaxllm's own program as XLA compiles it for NVIDIA GPUs, and is held against XLA's figures
(benchmarks/memory_accuracy.py). State, weights, gradients, named activations and pipeline slots follow from shapes and
shardings, to the byte. What XLA holds beside them while it runs one layer backward is counted in tensors: layer_backward.py.
Nothing is fitted. No JAX here.

Buffers of transfers are where their data are: gathered weights under `weights`, `waiting_layer` and `working_set`, messages of
a pipeline under `stage_messages`. NCCL's own are not XLA's, and lie in the reserve (plan/hardware.py); nor is what cuDNN asks
for when it runs, which XLA learns from the GPU alone.

All stages of a pipeline run one program in step, so XLA gives each the same room, used or not: their terms are equal.

A step is fullest at one of a few moments, whose sums are compared:

    gather      the weights arrive in the compute dtype, and some lie in two layouts
    loss        all activations of a microbatch are there, and the logits of a chunk of tokens
    feed_forward, feed_forward_end, attention
                all activations, the gradients, and what one layer's backward takes at its three fullest moments
    head        the head's gradient is shared out beside all activations (ZeRO 2 and 3)
    embedding   the embedding's gradient is made: of everybody's rows, in float32, before it is shared out (ZeRO 2 and 3)
    reduce      the gradients are summed over ranks in float32, one on its way (ZeRO 0, one microbatch)
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxllm.config import Config
from jaxllm.plan.hardware import Gpu
from jaxllm.plan.layer_backward import layer_backward
from jaxllm.plan.step_sizes import FLOAT32, StepSizes

MANY_RANKS = 128
"""That share ZeRO's parts: 32 and 64 are few, 128, 256 and 512 many (steps of Llama 3 8B and 70B on H100s)."""
Terms = dict[str, int]
"""Name of a term -> bytes."""


@dataclass(frozen=True)
class StageMemory:
    """One device of a pipeline's stage, at its fullest."""

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
    """In the host's pinned memory, for one device."""
    moment: str = ""
    """When the step is fullest; '' where a convention knows no moments."""

    @property
    def peak_stage(self) -> StageMemory:
        return max(self.stages, key=lambda stage: stage.total_bytes)

    @property
    def peak_bytes(self) -> int:
        return self.peak_stage.total_bytes


def estimate_memory(config: Config, gpu: Gpu | None = None) -> MemoryEstimate:
    """What the train step of a resolved config takes of a GPU.

    Args:
      gpu: which kind; for an A100 XLA starts transfers later, and holds less for them. Default: one that came after it.

    Raises:
      ConfigError: ZeRO finds no dim of a parameter that divides over its ranks.
    """
    step = Step(config, gpu)
    moment, held = max(step.moments().items(), key=lambda item: sum(item[1].values()))
    terms = {name: round(size) for name, size in {**step.resident(), **held}.items() if size}
    stages = tuple(StageMemory(stage, terms) for stage in range(config.parallel.pipe))
    return MemoryEstimate(config.devices, stages, round(step.on_host()), moment)


class Step(StepSizes):
    """The moments at which the sizes of a train step meet."""

    # ------------------------------------------------------------------------------------------------ vocabulary

    @property
    def loss_chunks(self) -> int:
        return min(self.local_length, -(-self.tokens // self.config.train.loss_chunk_tokens))

    def head_gradient(self) -> float:
        """Of the microbatch at hand: float32, summed over chunks of tokens; with a single chunk its product is made late, and
        the logits' gradient waits for it."""
        if self.loss_chunks > 1:
            return FLOAT32 * self.head.compute
        return self.itemsize * self.tokens * self.rows

    def waiting_head_gradient(self) -> float:
        """Of it, what is there while layers run backward, with ZeRO 2 and 3: summed in float32, or one product in the compute
        dtype; as that too with several context ranks (as compiled steps show). Of few tokens the logits' gradient waits, which
        is smaller."""
        if self.loss_chunks == 1:
            return self.itemsize * self.rows * min(self.tokens, self.model.hidden_size)
        summed = self.parallel.context == 1 or self.model.tie_embeddings
        return (FLOAT32 if summed else self.itemsize) * self.head.compute

    def embedding_gradient(self) -> float:
        """Room for it, made before it is needed; with ZeRO 2 and 3 only where XLA starts early (not for an A100), and where the
        embedding is the head too or the ranks are many (as compiled steps show; why is not understood)."""
        if self.zero >= 2:
            early = self.runs_ahead and (self.model.tie_embeddings or self.many_ranks)
        else:
            early = (self.shared_out or self.parallel.tensor > 1) and (self.runs_ahead or self.accumulates)
        return FLOAT32 * self.embedding.compute if early else 0

    def scattered(self) -> float:
        """The embedding's gradient as it is made, of everybody's rows, and a rank's share; beside it the head's on its way."""
        size = FLOAT32 * (self.embedding.compute + self.embedding.master)
        if self.loss_chunks > 1:
            # Its sum over chunks, and that in another layout.
            return size + 2 * FLOAT32 * self.head.compute
        product = self.itemsize * self.head.compute
        if self.model.tie_embeddings:
            return size + FLOAT32 * self.embedding.compute + product
        return size + (FLOAT32 * self.head.compute if self.runs_ahead or self.many_ranks else product)

    def head_shared_out(self) -> dict[str, float]:
        """While the head's gradient is on its way to the ranks: in float32, beside the product it comes from."""
        size, alone = FLOAT32 * self.head.compute, self.loss_chunks == 1
        if alone and not self.many_ranks:
            product_and_logits = self.itemsize * (self.head.compute + self.tokens * self.rows)
            return {"weights": self.weights(loss=True), "vocabulary_gradients": size + product_and_logits}
        if alone or self.accumulates:
            size += self.itemsize * self.head.compute + self.embedding_gradient()
        return {"weights": self.weights(), "vocabulary_gradients": size}

    @property
    def many_ranks(self) -> bool:
        return self.ranks >= MANY_RANKS

    @property
    def multiplies_early(self) -> bool:
        """Whether the head's gradient of a single chunk of tokens is multiplied out before the layers run backward: XLA keeps
        the smaller of the product and the logits' gradient."""
        tokens, width = self.tokens, self.model.hidden_size
        return tokens > width or (tokens == width and not self.runs_ahead) or self.many_ranks

    # --------------------------------------------------------------------------------------------------- moments

    def moments(self) -> dict[str, dict[str, float]]:
        """Terms of each moment that may be the fullest."""
        held = {"weights": self.weights(), **self.gradients(), **self.activations(), **self.fp8_layouts()}
        gather = self.gather(held)
        moments = {"gather": gather} if gather else {}
        if self.pipelined:
            moments["loss"] = {**held, "logits": self.logits(), "noise_scale": self.noise_scale(at_loss=True)}
            return moments | {name: {**held, **more} for name, more in layer_backward(self.layer_shape).items()}
        head, embedding = self.head_gradient(), self.embedding_gradient()
        summed = head if self.loss_chunks > 1 else 0
        at_loss = {**held, "weights": self.weights(loss=True), "vocabulary_gradients": summed + embedding}
        if not (self.stacks_gradients_early if self.zero < 2 else self.runs_ahead or self.policy.offload):
            at_loss["microbatch_gradients"] = 0
        if not self.runs_ahead:
            at_loss["activations.fetched"] = 0
        at_loss["waiting_layer"] = {2: 1, 3: 2}.get(self.zero, 0) * self.units["layer"]
        moments["loss"] = {**at_loss, "logits": self.logits()}
        at_end = {"vocabulary_gradients": self.waiting_head_gradient() if self.zero >= 2 else head + embedding}
        moments |= {name: {**held, **at_end, **more} for name, more in layer_backward(self.layer_shape).items()}
        if self.stacks_gradients_early and self.shared_out:
            moments["reduce"] = {"gradients": FLOAT32 * (self.all.compute + self.largest_stack)}
        if self.zero >= 2:
            if self.loss_chunks > 1 or self.multiplies_early:
                moments["head"] = {**at_loss, **self.head_shared_out()}
            moments["embedding"] = {**self.gradients(), "vocabulary_gradients": self.scattered()}
            if self.accumulates:
                moments["embedding"] |= {"weights": self.weights(), "waiting_layer": self.units["layer"]}
        return moments

    def gather(self, held: dict[str, float]) -> dict[str, float]:
        """While the weights arrive; nothing where that is never the fullest moment."""
        if self.zero in (1, 2) and self.accumulates and self.runs_ahead:
            if self.pipelined:
                return {**held, "microbatch_gradients": 0, "relayout": self.relayout()}
            stack = {"relayout": self.itemsize * self.largest_stack}
            return {"weights": self.weights(), **self.gradients(), "microbatch_gradients": 0, **stack}
        if self.zero == 2 and not (self.accumulates or self.policy.offload):
            # Of the layers alone: one microbatch's vocabulary arrives when it is needed.
            weights = {"weights": self.itemsize * self.layers.compute, "relayout": self.itemsize * self.largest_stack}
            return {**self.activations(), **weights}
        if self.zero == 3 and not self.runs_ahead and not self.pipelined:
            gathered = self.embedding.compute + (0 if self.model.tie_embeddings else self.head.compute)
            arriving = {"vocabulary_weights": self.itemsize * gathered, "waiting_layer": 2 * self.units["layer"]}
            return {"weights": self.weights(), **self.gradients(), **arriving}
        return {}

    @property
    def stacks_gradients_early(self) -> bool:
        """With one microbatch and ZeRO 0 autodiff's gradients are zeros in the program's outermost part, which XLA writes
        before they are needed."""
        return self.zero == 0 and not self.accumulates and not self.loops_by_hand

    def logits(self) -> float:
        """Of a chunk of tokens: float32, and their gradient in the compute dtype."""
        tokens = -(-self.tokens // self.loss_chunks)
        return (FLOAT32 + self.itemsize) * tokens * self.rows

    def relayout(self) -> float:
        """Gathered weights on their way to the layout that matmuls want: the largest stack and a vocabulary matrix."""
        return self.itemsize * (self.largest_stack + self.embedding.compute)
