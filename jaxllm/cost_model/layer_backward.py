"""Memory that XLA needs to run one layer backward, beside the tensors that the step keeps: counts of tensors of each size.

The counts were read in XLA's buffer listings at a step's fullest moment (option xla_dump_to). They follow from the program, not
from a theory: recomputed tensors, products that wait for the gradients of weights, gathered sequences, attention blocks, copies
in another layout. They are whole or half numbers, and none is fitted. benchmarks/memory_accuracy.py measures their error on
steps that were not used for the counts.

A layer is fullest at one of three moments:

    feed_forward       SwiGLU's products, their gradients, and the tensors they come from
    feed_forward_end   the gradients of the gathered sequence, beside most of that
    attention          attention blocks, forward and backward, beside tensors that wait for the gradients of the weights above
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from jaxllm.config.remat_policy import Policy

Moments = dict[str, dict[str, float]]
"""Moment -> term -> bytes."""


class TensorCounts(NamedTuple):
    """Number of tensors of each size (LayerShape.units)."""

    mlp: int
    whole: int
    split: int


COUNTS: Mapping[str, Mapping[str, TensorCounts]] = {
    "kept": {
        "feed_forward": TensorCounts(3, 2, 3),
        "feed_forward_end": TensorCounts(3, 4, 3),
        "attention": TensorCounts(2, 2, 2),
    },
    "recomputed": {
        "feed_forward": TensorCounts(5, 3, 3),
        "feed_forward_end": TensorCounts(4, 5, 3),
        "attention": TensorCounts(4, 2, 2),
    },
}
"""Counts by whether SwiGLU's products are kept. remat=none counts as recomputed: in a loop its residuals are copied."""


class Blocks(NamedTuple):
    """Tensors in attention's backward: of the queries' size and of the keys' size."""

    query: int
    key: int


ATTENTION: Mapping[str, Blocks] = {"whole": Blocks(4, 4), "ring": Blocks(6, 12), "all_gather": Blocks(6, 6)}
"""For all_gather, a key tensor has the keys of all context ranks."""
QUERIES_WITH_DOCUMENTS = 6
"""Minimum with documents: a block on the diagonal is split, and its parts are concatenated again."""
RECOMPUTED_QUERIES, RECOMPUTED_QUERIES_WITH_DOCUMENTS = 3, 6
"""Recomputed query-sized tensors that are live while the feed-forward runs backward."""
REARRANGED_QUERIES, REARRANGED_IN_A_RING = 3, 6
"""Copies of queries, outputs and their gradients in zigzag chunks; with one sequence no copy is needed. A ring has more of them
if its layer is recomputed and transfers start early."""
SMALLEST_HALF = 128
"""Rows at which the halving of a block with documents ends (blockwise_attention.documents_by_halves)."""
SMALLEST_SCORES = 6
"""Scores of the smallest blocks, forward and backward, two in float32 and two in the compute dtype, in units of queries if
heads are as wide as these blocks are long. Observed with one sequence per microbatch and a recomputed layer."""
HALVINGS = 2
"""Queries and outputs, half of each per halving; one of them during recomputation."""
SCORE_BYTES = 10
"""Bytes per score in plain XLA attention: float32 before and after softmax, and the compute dtype."""


@dataclass(frozen=True)
class LayerShape:
    """Sizes of one layer of a train step on one device."""

    units: Mapping[str, float]
    """Bytes of one tensor of a block, by its size."""
    policy: Policy
    kept: Mapping[str, float]
    """Bytes on the device per layer and microbatch, by name."""
    offloaded: Mapping[str, float]
    """Bytes on the host per layer and microbatch, by name."""
    scores: float
    """Elements of one layer's score matrices, if plain XLA computes them; else 0."""
    fp8_rounded: float
    """Bytes of tensors rounded for FP8 matmuls."""
    sequences: int
    """Sequences per microbatch."""
    causal_block_length: int
    """Tokens of a block on the diagonal."""
    head_dim: int
    context: int
    context_method: str
    tensor: int
    zero: int
    """ZeRO level; 0 on a single rank."""
    sends_once: bool
    """Whether each layer is gathered and reduced once in a step (layer_stack.sends_once)."""
    microbatches: int
    chunk_layers: int
    virtual_stages: int
    slots: int
    """Slots in a pipeline's ring of residuals."""
    documents: bool
    """Whether attention is masked at document boundaries, other than by packing."""
    packing_bytes: float
    """Bytes for which cuDNN packs documents."""
    attention_workspace: float
    """Bytes of cuDNN's workspace."""
    pipelined: bool
    overlap_passes: bool
    has_own_layers: bool
    """Whether each layer has its own arrays; else they go through a loop with a ring of residuals."""
    runs_ahead: bool
    """Whether XLA starts transfers early on this kind of GPU."""
    rings_tensor: bool
    """Whether tensor ranks send chunks of a sequence in a ring (layer_stack.rings_tensor)."""
    norms_heads: bool = False
    """Whether queries and keys are normalised (model.qk_norm)."""
    host_sums: float | None = None
    """Bytes of one layer's gradient sums that are read from the host; None if weights and sums are on the device."""


