"""From text to token ids and back: UTF-8 bytes, or a folder with a tokenizer.json.

A document is never ambiguous about where it ends: each gets the mark of its end, and text that merely spells such a mark
stays text (but see ByteTokenizer for the zero byte).
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from jaxllm.config_errors import ConfigError, line_of

BYTES = "bytes"
DOCUMENT_END = b"\0"


class Tokenizer(Protocol):
    """Safe to use from several threads."""

    name: str
    """For people."""
    sha256: str
    """Hexadecimal digits; equal where every text gets equal ids."""
    vocab_size: int
    """The largest id + 1, added tokens included."""
    bos_id: int | None
    """The mark of a beginning; whether documents get it is the tokenizer's rule."""
    eos_id: int | None
    """The mark of a document's end; None only where load_tokenizer was told that none is needed."""
    special_tokens: tuple[str, ...]
    """How special tokens are spelled."""
    folder: Path | None
    """Where its files are; None for bytes."""

    def encode_documents(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Ids of whole documents, with the marks of beginning and end: unsigned integers of one type, [tokens] each."""
        ...

    def encode(self, text: str, add_special: bool = True) -> np.ndarray:
        """Ids of a text that may go on: no end mark, and the beginning mark with `add_special` if documents get one."""
        ...

    def encode_with_starts(self, texts: Sequence[str], parse_special: bool) -> list[tuple[np.ndarray, np.ndarray]]:
        """(ids, starts) of texts without any marks: start i is the character with which token i begins, int64 [tokens].

        Args:
          parse_special: text that spells a special token, as chat templates write it, becomes that token.
        """
        ...

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of these ids. Special tokens are left out; bytes that are no UTF-8 become U+FFFD."""
        ...

    def save(self, folder: Path) -> None:
        """Writes files from which load_tokenizer(folder) gives the same ids; none for bytes."""
        ...


def load_tokenizer(path: str | Path, name: str | None = None, *, for_documents: bool = True) -> Tokenizer:
    """The tokenizer of a folder with tokenizer.json (or of that file), or `bytes`.

    Args:
      path: "bytes" for UTF-8 bytes with a zero byte after each document; or what `transformers` saves.
      name: what people call it; default: the folder's name.
      for_documents: whether it must have a mark of a document's end; without one encode_documents must not be called.

    Raises:
      ConfigError: nothing there, not a tokenizer, or no token that ends a document.
    """
    if str(path) == BYTES:
        return ByteTokenizer()
    file = Path(path)
    if file.is_dir():
        file = file / "tokenizer.json"
    if not file.is_file():
        raise ConfigError(f"There is no tokenizer {file}: name a folder with tokenizer.json, or bytes.")
    return JsonTokenizer(file, name or file.resolve().parent.name, for_documents)


def token_dtype(vocab_size: int) -> np.dtype:
    """The smallest little-endian unsigned type that holds ids below vocab_size."""
    return np.dtype("u1" if vocab_size <= 2**8 else "<u2" if vocab_size <= 2**16 else "<u4")


class ByteTokenizer:
    """UTF-8. The end mark is the byte of the character U+0000, so a text that holds that has the mark's id inside it: with 256
    ids for 256 bytes there is none left for a mark that no text can spell.
    """

    name = BYTES
    sha256 = hashlib.sha256(b"UTF-8 bytes, then a zero byte").hexdigest()
    vocab_size = 256
    bos_id: int | None = None
    eos_id: int | None = DOCUMENT_END[0]
    special_tokens: tuple[str, ...] = ()
    folder: Path | None = None

    def encode_documents(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode() + DOCUMENT_END, np.uint8) for text in texts]

    def encode(self, text: str, add_special: bool = True) -> np.ndarray:
        return np.frombuffer(text.encode(), np.uint8)

    def encode_with_starts(self, texts: Sequence[str], parse_special: bool) -> list[tuple[np.ndarray, np.ndarray]]:
        sizes = [[len(character.encode()) for character in text] for text in texts]
        return [(self.encode(text), np.repeat(np.arange(len(text)), size)) for text, size in zip(texts, sizes, strict=True)]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return bytes(np.asarray(ids, np.uint8)).replace(DOCUMENT_END, b"").decode("utf-8", errors="replace")

    def save(self, folder: Path) -> None:
        """Nothing to write: its name says all."""


