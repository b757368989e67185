"""`jaxllm convert`: converts Hugging Face's folders to jaxllm's own and back.

The complete source is checked before the destination is created: each tensor exists once, with the right shape and dtype.
Values stream one tensor at a time. Each tensor is read again from the destination through the inverse map, and its checksum is
compared. The destination gets its final name last. A round trip is exact: names, dtypes and bits stay the same, except that
`rotary_emb.inv_freq` of old folders is dropped.
"""

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ByteSize, TypeAdapter, ValidationError

from jaxllm.config import Config, ConfigError, ModelConfig
from jaxllm.config.errors import one_sentence
from jaxllm.config.hf_config import CONFIG, MODEL, TOKENIZER, hugging_face_config, read_object
from jaxllm.config.hf_vision import text_config, with_prefix
from jaxllm.data.stores import is_address
from jaxllm.data.tokenizer import BYTES, load_tokenizer, save_byte_tokenizer
from jaxllm.weights.folder import EMBEDDING, HEAD, INDEX, Entry, Folder, HuggingFaceFolder, entries, open_folder
from jaxllm.weights.safetensors import DTYPES, FOR_TORCH, Described, new_file
from jaxllm.weights.staging import GENERATION, companion_files, copy_companions, new_folder, require_new
from jaxllm.weights.streaming import LARGEST_FILE, Agreement, Conversion, Move, describe_model, in_files, stream, total_bytes


def from_hf(source: str | Path, destination: str | Path, *, force: bool = False, verify: bool = False) -> Conversion:
    """Converts a Hugging Face folder to jaxllm's format (weights/folder.py), with unchanged dtypes.

    It needs host memory for the largest tensor, and no JAX unless `verify` is set.

    Args:
      force: move an existing destination aside, to DESTINATION.before-<n>.
      verify: compare logits with transformers before the destination gets its final name.

    Raises:
      ConfigError: the source is damaged or not a network that jaxllm supports, or the destination exists or cannot be
        written.
    """
    source, destination = str(source), str(destination)
    require_new(destination, force)
    if verify:
        require_transformers()
    if is_address(source):
        # This imports JAX.
        from jaxllm.weights.stored_models import copied

        folder = open_folder("SRC", str(copied("SRC", source)[0]))
        folder.description = source
    else:
        folder = open_folder("SRC", source)
    if not isinstance(folder, HuggingFaceFolder):
        raise ConfigError(f"SRC={source} is already in jaxllm's own format: use it directly, or run `jaxllm convert to-hf`.")
    try:
        # The config may refuse the shape, for example because heads do not divide.
        ModelConfig.model_validate(folder.model)
    except ValidationError as error:
        raise ConfigError(f"{folder.path / CONFIG}: {one_sentence(error, Config)}") from None
    companion_files(folder.companions)
    tensors = {entry.name: (folder.dtype(entry.path), entry.shape) for entry in folder.entries.values()}
    layout = in_files(tensors, "weights")
    moves = _moves_in(folder)
    with new_folder(destination, total_bytes(layout), force) as aside:
        stream(moves, layout, aside, "from Hugging Face")
        # What jaxllm's parameters do not contain, for the conversion back.
        ours = {tensor.name: folder.dtype(path) for path in folder.entries for tensor in folder.stored(path)}
        differ = {name: folder.tensors[name].code for name, dtype in ours.items() if folder.tensors[name].dtype != dtype}
        vocabulary = [name for name in (EMBEDDING, HEAD) if name in folder.tensors]
        more = {"hugging_face": {"vocabulary": vocabulary, "dtypes": differ}}
        (aside / MODEL).write_text(describe_model(folder.model, folder.description, folder.common_dtype, layout, more))
        copy_companions(folder.companions, aside / TOKENIZER)
        agreement = require_agreement(folder.path, aside) if verify else None
    # If a tied matrix was stored under both names, both count.
    count, files, dtypes = len(folder.tensors), len(layout), {move.dtype.name for move in moves}
    return Conversion(source, destination, count, total_bytes(layout), dtypes, files, folder.dropped, agreement)


