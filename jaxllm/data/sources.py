"""Where the text comes from, and which part of it is never trained on.

Whole documents are held out, each by a hash of its own: of its path where documents are files, of its text in prepared folders.
Adding or removing one never moves another across, and two machines with the same documents make the same split.
"""

from __future__ import annotations

import glob
import hashlib
import math
import os
import platform
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from jaxllm.config import Config, ConfigError, DataConfig, SourceConfig
from jaxllm.data.chat import ChatTemplate, load_chat_template
from jaxllm.data.conversations import read_conversations
from jaxllm.data.documents import Documents, DocumentsInMemory
from jaxllm.data.loader import PackedDocuments, SampleStream, document_order
from jaxllm.data.megatron import MegatronDocuments
from jaxllm.data.prepared import PreparedDocuments
from jaxllm.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer

# Folders of the standard library's tree that are not the library: other people's packages, tests, byte code; and the manual
# in pydoc_data, one file of prose so long that it would be most of whichever part it fell into.
_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "pydoc_data", "__pycache__"}


@dataclass(frozen=True)
class Source:
    """One source, cut in two."""

    name: str
    weight: float
    documents: Documents
    train: np.ndarray
    """Numbers of the documents to train on."""
    held_out: np.ndarray
    """Numbers of the others; empty with data.held_out_fraction=0."""

    @cached_property
    def train_tokens(self) -> int:
        return int(self.documents.lengths[self.train].sum(dtype=np.int64))

    @cached_property
    def held_out_tokens(self) -> int:
        return int(self.documents.lengths[self.held_out].sum(dtype=np.int64))

    def text(self, which: np.ndarray) -> np.ndarray:
        """All tokens of these documents, one after another."""
        read = self.documents.read(which, np.zeros_like(which), self.documents.lengths[which])
        return np.concatenate(read) if read else np.zeros(0, np.uint8)


@dataclass(frozen=True)
class Data:
    """What a config reads."""

    config: Config
    sources: tuple[Source, ...]
    tokenizer: Tokenizer | None
    """None where no source says which tokenizer it was made with."""
    chat_template: ChatTemplate | None = None
    """That conversations are written with; None where none are read, or where they are plain prompts and completions."""

    @cached_property
    def fingerprint(self) -> str:
        """12 hexadecimal digits: other texts, tokenizers or held-out documents have others."""
        parts = [self.config.data.held_out_fraction, *(source.documents.fingerprint for source in self.sources)]
        return hashlib.sha256("/".join(map(str, parts)).encode()).hexdigest()[:12]

    @property
    def reads_bytes(self) -> bool:
        return self.tokenizer is not None and self.tokenizer.sha256 == ByteTokenizer.sha256

    @property
    def held_out_tokens(self) -> int:
        return sum(source.held_out_tokens for source in self.sources)

    @property
    def unit(self) -> str:
        return "byte" if self.reads_bytes else "token"

    @property
    def description(self) -> str:
        """One line for people."""
        several = len(self.sources) > 1
        lines = [
            (f"{source.name} ({source.weight:g}): " if several else "")
            + f"{source.documents.description}: {source.train_tokens:,} {self.unit}s of {len(source.train):,} documents to "
            f"train on, {source.held_out_tokens:,} of {len(source.held_out):,} held out"
            for source in self.sources
        ]
        if longer := self._conversations_cut:
            lines.append(f"{longer:,} conversations are longer than a sequence and are cut")
        return "; ".join([*lines, f"sha256 {self.fingerprint}"])

    @property
    def _conversations_cut(self) -> int:
        """Whose later answers are learnt without what was asked."""
        S = self.config.train.sequence_length
        chats = [source for part, source in zip(self.config.data.sources, self.sources, strict=True) if part.source == "chat"]
        return sum(int((source.documents.lengths > S).sum()) for source in chats)

    def stream(self) -> SampleStream:
        """The training samples.

        Raises:
          ConfigError: a source with fewer tokens than a sequence.
        """
        S, seed = self.config.train.sequence_length, self.config.train.seed
        for source in self.sources:
            if source.train_tokens < S:
                raise ConfigError(
                    f"The training text of {source.name} has {source.train_tokens} tokens, fewer than "
                    f"train.sequence_length={S}: give more text or use shorter sequences."
                )
        packed = [self._packed(s, document_order(s.train, seed, number)) for number, s in enumerate(self.sources)]
        return SampleStream(packed, [source.weight for source in self.sources], seed)

    def held_out(self) -> list[PackedDocuments]:
        """What is held out of each source that holds anything out, in the source's own order."""
        return list(self._held_out)

    @cached_property
    def _held_out(self) -> tuple[PackedDocuments, ...]:
        # Packed once: every evaluation asks.
        return tuple(self._packed(source, source.held_out) for source in self.sources if source.held_out_tokens > 1)

    def _packed(self, source: Source, order: np.ndarray) -> PackedDocuments:
        data, S = self.config.data, self.config.train.sequence_length
        vocab_size = self.config.model.vocab_size
        return PackedDocuments(source.name, source.documents, order, S, data.packing, data.mask_documents, vocab_size)


