"""Compares a compiled step with the same step by another JAX, with more XLA flags, or as an earlier report has it.

    python benchmarks/against.py OTHER CONFIG [section.key=value ...] --gpu h100-80gb --gpus 8 [--json]

    OTHER    the folder of a virtual environment: this checkout's jaxllm runs there in a process of its own, so that only JAX,
             its plugin and NVIDIA's packages differ; a jaxllm that is installed there is not used
             'XLA_FLAGS=--name=value ...', one word: the same JAX with these flags beside those already set
             a .json file into which an earlier `jaxllm compile ... --json` was printed

All other words are those of `jaxllm compile`. The baseline is the step of the older JAX: who upgrades asks what the new one
makes worse. With the same JAX it is the stored report, or else the step without OTHER.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console

import jaxllm
from jaxllm.compile.compare import compare, figures, render_comparison
from jaxllm.compile.report import CompileReport
from jaxllm.config import ConfigError
from jaxllm.machine import xla_flags
from jaxllm.untrusted import RefusedInput, checked, parse_json, read_bytes, reason_of, shown

FLAGS = "XLA_FLAGS="
_START = """
import importlib.util, sys
sys.path = [folder for folder in sys.path if folder]
spec = importlib.util.spec_from_file_location("jaxllm", sys.argv.pop(1))
sys.modules["jaxllm"] = package = importlib.util.module_from_spec(spec)
spec.loader.exec_module(package)
from jaxllm.cli.app import main
main()
"""
"""Runs this package in another environment, with that environment's JAX. By PYTHONPATH it would also get all other packages of
the folder that this one is installed in, and so this environment's JAX."""


def report_of(other: str, arguments: Sequence[str]) -> CompileReport:
    """The report of OTHER.

    Args:
      arguments: of `jaxllm compile`.

    Raises:
      ConfigError: there is no such environment or report, a flag is unknown, or the step did not compile there.
    """
    if other.endswith(".json"):
        return read_report(Path(other))
    if other.startswith(FLAGS):
        flags = other.removeprefix(FLAGS)
        xla_flags.require_known(flags)
        return compiled_by(Path(sys.executable), arguments, flags)
    python = Path(other).absolute() / "bin" / "python"
    if not python.is_file():
        raise ConfigError(f"{shown(other)} has no bin/python: name the folder of a virtual environment.")
    return compiled_by(python, arguments)


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
    report = checked(parse_json(content, finite=False), CompileReport)
    try:
        figures(report)
    except OverflowError:
        raise RefusedInput("a number is too large") from None
    return report


def compiled_by(python: Path, arguments: Sequence[str], flags: str = "") -> CompileReport:
    """The step, compiled by this checkout's code in a process of its own. The last of equal flags wins."""
    command = [str(python), "-c", _START, str(jaxllm.__file__), "compile", *arguments, "--json"]
    variables = {**os.environ, "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()}
    name = shown(str(python))
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False, env=variables)
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


def ordered(ours: CompileReport, theirs: CompileReport, other: str) -> tuple[list[tuple[str, CompileReport]], str]:
    """Both reports with their names, the baseline first, and why that one is the baseline."""
    stored = other.endswith(".json")
    theirs_first, because = stored, "it is the earlier report" if stored else "it is the step of this environment"
    if _version(ours) != _version(theirs):
        theirs_first, because = _version(theirs) < _version(ours), "it has the older JAX"
    pairs = [("this environment", ours), (other, theirs)]
    return pairs[::-1] if theirs_first else pairs, because


def _version(report: CompileReport) -> list[int]:
    return [int(number) for number in re.findall(r"\d{1,9}", report.jax_version)]


def made_by(pairs: Sequence[tuple[str, CompileReport]]) -> Iterator[str]:
    """What compiled each step, and what differs."""
    for (name, report), (_, other) in zip(pairs, pairs[::-1], strict=True):
        plugin = [package for package in report.packages if "plugin" in package or package.startswith("jaxllm ")]
        yield f"{shown(name, 60)}: {shown(', '.join([f'JAX {report.jax_version}', *plugin]), 160)}"
        if flags := [flag for flag in report.xla_flags.split() if flag not in other.xla_flags.split()]:
            yield f"  with {shown(' '.join(flags), 200)}"
    if len({report.packages[-1:] for _, report in pairs}) > 1:
        yield "Different code of jaxllm: it too may have changed the step, the times and the counts."


def main(words: Sequence[str]) -> None:
    if len(words) < 2 or words[0].startswith("-"):
        sys.exit(__doc__)
    other, *arguments = words
    as_json = "--json" in arguments
    arguments = [word for word in arguments if word != "--json"]
    try:
        theirs = report_of(other, arguments)
        pairs, because = ordered(compiled_by(Path(sys.executable), arguments), theirs, other)
        (first, before), (second, after) = pairs
        comparison = compare(before, after, (first, second))
    except ConfigError as error:
        sys.exit(str(error))
    if as_json:
        print(json.dumps({"comparison": comparison.to_json(), "because": because}))
        return
    print(*made_by(pairs), f"The baseline is {shown(first)}: {because}.", "", sep="\n")
    Console(highlight=False, markup=False).print(render_comparison(comparison))


if __name__ == "__main__":
    main(sys.argv[1:])
