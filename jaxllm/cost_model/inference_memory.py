"""Closed-form memory of loading, evaluating and generating per device, and the sizes that these programs pad to. No JAX.

    moments = evaluation_moments(config, gpu, stored="float32")       # moment -> term -> bytes; the fullest counts
    moments = generation_moments(config, 8, 1024, 128)                # 8 prompts of up to 1024 ids, 128 new ones
    load_host_bytes(config, "bfloat16", gpus_per_process=8)           # way of loading -> bytes of the host

Weights, caches and logits follow from shapes. The other tensors were counted in programs that XLA compiled for an H100,
without one; benchmarks/inference_memory.py compares. Nothing is fitted. Without a GPU to measure on, XLA does not tune its
matmuls, and copies some weights into another dtype or layout that a tuned program may read in place: the counts include these
copies. The step of training has an estimate of its own (memory.py).
"""

import math

from jaxllm.config import Config, ModelConfig, model_spec
from jaxllm.config.types import ITEMSIZE
from jaxllm.cost_model.activations import tile_rows
from jaxllm.cost_model.hardware import Gpu
from jaxllm.cost_model.memory import Terms
from jaxllm.cost_model.step_sizes import FLOAT32, StepSizes, parameters

EVALUATION_TOKENS = 8192
"""Approximate number of tokens that evaluation computes at once on each data rank of accelerators."""
SMALLEST_PROMPT = 16
"""Positions of the smallest bucket."""
GATHERED_LAYERS = 1.5
"""Layers whose gathered weights are live at once with ZeRO 3 in a forward pass (compiled programs)."""
STAGE_MESSAGES = 3
"""Hidden states of a microbatch between stages that are live in a pipeline's forward pass, at most (compiled for 2 and 4)."""
AT_ONCE_BYTES = 8 * 2**30
"""Limit for reading one parameter of a folder in one go. Up to this size a process reads all that its devices hold at once, in
the longest possible runs of bytes. It reads a larger parameter device by device."""
ORBAX_AT_ONCE_BYTES = 96 * 10**9
"""Orbax's limit for arrays that it reads at the same time (its default)."""
BLOCK_BYTES = 32 * 2**20
"""What a conversion reads at once of a tensor that it only copies."""

Moments = dict[str, Terms]
"""Moment -> name of a term -> bytes."""


def bucket(count: int, smallest: int = 1) -> int:
    """The next power of two, at least `smallest`."""
    return max(smallest, 1 << (count - 1).bit_length())


