"""Model folders on disk, Hugging Face's and jaxllm's own, with one interface. Reads parameters in pieces, without JAX.

    folder = open_folder("--model", "smollm2")
    folder.model, folder.tokenizer                       # the `model` section; the folder with tokenizer.json
    folder.read(("layers", "mlp", "gate"), (slice(0, 1), slice(0, 8), slice(None)))

jaxllm's own format 2:

    model.json             the `model` section, the origin of the weights, the files, Hugging Face's dtypes and tied names
    weights*.safetensors   parameters by dotted path, with a leading layers dim and exactly vocab_size rows
    tokenizer/             tokenizer files, generation_config.json and the original config.json

Hugging Face stores one tensor per layer, or per layer and expert, each projection as [out, in], with heads and head size
merged. jaxllm stacks them in one or two leading dims. Each Hugging Face matrix is the transpose of what is stacked, viewed as a
matrix: the first `columns` dims of that are the matrix's columns in Hugging Face, and the other dims are its rows.
"""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jaxllm.config.errors import ConfigError
from jaxllm.config.hf_config import CONFIG, MODEL, SHAPE_KEYS, TOKENIZER, kind_of, model_section, read_object, stored_section
from jaxllm.config.hf_kinds import KINDS
from jaxllm.config.hf_vision import text_config, without_prefix
from jaxllm.config.hub import folder_of
from jaxllm.config.model_config import LoraConfig, ModelConfig, VisionConfig
from jaxllm.config.model_spec import LORA_A, LORA_B, OF_IMAGES, parameters
from jaxllm.config.types import PositiveInt, Switch
from jaxllm.untrusted import RefusedInput, Text, Whole, checked
from jaxllm.weights.safetensors import DTYPES, Box, Elements, Tensor, TensorFile
from jaxllm.weights.staging import GENERATION

FORMAT = 2
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
BLOCK = 2**23
"""Number of elements compared at a time."""

Index = Sequence[slice]
"""One slice with step 1 for each dim of a parameter."""

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
FUSED = (".experts.gate_up_proj", ".experts.down_proj")
"""Name suffixes of tensors with all experts of a layer, as transformers 5 has them in memory."""
BUFFERS = re.compile(r".*\.(rotary_emb\.inv_freq|position_ids)|vision_tower\.head\..*")
"""Names of tensors that the network does not need: old folders store rotary frequencies and position numbers, and SigLIP has a
head of its own, which makes no features."""


@dataclass(frozen=True)
class Entry:
    """One jaxllm parameter and its Hugging Face tensors."""

    path: tuple[str, ...]
    template: str
    stack: tuple[int, ...]
    """Leading dims that count tensors: () for a parameter that is one, [L] for a layer's, [L, E] for an expert's. The tensors
    are template.format(layer, expert)."""
    dims: tuple[int, ...]
    """Sizes of the array that is one tensor."""
    names: tuple[str, ...]
    """Names of these dims."""
    columns: int
    """Number of leading dims that are the columns of Hugging Face's matrix. 0: both sides have the same order."""

    @property
    def name(self) -> str:
        return ".".join(self.path)

    @property
    def is_lora(self) -> bool:
        """Whether it is a matrix of an adapter."""
        return self.path[-1].endswith((LORA_A, LORA_B))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of jaxllm's parameter."""
        return (*self.stack, *self.dims)

    @cached_property
    def tensors(self) -> tuple[str, ...]:
        """Hugging Face's names, in the order of the layers, then of the experts."""
        return tuple(self.template.format(*where) for where in np.ndindex(*self.stack))

    @property
    def matrix(self) -> tuple[int, int]:
        """Rows and columns of one tensor's array as a matrix, if `columns` is above 0."""
        return math.prod(self.dims[: self.columns]), math.prod(self.dims[self.columns :])

    @property
    def their_shape(self) -> tuple[int, ...]:
        """Shape of each Hugging Face tensor."""

        def merged(part: slice) -> tuple[int, ...]:
            sizes: list[int] = []
            for name, size in zip(self.names[part], self.dims[part], strict=True):
                sizes[-1:] = [sizes[-1] * size] if sizes and name.endswith("head_dim") else [*sizes[-1:], size]
            return tuple(sizes)

        return merged(slice(self.columns, None)) + merged(slice(self.columns))


