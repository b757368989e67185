"""`jaxllm export` and `jaxllm.export`: the weights of a run or a model, as others load them."""

from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import Any

from jaxllm.config import ConfigError
from jaxllm.weights.hf_convert import from_hf
from jaxllm.weights.streaming import Conversion

convert = from_hf
WRITERS = {
    "jaxllm": ("weights", "export"),
    "hf": ("hf_convert", "to_hf"),
    "peft": ("hf_convert", "adapter_to_peft"),
    "gguf": ("gguf_convert", "to_gguf"),
}
"""Module and function of each format."""
FLAGS = {"largest_file": "--max-shard-size", "adapters": "--adapter"}


def require_format(to: str) -> None:
    if to not in WRITERS:
        raise ConfigError(f"--to={to} is not one of the choices: use {', '.join(WRITERS)}.")
    if to == "gguf" and find_spec("gguf") is None:
        raise ConfigError("`jaxllm export --to gguf` needs the library gguf: pip install 'jaxllm[gguf]'.")


def export(source: str | Path, destination: str | Path, to: str, **options: Any) -> Conversion:
    """Writes the weights of a run, one of its checkpoints or a model.

    Args:
      to: jaxllm, a folder for train.init_from, or an archive; hf, one for transformers, vLLM ...; peft, one with the adapter
        of a run with model.lora alone; gguf, a file for llama.cpp, Ollama.
      options: step, dtype, force, adapters, max_position, largest_file and verify: as in hf_convert.to_hf.

    Raises:
      ConfigError: as to_hf; or an option has no effect on that format.
    """
    require_format(to)
    module, name = WRITERS[to]
    write = getattr(import_module(f"jaxllm.weights.{module}"), name)
    # Not by `in`: 0, which is refused or a step, equals False.
    given = {name: value for name, value in options.items() if value is not None and value is not False and value != ()}
    if unused := sorted(given.keys() - signature(write).parameters.keys()):
        flag = FLAGS.get(unused[0], f"--{unused[0].replace('_', '-')}")
        raise ConfigError(f"{flag} has no effect on what is written as {to}: leave it out, or write hf.")
    return write(str(source), str(destination), **given)
