"""Chat templates: how a conversation becomes text, and which part of that text is the model's answer.

A template is a Jinja program that comes with a model. It turns messages, [{"role": "user", "content": "..."}, ...], into the
text that the model was trained on. It is foreign code, so it runs in Jinja's sandbox, in a process with limits of its own.

An answer is what the model has to write after the generation prompt, up to the token that ends its turn (render_answers).
"""

import logging
import re
from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from jaxllm.config.errors import ConfigError
from jaxllm.data.template_process import (
    FAILED,
    FIXED_DATE,
    NOT_JINJA,
    RENDERED,
    TemplateProcess,
    TemplateStopped,
    Wish,
    needs_date,
)
from jaxllm.data.tokenizer import TEMPLATE_FILE, Tokenizer, read_companion, token_text
from jaxllm.untrusted import RECIPE_BYTES, RefusedInput, read_text, reason_of, shown

log = logging.getLogger(__name__)

ASSISTANT = "assistant"
Message = Mapping[str, Any]
Span = tuple[int, int]
"""Characters [start, stop) of a text."""

# Code points that Unicode reserves for internal use of a program; no text may contain them.
_BEGIN, _END, _CONTENT = "\ufdd0", "\ufdd1", "\ufdd2"
_NO_MARKS = ("", "")
_LINE_ENDS = re.compile("\n+")
REASONING = ("reasoning_content", "thinking", "reasoning")
_LONGEST_REASON = 500
_SPECIAL_TOKENS = 1000
"""Names of special tokens in the files of a tokenizer. Real ones have ten."""


class ChatTemplateError(ConfigError):
    """The template does not suit these messages. The error message is one sentence that says what to change."""


class ChatTemplateLimit(ConfigError):
    """The template needs more time or memory than a text is worth. The next conversation would wait as long."""


