"""Builds the planner's page: a folder of static files that runs jaxllm's own estimate and plan in a browser.

    python docs/browser/build_page.py --out planner
    python -m http.server --directory planner            then open the address that it prints

The page runs this checkout's jaxllm on Pyodide, which is CPython compiled to WebAssembly, with the packages of packages.txt.
pip and npm fetch these once, into a cache folder; a file is used only if it has the recorded hash, and if all are there the
build needs no network. The same checkout and versions give the same bytes. Once built the page loads nothing but its own files.
"""

from __future__ import annotations

import argparse
import hashlib
import html
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
CHECKOUT = HERE.parents[1]
PYODIDE = "pyodide@314.0.7"
PYODIDE_SHA256 = "66b7949e5a0cba2250b586d7e368bf12fb482800748d182c4618254b685ffaa0"
RUNTIME = ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "pyodide-lock.json", "python_stdlib.zip")
"""What a browser needs of the package."""
PYTHON, PLATFORMS = "3.14", ("pyemscripten_2026_0_wasm32", "manylinux2014_x86_64")
"""Pyodide's Python and its binary interface. The second platform is that of the one wheel whose binary is left out."""
OWN = ("index.html", "style.css", "page.js", "charts.js", "worker.js", "planner.py")
CACHE = Path.home() / ".cache" / "jaxllm" / "browser"
LEFT_OUT = re.compile(r"^pydantic/(v1|mypy)\b|/_hypothesis_plugin")


class BuildError(Exception):
    """One sentence that says what to change."""


class NotFetchedError(BuildError):
    """A package that cannot be reached."""


def build(out: Path, cache: Path) -> Path:
    """Writes the page into a folder, over an earlier one.

    Raises:
      BuildError: a package cannot be fetched, or has another hash.
    """
    wheels, runtime = fetched(cache)
    folder = out / "pyodide"
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(runtime) as archive:
        for name in RUNTIME:
            member = archive.extractfile(f"package/{name}")
            assert member is not None
            (folder / name).write_bytes(member.read())
    with zipfile.ZipFile(out / "packages.zip", "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, content in sorted([*packages(wheels), *ours()]):
            # A fixed date, so that the same content gives the same file.
            archive.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED)
    for name in OWN:
        shutil.copyfile(HERE / name, out / name)
    page = out / "index.html"
    page.write_text(with_choices(page.read_text(encoding="utf-8")), encoding="utf-8")
    return page


def with_choices(page: str) -> str:
    """The page with the models and the GPUs that this checkout knows."""
    sys.path.insert(0, str(CHECKOUT))
    import jaxllm
    from jaxllm.config import published_models
    from jaxllm.cost_model.hardware import GPUS

    for mark, names in (("MODELS", published_models()), ("GPUS", list(GPUS))):
        options = "".join(f"<option>{html.escape(name)}</option>" for name in names)
        page = page.replace(f"<!--{mark}-->", options)
    return page.replace("<!--VERSION-->", jaxllm.__version__)


def packages(wheels: list[Path]) -> Iterator[tuple[str, bytes]]:
    """(name, content) of the Python files, licenses and WebAssembly of wheels."""
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                wanted = name.endswith((".py", "wasm32-emscripten.so")) or "/licenses/" in name
                if wanted and not LEFT_OUT.search(name):
                    yield name, archive.read(name)


def ours() -> Iterator[tuple[str, bytes]]:
    """The same of the checkout's jaxllm, with the published models where a wheel has them."""
    for path in sorted(path for ending in ("py", "yaml") for path in (CHECKOUT / "jaxllm").rglob(f"*.{ending}")):
        yield path.relative_to(CHECKOUT).as_posix(), path.read_bytes()
    for path in sorted((CHECKOUT / "configs" / "models").glob("*.yaml")):
        yield f"jaxllm/configs/models/{path.name}", path.read_bytes()
    yield "jaxllm/LICENSE", (CHECKOUT / "LICENSE").read_bytes()


# ------------------------------------------------------------------------------------------------------------- fetching


def fetched(cache: Path) -> tuple[list[Path], Path]:
    """(the wheels of packages.txt, Pyodide's package) in the cache folder."""
    cache.mkdir(parents=True, exist_ok=True)
    wanted = re.findall(r"sha256:([0-9a-f]{64})", (HERE / "packages.txt").read_text(encoding="utf-8"))
    if not {*wanted} <= by_hash(cache).keys():
        platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes", "--only-binary=:all:"]
        target = ["--implementation=cp", f"--python-version={PYTHON}", f"--abi=cp{PYTHON.replace('.', '')}", *platforms]
        run("pip", *pip, *target, "--dest", str(cache), "-r", str(HERE / "packages.txt"))
    if PYODIDE_SHA256 not in by_hash(cache):
        npm = shutil.which("npm")
        if npm is None:
            raise NotFetchedError("npm is missing, which fetches Pyodide: install Node.js.")
        run("npm", npm, "pack", PYODIDE, "--silent", "--pack-destination", str(cache))
    found = by_hash(cache)
    for digest in (*wanted, PYODIDE_SHA256):
        if digest not in found:
            raise BuildError(f"No file in {cache} has the recorded hash {digest}: what was fetched is not what was pinned.")
    return [found[digest] for digest in wanted], found[PYODIDE_SHA256]


def by_hash(folder: Path) -> dict[str, Path]:
    return {hashlib.sha256(path.read_bytes()).hexdigest(): path for path in sorted(folder.iterdir()) if path.is_file()}


def run(what: str, *command: str) -> None:
    result = subprocess.run(command, capture_output=True, text=True)
    said = (result.stderr or result.stdout).strip()
    if "DO NOT MATCH THE HASHES" in said:
        raise BuildError(f"{what} was offered another file than the one that packages.txt pins: {said[-300:]}")
    if result.returncode:
        raise NotFetchedError(f"{what} fetched nothing: {said.splitlines()[-1] if said else 'it says not why'}.")


def main() -> None:
    parser = argparse.ArgumentParser(description="Builds the planner's page.")
    parser.add_argument("--out", type=Path, default=Path("planner"), metavar="DIR", help="The folder; default: planner.")
    parser.add_argument("--cache", type=Path, default=CACHE, metavar="DIR", help=f"Default: {CACHE}.")
    options = parser.parse_args()
    try:
        page = build(options.out, options.cache)
    except BuildError as error:
        sys.exit(f"build_page.py: {error}")
    size = sum(path.stat().st_size for path in options.out.rglob("*") if path.is_file())
    print(f"{page}: {size / 2**20:.1f} MiB; serve it with python -m http.server --directory {options.out}")


if __name__ == "__main__":
    main()
