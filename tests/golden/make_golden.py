"""Makes the golden files: results of transformers' networks, in float32 with plain attention, for small models.

    cd tests && python -m golden.make_golden [CASE ...]       (needs torch and transformers)

A file holds weights and batches, the logits of some positions, loss and gradient norms of the first batch, and the losses of
ten AdamW steps with a new batch each. tests/model/test_reference.py compares jaxllm with the files, and the files with this.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
from golden.weights import shapes_of_theirs

from jaxllm.config import Config, ModelConfig, load_config

FOLDER = Path(__file__).parent
STEPS, B, S = 10, 3, 40
LOGITS = np.s_[:, 9::10]
"""Positions whose logits a file stores: all of them would be most of its size. The loss uses every position."""

SHAPE = {"num_layers": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "vocab_size": 260}
# Turns within the original context are 5.1, 1.8, 0.6 and fewer: one frequency is kept, one blended, the others divided by 8.
STRETCHED = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position": 32}
CASES: dict[str, dict[str, Any]] = {
    "mha": {**SHAPE},
    "gqa_llama3_rope": {
        **SHAPE,
        **{"hidden_size": 40, "num_kv_heads": 2, "head_dim": 12, "rope_theta": 500.0, "rope_scaling": STRETCHED},
    },
    # An epsilon large enough to have an effect.
    "gqa_tied": {**SHAPE, "num_layers": 3, "num_kv_heads": 1, "tie_embeddings": True, "norm_eps": 1e-2},
    "qwen2": {**SHAPE, "num_kv_heads": 2, "qkv_bias": True, "tie_embeddings": True},
    # Heads are narrower together than the model.
    "qwen3": {**SHAPE, "num_kv_heads": 2, "head_dim": 6, "qk_norm": "head", "norm_eps": 1e-2},
    "olmo2": {**SHAPE, "num_kv_heads": 2, "head_dim": 6, "qk_norm": "width", "block_norms": "after", "norm_eps": 1e-2},
    "mistral": {**SHAPE, "num_kv_heads": 2, "sliding_window": 12},
    # Three kinds of numbers differ from Llama's defaults at once: angles, scores and activations.
    "gemma3": {
        **{**SHAPE, "num_layers": 3, "num_kv_heads": 2, "head_dim": 8, "tie_embeddings": True, "qk_norm": "head"},
        **{"block_norms": "both", "norm_plus_one": True, "activation": "gelu_tanh", "scale_embeddings": True},
        **{"sliding_window": 12, "full_attention_every": 2, "local_rope_theta": 100.0, "query_pre_attn_scalar": 12},
    },
}


def case_config(case: str) -> Config:
    """The run that a golden file describes."""
    model = {**CASES[case], "compute_dtype": "float32", "attention": "xla"}
    return load_config(
        {
            "model": model,
            "parallel": {"data": 1},
            "optimizer": {"learning_rate": 3e-3, "schedule": "constant"},
            "train": {"steps": STEPS, "sequence_length": S, "global_batch_sequences": B},
        }
    )


def golden_path(case: str) -> Path:
    return FOLDER / f"{case}.npz"


def draw_weights(case: str) -> dict[str, np.ndarray]:
    """Float32 state dict. Large enough that attention and gates are far from linear; rounded to float16 to halve the file."""
    rng = np.random.default_rng(list(CASES).index(case))
    weights = {}
    for name, shape in shapes_of_theirs(case_config(case).model).items():
        normal = rng.standard_normal(shape)
        if len(shape) == 1:
            value = (not case_config(case).model.norm_plus_one) + 0.2 * normal
        elif name == "model.embed_tokens.weight":
            value = 0.3 * normal
        else:
            value = 1.2 * normal / np.sqrt(shape[1])
        weights[name] = value.astype(np.float16).astype(np.float32)
    return weights


def draw_batches(case: str) -> dict[str, np.ndarray]:
    """tokens, targets int32 and mask bool, [step, B, S]. Low ids are likelier, so there is something to learn. Rows differ
    strongly in their number of targets, so that a mean of row means would be wrong.
    """
    rng = np.random.default_rng(100 + list(CASES).index(case))
    stream = (case_config(case).model.vocab_size * rng.random((STEPS, B, S + 1)) ** 3).astype(np.int32)
    share_B = np.array([1.0, 0.6, 0.1])[None, :, None]
    return {"tokens": stream[..., :-1], "targets": stream[..., 1:], "mask": rng.random((STEPS, B, S)) < share_B}


# ------------------------------------------------------------------------------------------------------- with transformers


def network_of(model: ModelConfig, weights: dict[str, np.ndarray]) -> Any:
    """transformers' network with these weights, in float32."""
    import torch
    import transformers

    of_norm = {None: "Mistral" if model.sliding_window else "Llama", "head": "Qwen3", "width": "Olmo2"}
    kind = "Gemma3" if model.norm_plus_one else "Qwen2" if model.qkv_bias else of_norm[model.qk_norm]
    config_class = getattr(transformers, kind + ("TextConfig" if kind == "Gemma3" else "Config"))
    network_class = getattr(transformers, kind + "ForCausalLM")

    rope: dict[str, Any] = {"rope_type": "default"}
    longest = S
    if (scaling := model.rope_scaling) is not None:
        longest = int(scaling.factor * scaling.original_max_position)
        rope = {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_position,
        }
    windows: dict[str, Any] = {}
    if kind == "Mistral":
        windows = {"sliding_window": model.sliding_window}
    if kind == "Gemma3":
        rope = {**rope, "rope_theta": model.rope_theta}
        local = {"rope_type": "default", "rope_theta": model.local_rope_theta}
        windows = {"sliding_window": model.sliding_window, "query_pre_attn_scalar": model.query_pre_attn_scalar}
        windows |= {"sliding_window_pattern": model.full_attention_every}
        windows |= {"rope_parameters": {"full_attention": rope, "sliding_attention": local}}
    angles = {} if kind == "Gemma3" else {"rope_theta": model.rope_theta, "rope_scaling": rope}
    network = network_class(
        config_class(
            vocab_size=model.vocab_size,
            hidden_size=model.hidden_size,
            intermediate_size=model.intermediate_size,
            num_hidden_layers=model.num_layers,
            num_attention_heads=model.num_heads,
            num_key_value_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            rms_norm_eps=model.norm_eps,
            **angles,
            **windows,
            max_position_embeddings=longest,
            tie_word_embeddings=model.tie_embeddings,
            use_cache=False,
            pad_token_id=None,
            eos_token_id=None,
            attn_implementation="eager",
            dtype=torch.float32,
        )
    )
    missing, unexpected = network.load_state_dict({name: torch.tensor(x) for name, x in weights.items()}, strict=False)
    assert not unexpected, unexpected
    assert missing == (["lm_head.weight"] if model.tie_embeddings else []), missing
    return network


