"""Compile reports that this process did not make, for `jaxllm compile --against`: of another environment, with more XLA flags,
or stored by an earlier `jaxllm compile --json`.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import jaxllm
from jaxllm.compile.compare import figures
from jaxllm.compile.report import CompileReport, report_from_json
from jaxllm.config import ConfigError
from jaxllm.runtime import flag_names, xla_flags
from jaxllm.untrusted import RefusedInput, parse_json, read_bytes, reason_of, shown

FLAGS = "XLA_FLAGS="
_START = """
import importlib.util, sys
sys.path = [folder for folder in sys.path if folder]
spec = importlib.util.spec_from_file_location("jaxllm", sys.argv.pop(1))
sys.modules["jaxllm"] = package = importlib.util.module_from_spec(spec)
spec.loader.exec_module(package)
from jaxllm.cli import main
main()
"""
"""Runs this package in another environment, with that environment's JAX. By PYTHONPATH it would also get all other packages of
the folder that this one is installed in, and so this environment's JAX."""


def is_stored(word: str) -> bool:
    """Whether a word of --against names the file of a report."""
    return word.endswith(".json") and "=" not in word


def report_from_elsewhere(words: Sequence[str], arguments: Sequence[str]) -> CompileReport | None:
    """The report that --against names. None if the words are a recipe or keys of one.

    Args:
      arguments: of this `jaxllm compile`, without --against.

    Raises:
      ConfigError: there is no such environment or report, a flag is unknown, or the step did not compile there.
    """
    if not any(is_stored(word) or word.startswith(FLAGS) or ("=" not in word and Path(word).is_dir()) for word in words):
        return None
    if len(words) > 1:
        raise ConfigError(
            f"--against was given {len(words)} words: an environment, a report or XLA_FLAGS=... stands alone, and all flags in "
            "one pair of quotes."
        )
    (word,) = words
    if is_stored(word):
        return read_report(Path(word))
    if word.startswith(FLAGS):
        flags = word.removeprefix(FLAGS)
        flag_names.require_known(flags)
        return _compiled_by(Path(sys.executable), arguments, flags)
    python = Path(word).absolute() / "bin" / "python"
    if not python.is_file():
        raise ConfigError(f"{shown(word)} has no bin/python: name the folder of a virtual environment, or a recipe.")
    return _compiled_by(python, arguments)


def read_report(file: Path) -> CompileReport:
    """A report that `jaxllm compile --json` printed. Raises ConfigError if the file cannot be read or has none."""
    try:
        return _parsed(read_bytes(file))
    except (OSError, RefusedInput) as error:
        raise ConfigError(
            f"{shown(str(file))} is no report of a compiled step ({reason_of(error)}): name a file that this version of "
            "`jaxllm compile --json` can have written."
        ) from None


def _parsed(content: bytes) -> CompileReport:
    report = report_from_json(parse_json(content, finite=False))
    try:
        figures(report)
    except OverflowError:
        raise RefusedInput("a number is too large") from None
    return report


def _compiled_by(python: Path, arguments: Sequence[str], flags: str = "") -> CompileReport:
    """The same step, compiled by this package's code in a process of its own."""
    command = [str(python), "-c", _START, str(jaxllm.__file__), "compile", *arguments, "--json"]
    name = shown(str(python))
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, check=False, env=xla_flags.environment_with(flags)
        )
    except OSError as error:
        raise ConfigError(f"{name} cannot be started ({error.strerror}): name another environment.") from None
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines() or [f"exit code {done.returncode}"]
        reason = shown(said[-1].removeprefix("jaxllm: "), 400)
        lacking = "; pip install 'jaxllm[aot]' there." if reason.startswith("ModuleNotFoundError") else ""
        raise ConfigError(f"{name} does not compile this step: {reason}{lacking}")
    try:
        return _parsed(done.stdout)
    except RefusedInput as reason:
        raise ConfigError(f"{name} printed no report of the step ({reason}): name another environment.") from None
