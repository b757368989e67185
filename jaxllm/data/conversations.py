"""Conversations as documents: JSON lines, a JSON array or Parquet, a chat template, and which tokens are answers.

Each line, element or row holds one conversation in one of these forms:

    {"messages": [{"role": "system", "content": ...}, {"role": "user", ...}, {"role": "assistant", ...}, ...]}
    {"conversations": [{"from": "human", "value": ...}, {"from": "gpt", ...}, ...]}           (ShareGPT)
    {"prompt": ..., "completion": ...}     two texts, or two lists of messages; only the completion is learnt

A pair of answers of which one is preferred (data.source=preferences) is a document of two conversations, in one of these forms:

    {"prompt": ..., "chosen": ..., "rejected": ...}     texts, or lists of messages
    {"chosen": [...], "rejected": [...]}                whole conversations that begin with the same messages

With a vision tower a conversation has images, in a field `images` or `image` or in its parts, as data/images.py reads them.
Each has a place in the text: a part {"type": "image"}, or PLACEHOLDER.

Beside these, a system prompt (SYSTEM) becomes the first message, and a field of a message may say that its answer is not learnt
(LEARNT). Tools are not supported: such a line is skipped and counted. Other fields of the lines are not read, which one warning
says. The content of a message may be a list of parts that are texts.

With a chat template, two texts become a user's and an assistant's message. Without one they become one text with an EOS token.
Each assistant's message is scored, including the token that ends its turn, and nothing else. The conversation is tokenised as
one text. A token is scored if it begins inside an answer. A token across the beginning of an answer is not scored, because
the prompt already contains its first characters.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.config.errors import ConfigError
from jaxllm.data.chat import ASSISTANT, REASONING, ChatTemplate, ChatTemplateError, ChatTemplateLimit, Message, Span
from jaxllm.data.documents import DocumentsInMemory
from jaxllm.data.images import PLACEHOLDER, BrokenImage, Image, ImageTokens, images_of, with_placeholders
from jaxllm.data.parts import kind_of
from jaxllm.data.records import BROKEN_SHARE, listed, read_objects, require_ends, require_few_broken
from jaxllm.data.tokenizer import Tokenizer
from jaxllm.untrusted import shown

log = logging.getLogger(__name__)

MOST_MESSAGES, MOST_UNUSABLE = 4000, 100_000
"""Limits of messages in a conversation, whose answers are found by rendering it up to each of them, and of lines before the
first that can be used."""
PAIR, PROMPT = ("chosen", "rejected"), ("prompt", "messages", "conversations")
BROKEN_SHOWN = 5
"""Number of unusable lines that a warning names."""
SYSTEM = ("system", "system_prompt")
"""Fields beside the messages: of ShareGPT files as LLaMA-Factory reads them and Bespoke-Stratos has them; of OpenOrca."""
LEARNT = ("weight", "train", "training", "train_on_turn", "loss", "loss_mask", "loss_weight", "loss_scale", "trainable")
"""Fields of a message whose 0 or 1, or false or true, says whether its answer is learnt. weight: OpenAI's and Mistral's formats
for fine-tuning. train, training, train_on_turn: Axolotl. loss, loss_scale: ms-swift. The others: the same under other names."""
MASKED, MARKED_IN_PART = "masked", "train_detail"
"""Fields of a message of torchtune, which says the opposite, and of Axolotl, which marks parts of an answer."""
TOOLS, CALLS = ("tools", "functions"), ("tool_calls", "function_call")
OFF = (None, False, "", [], {}, "[]")
MOST_FIELDS = 20
"""The largest number of unread fields that the warning counts."""
IMAGES = ("images", "image")
_ROLES = {"human": "user", "gpt": ASSISTANT, "chatgpt": ASSISTANT}
"""ShareGPT's names of the roles, in any case. Other names stay."""
# Conversations tokenised in one batch. The tokenizer uses all cores, and its results take much memory.
_TOGETHER = 1000


