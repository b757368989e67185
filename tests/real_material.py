"""Real weights and conversations for tests. The scripts in launch/ fetch them once per machine into the user's cache."""

from __future__ import annotations

import fcntl
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

LAUNCH = Path(__file__).parent.parent / "launch"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxllm" / "tests"
FIRST_LAYERS = 2
CANNOT_FETCH = 3
"""Exit code of a script that could not fetch."""
NPM_LIMIT_S = 120
_missing: dict[str, str] = {}
"""Error of what could not fetch. Without a network it runs once, not once per test."""


def cached(name: str, make: Callable[[Path], None]) -> Path:
    """Path CACHE/name. `make` writes it if it does not exist. Only one process makes it; others wait."""
    target = CACHE / name
    CACHE.mkdir(parents=True, exist_ok=True)
    with open(CACHE / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            make(target)
    return target


def fetched(script: str, name: str, *options: str) -> Path:
    """Output of launch/`script`. Skips the test if the package is not available, and fails on any other error."""

    def make(target: Path) -> None:
        if script not in _missing:
            command = [sys.executable, str(LAUNCH / script), str(target), *options]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode == 0:
                return
            assert done.returncode == CANNOT_FETCH, done.stderr
            _missing[script] = done.stderr.strip()
        pytest.skip(_missing[script])

    return cached(name, make)


def smollm2() -> Path:
    pytest.importorskip("gguf", reason="the real SmolLM2 is read with gguf: pip install 'jaxllm[smollm2]'")
    return fetched("get_smollm2.py", "smollm2-135m-instruct-float32")


def smollm2_first_layers() -> Path:
    """The same model with only its first two layers: 35 million parameters, 28 million of them the embedding."""
    whole = smollm2()

    def make(target: Path) -> None:
        from safetensors import safe_open
        from safetensors.numpy import save_file

        aside = target.with_name(f".{target.name}.being-written")
        shutil.rmtree(aside, ignore_errors=True)
        shutil.copytree(whole, aside, ignore=shutil.ignore_patterns("*.safetensors"))
        config = json.loads((whole / "config.json").read_text())
        (aside / "config.json").write_text(json.dumps(config | {"num_hidden_layers": FIRST_LAYERS}))
        with safe_open(whole / "model.safetensors", framework="numpy") as file:
            kept = [name for name in file.keys() if layer_of(name) < FIRST_LAYERS]  # noqa: SIM118
            weights = {name: file.get_tensor(name) for name in kept}
        save_file(weights, aside / "model.safetensors", metadata={"format": "pt"})
        aside.rename(target)

    return cached(f"smollm2-135m-first-{FIRST_LAYERS}-layers-float32", make)


NODE_LLAMA_CPP = "3.21.1"
BUILDS = {"x86_64": "linux-x64", "aarch64": "linux-arm64"}
"""The packages with llama.cpp's libraries for CPUs, by Linux's name of a machine."""


def node_llama_cpp() -> Path:
    """A folder with node_modules/node-llama-cpp, 83 MB. Skips the test if Node.js is missing or npm cannot fetch it."""

    def make(target: Path) -> None:
        name = f"node-llama-cpp {NODE_LLAMA_CPP}"
        if name not in _missing:
            aside = target.with_name(f".{target.name}.being-written")
            shutil.rmtree(aside, ignore_errors=True)
            _missing[name] = npm_install(aside)
            if not _missing[name]:
                aside.rename(target)
                return
        pytest.skip(_missing[name])

    return cached(f"node-llama-cpp-{NODE_LLAMA_CPP}", make)


def npm_install(folder: Path) -> str:
    """Why it could not; empty if it could. No package runs a script, and none of the builds for GPUs comes along."""
    build, npm, node = BUILDS.get(platform.machine()), shutil.which("npm"), shutil.which("node")
    if sys.platform != "linux" or build is None:
        return f"llama.cpp is not built for {sys.platform} {platform.machine()} here"
    if npm is None or node is None:
        return "llama.cpp comes from npm: install Node.js 20 or newer"
    version = subprocess.run([node, "--version"], capture_output=True, text=True, check=True).stdout.strip()
    if int(version.removeprefix("v").partition(".")[0]) < 20:
        return f"node-llama-cpp needs Node.js 20, and this is {version}"
    packages = [f"{name}@{NODE_LLAMA_CPP}" for name in ("node-llama-cpp", f"@node-llama-cpp/{build}")]
    options = ["--ignore-scripts", "--omit=optional", "--no-audit", "--no-fund", "--no-save", "--loglevel=error"]
    command = [npm, "install", *options, "--fetch-retries=0", f"--prefix={folder}", *packages]
    folder.mkdir()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=NPM_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"npm cannot fetch node-llama-cpp in {NPM_LIMIT_S} s"
    return "" if done.returncode == 0 else f"npm cannot fetch node-llama-cpp: {done.stderr.strip()[:200]}"


def layer_of(name: str) -> int:
    """Layer number of a Hugging Face tensor; -1 outside the layers."""
    return int(name.split(".")[2]) if name.startswith("model.layers.") else -1
