"""What XLA holds while it runs one layer backward, beside what the step keeps: how many tensors of which size, counted.

The counts were read in listings of the buffers that live at a step's fullest moment (XLA's option xla_dump_to), and are of no
theory but the program's: what is computed again, products that wait for the gradients of weights, gathered sequences, blocks of
attention, copies in another layout. They are whole or half numbers and none is fitted; how far they are off, on steps that were
not looked at, is what benchmarks/memory_accuracy.py tells.

A layer is fullest at one of three moments:

    feed_forward       SwiGLU's products, their gradients, and what led to them
    feed_forward_end   the gradients of the gathered sequence beside most of that
    attention          the blocks of attention, forward and backward, beside what waits for the gradients of the weights above
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from jaxllm.plan.activations import context_method
from jaxllm.plan.hardware import Gpu

if TYPE_CHECKING:
    from jaxllm.plan.memory import Step

Moments = dict[str, dict[str, float]]
"""Moment -> term -> bytes."""


class Held(NamedTuple):
    """Tensors of each size (Step.units)."""

    mlp: int
    whole: int
    split: int


COUNTS: Mapping[str, Mapping[str, Held]] = {
    "kept": {"feed_forward": Held(3, 2, 3), "feed_forward_end": Held(3, 4, 3), "attention": Held(2, 2, 2)},
    "recomputed": {"feed_forward": Held(5, 3, 3), "feed_forward_end": Held(4, 5, 3), "attention": Held(4, 2, 2)},
}
"""By whether SwiGLU's products are kept; with everything kept it is as with recomputing: autodiff's residuals are copied."""


class Blocks(NamedTuple):
    """Of attention's backward: tensors of the queries' size, and of the keys'."""

    query: int
    key: int


ATTENTION: Mapping[str, Blocks] = {"whole": Blocks(4, 4), "ring": Blocks(6, 12), "all_gather": Blocks(6, 6)}
"""All_gather's keys are those of all context ranks."""
QUERIES_WITH_DOCUMENTS = 6
"""At least: a block on the diagonal is cut, and its parts are put together again."""
RECOMPUTED_QUERIES, RECOMPUTED_QUERIES_WITH_DOCUMENTS = 3, 6
"""That lie there, made anew, while the feed-forward runs backward."""
REARRANGED_QUERIES, REARRANGED_IN_A_RING = 3, 6
"""Copies of queries, outputs and their gradients, by chunks of the zigzag: with one sequence they are the same bytes. More in a
ring that comes behind a layer made anew, where transfers start early."""
SMALLEST_HALF = 128
"""Rows where the halving of a block with documents ends (attention_blocks.documents_by_halves)."""
SMALLEST_SCORES = 6
"""The smallest blocks' scores, forward and backward, two in float32 and two in the compute dtype: queries, where heads are as
wide as these blocks are long. Seen with one sequence a microbatch and a layer made anew."""
HALVINGS = 2
"""Queries and outputs, half of each for every halving; while it is computed again, one of them."""
SCORE_BYTES = 10
"""Of each score that plain XLA attention computes: float32 before and after softmax, and the compute dtype."""


def layer_backward(step: Step) -> Moments:
    """Terms of each moment, in bytes."""
    counts = COUNTS["kept" if keeps_products(step) else "recomputed"]
    units = step.units
    moments: Moments = {}
    if step.policy.offload and transposes(step) and not step.pipelined:
        # The stacks that stay on the device, transposed for the backward pass; in a loop of XLA's own making they are not.
        stacks = sum(step.kept.get(name, 0) for name in ("block_input", "attention_out"))
        moments["turn"] = {"relayout": step.config.chunk_layers * stacks}
    for moment, held in counts.items():
        size = sum(count * units[name] for name, count in held._asdict().items())
        size -= fewer_products(step) * units["mlp"]
        if moment == "attention" and is_single(step) and keeps_products(step) and step.config.data.mask_documents:
            # All three products wait for the gradients of their weights.
            size += units["mlp"]
        if moment == "attention" and is_made_anew(step) and step.parallel.context > 1 and step.parallel.tensor > 1:
            size += units["whole"]
        size += layers_of_weights(step) * units["layer"] + step.fp8_rounded
        if transposes(step):
            size += (1 + late_sequences(step, moment)) * units["whole"]
        if step.parallel.overlap_passes and step.pipelined:
            # Of the layer that goes forward beside it: near the mean of 18 steps that were compiled with and without.
            size += units["mlp"] + units["whole"]
        moments[moment] = {"layer_copies": copies(step, moment), "working_set": size + attention(step, moment)}
        if moment == "attention" and step.scores:
            moments[moment]["attention_scores"] = SCORE_BYTES * step.scores
    return moments


def keeps_products(step: Step) -> bool:
    return not step.policy.everything and "mlp_gate" not in step.policy.recompute


def is_made_anew(step: Step) -> bool:
    """Whether most of a layer is computed again before its backward pass, with transfers that start early: more of it waits."""
    return step.runs_ahead and not keeps_products(step) and not step.policy.everything


def fewer_products(step: Step) -> int:
    """How many of SwiGLU's products that are made anew do not wait, as compiled steps show: fewer of them wait in a pipeline,
    whose layer loop is written by hand, and where XLA starts nothing early."""
    if not {"mlp_gate", "mlp_up"} <= set(step.policy.recompute):
        return 0
    documents = step.config.data.mask_documents
    if not step.pipelined:
        return 0 if step.runs_ahead or documents or step.parallel.context * step.parallel.tensor > 1 else 2
    if is_single(step):
        return 0 if step.runs_ahead and (documents or step.microbatches > 1) else 2
    if step.microbatches == 1 and not documents:
        return 2
    return 1 if step.runs_ahead and step.parallel.tensor == 1 else 0