class _BrokenLine(Exception):
    """The reason why a line cannot be used."""


class _Broken(list[str]):
    """The first lines that cannot be used, with the reasons, the number of all, and the bytes of files that are cut."""

    total, lost = 0, 0
    cut: str | None = None

    def add(self, line: str, lost: int = 0) -> None:
        self.total, self.lost = self.total + 1, self.lost + lost
        self.cut = self.cut or (line if lost else None)
        if len(self) < BROKEN_SHOWN:
            self.append(line)


@dataclass(frozen=True)
class _Text:
    """The text of a conversation, with the spans of its answers."""

    key: int
    text: str
    answers: Sequence[Span]
    unread: Sequence[tuple[str, Any]] = ()
    """What of its messages is not in the text, and its value."""
    images: Sequence[Image] = ()
    """In order of their places."""


def read_conversations(
    patterns: Sequence[str],
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    *,
    pairs: bool = False,
    max_broken_share: float = BROKEN_SHARE,
    image_tokens: ImageTokens | None = None,
) -> DocumentsInMemory:
    """Reads the conversations of JSON lines files (.jsonl, .ndjson, .json, also .gz and .zst), in order of their sorted paths.
    Unusable lines are skipped. The description counts them, and a warning names the first ones.

    Keys are hashes of the messages, so the held-out split does not depend on files or tokenizer.

    Args:
      template: None if the tokenizer has none. Then only prompts and completions that are texts can be read.
      pairs: each line holds two answers of which one is preferred, and gives a document with both.
      max_broken_share: data.max_broken_share.
      image_tokens: those of a model with a vision tower; None: conversations have no images.

    Raises:
      ConfigError: a file cannot be read or is not JSON lines, messages have no template, or too few lines are usable.
    """
    files = _files(patterns)
    broken = _Broken()
    unread: dict[str, tuple[int, Any]] = {}
    read = partial(_read_with_images, image_tokens) if image_tokens else _read_pair if pairs else lambda *a: (_read(*a[:3]),)
    conversations = _conversations(files, tokenizer, template, broken, unread, read, IMAGES if image_tokens else ())
    keys, ids, scored, firsts, images = [], [], [], [], []
    try:
        while together := list(islice(conversations, _TOGETHER)):
            tokenized = _tokenize([text for _, texts in together for text in texts], tokenizer, template is not None)
            for where, texts in together:
                tokens, answers = zip(*islice(tokenized, len(texts)), strict=True)
                if image_tokens is not None:
                    if (places := int((tokens[0] == image_tokens.id).sum())) != len(texts[0].images):
                        broken.add(f"{where}: it has {len(texts[0].images)} images and {places} places for them in its text")
                        continue
                    learnt = answers[0] & (tokens[0] != image_tokens.id)
                    (tokens, answers) = zip(image_tokens.expanded(tokens[0], learnt), strict=True)
                    images.append(texts[0].images)
                if pairs and not all(each[1:].any() for each in answers):
                    broken.add(f"{where}: an answer has no token of its own")
                    continue
                keys.append(texts[0].key if len(texts) == 1 else _key([text.key for text in texts]))
                ids.append(np.concatenate(tokens))
                scored.append(np.concatenate(answers))
                firsts.append(len(tokens[0]))
    finally:
        if template is not None:
            template.close()
    if not ids:
        reason = broken[0] if broken else "they are empty"
        raise ConfigError(f"No line of {', '.join(patterns)} can be used ({reason}): give conversations as JSON lines.")
    total = broken.total + len(ids)
    if broken.cut:
        size = sum(map(os.path.getsize, files))
        require_ends(", ".join(patterns), broken.lost, size, broken.cut, max_broken_share, "data.max_broken_share")
    if broken:
        require_few_broken(", ".join(patterns), broken.total, total, broken[0], max_broken_share, "data.max_broken_share")
    for line in broken:
        log.warning("Skipped %s", line)
    if unread:
        counted = (f"{name} ({count:,} of them, such as {shown(example, 40)})" for name, (count, example) in unread.items())
        log.warning("Not read of the conversations of %s: %s", ", ".join(patterns), ", ".join(counted))
    num_scored = sum(int(these.sum()) for these in scored)
    share = num_scored / sum(map(len, ids))
    skipped = f"; {broken.total:,} of {total:,} lines skipped, the first {broken[0]}" if broken else ""
    description = f"{', '.join(patterns)} (answers are {share:.0%} of the tokens{skipped})"
    return DocumentsInMemory(
        *(ids, np.array(keys, np.uint64), tokenizer, description, scored, np.array(firsts, np.int64) if pairs else None),
        images or None,
    )


