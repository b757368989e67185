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

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

from jaxllm.config import ZERO_DIMS, Config, ConfigError, ModelConfig, ParallelConfig
from jaxllm.plan.activations import Policy, bytes_per_token_and_layer, context_method, is_blockwise, policy_of, takes_cudnn
from jaxllm.plan.hardware import Gpu
from jaxllm.plan.layer_backward import LayerShape, layer_backward
from jaxllm.plan.schedule import GPIPE, make_schedule

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


# -------------------------------------------------------------------------------------------------------------- parameters


@dataclass(frozen=True)
class Elements:
    """Of one parameter, or several, on one device."""

    compute: int
    """As the train step reads it."""
    master: int
    """As it lies between steps."""

    def __add__(self, other: Elements) -> Elements:
        return Elements(self.compute + other.compute, self.master + other.master)

    def times(self, count: int) -> Elements:
        return Elements(count * self.compute, count * self.master)


def parameters(model: ModelConfig, parallel: ParallelConfig) -> dict[str, Elements]:
    """Elements of each parameter on one device; of one layer, where it belongs to the layers.

    Raises:
      ConfigError: ZeRO finds no dim that divides.
    """
    D, N, K, H, F = model.hidden_size, model.num_heads, model.num_kv_heads, model.head_dim, model.intermediate_size
    ways = parallel.pipe * parallel.tensor
    rows = -(-model.vocab_size // ways) * ways
    shapes = {
        "embedding": {"vocab": rows, "embed": D},
        "final_norm": {"embed": D},
        "head": {"vocab": rows, "embed": D},
        "attention_norm": {"embed": D},
        "query": {"embed": D, "heads": N, "head_dim": H},
        "key": {"embed": D, "kv_heads": K, "head_dim": H},
        "value": {"embed": D, "kv_heads": K, "head_dim": H},
        "attention_out": {"heads": N, "head_dim": H, "embed": D},
        "mlp_norm": {"embed": D},
        "mlp_gate": {"embed": D, "mlp": F},
        "mlp_up": {"embed": D, "mlp": F},
        "mlp_down": {"mlp": F, "embed": D},
    }
    if model.tie_embeddings:
        del shapes["head"]
    split = {"vocab": ways, "heads": parallel.tensor, "mlp": parallel.tensor}
    if K % parallel.tensor == 0:
        split["kv_heads"] = parallel.tensor
    return {name: _elements(name, shape, split, parallel) for name, shape in shapes.items()}


def _elements(name: str, shape: dict[str, int], split: dict[str, int], parallel: ParallelConfig) -> Elements:
    compute = math.prod(size // split.get(dim, 1) for dim, size in shape.items())
    ranks = int(parallel.data) * parallel.context
    if parallel.zero == 0 or ranks == 1:
        return Elements(compute, compute)
    if any(split.get(dim, 1) == 1 and shape[dim] % ranks == 0 for dim in ZERO_DIMS if dim in shape):
        return Elements(compute, compute // ranks)
    if len(shape) == 1:
        return Elements(compute, compute)
    raise ConfigError(
        f"No dim of {name} {shape} divides over data x context = {ranks}, as parallel.zero={parallel.zero} needs: "
        f"set parallel.zero=0 or use fewer data ranks."
    )


# -------------------------------------------------------------------------------------------------------------- the step

FLOAT32 = 4
MANY_RANKS = 128
"""That share ZeRO's parts: 32 and 64 are few, 128, 256 and 512 many (steps of Llama 3 8B and 70B on H100s)."""


@lru_cache(maxsize=4096)
def slots_of(name: str, stages: int, microbatches: int, virtual_stages: int) -> tuple[int, int]:
    """(slots for residuals, slots for finished outputs) of a schedule's table, without making a long table: once a pipeline is
    full, 1f1b and interleaved need no more.
    """
    if name != GPIPE:
        microbatches = min(microbatches, 3 * stages)
    schedule = make_schedule(name, stages, microbatches, virtual_stages)
    return schedule.slots, schedule.finished_slots


class Step:
    """The sizes a train step is made of, in bytes for one device, and the moments at which they meet."""

    def __init__(self, config: Config, gpu: Gpu | None = None):
        self.config, self.model, self.parallel = config, config.model, config.parallel
        self.runs_ahead = gpu is None or gpu.chip.runs_ahead
        p, train = config.parallel, config.train
        self.policy: Policy = policy_of(p.remat)
        self.ranks = int(p.data) * p.context
        self.shared_out = self.ranks > 1
        # On one rank there is nothing to share out.
        self.zero = p.zero if self.shared_out else 0
        self.itemsize = {"bfloat16": 2, "float32": 4}[self.model.compute_dtype]
        self.microbatches = config.num_microbatches
        self.local_length = train.sequence_length // p.context
        self.tokens = config.microbatch_sequences * self.local_length
        table = parameters(self.model, p)
        of_layer = {name: e for name, e in table.items() if name not in ("embedding", "head", "final_norm")}
        here = config.chunk_layers * p.virtual_stages
        self.layer = sum(of_layer.values(), Elements(0, 0))
        self.layers = self.layer.times(here)
        self.largest_stack = here * max(e.compute for e in of_layer.values())
        self.embedding, self.head = table["embedding"], table.get("head", table["embedding"])
        self.vocabulary = self.embedding if self.model.tie_embeddings else self.embedding + self.head
        self.all = self.layers + self.vocabulary + table["final_norm"]
        self.rows = self.head.compute // self.model.hidden_size
        self.pipelined = p.pipe > 1
        table_of = (p.schedule, p.pipe, self.microbatches, p.virtual_stages)
        self.slots, self.finished_slots = slots_of(*table_of) if self.pipelined else (1, 0)

    # ---------------------------------------------------------------------------------------- from step to step

    def resident(self) -> dict[str, float]:
        offload = self.parallel.offload_state
        per_token = 3 * 4 + 1 + (4 if self.config.data.mask_documents else 0)
        # With DiLoCo the weights of the last outer step, and its momentum.
        outer = 2 * FLOAT32 * self.all.master if self.config.train.diloco_steps is not None else 0
        return {
            "master_weights": 0 if offload == "optimizer_and_master" else FLOAT32 * self.all.master,
            "optimizer": 2 * FLOAT32 * self.all.master if offload == "none" else 0,
            "outer_state": outer,
            "batch": self.microbatches * self.tokens * per_token,
        }

    def on_host(self) -> float:
        offload = self.parallel.offload_state
        state = {"none": 0, "optimizer": 2, "optimizer_and_master": 3}[offload] * FLOAT32 * self.all.master
        return state + self.slots * self.config.chunk_layers * sum(self.offloaded.values())

    # ---------------------------------------------------------------------------------------------- activations

    @cached_property
    def units(self) -> dict[str, float]:
        """Bytes of one tensor of a block, of one microbatch: of the feed-forward width, of the model's width whole and split
        over tensor, of queries, of keys, and a layer's weights."""
        m, t = self.model, self.parallel.tensor
        each = self.tokens * self.itemsize
        keys = m.num_kv_heads // t if m.num_kv_heads % t == 0 else m.num_kv_heads
        return {
            "mlp": each * m.intermediate_size / t,
            "whole": each * m.hidden_size,
            "split": each * m.hidden_size / t,
            "query": each * m.num_heads * m.head_dim / t,
            "key": each * keys * m.head_dim,
            "layer": self.itemsize * self.layer.compute,
        }

    @cached_property
    def kept(self) -> dict[str, float]:
        """On the device, of one layer and microbatch, by name."""
        if not self.policy.everything:
            return self._scaled(self._held.kept)
        # What autodiff keeps of the plain block: of each half the float32 stream, its normed copy before and after the scale,
        # and the whole sequence of it that enters the matmuls; queries, keys, values, attention's output; SwiGLU's products.
        u = self.units
        return {
            "block_input": 2 * FLOAT32 / self.itemsize * 3 * u["split"],
            "attention_input": u["whole"],
            "query": u["query"],
            "key": u["key"],
            "value": u["key"],
            "attention_output": u["query"],
            "attention_lse": FLOAT32 * self.tokens * self.model.num_heads / self.parallel.tensor,
            "mlp_input": u["whole"],
            "mlp_products": 6 * u["mlp"],
        }

    @cached_property
    def offloaded(self) -> dict[str, float]:
        return {} if self.policy.everything else self._scaled(self._held.offloaded)

    @cached_property
    def _held(self):
        p = self.parallel
        return bytes_per_token_and_layer(
            self.policy, self.model, context=p.context, tensor=p.tensor, blockwise=is_blockwise(self.config)
        )

    def _scaled(self, per_token: dict[str, float]) -> dict[str, float]:
        tokens = self.config.microbatch_sequences * self.config.train.sequence_length
        return {name: size * tokens for name, size in per_token.items()}

    @property
    def layer_shape(self) -> LayerShape:
        p, config = self.parallel, self.config
        return LayerShape(
            units=self.units,
            policy=self.policy,
            kept=self.kept,
            offloaded=self.offloaded,
            scores=self.scores,
            fp8_rounded=self.fp8_rounded,
            sequences=config.microbatch_sequences,
            local_length=self.local_length,
            head_dim=self.model.head_dim,
            context=p.context,
            context_method=context_method(config),
            tensor=p.tensor,
            zero=self.zero,
            microbatches=self.microbatches,
            chunk_layers=config.chunk_layers,
            virtual_stages=p.virtual_stages,
            slots=self.slots,
            documents=config.data.mask_documents,
            pipelined=self.pipelined,
            overlap_passes=p.overlap_passes,
            loops_by_hand=self.loops_by_hand,
            runs_ahead=self.runs_ahead,
        )

    def activations(self) -> dict[str, float]:
        """Of all layers of a chunk, in all slots."""
        count = self.slots * self.config.chunk_layers
        held = {f"activations.{name}": count * size for name, size in self.kept.items()}
        if self.policy.offload:
            # One layer's, on its way to the host or back.
            held["activations.fetched"] = sum(self.offloaded.values())
        if self.pipelined:
            # Outputs that wait for the head, one that arrives and one that goes back.
            held["stage_messages"] = (self.finished_slots + 2) * self.units["split"]
            held["noise_scale"] = self.noise_scale()
        return held

    def noise_scale(self, at_loss: bool = False) -> float:
        """Of a pipeline's step that measures it (parallel/squares.py), float32: while a loss is taken the head's gradient of
        that microbatch; always, if the embedding is the head, rows of it for the tokens of one microbatch a stage.
        """
        if self.config.log.noise_scale_every is None:
            return 0
        kept = min(self.microbatches, self.parallel.pipe) * self.units["split"] if self.model.tie_embeddings else 0
        return FLOAT32 * (kept / self.itemsize + (self.head.compute if at_loss else 0))

    # ------------------------------------------------------------------------------------ weights and gradients

    @cached_property
    def loops_by_hand(self) -> bool:
        """Whether the layer loop sums its gradients itself (layer_loop.py); else autodiff stacks them in the compute dtype."""
        return self.pipelined or self.zero >= 2 or bool(self.policy.offload)

    @cached_property
    def accumulates(self) -> bool:
        """A scan of one microbatch is no loop to XLA."""
        return self.microbatches > 1 or self.pipelined

    def weights(self, loss: bool = False) -> float:
        """In the compute dtype, where a step reads them; float32 weights are read where they lie, if all of them lie here.

        Args:
          loss: when the loss is taken; otherwise while layers are computed. XLA drops what a single microbatch needs no more.
        """
        if self.itemsize == FLOAT32 and self.zero == 0:
            return 0
        layers = self.layers.master if self.zero == 3 else self.layers.compute
        if self.pipelined:
            # ZeRO 3 gathers the vocabulary once a step, and keeps it as it came and as matmuls want it.
            layouts = 2 if self.zero == 3 else 1
            return self.itemsize * (layers + layouts * self.vocabulary.compute)
        share = self.vocabulary.master if self.zero == 3 else self.vocabulary.compute
        whole = self.head.compute if loss and (self.zero == 3 or not self.accumulates) else 0
        return self.itemsize * (layers + (share if self.accumulates else 0) + whole)

    def fp8_layouts(self) -> dict[str, float]:
        """FP8 matmuls want the dim that they sum over last, forward one dim of a weight and backward the other. XLA transposes
        the stacks of queries', keys', values', gate's and up's weights before the loop, in the compute dtype (seen in one step
        compiled for H100s; not fitted). Weights that are gathered by layer are transposed by layer."""
        if self.model.matmul_dtype != "fp8" or self.zero == 3:
            return {}
        u, layers = self.units, self.config.chunk_layers * self.parallel.virtual_stages
        columns = (u["query"] + 2 * u["key"] + 2 * u["mlp"]) / self.tokens
        return {"fp8_layouts": layers * self.model.hidden_size * columns}

    @property
    def fp8_rounded(self) -> float:
        """A byte for each number of the gradients of SwiGLU's products, of the gathered sequence, and of a layer's weights."""
        if self.model.matmul_dtype != "fp8":
            return 0
        return (2 * self.units["mlp"] + self.units["whole"] + self.units["layer"]) / self.itemsize

    def gradients(self) -> dict[str, float]:
        """Sums over microbatches, float32, and those of the microbatch at hand beside them."""
        layers = self.layers.master if self.zero >= 2 else self.layers.compute
        shared = self.zero >= 2 and not self.pipelined
        vocabulary = self.vocabulary.master if shared else self.vocabulary.compute
        if self.pipelined:
            return {"gradients": FLOAT32 * (layers + vocabulary)}
        at_hand = FLOAT32 * layers if self.loops_by_hand else self.itemsize * layers
        sums = FLOAT32 * (layers + vocabulary) if self.accumulates else 0
        return {"gradients": sums, "microbatch_gradients": at_hand}

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

    @property
    def scores(self) -> float:
        """Numbers of one layer's square of scores, where plain XLA makes it."""
        m, p = self.model, self.parallel
        if takes_cudnn(m) or p.context > 1:
            return 0
        return self.tokens * self.local_length * m.num_heads / p.tensor
