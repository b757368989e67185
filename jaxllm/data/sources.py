"""Opens the sources of text and splits off the held-out documents, which are never trained on.

Complete documents are held out, by a hash of each: of the path if documents are files, of the text in prepared folders, of path
and number in files of ids. Adding or removing a file does not move another, and two machines with the same documents make the
same split.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import platform
import sysconfig
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxllm.config import Config, ConfigError, DataConfig, SourceConfig
from jaxllm.config.file_patterns import MOST_ENTRIES, Listing
from jaxllm.config.sections import CONVERSATIONS
from jaxllm.config.types import DOCUMENTS, GIVEN, NEEDS_DOCUMENTS
from jaxllm.data.cached import CachedFolder, shard_cache
from jaxllm.data.disk_documents import MegatronDocuments, PreparedDocuments, TokenFile
from jaxllm.data.documents import ChainedDocuments, Documents, SplitDocument, text_documents
from jaxllm.data.loader import PackedDocuments, SampleStream, document_order
from jaxllm.data.records import listed, require_text
from jaxllm.data.stores import is_address
from jaxllm.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from jaxllm.untrusted import GIB, RefusedInput, read_bytes, reason_of

if TYPE_CHECKING:
    # Most runs read no conversations.
    from jaxllm.data.chat import ChatTemplate
    from jaxllm.data.images import ImageTokens, SequenceImages

log = logging.getLogger(__name__)

# Folders beside the standard library's sources that are not part of it: installed packages, tests, byte code. pydoc_data holds
# the manual, one file of prose that would dominate its part of the split.
_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "pydoc_data", "__pycache__"}
_READS = "tokenize it with `jaxllm data prepare` for data.source=prepared, or, if it is conversations, set data.source=chat"
MOST_FILES, MOST_BYTES = 100_000, 4 * GIB
"""Limits of texts that are read at the start of each run. The memory of a host holds them five times over, because the ids are
made of all texts at once."""
_ADVICE = "name a smaller folder, or tokenise the files once with jaxllm data prepare"


@dataclass(frozen=True)
class Source:
    """One source, split into training and held-out documents."""

    name: str
    weight: float
    documents: Documents
    train: np.ndarray
    """Numbers of the training documents."""
    held_out: np.ndarray
    """Numbers of the held-out documents; empty with data.held_out_fraction=0."""

    @cached_property
    def train_tokens(self) -> int:
        return int(self.documents.lengths[self.train].sum(dtype=np.int64))

    @cached_property
    def held_out_tokens(self) -> int:
        return int(self.documents.lengths[self.held_out].sum(dtype=np.int64))

    def text(self, which: np.ndarray) -> np.ndarray:
        """All tokens of the given documents, concatenated."""
        read = self.documents.read(which, np.zeros_like(which), self.documents.lengths[which])
        return np.concatenate(read) if read else np.zeros(0, np.uint8)


@dataclass(frozen=True)
class Data:
    """The data of one config."""

    config: Config
    sources: tuple[Source, ...]
    tokenizer: Tokenizer | None
    """None if no source records its tokenizer."""
    chat_template: ChatTemplate | None = None
    """Template for conversations. None without conversations, or if they are plain prompts and completions."""
    end_of_turn: int | None = None
    """The token with which the template ends an answer."""
    images: SequenceImages | None = None
    """With a vision tower."""

    @property
    def ends(self) -> set[int]:
        """Tokens that end what is learnt: those of answers, and of documents if there are any. Bytes have no file to say it."""
        documents = self.chat_template is None or any(part.source not in CONVERSATIONS for part in self.config.data.sources)
        of_documents = self.tokenizer.eos_id if documents and self.tokenizer and self.tokenizer.folder else None
        return {token for token in (self.end_of_turn, of_documents) if token is not None}

    @cached_property
    def fingerprint(self) -> str:
        """12 hexadecimal digits. They change with the texts, the tokenizers or the held-out documents."""
        parts = [self.config.data.held_out_fraction, *(source.documents.fingerprint for source in self.sources)]
        return hashlib.sha256("/".join(map(str, parts)).encode()).hexdigest()[:12]

    @property
    def held_out_tokens(self) -> int:
        return sum(source.held_out_tokens for source in self.sources)

    @property
    def unit(self) -> str:
        return "byte" if self.tokenizer is not None and self.tokenizer.sha256 == ByteTokenizer.sha256 else "token"

    @property
    def description(self) -> str:
        """One line of text for logs."""
        if not self.sources:
            return "batches of the caller"
        several = len(self.sources) > 1
        lines = [
            (f"{source.name} ({source.weight:g}): " if several else "")
            + f"{source.documents.description}: {source.train_tokens:,} {self.unit}s of {len(source.train):,} documents to "
            f"train on, {source.held_out_tokens:,} of {len(source.held_out):,} held out"
            for source in self.sources
        ]
        if longer := self._longer("chat"):
            lines.append(f"{longer:,} conversations are longer than a sequence and are cut")
        if self.images is not None and (left := sum(len(s.train) - len(self.whole(s, s.train)) for s in self.sources)):
            lines.append(f"{left:,} conversations have images and do not fit into a sequence, and are left out")
        if longer := self._longer("preferences"):
            lines.append(f"{longer:,} pairs are longer than a sequence and are left out")
        return "; ".join([*lines, f"sha256 {self.fingerprint}"])

    def _longer(self, kind: str) -> int:
        """Number of documents in sources of this kind that are longer than a sequence. The later part of a conversation that is
        cut is learnt without its start.
        """
        S = self.config.train.sequence_length
        found = [source for part, source in zip(self.config.data.sources, self.sources, strict=True) if part.source == kind]
        return sum(int((source.documents.lengths > S).sum()) for source in found)

    def stream(self) -> SampleStream:
        """Stream of training samples.

        Raises:
          ConfigError: a source has fewer tokens than one sequence, or no pair that fits into one.
        """
        S, seed = self.config.train.sequence_length, self.config.train.seed
        for source in self.sources:
            if source.documents.chosen_tokens is not None:
                if not len(self.whole(source, source.train)):
                    raise ConfigError(
                        f"No pair of {source.name} fits into train.sequence_length={S}: use longer sequences or shorter pairs."
                    )
            elif self.images is not None and not len(self.whole(source, source.train)):
                limits = f"train.sequence_length={S} and data.max_images={self.images.most}"
                raise ConfigError(f"No conversation of {source.name} fits into {limits}: use longer sequences, or more images.")
            elif source.train_tokens < S:
                raise ConfigError(
                    f"The training text of {source.name} has {source.train_tokens} tokens, fewer than "
                    f"train.sequence_length={S}: give more text or use shorter sequences."
                )
        packed = [self._packed(s, document_order(s.train, seed, number)) for number, s in enumerate(self.sources)]
        return SampleStream(packed, [source.weight for source in self.sources], seed)

    def most_documents(self, stream: SampleStream) -> int:
        """Documents of a sequence at most, in the stream and in the held-out text; free space at its end counts as one. 0 if
        nothing is read here."""
        return max((packed.packing.most_pieces for packed in (*stream.sources, *self.held_out)), default=0)

    @cached_property
    def held_out(self) -> tuple[PackedDocuments, ...]:
        """Held-out documents of each source that has any, in the source's own order. Every evaluation needs them."""
        some = [s for s in self.sources if s.held_out_tokens > 1 and len(self.whole(s, s.held_out))]
        return tuple(self._packed(source, source.held_out) for source in some)

    def whole(self, source: Source, order: np.ndarray) -> np.ndarray:
        """Those of the documents that may be packed: of pairs and of conversations with images, those that fit into a
        sequence."""
        documents, S = source.documents, self.config.train.sequence_length
        if self.images is not None:
            count = self.images.counts(documents)
            return order[((count == 0) | ((documents.lengths <= S) & (count <= self.images.most)))[order]]
        return order if documents.chosen_tokens is None else order[documents.lengths[order] <= S]

    def _packed(self, source: Source, order: np.ndarray) -> PackedDocuments:
        order = self.whole(source, order)
        data, S = self.config.data, self.config.train.sequence_length
        vocab_size = self.config.model.vocab_size
        masks = data.mask_documents
        return PackedDocuments(source.name, source.documents, order, S, data.packing, masks, vocab_size, self.images)


