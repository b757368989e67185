"""The same shape and batch in torchtitan and in MaxText on one GPU, with bfloat16 weights and one text per sequence.

    python benchmarks/gpu_peers.py torchtitan|maxtext [--dry-run]        a case alone

Their wheels come along (pip download --no-deps), and the libraries below, which only their data and their clouds need, do not:
modules of these names are then empty. Without a wheel the row has the error of the import.

- torchtitan 0.2.2 (0.3.0 does not import with torch 2.11): its Llama, selective activation checkpointing by operators, and
  compilation of each block and of the loss, with fused AdamW. Its trainer is not used, which shards and reads texts.
- MaxText 0.2.5: its trainer in a process of its own, on synthetic tokens, with cuDNN's attention through JAX. It needs aqtp,
  antlr4-python3-runtime 4.9.3, drjax, einshape, immutabledict, omegaconf, pathwaysutils, qwix, sentencepiece, tiktoken and
  tokamax.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import step
from gpu_cases import Figures, Tell, config_of, speed, time_steps, token_rows
from gpu_power import kind_of_gpu

EMPTY = (
    *("datasets", "fastapi", "ml_collections", "requests", "tensorflow", "tensorflow_datasets", "torchdata", "tyro"),
    *("uvicorn", "xprof"),
)
MICROBATCH = {"torchtitan": 2, "maxtext": 1}
"""Sequences of 8,192: torchtitan makes the logits of a whole microbatch, in float32 too."""
COMPLETED = re.compile(r"completed step: (\d+), seconds: ([\d.]+).* loss: ([\d.]+)")
MAXTEXT_S = 240
TINY = (
    *("model.num_layers=2", "model.hidden_size=64", "model.intermediate_size=128", "model.num_heads=4"),
    *("model.num_kv_heads=2", "model.head_dim=16", "model.vocab_size=256"),
)


def case(peer: str, layers: int, dry: bool) -> dict[str, Any]:
    """Fields of a `gpu.Case`."""
    of_model = TINY if dry else (f"model.num_layers={layers}",)
    of_step = (f"train.sequence_length={64 if dry else 8192}", f"train.global_batch_sequences={4 if dry else 8}")
    options = {"peer": peer, "overrides": ["model.name=llama-3.1-8b", *of_model, *of_step], "steps": 3}
    return {"name": f"8B, S 8192, {peer}", "kind": "peers", "options": options, "expected_s": 120}


def peers(tell: Tell, peer: str, overrides: Sequence[str], steps: int) -> Figures:
    sys.meta_path.append(EmptyModules(EMPTY))
    return {"torchtitan": torchtitan, "maxtext": maxtext}[peer](tell, overrides, steps)


class EmptyModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules of these names, and those within them: their attributes are mocks."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if any(f"{name}.".startswith(f"{empty}.") for empty in self.names):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> Any:
        module = mock.MagicMock()
        module.__path__ = []
        # A class derives from it.
        module.StatefulDataLoader = type("StatefulDataLoader", (), {})
        return module

    def exec_module(self, module: Any) -> None:
        pass


# ------------------------------------------------------------------------------------------------------------- torchtitan


def torchtitan(tell: Tell, overrides: Sequence[str], steps: int) -> Figures:
    import torch

    config, b = config_of(overrides), MICROBATCH["torchtitan"]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    network, loss_of = titan_network(config, device)
    adamw = torch.optim.AdamW(network.parameters(), lr=config.optimizer.learning_rate, fused=True)
    batches = []
    for number in range(step.BATCHES):
        rows = token_rows(config, number).values()
        batches.append(list(zip(*(torch.from_numpy(ids).long().to(device).split(b) for ids in rows), strict=True)))

    def launch(number: int) -> Any:
        total: Any = 0.0
        for tokens, targets in batches[number]:
            loss = loss_of(network(tokens), targets) / config.step_tokens
            loss.backward()
            total = total + loss.detach()
        torch.nn.utils.clip_grad_norm_(network.parameters(), config.optimizer.clip_norm)
        adamw.step()
        adamw.zero_grad()
        return total

    began = time.perf_counter()
    first_loss = float(launch(0))
    tell(microbatch=b, compile_s=time.perf_counter() - began, first_loss=first_loss, torch=torch.__version__)
    _, times_s = time_steps(tell, launch, steps)
    in_use = torch.cuda.max_memory_allocated() if device == "cuda" else None
    return {"in_use_bytes": in_use, **speed(config, times_s, torch.cuda.get_device_name() if device == "cuda" else "cpu")}


def titan_network(config: Any, device: str) -> tuple[Any, Any]:
    """(network, loss of logits and targets, as a sum), both compiled."""
    import torch
    from torchtitan.components.loss import cross_entropy_loss
    from torchtitan.config.job_config import ActivationCheckpoint, Compile
    from torchtitan.distributed import activation_checkpoint
    from torchtitan.models.llama3 import Transformer, TransformerModelArgs
    from torchtitan.models.llama3.infra import parallelize

    model, S = config.model, config.train.sequence_length
    sizes = {"dim": model.hidden_size, "n_layers": model.num_layers, "vocab_size": model.vocab_size}
    heads = {"n_heads": model.num_heads, "n_kv_heads": model.num_kv_heads}
    # It rounds two thirds of 4 x dim, times a factor, up to a multiple: here to the width itself.
    width = {"multiple_of": model.intermediate_size, "ffn_dim_multiplier": 0.1}
    of_rope = {"rope_theta": model.rope_theta, "max_seq_len": S}
    # A cast would lose the imaginary part of its rotary angles.
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device), torch.no_grad():
        network = Transformer(TransformerModelArgs(**sizes, **heads, **width, **of_rope))
        network.init_weights(buffer_device=torch.device(device))
    torch.set_default_dtype(torch.float32)
    assert network.freqs_cis.is_complex()
    kept = {"model_compile_enabled": True, "op_sac_save_list": parallelize._op_sac_save_list}
    selective = ActivationCheckpoint(mode="selective", selective_ac_option="op")
    activation_checkpoint.apply_ac(network, selective, **kept, base_folder=tempfile.gettempdir())
    parallelize.apply_compile(network, Compile(enable=True))
    return network, torch.compile(cross_entropy_loss)


# ---------------------------------------------------------------------------------------------------------------- MaxText


def maxtext(tell: Tell, overrides: Sequence[str], steps: int) -> Figures:
    config, b, kind = config_of(overrides), MICROBATCH["maxtext"], kind_of_gpu()
    variables = {"DECOUPLE_GCLOUD": "TRUE", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92", "PYTHONUNBUFFERED": "1"}
    with tempfile.TemporaryDirectory() as folder:
        keys = maxtext_keys(config, b, folder, steps + 3, kind is not None)
        command, log = [sys.executable, __file__, "--maxtext", *keys], Path(folder, "log")
        with log.open("w") as file:
            began = time.monotonic()
            env = {**os.environ, **variables}
            code = subprocess.run(command, stdout=file, stderr=file, env=env, timeout=MAXTEXT_S, check=False).returncode
        said = log.read_text(errors="replace")
    found = [(int(number), float(s), float(loss)) for number, s, loss in COMPLETED.findall(said)]
    if code or len(found) < 3:
        raise RuntimeError(f"exit code {code}: {' | '.join(said.splitlines()[-4:])}"[-600:])
    tell(microbatch=b, process_s=time.monotonic() - began, first_loss=found[0][2])
    # Seconds are from one launch to the next, so the first ones are too short or have the compilation.
    times_s = [s for _, s, _ in found[-steps:]]
    return speed(config, [sum(times_s) / len(times_s)] * 3, kind or "cpu")


def maxtext_keys(config: Any, b: int, folder: str, steps: int, on_gpu: bool) -> Iterator[str]:
    model, train = config.model, config.train
    values = {
        **{"run_name": "speed", "base_output_directory": folder, "hardware": "gpu" if on_gpu else "cpu", "steps": steps},
        **{"dataset_type": "synthetic", "enable_checkpointing": False, "skip_jax_distributed_system": True, "log_period": 1},
        **{"model_name": "llama3.1-8b", "override_model_config": True, "base_num_decoder_layers": model.num_layers},
        **{"base_emb_dim": model.hidden_size, "base_mlp_dim": model.intermediate_size, "head_dim": model.head_dim},
        **{"base_num_query_heads": model.num_heads, "base_num_kv_heads": model.num_kv_heads, "vocab_size": model.vocab_size},
        **{"max_target_length": train.sequence_length, "per_device_batch_size": b},
        **{"gradient_accumulation_steps": train.global_batch_sequences // b, "remat_policy": "minimal_with_context"},
        **{"dtype": "bfloat16", "weight_dtype": "bfloat16", "grad_dtype": "bfloat16"},
        **{"attention": "cudnn_flash_jax" if on_gpu else "dot_product"},
    }
    return (f"{key}={value}" for key, value in values.items())


def run_maxtext(keys: Sequence[str]) -> None:
    import logging

    sys.meta_path.append(EmptyModules(EMPTY))
    import maxtext.configs
    from maxtext.trainers.pre_train import train

    # Its lines of a step are of this level.
    logging.basicConfig(level=logging.INFO, force=True)
    train.main(["train", str(Path(maxtext.configs.__file__).parent / "base.yml"), *keys])


if __name__ == "__main__":
    if sys.argv[1] == "--maxtext":
        run_maxtext(sys.argv[2:])
    else:

        def say(**figures: Any) -> None:
            print(json.dumps(figures), flush=True)

        options = case(sys.argv[1], 10, dry="--dry-run" in sys.argv)["options"]
        say(**peers(say, **options))
