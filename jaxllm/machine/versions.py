"""Versions of what a model or a checkpoint was made with."""

from __future__ import annotations

import importlib.metadata
import platform

PACKAGES = ("jaxllm", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "grain")


def versions() -> dict[str, str]:
    """Versions of Python, jaxllm and its main dependencies."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            # jaxllm runs from a checkout without installation.
            found[package] = "not installed"
    return found