@dataclass(frozen=True)
class ChatTemplate:
    source: str
    """The Jinja program."""
    origin: str
    """Path of the template, for error messages."""
    special_tokens: Mapping[str, str]
    """Special tokens by the names that templates use: bos_token, eos_token and so on."""
    knows_date: bool = True
    """Whether the template may ask for today's date. False for training, where the text must be the same tomorrow: templates
    then use a date of their own, or get FIXED_DATE."""
    image_token: str | None = None
    """Text of the token that stands for an image. A template that reads the types of a content's parts gets it as a part."""
    _written: set[tuple[Any, ...]] = field(default_factory=set, init=False, repr=False, compare=False)

    def render(
        self, messages: Sequence[Message], add_generation_prompt: bool = False, marks: tuple[str, str] = _NO_MARKS
    ) -> str:
        """Renders a conversation to text, with special tokens spelled out.

        Args:
          messages: objects with `role` and `content`, and any other keys that the template reads.
          add_generation_prompt: end with the text that comes before an assistant's answer.
          marks: texts to write before and after the content of each {% generation %} block.

        Raises:
          ChatTemplateError: the template refuses these messages.
          ChatTemplateLimit: it needs too much time or memory.
        """
        (text,) = self._texts(messages, [(len(messages), add_generation_prompt, marks)])
        if isinstance(text, ChatTemplateError):
            raise text
        return text

    def render_answers(
        self, messages: Sequence[Message], wanted: Collection[int], special_tokens: Sequence[str]
    ) -> tuple[str, list[Span]]:
        """Renders a complete conversation and finds the wanted assistant messages in it, in order. Each span includes the token
        that ends the turn.

        {% generation %} marks give the answers where a template has them, as in transformers. Elsewhere a span begins after the
        generation prompt, and each wanted message costs two renderings, of the conversations that end before and after it. If
        the complete text does not continue these, or the template refuses one (Qwen 3 drops what it writes before the last
        answer, others read the first message), the answer is the part of the complete text that depends on that message.

        Args:
          wanted: numbers of assistant messages, from 0.
          special_tokens: their text forms. The last one in an answer ends the turn if only white space follows it.

        Raises as `render` does, and ChatTemplateError if the position of an answer is unclear.
        """
        special = re.compile(_any_of(special_tokens))
        text = self.render(messages)
        if re.search(r"{%-?\+?\s*generation\b", self.source) and (marked := self._marked(messages, wanted, text, special)):
            return text, marked
        numbers = sorted(wanted)
        asking = max((n + 1 for n, m in enumerate(messages) if m.get("role") != ASSISTANT), default=len(messages))
        wishes: list[Wish] = [(asking, False, _NO_MARKS), (asking, True, _NO_MARKS)]
        for number in numbers:
            wishes.append((number, True, _NO_MARKS))
            if number + 1 < len(messages):
                wishes.append((number + 1, False, _NO_MARKS))
        # One after the other as they are needed: together they may not fit into memory.
        texts = (each if isinstance(each, str) else None for each in self._texts(messages, wishes))
        before, asked = next(texts), next(texts)
        head = asked.removeprefix(before) if before and asked and asked.startswith(before) else ""
        spans: list[Span] = []
        for number in numbers:
            prompt = next(texts)
            whole = next(texts) if number + 1 < len(messages) else text
            # Without a generation prompt the head of the turn comes with the answer.
            span = None if asked == before else _continued(text, prompt, whole, head, special)
            start, stop = span or self._behind_head(messages, number, text, head, special)
            if not special.sub("", text[start:stop]).strip():
                raise self._refusal(f"does not write message {number + 1}")
            spans.append((start, stop))
        return text, spans

    @cached_property
    def words(self) -> frozenset[str]:
        """The words of the source, with the names of all fields that it reads."""
        return frozenset(re.findall(r"\w+", self.source))

    def require_written(self, messages: Sequence[Message], text: str) -> None:
        """Raises ChatTemplateError if a message is not in the text of a complete conversation: its content is not, and another
        content would give the same text. The first message of a kind is always tried."""
        for number, message in enumerate(messages):
            content, kind = message["content"].strip(), (message["role"], number == 0, number + 1 == len(messages))
            if not content or (content in text and kind in self._written):
                continue
            same = False
            with suppress(ChatTemplateError):
                other = {**message, "content": message["content"] + _BEGIN}
                same = self.render([*messages[:number], other, *messages[number + 1 :]]) == text
            if same:
                raise self._refusal(f"does not write message {number + 1} (of {shown(str(message['role']), 40)})")
            self._written.add(kind)

    def end_of_turn(self, tokenizer: Tokenizer) -> int | None:
        """Special token that ends an answer. None if the template has none, or if it cannot be determined. Raises
        ChatTemplateLimit if the template needs too much time or memory.
        """
        messages = [{"role": "user", "content": "a"}, {"role": ASSISTANT, "content": _CONTENT}]
        try:
            text, [(start, stop)] = self.render_answers(messages, {1}, tokenizer.special_tokens)
        except ChatTemplateError:
            return None
        # Some write another token behind it at the end of the conversation, on a line of its own.
        ended = re.match(rf"\s*?((?:{_any_of(tokenizer.special_tokens)})+)", text[start:stop].rpartition(_CONTENT)[2])
        ((ids, _),) = tokenizer.encode_with_starts([ended[1] if ended else ""], parse_special=True)
        return int(ids[-1]) if len(ids) else None

    def close(self) -> None:
        """Ends the process that renders. A later rendering starts it again."""
        if "_process" in self.__dict__:
            self._process.close()

    def _texts(self, messages: Sequence[Message], wishes: Sequence[Wish]) -> Iterator[str | ChatTemplateError]:
        """Texts of beginnings of a conversation, or why one has none. Raises ChatTemplateLimit where the text would be."""
        try:
            for kind, text in self._process.render([self._given(message) for message in messages], wishes):
                if kind == RENDERED:
                    yield text
                else:
                    verb = "fails on" if kind == FAILED else "refuses"
                    yield self._refusal(f"{verb} the conversation ({shown(text, _LONGEST_REASON)})")
        except TemplateStopped as stop:
            raise self._limit(stop) from None
        except RecursionError:
            raise self._refusal("is not tried on a conversation that nests too deeply") from None

    def _given(self, message: Message) -> Message:
        """A message as the template takes it."""
        message = _with_reasoning(message)
        if self.image_token is None or "type" not in self.words:
            return message
        first, *others = message["content"].split(self.image_token)
        parts = [{"type": "text", "text": first}]
        for text in others:
            # Templates write the line end behind an image themselves.
            parts += [{"type": "image"}, {"type": "text", "text": text.removeprefix("\n")}]
        return {**message, "content": [part for part in parts if part.get("text") != ""]}

    def _changed(self, messages: Sequence[Message], number: int, text: str, special: re.Pattern[str]) -> Span:
        """The part of the complete text that changes if a message has another content and no other field, with the token that
        ends its turn."""
        if _BEGIN in text:
            raise self._refusal("finds a character in the conversation that no text may contain")
        changed = self.render(
            [*messages[:number], {"role": messages[number]["role"], "content": _BEGIN}, *messages[number + 1 :]]
        )
        if changed.count(_BEGIN) != 1:
            raise self._refusal(
                f"does not write message {number + 1} exactly once, and has no {{% generation %}} mark for each answer"
            )
        start = _same(text, changed)
        return start, _closing_token(special, text, start, len(text) - _same(text[start:][::-1], changed[start:][::-1]))

    def _behind_head(self, messages: Sequence[Message], number: int, text: str, head: str, special: re.Pattern[str]) -> Span:
        """The answer as what changes with its message, after `head`, which the template adds to ask for an answer."""
        start, stop = self._changed(messages, number, text, special)
        after = 0
        for before in reversed(range(number)):
            with suppress(ChatTemplateError):
                after = self._changed(messages, before, text, re.compile("(?!)"))[1]
                break
        if start < after:
            raise self._refusal(
                f"writes message {number + 1} in two places, and has no {{% generation %}} mark for each answer"
            )
        # A thinking model's head goes further than what its earlier answers begin with. The nearest beginning of it counts.
        places = {len(head), *(found.end() for mark in (special, _LINE_ENDS) for found in mark.finditer(head))}
        ends = sorted(place for place in places if head[:place].strip())
        if not ends:
            # A space belongs to the first token of the answer.
            return start - text[:start].endswith(" "), stop
        # Some write two answers in a row as one turn.
        at, end = max((text.rfind(head[:end], after, start), end) for end in ends)
        return at + end if at >= 0 else start, stop

    def _marked(
        self, messages: Sequence[Message], wanted: Collection[int], text: str, special: re.Pattern[str]
    ) -> list[Span] | None:
        """Finds the wanted answers by the template's {% generation %} marks; None if these are not one for each answer."""
        if _BEGIN in text or _END in text:
            return None
        marked = self.render(messages, marks=(_BEGIN, _END))
        found = list(re.finditer(f"{_BEGIN}([^{_BEGIN}{_END}]*){_END}", marked))
        answers = [number for number, message in enumerate(messages) if message.get("role") == ASSISTANT]
        if len(found) != len(answers) or len(marked) != len(text) + 2 * len(found):
            return None
        spans = [(each.start() - 2 * n, each.end() - 2 * n - 2) for n, each in enumerate(found)]
        of_answers = zip(answers, spans, strict=True)
        return [(start, _closing_token(special, text, start, stop)) for number, (start, stop) in of_answers if number in wanted]

    def _refusal(self, what: str) -> ChatTemplateError:
        return ChatTemplateError(f"The chat template of {self.origin} {what}: change the messages or name another template.")

    @cached_property
    def _process(self) -> TemplateProcess:
        process = TemplateProcess(self.source, self.special_tokens, self.knows_date)
        try:
            kind, reason = process.compile()
        except TemplateStopped as stop:
            raise self._limit(stop) from None
        if kind == RENDERED:
            return process
        process.close()
        verb = "is not Jinja" if kind == NOT_JINJA else "cannot be compiled"
        raise ConfigError(
            f"The chat template of {self.origin} {verb} ({shown(reason, _LONGEST_REASON)}): fix it, or name another template."
        )

    def _limit(self, stop: TemplateStopped) -> ChatTemplateLimit:
        return ChatTemplateLimit(f"The chat template of {self.origin} {stop}: fix it, or name another template.")


