"""Hostile run directories: resumed, and reported on."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hostile import Case, train

DEEP = "[" * 100_000
CHECKPOINT = Path("run/checkpoints/4")
CONFIG = {"model": {}, "train": {"global_batch_sequences": 8, "sequence_length": 16}}
META = {"format": 2, "step": 4, "fingerprint": "", "config": CONFIG, "samples": 1, "versions": {}}


def checkpoint(meta: str | dict[str, Any], files: str = "{}"):
    """A run directory with one checkpoint of that metadata."""

    def write() -> None:
        (CHECKPOINT / "meta").mkdir(parents=True)
        (CHECKPOINT / "state").mkdir()
        (CHECKPOINT / "meta" / "metadata").write_text(meta if isinstance(meta, str) else json.dumps(meta))
        (CHECKPOINT / "files.json").write_text(files)

    return write


def without(key: str) -> dict[str, Any]:
    return {name: value for name, value in META.items() if name != key}


def metrics(content: bytes):
    def write() -> None:
        Path("run").mkdir()
        Path("run/metrics.jsonl").write_bytes(content)

    return write


def reported(content: bytes, config: str | None = None):
    """A run of which `report` can tell something, with more lines."""

    def write() -> None:
        Path("run").mkdir()
        lines = [json.dumps({"step": n, "tokens": 128 * n, "loss": 5.0, "tokens_per_s_per_device": 9.0}) for n in range(1, 9)]
        Path("run/metrics.jsonl").write_bytes("\n".join(lines).encode() + b"\n" + content)
        Path("run/config.yaml").write_text(Path("base.yaml").read_text() if config is None else config)

    return write


def sparse_metrics() -> None:
    Path("run").mkdir()
    Path("run/metrics.jsonl").touch()
    os.truncate("run/metrics.jsonl", 3 * 2**30)


def metrics_are_a_pipe() -> None:
    Path("run").mkdir()
    os.mkfifo("run/metrics.jsonl")


def config_is_a_folder() -> None:
    Path("run/config.yaml").mkdir(parents=True)


def resume(name: str, says: str | None, files: Callable[[], object]) -> Case:
    return Case(
        f"resume: {name}", train("parallel.data=1", "run.cpu_devices=8", "parallel.tensor=2", "parallel.context=4"), says, files
    )


def report(name: str, says: str | None, files: Callable[[], object]) -> Case:
    return Case(f"report: {name}", ("report", "run", "--json"), says, files)


NONE_INTACT = "No checkpoint in "
GOOD = b'{"step": 1, "loss": 5.0}\n'
CASES = [
    *(
        resume(f"metadata without {key}", NONE_INTACT, checkpoint(without(key)))
        for key in ("config", "fingerprint", "step", "format")
    ),
    resume("config is text", "is intact: 4 (config is x", checkpoint({**META, "config": "x"})),
    resume("metadata nests", "is intact: 4 (it nests deeper", checkpoint('{"step": ' + DEEP)),
    resume("step is text", "is intact: 4 (step is x", checkpoint({**META, "step": "x"})),
    resume("a key twice", "the key step is there twice", checkpoint('{"step": 1, "step": 2}')),
    resume("files nest", "is intact: 4 (it nests deeper", checkpoint(META, DEEP)),
    resume("files of one number", "is intact: 4 (x: it has no 1)", checkpoint(META, '{"x": [1]}')),
    resume("metrics are a pipe", "metrics.jsonl", metrics_are_a_pipe),
    resume("config.yaml is a folder", "config.yaml cannot be used (Is a directory)", config_is_a_folder),
    # One run for all: each line is read by itself.
    resume(
        "metrics with lines of no step, and no last newline",
        None,
        metrics(GOOD + b"\xff\xfe\xfd" * 50 + b'\n5\nnull\n{"step": "x", "loss": 1}\n' + DEEP.encode() + b'\n{"step": 2}'),
    ),
    report("a good one", None, reported(b"")),
    report("a line nests", None, reported(DEEP.encode() + b"\n")),
    report("1e400", None, reported(b'{"step": 9, "tokens": 1152, "loss": 1e400, "tokens_per_s_per_device": 1e400}\n')),
    report("huge numbers", None, reported(b'{"step": 9, "tokens": ' + b"9" * 400 + b', "loss": ' + b"9" * 400 + b"}\n")),
    report("config nests", "config.yaml cannot be read as a config (it nests deeper", reported(b"", "a: " + DEEP)),
    report("3 GiB of zeros", "", sparse_metrics),
]