def load_data(config: Config, cache_folder: Callable[[], Path] | None = None, given: Iterable[Any] | None = None) -> Data:
    """Opens all sources in `config.data`. Texts are read into memory; prepared ones and files of ids stay on the disk.

    Args:
      cache_folder: gives the folder in whose `data` prepared folders of stores are cached, if data.cache_dir does not say it.
      given: the documents of data.source=documents (iterables.py).

    Raises:
      ConfigError: a source is missing, empty or unreadable, two sources have different tokenizers, a tokenizer has more ids
        than the model, or nothing remains to train on or to hold out.
    """
    data = config.data
    named = None if data.tokenizer is None else load_tokenizer(data.tokenizer, key="data.tokenizer")
    if data.source == GIVEN:
        return Data(config, (), named)
    cache = shard_cache(data, cache_folder)
    prepared = {
        part.name: _chain(
            [PreparedDocuments(CachedFolder(cache, path) if cache and is_address(path) else path) for path in part.paths]
        )
        for part in data.sources
        if part.source == "prepared"
    }
    # Texts in a mixture with prepared folders use the tokenizer of those folders.
    for_texts = named or next((documents.tokenizer for documents in prepared.values()), None)
    template = turn = tokens = images = None
    if (vision := config.model.vision) is not None and config.images_per_sequence:
        from jaxllm.data.images import SequenceImages, image_tokens, load_image_processor

        folders = for_texts.folder if for_texts else None, config.train.init_from
        tokens = image_tokens(for_texts, vision) if for_texts else None
        images = SequenceImages(load_image_processor(vision, *folders), config.images_per_sequence)
    if any(part.source in CONVERSATIONS for part in data.sources):
        from jaxllm.data.chat import load_chat_template

        home, token = for_texts.folder if for_texts else None, tokens.text if tokens else None
        template = load_chat_template(home, data.chat_template, knows_date=False, image_token=token)
        if template is not None and for_texts is not None and for_texts.folder is not None:
            # The template's process stays for the conversations, after which it ends.
            turn = template.end_of_turn(for_texts)
            if turn is None:
                log.warning(
                    "The chat template of %s ends an answer with no special token of the tokenizer %s, so a model that learns "
                    "from it does not stop by itself: name a template of this tokenizer (data.chat_template), or a tokenizer "
                    "with its marks.",
                    template.origin,
                    for_texts.name,
                )
    documents = [
        prepared.get(part.name)
        or open_documents(part, for_texts, template, data.max_broken_share, config.model.vocab_size, given, tokens)
        for part in data.sources
    ]
    fraction, several = data.held_out_fraction, len(data.sources) > 1
    whose = {part.name: f"Source {part.name}: " if several else "" for part in data.sources}
    sources = tuple(
        Source(part.name, part.weight, *split(these, fraction, whose[part.name]))
        for part, these in zip(data.sources, documents, strict=True)
    )
    # A small part of a mixture may hold out nothing, but not all parts.
    if fraction and not any(len(source.held_out) for source in sources):
        raise ConfigError(whose[sources[0].name] + _holds_out_nothing(sources[0].documents, fraction))
    tokenizer = _the_tokenizer(data, sources, named)
    if tokenizer is not None:
        _require_vocabulary(config, tokenizer, documents)
    return Data(config, sources, tokenizer, template, turn, images)


