"""Tokenizers: UTF-8 bytes, or a folder with a tokenizer.json.

The end of a document is never ambiguous. Each document gets an EOS token, and text that spells the EOS token stays text
(except for the zero byte, see ByteTokenizer).
"""

import hashlib
import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from jaxllm.config.errors import ConfigError, line_of
from jaxllm.config.hub import folder_of, pinned
from jaxllm.data.tokenizer_growth import require_modest_growth
from jaxllm.untrusted import RefusedInput, parse_json, read_bytes, read_json, reason_of, shown

# --------------------------------------------------------------------------------------------------------- byte tokenizer
# UTF-8 bytes as a tokenizer.json, for programs that read no other: each id is the value of its byte.


def save_byte_tokenizer(folder: Path) -> None:
    """Writes tokenizer.json and tokenizer_config.json, from which transformers gives a text the ids of ByteTokenizer.

    It is a byte-level BPE without merges. U+0000 spells the EOS token, as in ByteTokenizer.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    end = DOCUMENT_END.decode()
    # A BPE names each byte by a printable character. The zero byte is named by itself, so that no letter of a text spells EOS;
    # as the unknown token it is also read where special tokens in a text count as text.
    vocabulary = {character: byte for byte, character in byte_characters().items() if byte} | {end: 0}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=end))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(end, normalized=False)])
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end, "clean_up_tokenization_spaces": False}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(about, indent=2) + "\n")


def byte_characters() -> dict[int, str]:
    """The character that byte-level BPEs name each byte by: itself if it prints, otherwise the next one from U+0100 on (GPT-2's
    bytes_to_unicode, https://github.com/openai/gpt-2/blob/master/src/encoder.py)."""
    printing = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = (byte for byte in range(2**8) if byte not in printing)
    return {byte: chr(byte) for byte in printing} | {byte: chr(2**8 + number) for number, byte in enumerate(others)}


# -------------------------------------------------------------------------------------------------------------- tokenizer

BYTES = "bytes"
DOCUMENT_END = b"\0"
CONFIG, SPECIAL, ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
TEMPLATE_FILE = "chat_template.jinja"
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
FILES = ("tokenizer.json", CONFIG, SPECIAL, ADDED, TEMPLATE_FILE, *PROCESSOR_FILES)
_DECODER, _LONGEST_TOKEN = "added_tokens_decoder", 4096
_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


class Tokenizer(Protocol):
    """Interface of tokenizers. Implementations are thread-safe."""

    name: str
    """Name for messages."""
    sha256: str
    """Hexadecimal digits. Two tokenizers have the same digits if they give every text the same ids."""
    vocab_size: int
    """The largest id + 1, including added tokens."""
    text_size: int
    """The largest id of a document + 1: no document has special tokens that neither begin nor end one."""
    bos_id: int | None
    """The BOS token. The tokenizer's own rule decides whether documents get it."""
    eos_id: int | None
    """The EOS token, which ends a document. None is possible only after load_tokenizer(for_documents=False)."""
    special_tokens: tuple[str, ...]
    """The text forms of the special tokens."""
    folder: Path | None
    """Folder of its files; None for bytes."""

    def encode_documents(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Encodes complete documents with their BOS and EOS tokens: unsigned integers of one type, [tokens] each."""
        ...

    def encode(self, text: str, parse_special: bool = False) -> np.ndarray:
        """Encodes a text that may continue: without EOS, and with BOS if documents get one and the text does not spell it.

        Args:
          parse_special: as in encode_with_starts.
        """
        ...

    def encode_with_starts(self, texts: Sequence[str], parse_special: bool) -> list[tuple[np.ndarray, np.ndarray]]:
        """Encodes texts without BOS and EOS: (ids, starts). Token i begins at character starts[i], int64 [tokens].

        Args:
          parse_special: text that spells a special token, as chat templates write it, becomes that token.
        """
        ...

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Decodes ids to text. Special tokens are left out; bytes that are not UTF-8 become U+FFFD."""
        ...

    def save(self, folder: Path) -> None:
        """Writes files from which load_tokenizer(folder) gives the same ids. Bytes need no files."""
        ...


def load_tokenizer(
    path: str | Path, name: str | None = None, *, for_documents: bool = True, key: str = "--tokenizer"
) -> Tokenizer:
    """Loads the tokenizer of a folder with tokenizer.json (or of that file), of a model of the Hub, or `bytes`.

    Args:
      path: "bytes" for UTF-8 bytes with a zero byte after each document, a folder that `transformers` saved, or ORG/NAME or
        ORG/NAME@REVISION.
      name: display name; default: the folder's name, or ORG/NAME with the commit.
      for_documents: requires an EOS token. Without an EOS token, encode_documents must not be called.
      key: the option or key that names `path`, for error messages.

    Raises:
      ConfigError: the file is missing, is not a tokenizer, or has no token that ends a document, or the Hub does not give it.
    """
    if str(path) == BYTES:
        return ByteTokenizer()
    file = Path(path)
    try:
        if (folder := folder_of(key, str(path), weights=False)) != file:
            file, name = folder, name or pinned(str(path), folder)
        if file.is_dir():
            file = file / "tokenizer.json"
        found = file.is_file()
    except OSError as error:
        raise ConfigError(f"There is no tokenizer {shown(str(file))} ({error.strerror}): name another folder.") from None
    if not found:
        raise ConfigError(f"There is no tokenizer {file}: name a folder with tokenizer.json, or bytes.")
    return JsonTokenizer(file, name or file.resolve().parent.name, for_documents)


def token_dtype(vocab_size: int) -> np.dtype:
    """The smallest little-endian unsigned type that holds all ids below vocab_size."""
    return np.dtype("u1" if vocab_size <= 2**8 else "<u2" if vocab_size <= 2**16 else "<u4")


class ByteTokenizer:
    """UTF-8 bytes. The EOS token is the byte of the character U+0000, so a text that contains U+0000 contains the EOS id: all
    256 ids are bytes, and no id remains that text cannot spell.
    """

    name = BYTES
    sha256 = hashlib.sha256(b"UTF-8 bytes, then a zero byte").hexdigest()
    vocab_size = text_size = 256
    bos_id: int | None = None
    eos_id: int | None = DOCUMENT_END[0]
    special_tokens: tuple[str, ...] = ()
    folder: Path | None = None

    def encode_documents(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode() + DOCUMENT_END, np.uint8) for text in texts]

    def encode(self, text: str, parse_special: bool = False) -> np.ndarray:
        return np.frombuffer(text.encode(), np.uint8)

    def encode_with_starts(self, texts: Sequence[str], parse_special: bool) -> list[tuple[np.ndarray, np.ndarray]]:
        sizes = [[len(character.encode()) for character in text] for text in texts]
        return [(self.encode(text), np.repeat(np.arange(len(text)), size)) for text, size in zip(texts, sizes, strict=True)]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return bytes(np.asarray(ids, np.uint8)).replace(DOCUMENT_END, b"").decode("utf-8", errors="replace")

    def save(self, folder: Path) -> None:
        """Writes nothing: the name is enough to load it."""


class JsonTokenizer:
    """A tokenizer.json, with the tokens that the files beside it name."""

    def __init__(self, file: Path, name: str, for_documents: bool = True):
        self.name = name
        self.folder: Path | None = file.parent
        self._file = file
        self._bare: dict[bool, Any] = {}
        try:
            self._content = read_bytes(file)
        except (OSError, RefusedInput) as error:
            raise ConfigError(f"{file} cannot be read ({reason_of(error)}): fix it or name another tokenizer.") from None
        self._added: list[Any] = []
        try:
            require_modest_growth(parse_json(self._content))
            self._tokenizer = self._from_json(self._content.decode("utf-8"))
        except BaseException as error:
            # The library raises plain Exception, and panics while it normalizes the added tokens.
            if not isinstance(error, Exception) and not _is_panic(error):
                raise
            raise ConfigError(
                f"{file} is not a tokenizer ({shown(line_of(error), 500)}): save it again with the tokenizers library."
            ) from None

        self._config, self._beside = (read_companion(file.parent / name) for name in (CONFIG, SPECIAL))
        before = self._found_in_text
        new = self._add_tokens_beside()
        self.bos_id, bos_name = self._mark("bos")
        self.eos_id, eos_name = self._mark("eos")
        self._adds_bos = self._config.get("add_bos_token") is True
        if (self.eos_id is None or eos_name in new) and for_documents:
            missing = (
                f"its eos_token {shown(repr(eos_name))} is not in the vocabulary" if eos_name else "no file beside it names one"
            )
            raise ConfigError(
                f"{file} has no token that ends a document ({missing}): "
                f'add {{"eos_token": "..."}} with a token of its vocabulary to tokenizer_config.json in the same folder.'
            )
        if self._adds_bos and (self.bos_id is None or bos_name in new):
            missing = f"bos_token {shown(repr(bos_name))} is not in the vocabulary" if bos_name else "there is no bos_token"
            raise ConfigError(f"{file.parent / CONFIG} says add_bos_token but {missing}: name one, or remove add_bos_token.")
        if bos_name in new:
            # No document begins with it, and the ids of texts stay what they were without the file that names it.
            self.bos_id = None
        found = self._found_in_text
        # Added tokens that are not marked as special would still be found in text.
        marks = {mark for mark in (self.bos_id, self.eos_id) if mark is not None}
        flags = {mark: self.added[mark].__getstate__() if mark in self.added else {} for mark in marks}
        self._add([_added(self._token(mark), {**flags[mark], "special": True}) for mark in marks])
        self._tokenizer.encode_special_tokens = True
        special = {token_id: token.content for token_id, token in sorted(self.added.items()) if token.special}
        self.special_tokens = tuple(special.values())

        ids = {*self._tokenizer.get_vocab(with_added_tokens=True).values()}
        self.vocab_size = max(ids, default=-1) + 1
        self.text_size = max(ids - special.keys() | marks | {*self._tokenizer.encode("").ids}, default=-1) + 1
        self._dtype = token_dtype(self.vocab_size)
        if self.text_size > self.vocab_size:
            raise ConfigError(
                f"{file} adds the id {self.text_size - 1} to a text, and its vocabulary has {self.vocab_size:,} ids: fix its "
                f"post_processor, or choose another tokenizer."
            )
        said = {"bos": self.bos_id, "eos": self.eos_id, "add_bos": self._adds_bos}
        said |= {} if found == before else {"added": found}
        self.sha256 = hashlib.sha256(self._content + json.dumps(said).encode()).hexdigest()

    @property
    def added(self) -> dict[int, Any]:
        """By id, the library's AddedToken of each special token and of others that are found before a text is cut."""
        return self._tokenizer.get_added_tokens_decoder()

    @property
    def _found_in_text(self) -> list[Any]:
        """The added tokens that make other ids of a document that spells them."""
        return [(token_id, token.__getstate__()) for token_id, token in sorted(self.added.items()) if not token.special]

    def encode_documents(self, texts: Sequence[str]) -> list[np.ndarray]:
        assert self.eos_id is not None, "loaded with for_documents=False"
        documents = []
        with self._library_errors():
            encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=True)
        for encoding in encodings:
            ids = self._with_bos(encoding.ids)
            if not ids or ids[-1] != self.eos_id:
                ids.append(self.eos_id)
            documents.append(np.array(ids, self._dtype))
        return documents

    def encode(self, text: str, parse_special: bool = False) -> np.ndarray:
        reader = self._without_post_processor(True) if parse_special else self._tokenizer
        with self._library_errors():
            encoding = reader.encode(text, add_special_tokens=False)
            found = ids = encoding.ids
            if not (parse_special and found[:1] == [self.bos_id]):
                ids = self._with_bos(self._tokenizer.post_process(encoding, None, True).ids)
        # The post-processor may have added EOS. A lone EOS id is the BOS token too.
        if len(ids) > 1 and ids[-1] == self.eos_id and ids[-1 - len(found) : -1] == found:
            ids = ids[:-1]
        return np.array(ids, self._dtype)

    def encode_with_starts(self, texts: Sequence[str], parse_special: bool) -> list[tuple[np.ndarray, np.ndarray]]:
        with self._library_errors():
            encodings = self._without_post_processor(parse_special).encode_batch(list(texts), add_special_tokens=False)
        return [(np.array(e.ids, self._dtype), np.array([start for start, _ in e.offsets], np.int64)) for e in encodings]

    def _without_post_processor(self, parse_special: bool) -> Any:
        """The same vocabulary and rules without a post-processor: it adds no tokens and keeps the true position of each token
        (GPT-2's post-processor removes white space from the offsets it reports).
        """
        if parse_special not in self._bare:
            bare = self._from_json(json.dumps({**parse_json(self._content), "post_processor": None}))
            bare.encode_special_tokens = not parse_special
            self._bare[parse_special] = bare
        return self._bare[parse_special]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        with self._library_errors("decode"):
            return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=True)

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "tokenizer.json").write_bytes(self._content)
        # This file names BOS and EOS, so that loading needs no other file.
        marks = {"bos_token": self._token(self.bos_id), "eos_token": self._token(self.eos_id)}
        found = {name: text for name, text in marks.items() if text is not None}
        text = json.dumps({**self._config, **found}, indent=2, ensure_ascii=False)
        (folder / CONFIG).write_text(text + "\n", encoding="utf-8")
        for name in FILES[2:]:
            if (self._file.parent / name).is_file():
                shutil.copyfile(self._file.parent / name, folder / name)

    @contextmanager
    def _library_errors(self, verb: str = "encode") -> Iterator[None]:
        """Turns the library's errors into a ConfigError with one sentence."""
        try:
            yield
        except BaseException as error:
            # The library raises plain Exception.
            if type(error) is not Exception and not _is_panic(error):
                raise
            reason = shown(line_of(error), 500)
            raise ConfigError(
                f"The tokenizer {self.name} cannot {verb} a text ({reason}): fix its tokenizer.json or choose another."
            ) from None

    def _with_bos(self, ids: list[int]) -> list[int]:
        if self._adds_bos and self.bos_id is not None and (not ids or ids[0] != self.bos_id):
            return [self.bos_id, *ids]
        return ids

    def _token(self, token_id: int | None) -> str | None:
        return None if token_id is None else self._tokenizer.id_to_token(token_id)

    def _mark(self, which: str) -> tuple[int | None, str | None]:
        """Id and name of the BOS or EOS token. The id is None if the vocabulary lacks it; both are None if no file names it."""
        folder, name = self._file.parent, f"{which}_token"
        for file, values in ((CONFIG, self._config), (SPECIAL, self._beside)):
            if (text := token_text(values.get(name), name, folder / file)) is not None:
                return self._tokenizer.token_to_id(text), text
        for file in ("config.json", "generation_config.json"):
            token_id = read_companion(folder / file).get(f"{which}_token_id")
            if isinstance(token_id, list) and token_id:
                token_id = token_id[0]
            if isinstance(token_id, int) and not isinstance(token_id, bool) and token_id >= 0:
                token = self._token(token_id) if token_id < 2**32 else None
                return (None, f"id {shown(token_id)}") if token is None else (token_id, token)
        return None, None

    def _from_json(self, content: str) -> Any:
        """Loads the library's tokenizer without truncation and padding, which would cut or pad documents."""
        import tokenizers

        tokenizer = tokenizers.Tokenizer.from_str(content)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.add_tokens(self._added)
        return tokenizer

    def _add(self, tokens: list[Any]) -> None:
        self._added += tokens
        self._tokenizer.add_tokens(tokens)

    def _add_tokens_beside(self) -> set[str]:
        """Adds the tokens that the files beside tokenizer.json name and it lacks, as transformers 5 does: those that have an id
        there (in added_tokens_decoder, or else in added_tokens.json), in its order, then those that have a name alone. Returns
        the texts of the latter that are new to the vocabulary.

        Raises:
          ConfigError: a token has another id here, or a file another form.
        """
        known = {token.content: token for token in self.added.values()}
        has_decoder = _DECODER in self._config
        file = self._file.with_name(CONFIG if has_decoder else ADDED)
        special = _special(self._config, {} if has_decoder else self._beside, file)
        ids = {} if has_decoder else read_companion(file)
        try:
            pairs = [
                (token_id, known.get(text) or _added(text, {"special": text in special})) for text, token_id in ids.items()
            ]
            if has_decoder:
                pairs = [(token_id, _added(said["content"], said)) for token_id, said in self._config[_DECODER].items()]
            pairs = sorted(((int(token_id), token) for token_id, token in pairs), key=lambda pair: pair[0])
            others = {text: _added(text, flags) for text, flags in special.items()}
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{file} has tokens of another form than transformers writes ({shown(line_of(error))}): save it again."
            ) from None
        for _, token in pairs:
            token.special = token.special or token.content in special
        for text in (*known, *(token.content for _, token in pairs)):
            others.pop(text, None)
        new = {text for text in others if self._tokenizer.token_to_id(text) is None}
        self._add([*(token for _, token in pairs), *others.values()])
        for token_id, token in pairs:
            if (found := self._tokenizer.token_to_id(token.content)) != token_id:
                raise ConfigError(
                    f"{file} gives the token {shown(token.content)} the id {token_id}, and with {self._file.name} beside it "
                    f"the id is {found}: correct the file that is wrong, or save the tokenizer again with transformers."
                )
        return new