def is_single(step: Step) -> bool:
    """Whether a pipeline's chunk is one layer: XLA makes no loop of it."""
    return step.pipelined and step.config.chunk_layers == 1


def transposes(step: Step) -> bool:
    """Sequences split over tensor are gathered along their second dim, which puts it first: several are transposed back."""
    return step.config.microbatch_sequences > 1 and step.parallel.tensor > 1


def late_sequences(step: Step, moment: str) -> int:
    """The gradients by way of queries, keys and values, that wait for each other where transfers start late and a sequence is
    wider than a rank's part of the feed-forward."""
    narrow = step.units["mlp"] < step.units["whole"]
    anew = not keeps_products(step) and not step.policy.everything
    return 3 if moment == "feed_forward_end" and anew and narrow and not (step.runs_ahead or step.pipelined) else 0


def attention(step: Step, moment: str) -> float:
    """What attention adds: its blocks, or while the feed-forward runs backward what was computed again for them."""
    units, documents = step.units, step.config.data.mask_documents
    ranks = step.parallel.context
    method = "whole" if ranks == 1 else context_method(step.config)
    copied = REARRANGED_IN_A_RING if method == "ring" and is_made_anew(step) else REARRANGED_QUERIES
    rearranged = copied if ranks > 1 and step.config.microbatch_sequences > 1 else 0
    halves = halvings(step) / 2 if documents and not step.scores else 0
    if moment == "attention":
        blocks = ATTENTION[method]
        queries = max(blocks.query, QUERIES_WITH_DOCUMENTS if documents and not step.scores else 0)
        keys = blocks.key * (ranks if method == "all_gather" else 1)
        if halves and ranks > 1 and is_made_anew(step) and step.config.microbatch_sequences == 1:
            queries += SMALLEST_SCORES * SMALLEST_HALF / step.model.head_dim
        return (queries + rearranged + HALVINGS * halves) * units["query"] + keys * units["key"]
    if step.policy.everything or "attention_out" not in step.policy.recompute:
        return units["query"] / 2
    queries = RECOMPUTED_QUERIES_WITH_DOCUMENTS if documents else RECOMPUTED_QUERIES
    return (queries + min(rearranged, 1) + halves) * units["query"]


def halvings(step: Step) -> int:
    """How often a block on the diagonal is halved; with several context ranks it is one of a rank's two chunks."""
    rows = step.local_length if step.parallel.context == 1 else step.local_length // 2
    return max(0, (rows // SMALLEST_HALF).bit_length() - 1)


def copies(step: Step, moment: str) -> float:
    """One layer's activations out of the stack or ring that holds them, where they are not read in place. What is offloaded
    comes a layer ahead, so that two lie here (one is part of the activations)."""
    policy, several = step.policy, step.config.chunk_layers > 1
    if policy.everything:
        interleaved = step.parallel.virtual_stages > 1 and several
        if not transposes(step) or (step.pipelined and not interleaved):
            return 0
        # A second stack of the normed input, transposed; interleaved of both, attention's and the feed-forward's, in all slots.
        stacks = 2 * step.slots if interleaved else 1
        return stacks * step.config.chunk_layers * step.units["whole"]

    def one_layer(held: Mapping[str, float]) -> float:
        # One layer's, or one microbatch's, are read in place.
        alone = is_single(step) or (step.pipelined and step.microbatches == 1 and not step.config.data.mask_documents)
        done = ("mlp_gate", "mlp_up") if moment == "attention" or alone else ()
        return sum(size for name, size in held.items() if name not in done)

    size = 0.0
    if step.loops_by_hand:
        size += one_layer(step.kept)
    elif moment == "attention":
        size += sum(step.kept.get(name, 0) for name in ("query", "attention_output"))
    if several and fetches_ahead(step):
        size += one_layer(step.offloaded)
    elif moment == "attention":
        size += one_layer(step.offloaded) - sum(step.offloaded.values())
    if moment != "attention" and "mlp_gate" in policy.recompute and "mlp_up" not in policy.recompute:
        # Of the two products that COUNTS has computed again, one is among the kept.
        size -= step.units["mlp"]
    return size


def fetches_ahead(step: Step) -> bool:
    """Whether what is offloaded comes a layer ahead; in a pipeline's steps for A100s only behind attention with documents that
    gathers its keys."""
    gathers = step.parallel.context > 1 and context_method(step.config) == "all_gather"
    return step.runs_ahead or (step.pipelined and gathers and step.config.data.mask_documents)


def layers_of_weights(step: Step) -> float:
    """Weights of a layer in the compute dtype, and its gradients, in layers of weights: gathered ahead and shared out behind
    with ZeRO 2 and 3, or on their way into the sums."""
    if step.pipelined and step.config.chunk_layers == 1:
        return 0.5
    if step.zero >= 2:
        return 2.5 if step.runs_ahead else 1.5
    return 2 if step.pipelined else 1


def runs_ahead(gpu: Gpu | None) -> bool:
    """Whether XLA starts transfers as early as they could be useful: for Hopper and later it does, and holds more for it; for
    an A100 it starts them late (compiled steps; its scheduler goes by the GPU's speeds)."""
    return gpu is None or gpu.chip.compute_capability >= (9, 0)