def layer_backward(layer: LayerShape) -> Moments:
    """Terms of each moment, in bytes."""
    counts = COUNTS["kept" if keeps_products(layer) else "recomputed"]
    units = layer.units
    moments: Moments = {}
    if layer.policy.offload and transposes(layer) and not layer.pipelined:
        # The stacks that stay on the device are transposed for the backward pass.
        stacks = sum(layer.kept.get(name, 0) for name in ("block_input", "attention_out", "mlp_down"))
        moments["turn"] = {"relayout": layer.chunk_layers * stacks}
    for moment, held in counts.items():
        size = sum(count * units[name] for name, count in held._asdict().items())
        size += (forward_products(layer) - fewer_products(layer)) * units["mlp"]
        if moment == "attention" and is_single(layer) and keeps_products(layer) and layer.documents:
            # All three products wait for the gradients of their weights.
            size += units["mlp"]
        if moment == "attention" and is_recomputed_early(layer) and layer.context > 1 and layer.tensor > 1:
            size += units["whole"]
        # Gradients, and from ZeRO 3 on gathered weights, which frozen layers have too.
        of_weights = units["layer" if layer.zero == 3 else "trained_layer"]
        size += layers_of_weights(layer, moment) * of_weights + layer.fp8_rounded + (layer.host_sums or 0)
        if layer.norms_heads:
            # The norms' inputs, beside the rotated queries and keys.
            size += sum(units[name] for name in ("query", "key") if name in layer.policy.recompute)
        if transposes(layer):
            size += (1 + late_sequences(layer, moment)) * units["whole"]
        if layer.overlap_passes and layer.pipelined:
            # Tensors of the concurrent forward layer: close to the mean of 18 steps compiled with and without overlap_passes.
            size += units["mlp"] + units["whole"]
        moments[moment] = {"layer_copies": copies(layer, moment), "working_set": size + attention(layer, moment)}
        if moment == "attention" and layer.packing_bytes:
            moments[moment]["packed_documents"] = layer.packing_bytes
        if moment == "attention" and layer.attention_workspace:
            moments[moment]["attention_workspace"] = layer.attention_workspace
        if moment == "attention" and layer.scores:
            moments[moment]["attention_scores"] = SCORE_BYTES * layer.scores
    return moments


def keeps_products(layer: LayerShape) -> bool:
    return not layer.policy.everything and "mlp_gate" not in layer.policy.recompute


def is_recomputed_early(layer: LayerShape) -> bool:
    """Whether most of a layer is recomputed before its backward pass while transfers start early, so that more tensors wait."""
    return layer.runs_ahead and not keeps_products(layer) and not layer.policy.everything


def fewer_products(layer: LayerShape) -> int:
    """Number of SwiGLU's recomputed products that do not wait, by compiled steps. Fewer of them wait in a pipeline, whose
    layer loop is explicit, and where XLA starts no transfers early."""
    if not {"mlp_gate", "mlp_up"} <= set(layer.policy.recompute):
        return 0
    documents = layer.documents
    if not layer.pipelined:
        if layer.runs_ahead and (layer.zero >= 2 or layer.microbatches == 1 or layer.host_sums is not None):
            return 0
        return 0 if documents or layer.context * layer.tensor > 1 else 2
    if is_single(layer):
        # In a ring a product is an array for each chunk, which its gradient, one array, cannot overwrite.
        return 0 if layer.rings_tensor or (layer.runs_ahead and (documents or layer.microbatches > 1)) else 2
    if layer.microbatches == 1 and not documents:
        return 1 if layer.runs_ahead and layer.context * layer.tensor > 1 else 2
    return 1 if layer.runs_ahead and layer.tensor == 1 else 0


def forward_products(layer: LayerShape) -> int:
    """Number of SwiGLU's products of the tick's forward pass that are live while a layer runs backward. In an interleaved
    pipeline whose chunk is one layer, no loop keeps both passes apart, and their rings run at the same time: by buffer
    listings, gate and up of the forward pass wait in chunks. Steps of 1F1B did not show it, and no interleaved step that
    keeps products was compiled."""
    both = layer.rings_tensor and is_single(layer) and layer.virtual_stages > 1
    return 2 if both and {"mlp_gate", "mlp_up"} <= set(layer.policy.recompute) else 0


def is_single(layer: LayerShape) -> bool:
    """Whether a pipeline's chunk is one layer, for which XLA builds no loop."""
    return layer.pipelined and layer.chunk_layers == 1


def gathers_several(layer: LayerShape) -> bool:
    """Whether tensor ranks gather several sequences at once."""
    return layer.sequences > 1 and layer.tensor > 1


def transposes(layer: LayerShape) -> bool:
    """Whether gathered sequences are transposed back. The gather over tensor is along their second dim and moves it first,
    which matters only for several sequences. Chunks in a ring stay in row-major order; the listings that show it are of
    pipelines whose chunk is a loop over layers. Where it is one layer, the gather for the embedding's gradient is there
    instead."""
    in_rows = layer.rings_tensor and layer.pipelined and layer.chunk_layers > 1
    return gathers_several(layer) and not in_rows


