"""What each version of JAX makes of the same steps: memory, exposed transfers and kernel time, compiled for H100s without one.

    python benchmarks/jax_versions.py ENVIRONMENT ...    prints the table; an environment is the folder of a virtual one
    python benchmarks/jax_versions.py --make FOLDER      makes the environments of VERSIONS there first, by pip

    --write    stores the figures in benchmarks/jax_versions.json and writes the table into docs/jax-versions.md
    --check    compares with the stored figures, a version that is not stored with the newest that is; exit code 1 if one grew

This checkout's jaxllm compiles in every environment, so that only JAX differs. Needs the extra aot; half a minute for each step
and version.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import yaml
from against import report_of
from markdown_sections import write_between

from jaxllm.display import readable

CHECKOUT = Path(__file__).resolve().parents[1]
PAGE, STORED = CHECKOUT / "docs" / "jax-versions.md", Path(__file__).with_name("jax_versions.json")
VERSIONS = {"0.10.2": "python3.11", "0.11.2": "python3.12", "0.12.0": "python3.12", "newest": "python3.12"}
"""Version -> the Python of its environment: JAX 0.11 needs 3.12, and no Flax for 3.12 takes JAX 0.10."""
GROWN = 0.01
"""A figure that grows by more is reported."""
STEPS: dict[str, tuple[int, dict[str, object]]] = {
    "8B on 8 GPUs, ZeRO 3": (8192, {"zero": 3}),
    "8B on 8 GPUs, tensor 8": (8192, {"tensor": 8}),
    "8B on 8 GPUs, 1F1B over 4 stages, ZeRO 1": (8192, {"pipe": 4, "zero": 1}),
    "8B on 8 GPUs, context 8, ZeRO 3": (65_536, {"context": 8, "zero": 3}),
}
"""Title -> (sequence length, parallel)."""
Measured = dict[str, dict[str, float | None]]
"""Title -> figure -> value."""
FIGURES = {"bytes": "memory", "exposed_s": "exposed transfers", "kernels_s": "kernel time"}


def make(folder: Path) -> Iterator[Path]:
    for version, python in VERSIONS.items():
        environment = folder / version
        if not (environment / "bin" / "python").exists():
            subprocess.run([python, "-m", "venv", environment], check=True)
        jax = "jax" if version == "newest" else f"jax=={version}"
        install = ["-m", "pip", "install", "--quiet", "--upgrade", "--editable", f"{CHECKOUT}[aot]", jax]
        subprocess.run([environment / "bin" / "python", *install], check=True)
        yield environment


def measured(environment: Path) -> tuple[str, Measured]:
    """JAX's version, and the figures of each step."""
    version, found = "", {}
    for title, (length, parallel) in STEPS.items():
        train = {"steps": 1, "sequence_length": length, "global_batch_sequences": 16, "microbatch_sequences": 1}
        recipe = {"model": {"name": "llama-3.1-8b"}, "parallel": parallel, "train": train, "data": {"mask_documents": False}}
        with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
            yaml.safe_dump(recipe, file)
            file.flush()
            report = report_of(str(environment), [file.name, "--gpu", "h100-80gb", "--gpus", "8"])
        assert report.kernels is not None
        values = (report.total_bytes, report.exposed_transfers_s, report.kernels.step_s)
        version, found[title] = report.jax_version, dict(zip(FIGURES, values, strict=True))
        print(f"{version}: {title}", file=sys.stderr, flush=True)
    return version, found


def table(by_version: dict[str, Measured]) -> Iterator[str]:
    yield f"| step | | {' | '.join(by_version)} |"
    yield "|---|---|" + "---|" * len(by_version)
    for title in STEPS:
        for number, (key, name) in enumerate(FIGURES.items()):
            cells = [text(key, found[title][key]) for found in by_version.values()]
            yield f"| {title if number == 0 else ''} | {name} | {' | '.join(cells)} |"


def text(key: str, value: float | None) -> str:
    return "not known" if value is None else readable(value) if key == "bytes" else f"{1000 * value:,.0f} ms"


def grown(by_version: dict[str, Measured], stored: dict[str, Measured]) -> Iterator[str]:
    """A sentence for each figure that is larger than the stored one."""
    for version, found in by_version.items():
        known = version if version in stored else list(stored)[-1]
        for title in STEPS:
            for key, name in FIGURES.items():
                value, before = found[title][key], stored[known][title][key]
                if before is not None and (value is None or value > (1 + GROWN) * before):
                    yield f"JAX {version}, {title}: {name} {text(key, value)}, stored for {known} {text(key, before)}."


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("environments", nargs="*", type=Path)
    parser.add_argument("--make", type=Path, metavar="FOLDER")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args(arguments)
    environments = [*given.environments, *(make(given.make) if given.make else ())]
    by_version = dict(map(measured, environments))
    print("\n".join(table(by_version)))
    if given.check and (larger := list(grown(by_version, json.loads(STORED.read_text(encoding="utf-8"))))):
        sys.exit("\n".join(larger))
    if given.write:
        STORED.write_text(json.dumps(by_version, indent=1) + "\n", encoding="utf-8")
        write_between(PAGE, "jax-versions", "\n".join(table(by_version)))


if __name__ == "__main__":
    main()
