"""The files that accompany weights: tokenizer, chat template, configs, license, model card."""

from __future__ import annotations

import shutil
from pathlib import Path

from jaxllm.config.errors import ConfigError
from jaxllm.config.hf_config import CONFIG

GENERATION = "generation_config.json"
BESIDE = (GENERATION, CONFIG, "LICENSE*", "LICENCE*", "NOTICE*", "USE_POLICY*", "README*")
OF_TOKENIZER = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "tekken.json"),
    *("chat_template*", "additional_chat_templates"),
)
"""Names of the files that accompany weights, and of those of the tokenizer among them."""
LARGEST_BYTES = 2**30
"""Tokenizers have up to 33 MB."""


def copy_companions(home: Path | None, target: Path, tokenizer: bool = True) -> None:
    """Copies companion_files, by default with the tokenizer's files and the chat template. Creates `target` if there are any.

    Args: home: Folder.companions.
    """
    for name, path in companion_files(home, tokenizer).items():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target / name)


def companion_files(home: Path | None, tokenizer: bool = True) -> dict[str, Path]:
    """The files that accompany weights, by their path in the folder `home`, or without those of the tokenizer.

    Raises:
      ConfigError: one is not a regular file, has more than LARGEST_BYTES, or is a link out of the folder to anything but a blob
        of Hugging Face's cache.
    """
    patterns = (*BESIDE, *(OF_TOKENIZER if tokenizer else ()))
    files: dict[str, Path] = {}
    if home is None:
        return files
    for top in sorted({path for pattern in patterns for path in home.glob(pattern)}):
        for path in sorted(top.rglob("*")) if _followed(top, home).is_dir() else [top]:
            real = _followed(path, home)
            if real.is_file() and real.stat().st_size > LARGEST_BYTES:
                raise ConfigError(f"{path} has {real.stat().st_size:,} bytes, too many for a file beside weights: remove it.")
            if real.is_file():
                files[path.relative_to(home).as_posix()] = real
            elif not real.is_dir():
                raise ConfigError(f"{path} is not a regular file: replace or remove it.")
    return files


def _followed(path: Path, home: Path) -> Path:
    try:
        real = path.resolve()
    except RuntimeError:
        raise ConfigError(f"{path} is a link to itself: remove it.") from None
    is_blob = real.parent.name == "blobs" and real.parents[1].name.startswith("models--")
    if not is_blob and not real.is_relative_to(home.resolve()):
        raise ConfigError(f"{path} is a link to {real}, outside {home}: put the file itself there, or remove the link.")
    return real