def load_data(config: Config) -> Data:
    """Opens everything `config.data` names. Texts are read into memory, prepared and Megatron files are left where they are.

    Raises:
      ConfigError: nothing to read, something cannot be read, two tokenizers, a tokenizer with more ids than the model, or
        nothing left to train on or to hold out.
    """
    data = config.data
    named = None if data.tokenizer is None else load_tokenizer(data.tokenizer)
    prepared = {part.name: open_prepared(part) for part in data.sources if part.source == "prepared"}
    # Texts beside prepared folders are read with their tokenizer.
    for_texts = named or next((documents.tokenizer for documents in prepared.values()), None)
    template = _chat_template(data, for_texts)
    documents = [prepared.get(part.name) or open_documents(part, for_texts, template) for part in data.sources]
    fraction, several = data.held_out_fraction, len(data.sources) > 1
    whose = {part.name: f"Source {part.name}: " if several else "" for part in data.sources}
    sources = tuple(
        Source(part.name, part.weight, *split(these, fraction, whose[part.name]))
        for part, these in zip(data.sources, documents, strict=True)
    )
    # A small part of a mixture may go without held-out text, all of it not.
    if fraction and not any(len(source.held_out) for source in sources):
        raise ConfigError(whose[sources[0].name] + _holds_out_nothing(sources[0].documents, fraction))
    tokenizer = _the_tokenizer(data, sources, named)
    if tokenizer is not None and tokenizer.vocab_size > config.model.vocab_size:
        raise ConfigError(
            f"The tokenizer {tokenizer.name} has {tokenizer.vocab_size:,} ids and model.vocab_size={config.model.vocab_size}: "
            f"set model.vocab_size to at least {tokenizer.vocab_size}, or choose the model's own tokenizer."
        )
    return Data(config, sources, tokenizer, template)


def open_prepared(source: SourceConfig) -> Documents:
    return _chain([PreparedDocuments(Path(path)) for path in source.paths])


def _chat_template(data: DataConfig, tokenizer: Tokenizer | None) -> ChatTemplate | None:
    """The template of data.source=chat: data.chat_template, or the tokenizer's own."""
    if not any(part.source == "chat" for part in data.sources):
        return None
    return load_chat_template(None if tokenizer is None else tokenizer.folder, data.chat_template, knows_date=False)