def _files(patterns: Sequence[str]) -> list[str]:
    for path in (found := listed(patterns)):
        if kind_of(path) not in ("lines", "parquet"):
            raise ConfigError(
                f"{path} is neither .jsonl nor .json nor .parquet: conversations must be JSON lines or such a file."
            )
    return found


def _conversations(
    files: Sequence[str],
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    broken: _Broken,
    unread: dict[str, tuple[int, Any]],
    read: Callable[..., Texts],
    image_fields: Sequence[str],
) -> Iterator[tuple[str, Texts]]:
    """Reads the usable conversations of the files, in order, with FILE:LINE. Adds that and the reason to `broken` for the
    others, and to `unread` each field that is not read: how often, and its first value."""
    usable = 0
    for path in files:
        for line, record, reason, lost in read_objects(path):
            try:
                if record is None:
                    raise _BrokenLine(reason)
                yield f"{path}:{line}", (texts := read(record, tokenizer, template, Path(path).parent))
                usable += 1
                beside = {name: record[name] for name in record.keys() - _fields(record) - {*image_fields}}
                for name, value in (beside | {name: value for text in reversed(texts) for name, value in text.unread}).items():
                    if name in unread or len(unread) < MOST_FIELDS:
                        count, example = unread.get(name, (0, value))
                        unread[name] = count + 1, example
            except (_BrokenLine, ChatTemplateError) as error:
                broken.add(f"{path}:{line}: {str(error).rstrip('.')}", lost)
            except RecursionError:
                broken.add(f"{path}:{line}: it nests too deeply")
            except ChatTemplateLimit as error:
                raise ConfigError(f"{path}:{line}: {error}") from None
            if not usable and broken.total > MOST_UNUSABLE:
                return


Texts = tuple[_Text, ...]
"""Those of one document: a conversation, or one with the chosen and one with the rejected answer."""


def _fields(record: Mapping[str, Any]) -> set[str]:
    """The fields of a line that are read."""
    if set(PAIR) <= record.keys():
        return {*PAIR, *islice((name for name in PROMPT if name in record), 1), *SYSTEM, *TOOLS}
    form = next((name for name in PROMPT[1:] if name in record), None)
    return {*(["prompt", "completion"] if form is None else [form]), *SYSTEM, *TOOLS}


def _read_with_images(
    tokens: ImageTokens, record: Mapping[str, Any], tokenizer: Tokenizer, template: ChatTemplate | None, folder: Path
) -> Texts:
    """Raises as `_read` does."""
    beside = next((record[name] for name in IMAGES if record.get(name) not in OFF), [])
    parts = {name: with_placeholders(record[name]) for name in (*PROMPT, "completion") if name in record}
    record, own = {**record, **{name: text for name, (text, _) in parts.items()}}, [i for _, its in parts.values() for i in its]
    if (own and beside) or all(record.get(name) not in OFF for name in IMAGES):
        raise _BrokenLine("it has images in two places: in its messages, images or image")
    try:
        images = images_of(own or beside, folder)
    except BrokenImage as error:
        raise _BrokenLine(str(error)) from None
    found = _read(record, tokenizer, template, tokens)
    names = [image if isinstance(image, bytes) else os.path.relpath(image, folder).encode() for image in images]
    hashes = [hashlib.blake2b(name, digest_size=8).hexdigest() for name in names]
    return (replace(found, images=images, key=_key([found.key, *hashes]) if images else found.key),)