def late_sequences(layer: LayerShape, moment: str) -> int:
    """Number of gradients through queries, keys and values that wait for each other. This happens if transfers start late and a
    sequence is wider than a rank's part of the feed-forward."""
    narrow = layer.units["mlp"] < layer.units["whole"]
    recomputed = not keeps_products(layer) and not layer.policy.everything
    return 3 if moment == "feed_forward_end" and recomputed and narrow and not (layer.runs_ahead or layer.pipelined) else 0


def attention(layer: LayerShape, moment: str) -> float:
    """Bytes that attention adds: its blocks, or, while the feed-forward runs backward, the tensors recomputed for them."""
    units, documents = layer.units, layer.documents
    ranks = layer.context
    method = "whole" if ranks == 1 else layer.context_method
    copied = REARRANGED_IN_A_RING if method == "ring" and is_recomputed_early(layer) else REARRANGED_QUERIES
    rearranged = copied if ranks > 1 and layer.sequences > 1 else 0
    halves = halvings(layer.causal_block_length) / 2 if documents and not layer.scores else 0
    if moment == "attention":
        blocks = ATTENTION[method]
        queries = max(blocks.query, QUERIES_WITH_DOCUMENTS if documents and not layer.scores else 0)
        keys = blocks.key * (ranks if method == "all_gather" else 1)
        if halves and ranks > 1 and is_recomputed_early(layer) and layer.sequences == 1:
            queries += SMALLEST_SCORES * SMALLEST_HALF / layer.head_dim
        return (queries + rearranged + HALVINGS * halves) * units["query"] + keys * units["key"]
    if layer.policy.everything or "attention_out" not in layer.policy.recompute:
        return units["query"] / 2
    queries = RECOMPUTED_QUERIES_WITH_DOCUMENTS if documents else RECOMPUTED_QUERIES
    return (queries + min(rearranged, 1) + halves) * units["query"]


def halvings(causal_block_length: int) -> int:
    """How often a block on the diagonal is halved."""
    return max(0, (causal_block_length // SMALLEST_HALF).bit_length() - 1)


def copies(layer: LayerShape, moment: str) -> float:
    """Bytes of one layer's activations copied from their stack or ring, where they are not read in place. Offloaded activations
    are fetched one layer ahead, so two layers of them are live (one is among the activations)."""
    policy, several = layer.policy, layer.chunk_layers > 1
    if policy.everything:
        interleaved = layer.virtual_stages > 1 and several
        # Chunks in a ring are counted too: of such a step no buffer listing shows that they stay in row-major order.
        if not gathers_several(layer) or (layer.pipelined and not interleaved):
            return 0
        # A second, transposed stack of the normed input; if interleaved, of both (attention and feed-forward), in all slots.
        stacks = 2 * layer.slots if interleaved else 1
        return stacks * layer.chunk_layers * layer.units["whole"]

    def one_layer(held: Mapping[str, float]) -> float:
        # A single layer's or single microbatch's products are read in place.
        alone = is_single(layer) or (layer.pipelined and layer.microbatches == 1 and not layer.documents)
        done = ("mlp_gate", "mlp_up") if moment == "attention" or alone else ()
        done += ("mlp_down",) if moment == "attention" else ()
        return sum(size for name, size in held.items() if name not in done)

    size = 0.0
    if not layer.has_own_layers:
        size += one_layer(layer.kept)
    elif moment == "attention":
        size += sum(layer.kept.get(name, 0) for name in ("query", "attention_output"))
    if several and fetches_ahead(layer):
        size += one_layer(layer.offloaded)
    elif moment == "attention":
        size += one_layer(layer.offloaded) - sum(layer.offloaded.values())
    if moment != "attention" and "mlp_gate" in policy.recompute and "mlp_up" not in policy.recompute:
        # Of the two products that COUNTS has as recomputed, one is kept.
        size -= layer.units["mlp"]
    return size


def fetches_ahead(layer: LayerShape) -> bool:
    """Whether offloaded tensors are fetched a layer ahead. In pipeline steps for A100s, this happens only behind attention with
    documents that gathers its keys."""
    gathers = layer.context > 1 and layer.context_method == "all_gather"
    return layer.runs_ahead or (layer.pipelined and gathers and layer.documents)


def layers_of_weights(layer: LayerShape, moment: str = "feed_forward") -> float:
    """Number of layers whose weights are live in the compute dtype, with their gradients. These are about to be added to the
    sums, or reduce-scattered behind the next layer: with ZeRO 2 and 3, and in a loop that sends once. With sums on the host
    those of the last layer wait beside this layer's weights, of which the feed-forward's are done at attention."""
    if layer.pipelined and layer.chunk_layers == 1:
        return 0.5
    if layer.zero >= 2 or (layer.sends_once and not layer.has_own_layers):
        return 2.5 if layer.runs_ahead else 1.5
    if layer.host_sums is not None:
        return 1.5 if moment == "attention" else 2
    return 2 if layer.pipelined else 1
