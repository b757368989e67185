"""Runs the notebooks from a clean kernel and stores their outputs, small and without traces of one machine.

    python notebooks/run.py                          all, in place
    python notebooks/run.py 01_train_on_one_host     this one
    python notebooks/run.py --check                  runs, writes nothing, and fails if a stored output has another kind

They run on the CPU with the jaxllm of this checkout. Needs the extra notebook, and for 02 also aot.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent
NAMES = sorted(path.stem for path in FOLDER.glob("*.ipynb"))
LIMIT_S = 600
"""Time limit of one cell, on a busy machine."""
MOST_TEXT = 20_000
"""Characters of a text or HTML output that are stored."""
MOST_BYTES = 400_000
"""Limit of a complete notebook."""
# Names of temporary folders differ each time, and the home folder is private.
HIDDEN = ((re.compile(r"/(?:tmp|var/folders)/[\w./-]*?tmp\w+"), "TEMPORARY"), (re.compile(re.escape(str(ROOT))), "jaxllm"))


def execute(name: str) -> Any:
    """Runs a notebook in a clean kernel and returns it with its outputs.

    Raises:
      nbclient.exceptions.CellExecutionError: a cell failed.
    """
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    # XLA's C++ writes machine-specific text to file descriptors, which a kernel would show as the cell's output.
    quiet, here = ["--IPKernelApp.capture_fd_output=False"], {"metadata": {"path": str(FOLDER)}}
    client = NotebookClient(notebook, timeout=LIMIT_S, kernel_name="python3", resources=here, extra_arguments=quiet)
    client.execute(env=environment())
    tidy(notebook)
    nbformat.validate(notebook)
    return notebook


def environment() -> dict[str, str]:
    """Environment of the kernel: this checkout's jaxllm on CPU devices, without colours."""
    path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), "JAX_PLATFORMS": "cpu", "NO_COLOR": "1"}


def tidy(notebook: Any) -> None:
    """Drops times and machine-specific text, joins the pieces of a stream, and refuses outputs that are too large."""
    notebook.metadata.pop("widgets", None)
    # Drops the version of this Python.
    notebook.metadata["language_info"] = {"name": "python"}
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type != "code":
            continue
        kept: list[Any] = []
        for output in cell.outputs:
            if output.output_type == "stream":
                if kept and kept[-1].output_type == "stream" and kept[-1].name == output.name:
                    kept[-1].text += output.text
                    continue
            elif "data" in output:
                output["metadata"] = {}
            kept.append(output)
        for output in kept:
            if output.output_type == "stream":
                output["text"] = hidden(output.text)
            for kind, content in output.get("data", {}).items():
                if kind.startswith("text/"):
                    output.data[kind] = hidden("".join(content))
        cell["outputs"] = kept


def hidden(text: str) -> str:
    for pattern, name in HIDDEN:
        text = pattern.sub(name, text)
    if len(text) > MOST_TEXT:
        raise ValueError(f"an output has {len(text):,} characters, more than {MOST_TEXT:,}: show less of it")
    return text


def kinds(notebook: Any) -> list[list[str]]:
    """Kind of each code cell's outputs, without their content: 'stdout' once, and the sorted types of each result. On a slow
    machine lines on stderr say what a cell waits for, and cut its output in two."""

    def kind(output: Any) -> str:
        name = output["output_type"]
        if name == "stream":
            return output["name"]
        return name if name == "error" else f"{name} {' '.join(sorted(output['data']))}"

    def of_cell(outputs: Any) -> list[str]:
        found = [kind(output) for output in outputs]
        return [*(["stdout"] if "stdout" in found else []), *(one for one in found if one not in ("stdout", "stderr"))]

    return [of_cell(cell["outputs"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]


def differences(kept: Any, fresh: Any) -> list[str]:
    """One sentence for each code cell whose stored outputs have another kind than those of a fresh run."""
    pairs = enumerate(zip(kinds(kept), kinds(fresh), strict=True), 1)
    return [
        f"code cell {number} keeps {old or 'nothing'}, and puts out {new or 'nothing'}"
        for number, (old, new) in pairs
        if old != new
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=NAMES, metavar="NAME", help=f"one of {', '.join(NAMES)}; default: all")
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if outputs have another kind")
    given = parser.parse_args()
    import nbformat

    stale = 0
    for name in given.names:
        path = FOLDER / f"{Path(name).stem}.ipynb"
        kept = nbformat.read(path, as_version=4)
        started = time.perf_counter()
        fresh = execute(path.stem)
        text = nbformat.writes(fresh) + "\n"
        print(f"{path.stem}: {time.perf_counter() - started:.0f} s, {len(text):,} bytes", flush=True)
        if len(text) > MOST_BYTES:
            sys.exit(
                f"{path.stem} has {len(text):,} bytes with its outputs, more than {MOST_BYTES:,}: make its pictures smaller"
            )
        if given.check:
            found = differences(kept, fresh)
            stale += bool(found)
            print(*(f"  {line}" for line in found), sep="\n", end="\n" if found else "")
        else:
            path.write_text(text, encoding="utf-8")
    sys.exit(f"{stale} of {len(given.names)} are stale: run `python notebooks/run.py` and look at them" if stale else 0)


if __name__ == "__main__":
    main()
