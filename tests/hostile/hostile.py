"""One case of hostile input, and how a command must take it."""

import contextlib
import io
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import yaml
from tiny import TINY

from jaxllm.cli.app import main

LIMIT_S, LIMIT_BYTES, LIMIT_CHARACTERS = 10, 2**30, 2000
TAKEN_S = 120
"""Limit for a run: it compiles, for ten seconds on a loaded machine without the compilation cache."""


@dataclass(frozen=True)
class Case:
    """A command line that is run in a folder of its own.

    Attributes:
      words: of the command, without `jaxllm`.
      says: part of the sentence in which it must end, with exit code 2; None: it must succeed.
      files: writes the input into the current folder.
      environment: variables beside those of the test.
    """

    name: str
    words: tuple[str, ...]
    says: str | None
    files: Callable[[], object] = lambda: None
    environment: Mapping[str, str] = field(default_factory=dict)


def train(*overrides: str) -> tuple[str, ...]:
    """The words that train from base.yaml, which `run` has written."""
    return ("train", "base.yaml", *overrides)


def run(case: Case, folder: Path, monkeypatch) -> None:
    """Runs the command in this process and asserts what the case says, within one GiB and, if it is refused, ten seconds of
    processor time."""
    monkeypatch.chdir(folder)
    for name, value in case.environment.items():
        monkeypatch.setenv(name, value)
    Path("words.txt").write_text("law mesh ring axis shard gather tick stage\n" * 500)
    Path("base.yaml").write_text(
        yaml.safe_dump({**TINY, "data": {"source": "files", "paths": "words.txt"}, "run": {"dir": "run"}})
    )
    case.files()
    out, err = io.StringIO(), io.StringIO()
    before, began_s = reset_peak_bytes(), processor_s()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), mock.patch("os.write", written_to(err)):
        code = exit_code(case.words)
    took_s, took_bytes = processor_s() - began_s, peak_bytes() - before
    sentence = (err.getvalue().splitlines() or [""])[-1]
    assert "Traceback" not in err.getvalue(), err.getvalue()[-3000:]
    assert code == (0 if case.says is None else 2), (code, err.getvalue()[-3000:])
    if case.says is not None:
        assert sentence.startswith("jaxllm: "), sentence[:LIMIT_CHARACTERS]
        assert case.says in sentence, sentence[:LIMIT_CHARACTERS]
        assert len(sentence) < LIMIT_CHARACTERS
    assert took_s < (TAKEN_S if case.says is None else LIMIT_S), took_s
    assert took_bytes < LIMIT_BYTES, took_bytes


def processor_s() -> float:
    """Seconds of this process and of those that it waited for."""
    return sum(os.times()[:4])


def exit_code(words: tuple[str, ...]) -> int:
    with mock.patch.object(sys, "argv", ["jaxllm", *words]):
        try:
            main()
        except SystemExit as ended:
            return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    return 0


def written_to(err: io.StringIO) -> Callable[[int, bytes], int]:
    """os.write with what goes to standard error added to `err`: stderr.py bypasses sys.stderr."""
    write = os.write

    def written(file: int, content: bytes) -> int:
        return err.write(content.decode()) if file == 2 else write(file, content)

    return written


def reset_peak_bytes() -> int:
    """Forgets the largest memory of this process so far, and returns what it has now."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak_bytes()


def peak_bytes() -> int:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024