def _require_vocabulary(config: Config, tokenizer: Tokenizer, documents: Sequence[Documents]) -> None:
    """Raises ConfigError if a text may have an id without a row in the model. Special tokens such as that of padding need none,
    unless a template writes them."""
    V = config.model.vocab_size
    if (needed := max(tokenizer.text_size, *(these.largest_id + 1 for these in documents))) > V:
        advice = f"set model.vocab_size to at least {needed}"
        if config.train.init_from is not None:
            advice = "give the weights of train.init_from more rows (transformers' resize_token_embeddings)"
        raise ConfigError(
            f"The tokenizer {tokenizer.name} has {needed:,} ids and model.vocab_size={V}: {advice}, or choose the model's own "
            f"tokenizer and template."
        )
    if tokenizer.vocab_size > V:
        log.warning("The tokenizer %s has special tokens from model.vocab_size=%d on, which no text has.", tokenizer.name, V)


def open_documents(
    source: SourceConfig,
    tokenizer: Tokenizer | None,
    template: ChatTemplate | None,
    max_broken_share: float,
    vocab_size: int,
    given: Iterable[Any] | None = None,
    tokens: ImageTokens | None = None,
) -> Documents:
    """Opens the documents of a source that is not prepared. Several files are concatenated. The default tokenizer of texts is
    bytes.

    source=python_stdlib: each module of the running Python's standard library, without tests. Files that are not UTF-8 are
    skipped and counted in the description. All hosts of a run need the same Python, or their texts differ.

    source=chat, preferences: conversations or pairs of them, one per line of the files that match paths; see conversations.py.

    source=files: all files that match paths. A file below the working directory is identified by its relative path, any
    other file by its absolute path. Keep texts below it if the split must not depend on the machine.
    """
    if source.source == DOCUMENTS:
        from jaxllm.data.iterables import given_documents

        if given is None:
            raise ConfigError(NEEDS_DOCUMENTS)
        return given_documents(given, tokenizer, vocab_size)
    if source.source == "megatron":
        return _chain([MegatronDocuments(path, tokenizer) for path in source.paths])
    if source.source == "tokens":
        return _chain([TokenFile(name, vocab_size, tokenizer) for name in sorted(set(map(_name, listed(source.paths))))])
    if source.source in CONVERSATIONS:
        from jaxllm.data.conversations import read_conversations

        assert tokenizer is not None, "refused by the config"
        options: dict[str, Any] = {"pairs": source.source == "preferences", "image_tokens": tokens}
        return read_conversations(source.paths, tokenizer, template, max_broken_share=max_broken_share, **options)
    if source.source == "python_stdlib":
        root = Path(sysconfig.get_paths()["stdlib"])
        texts, skipped = _read_library(root)
        origin = f"standard library of Python {platform.python_version()}"
        where = f"There is no Python source below {root}: use data.source=files with data.paths."
    else:
        texts, skipped = read_texts(source.paths), 0
        origin = ", ".join(source.paths)
        where = f"The files of data.paths ({origin}) hold no text: name files that do."
    if not any(texts.values()):
        raise ConfigError(where)
    return text_documents(
        texts, tokenizer or load_tokenizer("bytes"), origin + (f", {skipped} skipped (not UTF-8)" if skipped else "")
    )


