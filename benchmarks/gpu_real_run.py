"""A real run on this device, by the command line as a user has it: killed, resumed, started from kept programs, exported.

    python benchmarks/gpu_real_run.py [--dry-run]        the case alone: each stage as a JSON line when it ends

- whole: quickstart with run.deterministic=true and an empty folder of programs, undisturbed.
- killed: the same in another folder from the kept programs, until SIGKILL in the middle.
- resumed: the same command again, but its programs are compiled again.
- equal: each step's loss and gradient norm, and each array of the last checkpoint, bit for bit.
- exported: `jaxllm convert to-hf`; the logits of transformers on the CPU and of load_model on this device, in float32.
- continued, continued_exported: training of a Hugging Face folder in bfloat16, and its export. The folder is smollm2/ of this
  checkout (launch/get_smollm2.py) or, where its 93 MB of weights cannot be brought, one of that shape with random weights.

The process itself uses the device only after the runs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from gpu_cases import CHECKOUT, Figures, Tell

COMMAND_S = 150
"""Time limit of a command."""
SMOLLM2 = {
    **{"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9},
    **{"num_key_value_heads": 3, "vocab_size": 49_152, "rms_norm_eps": 1e-5, "tie_word_embeddings": True},
    **{"rope_theta": 100_000.0, "max_position_embeddings": 8192},
}
"""SmolLM2-135M, as transformers spells it."""
TINY = {
    **{"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "vocab_size": 256},
}
TINY_RUN = ("model.num_layers=1", "model.hidden_size=32", "model.intermediate_size=64", "data.held_out_fraction=0.004")


def case(dry: bool) -> dict[str, Any]:
    """Fields of a `gpu.Case`."""
    whole: dict[str, Any] = {"steps": 360, "continued_steps": 10, "batch": [8, 2048]}
    small = {"steps": 120, "continued_steps": 3, "batch": [2, 64], "changes": TINY_RUN, "shape": TINY}
    return {"name": "a real run", "kind": "real_run", "options": small if dry else whole, "expected_s": 60 if dry else 105}


def real_run(
    tell: Tell,
    steps: int,
    continued_steps: int,
    batch: Sequence[int],
    changes: Sequence[str] = (),
    shape: Mapping[str, Any] | None = None,
) -> Figures:
    """Runs all stages. One that fails has an `error`, and the others go on.

    Args:
      batch: sequences and their length, of the continued training.
      changes: overrides of quickstart.
      shape: entries of transformers' config in the place of SmolLM2's.
    """
    failed: list[str] = []
    with tempfile.TemporaryDirectory() as temporary:
        home = Path(temporary)
        whole, killed, continued = home / "whole", home / "killed", home / "continued"
        keys = [*changes, f"train.steps={steps}", f"train.eval_every_steps={steps // 2}", "run.deterministic=true"]
        keys.append(f"checkpoint.every_steps={steps // 12}")
        brief = [*keys, "log.baselines=false", "log.sample_tokens=0"]
        stages = {
            "whole": lambda: run(whole, home / "kept", keys),
            "killed": lambda: run(killed, home / "kept", brief, kill_at=steps // 2),
            "resumed": lambda: run(killed, home / "again", brief),
            "continued": lambda: run(continued, home / "kept", [], recipe=recipe(home, shape, continued_steps, batch)),
            "equal": lambda: equal(whole, killed, steps),
            "exported": lambda: export(whole, home / "quickstart-hf"),
            "continued_exported": lambda: export(continued, home / "continued-hf"),
        }
        for stage, measure in stages.items():
            began = time.monotonic()
            try:
                found = measure()
            except Exception as error:
                found = {"error": " ".join(f"{type(error).__name__}: {error}".split())[-400:]}
                failed.append(f"{stage}: {found['error']}")
            tell(**{stage: {**found, "stage_s": round(time.monotonic() - began, 1)}})
    return {"error": " | ".join(failed)} if failed else {"finished": True}


# ------------------------------------------------------------------------------------------------------------ the commands


def run(
    folder: Path,
    programs: Path,
    overrides: Sequence[str],
    kill_at: int | None = None,
    recipe: str = "configs/quickstart.yaml",
) -> Figures:
    """Figures of one start of `jaxllm train`. Args: kill_at: the step at which SIGKILL ends it."""
    command, began = ["train", recipe, *overrides, f"run.dir={folder}", f"run.compilation_cache={programs}"], time.time()
    metrics, log = folder / "metrics.jsonl", folder.with_suffix(".log")
    process = start(command, log)
    while (
        kill_at
        and process.poll() is None
        and time.time() < began + COMMAND_S
        and not (metrics.exists() and metrics.read_bytes().count(b'"loss"') >= kill_at)
    ):
        time.sleep(0.01)
    if kill_at:
        process.kill()
    finish(process, log, expected=-9 if kill_at else 0)
    lines = [json.loads(line) for line in metrics.read_text().splitlines() if line.endswith("}")]
    first = next(line for line in reversed(lines) if "start_unix_s" in line)
    steps = [line for line in lines[lines.index(first) :] if "loss" in line]
    said = [line for line in log.read_text().splitlines() if line.startswith(("resumed from", "held-out loss", "attention "))]
    rates = sorted(line["tokens_per_s_per_device"] for line in steps[len(steps) // 2 :])
    return {
        "first_step_s": first["unix_s"] - began,
        "compile_s": first.get("compile_s", 0.0),
        "start_s": {key[6:-2]: round(value, 2) for key, value in first.items() if key.startswith("start_") and value < 1e6},
        "programs": {"found": first.get("programs_found", 0), "compiled": first.get("programs_compiled", 0)},
        "said": [line[:100] for line in said],
        "steps": [steps[0]["step"], steps[-1]["step"]],
        "losses": [steps[0]["loss"], steps[-1]["loss"]],
        "tokens_per_s": rates[len(rates) // 2],
        "memory_peak_bytes": steps[-1].get("memory_peak_bytes"),
    }


def start(arguments: Sequence[str], log: Path, **variables: str) -> subprocess.Popen[bytes]:
    path = os.pathsep.join(filter(None, [str(CHECKOUT), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "jaxllm.cli", *arguments]
    with log.open("wb") as file:
        env = {**os.environ, "PYTHONPATH": path, **variables}
        return subprocess.Popen(command, cwd=CHECKOUT, env=env, stdout=file, stderr=subprocess.STDOUT)


def finish(process: subprocess.Popen[bytes], log: Path, expected: int = 0) -> None:
    try:
        code = process.wait(COMMAND_S)
    finally:
        process.kill()
        process.wait()
    if code != expected:
        raise RuntimeError(f"exit code {code} instead of {expected}: {log.read_text()[-300:]}")


# ------------------------------------------------------------------------------------------------------------ what is there


def recipe(home: Path, shape: Mapping[str, Any] | None, steps: int, batch: Sequence[int]) -> str:
    """The recipe of the continued training. Makes the model folder if there is none."""
    folder = CHECKOUT / "smollm2"
    if shape is not None or not folder.exists():
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        folder = home / "random-weights"
        LlamaForCausalLM(LlamaConfig(**{**SMOLLM2, **(shape or {})})).to(torch.bfloat16).save_pretrained(folder)
    values = {
        "model": {"name": str(folder), "compute_dtype": "bfloat16"},
        # Its tokenizer is not used: bytes are ids of every vocabulary.
        "data": {"source": "python_stdlib", "tokenizer": "bytes", "held_out_fraction": 0.004},
        "optimizer": {"learning_rate": 1e-3, "warmup_tokens": 4 * batch[0] * batch[1]},
        "train": {"steps": steps, "global_batch_sequences": batch[0], "sequence_length": batch[1]},
    }
    file = home / "continued.yaml"
    file.write_text(yaml.safe_dump(values))
    return str(file)


def equal(whole: Path, killed: Path, steps: int) -> Figures:
    """Raises an error unless all is equal, bit for bit."""
    import jax
    import numpy as np
    import orbax.checkpoint as ocp

    def metrics(folder: Path) -> list[list[Any]]:
        lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        return [[line["step"], line["loss"], line["grad_norm"]] for line in lines if "loss" in line]

    def state(folder: Path) -> list[np.ndarray]:
        path, handler = folder / "checkpoints" / str(steps) / "state", ocp.PyTreeCheckpointHandler()
        as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), handler.metadata(path).tree)
        return jax.tree.leaves(handler.restore(path, args=ocp.args.PyTreeRestore(restore_args=as_numpy)))

    pairs = list(zip(metrics(whole), metrics(killed), strict=True))
    different = [a[0] for a, b in pairs if a != b]
    arrays = [(a, b) for a, b in zip(state(whole), state(killed), strict=True)]
    unequal = sum(a.dtype != b.dtype or a.tobytes() != b.tobytes() for a, b in arrays)
    if different or unequal:
        first = f"the first is {different[0]}" if different else ""
        raise ValueError(f"{len(different)} of {len(pairs)} steps and {unequal} of {len(arrays)} arrays differ; {first}")
    return {"steps": len(pairs), "arrays": len(arrays), "bytes": sum(a.nbytes for a, _ in arrays)}


def export(folder: Path, destination: Path) -> Figures:
    """Exports a run. Its logits may differ by what `jaxllm convert --verify` allows."""
    from jaxllm.weights.hf_convert import LARGEST_DIFFERENCE, verify

    log = destination.with_suffix(".log")
    finish(start(["convert", "to-hf", str(folder), str(destination)], log, JAX_PLATFORMS="cpu"), log)
    found = verify(destination, folder)
    if not found.largest_difference <= LARGEST_DIFFERENCE:
        raise ValueError(f"{found.line}; the limit is {LARGEST_DIFFERENCE:g}")
    return {"largest_difference": found.largest_difference, "limit": LARGEST_DIFFERENCE, "line": found.line}


if __name__ == "__main__":

    def say(**figures: Any) -> None:
        print(json.dumps(figures), flush=True)

    say(**real_run(say, **case(dry="--dry-run" in sys.argv[1:])["options"]))
