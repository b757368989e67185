"""Cost of a save for the training loop: asynchronous and synchronous saves, and the speed of steps during one.
Cost of a restore, with and without the verification of every byte. With --store, of copies to a store against a disk alone.

    python benchmarks/checkpoint.py [section.key=value ...] [--saves N] [--store [s3://BUCKET/PREFIX]] [--quick] [--json]

The model has about 12 M parameters, so 145 MB of state with both moments in float32, by default on one CPU device. Each save
completes before the next; the kinds alternate. A wait is the time that the loop spends in Checkpoints.save. A step is timed
from one reading of a loss to the next. Restores read files that the system has cached.

--store saves to a disk, to a disk and a store, and to these while the copy before is under way, in turn. The loop's wait is
then all that it spends in Checkpoints.save and, until the checkpoint is complete on the disk and offered to the store, in
Checkpoints.raise_errors. Without an address the store is moto's S3, on loopback, in another process (pip install
'moto[server]'); with one, a new folder below it, which is emptied at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from jaxllm.config import Config, ConfigError, load_config
from jaxllm.machine.host import available_cpus

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
KINDS = ("asynchronous", "synchronous")
STORE_KINDS = ("disk", "disk and store", "during a copy")
MOTO = """
import logging, sys, urllib.request
from moto.server import ThreadedMotoServer

