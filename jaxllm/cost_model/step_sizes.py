"""Tensors of a train step on one device: state, activations, weights and gradients. memory.py sums them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import Any, cast

from jaxllm.config import Config, ModelConfig, ParallelConfig, layer_stack, model_spec
from jaxllm.config.attention import BACKWARD_SLOTS, HOPPER, Capability, most_in_a_piece, packed_documents, takes_cudnn
from jaxllm.config.checks import causal_block_length
from jaxllm.config.layer_stack import has_own_layers, host_sum_itemsize, rings_tensor, sends_once
from jaxllm.config.model_spec import LAYERS, OF_IMAGES, has_experts, layer_matmuls, layer_parameters
from jaxllm.config.remat_policy import Policy, policy_of
from jaxllm.config.rounds import exchanges_beside_steps, fragments_of, sends_codes
from jaxllm.config.types import GPIPE, ITEMSIZE, MASTER_ON_HOST, zero_shard
from jaxllm.cost_model.activations import bytes_per_token_and_layer, is_blockwise
from jaxllm.cost_model.flops import trained_matrices
from jaxllm.cost_model.hardware import Gpu
from jaxllm.cost_model.images import ImageSizes

FLOAT32 = 4
SMALLEST_HALF = 128
"""Rows at which the halving of a block with documents ends (blockwise_attention.documents_by_halves)."""


# ---------------------------------------------------------------------------------------------- elements of parameters


@dataclass(frozen=True)
class Elements:
    """Elements of one or several parameters on one device."""

    compute: int
    """In the train step's sharding."""
    master: int
    """In the sharding between steps, with the zeros that ZeRO pads."""

    def __add__(self, other: Elements) -> Elements:
        return Elements(self.compute + other.compute, self.master + other.master)

    def times(self, count: int) -> Elements:
        return Elements(count * self.compute, count * self.master)


def parameters(model: ModelConfig, parallel: ParallelConfig, frozen: frozenset[str] = frozenset()) -> Mapping[str, Elements]:
    """Elements of each parameter on one device, by path; for a layer's parameter, those of one layer.

    Args:
      frozen: paths of parameters that are not trained, which are sharded between steps as in the step.
    """
    ranks = int(parallel.data) * parallel.context
    # Type checkers do not know that a frozen model of pydantic is hashable.
    found = _parameters(cast(Any, model), parallel.pipe, parallel.tensor, ranks if parallel.zero else 1, parallel.expert)
    sharded = ("" if parallel.pipe == 1 else LAYERS) if parallel.zero == 3 else None
    whole = {path for path in frozen if sharded is None or not path.startswith(sharded)}
    return {path: Elements(one.compute, one.compute) if path in whole else one for path, one in found.items()}