def open_documents(source: SourceConfig, tokenizer: Tokenizer | None, template: ChatTemplate | None = None) -> Documents:
    """The documents of a source that is not prepared; several files are one after another. Texts need a tokenizer: bytes if
    there is none.

    source=python_stdlib: every module of the running Python's standard library, tests left out. Files that are not
    UTF-8 are skipped and counted in the description. Hosts of one run need the same Python, or their texts differ.

    source=chat: conversations, one on each line of the files that paths match; see conversations.py.

    source=files: whatever paths match. Files beneath the working directory are known by their path from there,
    others by their absolute path; keep texts beneath it if the split must not depend on the machine.
    """
    if source.source == "megatron":
        return _chain([MegatronDocuments(path, tokenizer) for path in source.paths])
    if source.source == "chat":
        assert tokenizer is not None, "refused by the config"
        return read_conversations(source.paths, tokenizer, template)
    if source.source == "python_stdlib":
        root = Path(sysconfig.get_paths()["stdlib"])
        texts, skipped = _read_library(root)
        origin = f"standard library of Python {platform.python_version()}"
        where = f"There is no Python source beneath {root}: use data.source=files with data.paths."
    else:
        texts, skipped = _read_files(source.paths), 0
        origin = ", ".join(source.paths)
        where = f"The files of data.paths ({origin}) hold no text: name files that do."
    if not any(texts.values()):
        raise ConfigError(where)
    return TextDocuments(
        texts, tokenizer or load_tokenizer("bytes"), origin + (f", {skipped} skipped (not UTF-8)" if skipped else "")
    )


class TextDocuments(DocumentsInMemory):
    """Texts tokenised in memory, one document each. See Documents; keys are hashes of the names."""

    def __init__(self, texts: dict[str, bytes], tokenizer: Tokenizer, description: str):
        ids = tokenizer.encode_documents([text.decode() for text in texts.values()])
        # A name may hold bytes that are no UTF-8, which Python reads as surrogates.
        digests = [hashlib.sha256(name.encode("utf-8", errors="surrogateescape")).digest() for name in texts]
        keys = np.array([int.from_bytes(digest[:8], "big") for digest in digests], np.uint64)
        super().__init__(ids, keys, tokenizer, description)