logging.getLogger("werkzeug").setLevel(logging.ERROR)
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
port = server.get_host_and_port()[1]
create = urllib.request.Request(f"http://127.0.0.1:{port}/benchmark", method="PUT")
urllib.request.urlopen(create).close()
print(port, flush=True)
sys.stdin.read()
"""
"""A server of S3 with a bucket, which ends with the process that started it."""


def main() -> None:
    options = parse(sys.argv[1:])
    try:
        config = load_config(RECIPE, [*(QUICK if options.quick else ()), *options.overrides])
        saves = 2 if options.quick else options.saves
        report = measure(config, saves) if options.store is None else measure_store(config, saves, options.store)
    except ConfigError as error:
        print(f"benchmarks/checkpoint.py: {error}", file=sys.stderr)
        sys.exit(2)
    report["command"] = " ".join(["python benchmarks/checkpoint.py", *sys.argv[1:]])
    print(json.dumps(report, indent=2) if options.json else text(report) if options.store is None else store_text(report))


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--saves", type=int, default=5, metavar="N", help="saves of each kind; default: 5")
    parser.add_argument(
        "--store", nargs="?", const="", metavar="ADDRESS", help="copies to a store; default: moto's on loopback"
    )
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

    from jaxllm.checkpoint.files import describe_run, saved_steps
    from jaxllm.checkpoint.manager import Checkpoints

    trainer, report = begun(config, saves, KINDS)
    with tempfile.TemporaryDirectory() as folder:
        stores = {
            kind: Checkpoints(
                Path(folder) / kind,
                config.checkpoint.model_copy(update={"asynchronous": kind == "asynchronous", "keep": 1}),
            )
            for kind in KINDS
        }
        # The first save of each kind also creates folders and threads.
        for number in range(saves + 1):
            for kind, checkpoints in stores.items():
                trainer.finish()
                jax.block_until_ready(trainer.state)
                figures, step = report[kind], trainer.step
                started = time.perf_counter()
                checkpoints.save(step, trainer.state, describe_run(trainer.config, step, "benchmark"))
                wait_s, step_s = time.perf_counter() - started, []
                while step not in saved_steps(checkpoints.folder):
                    step_s.append(step_seconds(trainer))
                write_s = time.perf_counter() - started
                checkpoints.wait()
                step_seconds(trainer)
                if number:
                    figures["wait_s"].append(wait_s)
                    figures["write_s"].append(write_s)
                    # The first includes time in which no step was running.
                    figures["step_s"] += step_s[1:]
        for checkpoints in stores.values():
            checkpoints.close()
        report |= restore_seconds(trainer, Path(folder) / KINDS[0], saves)
    trainer.close()
    return report


def begun(config: Config, saves: int, kinds: Sequence[str]) -> tuple[Any, dict[str, Any]]:
    """A trainer whose steps are compiled, and a report with the times of steps without a save."""
    import jax

    import jaxllm
    from jaxllm.machine.host import versions

    trainer = jaxllm.Trainer(config)
    for _ in trainer.steps(3):
        pass
    return trainer, {
        "device": f"{trainer.mesh.size} x {trainer.mesh.devices.flat[0].device_kind}",
        "machine": f"{platform.machine()}, {available_cpus()} CPUs",
        "state_bytes": sum(x.nbytes for x in jax.tree.leaves(trainer.state)),
        "saves": saves,
        "quiet_step_s": [step_seconds(trainer) for _ in range(QUIET_STEPS + 1)][1:],
        "versions": versions(),
    } | {kind: {"wait_s": [], "write_s": [], "step_s": []} for kind in kinds}


def measure_store(config: Config, saves: int, address: str) -> dict[str, Any]:
    """As `measure`, for STORE_KINDS. `write_s` is until the checkpoint is complete on the disk and offered, `copy_s` from there
    until the copies are in the store, and `step_s` of steps while it is written or, with a store, copied.

    Raises:
      ConfigError: as measure, or the store cannot be used.
    """
    from jaxllm.checkpoint.manager import Checkpoints
    from jaxllm.checkpoint.stored_checkpoints import hold_store

    with tempfile.TemporaryDirectory() as home, some_store(address) as place:
        trainer, report = begun(config, saves, STORE_KINDS)
        report |= {"store": place if address else "moto", "copy_s": [], "load": []}
        keys = {"asynchronous": True, "keep": 1, "store": place}
        folders, chosen = [Path(home) / name for name in ("alone", "copied")], config.checkpoint.model_copy(update=keys)
        with hold_store(folders[1], chosen) as (stored, _):
            assert stored is not None
            alone = Checkpoints(folders[0], chosen.model_copy(update={"store": None}))
            copied = Checkpoints(folders[1], chosen, stored=stored)
            # The first save of each kind also creates folders and threads.
            step = -1
            for number in range(saves + 1):
                report["load"].append(os.getloadavg()[0])
                for kind, checkpoints in zip(STORE_KINDS, (alone, copied, copied), strict=True):
                    trainer.finish()
                    counts = number and not (kind == "during a copy" and step in stored.copied)
                    step, figures = trainer.step, save_and_train(trainer, checkpoints)
                    for name in figures if counts else ():
                        report[kind][name] += figures[name]
                started, step_s = time.perf_counter(), []
                # A copy that has failed for good ends the measurement, below.
                while step not in stored.copied and not stored.lacks_one:
                    step_s.append(step_seconds(trainer))
                    checkpoints.raise_errors()
                copied.wait()
                if number:
                    report["copy_s"].append(time.perf_counter() - started)
                    report["disk and store"]["step_s"] += step_s
            for checkpoints in (alone, copied):
                checkpoints.close()
        trainer.close()
    return report


def save_and_train(trainer: Any, checkpoints: Any) -> dict[str, list[float]]:
    """Saves, and trains until the checkpoint is complete and offered to the store, as the training loop does."""
    import jax

    from jaxllm.checkpoint.files import describe_run

    jax.block_until_ready(trainer.state)
    step, step_s = trainer.step, []
    started = time.perf_counter()
    checkpoints.save(step, trainer.state, describe_run(trainer.config, step, "benchmark"))
    wait_s = time.perf_counter() - started
    while checkpoints.newest_saved != step or not step_s:
        step_s.append(step_seconds(trainer))
        asked = time.perf_counter()
        checkpoints.raise_errors()
        wait_s += time.perf_counter() - asked
    return {"wait_s": [wait_s], "write_s": [time.perf_counter() - started], "step_s": step_s[1:]}


@contextmanager
def some_store(address: str) -> Iterator[str]:
    """The address of a new folder in a store, which is emptied at the end."""
    from jaxllm.checkpoint.store import Store

    server = None
    if not address:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        server = subprocess.Popen([sys.executable, "-c", MOTO], **pipes, text=True)
        assert server.stdout is not None
        if not (port := server.stdout.readline().strip()):
            raise ConfigError("moto did not start: pip install 'moto[server]', or give the address of a store.")
        names = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
        os.environ |= {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "AWS_DEFAULT_REGION": "us-east-1",
            **dict.fromkeys(names, "-"),
        }
        address = "s3://benchmark"
    place = Store(f"{address.rstrip('/')}/benchmark-{secrets.token_hex(4)}")
    try:
        yield place.address
    finally:
        for step, names in place.steps().items():
            place.remove(f"{step}/{name}" for name in names)
        if server is not None:
            server.communicate()


def restore_seconds(trainer: Any, folder: Path, count: int) -> dict[str, list[float]]:
    from unittest import mock

    from jaxllm.checkpoint import files
    from jaxllm.checkpoint.manager import Checkpoints

    found: dict[str, list[float]] = {"restore_s": [], "read_s": [], "verify_s": []}
    checkpoints = Checkpoints(folder, trainer.config.checkpoint)
    for _ in range(count):
        for name in found:
            started = time.perf_counter()
            if name == "verify_s":
                assert files.changed(checkpoints.folder / str(checkpoints.latest)) is None
            else:
                with nullcontext() if name == "restore_s" else mock.patch.object(files, "changed", return_value=None):
                    trainer.restore(checkpoints)
            found[name].append(time.perf_counter() - started)
    return found


def step_seconds(trainer: Any) -> float:
    """Seconds of one call of advance: it starts a step and reads the loss of the previous one."""
    started = time.perf_counter()
    trainer.advance()
    return time.perf_counter() - started


def milliseconds(values: list[float]) -> str:
    return f"{1e3 * statistics.median(values):8.1f} ({1e3 * min(values):.1f} .. {1e3 * max(values):.1f})" if values else "-"


def table(report: dict[str, Any], kinds: Sequence[str]) -> list[str]:
    lines = [
        f"{report['device']}, {report['machine']}; state {report['state_bytes'] / 1e6:.1f} MB; {report['saves']} saves each",
        ", ".join(f"{name} {version}" for name, version in report["versions"].items()),
        report["command"],
        "",
        "milliseconds: median (least .. most)",
        f"{'':16}{'the loop waits':30}{'until complete':30}{'a step meanwhile':30}",
    ]
    for kind in kinds:
        columns = (milliseconds(report[kind][name]) for name in ("wait_s", "write_s", "step_s"))
        lines.append(f"{kind:16}" + "".join(f"{column:30}" for column in columns).rstrip())
    return [*lines, f"{'no save':16}{'':60}{milliseconds(report['quiet_step_s'])}"]


def store_text(report: dict[str, Any]) -> str:
    waits = [statistics.median(found) for kind in STORE_KINDS if (found := report[kind]["wait_s"])]
    lines = table(report, STORE_KINDS)
    lines += ["", f"{'until it is in the store':30}{milliseconds(report['copy_s'])}"]
    ratios = " and ".join(f"{wait / waits[0]:.2f}" for wait in waits[1:])
    return "\n".join([*lines, f"the waits are {ratios} times those for a disk; load {statistics.median(report['load']):.1f}"])


def text(report: dict[str, Any]) -> str:
    lines = table(report, KINDS)
    lines += ["", f"{'a restore':30}{milliseconds(report['restore_s'])}"]
    lines += [f"{'without verification':30}{milliseconds(report['read_s'])}"]
    lines += [f"{'verification alone':30}{milliseconds(report['verify_s'])}"]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
