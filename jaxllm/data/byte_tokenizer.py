"""UTF-8 bytes as a tokenizer.json, for programs that read no other: each id is the value of its byte."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jaxllm.data.tokenizer import DOCUMENT_END


def save_byte_tokenizer(folder: Path) -> None:
    """Writes tokenizer.json and tokenizer_config.json, from which transformers gives a text the ids of ByteTokenizer.

    It is a byte-level BPE without merges. U+0000 spells the EOS token, as in ByteTokenizer.
    """
    end = DOCUMENT_END.decode()
    # A BPE names each byte by a printable character. The zero byte is named by itself, so that no letter of a text spells EOS;
    # as the unknown token it is also read where special tokens in a text count as text.
    vocabulary = {character: byte for byte, character in byte_characters().items()} | {end: 0}
    del vocabulary[byte_characters()[0]]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    added = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    content: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": 0, "content": end, **added}],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": end,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": dict(sorted(vocabulary.items(), key=lambda item: item[1])),
            "merges": [],
        },
    }
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end, "clean_up_tokenization_spaces": False}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(content, indent=2) + "\n")
    (folder / "tokenizer_config.json").write_text(json.dumps(about, indent=2) + "\n")


def byte_characters() -> dict[int, str]:
    """The character that byte-level BPEs name each byte by: itself if it prints, otherwise the next one from U+0100 on (GPT-2's
    bytes_to_unicode, https://github.com/openai/gpt-2/blob/master/src/encoder.py)."""
    printing = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = (byte for byte in range(2**8) if byte not in printing)
    return {byte: chr(byte) for byte in printing} | {byte: chr(2**8 + number) for number, byte in enumerate(others)}