def _read_pair(record: Mapping[str, Any], tokenizer: Tokenizer, template: ChatTemplate | None, folder: Path) -> Texts:
    """Raises as `_read` does."""
    if missing := [name for name in PAIR if name not in record]:
        raise _BrokenLine(f"it has no {missing[0]} answer")
    if wrong := [name for name in PAIR if not isinstance(record[name], str | list | dict)]:
        raise _BrokenLine(f"its {wrong[0]} answer is {shown(record[wrong[0]], 40)}, neither a text nor messages")
    # LLaMA-Factory's answers are one message, after the conversations.
    answers: list[Any] = [[record[name]] if isinstance(record[name], dict) else record[name] for name in PAIR]
    if answers[0] == answers[1]:
        raise _BrokenLine("the chosen and the rejected answer are the same")
    prompt, unread = next((record[name] for name in PROMPT if name in record), None), []
    if all(isinstance(answer, list) for answer in answers):
        same = sum(1 for _ in takewhile(lambda both: both[0] == both[1], zip(*answers, strict=False)))
        if isinstance(prompt, list) and answers[0][: len(prompt)] == answers[1][: len(prompt)] == prompt:
            answers = [answer[len(prompt) :] for answer in answers]
        elif isinstance(prompt, str) and not same:
            prompt = [{"role": "user", "content": prompt}]
        elif not isinstance(prompt, list):
            # Whole conversations; a prompt that is a text only repeats a message of them.
            if not same:
                raise _BrokenLine("its answers do not begin with the same message, and it has no prompt")
            asked = [message["content"].strip() for message in _messages(answers[0][:same], "chosen")]
            if prompt is not None and str(prompt).strip() not in asked:
                unread = [("prompt that is none of the messages of its answers", prompt)]
            prompt, answers = answers[0][:same], [answer[same:] for answer in answers]
    elif isinstance(prompt, list):
        answers = [[{"role": ASSISTANT, "content": answer}] if isinstance(answer, str) else answer for answer in answers]
    elif prompt is None:
        raise _BrokenLine("it has no prompt, and its answers are not lists of messages")
    beside = {name: record[name] for name in (*SYSTEM, *TOOLS) if name in record}
    chosen, rejected = (_read({**beside, "prompt": prompt, "completion": answer}, tokenizer, template) for answer in answers)
    return chosen, replace(rejected, unread=[*rejected.unread, *unread])


def _read(
    record: Mapping[str, Any], tokenizer: Tokenizer, template: ChatTemplate | None, tokens: ImageTokens | None = None
) -> _Text:
    """Raises _BrokenLine or ChatTemplateError if this record is unusable, and ConfigError if no record can be used."""
    given, messages = 0, []
    if any(record.get(name) not in OFF for name in TOOLS):
        raise _BrokenLine("it offers tools, which are not supported")
    system = _system(record)
    if list_of := next((name for name in ("messages", "conversations") if name in record), None):
        messages = _messages(record[list_of], list_of)
    elif "prompt" in record and "completion" in record:
        prompt, completion = record["prompt"], record["completion"]
        if isinstance(prompt, str) and isinstance(completion, str):
            if template is None and system is not None:
                raise _BrokenLine("it has a system prompt, which needs a chat template")
            if template is None:
                return _plain(prompt, completion)
            messages = [{"role": "user", "content": prompt}, {"role": ASSISTANT, "content": completion}]
        else:
            before = _messages(prompt, "prompt")
            given, messages = len(before), before + _messages(completion, "completion")
    else:
        raise _BrokenLine("it has neither messages nor conversations nor prompt and completion")
    if template is None:
        raise ConfigError(
            f"The tokenizer {tokenizer.name} has no chat template, which messages need: set data.chat_template to a Jinja file."
        )
    if system is not None and messages[0]["role"] == "system":
        if messages[0]["content"] != system:
            raise _BrokenLine("it has a system prompt among its messages and another one beside them")
    elif system is not None:
        given, messages = given + 1, [{"role": "system", "content": system}, *messages]
    return _rendered(messages, given, tokenizer.special_tokens, template, tokens)


