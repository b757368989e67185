"""What an export holds beside the weights: tokenizer, generation config and the ids of the tokens that begin and end a text."""

from __future__ import annotations

import json
from pathlib import Path

from jaxllm.config import ConfigError
from jaxllm.data.tokenizer import BYTES, load_tokenizer, save_byte_tokenizer
from jaxllm.weights.folder import Folder
from jaxllm.weights.staging import GENERATION, copy_companions


def write_companions(folder: Folder, target: Path) -> None:
    """Writes the files beside the weights. A run has no tokenizer.json if it reads bytes, and no generation_config.json, by
    which servers stop, if it began from nothing: these are made."""
    copy_companions(folder.companions, target)
    if reads_bytes(folder):
        save_byte_tokenizer(target)
    tokens = {name: token for name, token in token_ids(folder).items() if token is not None}
    # Where there is a config.json, its end tokens hold.
    if tokens and (reads_bytes(folder) or not (folder.generation or folder.original_config)):
        (target / GENERATION).write_text(json.dumps(tokens | folder.generation, indent=2) + "\n")


def token_ids(folder: Folder) -> dict[str, int | None]:
    """bos_token_id and eos_token_id of the folder's tokenizer."""
    if folder.tokenizer is None and not reads_bytes(folder):
        return {}
    try:
        tokenizer = load_tokenizer(BYTES if reads_bytes(folder) else str(folder.tokenizer))
    except ConfigError:
        # A tokenizer that is unusable for training is not a reason to refuse the export.
        return {}
    return {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}


def reads_bytes(folder: Folder) -> bool:
    """Whether ids are bytes: those of a run on bytes, or 256 ids without a tokenizer.json."""
    return folder.tokenizer is None and (folder.trained_on_bytes or folder.model["vocab_size"] == 2**8)
