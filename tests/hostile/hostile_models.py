"""Hostile model folders, Hugging Face's and jaxllm's own: convert, train and generate."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from hf_folders import HUB as SMALL
from hf_folders import random_weights, write_folder
from hostile import Case, train

from jaxllm.weights.hf_convert import from_hf

HUB = {**SMALL, "vocab_size": 256}
DEEP = "[" * 100_000
CONVERT = ("convert", "from-hf", "hf", "out")
MODEL = "model.layers.0.self_attn.q_proj.weight"


def folder(spoil: Callable[[Path], object] = lambda folder: None, **config: Any):
    """Writes a small Hugging Face folder named hf, with other keys of config.json, and spoils it."""

    def write() -> None:
        path = write_folder(Path("hf"), HUB, random_weights(HUB))
        (path / "config.json").write_text(json.dumps({**HUB, **config}))
        spoil(path)

    return write


def header(change: Callable[[dict[str, Any]], object] | str):
    """A spoiler of the header of model.safetensors; a text replaces it."""

    def spoil(path: Path) -> None:
        content = (path / "model.safetensors").read_bytes()
        length = int.from_bytes(content[:8], "little")
        if isinstance(change, str):
            text = change.encode()
        else:
            found = json.loads(content[8 : 8 + length])
            change(found)
            text = json.dumps(found).encode()
        (path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])

    return spoil


def config_text(text: str):
    return lambda path: (path / "config.json").write_text(text)


def index(text: str):
    def spoil(path: Path) -> None:
        (path / "model.safetensors").unlink()
        (path / "model.safetensors.index.json").write_text(text)

    return spoil


def ours(change: Callable[[dict[str, Any]], object] | str, sequence_length: bool = True):
    """Writes a folder of jaxllm's own named ours, with another model.json."""

    def write() -> None:
        folder()()
        from_hf("hf", "ours")
        path = Path("ours") / "model.json"
        said = json.loads(path.read_text())
        if isinstance(change, str):
            path.write_text(change)
        else:
            change(said)
            path.write_text(json.dumps(said))

    return write