def _rendered(
    messages: Sequence[Message],
    given: int,
    special_tokens: Sequence[str],
    template: ChatTemplate,
    tokens: ImageTokens | None,
) -> _Text:
    """Raises as `_read` does."""
    wanted, of_images = _wanted(messages, given), (PLACEHOLDER, tokens.text) if tokens else ()
    refused = [token for token in special_tokens if token not in of_images]
    for number, message in enumerate(messages, start=1):
        # Check the other fields too: a template may write any of them.
        for text in _strings(message):
            _check_text(text, f"message {number}", refused)
        if number - 1 in wanted and not message["content"].strip():
            raise _BrokenLine(f"message {number} is an empty answer")
    if tokens is not None:
        messages = [{**message, "content": tokens.in_text(message["content"])} for message in messages]
    text, answers = template.render_answers(messages, wanted, special_tokens)
    template.require_written(messages, text)
    return _Text(_key(messages), text, answers, [*_not_written(messages, wanted, text, template)])


def _not_written(
    messages: Sequence[Message], wanted: Sequence[int], text: str, template: ChatTemplate
) -> Iterator[tuple[str, Any]]:
    for message in messages:
        for name in message.keys() - {"role", "content", *REASONING} - template.words:
            if message[name] is not None:
                yield f"{name} of a message", message[name]
    for answer in (messages[number] for number in wanted):
        thought = re.search(r"<think>(.*?)</think>", answer["content"], re.DOTALL)
        for reasoning in (answer.get(name) for name in REASONING) if thought is None else (thought[1],):
            if isinstance(reasoning, str) and reasoning.strip() not in text:
                yield "reasoning of answers, which the chat template leaves out", reasoning
                break


def _system(record: Mapping[str, Any]) -> str | None:
    """The system prompt beside the messages of a line; None if it has none."""
    given = {name: record[name] for name in SYSTEM if record.get(name) is not None}
    if wrong := [name for name, text in given.items() if not isinstance(text, str)]:
        raise _BrokenLine(f"its {wrong[0]} is not a text")
    texts = {text for text in given.values() if text.strip()}
    if len(texts) > 1:
        raise _BrokenLine("it has two system prompts")
    return next(iter(texts), None)


def _wanted(messages: Sequence[Message], given: int) -> list[int]:
    """Numbers of the messages that are learnt. The first `given` ones are the prompt."""
    answers = [number for number in range(given, len(messages)) if messages[number]["role"] == ASSISTANT]
    if not answers:
        raise _BrokenLine("no message of an assistant, so there is nothing to learn")
    asked = [_is_learnt(message, number) for number, message in enumerate(messages, start=1)]
    if wrong := [number for number, is_asked in enumerate(asked) if is_asked and number not in answers]:
        raise _BrokenLine(f"message {wrong[0] + 1} asks to be learnt, and only answers of an assistant are")
    wanted = [number for number in answers if asked[number] is not False]
    if not wanted:
        raise _BrokenLine("each answer is excluded, so there is nothing to learn")
    return wanted


def _is_learnt(message: Any, number: int) -> bool | None:
    """Whether a message says that it is learnt or not; None if it says nothing. The field is taken out of the message."""
    if message.pop(MARKED_IN_PART, None):
        raise _BrokenLine(f"message {number} has {MARKED_IN_PART}, and answers are learnt whole or not at all")
    said = {name: value for name in (*LEARNT, MASKED) if (value := message.pop(name, None)) is not None}
    for name, value in said.items():
        if not isinstance(value, int | float) or value not in (0, 1):
            raise _BrokenLine(f"message {number} has {name}={shown(value)}, which is neither 0 nor 1")
    learnt = {bool(value) is not (name == MASKED) for name, value in said.items()}
    if len(learnt) > 1:
        raise _BrokenLine(f"message {number} says both that it is learnt and that it is not ({', '.join(said)})")
    return next(iter(learnt), None)