def entries(model: Mapping[str, Any], kind: str | None = None) -> list[Entry]:
    """All parameters of the network that a `model` section describes.

    Args:
      kind: the key of KINDS whose names the tensors have; None: the names of most kinds.
    """
    # Not validated: the file may be damaged, and its reader says so. Scaled frequencies are of the same shape.
    shape = {key: model[key] for key in SHAPE_KEYS if key in model and key != "rope_scaling"}
    for key, section in (("lora", LoraConfig), ("vision", VisionConfig)):
        if model.get(key) is not None:
            shape[key] = section.model_validate(model[key])
    network = ModelConfig.model_construct(**shape)
    found = []
    for spec in parameters(network):
        name = spec.hugging_face
        for part, theirs in KINDS[kind].names.items() if kind and not spec.path.startswith(OF_IMAGES) else ():
            name = name.replace(part, theirs)
        counted, path = spec.counted, tuple(spec.path.split("."))
        stack = (*([network.num_layers] if spec.in_layer else []), *spec.shape[:counted])
        found.append(Entry(path, name, stack, spec.shape[counted:], spec.dims[counted:], spec.inputs))
    return found


@dataclass
class Folder:
    """A model on disk. Subclasses implement reading."""

    path: Path
    description: str
    """Location for messages, with the step if it is a run."""
    model: dict[str, Any]
    """The `model` section, with at least the keys of the shape."""
    companions: Path | None = None
    """The folder of its tokenizer files, generation_config.json and config.json, or None."""
    hugging_face: dict[str, Any] = field(default_factory=dict)
    """For weights from Hugging Face: names of the stored vocabulary matrices, and dtypes."""
    sequence_length: int | None = None
    """Sequence length of jaxllm's training run, if there was one."""
    trained_on_bytes: bool = False
    """Whether it is of a run whose text was bytes."""
    kind = None
    """The key of KINDS whose names the entries have, as in `entries`."""

    def __post_init__(self):
        self.entries: dict[tuple[str, ...], Entry] = {entry.path: entry for entry in entries(self.model, self.kind)}
        self._last: tuple[tuple[tuple[str, ...], int], np.ndarray] | None = None

    @property
    def tokenizer(self) -> Path | None:
        """The folder with tokenizer.json."""
        home = self.companions
        return home if home is not None and (home / "tokenizer.json").is_file() else None

    @property
    def generation(self) -> dict[str, Any]:
        """The content of generation_config.json; {} without one."""
        return self._read_companion(GENERATION)

    @property
    def original_config(self) -> dict[str, Any]:
        """The content of the config.json that came with the weights; {} without one."""
        return self._read_companion(CONFIG)

    @property
    def text_config(self) -> Mapping[str, Any]:
        """The same of the network behind a vision tower."""
        return text_config(self.original_config, self.description)

    def _read_companion(self, name: str) -> dict[str, Any]:
        found = None if self.companions is None else self.companions / name
        return read_object(found) if found is not None and found.is_file() else {}

    @property
    def common_dtype(self) -> np.dtype:
        """The dtype of most values."""
        sizes: Counter[np.dtype] = Counter()
        for entry in self.entries.values():
            sizes[self.dtype(entry.path)] += math.prod(entry.shape)
        return max(sizes, key=sizes.__getitem__)

    def dtype(self, path: tuple[str, ...]) -> np.dtype:
        """The dtype of the arrays that `read` returns."""
        raise NotImplementedError

    def read(self, path: tuple[str, ...], index: Index | None = None) -> np.ndarray:
        """Reads a part of one parameter (default: all), with a leading layers dim. It reads no other bytes.

        Args:
          path: such as ("layers", "attention", "query").
        """
        raise NotImplementedError

    def slab(self, entry: Entry, number: int) -> Elements:
        """The array of one of entry.tensors in the file's order."""
        return self.array(entry, number)

    def array(self, entry: Entry, number: int) -> Elements:
        """The same in jaxllm's order of dims. The last one read is kept: files are written in blocks of it."""

        def read(begin: int, end: int) -> np.ndarray:
            key = entry.path, number
            if self._last is None or self._last[0] != key:
                self._last = None
                index = [slice(int(i), int(i) + 1) for i in np.unravel_index(number, entry.stack)] if entry.stack else []
                index += [slice(None)] * len(entry.dims)
                self._last = key, self.read(entry.path, index).reshape(-1)
            return self._last[1][begin:end]

        return Elements(math.prod(entry.dims), self.dtype(entry.path), read)

    def box(self, path: tuple[str, ...], index: Index | None) -> Box:
        """The part of a parameter that an index names; None: all of it."""
        shape = self.entries[path].shape
        return box_of((slice(None),) * len(shape) if index is None else index, shape)