def sparse_terabyte(path: Path) -> None:
    """Embedding and head of 10^9 rows, as holes in a file."""
    config = {**HUB, "vocab_size": 10**9, "hidden_size": 256, "num_hidden_layers": 1, "tie_word_embeddings": True}
    (path / "config.json").write_text(json.dumps(config))
    from golden.weights import shapes_of_theirs
    from hf_folders import model_of

    lines, end = {}, 0
    for name, shape in shapes_of_theirs(model_of(config)).items():
        size = 4 * int(np.prod(shape, dtype=np.int64))
        lines[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(lines).encode()
    (path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(path / "model.safetensors", 8 + len(text) + end)


def license_of_zeros(path: Path) -> None:
    (path / "LICENSE.txt").symlink_to("/dev/zero")


def large_license(path: Path) -> None:
    (path / "LICENSE").touch()
    os.truncate(path / "LICENSE", 2 * 2**30)


def convert(name: str, says: str | None, files: Callable[[], object]) -> Case:
    return Case(f"convert: {name}", CONVERT, says, files)


def to_hf(name: str, says: str, change: Callable[[dict[str, Any]], object] | str) -> Case:
    return Case(f"to-hf: {name}", ("convert", "to-hf", "ours", "out", "--force"), says, ours(change))


def generate(name: str, says: str, *words: str) -> Case:
    return Case(
        f"generate: {name}", ("generate", "--model", "hf", "--prompt", "a", "--tokenizer", "bytes", *words), says, folder()
    )


def start(name: str, says: str, files: Callable[[], object]) -> Case:
    """The same folder as the model of a run."""
    model = ("model.name=hf", "data.tokenizer=bytes")
    return Case(f"train: {name}", train(*model), says, shapeless(files))


def shapeless(files: Callable[[], object]):
    """base.yaml without a shape of its own."""

    def write() -> None:
        import yaml

        base = yaml.safe_load(Path("base.yaml").read_text())
        base["model"] = {"compute_dtype": "float32"}
        Path("base.yaml").write_text(yaml.safe_dump(base))
        files()

    return write


NOT_A_HEADER = "its header is not the JSON of a safetensors file"
CASES = [
    convert("a good folder", None, folder()),
    convert("header nests", f"{NOT_A_HEADER}: it nests deeper", folder(header('{"a": ' + DEEP))),
    convert("infinite offsets", f"{NOT_A_HEADER}: Infinity is no JSON number", folder(header('{"a": [Infinity]}'))),
    convert("one offset", f"{NOT_A_HEADER}: ", folder(header(lambda h: h[MODEL].update(data_offsets=[1])))),
    convert("three offsets", f"{NOT_A_HEADER}: ", folder(header(lambda h: h[MODEL].update(data_offsets=[0, 4, 8])))),
    convert("fractions of a shape", f"{NOT_A_HEADER}: ", folder(header(lambda h: h[MODEL].update(shape=[24.7, 24.2])))),
    convert("negative shape", f"{NOT_A_HEADER}: ", folder(header(lambda h: h[MODEL].update(shape=[-24, -24])))),
    convert("huge shape", f"{NOT_A_HEADER}: ", folder(header(lambda h: h[MODEL].update(shape=[10**30])))),
    convert("a tensor twice", f"{NOT_A_HEADER}: the key a is there twice", folder(header('{"a": 1, "a": 2}'))),
    convert("index with a long name", "File name too long", folder(index(json.dumps({"weight_map": {"a": "a" * 5000}})))),
    convert("index nests", "index.json cannot be read (it nests deeper", folder(index('{"weight_map": ' + DEEP))),
    convert("config nests", "config.json cannot be read (it nests deeper", folder(config_text('{"a": ' + DEEP))),
    convert(
        "config is a pipe",
        "config.json",
        folder(lambda path: ((path / "config.json").unlink(), os.mkfifo(path / "config.json"))),
    ),
    convert("10^8 layers", "num_hidden_layers=100000000: it should be at most 16,384", folder(num_hidden_layers=10**8)),
    convert("10^30 layers", "it should be at most 16,384", folder(num_hidden_layers=10**30)),
    convert("architectures [[]]", "says architectures=[[]]: jaxllm supports", folder(architectures=[[]])),
    convert("architectures [{}]", "says architectures=[{}]: jaxllm supports", folder(architectures=[{}])),
    convert("auto_map 5", "says auto_map=5: it should be an object", folder(auto_map=5)),
    convert("a key twice", "the key vocab_size is there twice", folder(config_text('{"vocab_size": 1, "vocab_size": 2}'))),
    convert("a license without end", "LICENSE.txt is a link to /dev/zero, outside", folder(license_of_zeros)),
    convert("a license of 2 GiB", "too many for a file beside weights", folder(large_license)),
    Case(
        *("10^8 layers: generate", ("generate", "--model", "hf", "--prompt", "a"), "it should be at most 16,384"),
        folder(num_hidden_layers=10**8),
    ),
    Case(
        "a sparse terabyte: generate",
        ("generate", "--model", "hf", "--prompt", "a", "--max-new-tokens", "2", "--tokenizer", "bytes"),
        "need at least 953.7 GiB, and this machine has",
        folder(sparse_terabyte),
    ),
    generate("10^9 new tokens", "positions, and the model supports 128", "--max-new-tokens", "1000000000"),
    generate("a prompt of 100,000 tokens", "positions, and the model supports 128", "--prompt", "a" * 100_000),
    Case(
        *("to-hf: an older model.json", ("convert", "to-hf", "ours", "out"), None),
        ours(lambda said: [said["model"].pop(key) for key in ("head_dim", "tie_embeddings", "block_norms")]),
    ),
    to_hf("no heads", "model.json does not describe a model (", lambda said: said["model"].pop("num_heads")),
    to_hf("hugging_face is a list", "model.json is damaged (hugging_face is [1]", lambda said: said.update(hugging_face=[1])),
    to_hf(
        *("unknown dtype", "model.json is damaged (hugging_face.dtypes.lm_head.weight is X"),
        lambda said: said["hugging_face"].update(dtypes={"lm_head.weight": "X"}),
    ),
    to_hf("length is text", "model.json is damaged (sequence_length is x", lambda said: said.update(sequence_length="x")),
    to_hf("nests", "model.json cannot be read (it nests deeper", '{"format": ' + DEEP),
    to_hf(
        "10^8 layers",
        "model.json does not describe a model (num_layers is 100",
        lambda said: said["model"].update(num_layers=10**8),
    ),
    start("10^8 layers", "it should be at most 16,384", folder(num_hidden_layers=10**8)),
    start("one offset", NOT_A_HEADER, folder(header(lambda h: h[MODEL].update(data_offsets=[1])))),
    start("header nests", NOT_A_HEADER, folder(header('{"a": ' + DEEP))),
    start("auto_map 5", "says auto_map=5: it should be an object", folder(auto_map=5)),
    start("architectures [[]]", "says architectures=[[]]", folder(architectures=[[]])),
    start("config nests", "config.json cannot be read (it nests deeper", folder(config_text('{"a": ' + DEEP))),
    start("a sparse terabyte", "need at least", folder(sparse_terabyte)),
]