def _plain(prompt: str, completion: str) -> _Text:
    for name, text in (("prompt", prompt), ("completion", completion)):
        _check_text(text, name, ())
    if not completion.strip():
        raise _BrokenLine("the completion is empty")
    text = prompt + completion
    return _Text(_key([prompt, completion]), text, [(len(prompt), len(text))])


def _messages(value: Any, where: str) -> list[Message]:
    """Converts messages to role and content, from either naming scheme."""
    if not isinstance(value, list) or not value:
        raise _BrokenLine(f"{where} is not a list of messages")
    if len(value) > MOST_MESSAGES:
        raise _BrokenLine(f"{where} has more than {MOST_MESSAGES:,} messages")
    messages = []
    for number, message in enumerate(value, start=1):
        if not isinstance(message, dict):
            raise _BrokenLine(f"message {number} of {where} is not an object")
        if "from" in message and "value" in message:
            rest = {name: content for name, content in message.items() if name not in ("from", "value")}
            message = {"role": _ROLES.get(str(message["from"]).lower(), message["from"]), "content": message["value"], **rest}
        if called := next((name for name in CALLS if message.get(name) or message.get("role") == name), None):
            raise _BrokenLine(f"message {number} of {where} has {called}, and tools are not supported")
        message = {**message, "content": _text_of(message.get("content"), f"message {number} of {where}")}
        for name in ("role", "content"):
            if not isinstance(message.get(name), str):
                raise _BrokenLine(f"message {number} of {where} has no text as its {name}")
        messages.append(message)
    return messages


def _text_of(content: Any, where: str) -> Any:
    """Parts of a content that are texts, joined. Anything but a list of parts stays."""
    if not isinstance(content, list) or not content:
        return content
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, dict) else part
            raise _BrokenLine(f"{where} has a part {shown(kind, 40)}, and only parts of type text are read")
        texts.append(text)
    return "".join(texts)


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in (*value, *value.values()) if isinstance(value, dict) else value:
            yield from _strings(inner)


def _check_text(text: str, where: str, special_tokens: Sequence[str]) -> None:
    try:
        # JSON can escape half of a surrogate pair, which no text encoding can represent.
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise _BrokenLine(f"{where} holds half a surrogate pair") from None
    # The tokenizer would turn it into that token, for example an end of turn in the middle of a turn.
    if spelled := next((token for token in special_tokens if token in text), None):
        raise _BrokenLine(f"{where} spells the special token {spelled}")


def _key(messages: Sequence[Any]) -> int:
    text = json.dumps(messages, sort_keys=True, ensure_ascii=True, default=str)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def _tokenize(texts: Sequence[_Text], tokenizer: Tokenizer, rendered: bool) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Tokenises each text: (ids, which of them are scored). What a template has rendered spells special tokens; otherwise BOS
    and EOS are added around the tokens."""
    encoded = tokenizer.encode_with_starts([text.text for text in texts], parse_special=rendered)
    for text, (ids, starts) in zip(texts, encoded, strict=True):
        scored = np.zeros(len(ids), bool)
        for start, stop in text.answers:
            scored |= (start <= starts) & (starts < stop)
        yield (ids, scored) if rendered else _with_marks(text.text, ids, scored, tokenizer)


def _with_marks(text: str, ids: np.ndarray, scored: np.ndarray, tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """Adds the BOS and EOS tokens that the tokenizer gives a document. EOS is scored."""
    (document,) = tokenizer.encode_documents([text])
    before = next(n for n in range(len(document) - len(ids) + 1) if np.array_equal(document[n : n + len(ids)], ids))
    marked = np.ones(len(document), bool)
    marked[:before] = False
    marked[before : before + len(ids)] = scored
    return document, marked