def to_hf(
    source: str,
    destination: str,
    *,
    step: int | None = None,
    dtype: str | None = None,
    largest_file: int = LARGEST_FILE,
    max_position: int | None = None,
    force: bool = False,
    verify: bool = False,
    adapters: Sequence[str] = (),
) -> Conversion:
    """Converts a jaxllm folder, a run directory or one of its checkpoints to a folder that transformers loads. The adapters of
    a run with model.lora are merged.

    It needs host memory for the largest tensor or, for a run, the largest parameter with all layers.

    Args:
      step: the checkpoint of a run directory; default: the newest.
      dtype: float32, bfloat16 or float16; default: as stored.
      largest_file: limit in bytes. More is written as several files with an index.
      max_position: max_position_embeddings; default: the larger of the value in the original config.json and the sequence
        length of the run.
      force, verify: as in from_hf.
      adapters: folders of LoRA adapters in PEFT's format, to be merged too.

    Raises:
      ConfigError: as in from_hf.
    """
    require_new(destination, force)
    if verify:
        require_transformers()
    # This imports JAX, which a conversion from Hugging Face does not need.
    from jaxllm.weights.weights import dtype_named, find_weights

    wanted = None if dtype is None else dtype_named(dtype)
    if max_position is not None and max_position < 1:
        raise ConfigError(
            f"--max-position={max_position} is not valid: give the number of positions that the model was trained for."
        )
    found = find_weights("SRC", source, step, adapters)
    if isinstance(found.outline, HuggingFaceFolder) and not adapters:
        raise ConfigError(f"SRC={source} is already a Hugging Face folder: transformers loads it directly.")

    def agreement(written: Path) -> Agreement:
        # Rounding to another dtype makes another model.
        return require_agreement(written, written) if wanted else require_agreement(written, source, step, adapters)

    done = write_hf(found.as_folder(), destination, wanted, largest_file, max_position, force, agreement if verify else None)
    return replace(done, source=found.description)