def load_chat_template(
    folder: str | Path | None, file: str | Path | None = None, *, knows_date: bool = True, image_token: str | None = None
) -> ChatTemplate | None:
    """Loads the chat template of a model or tokenizer folder: chat_template.jinja, or chat_template in tokenizer_config.json
    (the one named default if there are several). Returns None if the folder has none.

    Args:
      folder: None for a tokenizer without a folder, which has no special tokens either.
      file: a Jinja file that replaces the folder's template.
      knows_date, image_token: as in ChatTemplate.

    Raises:
      ConfigError: the file is missing, cannot be read, or is not a template.
    """
    if file is not None:
        found = _read_template(Path(file))
    else:
        found = None if folder is None else _template_in(Path(folder))
    if found is None:
        return None
    source, origin = found
    special_tokens = {} if folder is None else _special_tokens(Path(folder))
    template = ChatTemplate(source, str(origin), special_tokens, knows_date, image_token)
    if not knows_date and needs_date(source):
        log.warning("The chat template of %s writes today's date. To stay the same it gets %s.", origin, FIXED_DATE.date())
    # Refuses a broken template here, not at the first conversation.
    _ = template._process
    return template


def _template_in(folder: Path) -> tuple[str, Path] | None:
    """The template of a folder, and the file that holds it."""
    if (folder / TEMPLATE_FILE).is_file():
        return _read_template(folder / TEMPLATE_FILE)
    origin = folder / "tokenizer_config.json"
    found = read_companion(origin).get("chat_template")
    if isinstance(found, list):
        named = {str(entry.get("name")): entry.get("template") for entry in found if isinstance(entry, dict)}
        if "default" not in named:
            raise ConfigError(
                f"{origin} has no chat template named default, but {shown(', '.join(named)) or 'an empty list'}: save the one "
                f"you mean as {TEMPLATE_FILE} beside it."
            )
        found = named["default"]
    if found is None:
        return None
    if not isinstance(found, str):
        raise ConfigError(f"The chat_template in {origin} is not text: fix it, or save one as {TEMPLATE_FILE} beside it.")
    if len(found) > RECIPE_BYTES:
        raise ConfigError(f"The chat_template in {origin} is larger than {RECIPE_BYTES // 2**20} MiB: name another template.")
    return found, origin


