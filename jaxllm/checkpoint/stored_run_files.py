"""What belongs to a stored checkpoint beside its own files: curves, config and tokenizer of run.dir, in its folder `run`."""

from __future__ import annotations

import itertools
import math
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath

from jaxllm.json_lines import parse
from jaxllm.pretrained.folder import TOKENIZER

RUN = "run"
CURVES = ("metrics.jsonl", "spikes.jsonl")
COMPANIONS = ("config.yaml", "reference.npy")


def files_of(run_dir: Path, step: int) -> Iterator[tuple[str, bytes]]:
    """(name below the checkpoint, content). Curves end at its step."""
    for name in CURVES:
        if (path := run_dir / name).exists():
            lines = path.read_bytes().splitlines(keepends=True)
            last = (n for n in reversed(range(len(lines))) if _step_of(lines[n]) <= step)
            yield f"{RUN}/{name}", b"".join(lines[: next(last, -1) + 1])
    others = [run_dir / name for name in COMPANIONS]
    for path in (*others, *(run_dir / TOKENIZER).rglob("*")):
        if path.is_file():
            yield f"{RUN}/{path.relative_to(run_dir).as_posix()}", path.read_bytes()


def wanted(run_dir: Path, there: Iterable[str]) -> list[str]:
    """Which names below a checkpoint a run takes: curves, and of the other files those that it lacks."""
    names = (name.removeprefix(f"{RUN}/") for name in there if name.startswith(f"{RUN}/"))
    mine = (name for name in names if _belongs(PurePosixPath(name)))
    return [f"{RUN}/{name}" for name in mine if name in CURVES or not (run_dir / name).exists()]


def place(run_dir: Path, folder: Path, names: Iterable[str]) -> None:
    """Moves files from a checkpoint's folder into run_dir. Local curves, which end earlier, get another name."""
    for name in names:
        target = run_dir / name.removeprefix(f"{RUN}/")
        if target.exists() and target.read_bytes().startswith((folder / name).read_bytes()):
            # What is here goes further.
            continue
        if target.exists():
            free = (target.with_stem(f"{target.stem}-{n}") for n in itertools.count(1))
            target.rename(next(path for path in free if not path.exists()))
        target.parent.mkdir(parents=True, exist_ok=True)
        (folder / name).rename(target)
    shutil.rmtree(folder / RUN, ignore_errors=True)


def _belongs(path: PurePosixPath) -> bool:
    """Whether a copy writes such a file. Other names could replace any file of this machine."""
    return str(path) in (*CURVES, *COMPANIONS) or (path.parts[:1] == (TOKENIZER,) and ".." not in path.parts)


def _step_of(line: bytes) -> float:
    """The step of a line of metrics; infinity for a damaged one."""
    return math.inf if (record := parse(line)) is None else record["step"]