def box_of(index: Index, shape: tuple[int, ...]) -> Box:
    """[begin, end) of each dim."""
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


@dataclass
class HuggingFaceFolder(Folder):
    tensors: dict[str, Tensor] = field(default_factory=dict)
    dropped: tuple[str, ...] = ()
    """Names of buffers that are not weights."""
    kind: str | None = None

    def __post_init__(self):
        super().__post_init__()
        self._stored: dict[tuple[str, ...], tuple[Any, np.dtype]] = {}

    def stored(self, path: tuple[str, ...]) -> Sequence[Tensor]:
        """The tensors of a parameter, in the order of Entry.tensors."""
        return self._of(path)[0].reshape(-1)

    def dtype(self, path: tuple[str, ...]) -> np.dtype:
        return self._of(path)[1]

    def _of(self, path: tuple[str, ...]) -> tuple[Any, np.dtype]:
        """(Array of tensors with the shape of Entry.stack, dtype) of a parameter."""
        if path not in self._stored:
            entry = self.entries[path]
            names = (HEAD,) if entry.template == EMBEDDING and EMBEDDING not in self.tensors else entry.tensors
            tensors: Any = np.array([self.tensors[name] for name in names], object).reshape(entry.stack)
            # They may differ. float32 represents all values of the other dtypes.
            dtypes = {tensor.dtype for tensor in tensors.flat}
            self._stored[path] = tensors, dtypes.pop() if len(dtypes) == 1 else DTYPES["F32"]
        return self._stored[path]

    def read(self, path: tuple[str, ...], index: Index | None = None) -> np.ndarray:
        entry, box = self.entries[path], self.box(path, index)
        tensors, dtype = self._of(path)
        counted, out = len(entry.stack), np.empty([end - begin for begin, end in box], dtype)
        for where in np.ndindex(*out.shape[:counted]):
            tensor = tensors[tuple(begin + i for i, (begin, _) in zip(where, box, strict=False))]
            out[where] = self._array(entry, tensor, box[counted:])
        return out

    def _array(self, entry: Entry, tensor: Tensor, box: Box) -> np.ndarray:
        c, n = entry.columns, len(entry.dims)
        theirs = tensor.read(box[c:] + box[:c], entry.dims[c:] + entry.dims[:c])
        return theirs.transpose(*range(n - c, n), *range(n - c))

    def slab(self, entry: Entry, number: int) -> Elements:
        return self.stored(entry.path)[number].elements()


@dataclass
class JaxllmFolder(Folder):
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def dtype(self, path: tuple[str, ...]) -> np.dtype:
        return self.tensors[".".join(path)].dtype

    def read(self, path: tuple[str, ...], index: Index | None = None) -> np.ndarray:
        return self.tensors[".".join(path)].read(self.box(path, index))

    def slab(self, entry: Entry, number: int) -> Elements:
        size = math.prod(entry.dims)
        return self.tensors[entry.name].elements(number * size, size)