def write_hf(
    folder: Folder,
    destination: str,
    wanted: np.dtype | None = None,
    largest_file: int = LARGEST_FILE,
    max_position: int | None = None,
    force: bool = False,
    agreement: Callable[[Path], Agreement] | None = None,
) -> Conversion:
    """Writes a model as a folder that transformers loads: to_hf says how.

    Args:
      wanted: dtype of the values; None: as the folder has them.
      agreement: compares what was written, before it gets its final name.
    """
    companion_files(folder.companions)
    config = config_json(folder, wanted, max_position)
    theirs = entries(folder.model, text_config(config, "The config.json")["model_type"])
    moves, tensors = _moves_out(folder, theirs, wanted)
    tensors = _in_their_order(theirs, tensors)
    if folder.model.get("vision") is not None:
        moves = [replace(move, name=with_prefix(move.name), target=with_prefix(move.target)) for move in moves]
        tensors = {with_prefix(name): described for name, described in tensors.items()}
    layout = in_files(tensors, "model", largest_file)
    with new_folder(destination, total_bytes(layout), force) as aside:
        stream(moves, layout, aside, "to Hugging Face", partial(new_file, metadata=FOR_TORCH))
        if len(layout) > 1:
            homes = {tensor: file for file, inside in layout.items() for tensor in inside}
            index = {"metadata": {"total_size": total_bytes(layout)}, "weight_map": homes}
            (aside / INDEX).write_text(json.dumps(index, indent=2) + "\n")
        write_companions(folder, aside)
        (aside / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        agrees = None if agreement is None else agreement(aside)
    dtypes, files = {move.dtype.name for move in moves}, len(layout)
    return Conversion(folder.description, destination, len(moves), total_bytes(layout), dtypes, files, (), agrees)


def adapter_to_peft(
    source: str, destination: str, *, step: int | None = None, dtype: str | None = None, force: bool = False
) -> Conversion:
    """Writes the adapter of a run with model.lora, alone, as a folder that PEFT loads.

    Args:
      step, dtype, force: as in to_hf.

    Raises:
      ConfigError: the run has no adapter, or the destination exists or cannot be written.
    """
    require_new(destination, force)
    from jaxllm.cluster import distributed
    from jaxllm.weights.adapters import write_adapter
    from jaxllm.weights.weights import dtype_named, find_weights

    wanted = None if dtype is None else dtype_named(dtype)
    found = find_weights("SRC", source, step)
    if found.model.get("lora") is None:
        raise ConfigError(f"SRC={source} has no adapter: give a run with model.lora, or leave out --adapter-only.")
    if found.model.get("vision") is not None:
        raise ConfigError("Adapters of models with a vision tower are written merged only: leave out --adapter-only.")
    distributed.start_without_devices()
    folder = found.unmerged()
    with new_folder(destination, 0, force) as aside:
        moves, nbytes = write_adapter(folder, aside, wanted, found.began_from)
        # As PEFT's trainers do: with the template and the end tokens of training. A config.json would name a whole model.
        copy_companions(found.outline.companions, aside)
        (aside / CONFIG).unlink(missing_ok=True)
    return Conversion(found.description, destination, len(moves), nbytes, {move.dtype.name for move in moves}, 1)


def parse_size(text: str) -> int:
    """Parses a size such as 5GB or 500MiB into bytes; ConfigError if it is none."""
    with suppress(ValidationError):
        if size := TypeAdapter(ByteSize).validate_python(text):
            return int(size)
    raise ConfigError(f"--max-shard-size={text} is not a size: write one such as 5GB or 500MiB.")


# ------------------------------------------------------------------------------------------------------------- in and out


def _moves_in(folder: HuggingFaceFolder) -> list[Move]:
    moves = []
    for entry in folder.entries.values():
        matrix = (entry.matrix[1], entry.matrix[0]) if entry.columns else None
        for number, tensor in enumerate(folder.stored(entry.path)):
            elements = folder.slab(entry, number)
            moves.append(Move(tensor.name, elements, matrix, tensor.dtype, entry.name, number * elements.size))
    return moves


def _moves_out(folder: Folder, theirs: Sequence[Entry], wanted: np.dtype | None) -> tuple[list[Move], Described]:
    differ = folder.hugging_face.get("dtypes") or {}
    moves, tensors = [], {}
    for entry in theirs:
        stored = [(name,) for name in entry.tensors]
        if entry.template == EMBEDDING and folder.model["tie_embeddings"]:
            # It may have both names, or only the head's.
            stored = [tuple(folder.hugging_face.get("vocabulary") or (EMBEDDING,))]
        for number, names in enumerate(stored):
            for name in names:
                dtype = wanted or (DTYPES[differ[name]] if name in differ else folder.dtype(entry.path))
                moves.append(Move(name, folder.slab(entry, number), entry.matrix if entry.columns else None, dtype, name))
                tensors[name] = (dtype, entry.their_shape)
    return moves, tensors


def _in_their_order(theirs: Sequence[Entry], tensors: Described) -> Described:
    """Orders tensors as embedding, layer after layer, norm and head, so that a file holds complete layers."""
    layers = {
        name: n * entry.stack[0] // len(entry.tensors)
        for entry in theirs
        if entry.stack
        for n, name in enumerate(entry.tensors)
    }
    first = [name for name in (EMBEDDING,) if name in tensors]
    layered = sorted(layers, key=layers.__getitem__)
    return {name: tensors[name] for name in (*first, *layered, *tensors)}


def config_json(folder: Folder, wanted: np.dtype | None, max_position: int | None) -> dict[str, Any]:
    """The content of config.json. ConfigError if transformers has no such network, or the number of positions is not known.

    Args:
      wanted: dtype of the weights; None: as stored.
      max_position: as in to_hf.
    """
    original, length = folder.text_config, folder.sequence_length
    if max_position is None and length is not None:
        # Training on longer sequences extends the supported positions.
        before = (folder.model.get("rope_scaling") or {}).get("original_max_position") or 0
        max_position = max(length, original.get("max_position_embeddings") or 0, before)
    if max_position is None and not original:
        raise ConfigError(
            f"{folder.description} does not say how many positions the model was trained for: add --max-position=N."
        )
    dtype = (wanted or folder.common_dtype).name
    config = hugging_face_config(folder.model, dtype=dtype, max_position=max_position, original=folder.original_config)
    return config if original else config | token_ids(folder)


# -------------------------------------------------------------------------------------------------------- beside the weights
# What an export holds: tokenizer, generation config and the ids of the tokens that begin and end a text.


def write_companions(folder: Folder, target: Path) -> None:
    """Writes the files beside the weights. A run has no tokenizer.json if it reads bytes, and no generation_config.json, by
    which servers stop, if it began from nothing: these are made."""
    copy_companions(folder.companions, target)
    if reads_bytes(folder):
        save_byte_tokenizer(target)
    tokens = {name: token for name, token in token_ids(folder).items() if token is not None}
    # Where there is a config.json, its end tokens hold.
    if tokens and (reads_bytes(folder) or not (folder.generation or folder.original_config)):
        (target / GENERATION).write_text(json.dumps(folder.generation | tokens, indent=2) + "\n")


def token_ids(folder: Folder) -> dict[str, Any]:
    """bos_token_id and eos_token_id of the folder's tokenizer, or as its generation_config.json says."""
    if folder.tokenizer is None and not reads_bytes(folder):
        return {}
    try:
        tokenizer = load_tokenizer(BYTES if reads_bytes(folder) else str(folder.tokenizer))
    except ConfigError:
        # A tokenizer that is unusable for training is not a reason to refuse the export.
        return {}
    found = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}
    return {name: folder.generation.get(name, token_id) for name, token_id in found.items()}