def split(documents: Documents, fraction: float, whose: str = "") -> tuple[Documents, np.ndarray, np.ndarray]:
    """Splits documents: (documents, training numbers, held-out numbers). A single document is cut; if there are too few
    documents, nothing is held out.

    Args:
      whose: prefix of error messages.

    Raises:
      ConfigError: the fraction leaves nothing to train on.
    """
    count = len(documents.lengths)
    if fraction == 0 or (count == 1 and (documents.chosen_tokens is not None or documents.images)):
        return documents, np.arange(count), np.arange(0)
    if count == 1:
        length = int(documents.lengths[0])
        held_out_tokens = round(length * fraction)
        if not held_out_tokens:
            return documents, np.arange(1), np.arange(0)
        if held_out_tokens == length:
            raise ConfigError(whose + _leaves_nothing(length, fraction, "to train on"))
        return SplitDocument(documents, held_out_tokens), np.arange(1), np.arange(1, 2)
    places = np.asarray(documents.keys, np.float64) / 2**64
    held_out = places < fraction
    if held_out.all():
        few_enough = math.floor(places.max() * 1000) / 1000
        raise ConfigError(
            f"{whose}data.held_out_fraction={fraction:g} holds out all {count} documents: lower it to {few_enough:g}."
        )
    return documents, np.flatnonzero(~held_out), np.flatnonzero(held_out)


