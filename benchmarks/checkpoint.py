"""Cost of a save for the training loop: asynchronous and synchronous saves, saves in memory, and the speed of steps during one.
Cost of a restore, with and without the verification of every byte.

    python benchmarks/checkpoint.py [section.key=value ...] [--saves N] [--quick] [--json]

The model has about 12 M parameters, so 145 MB of state with both moments in float32, by default on one CPU device. Each save
completes before the next; the kinds alternate. A wait is the time that the loop spends in Checkpoints.save, or in
MemoryCheckpoints.save with checkpoint.memory_dir of one host, without a neighbour. A step is timed
from one reading of a loss to the next. Restores read files that the system has cached.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from jaxllm.config import Config, ConfigError, load_config
from jaxllm.runtime.cpus import available_cpus

MODEL = {
    **{"num_layers": 4, "hidden_size": 448, "intermediate_size": 1536, "num_heads": 7, "num_kv_heads": 7, "vocab_size": 256},
    "compute_dtype": "float32",
}
QUICK = (
    "model.num_layers=1",
    "model.hidden_size=32",
    "model.intermediate_size=64",
    "model.num_heads=2",
    "model.num_kv_heads=2",
)
RECIPE = {
    "model": MODEL,
    "train": {"steps": 10_000, "sequence_length": 128, "global_batch_sequences": 4},
    "run": {"cpu_devices": 1},
}
QUIET_STEPS = 20
"""Number of steps without a save, for comparison."""
KINDS = ("asynchronous", "synchronous", "in memory")


def main() -> None:
    options = parse(sys.argv[1:])
    try:
        config = load_config(RECIPE, [*(QUICK if options.quick else ()), *options.overrides])
        report = measure(config, 2 if options.quick else options.saves)
    except ConfigError as error:
        print(f"benchmarks/checkpoint.py: {error}", file=sys.stderr)
        sys.exit(2)
    report["command"] = " ".join(["python benchmarks/checkpoint.py", *sys.argv[1:]])
    print(json.dumps(report, indent=2) if options.json else text(report))


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--saves", type=int, default=5, metavar="N", help="saves of each kind; default: 5")
    parser.add_argument("--quick", action="store_true", help="a trial with a tiny model and two saves")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    return parser.parse_intermixed_args(arguments)


def measure(config: Config, saves: int) -> dict[str, Any]:
    """Trains and saves. Times in seconds: `wait_s` per save, `write_s` from the start of a save until it is complete, `step_s`
    of each step during a save, and `quiet_step_s` of steps without one. `restore_s` of each restore, `read_s`
    without verification, and `verify_s` of the verification alone.

    Raises:
      ConfigError: the config cannot be run, or a checkpoint cannot be written.
    """
    import jax

    import jaxllm
    from jaxllm.checkpoint.files import describe_run, saved_steps
    from jaxllm.checkpoint.manager import Checkpoints
    from jaxllm.checkpoint.memory import MemoryCheckpoints
    from jaxllm.pretrained.folder import versions

    trainer = jaxllm.Trainer(config)
    for _ in trainer.steps(3):
        pass
    quiet_step_s = [step_seconds(trainer) for _ in range(QUIET_STEPS + 1)][1:]
    report: dict[str, Any] = {
        "device": f"{trainer.mesh.size} x {trainer.mesh.devices.flat[0].device_kind}",
        "machine": f"{platform.machine()}, {available_cpus()} CPUs",
        "state_bytes": sum(x.nbytes for x in jax.tree.leaves(trainer.state)),
        "saves": saves,
        "quiet_step_s": quiet_step_s,
        "versions": versions(),
    } | {kind: {"wait_s": [], "write_s": [], "step_s": []} for kind in KINDS}
    with tempfile.TemporaryDirectory() as folder:
        stores: dict[str, Any] = {"in memory": MemoryCheckpoints(Path(folder), config.checkpoint, trainer.state)}
        for kind in KINDS[:2]:
            chosen = config.checkpoint.model_copy(update={"asynchronous": kind == "asynchronous", "keep": 1})
            stores[kind] = Checkpoints(Path(folder) / kind, chosen)
        # The first save of each kind also creates folders and threads.
        for number in range(saves + 1):
            for kind, checkpoints in stores.items():
                trainer.finish()
                jax.block_until_ready(trainer.state)
                figures, step = report[kind], trainer.step
                started = time.perf_counter()
                checkpoints.save(step, trainer.state, describe_run(trainer.config, step, "benchmark"))
                wait_s, step_s = time.perf_counter() - started, []
                is_memory = isinstance(checkpoints, MemoryCheckpoints)
                while checkpoints.is_writing if is_memory else step not in saved_steps(checkpoints.folder):
                    step_s.append(step_seconds(trainer))
                write_s = time.perf_counter() - started
                checkpoints.wait()
                step_seconds(trainer)
                if number:
                    figures["wait_s"].append(wait_s)
                    figures["write_s"].append(write_s)
                    # The first includes time in which no step was running.
                    figures["step_s"] += step_s[1:]
        stores.pop("in memory").close(is_useless=True)
        for checkpoints in stores.values():
            checkpoints.close()
        report |= restore_seconds(trainer, Path(folder) / KINDS[0], saves)
    trainer.close()
    return report


def restore_seconds(trainer: Any, folder: Path, count: int) -> dict[str, list[float]]:
    from unittest import mock

    from jaxllm.checkpoint import checksums
    from jaxllm.checkpoint.manager import Checkpoints

    found: dict[str, list[float]] = {"restore_s": [], "read_s": [], "verify_s": []}
    checkpoints = Checkpoints(folder, trainer.config.checkpoint)
    for _ in range(count):
        for name in found:
            started = time.perf_counter()
            if name == "verify_s":
                assert checksums.changed(checkpoints.folder / str(checkpoints.latest)) is None
            else:
                with nullcontext() if name == "restore_s" else mock.patch.object(checksums, "changed", return_value=None):
                    trainer.restore(checkpoints)
            found[name].append(time.perf_counter() - started)
    return found


def step_seconds(trainer: Any) -> float:
    """Seconds of one call of advance: it starts a step and reads the loss of the previous one."""
    started = time.perf_counter()
    trainer.advance()
    return time.perf_counter() - started


def text(report: dict[str, Any]) -> str:
    def milliseconds(values: list[float]) -> str:
        return f"{1e3 * statistics.median(values):8.1f} ({1e3 * min(values):.1f} .. {1e3 * max(values):.1f})" if values else "-"

    lines = [
        f"{report['device']}, {report['machine']}; state {report['state_bytes'] / 1e6:.1f} MB; {report['saves']} saves each",
        ", ".join(f"{name} {version}" for name, version in report["versions"].items()),
        report["command"],
        "",
        "milliseconds: median (least .. most)",
        f"{'':14}{'the loop waits':30}{'until complete':30}{'a step meanwhile':30}",
    ]
    for kind in KINDS:
        columns = (milliseconds(report[kind][name]) for name in ("wait_s", "write_s", "step_s"))
        lines.append(f"{kind:14}" + "".join(f"{column:30}" for column in columns).rstrip())
    lines.append(f"{'no save':14}{'':60}{milliseconds(report['quiet_step_s'])}")
    lines += ["", f"{'a restore':30}{milliseconds(report['restore_s'])}"]
    lines += [f"{'without verification':30}{milliseconds(report['read_s'])}"]
    lines += [f"{'verification alone':30}{milliseconds(report['verify_s'])}"]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
