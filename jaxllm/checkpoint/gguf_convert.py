"""`jaxllm export --to gguf`: one file for llama.cpp and what is built on it, with network, tokenizer and weights.

The values are those of `--to hf` with the same dtype, one tensor at a time, each read back and compared, as there. The file
gets its name last. It is not quantised: llama.cpp's `llama-quantize` does that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, GGUFWriter

from jaxllm.checkpoint.beside_weights import reads_bytes, write_companions
from jaxllm.checkpoint.gguf_tokenizer import describe_tokenizer
from jaxllm.checkpoint.hf_convert import Conversion, Tensors, config_json, progress
from jaxllm.checkpoint.weights import dtype_named, find_weights
from jaxllm.config import ConfigError, ModelConfig
from jaxllm.config.hf_kinds import KINDS
from jaxllm.model.layers import rotary_frequencies
from jaxllm.pretrained.companions import companion_files
from jaxllm.pretrained.folder import Folder, HuggingFaceFolder
from jaxllm.pretrained.gguf_file import GGUFFile
from jaxllm.pretrained.gguf_network import ROPE_FREQS, architecture, describe_network, pairs_together, tensor_names
from jaxllm.pretrained.safetensors import DTYPES
from jaxllm.pretrained.staging import new_folder, require_new
from jaxllm.pretrained.streaming import Elements, Layout, Move, stream

SUFFIX = ".gguf"
FLOAT32 = DTYPES["F32"]
ROTATED = ("self_attn.q_proj.weight", "self_attn.k_proj.weight")


def to_gguf(
    source: str,
    destination: str,
    *,
    step: int | None = None,
    dtype: str | None = None,
    max_position: int | None = None,
    force: bool = False,
    adapters: Sequence[str] = (),
) -> Conversion:
    """Converts a model, a run directory or one of its checkpoints to a GGUF file. Adapters are merged. It needs host memory as
    to_hf does.

    Args:
      destination: a new file, which ends in .gguf.
      others: as in to_hf. Vectors, such as the scales of norms, are stored as float32 after rounding to `dtype`.

    Raises:
      ConfigError: as to_hf; or llama.cpp would compute the network or read the text otherwise.
    """
    require_new(destination, force, is_file=True)
    if not destination.endswith(SUFFIX):
        raise ConfigError(
            f"--to gguf writes a file, and {destination} does not end in {SUFFIX}: name it {destination}{SUFFIX}."
        )
    wanted = None if dtype is None else dtype_named(dtype)
    found = find_weights("SRC", source, step, adapters)
    folder = found.as_folder()
    companion_files(folder.companions)
    if folder.tokenizer is None and not reads_bytes(folder):
        raise ConfigError(f"SRC={source} has no tokenizer.json, which llama.cpp needs: put the model's own beside the weights.")
    config, model = config_json(folder, wanted, max_position), ModelConfig.model_validate(folder.model)
    arch = architecture(config["model_type"], model)
    moves, tensors = _moves(folder, arch, model, wanted)
    layout = Layout({Path(destination).name: tensors}, {})
    writer = GGUFWriter(None, MODEL_ARCH_NAMES[arch])
    writer.add_name(Path(destination).stem)
    positions = config.get("max_position_embeddings") or KINDS[config["model_type"]].defaults["max_position_embeddings"]
    describe_network(writer, model, positions, wanted or folder.common_dtype)
    with new_folder(destination, layout.total_bytes, force, only=Path(destination).name) as aside:
        write_companions(folder, aside / "beside")
        describe_tokenizer(writer, aside / "beside", model.vocab_size, found.description)
        with progress(moves, "to GGUF") as advance:
            stream(moves, layout, aside, advance, GGUFFile(writer))
    names = tuple(sorted({dtype.name for dtype, _ in tensors.values()}))
    return Conversion(found.description, destination, len(moves), layout.total_bytes, names, 1)


def _moves(folder: Folder, arch: MODEL_ARCH, model: ModelConfig, wanted: np.dtype | None) -> tuple[list[Move], Tensors]:
    theirs = [name for entry in folder.entries.values() for name in entry.tensors]
    ours = tensor_names(arch, model.num_layers, theirs)
    moves: list[Move] = []
    tensors: Tensors = {}
    # Slabs of a Hugging Face folder are in its order already.
    is_theirs = isinstance(folder, HuggingFaceFolder)
    for entry in folder.entries.values():
        dtype = wanted or folder.dtype(entry.path)
        for layer, name in enumerate(entry.tensors):
            source: Elements = folder.slab(entry, layer)
            if model.norm_plus_one and name.endswith("norm.weight"):
                source = _PlusOne(source, dtype)
            if arch == MODEL_ARCH.LLAMA and name.endswith(ROTATED):
                rows = model.num_heads if name.endswith(ROTATED[0]) else model.num_kv_heads
                shape = (rows, model.head_dim, model.hidden_size) if is_theirs else (model.hidden_size, rows, model.head_dim, 1)
                source = _PairsTogether(source, shape)
            matrix = entry.matrix if entry.columns and not is_theirs else None
            passed = FLOAT32 if isinstance(source, _PlusOne) else dtype
            moves.append(Move(name, source, matrix, passed, ours[name]))
            # llama.cpp adds and multiplies vectors in float32 alone.
            tensors[ours[name]] = (dtype if len(entry.their_shape) > 1 else FLOAT32, entry.their_shape)
    if model.rope_scaling is not None and model.rope_scaling.rope_type == "llama3":
        plain = rotary_frequencies(model.model_copy(update={"rope_scaling": None}))
        factors = _Values(plain / rotary_frequencies(model))
        moves.append(Move(ROPE_FREQS, factors, None, FLOAT32, ROPE_FREQS))
        tensors[ROPE_FREQS] = (FLOAT32, (factors.size,))
    return moves, tensors


@dataclass(frozen=True)
class _Values:
    """Elements of an array."""

    array: np.ndarray

    @property
    def size(self) -> int:
        return self.array.size

    @property
    def dtype(self) -> np.dtype:
        return self.array.dtype

    def read(self, begin: int, end: int) -> np.ndarray:
        return self.array[begin:end]


@dataclass(frozen=True)
class _PlusOne:
    """Scales of norms that begin at 0. llama.cpp's begin at 1."""

    source: Elements
    through: np.dtype

    @property
    def size(self) -> int:
        return self.source.size

    @property
    def dtype(self) -> np.dtype:
        return FLOAT32

    def read(self, begin: int, end: int) -> np.ndarray:
        return 1 + self.source.read(begin, end).astype(self.through).astype(FLOAT32)


@dataclass(frozen=True)
class _PairsTogether:
    """The query or key matrix of Llama, with rotary pairs as llama.cpp has them.

    Args:
      shape: [..., N, H, rest].
    """

    source: Elements
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return self.source.size

    @property
    def dtype(self) -> np.dtype:
        return self.source.dtype

    def read(self, begin: int, end: int) -> np.ndarray:
        whole = self.source.read(0, self.size).reshape(self.shape)
        # NumPy calls a function for each bfloat16.
        unsigned = pairs_together(whole.view(f"u{whole.dtype.itemsize}"))
        return unsigned.reshape(-1)[begin:end].view(self.dtype)