def _read_template(file: Path) -> tuple[str, Path]:
    try:
        text = read_text(file, RECIPE_BYTES)
    except (OSError, RefusedInput) as error:
        raise ConfigError(f"The chat template {file} cannot be read ({reason_of(error)}): name another file.") from None
    return text.replace("\r\n", "\n").replace("\r", "\n"), file


def _special_tokens(folder: Path) -> dict[str, str]:
    """Text of each NAME_token of the folder."""
    tokens = {}
    for file in (folder / "special_tokens_map.json", folder / "tokenizer_config.json"):
        for name, token in read_companion(file).items():
            if name.endswith("_token") and (text := token_text(token, name, file)) is not None:
                tokens[name] = text
        if len(tokens) > _SPECIAL_TOKENS:
            raise ConfigError(f"{file} names more than {_SPECIAL_TOKENS} special tokens: name those that the template uses.")
    return tokens


def _with_reasoning(message: Message) -> Message:
    """A message without the fields that are null, and with its reasoning under both names that templates read, as transformers
    gives it to them."""
    message = {name: value for name, value in message.items() if value is not None}
    reasoning = next((message[name] for name in REASONING if name in message), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _any_of(tokens: Sequence[str]) -> str:
    # The longest come first because one token may be a prefix of another.
    return "|".join(map(re.escape, sorted(filter(None, tokens), key=len, reverse=True))) or r"(?!)"


def _same(one: str, other: str) -> int:
    """Number of characters with which both begin."""
    return bisect_left(range(min(len(one), len(other))), True, key=lambda n: one[: n + 1] != other[: n + 1])


def _continued(text: str, prompt: str | None, whole: str | None, head: str, special: re.Pattern[str]) -> Span | None:
    """The answer as what `whole`, the text of the conversation up to it, adds to its prompt; None if the complete text does not
    begin so."""
    if prompt is None or whole is None or not whole.startswith(prompt) or not prompt.endswith(head):
        return None
    start, stop = len(prompt), _end_of_turn(special, whole, len(prompt))
    if not text.startswith(whole[:stop]):
        return None
    return start, _closing_token(special, text, start, stop)


def _end_of_turn(special: re.Pattern[str], text: str, start: int) -> int:
    """True end of an answer that begins at `start` and reaches the end of `text`: after its last special token, if only white
    space follows. Generation stops once the model has written that token."""
    stop = max((found.end() for found in special.finditer(text, start)), default=start)
    return stop if stop > start and not text[stop:].strip() else len(text)


def _closing_token(special: re.Pattern[str], text: str, start: int, stop: int) -> int:
    """End of a marked answer [start, stop), including the special token that ends the turn. That token is within the marks or
    directly after them.
    """
    ended = _end_of_turn(special, text[:stop], start)
    if any(found.end() == ended for found in special.finditer(text[:ended], start)):
        return ended
    following = re.compile(rf"\s*(?:{special.pattern})").match(text, stop)
    return following.end() if following else stop
