"""Memory that XLA needs to run one layer backward, beside the tensors that the step keeps: counts of tensors of each size.

The counts were read in XLA's buffer listings at a step's fullest moment (CONTRIBUTING, "How to add an activation"), some of JAX
0.12 from differences between steps: whole or half numbers of recomputed tensors, products that wait for the gradients of
weights, gathered sequences, attention blocks, copies in another layout. benchmarks/memory_accuracy.py measures their error;
memory_held_out.csv has steps that no count was taken from.

A layer is fullest at one of three moments:

    feed_forward       SwiGLU's products, their gradients, and the tensors they come from
    feed_forward_end   the gradients of the gathered sequence, beside most of that
    attention          attention blocks, forward and backward, beside tensors that wait for the gradients of the weights above

A fourth, `turn`, is before the layers: stacks that stay on the device are transposed for the backward pass.

ROWS has a row for each kind of buffer: its size (sizes_of), how many of it are live at each moment, and in which steps (facts).
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

from jaxllm.config.layer_stack import rings_tensor
from jaxllm.config.model_spec import has_experts
from jaxllm.config.types import EXPERT_CHOICE
from jaxllm.cost_model.activations import context_method
from jaxllm.cost_model.step_sizes import StepSizes, halvings

MOMENTS = ("feed_forward", "feed_forward_end", "attention", "turn")
HELD = {
    "block_input": "hidden",
    "query": "queries",
    "key": "keys",
    "value": "keys",
    "attention_output": "queries",
    "attention_lse": "keys",
    "attention_out": "hidden",
    "mlp_gate": "products",
    "mlp_up": "products",
    "mlp_down": "last_output",
    EXPERT_CHOICE: "hidden",
}
"""Named tensor of a block -> its group, whose tensors are copied and freed together. Rows count tensors by group."""


class Row(NamedTuple):
    """One kind of buffer."""

    what: str
    """For a reader; nothing depends on it."""
    size: str
    """Name of a size (sizes_of)."""
    counts: tuple[float, ...]
    """Number live at each of MOMENTS. Negative: tensors of an earlier row that are not live in these steps."""
    when: str = ""
    """Facts that must hold, or with a minus must not hold (facts)."""

    def holds(self, known: frozenset[str]) -> bool:
        return all(word[1:] not in known if word[0] == "-" else word in known for word in self.when.split())


ROWS: Mapping[str, tuple[Row, ...]] = {
    "layer_copies": (
        # Activations copied from their stack or ring; products are read in place. Offloaded ones are fetched one layer ahead,
        # so two layers of them are live (one is among the activations).
        Row("copied from the stack", "kept.hidden", (1, 1, 1), "-own_layers"),
        Row("copied from the stack", "kept.queries", (1, 1, 1), "-own_layers"),
        Row("fetched ahead", "offloaded.hidden", (1, 1, 1), "fetches_ahead"),
        Row("fetched ahead", "offloaded.queries", (1, 1, 1), "fetches_ahead"),
        Row("fetched ahead", "offloaded.products", (1, 1, 0), "fetches_ahead"),
        Row("fetched, already freed", "offloaded.products", (0, 0, -1), "-fetches_ahead"),
        Row("a product counted as recomputed, but kept", "mlp", (-1, -1, 0), "recomputes_gate -recomputes_up"),
        # Autodiff's normed inputs; chunks in a ring too, as no buffer listing shows that they stay in row-major order.
        Row("transposed stack of one normed input", "stack", (1, 1, 1), "everything gathers_several -pipelined older"),
        Row("transposed stacks of both, in all slots", "slots", (2, 2, 2), "everything gathers_several interleaved older"),
        Row("the same of chunks of one layer", "slots", (2, 2, 2), "everything gathers_several interleaved single -older"),
    ),
    "working_set": (
        # remat=none counts as recomputed: in a loop its residuals are copied.
        Row("SwiGLU's products and their gradients", "mlp", (3, 3, 2), "keeps_products"),
        Row("SwiGLU's products and their gradients", "mlp", (5, 4, 4), "-keeps_products"),
        Row("gathered sequences and their gradients", "whole", (2, 4, 2), "keeps_products"),
        Row("gathered sequences and their gradients", "whole", (3, 5, 2), "-keeps_products"),
        Row("hidden states and their gradients", "split", (3, 3, 2)),
        # Experts, by thirty steps compiled for Hopper GPUs (JAX 0.12).
        Row("each expert's rows and their gradients", "rows", (3, 3, 0)),
        # Tokens that travel, by twelve such steps. At the peak one layer's buffers are live, and no gathered sequence.
        Row("rows on their way", "rows", (2, 2, 0), "expert_parallel"),
        Row("rows read from their stack", "rows", (-1, -1, 0), "expert_parallel everything"),
        Row("sequences not gathered any more", "whole", (-2, -3, 0), "expert_parallel"),
        Row("recomputed products, overwritten", "mlp", (-2, -2, -2), "expert_parallel recomputes_products"),
        Row("fetched products, overwritten", "offloaded.products", (-1, -1, 0), "expert_parallel"),
        Row("a product of experts, overwritten", "mlp", (-1, -1, -1), "experts one_microbatch"),
        Row("a layer of experts that arrives", "weights", (1, 1, 1), "experts pipelined zero_3"),
        Row("another, or its gradients", "weights", (1, 1, 1), "experts pipelined zero_3 -one_microbatch"),
        # Recomputed products that do not wait. Fewer of them wait in a pipeline, whose layer loop is explicit, and where XLA
        # starts no transfers early.
        Row("overwritten", "mlp", (-2, -2, -2), "recomputes_products -pipelined -documents -sharded -runs_ahead"),
        Row("overwritten", "mlp", (-2, -2, -2), "recomputes_products -pipelined -documents -sharded runs_ahead -sums_late"),
        Row("overwritten", "mlp", (-2, -2, -2), "recomputes_products chunked one_pass -runs_ahead"),
        Row("overwritten", "mlp", (-1, -1, -1), "recomputes_products chunked one_pass runs_ahead -sharded"),
        Row("overwritten", "mlp", (-1, -1, -1), "recomputes_products chunked runs_ahead -tensor"),
        Row("overwritten", "mlp", (-2, -2, -2), "recomputes_products -recomputes_query chunked one_pass runs_ahead sharded"),
        # Since JAX 0.12 more: gradients of weights come before attention runs backward. Differences of two to twenty steps.
        Row("overwritten", "mlp", (-1, -1, -1), "keeps_products chunked -offloads -runs_ahead -older"),
        Row("overwritten", "mlp", (-1, -1, -1), "keeps_products chunked -offloads documents -runs_ahead -older"),
        Row("overwritten", "mlp", (0, -2, 0), "offloads chunked one_microbatch -experts -older"),
        Row("gathered later", "weights", (-1.5, -1.5, -1.5), "offloads chunked one_microbatch zero_3 -runs_ahead -older"),
        Row("freed", "mlp", (-4, -4, -4), "recomputes_products -recomputes_query chunked one_microbatch -runs_ahead -older"),
        Row("overwritten", "mlp", (-2, -2, -2), "keeps_products single one_microbatch documents -runs_ahead -older"),
        Row("overwritten", "mlp", (-1, -1, -2), "everything single -interleaved -runs_ahead -older"),
        # In an interleaved pipeline whose chunk is one layer, no loop keeps both passes of a tick apart, and their rings run at
        # the same time: gate and up of the forward pass wait in chunks. Steps of 1F1B did not show it, and no interleaved step
        # that keeps products was compiled.
        Row("products of the forward pass", "mlp", (2, 2, 2), "recomputes_products single rings_tensor interleaved"),
        Row("a fetched product, overwritten", "mlp", (0, -1, 0), "single keeps_products offloads"),
        Row("a gathered sequence that waits", "whole", (0, 0, 1), "recomputes_early context tensor"),
        # Several sequences are gathered along their second dim, which moves first.
        Row("transposed sequence", "whole", (1, 1, 1), "transposes"),
        Row("gradients through q, k, v that wait for each other", "whole", (0, 3, 0), "transposes sends_late older"),
        # Gradients of weights are about to be added to the sums, or reduce-scattered behind the next layer. With sums on the
        # host those of the last layer wait beside this layer's weights, of which the feed-forward's are done at attention.
        Row("gathered weights, gradients", "weights", (0.5, 0.5, 0.5), "single"),
        Row("gathered weights, gradients", "weights", (1.5, 1.5, 1.5), "-single reduces_behind -runs_ahead"),
        Row("gathered weights, gradients", "weights", (2.5, 2.5, 2.5), "-single reduces_behind runs_ahead"),
        Row("gathered weights, gradients", "weights", (2, 2, 1.5), "-single -reduces_behind host_sums"),
        Row("gathered weights, gradients", "weights", (2, 2, 2), "chunked -reduces_behind -host_sums"),
        Row("weights in place, gradients in sums", "weights", (-2, -2, -2), "chunked own_layers one_microbatch"),
        Row("gathered weights, gradients", "weights", (1, 1, 1), "-pipelined -reduces_behind -host_sums"),
        Row("gradient sums read from the host", "host_sums", (1, 1, 1)),
        Row("rounded for FP8 matmuls", "fp8_rounded", (1, 1, 1)),
        # Beside the rotated queries and keys.
        Row("inputs of the heads' norms", "query", (1, 1, 1), "norms_heads recomputes_query"),
        Row("inputs of the heads' norms", "key", (1, 1, 1), "norms_heads recomputes_key"),
        # Attention.
        Row("queries, outputs, gradients", "query", (0, 0, 4), "-context"),
        Row("keys, values, gradients", "key", (0, 0, 4), "-context"),
        Row("queries, outputs, gradients", "query", (0, 0, 6), "context"),
        Row("keys, values, gradients, sent and received", "key", (0, 0, 12), "context -all_gather"),
        Row("keys, values, gradients of all ranks", "all_keys", (0, 0, 6), "all_gather"),
        # A block on the diagonal is split, and its parts are concatenated again.
        Row("halves of queries and outputs", "halves", (0, 0, 2), "halves"),
        # Queries, outputs and their gradients; with one sequence no copy is needed.
        Row("zigzag chunks", "query", (0, 0, 3), "context sequences"),
        Row("zigzag chunks in a ring", "query", (0, 0, 3), "context sequences -all_gather recomputes_early"),
        # While the feed-forward runs backward.
        Row("recomputed queries", "query", (3, 3, 0), "recomputes_attention_out"),
        Row("recomputed queries with documents", "query", (3, 3, 0), "recomputes_attention_out documents"),
        Row("recomputed halves", "halves", (1, 1, 0), "recomputes_attention_out halves"),
    ),
    "packed_documents": (Row("log-sum-exp for which cuDNN packs documents", "packing", (0, 0, 1)),),
    "attention_workspace": (Row("cuDNN's workspace", "workspace", (0, 0, 1)),),
    # In plain XLA attention: float32 before and after softmax, and the compute dtype.
    "attention_scores": (Row("bytes of scores", "scores", (0, 0, 10)),),
    "relayout": (Row("transposed stacks", "kept_stacks", (0, 0, 0, 1), "offloads transposes -pipelined older"),),
}
"""Term of the estimate -> its rows. Rows whose facts hold together are added up."""


def layer_backward(step: StepSizes) -> dict[str, dict[str, float]]:
    """Moment -> term -> bytes on one device: the rows that hold of this step, summed."""
    sizes = sizes_of(step)
    known = frozenset(name for name, holds in facts(step).items() if holds)
    return {
        moment: {term: sum(count * sizes[size] for size, count in counted) for term, counted in terms.items()}
        for moment, terms in tensor_counts(known).items()
    }


@lru_cache(maxsize=4096)
def tensor_counts(known: frozenset[str]) -> dict[str, dict[str, tuple[tuple[str, float], ...]]]:
    """Moment -> term -> (size, number of tensors), for steps of which these facts hold."""
    found: dict[str, dict[str, dict[str, float]]] = {moment: {"layer_copies": {}, "working_set": {}} for moment in MOMENTS[:3]}
    for term, rows in ROWS.items():
        for row in rows:
            for moment, count in zip(MOMENTS, row.counts, strict=False) if row.holds(known) else ():
                if count:
                    of_term = found.setdefault(moment, {}).setdefault(term, {})
                    of_term[row.size] = of_term.get(row.size, 0) + count
    return {moment: {term: tuple(counts.items()) for term, counts in terms.items()} for moment, terms in found.items()}


def facts(step: StepSizes) -> dict[str, bool]:
    """What rows ask about a step."""
    config, policy, units = step.config, step.policy, step.units
    p, recompute, sequences = config.parallel, policy.recompute, config.microbatch_sequences
    several = config.chunk_layers > 1
    keeps_products = not policy.everything and "mlp_gate" not in recompute
    recomputed = not policy.everything and not keeps_products
    # A chunk of one layer, for which XLA builds no loop; a chunk that is a loop over layers.
    single, chunked = step.pipelined and not several, step.pipelined and several
    one_pass = step.microbatches == 1 and not step.in_blocks
    rings = rings_tensor(config, step.capability)
    gathers_several = sequences > 1 and p.tensor > 1
    all_gather = p.context > 1 and context_method(config) == "all_gather"
    hosts, older = step.layers_on_host, step.is_older_xla
    return {
        "everything": policy.everything,
        "keeps_products": keeps_products,
        "recomputes_gate": "mlp_gate" in recompute,
        "recomputes_up": "mlp_up" in recompute,
        "recomputes_products": "mlp_gate" in recompute and "mlp_up" in recompute,
        "recomputes_query": "query" in recompute,
        "recomputes_key": "key" in recompute,
        "recomputes_attention_out": "attention_out" in recompute,
        # Most of a layer is recomputed while transfers start early, so that more tensors wait.
        "recomputes_early": step.runs_ahead and recomputed,
        "offloads": bool(policy.offload),
        # In pipeline steps for A100s, only before JAX 0.12 behind attention with documents that gathers its keys.
        "fetches_ahead": several and (step.runs_ahead or (older and step.pipelined and all_gather and step.in_blocks)),
        "pipelined": step.pipelined,
        "single": single,
        "chunked": chunked,
        "interleaved": p.virtual_stages > 1,
        "one_pass": one_pass,
        "one_microbatch": step.microbatches == 1,
        "experts": has_experts(step.model),
        "expert_parallel": p.expert > 1,
        "zero_3": step.zero == 3,
        "own_layers": step.has_own_layers,
        "runs_ahead": step.runs_ahead,
        "sums_late": step.zero >= 2 or step.microbatches == 1 or hosts,
        "reduces_behind": step.zero >= 2 or (step.sends_once and not step.has_own_layers),
        "host_sums": hosts,
        "documents": step.in_blocks,
        "halves": step.in_blocks and not step.scores,
        "sequences": sequences > 1,
        "context": p.context > 1,
        "all_gather": all_gather,
        "tensor": p.tensor > 1,
        "sharded": p.context * p.tensor > 1,
        "rings_tensor": rings,
        "gathers_several": gathers_several,
        # Back to rows, which matters only for several sequences. Chunks in a ring stay in row-major order; the listings that
        # show it are of pipelines whose chunk is a loop over layers. Where it is one layer, the gather for the embedding's
        # gradient is there instead.
        "transposes": gathers_several and not (rings and chunked),
        # Transfers start late, and a sequence is wider than a rank's part of the feed-forward.
        "sends_late": recomputed and units["mlp"] < units["whole"] and not (step.runs_ahead or step.pipelined),
        "norms_heads": step.model.qk_norm is not None,
        "older": older,
    }


def sizes_of(step: StepSizes) -> dict[str, float]:
    """Bytes of one tensor of each kind."""
    units, layers, halved = step.units, step.config.chunk_layers, halvings(step.causal_block_length)
    sizes = {
        **units,
        "weights": units["layer" if step.zero == 3 else "trained_layer"],
        "all_keys": step.parallel.context * units["key"],
        # Half of a tensor per halving.
        "halves": halved / 2 * units["query"],
        "stack": layers * units["whole"],
        "slots": step.slots * layers * units["whole"],
        "host_sums": step.host_sums,
        "fp8_rounded": step.fp8_rounded,
        "packing": step.packing_bytes,
        "workspace": step.attention_workspace,
        "scores": step.scores,
    }
    for place, held in (("kept", step.kept), ("offloaded", step.offloaded)):
        sizes |= dict.fromkeys((f"{place}.{group}" for group in HELD.values()), 0.0)
        for name, size in () if step.policy.everything else held.items():
            sizes[f"{place}.{HELD[name]}"] += size
    return sizes | {"kept_stacks": layers * (sizes["kept.hidden"] + sizes["kept.last_output"])}
