"""What a block stores for its backward pass under a remat policy, and how many bytes that takes.

A block reads one tensor, block_input, and names the outputs of its matmuls and of its attention. A policy decides for each
name: keep it on the device, offload it to host memory, or recompute it from block_input and the stored tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxllm.config import ATTENTION_RESULTS, BLOCK_INPUT, BLOCK_TENSORS, Config, ModelConfig, Remat

Bytes = dict[str, float]
"""Name of a tensor -> bytes."""


@dataclass(frozen=True)
class Policy:
    """Names in the order of BLOCK_TENSORS. Those in neither `keep` nor `offload` are recomputed."""

    name: str
    """The policy's name in the config; `mapping` for one that names tensors."""
    keep: tuple[str, ...]
    """Kept on the device."""
    offload: tuple[str, ...]
    """Offloaded to pinned host memory."""
    everything: bool
    """No rematerialisation: autodiff keeps all that it needs, much of it without a name."""

    @property
    def recompute(self) -> tuple[str, ...]:
        return tuple(name for name in BLOCK_TENSORS if name not in self.keep + self.offload)


def policy_of(remat: Remat) -> Policy:
    """The policy that a value of parallel.remat stands for.

    `selective` keeps every name; the tensors between them are cheap to recompute. Only blockwise attention has
    ATTENTION_RESULTS. Without them, attention runs once more.
    """
    if isinstance(remat, str):
        keep = {"none": BLOCK_TENSORS, "selective": BLOCK_TENSORS, "full": (BLOCK_INPUT,), "offload": ()}[remat]
        return Policy(remat, keep, BLOCK_TENSORS if remat == "offload" else (), everything=remat == "none")
    actions = {BLOCK_INPUT: "keep", **remat}
    keep, offload = (tuple(name for name in BLOCK_TENSORS if actions.get(name) == action) for action in ("keep", "offload"))
    return Policy("mapping", keep, offload, everything=False)


def remat_words(remat: Remat) -> str:
    """parallel.remat in words: its name, or the action for each tensor."""
    return remat if isinstance(remat, str) else ", ".join(f"{name} {action}" for name, action in remat.items())


def takes_cudnn(model: ModelConfig) -> bool:
    """Whether attention uses cuDNN on a GPU that has it. model/attention.py applies the same rule to a present GPU."""
    return model.attention != "xla" and model.compute_dtype == "bfloat16" and model.head_dim % 8 == 0 and model.head_dim <= 128


def is_blockwise(config: Config) -> bool:
    """Whether attention is merged from blocks on a GPU, so that it has ATTENTION_RESULTS: over context ranks, or where cuDNN
    masks documents. Plain XLA on one context rank has none.
    """
    return config.parallel.context > 1 or (config.data.mask_documents and takes_cudnn(config.model))


RING_MIN_ROWS = 4096


def context_method(config: Config) -> str:
    """ring or all_gather. `auto` follows a rule of thumb that is not measured: a ring step multiplies each key of the S/c keys
    that travel with S/c x N/K rows of queries, which makes 2 x that many FLOPs per byte sent. An H100's 600 TFLOP/s over 200
    GB/s of a ring over NVLink need about 1,500 rows. Below 4096 rows a hop may stay exposed, and the keys of such a short
    sequence are small enough to gather.
    """
    if config.parallel.context_method != "auto":
        return config.parallel.context_method
    rows = config.train.sequence_length // config.parallel.context * config.model.num_heads // config.model.num_kv_heads
    return "ring" if rows >= RING_MIN_ROWS else "all_gather"


@dataclass(frozen=True)
class ActivationBytes:
    """Bytes on one device and in its host's memory."""

    kept: Bytes
    offloaded: Bytes


def bytes_per_token_and_layer(
    policy: Policy, model: ModelConfig, *, context: int = 1, tensor: int = 1, blockwise: bool
) -> ActivationBytes:
    """Bytes of the named tensors of one block, per token of a sequence. The device has its share of every sequence.

    With D, F, N, K, H as in layers.py, b bytes of the compute dtype, c context and t tensor ranks: block_input and
    attention_out D b / (c t), as the sequence is sharded over tensor between blocks; query and attention_output N H b / (c t);
    key and value K H b / (c t), or K H b / c where t does not divide K (every rank then has all heads, see weight_rules);
    mlp_gate and mlp_up F b / (c t); attention_lse, float32, 4 N / (c t).

    Args:
      blockwise: whether attention runs in blocks (over context ranks, or cuDNN with documents) and so has results to keep.

    Raises:
      ValueError: the policy keeps everything, which has no closed form.
    """
    if policy.everything:
        raise ValueError("remat=none keeps what autodiff needs, which does not follow from tensor names: use another policy.")
    itemsize = {"bfloat16": 2, "float32": 4}[model.compute_dtype]
    query = model.num_heads * model.head_dim * itemsize
    key = model.num_kv_heads * model.head_dim * itemsize * (tensor if model.num_kv_heads % tensor else 1)
    width, mlp = model.hidden_size * itemsize, model.intermediate_size * itemsize
    sizes = {
        BLOCK_INPUT: width,
        "query": query,
        "key": key,
        "value": key,
        "attention_output": query,
        "attention_lse": 4 * model.num_heads,
        "attention_out": width,
        "mlp_gate": mlp,
        "mlp_up": mlp,
    }

    def of(names: tuple[str, ...]) -> Bytes:
        there = [name for name in names if blockwise or name not in ATTENTION_RESULTS]
        return {name: sizes[name] / (context * tensor) for name in there}

    return ActivationBytes(of(policy.keep), of(policy.offload))
