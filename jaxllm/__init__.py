"""jaxllm: train Llama-family models with JAX on NVIDIA GPUs. Everything a notebook needs is re-exported here, lazily."""

import importlib

__version__ = "0.1.0"

_HOMES = {
    "load_config": "config",
    "Config": "config",
    "ConfigError": "config",
    "Trainer": "api",
}
__all__ = [*_HOMES]


def __getattr__(name: str):
    # Lazy: `import jaxllm` must cost milliseconds and start no device.
    if name in _HOMES:
        return getattr(importlib.import_module(f"jaxllm.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'jaxllm' has no attribute {name!r}")


def __dir__():
    return sorted([*globals(), *_HOMES])
