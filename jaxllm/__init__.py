"""jaxllm: train Llama, Qwen and Mistral models with JAX on NVIDIA GPUs. What a notebook needs is re-exported here, lazily."""

import importlib
import sys
import time
import types

from jaxllm import plan

__version__ = "0.1.0"
BEGAN_S = time.monotonic()
"""When jaxllm was imported. The command line imports it first."""

_HOMES = {
    "load_config": "config",
    "Config": "config",
    "ConfigError": "config",
    "Trainer": "api",
    "fit": "api",
    "inspect_config": "api",
    "load_model": "api",
    "open_model": "api",
    "estimate": "plan.estimate",
    "estimate_inference": "plan.inference_estimate",
    "evaluate": "inference.predict",
    "generate": "inference.predict",
    "prepare": "data.iterables",
    "convert": "weights.export",
    "export": "weights.export",
}
__all__ = [*_HOMES, "plan"]


def __getattr__(name: str):
    # Lazy: `import jaxllm` must cost milliseconds and start no device.
    if name in _HOMES:
        return getattr(importlib.import_module(f"jaxllm.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'jaxllm' has no attribute {name!r}")


class _Plan(types.ModuleType):
    """The package of that name, which is also the function: an import of anything in it binds its name here."""

    def __call__(self, *args, **options):
        """jaxllm.compile.plan.plan(config, gpu="h100-80gb", gpus=64, ...) -> Plan."""
        return importlib.import_module("jaxllm.compile.plan").plan(*args, **options)


plan.__class__ = _Plan  # type: ignore[assignment]


def __dir__():
    return [*__all__, "__version__"]


if "IPython" in sys.modules:
    importlib.import_module("jaxllm.notebook").register()