def open_folder(key: str, text: str) -> Folder:
    """Opens the model in a folder and checks it: each parameter exists once, with the right shape and a supported dtype, in
    files of the stated length. It does not read values.

    Args:
      key: the option or key that the user set to `text`, for error messages.

    Raises:
      ConfigError: the folder is not a model, is damaged, or holds an unsupported network. The message names the problem.
    """
    path = folder_of(key, text, weights=True)
    if not path.is_dir():
        raise ConfigError(f"{key}={text} is not a folder: give one with config.json and *.safetensors, or with model.json.")
    if (path / MODEL).is_file():
        return _open_jaxllm(key, path)
    if (path / CONFIG).is_file():
        return _open_hugging_face(key, path)
    raise ConfigError(f"{key}={text} holds no model: there is neither {CONFIG} (Hugging Face) nor {MODEL} (jaxllm) in it.")


# -------------------------------------------------------------------------------------------------------------- jaxllm's own


@dataclass(frozen=True)
class _OfHuggingFace:
    vocabulary: tuple[Literal["model.embed_tokens.weight", "lm_head.weight"], ...] = ()
    dtypes: dict[Text, Literal["F32", "BF16", "F16"]] = field(default_factory=dict)


@dataclass(frozen=True)
class ModelFile:
    """What model.json may hold; other keys are not read."""

    format: Whole
    model: dict[str, Any]
    files: tuple[Text, ...] = ()
    hugging_face: _OfHuggingFace | None = None
    """Names of a tied matrix, and dtypes that differ from ours, in the folder that this one was converted from."""
    sequence_length: PositiveInt | None = None
    trained_on_bytes: Switch = False


def _open_jaxllm(key: str, path: Path) -> JaxllmFolder:
    content = read_object(path / MODEL)
    try:
        said = checked(content, ModelFile)
    except RefusedInput as error:
        raise ConfigError(f"{key}: {path / MODEL} is damaged ({error}): convert or export it again.") from None
    if said.format > FORMAT:
        raise ConfigError(f"{key}={path} has format {said.format}, this jaxllm reads up to {FORMAT}: install a newer one.")
    if said.format < FORMAT:
        raise ConfigError(f"{key}={path} has format {said.format}, whose weights are Orbax's: export it again.")
    section = stored_section(said.model, str(path / MODEL))
    expected = {entry.name: entry for entry in entries(section)}
    tensors = tensors_in(path, said.files, "convert or export it again")
    for name, entry in expected.items():
        if name not in tensors:
            raise ConfigError(f"{path} has no parameter {name}: convert or export it again.")
        require_shape(tensors[name], entry.shape)
    if extra := sorted(tensors.keys() - expected.keys()):
        raise ConfigError(f"{path} holds {extra[0]}, which is not in its model: convert or export it again.")
    companions = path / TOKENIZER if (path / TOKENIZER).is_dir() else None
    theirs = {} if said.hugging_face is None else vars(said.hugging_face)
    return JaxllmFolder(path, str(path), section, companions, theirs, said.sequence_length, said.trained_on_bytes, tensors)


# ------------------------------------------------------------------------------------------------------------ Hugging Face's


def _open_hugging_face(key: str, path: Path) -> HuggingFaceFolder:
    config = read_object(path / CONFIG)
    section = model_section(config, str(path / CONFIG))
    kind = kind_of(text_config(config, str(path / CONFIG)), str(path / CONFIG))
    files, promises = _files_and_promises(key, path)
    tensors = tensors_in(path, files, "get the file again")
    for tensor, name in promises.items():
        if tensor not in tensors or tensors[tensor].file.path.name != name:
            raise ConfigError(f"{path / name} does not hold {tensor}, although {INDEX} says so: get both files again.")
    if section["vision"] is not None:
        tensors = {without_prefix(name): replace(tensor, name=without_prefix(name)) for name, tensor in tensors.items()}
    dropped = tuple(sorted(name for name in tensors if BUFFERS.fullmatch(name)))
    for name in dropped:
        del tensors[name]
    if fused := [name for name in tensors if name.endswith(FUSED)]:
        raise ConfigError(
            f"{path} holds {fused[0]}, all experts of a layer in one tensor, which jaxllm does not read: load the model with "
            f"transformers and call save_pretrained, which writes one for each expert."
        )
    expected = {name: entry for entry in entries(section, kind) for name in entry.tensors}
    if section["tie_embeddings"]:
        # Usually the embedding is stored, but both or the head only also occur.
        stored = [name for name in (EMBEDDING, HEAD) if name in tensors] or [EMBEDDING]
        expected |= dict.fromkeys(stored, expected.pop(EMBEDDING))
    for name, entry in expected.items():
        if name not in tensors:
            hint = ", or set tie_word_embeddings to true if it is the embedding" if name == HEAD else ""
            raise ConfigError(f"{path} has no tensor {name}, which its {CONFIG} requires: get the missing file{hint}.")
        require_shape(tensors[name], entry.their_shape)
    if extra := sorted(tensors.keys() - expected.keys()):
        count = f" and {len(extra) - 1} more" if len(extra) > 1 else ""
        raise ConfigError(
            f"{path} holds {extra[0]}{count}, which that network does not have ({CONFIG} says {section['num_layers']} "
            f"layers): it is another network, or {CONFIG} belongs to another model."
        )
    if section["tie_embeddings"] and {EMBEDDING, HEAD} <= tensors.keys():
        _require_equal(path, tensors[EMBEDDING], tensors[HEAD])
    return HuggingFaceFolder(path, str(path), section, path, tensors=tensors, dropped=dropped, kind=kind)