class ChainedDocuments(Documents):
    """Several folders or files of one source, one after another. See Documents."""

    def __init__(self, parts: Sequence[Documents]):
        self._parts = tuple(parts)
        self.lengths = np.concatenate([part.lengths for part in parts])
        self.keys = np.concatenate([part.keys for part in parts])
        self._firsts = np.cumsum([0, *(len(part.lengths) for part in parts)])
        self.tokenizer = parts[0].tokenizer
        self.description = ", ".join(part.description for part in parts)
        self.fingerprint = hashlib.sha256("/".join(part.fingerprint for part in parts).encode()).hexdigest()

    def read(self, documents: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> list[np.ndarray]:
        texts: list = [None] * len(documents)
        home = np.searchsorted(self._firsts, documents, side="right") - 1
        for number in np.unique(home).tolist():
            here = np.flatnonzero(home == number)
            read = self._parts[number].read(documents[here] - self._firsts[number], starts[here], stops[here])
            for place, text in zip(here.tolist(), read, strict=True):
                texts[place] = text
        return texts


class CutDocument(Documents):
    """A lone document as two: its first tokens to train on, its last ones held out. See Documents."""

    def __init__(self, whole: Documents, held_out_tokens: int):
        length = int(whole.lengths[0])
        self._whole, self._begins = whole, np.array([0, length - held_out_tokens])
        self.lengths = np.array([length - held_out_tokens, held_out_tokens])
        self.keys = np.repeat(whole.keys, 2)
        self.tokenizer, self.description, self.fingerprint = whole.tokenizer, whole.description, whole.fingerprint

    def read(self, documents: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> list[np.ndarray]:
        return self._whole.read(*self._in_whole(documents, starts, stops))

    def scored(self, documents: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> list[np.ndarray] | None:
        return self._whole.scored(*self._in_whole(documents, starts, stops))

    def _in_whole(self, documents: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> tuple[np.ndarray, ...]:
        begins = self._begins[documents]
        return np.zeros_like(documents), begins + starts, begins + stops


def split(documents: Documents, fraction: float, whose: str = "") -> tuple[Documents, np.ndarray, np.ndarray]:
    """(documents, those to train on, those held out). A lone document gives its end away; too few hold nothing out.

    Args:
      whose: what error messages begin with.

    Raises:
      ConfigError: the fraction leaves nothing to train on.
    """
    count = len(documents.lengths)
    if fraction == 0:
        return documents, np.arange(count), np.arange(0)
    if count == 1:
        length = int(documents.lengths[0])
        held_out_tokens = round(length * fraction)
        if not held_out_tokens:
            return documents, np.arange(1), np.arange(0)
        if held_out_tokens == length:
            raise ConfigError(whose + _leaves_nothing(length, fraction, "to train on"))
        return CutDocument(documents, held_out_tokens), np.arange(1), np.arange(1, 2)
    places = np.asarray(documents.keys, np.float64) / 2**64
    held_out = places < fraction
    if held_out.all():
        few_enough = math.floor(places.max() * 1000) / 1000
        raise ConfigError(
            f"{whose}data.held_out_fraction={fraction:g} holds out all {count} documents: lower it to {few_enough:g}."
        )
    return documents, np.flatnonzero(~held_out), np.flatnonzero(held_out)


def _holds_out_nothing(documents: Documents, fraction: float) -> str:
    """What to do about documents of which the fraction holds out none."""
    count = len(documents.lengths)
    if count == 1:
        return _leaves_nothing(int(documents.lengths[0]), fraction, "to hold out")
    enough = math.ceil((np.asarray(documents.keys, np.float64) / 2**64).min() * 1000) / 1000
    return (
        f"data.held_out_fraction={fraction:g} holds out none of the {count} documents: raise it to "
        f"{enough:g}, give more, or set it to 0 to go without held-out text."
    )


def _leaves_nothing(length: int, fraction: float, what_for: str) -> str:
    return (
        f"data.held_out_fraction={fraction:g} of one document of {length} tokens leaves nothing {what_for}: "
        f"choose a value between 0 and 1 that leaves both, or give more text."
    )


def _the_tokenizer(data: DataConfig, sources: Sequence[Source], named: Tokenizer | None) -> Tokenizer | None:
    """The one tokenizer of all sources that know theirs."""
    known = [(source.name, source.documents.tokenizer) for source in sources if source.documents.tokenizer]
    if named is not None:
        known.insert(0, (f"data.tokenizer={data.tokenizer}", named))
    for name, tokenizer in known:
        if tokenizer.sha256 != known[0][1].sha256:
            raise ConfigError(
                f"{known[0][0]} and {name} have different tokenizers ({known[0][1].name} and {tokenizer.name}): "
                f"prepare all sources with one."
            )
    return known[0][1] if known else None


def _chain(parts: list) -> Documents:
    return parts[0] if len(parts) == 1 else ChainedDocuments(parts)


def _read_library(root: Path) -> tuple[dict[str, bytes], int]:
    """The library's sources by relative path, sorted, and the number of files skipped."""
    names = []
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _NOT_LIBRARY]
        relative = Path(folder).relative_to(root)
        names += [(relative / name).as_posix() for name in files if name.endswith(".py")]
    # Distributions leave links here that may lead nowhere.
    texts = {name: (root / name).read_bytes() for name in sorted(names) if (root / name).is_file()}
    readable = {name: text for name, text in texts.items() if _first_bad_byte(text) is None}
    return readable, len(texts) - len(readable)


def _read_files(patterns: tuple[str, ...]) -> dict[str, bytes]:
    """The matching files by name, sorted; a file that two patterns match is read once."""
    matches = (match for pattern in patterns for match in glob.iglob(pattern, recursive=True))
    texts = {}
    for name in sorted({_name(match) for match in matches if os.path.isfile(match)}):
        try:
            texts[name] = Path(name).read_bytes()
        except OSError as error:
            raise ConfigError(f"{name} cannot be read ({error.strerror}): mend it or leave it out of data.paths.") from None
        bad = _first_bad_byte(texts[name])
        if bad is not None:
            raise ConfigError(f"{name} is not UTF-8 text (byte {bad}): convert it or leave it out of data.paths.")
    return texts


def _name(path: str) -> str:
    absolute, here = Path(os.path.abspath(path)), Path.cwd()
    return (absolute.relative_to(here) if absolute.is_relative_to(here) else absolute).as_posix()


def _first_bad_byte(text: bytes) -> int | None:
    try:
        text.decode("utf-8")
    except UnicodeDecodeError as error:
        return error.start
    return None
