"""Speed of the train step, compared with transformers' on the same model, batch, dtype and device.

    python benchmarks/step.py [section.key=value ...] [--config FILE] [--steps N] [--no-reference] [--json] [--dry-run]

The two sides alternate in three blocks, so that a slowdown of the machine affects both. Time runs from one reading of a loss to
the next. Losses are read one step behind: step n+1 runs when the loss of step n is read. Batches are made beforehand; loading
data is not timed.

transformers' side is LlamaForCausalLM as its users train it: SDPA attention, fused AdamW, gradient clipping, not compiled. Its
weights and moments have the compute dtype, while jaxllm keeps float32 masters of bfloat16 weights. benchmarks/gpu.py also runs
it compiled and in other variants (`Theirs`).
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.config import Config, ConfigError, ModelConfig, load_config
from jaxllm.cost_model.flops import parameter_count, train_flops_per_token
from jaxllm.machine.host import available_cpus

QUICKSTART = Path(__file__).parents[1] / "configs" / "quickstart.yaml"
# transformers' side sees one text per row, so ours does too.
SAME_WORK = ("data.mask_documents=false",)
DRY_RUN_STEPS = 4
DRY_RUN = (
    *("model.num_layers=1", "model.hidden_size=32", "model.intermediate_size=64", "model.num_heads=2"),
    *("train.sequence_length=32", "train.global_batch_sequences=4", "optimizer.warmup_tokens=0"),
)
WARM_UPS, BLOCKS, BATCHES = 3, 3, 4

Launch = Callable[[int], Any]
"""Starts the step on batch i and returns its loss, perhaps before it is ready. `float` waits for it."""


def main() -> None:
    options = parse(sys.argv[1:])
    steps = options.steps or (DRY_RUN_STEPS if options.dry_run else 10)
    try:
        report = measure(
            load_config(options.config, [*SAME_WORK, *(DRY_RUN if options.dry_run else ()), *options.overrides]),
            steps,
            reference=not options.no_reference,
        )
    except ConfigError as error:
        print(f"benchmarks/step.py: {error}", file=sys.stderr)
        sys.exit(2)
    print(json.dumps(report, indent=2) if options.json else text(report))


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--config", default=QUICKSTART, metavar="FILE", help="default: configs/quickstart.yaml")
    parser.add_argument("--steps", type=positive, metavar="N", help="timed steps of each side; default: 10")
    parser.add_argument("--no-reference", action="store_true", help="run only jaxllm's side")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.add_argument("--dry-run", action="store_true", help="a trial with a tiny model and few steps")
    return parser.parse_intermixed_args(arguments)


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError
    return number


# --------------------------------------------------------------------------------------------------------------- measuring


def measure(config: Config, steps: int, reference: bool) -> dict[str, Any]:
    """Builds both sides and times them. Returns the content of --json.

    Raises:
      ConfigError: the config does not fit the devices or the data.
    """
    if reference:
        # By default JAX reserves three quarters of a GPU's memory at once, and the other side needs room too.
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        # PyTorch's threads would spin while they wait, and on a busy machine they would wait for a core that a spinning thread
        # occupies: a step of 10 ms then takes 400 ms, and the comparison favours jaxllm.
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    import jax

    import jaxllm
    from jaxllm.run.step_metrics import peak_flops_of

    trainer = jaxllm.Trainer(config)
    config, model, S = trainer.config, trainer.config.model, trainer.config.train.sequence_length
    batches = [trainer.train_batch(step) for step in range(BATCHES)]
    launch, compile_s, temporary_bytes = our_side(trainer, batches)
    sides = {"jaxllm": launch}
    no_reference = "not asked for"
    if reference:
        no_reference = why_no_reference(trainer.mesh.size)
        if no_reference is None:
            rows = [{name: np.asarray(array) for name, array in batch.items()} for batch in batches]
            sides["transformers"] = their_side(config, rows, "cuda" if jax.default_backend() == "gpu" else "cpu")

    tokens, devices, peak_flops = config.step_tokens, trainer.mesh.size, peak_flops_of(config, trainer.mesh)
    report: dict[str, Any] = {
        "device": trainer.mesh.devices.flat[0].device_kind,
        "devices": devices,
        "compute_dtype": model.compute_dtype,
        "parameters": parameter_count(model),
        "batch": {
            "sequences": config.train.global_batch_sequences,
            "sequence_length": S,
            "microbatches": config.num_microbatches,
            "tokens": tokens,
        },
        "steps": steps,
        "loss_read": "one step behind",
        "no_reference": no_reference,
        "transformers": None,
        "ratio": None,
    }
    for name, times_s in alternate(sides, steps).items():
        lower, median, upper = np.percentile(times_s, [25, 50, 75]).tolist()
        rate = tokens / median / devices
        report[name] = {
            "step_s": {"median": median, "lower_quartile": lower, "upper_quartile": upper},
            "tokens_per_s_per_device": rate,
            "mfu_causal": rate * train_flops_per_token(model, S) / peak_flops if peak_flops else None,
        }
    report["jaxllm"] |= {"compile_s": compile_s, "temporary_bytes": temporary_bytes}
    if report["transformers"]:
        report["ratio"] = report["jaxllm"]["tokens_per_s_per_device"] / report["transformers"]["tokens_per_s_per_device"]
    return report


def alternate(sides: dict[str, Launch], steps: int) -> dict[str, list[float]]:
    """Seconds of `steps` steps of each side, in alternating blocks."""
    for launch in sides.values():
        time_block(launch, WARM_UPS)
    times_s: dict[str, list[float]] = {name: [] for name in sides}
    # Collect cyclic garbage between blocks, not during a step.
    gc.disable()
    for block in np.array_split(np.arange(steps), min(BLOCKS, steps)):
        for name, launch in sides.items():
            gc.collect()
            times_s[name] += time_block(launch, len(block))
    gc.enable()
    return times_s


def time_block(launch: Launch, steps: int) -> list[float]:
    """Seconds of `steps` steps, from one reading of a loss to the next, with one launch in between.

    One untimed step before and one after fill and drain the pipeline.
    """
    times_s, clock, pending = [], 0.0, launch(0)
    for step in range(1, steps + 2):
        pending, previous = launch(step % BATCHES), pending
        float(previous)
        before, clock = clock, time.perf_counter()
        times_s.append(clock - before)
    float(pending)
    return times_s[1:]


# --------------------------------------------------------------------------------------------------------------- the sides


def our_side(trainer: Any, batches: list[Any]) -> tuple[Launch, float, int]:
    """(launch, seconds to compile, temporary bytes per device by XLA's figure)."""
    import jax

    with jax.set_mesh(trainer.mesh):
        # Compiled as a run does, with the options for its kind of GPU.
        trainer.compile_step(batches[0])
    compiled = trainer.programs.current

    def launch(number: int) -> Any:
        with jax.set_mesh(trainer.mesh):
            trainer.state, metrics = compiled(trainer.state, batches[number])
        return metrics["loss"]

    return launch, trainer.programs.compile_s, compiled.memory_analysis().temp_size_in_bytes


def why_no_reference(devices: int) -> str | None:
    """Reason why transformers cannot run here, or None."""
    if devices > 1:
        return f"transformers' side runs on one device, and jaxllm has {devices} here"
    try:
        import torch
        import transformers  # noqa: F401
    except ImportError as error:
        return f"{error.name} is not installed"
    import jax

    if jax.default_backend() == "gpu" and not torch.cuda.is_available():
        return "this PyTorch cannot use the GPU"
    return None


@dataclass(frozen=True)
class Theirs:
    """Options of transformers' side."""

    compiled: bool = False
    """torch.compile of forward pass and loss with fixed shapes. On a CPU only traced, because compilation takes minutes."""
    kernel: str | None = None
    """The only attention kernel that PyTorch may use: flash or cudnn. None: transformers and PyTorch choose."""
    float32_weights: bool = False
    """Weights, gradients and moments in float32 and matmuls in the compute dtype (autocast), as in jaxllm. Otherwise all have
    the compute dtype."""
    liger: bool = False
    """Use Liger's kernels for norms, rotary angles and SwiGLU, and its loss without logits."""
    loss_chunk: int | None = None
    """Compute the loss of so many tokens at a time, and their logits again in the backward pass, as jaxllm does."""


def their_side(config: Config, rows: list[dict[str, np.ndarray]], device: str, theirs: Theirs = Theirs()) -> Launch:
    """Makes transformers' network with torch's AdamW, for batches [microbatch, sequence, position]."""
    return their_launch(config, *their_network(config, device, theirs), rows, device, theirs)


def their_network(config: Config, device: str, theirs: Theirs = Theirs()) -> tuple[Any, Any]:
    """(network, optimizer)"""
    import torch

    if device == "cpu":
        torch.set_num_threads(available_cpus())
    # XLA multiplies float32 in TF32 on a GPU by default.
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(config.train.seed)
    if theirs.liger:
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama()
    # Created on the device, because a CPU needs minutes for billions of random numbers.
    with torch.device(device):
        network = llama(config.model, "sdpa" if theirs.kernel is None else forced_attention())
    network.to(torch.float32 if theirs.float32_weights else getattr(torch, config.model.compute_dtype))
    if config.parallel.remat == "full":
        network.gradient_checkpointing_enable()
    network.train()
    o = config.optimizer
    groups = [
        {"params": [p for p in network.parameters() if p.ndim >= 2], "weight_decay": o.weight_decay},
        {"params": [p for p in network.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=o.learning_rate, betas=(o.beta1, o.beta2), eps=o.epsilon, fused=True)
    return network, adamw


def their_launch(
    config: Config, network: Any, adamw: Any, rows: list[dict[str, np.ndarray]], device: str, theirs: Theirs = Theirs()
) -> Launch:
    """Makes steps for batches [microbatch, sequence, position]. The same network can be used with several microbatch sizes."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    batches = []
    for row in rows:
        targets = np.where(row["mask"], row["targets"], -100)
        count = int(row["mask"].sum())
        batches.append((*(torch.tensor(x, dtype=torch.long, device=device) for x in (row["tokens"], targets)), count))

    def chunk_loss(h_TD: torch.Tensor, targets_T: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(network.lm_head(h_TD).float(), targets_T, reduction="sum")

    def loss_sum(tokens_BS: torch.Tensor, targets_BS: torch.Tensor) -> torch.Tensor:
        if theirs.loss_chunk is not None:
            h_TD = network.model(tokens_BS).last_hidden_state.flatten(0, 1)
            chunks = zip(h_TD.split(theirs.loss_chunk), targets_BS.flatten().split(theirs.loss_chunk), strict=True)
            return sum(torch.utils.checkpoint.checkpoint(chunk_loss, *chunk, use_reentrant=False) for chunk in chunks)
        if theirs.liger:
            from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

            h_TD = network.model(tokens_BS).last_hidden_state.flatten(0, 1)
            return LigerFusedLinearCrossEntropyLoss(reduction="sum")(network.lm_head.weight, h_TD, targets_BS.flatten())
        logits_TV = network(tokens_BS).logits.flatten(0, 1).float()
        return torch.nn.functional.cross_entropy(logits_TV, targets_BS.flatten(), reduction="sum")

    if theirs.compiled:
        loss_sum = torch.compile(loss_sum, dynamic=False, backend="aot_eager" if device == "cpu" else "inductor")
    backends = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
    # PyTorch has a single kernel on CPU.
    forced = theirs.kernel is not None and device != "cpu"
    dtype, clip_norm = getattr(torch, config.model.compute_dtype), config.optimizer.clip_norm

    def launch(number: int) -> torch.Tensor:
        adamw.zero_grad()
        total = torch.zeros((), device=device)
        tokens_MBS, targets_MBS, count = batches[number]
        with sdpa_kernel(backends[theirs.kernel]) if forced else nullcontext():
            for tokens_BS, targets_BS in zip(tokens_MBS, targets_MBS, strict=True):
                with torch.autocast(device, dtype, enabled=theirs.float32_weights):
                    loss = loss_sum(tokens_BS, targets_BS) / count
                loss.backward()
                total += loss.detach()
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(network.parameters(), clip_norm)
        adamw.step()
        return total

    return launch


def forced_attention() -> str:
    """Registers an attention without a mask with transformers and returns its name. transformers' own creates a mask when it is
    compiled (before PyTorch 2.14), and neither flash nor cuDNN support a mask.
    """
    import torch
    from transformers import AttentionInterface

    def causal(module, query, key, value, attention_mask, scaling=None, **options):
        out_BNSH = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=True
        )
        return out_BNSH.transpose(1, 2).contiguous(), None

    AttentionInterface.register("causal_sdpa", causal)
    return "causal_sdpa"


def llama(model: ModelConfig, attention: str = "sdpa") -> Any:
    """transformers' network of this shape, with new float32 weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    rope: dict[str, Any] = {"rope_type": "default"}
    if (scaling := model.rope_scaling) is not None:
        rope = {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_position,
        }
    shape = LlamaConfig(
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        num_hidden_layers=model.num_layers,
        num_attention_heads=model.num_heads,
        num_key_value_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        rms_norm_eps=model.norm_eps,
        rope_theta=model.rope_theta,
        rope_scaling=rope,
        max_position_embeddings=int(scaling.factor * scaling.original_max_position) if scaling else 2048,
        tie_word_embeddings=model.tie_embeddings,
        use_cache=False,
        attn_implementation=attention,
    )
    return LlamaForCausalLM(shape)


# --------------------------------------------------------------------------------------------------------------- reporting


def text(report: dict[str, Any]) -> str:
    batch = report["batch"]
    lines = [
        f"{report['devices']} x {report['device']}, {report['compute_dtype']}, {report['parameters'] / 1e6:.2f} M parameters",
        f"batch {batch['sequences']} x {batch['sequence_length']} = {batch['tokens']} tokens, in {batch['microbatches']} "
        f"microbatch(es); {report['steps']} steps after {WARM_UPS} warm-ups, loss read {report['loss_read']}",
    ]
    for name in ("jaxllm", "transformers"):
        if (side := report[name]) is None:
            continue
        step_ms = {key: 1e3 * value for key, value in side["step_s"].items()}
        lines.append(
            f"{name:12}  {side['tokens_per_s_per_device']:,.0f} tokens/s/device, step {step_ms['median']:.2f} ms "
            f"(quartiles {step_ms['lower_quartile']:.2f} .. {step_ms['upper_quartile']:.2f})"
            + (f", MFU {100 * side['mfu_causal']:.1f}% (causal)" if side["mfu_causal"] is not None else "")
        )
    ours = report["jaxllm"]
    lines.insert(
        3, f"{'':12}  compiled in {ours['compile_s']:.1f} s, {ours['temporary_bytes'] / 2**20:.1f} MiB temporary memory"
    )
    if report["ratio"] is not None:
        lines.append(f"jaxllm / transformers: {report['ratio']:.2f} in tokens/s")
    else:
        lines.append(f"no comparison with transformers: {report['no_reference']}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