@lru_cache(maxsize=4096)
def _parameters(model: Any, pipe: int, tensor: int, ranks: int, expert: int) -> Mapping[str, Elements]:
    """The same, sharded over so many ranks between steps, and experts over some of them in the step."""
    ways = pipe * tensor
    split = {"vocab": ways, **dict.fromkeys(("heads", "mlp", "tower_heads", "tower_mlp", "projector"), tensor)}
    if model.num_kv_heads % tensor == 0:
        split["kv_heads"] = tensor
    found = {}
    for spec in model_spec.parameters(model):
        shape = dict(zip(spec.dims, spec.shape, strict=True))
        if "vocab" in shape:
            shape["vocab"] = -(-shape["vocab"] // ways) * ways
        compute = math.prod(size // split.get(dim, 1) for dim, size in shape.items())
        found[spec.path] = Elements(compute, compute)
        if ranks > 1 and (shard := zero_shard(shape, split, ranks, spec.is_matrix)) is not None:
            dim, zeros = shard
            here = compute // expert if spec.of_experts else compute
            found[spec.path] = Elements(here, compute // shape[dim] * (shape[dim] + zeros) // ranks)
    return MappingProxyType(found)


# -------------------------------------------------------------------------------------------------------------- step sizes


def slots_of(name: str, stages: int, microbatches: int, virtual_stages: int) -> tuple[int, int]:
    """(slots for residuals, slots for finished outputs) of the table of pipeline_schedule.make_schedule, whose docstring says
    why. A closed form: a table takes milliseconds, and numpy."""
    most = microbatches * virtual_stages + (stages > 1)
    return (most, microbatches) if name == GPIPE else (min(stages * virtual_stages + stages, most), 1)


def halvings(causal_block_length: int) -> int:
    """How often a block on the diagonal is halved, if documents are masked in it."""
    return max(0, (causal_block_length // SMALLEST_HALF).bit_length() - 1)


class StepSizes:
    """Sizes of a train step's tensors, in bytes on one device."""

    def __init__(self, config: Config, gpu: Gpu | None = None, capability: Capability = None, on_device: bool = True):
        self.config, self.model, self.parallel = config, config.model, config.parallel
        self.is_older_xla = layer_stack.has_older_xla()
        self.runs_ahead = gpu is None or gpu.chip.runs_ahead
        self.capability = gpu.chip.compute_capability if gpu else capability or HOPPER
        self.packed = packed_documents(config, self.capability) or 0
        self.on_device = on_device
        self.in_blocks = config.data.mask_documents and not self.packed
        p, train = config.parallel, config.train
        self.policy: Policy = policy_of(p.remat, self.model)
        self.ranks = int(p.data) * p.context
        self.shared_out = self.ranks > 1
        # A single rank has nothing to shard over.
        self.zero = p.zero if self.shared_out else 0
        self.itemsize = ITEMSIZE[self.model.compute_dtype]
        self.microbatches = config.num_microbatches
        self.local_length = train.sequence_length // p.context
        self.causal_block_length = causal_block_length(train.sequence_length, p.context)
        self.tokens = config.microbatch_sequences * self.local_length
        frozen, none = config.frozen, Elements(0, 0)
        table = self.table = parameters(self.model, p, frozen)
        of_layer = {path: elements for path, elements in table.items() if path.startswith(LAYERS)}
        # Frozen parameters have no gradients, and their weights are read in place.
        trained = {path: none if path in frozen else elements for path, elements in table.items()}
        here = config.chunk_layers * p.virtual_stages
        self.layer = sum(of_layer.values(), Elements(0, 0))
        self.layers = self.layer.times(here)
        # Stacks that may be in two layouts: not those of experts that ZeRO shards, as a gather along the first dim needs one,
        # but for the layer loop of ZeRO 2 with several microbatches (one of two such steps, 18 GiB).
        divides = self.model.num_experts is not None and self.model.num_experts % self.ranks == 0
        whole = divides and not (self.zero == 2 and self.microbatches > 1)
        stacks = {spec.path for spec in layer_parameters(self.model) if not (whole and spec.of_experts)}
        self.largest_stack = here * max(trained[path].compute for path in stacks)
        self.embedding, self.head = table["embedding"], table.get("head", table["embedding"])
        self.vocabulary = self.embedding if self.model.tie_embeddings else self.embedding + self.head
        of_tower = [path for path in table if path.startswith(OF_IMAGES)]
        self.tower = sum((table[path] for path in of_tower), none)
        self.trained_tower = sum((trained[path] for path in of_tower), none)
        self.all = self.layers + self.vocabulary + table["final_norm.scale"] + self.tower
        self.trained_layer = sum((trained[path] for path in of_layer), none)
        self.trained_layers = self.trained_layer.times(here)
        self.trained_embedding, self.trained_head = trained["embedding"], trained.get("head", trained["embedding"])
        self.trained_vocabulary = self.trained_embedding + (none if self.model.tie_embeddings else self.trained_head)
        # ZeRO 3 gathers a matrix along the dim that it shards. XLA turns the stacks in which that is the last dim; those of
        # trained weights are cast, and so turned for nothing.
        self.turned = 0
        if self.zero == 3 and p.pipe == 1:
            last = [spec.path for spec in layer_matmuls(self.model) if spec.dims[-1] == "embed" and spec.path in frozen]
            self.turned = here * sum(table[path].master for path in last)
        self.trained = self.trained_layers + self.trained_vocabulary + trained["final_norm.scale"] + self.trained_tower
        self.rows = self.head.compute // self.model.hidden_size
        self.images = ImageSizes(config)
        self.pipelined = p.pipe > 1
        table_of = (p.schedule, p.pipe, self.microbatches, p.virtual_stages)
        self.slots, self.finished_slots = slots_of(*table_of) if self.pipelined else (1, 0)

    @property
    def loss_chunks(self) -> int:
        return min(self.local_length, -(-self.tokens // self.config.train.loss_chunk_tokens))

    # ---------------------------------------------------------------------------------------- from step to step

    def resident(self) -> dict[str, float]:
        offload = self.parallel.offload_state
        per_token = 3 * 4 + 1 + (4 if self.config.data.mask_documents else 0)
        # With DiLoCo, the weights of the last outer step, its momentum, and what codes leave out.
        outer = 0.0
        if self.config.train.diloco_steps is not None:
            outer = (2 + sends_codes(self.config)) * FLOAT32 * self.all.master
            if exchanges_beside_steps(self.config):
                # Fragments in float32 that the step with an exchange holds more, as compiled for 1B in four and in two: 1.0 to
                # 1.7 on six meshes, and in 4 bits 1.6 to 1.8 on three. With many transfers at a time, ZeRO 3 ranks
                # gather embedding and head at once (8B: 2.1 GiB, with fragments of 0.5).
                outer += 1.75 * FLOAT32 * self.all.master / fragments_of(self.config)
                if self.zero == 3 and not self.model.tie_embeddings:
                    outer += self.itemsize * self.head.compute
        return {
            "master_weights": 0 if offload in MASTER_ON_HOST else FLOAT32 * self.trained.master,
            "frozen_weights": self.itemsize * (self.all.master - self.trained.master),
            "optimizer": self.optimizer_state() if offload == "none" else 0,
            "outer_state": outer,
            "batch": self.microbatches * (self.tokens * per_token + self.images.pixels_bytes),
        }

    def optimizer_state(self) -> float:
        """Bytes of the optimizer's moments."""
        in_matrices, elsewhere = self.config.optimizer.numbers
        return FLOAT32 * (in_matrices * self.block_matrices + elsewhere * (self.trained.master - self.block_matrices))

    @cached_property
    def block_matrices(self) -> int:
        """Elements of the blocks' trained matrices, adapters among them, between steps."""
        each = sum(self.table[spec.path].master for spec in trained_matrices(self.config))
        return each * self.config.chunk_layers * self.parallel.virtual_stages

    def on_host(self) -> float:
        offload = self.parallel.offload_state
        state = 0 if offload == "none" else self.optimizer_state()
        if offload in MASTER_ON_HOST:
            state += FLOAT32 * self.trained.master
        if self.layers_on_host:
            state += (self.itemsize + host_sum_itemsize(self.config)) * self.layers.master
        return state + self.slots * self.config.chunk_layers * sum(self.offloaded.values())

    # ---------------------------------------------------------------------------------------------- activations

    @cached_property
    def units(self) -> dict[str, float]:
        """Bytes of one tensor of a block, for one microbatch: of the feed-forward width, for all experts of a token; of the
        model's width unsharded and sharded over tensor, and of each expert's copy of it; of queries, of keys; and of one
        layer's weights."""
        m, t = self.model, self.parallel.tensor
        each = self.tokens * self.itemsize
        keys = m.num_kv_heads // t if m.num_kv_heads % t == 0 else m.num_kv_heads
        return {
            "mlp": each * m.intermediate_size / t * m.mlps_per_token * self.parallel.slots_per_row,
            "rows": each * m.hidden_size * m.mlps_per_token * self.parallel.slots_per_row * has_experts(m),
            "whole": each * m.hidden_size,
            "split": each * m.hidden_size / t,
            "query": each * m.num_heads * m.head_dim / t,
            "key": each * keys * m.head_dim,
            "layer": self.itemsize * self.layer.compute,
            "trained_layer": self.itemsize * self.trained_layer.compute,
        }

    @cached_property
    def kept(self) -> dict[str, float]:
        """Bytes on the device per layer and microbatch, by name."""
        if not self.policy.everything:
            return self._scaled(self._held.kept)
        # What autodiff keeps of the plain block: for each half the float32 stream, its normed copy before and after the scale,
        # and the sequence that enters the matmuls, gathered unless a ring gathers it again; queries, keys, values, attention's
        # output; the MLP's products, of which GELU computes some again. Of norms of a half's output or of heads the same three
        # as of its input's.
        u, norms = self.units, self.model.block_norms
        products = (3, 3) if has_experts(self.model) else (4, 4) if self.model.activation == "gelu_tanh" else (6, 3)
        normed = {"block_input": 2 * u["split"] * (norms != "after"), "block_output": 2 * u["split"] * (norms != "before")}
        of_heads = (u["query"] + u["key"]) * (self.model.qk_norm is not None)
        if self.has_own_layers:
            # Without a stack or a ring XLA keeps what the matmuls read, and computes the rest of a norm again from its input.
            of_attention = {"query": u["query"], "key": u["key"], "value": u["key"], "attention_output": u["query"]}
            of_attention["qk_norm"] = of_heads
            of_halves = {**normed, "attention_input": u["whole"], "mlp_input": u["whole"]}
            if self.in_blocks and not self.scores:
                # Of each halving a half of the queries, and of the keys and values.
                levels = halvings(self.causal_block_length)
                of_attention["attention_halves"] = levels * (u["query"] / 2 + u["key"])
            return {**of_halves, **of_attention, "expert_rows": u["rows"], "mlp_products": products[1] * u["mlp"]}
        # A frozen norm's backward pass does not read its copy before the scale.
        copies = 2 if self.config.frozen & {"layers.attention_norm.scale", "layers.attention_post_norm.scale"} else 3
        input_bytes = u["split" if rings_tensor(self.config, self.capability) else "whole"]
        return {
            **{name: FLOAT32 / self.itemsize * copies * size for name, size in normed.items()},
            "attention_input": input_bytes,
            "query": u["query"],
            "key": u["key"],
            "value": u["key"],
            "qk_norm": 3 * FLOAT32 / self.itemsize * of_heads,
            "attention_output": u["query"],
            "attention_lse": FLOAT32 * self.tokens * self.model.num_heads / self.parallel.tensor,
            # Experts keep rows of it instead.
            "mlp_input": input_bytes * (not has_experts(self.model)),
            "router_input": FLOAT32 / self.itemsize * u["split"] * has_experts(self.model),
            "expert_rows": u["rows"],
            "mlp_products": products[0] * u["mlp"],
        }

    @cached_property
    def offloaded(self) -> dict[str, float]:
        return {} if self.policy.everything else self._scaled(self._held.offloaded)

    @cached_property
    def _held(self):
        return bytes_per_token_and_layer(self.policy, self.config, blockwise=is_blockwise(self.config, self.capability))

    def _scaled(self, per_token: dict[str, float]) -> dict[str, float]:
        tokens = self.config.microbatch_sequences * self.config.train.sequence_length
        return {name: size * tokens for name, size in per_token.items()}

    @property
    def scores(self) -> float:
        """Elements of one layer's score matrices, if plain XLA computes them; else 0."""
        m, p = self.model, self.parallel
        if is_blockwise(self.config, self.capability):
            return 0
        return self.tokens * self.local_length * m.num_heads / p.tensor

    @property
    def packing_bytes(self) -> float:
        """Bytes of the log-sum-exp of each document of a call, while attention runs backward."""
        of_document = FLOAT32 * self.tokens * self.model.num_heads / self.parallel.tensor
        return of_document * self._documents_in_a_call if self.packed else 0

    @property
    def _documents_in_a_call(self) -> int:
        """For each piece of a sequence, in the backward pass; 1 without packing."""
        return most_in_a_piece(self.packed, self.causal_block_length, BACKWARD_SLOTS) if self.packed else 1

    @property
    def attention_workspace(self) -> float:
        """Bytes of cuDNN's workspace while attention runs backward, which only a GPU knows: for each document of a call the
        float32 gradients of the queries and a float32 sum for each row and head, and for grouped heads the keys' and values'
        gradients for each head of the queries. Three steps compiled on an H100 have the same to 5 KiB (cuDNN 9.19); assumed
        on other GPUs.
        """
        model = self.model
        if not self.on_device or not takes_cudnn(model, self.capability):
            return 0
        of_head = FLOAT32 * (model.head_dim + 1)
        if model.num_kv_heads < model.num_heads:
            of_head += 2 * self.itemsize * model.head_dim
        return self._documents_in_a_call * self.tokens * model.num_heads / self.parallel.tensor * of_head

    def activations(self) -> dict[str, float]:
        """Terms of all layers of a chunk, in all slots."""
        count = self.slots * self.config.chunk_layers
        held = {f"activations.{name}": count * size for name, size in self.kept.items()}
        if self.policy.offload:
            # One layer's tensors in transfer to the host or back.
            held["activations.fetched"] = sum(self.offloaded.values())
        if self.pipelined:
            # Outputs that wait for the head, one that arrives and one that goes back.
            held["stage_messages"] = (self.finished_slots + 2) * self.units["split"]
            held["noise_scale"] = self.noise_scale()
        return {**held, "images": self.images.kept_bytes}

    def noise_scale(self, at_loss: bool = False) -> float:
        """Float32 bytes for measuring the noise scale in a pipeline (parallel/grad_square_norms.py): during a loss, that
        microbatch's head gradient; with tied embeddings, always one microbatch's token rows per stage.
        """
        if self.config.log.noise_scale_every is None:
            return 0
        kept = min(self.microbatches, self.parallel.pipe) * self.units["split"] if self.model.tie_embeddings else 0
        return FLOAT32 * (kept / self.itemsize + (self.head.compute if at_loss else 0))

    # ------------------------------------------------------------------------------------ weights and gradients

    @cached_property
    def has_own_layers(self) -> bool:
        """Whether each layer has its own arrays; else they go through a loop (layer_loop.py), in a pipeline also in the step
        that measures the noise scale."""
        measures = self.pipelined and self.config.log.noise_scale_every is not None
        return has_own_layers(self.config, self.capability) and not measures

    @property
    def layers_on_host(self) -> bool:
        """Whether the layers' weights and gradient sums are in the host's memory (parallel/layer_loop.py)."""
        return self.parallel.offload_state == "all"

    @property
    def host_sums(self) -> float:
        """Bytes of one layer's gradient sums on the host while they are added to: those of a single microbatch are only
        written."""
        return FLOAT32 * self.layer.master if self.layers_on_host and self.accumulates else 0.0

    @cached_property
    def accumulates(self) -> bool:
        """Whether gradients are accumulated. XLA removes a scan over one microbatch."""
        return self.microbatches > 1 or self.pipelined

    @cached_property
    def sends_once(self) -> bool:
        """As layer_stack.sends_once, unless some steps measure the noise scale: these need more memory."""
        return sends_once(self.config, self.microbatches, self.capability) and self.config.log.noise_scale_every is None

    def weights(self, loss: bool = False) -> float:
        """Weights in the compute dtype; none if the float32 weights can be read in place, unsharded by ZeRO.

        Args:
          loss: at the loss; else while layers are computed. With a single microbatch, XLA frees weights after their last use.
        """
        if self.itemsize == FLOAT32 and self.zero == 0:
            return 0
        of_layers, vocabulary = self.trained_layers, self.trained_vocabulary
        layers = 0 if self.layers_on_host else of_layers.master if self.zero == 3 else of_layers.compute
        if self.pipelined:
            # ZeRO 3 gathers the vocabulary once per step and keeps it both as received and in the layout for matmuls.
            layouts = 2 if self.zero == 3 else 1
            return self.itemsize * (layers + layouts * vocabulary.compute)
        share = vocabulary.master if self.zero == 3 else vocabulary.compute
        head = self.head if self.zero == 3 else self.trained_head
        whole = head.compute if loss and (self.zero == 3 or not self.accumulates) else 0
        tower = self.trained_tower.master if self.zero == 3 else self.trained_tower.compute
        return self.itemsize * (layers + (share if self.accumulates else 0) + whole + self.turned + tower)

    @property
    def fp8_rounded(self) -> float:
        """One byte per element of the gradients of SwiGLU's products, of the gathered sequence, and of one layer's weights."""
        if not self.model.multiplies_fp8:
            return 0
        return (2 * self.units["mlp"] + self.units["whole"] + self.units["layer"]) / self.itemsize

    def gradients(self) -> dict[str, float]:
        """Float32 sums, to which each microbatch adds. A single one without ZeRO 2 leaves its layers' gradients in the compute
        dtype, where layers with arrays of their own free as many weights as they make gradients; or ZeRO 1 reduces them."""
        of_layers = self.trained_layers
        layers = 0 if self.layers_on_host else of_layers.master if self.zero >= 2 else of_layers.compute
        shared = self.zero >= 2 and not self.pipelined
        vocabulary = self.trained_vocabulary.master if shared else self.trained_vocabulary.compute
        if self.accumulates:
            # A step that measures the noise scale makes a microbatch's gradients apart, for their squares.
            is_apart = self.config.log.noise_scale_every is not None and self.zero < 2 and not self.pipelined
            apart = self.itemsize * layers + FLOAT32 * vocabulary if is_apart else 0
            tower = self.trained_tower.master if shared else self.trained_tower.compute
            return {"gradients": FLOAT32 * (layers + vocabulary + tower), "microbatch_gradients": apart}
        if self.zero >= 2:
            return {"microbatch_gradients": FLOAT32 * layers}
        if self.sends_once and not self.has_own_layers:
            return {"microbatch_gradients": FLOAT32 * of_layers.master}
        is_freed = self.weights() > 0 and self.has_own_layers
        return {"microbatch_gradients": 0.0 if is_freed else self.itemsize * layers}