def _special(config: dict[str, Any], beside: dict[str, Any], file: Path) -> dict[str, dict[str, Any]]:
    """The flags of the special tokens that a tokenizer_config.json and a special_tokens_map.json name, by their texts."""
    more = [said.get("extra_special_tokens") or said.get("additional_special_tokens") for said in (config, beside)]
    named = dict.fromkeys(_NAMES) | {key: one for key, one in (config | beside).items() if key.endswith("_token")}
    for one in more:
        named |= one if isinstance(one, dict) else {}
    found = (*named.values(), *next((one for one in more if isinstance(one, list)), []))
    texts = ((token_text(token, "special token", file), token) for token in found)
    return {text: {**(token if isinstance(token, dict) else {}), "special": True} for text, token in texts if text}


def _added(text: str | None, flags: dict[str, Any]) -> Any:
    from tokenizers import AddedToken

    return AddedToken(text, **{name: flags[name] for name in _FLAGS if name in flags})


def _is_panic(error: BaseException) -> bool:
    # It is not an Exception, and its class cannot be imported.
    return type(error).__name__ == "PanicException"


def read_companion(file: Path) -> dict[str, Any]:
    """Reads the JSON object in a file; an empty dict if there is no file."""
    try:
        if not file.is_file():
            return {}
        values = read_json(file)
    except (OSError, RefusedInput) as error:
        raise ConfigError(f"{file} cannot be used ({reason_of(error)}): fix it or remove it.") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{file} does not hold a JSON object: fix it or remove it.")
    return values


def token_text(token: Any, name: str, file: Path) -> str | None:
    """The text of a special token, which a file gives as a text or as an object with `content`. None if it gives neither."""
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str):
        return None
    if len(text) > _LONGEST_TOKEN:
        raise ConfigError(f"The {shown(name)} in {file} has more than {_LONGEST_TOKEN:,} characters: give a token's text.")
    return text