class JsonTokenizer:
    """A tokenizer.json, with the marks that the files beside it name."""

    def __init__(self, file: Path, name: str, for_documents: bool = True):
        self.name = name
        self.folder: Path | None = file.parent
        self._file, self._content = file, _read(file)
        self._bare: dict[bool, Any] = {}
        try:
            # The library raises bare Exception.
            self._tokenizer = _from_json(self._content.decode("utf-8"))
        except Exception as error:
            raise ConfigError(
                f"{file} is no tokenizer ({line_of(error)}): save it again with the tokenizers library."
            ) from None

        self._config = read_json(file.parent / "tokenizer_config.json")
        self.bos_id, bos_name = self._mark("bos")
        self.eos_id, eos_name = self._mark("eos")
        self._adds_bos = self._config.get("add_bos_token") is True
        if self.eos_id is None and for_documents:
            missing = f"its eos_token {eos_name!r} is not in the vocabulary" if eos_name else "no file beside it names one"
            raise ConfigError(
                f"{file} has no token that ends a document ({missing}): "
                f'add {{"eos_token": "..."}} with a token of its vocabulary to tokenizer_config.json in the same folder.'
            )
        if self._adds_bos and self.bos_id is None:
            missing = f"bos_token {bos_name!r} is not in the vocabulary" if bos_name else "there is no bos_token"
            raise ConfigError(
                f"{file.parent / 'tokenizer_config.json'} says add_bos_token but {missing}: name one, or remove add_bos_token."
            )
        # Marks that were added without being called special would still be found in text.
        added = self._tokenizer.get_added_tokens_decoder()
        for mark in {self.bos_id, self.eos_id} & added.keys():
            if not added[mark].special:
                self._tokenizer.add_special_tokens([added[mark].content])
        self._tokenizer.encode_special_tokens = True
        special = [token_id for token_id, token in added.items() if token.special]
        wanted = sorted({*special, self.bos_id, self.eos_id} - {None})
        self.special_tokens = tuple(map(self._tokenizer.id_to_token, wanted))

        self.vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        self._dtype = token_dtype(self.vocab_size)
        marks = json.dumps({"bos": self.bos_id, "eos": self.eos_id, "add_bos": self._adds_bos})
        self.sha256 = hashlib.sha256(self._content + marks.encode()).hexdigest()

    def encode_documents(self, texts: Sequence[str]) -> list[np.ndarray]:
        assert self.eos_id is not None, "loaded with for_documents=False"
        documents = []
        with self._library_errors():
            encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=True)
        for encoding in encodings:
            ids = self._begun(encoding.ids)
            if not ids or ids[-1] != self.eos_id:
                ids.append(self.eos_id)
            documents.append(np.array(ids, self._dtype))
        return documents

    def encode(self, text: str, add_special: bool = True) -> np.ndarray:
        with self._library_errors():
            ids = self._tokenizer.encode(text, add_special_tokens=add_special).ids
        if add_special:
            ids = self._begun(ids)
            # Text never becomes the end mark, so this one is the post-processor's; alone it is the beginning mark too.
            if len(ids) > 1 and ids[-1] == self.eos_id:
                ids.pop()
        return np.array(ids, self._dtype)

    def encode_with_starts(self, texts: Sequence[str], parse_special: bool) -> list[tuple[np.ndarray, np.ndarray]]:
        with self._library_errors():
            encodings = self._without_post_processor(parse_special).encode_batch(list(texts), add_special_tokens=False)
        return [(np.array(e.ids, self._dtype), np.array([start for start, _ in e.offsets], np.int64)) for e in encodings]

    def _without_post_processor(self, parse_special: bool) -> Any:
        """The same vocabulary and rules, but nothing added, and each token where it lies: GPT-2's post-processor takes white
        space off the places it reports.
        """
        if parse_special not in self._bare:
            bare = _from_json(json.dumps({**json.loads(self._content), "post_processor": None}))
            bare.add_special_tokens(list(self.special_tokens))
            bare.encode_special_tokens = not parse_special
            self._bare[parse_special] = bare
        return self._bare[parse_special]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=True)

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "tokenizer.json").write_bytes(self._content)
        # With the marks in it, wherever they came from, no other file is needed to load it.
        marks = {"bos_token": self._token(self.bos_id), "eos_token": self._token(self.eos_id)}
        text = json.dumps({**self._config, **marks}, indent=2, ensure_ascii=False)
        (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")
        for name in ("special_tokens_map.json", "chat_template.jinja"):
            if (self._file.parent / name).is_file():
                shutil.copyfile(self._file.parent / name, folder / name)

    @contextmanager
    def _library_errors(self) -> Iterator[None]:
        """Says in a sentence of ours what the library could not encode."""
        try:
            yield
        except BaseException as error:
            # The library raises bare Exception; its panics are no Exception at all, and their class cannot be imported.
            if type(error) is not Exception and type(error).__name__ != "PanicException":
                raise
            raise ConfigError(
                f"The tokenizer {self.name} cannot encode a text ({line_of(error)}): mend its tokenizer.json or choose another."
            ) from None

    def _begun(self, ids: list[int]) -> list[int]:
        if self._adds_bos and self.bos_id is not None and (not ids or ids[0] != self.bos_id):
            return [self.bos_id, *ids]
        return ids

    def _token(self, token_id: int | None) -> str | None:
        return None if token_id is None else self._tokenizer.id_to_token(token_id)

    def _mark(self, which: str) -> tuple[int | None, str | None]:
        """Id and name of the bos or eos token; the id is None where the vocabulary lacks it, both where none is named."""
        folder = self._file.parent
        for values in (self._config, read_json(folder / "special_tokens_map.json")):
            token = values.get(f"{which}_token")
            if isinstance(token, dict):
                token = token.get("content")
            if isinstance(token, str):
                return self._tokenizer.token_to_id(token), token
        for file in ("config.json", "generation_config.json"):
            token_id = read_json(folder / file).get(f"{which}_token_id")
            if isinstance(token_id, list) and token_id:
                token_id = token_id[0]
            if isinstance(token_id, int) and token_id >= 0:
                token = self._token(token_id)
                return (None, f"id {token_id}") if token is None else (token_id, token)
        return None, None


def _from_json(content: str) -> Any:
    """The library's tokenizer. What suited the batches of some model's users would cut documents, or fill them up."""
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_str(content)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise ConfigError(f"{file} cannot be read ({error.strerror}): mend it or name another tokenizer.") from None


def read_json(file: Path) -> dict[str, Any]:
    """A file's one object; nothing where there is no file."""
    if not file.is_file():
        return {}
    try:
        values = json.loads(_read(file))
    except ValueError as error:
        raise ConfigError(f"{file} is not JSON ({line_of(error)}): mend it or remove it.") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{file} holds no JSON object: mend it or remove it.")
    return values