def compute(case: str, weights: dict[str, np.ndarray], batches: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Results of transformers and torch for weights and batches: logits [B, S, V] and loss (nats, mean over valid targets) of
    the first batch, its gradients' norms as "grad_norm/NAME", and losses [step] while training.
    """
    import torch

    config = case_config(case)
    network = network_of(config.model, weights)
    tokens, targets, mask = (torch.tensor(batches[name]).long() for name in ("tokens", "targets", "mask"))
    targets = targets.where(mask.bool(), -100)

    def forward(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        logits_BSV = network(tokens[step]).logits
        return logits_BSV, torch.nn.functional.cross_entropy(logits_BSV.flatten(0, 1), targets[step].flatten())

    logits_BSV, loss = forward(0)
    loss.backward()
    result = {"logits": logits_BSV.detach().numpy(), "loss": loss.detach().numpy()}
    result |= {f"grad_norm/{name}": p.grad.norm().numpy() for name, p in network.named_parameters()}

    o = config.optimizer
    groups = [
        {"params": [p for p in network.parameters() if p.ndim >= 2], "weight_decay": o.weight_decay},
        {"params": [p for p in network.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=o.learning_rate, betas=(o.beta1, o.beta2), eps=o.epsilon)
    losses = []
    for step in range(STEPS):
        adamw.zero_grad()
        loss = forward(step)[1]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), o.clip_norm)
        adamw.step()
        losses.append(loss.item())
    return {**result, "losses": np.array(losses, np.float32)}


def write(case: str) -> None:
    import torch
    import transformers

    weights, batches = draw_weights(case), draw_batches(case)
    result = compute(case, weights, batches)
    result["logits"] = result["logits"][LOGITS]
    np.savez_compressed(
        golden_path(case),
        **{f"weight/{name}": x.astype(np.float16) for name, x in weights.items()},
        **{name: x.astype(np.int16 if x.dtype == np.int32 else x.dtype) for name, x in batches.items()},
        **result,
        versions=np.array(f"torch {torch.__version__}, transformers {transformers.__version__}"),
    )


if __name__ == "__main__":
    for case in sys.argv[1:] or CASES:
        write(case)
        print(f"{golden_path(case).name}: {golden_path(case).stat().st_size / 2**10:.0f} KiB")