def evaluation_rows(width: int) -> int:
    """Windows of `width` tokens that a data rank evaluates at once on accelerators."""
    return max(1, EVALUATION_TOKENS // width)


def cache_positions(prompt_tokens: int, new_tokens: int) -> int:
    """Positions of a cache without windows: with the prompt and the new tokens, each time the next power of two."""
    return bucket(bucket(prompt_tokens, SMALLEST_PROMPT) + new_tokens)


def rooms(model: ModelConfig, positions: int) -> tuple[int, ...]:
    """Positions in the cache of each kind of layers: all, or those of its window."""
    return tuple(min(positions, window or positions) for window in model.kinds)


def cache_bytes(model: ModelConfig, rows: int, positions: int) -> int:
    """Bytes of the keys and values of all layers, in the compute dtype."""
    kept = rooms(model, positions)
    of_layers = sum(kept[kind] for kind in model.layer_kinds)
    return 2 * ITEMSIZE[model.compute_dtype] * model.num_kv_heads * model.head_dim * rows * of_layers


def evaluation_moments(config: Config, gpu: Gpu | None = None, stored: str = "float32") -> Moments:
    """Terms of one device that computes the loss of a batch, at each moment that may be the fullest.

    Args:
      config: resolved; microbatch_sequences and sequence_length are those of the evaluation.
      stored: dtype of the weights on disk, which they keep on the device.
    """
    size = StepSizes(config, gpu)
    u, b, gathers = size.units, size.itemsize, size.zero > 0
    converts = ITEMSIZE[stored] != b
    resident = {"stored_weights": ITEMSIZE[stored] * size.all.master, "batch": 13 * size.tokens * size.microbatches}
    stream = u["split"] + (STAGE_MESSAGES * u["split"] if size.pipelined else 0)
    # Beside the stored ones: in another dtype, or gathered.
    layer_weights = b * size.layers.compute * (converts or gathers)
    if size.zero == 3:
        layer_weights = b * (converts * size.layers.master + GATHERED_LAYERS * size.layer.compute)
    layer = {
        "layer_weights": layer_weights,
        # Gathered embedding and head, which XLA holds while layers are computed.
        "vocabulary_weights": b * size.vocabulary.compute * gathers,
        "hidden_states": stream,
        # Cosines and sines of half a head, for each position.
        "angles": 2 * FLOAT32 * size.tokens * size.model.head_dim / 2,
    }
    chunk = -(-size.tokens // size.loss_chunks)
    # A chunk of hidden states is a copy, if there are several.
    of_head = u["whole"] + (chunk * b * size.model.hidden_size if size.loss_chunks > 1 else 0) + stream - u["split"]
    attention = 2 * u["query"] + 2 * u["key"] + u["whole"]
    # A tile's scores in float32, and their softmax in the compute dtype.
    scores = size.scores * (FLOAT32 + b)
    return _rounded(
        {
            "feed_forward": {**resident, **layer, "activations": 2 * u["whole"] + 2 * u["mlp"] + 2 * u["rows"]},
            "attention": {**resident, **layer, "activations": attention, "attention_scores": scores},
            "loss": {
                **resident,
                "head_weights": b * size.head.compute * (converts or gathers),
                "hidden_states": of_head,
                "logits": FLOAT32 * chunk * size.rows,
            },
        }
    )


def generation_moments(
    config: Config, prompts: int, prompt_tokens: int, new_tokens: int, stored: str = "float32", gpu: Gpu | None = None
) -> Moments:
    """Terms of one device that continues prompts, at each moment that may be the fullest.

        cast      the weights in the compute dtype are made from the stored ones
        prefill   keys and values of the prompt are moved to the cache after all layers
        decode    with grouped queries XLA rearranges keys and values in each step, in a copy, beside one layer's weights or its
                  part of the cache (all programs of JAX 0.12, for the layout of the matmul; JAX 0.10 copies one of the two)
        decode_head    the head is gathered (ZeRO) beside a copy of the cache

    Args:
      config: resolved. Rows are divided over data, heads over tensor; context and pipe divide weights alone.
      prompt_tokens: ids of the longest prompt.
    """
    p, model = config.parallel, config.model
    ranks = int(p.data) * p.replica
    B, S = bucket(-(-prompts // ranks)), bucket(prompt_tokens, SMALLEST_PROMPT)
    positions = cache_positions(prompt_tokens, new_tokens)
    size = StepSizes(config, gpu)
    kv_ways = p.tensor if model.num_kv_heads % p.tensor == 0 else 1
    tokens, b = B * S, size.itemsize
    weights = {"weights": b * size.all.master}
    query, key = (tokens * b * n * model.head_dim for n in (model.num_heads // p.tensor, model.num_kv_heads // kv_ways))
    width, mlp = tokens * b * model.hidden_size, tokens * b * model.intermediate_size / p.tensor
    cache, of_prompt = cache_bytes(model, B, positions) // kv_ways, 2 * key * model.num_layers
    loop = {
        "prompt_keys_and_values": of_prompt,
        "hidden_states": width + 4 * tokens * model.head_dim,
        "layer_weights": GATHERED_LAYERS * b * size.layer.compute if size.zero else 0,
    }
    rows, heads = tile_rows(S, B * model.num_heads * S), model.num_heads // p.tensor
    scores = B * heads * rows * S
    pieces = (FLOAT32 * scores, b * scores, FLOAT32 / b * query, query, width)
    # One of these buffers takes the place of the cache's keys, or values, which XLA allocates for the output.
    shared = max((piece for piece in pieces if piece <= cache / 2), default=0)
    attention = {"attention_scores": sum(pieces[:2]), "activations": query * (1 + FLOAT32 / b) + 2 * key}
    head = b * size.head.compute * (1 + 1 / size.ranks) if size.zero else 0
    copied = cache if model.num_kv_heads < model.num_heads else 0
    layer = max(b * size.layer.compute * (1 + (size.zero > 0)), copied / model.num_layers)
    moments = {
        "cast": {"stored_weights": ITEMSIZE[stored] * size.all.master, **weights} if stored != model.compute_dtype else weights,
        "prefill_attention": {**weights, "cache": cache - shared, **loop, **attention},
        "prefill_feed_forward": {**weights, "cache": cache, **loop, "activations": width + 2 * mlp},
        "decode": {**weights, "cache": cache, "cache_copy": copied, "one_layer": layer},
    }
    if size.zero:
        moments["decode_head"] = {**weights, "cache": cache, "cache_copy": copied, "head_weights": head}
    return _rounded(moments)


def load_moments(config: Config, stored: str = "float32") -> Moments:
    """Terms of one device when a model is loaded: its share of the weights, and nothing that is larger than a parameter."""
    return _rounded({"loaded": {"stored_weights": ITEMSIZE[stored] * StepSizes(config).all.master}})


def load_host_bytes(config: Config, stored: str, gpus_per_process: int) -> Terms:
    """Host bytes of one process at the peak of each way to load or convert, without those of Python and JAX.

    model_folder      loading it: the largest parameter with all its layers, as read and in the layout of the mesh, and of
                      Hugging Face's one layer of it
    run               loading a run: twice all float32 weights of the process's devices, because Orbax reads every array at the
                      same time (up to ORBAX_AT_ONCE_BYTES)
    training_state    resuming a run: the same for weights and both moments
    convert           from and to Hugging Face: the largest matrix of a layer, which is transposed, and a block of it
    convert_a_run     the largest parameter with all its layers, in float32, twice
    """
    model, itemsize = config.model, ITEMSIZE[stored]
    table, here = parameters(model, config.parallel), config.chunk_layers * config.parallel.virtual_stages
    specs = model_spec.parameters(model)
    held = {spec.path: table[spec.path].master * (here if spec.in_layer else 1) for spec in specs}
    shapes = {spec.path: math.prod(spec.shape) for spec in specs}
    whole = {spec.path: shapes[spec.path] * (model.num_layers if spec.in_layer else 1) for spec in specs}
    of_process = {path: min(whole[path], gpus_per_process * count) for path, count in held.items()}
    largest = max(of_process, key=of_process.__getitem__)
    read, share = (itemsize * of_path[largest] for of_path in (of_process, held))
    of_orbax = FLOAT32 * sum(of_process.values())
    matrix = itemsize * max(shapes[spec.path] for spec in specs if spec.in_layer)
    return {
        "model_folder": (2 * read if read <= AT_ONCE_BYTES else 3 * share) + itemsize * shapes[largest],
        "run": 2 * min(of_orbax, ORBAX_AT_ONCE_BYTES),
        "training_state": 2 * min(3 * of_orbax, ORBAX_AT_ONCE_BYTES),
        "convert": matrix + min(BLOCK_BYTES, matrix),
        "convert_a_run": FLOAT32 * 2 * max(whole.values()) + 2 * BLOCK_BYTES,
    }


def _rounded(moments: dict[str, dict[str, float]]) -> Moments:
    return {moment: {name: round(size) for name, size in terms.items() if size} for moment, terms in moments.items()}