def _holds_out_nothing(documents: Documents, fraction: float) -> str:
    """Error message for a fraction that holds out no document."""
    count = len(documents.lengths)
    if count == 1:
        return _leaves_nothing(int(documents.lengths[0]), fraction, "to hold out")
    enough = math.ceil((np.asarray(documents.keys, np.float64) / 2**64).min() * 1000) / 1000
    return (
        f"data.held_out_fraction={fraction:g} holds out none of the {count} documents: raise it to "
        f"{enough:g}, give more documents, or set it to 0 to train without held-out text."
    )


def _leaves_nothing(length: int, fraction: float, what_for: str) -> str:
    return (
        f"data.held_out_fraction={fraction:g} of one document of {length} tokens leaves nothing {what_for}: "
        f"choose a value between 0 and 1 that leaves both, or give more text."
    )


def _the_tokenizer(data: DataConfig, sources: Sequence[Source], named: Tokenizer | None) -> Tokenizer | None:
    """The common tokenizer of all sources that record one."""
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
    """The library's sources by relative path, sorted, and the number of skipped files."""
    names = []
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _NOT_LIBRARY]
        relative = Path(folder).relative_to(root)
        names += [(relative / name).as_posix() for name in files if name.endswith(".py")]
    # Some distributions have dangling links here.
    texts, skipped = {}, 0
    for name in sorted(name for name in names if (root / name).is_file()):
        content = (root / name).read_bytes()
        try:
            content.decode()
            texts[name] = content
        except UnicodeDecodeError:
            skipped += 1
    return texts, skipped


def _name(path: str) -> str:
    """The path below the working directory, or else the absolute path."""
    return os.path.abspath(path).removeprefix(os.getcwd().rstrip("/") + "/")


def read_texts(patterns: Sequence[str]) -> dict[str, bytes]:
    """Reads the files that match data.paths by name, sorted. A file that matches two patterns is read once.

    Raises:
      ConfigError: there are too many or too large files, or one cannot be read or is not UTF-8.
    """
    listing, names, size = Listing(MOST_ENTRIES), set(), 0
    try:
        for match in (match for pattern in patterns for match in listing.files(pattern)):
            if (name := _name(match)) not in names:
                names.add(name)
                with suppress(OSError):
                    size += os.path.getsize(name)
            if len(names) > MOST_FILES or size > MOST_BYTES:
                raise RefusedInput(f"it names more than {MOST_FILES:,} files or {MOST_BYTES // GIB} GiB")
    except RefusedInput as error:
        raise ConfigError(f"data.paths is too much to tokenise at the start of each run ({error}): {_ADVICE}.") from None
    texts = {}
    for name in sorted(names):
        try:
            texts[name] = read_bytes(Path(name), MOST_BYTES)
            require_text(name, texts[name], {"text", "messages", "conversations", "prompt"}, _READS)
            texts[name].decode()
        except UnicodeDecodeError as error:
            where = f"{name} is not UTF-8 text (byte {error.start})"
            raise ConfigError(f"{where}: convert it or leave it out of data.paths.") from None
        except (OSError, RefusedInput) as error:
            raise ConfigError(f"{name} cannot be read ({reason_of(error)}): fix it or leave it out of data.paths.") from None
    return texts