def require_shape(tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape:
        raise ConfigError(
            f"{tensor.name} in {tensor.file.path} has shape {list(tensor.shape)}, and the config requires {list(shape)}: "
            f"weights and config belong to different models."
        )
    if tensor.code not in DTYPES:
        raise ConfigError(
            f"{tensor.name} in {tensor.file.path} has dtype {tensor.code}, jaxllm supports {', '.join(DTYPES)}: cast it."
        )


def _require_equal(path: Path, one: Tensor, other: Tensor) -> None:
    first, second = one.elements(), other.elements()
    for begin in range(0, first.size, BLOCK):
        span = begin, min(first.size, begin + BLOCK)
        if one.code != other.code or first.read(*span).tobytes() != second.read(*span).tobytes():
            raise ConfigError(
                f"{path} holds a {HEAD} that differs from {EMBEDDING}, while its {CONFIG} says tie_word_embeddings=true: "
                f"set it to false to load both."
            )


def _files_and_promises(key: str, path: Path) -> tuple[list[str], dict[str, str]]:
    """Finds the names of the weight files, and the file in which the index promises each tensor."""
    if (path / SINGLE).is_file():
        return [SINGLE], {}
    if (path / INDEX).is_file():
        promises = read_object(path / INDEX).get("weight_map")
        if not isinstance(promises, dict) or not promises or not all(isinstance(f, str) for f in promises.values()):
            raise ConfigError(f"{path / INDEX} has no weight_map of tensors and files: get the file again.")
        return sorted(set(promises.values())), promises
    # Some folders also hold the same weights in Mistral's own format.
    found = sorted(file.name for file in path.glob("*.safetensors") if not file.name.startswith("consolidated"))
    if found and not any("-of-" in name for name in found):
        return found, {}
    if found:
        raise ConfigError(f"{path} holds shards such as {found[0]} but no {INDEX}: get that file too.")
    if others := sorted(file.name for file in path.iterdir() if file.suffix in (".bin", ".pt", ".pth")):
        raise ConfigError(
            f"{path} holds {others[0]} but no safetensors file: load the model with transformers and call save_pretrained, "
            f"which writes one."
        )
    raise ConfigError(f"{key}={path} has a {CONFIG} but no *.safetensors: get the weights too.")


def tensors_in(path: Path, files: Sequence[str], again: str) -> dict[str, Tensor]:
    """All tensors of the files in a folder. Each name must be unique. again: what to do about a damaged file, for messages."""
    found: dict[str, Tensor] = {}
    for name in files:
        if Path(name).name != name:
            raise ConfigError(f"{path} names a file {name} outside the folder: {again}.")
        if not (path / name).is_file():
            raise ConfigError(f"{path / name} is missing: {again}.")
        for tensor in TensorFile(path / name).tensors.values():
            if tensor.name in found:
                where = found[tensor.name].file.path.name
                raise ConfigError(f"{path} holds {tensor.name} twice, in {where} and {name}: remove one.")
            found[tensor.name] = tensor
    return found