def reads_bytes(folder: Folder) -> bool:
    """Whether ids are bytes: those of a run on bytes, or 256 ids without a tokenizer.json."""
    return folder.tokenizer is None and (folder.trained_on_bytes or folder.model["vocab_size"] == 2**8)


# -------------------------------------------------------------------------------------------------------------- comparing

LARGEST_DIFFERENCE = 1e-3
"""Limit for logits in float32. A model with logits above a few tens might differ by more without being wrong."""


def require_transformers() -> None:
    """Raises ConfigError if torch and transformers are not installed."""
    from importlib.util import find_spec

    if missing := [name for name in ("torch", "transformers") if find_spec(name) is None]:
        raise ConfigError(f"--verify needs {' and '.join(missing)}: pip install 'jaxllm[reference]', or leave it out.")


def require_agreement(hugging_face: Path, ours: str | Path, step: int | None = None, adapters: Sequence[str] = ()) -> Agreement:
    """Raises ConfigError if the logits differ by more than LARGEST_DIFFERENCE."""
    found = verify(hugging_face, ours, step, adapters)
    if not found.largest_difference <= LARGEST_DIFFERENCE:
        raise ConfigError(
            f"The {found.line}; that is above {LARGEST_DIFFERENCE:g}, so nothing was kept: report it with the model."
        )
    return found


def verify(hugging_face: Path, ours: str | Path, step: int | None = None, adapters: Sequence[str] = ()) -> Agreement:
    """Compares the logits of random tokens, by transformers from one folder and by jaxllm from the other, in float32. It needs
    memory for two copies of the model in float32."""
    import jax
    import torch
    import transformers
    from transformers.utils import logging

    from jaxllm.weights.load_model import open_model

    logging.disable_progress_bar()
    # Of a model with a vision tower the text alone is compared.
    config = read_object(hugging_face / CONFIG)
    kind = "AutoModelForCausalLM" if text_config(config, CONFIG) is config else "AutoModelForImageTextToText"
    network = getattr(transformers, kind).from_pretrained(hugging_face, dtype=torch.float32, attn_implementation="eager")
    ids_BS = np.random.default_rng(0).integers(0, len(network.get_input_embeddings().weight), (2, 32)).astype(np.int32)
    with torch.no_grad():
        theirs_BSV = network(torch.tensor(ids_BS).long()).logits
    with jax.default_matmul_precision("float32"):
        model = open_model(ours, ["model.compute_dtype=float32"], step=step, adapter=adapters).model
        ours_BSV = torch.tensor(np.asarray(model(jax.numpy.asarray(ids_BS))))
    log_p, log_q = theirs_BSV.double().log_softmax(-1), ours_BSV.double().log_softmax(-1)
    kl = (log_p.exp() * (log_p - log_q)).sum(-1).mean().item()
    return Agreement((ours_BSV - theirs_BSV).abs().max().item(), kl, ids_BS.size)
