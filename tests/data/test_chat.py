import contextlib
import functools
import gc
import gzip
import json
import logging
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from jaxllm.config import ConfigError, load_config
from jaxllm.data.chat import ChatTemplate, ChatTemplateError, ChatTemplateLimit, load_chat_template
from jaxllm.data.conversations import LEARNT, SYSTEM, _key, read_conversations
from jaxllm.data.parts import zstd
from jaxllm.data.sources import load_data
from jaxllm.data.tokenizer import load_tokenizer

SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", '<|"|>']

CHATML = """\
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
WITHOUT_PROMPT = CHATML.partition("\n{%- if add")[0]
LLAMA_2 = """\
{%- set system = messages[0].content if messages[0].role == 'system' else none %}
{%- for m in (messages if system is none else messages[1:]) %}
  {%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}
  {%- if m.role == 'user' %}
    {{- bos_token + '[INST] ' + ('<<SYS>>\n' + system + '\n<</SYS>>\n\n' if loop.first and system else '') }}
    {{- m.content.strip() + ' [/INST]' }}
  {%- else %}{{ ' ' + m.content.strip() + ' ' + eos_token }}{% endif %}
{%- endfor %}"""
LLAMA_3 = """\
{{- bos_token }}
{%- for m in messages %}
    {{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + (m.content | trim) + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""
# Earlier turns lose the text before </think>, as in reasoning models.
FORGETS = CHATML.replace("m.content", "(m.content if loop.last else m.content.split('</think>') | last)")
FORGETS_WITH_MARKS = """\
{%- for m in messages %}
    {%- set text = m.content if loop.last else m.content.split('</think>') | last %}
    {{- '<|im_start|>' + m.role + '\n' }}
    {%- if m.role == 'assistant' %}{% generation %}{{ text }}{% endgeneration %}{% else %}{{ text }}{% endif %}
    {{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>' }}{% endif %}"""
PUTS_THOUGHTS_IN = CHATML.replace("'\n' + m.content", "'\n' + ('<think></think>' if m.role == 'assistant' else '') + m.content")
# No generation prompt, and the name of the role before each content.
PLAIN_NAMES = "{% for m in messages %}{{ m.role | capitalize + ': ' + m.content + '<|im_end|>\\n' }}{% endfor %}"
# A tool's output and what is not learnt stand in one turn with the answer.
HEADS_SOME = """\
{%- for m in messages %}
    {%- if m.role == 'assistant' and messages[loop.index0 - 1].role == 'user' %}{{ '<|im_start|>assistant\n' }}{% endif %}
    {{- m.content + '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
MARKS_BEFORE_A_LINE = CHATML.replace(
    "+ m.content + '<|im_end|>\n'", "}}{% generation %}{{ m.content }}{% endgeneration %}{{ '\n<|im_end|>\n'"
)
NO_THOUGHT = "<think>\n\n</think>\n\n"
# As Qwen 3: an empty thought in front of the last answer alone. Some of its kin begin it in the prompt.
THINKS_LAST = CHATML.replace(
    "'\n' + m.content", "'\n' + (NO_THOUGHT if m.role == 'assistant' and loop.last else '') + m.content"
).replace("NO_THOUGHT", repr(NO_THOUGHT))
THINKS_IN_PROMPT = THINKS_LAST.replace("assistant\n' }}{% endif", "assistant\n<think>\n' }}{% endif")
READS_THE_FIRST = "{% if messages[0].role == 'system' %}{{ '' }}{% endif %}" + CHATML

CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "It is  four.\n"},
    {"role": "user", "content": "And the capital of France?\n"},
    {"role": "assistant", "content": "Paris, été comme hiver."},
]
TOLD = [
    {"role": "user", "content": "Where?"},
    {"role": "assistant", "content": "look", "weight": 0},
    {"role": "tool", "content": "Lutetia"},
    {"role": "assistant", "content": "Paris"},
]
THOUGHTFUL = [
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "<think>Easy.</think>Four."},
    {"role": "user", "content": "Sure?"},
    {"role": "assistant", "content": "<think>Hm.</think>Yes."},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small byte-level tokenizer. Its post-processor adds a BOS token, and removes white space from the offsets."""
    path = tmp_path_factory.mktemp("tokenizer")
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=SPECIAL, show_progress=False
    )
    tokenizer.train_from_iterator([m["content"] for m in CONVERSATION + THOUGHTFUL] * 3, trainer)
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=True),
            processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]),
        ]
    )
    tokenizer.save(str(path / "tokenizer.json"))
    marks = {"bos_token": {"content": "<s>"}, "eos_token": "</s>"}
    (path / "tokenizer_config.json").write_text(json.dumps(marks))
    return path


@pytest.fixture(scope="module")
def tokenizer(folder):
    return load_tokenizer(folder)


@pytest.fixture
def read(folder, tokenizer, tmp_path):
    """read(records, template) -> Documents of a .jsonl file. A record that is a string becomes a line unchanged."""

    def do(records, template=CHATML, name="chat.jsonl", open_file=open, **options):
        lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
        with open_file(tmp_path / name, "wb") as file:
            file.write("\n".join(lines).encode())
        made = None if template is None else template_of(template)
        return read_conversations([str(tmp_path / "*.json*")], tokenizer, made, **options)

    return do


def template_of(source):
    return ChatTemplate(source, "a test", {"bos_token": "<s>", "eos_token": "</s>"}, knows_date=False)


def whole(documents, number=0):
    """(ids, scored) of one document."""
    span = np.array([number]), np.array([0]), documents.lengths[[number]]
    (ids,), (scored,) = documents.read(*span), documents.scored(*span)
    return ids, scored


@functools.cache
def decoder_of(folder):
    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


def answers(documents, folder, number=0):
    """The text of each run of scored tokens."""
    ids, scored = whole(documents, number)
    cuts = np.flatnonzero(np.diff(scored.astype(int))) + 1
    runs = [run for run, is_answer in zip(np.split(ids, cuts), np.split(scored, cuts), strict=True) if is_answer[0]]
    return [decoder_of(folder).decode(run.tolist(), skip_special_tokens=False) for run in runs]


def text(documents, folder, number=0):
    return decoder_of(folder).decode(whole(documents, number)[0].tolist(), skip_special_tokens=False)


# ------------------------------------------------------------------------------------------------------- what is scored


@pytest.mark.parametrize(
    ("template", "messages", "expected"),
    [
        pytest.param(CHATML, CONVERSATION, ["It is  four.\n<|im_end|>", "Paris, été comme hiver.<|im_end|>"], id="chatml"),
        pytest.param(
            WITHOUT_PROMPT, CONVERSATION, ["It is  four.\n<|im_end|>", "Paris, été comme hiver.<|im_end|>"], id="no prompt"
        ),
        pytest.param(LLAMA_2, CONVERSATION, [" It is  four. </s>", " Paris, été comme hiver. </s>"], id="llama 2"),
        pytest.param(LLAMA_3, CONVERSATION, ["It is  four.<|eot_id|>", "Paris, été comme hiver.<|eot_id|>"], id="llama 3"),
        pytest.param(FORGETS, CONVERSATION, ["It is  four.\n<|im_end|>", "Paris, été comme hiver.<|im_end|>"], id="keeps"),
        pytest.param(FORGETS, THOUGHTFUL, ["Four.<|im_end|>", "<think>Hm.</think>Yes.<|im_end|>"], id="forgets"),
        pytest.param(THINKS_LAST, CONVERSATION, ["It is  four.\n<|im_end|>", NO_THOUGHT + "Paris, été comme hiver.<|im_end|>"]),
        pytest.param(
            THINKS_IN_PROMPT, CONVERSATION, ["It is  four.\n<|im_end|>", "\n</think>\n\nParis, été comme hiver.<|im_end|>"]
        ),
        pytest.param(READS_THE_FIRST, CONVERSATION[2:], ["It is  four.\n<|im_end|>", "Paris, été comme hiver.<|im_end|>"]),
        pytest.param(HEADS_SOME, TOLD, ["Paris<|im_end|>"], id="no head behind a tool"),
        pytest.param(MARKS_BEFORE_A_LINE, CONVERSATION[1:3], ["It is  four.\n\n<|im_end|>"], id="an end on its own line"),
        pytest.param(
            PLAIN_NAMES,
            [*CONVERSATION[3:4], {"role": "assistant", "content": "A"}],
            [" A<|im_end|>"],
            id="answers that are in the name of the role",
        ),
        pytest.param(FORGETS_WITH_MARKS, THOUGHTFUL, ["Four.<|im_end|>", "<think>Hm.</think>Yes.<|im_end|>"], id="marks"),
        pytest.param(
            PUTS_THOUGHTS_IN,
            CONVERSATION,
            ["<think></think>It is  four.\n<|im_end|>", "<think></think>Paris, été comme hiver.<|im_end|>"],
            id="what the model writes first",
        ),
    ],
)
def test_scored_tokens_are_exactly_the_answers(read, folder, template, messages, expected):
    documents = read([{"messages": messages}], template)
    assert answers(documents, folder) == expected
    assert text(documents, folder) == template_of(template).render(messages)


def test_special_tokens_of_the_rendering_are_single_tokens(read, tokenizer):
    ids, scored = whole(read([{"messages": CONVERSATION}]))
    spelled = [tokenizer.special_tokens[i] for i in ids if i < len(SPECIAL)]
    assert spelled == ["<|im_start|>", "<|im_end|>"] * 5
    # The end of both answers, and of nothing else.
    assert (ids[scored] == SPECIAL.index("<|im_end|>")).sum() == 2
    assert (ids[scored] == SPECIAL.index("<|im_start|>")).sum() == 0


def test_several_answers_in_a_row_and_other_roles(read, folder):
    messages = [
        {"role": "user", "content": "Go."},
        {"role": "assistant", "content": "One."},
        {"role": "tool", "content": "Two."},
        {"role": "assistant", "content": "Three."},
        {"role": "assistant", "content": "Four."},
    ]
    assert answers(read([{"messages": messages}]), folder) == ["One.<|im_end|>", "Three.<|im_end|>", "Four.<|im_end|>"]


def test_a_token_that_straddles_the_beginning_of_an_answer_is_not_scored(read, folder):
    """ "four" is one token. Cut in the middle, it begins in the prompt."""
    documents = read([{"prompt": "It is  fo", "completion": "ur."}], template=None)
    assert answers(documents, folder) == [".</s>"]


def test_prompt_and_completion_without_a_template_are_a_document_whose_completion_and_end_are_scored(read, folder, tokenizer):
    documents = read([{"prompt": "What is 2 + 2? ", "completion": "It is  four."}], template=None)
    assert answers(documents, folder) == ["It is  four.</s>"]
    (document,) = tokenizer.encode_documents(["What is 2 + 2? It is  four."])
    np.testing.assert_array_equal(whole(documents)[0], document)
    assert document[0] == SPECIAL.index("<s>")


def test_bytes_serve_for_plain_prompts(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"prompt": "é", "completion": "üb"}\n')
    ids, scored = whole(read_conversations([str(tmp_path / "a.jsonl")], load_tokenizer("bytes"), None))
    assert bytes(ids) == "éüb\0".encode()
    assert bytes(ids[scored]) == "üb\0".encode()


def test_only_the_completion_of_a_list_of_messages_is_learnt(read, folder):
    documents = read([{"prompt": CONVERSATION[:4], "completion": CONVERSATION[4:]}])
    assert answers(documents, folder) == ["Paris, été comme hiver.<|im_end|>"]
    np.testing.assert_array_equal(whole(documents)[0], whole(read([{"messages": CONVERSATION}]))[0])


def test_all_spellings_of_a_conversation_are_the_same_document(read):
    user, answer = CONVERSATION[1]["content"], CONVERSATION[2]["content"]
    documents = read(
        [
            {"messages": CONVERSATION[1:3]},
            {"conversations": [{"from": "human", "value": user}, {"from": "gpt", "value": answer}]},
            {"conversations": CONVERSATION[1:3]},
            {"prompt": user, "completion": answer},
            {"prompt": CONVERSATION[1:2], "completion": CONVERSATION[2:3]},
        ]
    )
    assert len(set(documents.keys.tolist())) == 1
    for number in range(1, 5):
        for array, first in zip(whole(documents, number), whole(documents), strict=True):
            np.testing.assert_array_equal(array, first)


@pytest.mark.parametrize("name", SYSTEM)
def test_a_system_prompt_beside_the_messages_is_their_first(read, name):
    text = CONVERSATION[0]["content"]
    turns = [{"from": "human", "value": CONVERSATION[1]["content"]}, {"from": "gpt", "value": CONVERSATION[2]["content"]}]
    documents = read(
        [
            {"messages": CONVERSATION[:3]},
            {"messages": CONVERSATION[1:3], name: text},
            {"conversations": turns, name: text},
            {"prompt": CONVERSATION[1]["content"], "completion": CONVERSATION[2]["content"], name: text},
            # Given twice; and not at all.
            {"messages": CONVERSATION[:3], name: text},
            {"messages": CONVERSATION[:3], name: " "},
        ]
    )
    assert len(set(documents.keys.tolist())) == 1
    for number in range(1, 6):
        for array, first in zip(whole(documents, number), whole(documents), strict=True):
            np.testing.assert_array_equal(array, first)


@pytest.mark.parametrize("name", LEARNT)
def test_an_answer_that_its_field_excludes_is_not_learnt(read, folder, name):
    """It stays in the text, and the split into training and held-out conversations is the same."""
    documents = read([{"messages": m} for m in (CONVERSATION, flagged(2, **{name: 0}), flagged(2, **{name: True}))])
    first, second = "It is  four.\n<|im_end|>", "Paris, été comme hiver.<|im_end|>"
    assert [answers(documents, folder, n) for n in range(3)] == [[first, second], [second], [first, second]]
    assert len(set(documents.keys.tolist())) == 1
    np.testing.assert_array_equal(whole(documents, 1)[0], whole(documents, 0)[0])


def test_parts_of_a_content_that_are_texts_are_joined(read):
    def in_parts(message):
        half = len(message["content"]) // 2
        parts = (message["content"][:half], message["content"][half:])
        return {**message, "content": [{"type": "text", "text": part} for part in parts]}

    documents = read([{"messages": CONVERSATION}, {"messages": [in_parts(message) for message in CONVERSATION]}])
    for ours, theirs in zip(whole(documents, 0), whole(documents, 1), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_fields_that_are_not_read_are_counted_and_said_once(read, tmp_path, caplog):
    lines = [{"messages": CONVERSATION, "id": n, "system": None, "tools": []} for n in range(3)]
    read([*lines, {"messages": CONVERSATION, "prompt": "What"}, {"prompt": "a", "completion": "b", "source": "s"}])
    (record,) = caplog.records
    assert record.getMessage() == (
        f"Not read of the conversations of {tmp_path}/*.json*: id (3 of them, such as 0), prompt (1 of them, "
        f"such as What), source (1 of them, such as s)"
    )


def test_what_of_messages_is_not_in_the_text_is_counted_and_said(read, caplog):
    """Fields whose names the template's source lacks, and the reasoning that it cuts off."""
    with_fields = flagged(2, name="me", tags=["a", 1], reasoning_content=None)
    fields = CHATML.replace("m.role", "(m.name or m.role)")
    read([{"messages": with_fields}, {"messages": flagged(1, tags=[], name="you")}], fields)
    (record,) = caplog.records
    assert record.getMessage().endswith('.json*: tags of a message (2 of them, such as ["a", 1])')
    caplog.clear()
    read([{"messages": THOUGHTFUL}, {"messages": flagged(2, thinking="Law.")}], FORGETS)
    (record,) = caplog.records
    assert record.getMessage().endswith(
        ": reasoning of answers, which the chat template leaves out (2 of them, such as Easy.), thinking of a message"
    ) or record.getMessage().endswith(": reasoning of answers, which the chat template leaves out (2 of them, such as Easy.)")


LAST_SYSTEM = CHATML.replace("m.content +", "('' if m.role == 'system' and not loop.last else m.content) +")
NO_DEVELOPER = CHATML.replace("for m in messages", "for m in messages if m.role in ('user', 'assistant', 'system')")


@pytest.mark.parametrize(
    ("template", "role", "content"),
    [
        (NO_DEVELOPER, "developer", "Be terse."),
        # Other messages hold its text.
        (NO_DEVELOPER, "developer", "What is"),
        (NO_DEVELOPER, "tool", "{}"),
        (LAST_SYSTEM, "system", "Be a pirate."),
    ],
)
def test_a_message_that_the_template_does_not_write_makes_its_line_unusable(read, template, role, content):
    told = [{"role": role, "content": content}, *CONVERSATION[1:]]
    documents = read([{"messages": CONVERSATION[1:]}, {"messages": told}], template)
    assert f"the chat template of a test does not write message 1 (of {role})" in documents.description.replace("The", "the")
    read([{"messages": CONVERSATION[1:]}, {"messages": told}], CHATML)


def test_fields_that_are_null_are_absent(read, folder):
    calls = CHATML.replace(
        "m.content +", "m.content + ('' if m.tool_calls is not defined else m.tool_calls | length | string) +"
    )
    documents = read([{"messages": flagged(2, tool_calls=None)}], calls)
    assert answers(documents, folder)[0] == "It is  four.\n<|im_end|>"


def test_roles_of_sharegpt_have_any_case(read):
    names = {"user": "Human", "assistant": "ChatGPT", "system": "system"}
    records = [{"conversations": [{"from": names[m["role"]], "value": m["content"]} for m in CONVERSATION]}]
    documents = read([{"messages": CONVERSATION}, *records])
    for ours, theirs in zip(whole(documents, 0), whole(documents, 1), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_an_array_and_parquet_hold_the_conversations_of_the_lines(read, tmp_path, tokenizer):
    """Rows of Parquet have all fields of all messages, most of them null."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    records = [{"messages": CONVERSATION, "tools": None}, {"messages": flagged(2, weight=0)}, {"messages": CONVERSATION[1:3]}]
    lines = read(records)
    (tmp_path / "chat.jsonl").unlink()
    (tmp_path / "chat.json").write_text(json.dumps(records, indent=1))
    parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "chat.parquet")
    for file in ("chat.json", "chat.parquet"):
        documents = read_conversations([str(tmp_path / file)], tokenizer, template_of(CHATML))
        np.testing.assert_array_equal(documents.keys, lines.keys)
        for number in range(3):
            for ours, theirs in zip(whole(documents, number), whole(lines, number), strict=True):
                np.testing.assert_array_equal(ours, theirs)


# ------------------------------------------------------------------------------------------------------------ broken lines


def flagged(number, **fields):
    """The conversation, with fields in one message."""
    return [{**message, **fields} if at == number else message for at, message in enumerate(CONVERSATION)]


BROKEN = [
    ("nothing", "not JSON (Expecting value at column 1)"),
    ({"text": "x"}, "it has neither messages nor conversations nor prompt and completion"),
    ({"messages": "x"}, "messages is not a list of messages"),
    ({"messages": []}, "messages is not a list of messages"),
    ({"messages": ["x"]}, "message 1 of messages is not an object"),
    ({"messages": [{"role": "user", "content": None}]}, "message 1 of messages has no text as its content"),
    ({"messages": CONVERSATION, "tools": [{"type": "function"}]}, "it offers tools, which are not supported"),
    ({"messages": CONVERSATION[:2]}, "no message of an assistant, so there is nothing to learn"),
    ({"prompt": "a", "completion": " "}, "message 2 is an empty answer"),
    ({"prompt": "<|im_end|>", "completion": "b"}, "message 1 spells the special token <|im_end|>"),
    (
        {"messages": [{"role": "user", "content": "a", "name": "</s>"}, *CONVERSATION]},
        "message 1 spells the special token </s>",
    ),
    ('{"prompt": "\\ud800", "completion": "b"}', "message 1 holds half a surrogate pair"),
    ({"prompt": CONVERSATION[:2], "completion": CONVERSATION[3:4]}, "no message of an assistant, so there is nothing to learn"),
    ({"messages": CONVERSATION, "functions": [{"name": "f"}]}, "it offers tools, which are not supported"),
    ({"messages": CONVERSATION, "system": 1}, "its system is not a text"),
    ({"messages": CONVERSATION, "system": "Be long."}, "it has a system prompt among its messages and another one beside them"),
    ({"messages": CONVERSATION[1:], "system": "a", "system_prompt": "b"}, "it has two system prompts"),
    ({"messages": flagged(2, weight=0.5)}, "message 3 has weight=0.5, which is neither 0 nor 1"),
    ({"messages": flagged(2, loss_mask=[0, 1])}, "message 3 has loss_mask=[0, 1], which is neither 0 nor 1"),
    (
        {"messages": flagged(2, weight=0, train=True)},
        "message 3 says both that it is learnt and that it is not (weight, train)",
    ),
    ({"messages": flagged(1, train=True)}, "message 2 asks to be learnt, and only answers of an assistant are"),
    ({"messages": flagged(2, weight=0)[:3]}, "each answer is excluded, so there is nothing to learn"),
    ({"messages": flagged(2, masked=True)[:3]}, "each answer is excluded, so there is nothing to learn"),
    (
        {"messages": flagged(2, masked=True, train=True)},
        "message 3 says both that it is learnt and that it is not (train, masked)",
    ),
    (
        {"messages": flagged(2, train_detail=[{"begin_offset": 0}])},
        "message 3 has train_detail, and answers are learnt whole or not at all",
    ),
    ({"messages": flagged(2, tool_calls=[{}])}, "message 3 of messages has tool_calls, and tools are not supported"),
    (
        {"conversations": [{"from": "human", "value": "a"}, {"from": "function_call", "value": "{}"}]},
        "message 2 of conversations has function_call, and tools are not supported",
    ),
    # JSON would escape them.
    ({"messages": flagged(2, content='a <|"|> b')}, 'message 3 spells the special token <|"|>'),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
        "message 1 of messages has a part image_url, and only parts of type text are read",
    ),
]


@pytest.mark.parametrize(("record", "reason"), BROKEN)
def test_broken_lines_are_skipped_counted_and_named(read, tmp_path, caplog, record, reason):
    good = {"messages": CONVERSATION}
    with caplog.at_level(logging.WARNING):
        documents = read([good, "", record, good])
    place = f"{tmp_path}/chat.jsonl:3: {reason}"
    assert len(documents.lengths) == 2
    assert documents.description.endswith(f"; 1 of 3 lines skipped, the first {place})")
    assert [message.getMessage() for message in caplog.records] == [f"Skipped {place}"]


def test_a_file_without_a_usable_line_is_refused_with_the_first_reason(read, tmp_path):
    with pytest.raises(ConfigError) as refused:
        read([record for record, _ in BROKEN[1:]])
    assert str(refused.value) == (
        f"No line of {tmp_path}/*.json* can be used ({tmp_path}/chat.jsonl:1: it has neither messages nor conversations nor "
        f"prompt and completion): give conversations as JSON lines."
    )


@pytest.mark.parametrize("template", [CHATML, FORGETS, THINKS_LAST, THINKS_IN_PROMPT, READS_THE_FIRST, WITHOUT_PROMPT])
@pytest.mark.parametrize("messages", [CONVERSATION, THOUGHTFUL, CONVERSATION[2:], [*CONVERSATION[:3], *THOUGHTFUL[1:]]])
def test_only_answers_depend_on_answers(template, messages):
    """What is not learnt stays if all answers are others, whichever of them are learnt; what is learnt ends its turn."""

    def rest(messages):
        text, spans = rendered.render_answers(messages, numbers, SPECIAL)
        cuts = [0, *(place for span in spans for place in span), len(text)]
        assert all(text[start:stop].endswith("<|im_end|>") for start, stop in spans)
        return [text[start:stop] for start, stop in zip(cuts[::2], cuts[1::2], strict=True)]

    rendered = template_of(template)
    numbers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    text, spans = rendered.render_answers(messages, numbers, SPECIAL)
    for number, span in zip(numbers, spans, strict=True):
        assert rendered.render_answers(messages, [number], SPECIAL) == (text, [span])
    others = [{**message, "content": "law"} if message["role"] == "assistant" else message for message in messages]
    assert rest(others) == rest(messages)
    rendered.close()


def test_an_answer_whose_place_is_unclear_is_refused():
    twice = THINKS_LAST.replace("m.content +", "m.content + m.content +")
    with pytest.raises(
        ChatTemplateError, match=r"does not write message 3 exactly once, and has no {% generation %} mark for each answer"
    ):
        template_of(twice).render_answers(CONVERSATION, [2], SPECIAL)


@pytest.mark.parametrize("template", [FORGETS, FORGETS_WITH_MARKS])
def test_characters_that_unicode_reserves_are_not_taken_for_marks(template):
    messages = [*THOUGHTFUL[:3], {"role": "assistant", "content": "\ufdd1 \ufdd0"}]
    with pytest.raises(ChatTemplateError, match="finds a character in the conversation that no text may contain"):
        template_of(template).render_answers(messages, [1, 3], SPECIAL)


def test_messages_without_a_template_are_refused_by_key(read, tokenizer):
    with pytest.raises(ConfigError) as refused:
        read([{"messages": CONVERSATION}], template=None)
    assert str(refused.value) == (
        f"The tokenizer {tokenizer.name} has no chat template, which messages need: set data.chat_template to a Jinja file."
    )


def test_files_are_read_compressed_and_in_the_order_of_their_names(read, folder):
    def record(answer):
        return {"prompt": "x", "completion": answer}

    read([record("third")], name="c.jsonl")
    read([record("second")], name="b.jsonl.gz", open_file=gzip.open)
    documents = read([record("first")], name="a.jsonl.zst", open_file=zstd.open)
    assert [answers(documents, folder, n) for n in range(3)] == [["first<|im_end|>"], ["second<|im_end|>"], ["third<|im_end|>"]]


def test_a_file_that_is_cut_short_gives_what_can_be_read(read, tmp_path, folder):
    records = [{"prompt": "x" * n, "completion": f"answer {n}"} for n in range(1, 400)]
    read(records, name="a.jsonl.gz", open_file=gzip.open)
    file = tmp_path / "a.jsonl.gz"
    file.write_bytes(file.read_bytes()[:-200])
    documents = read([records[0]], name="b.jsonl", max_broken_share=1)
    assert answers(documents, folder) == ["answer 1<|im_end|>"]
    assert re.search(r"; 1 of \d+ lines skipped, the first .*a\.jsonl\.gz:\d+: damaged gzip", documents.description)


def test_other_kinds_of_file_are_refused(tmp_path, tokenizer):
    (tmp_path / "a.csv").write_text("x")
    with pytest.raises(
        ConfigError, match=r"a\.csv is neither \.jsonl nor \.json nor \.parquet: conversations must be JSON lines"
    ):
        read_conversations([str(tmp_path / "*")], tokenizer, None)


# --------------------------------------------------------------------------------------------------------------- templates


def test_the_template_of_a_folder(tmp_path):
    def write(**config):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", **config}))

    assert load_chat_template(tmp_path) is None
    write()
    assert load_chat_template(tmp_path) is None
    write(chat_template="{{ bos_token }}one")
    assert load_chat_template(tmp_path).render([]) == "<s>one"
    write(chat_template=[{"name": "tools", "template": "no"}, {"name": "default", "template": "two"}])
    assert load_chat_template(tmp_path).render([]) == "two"
    (tmp_path / "chat_template.jinja").write_text("three")
    assert load_chat_template(tmp_path).render([]) == "three"
    (tmp_path / "own.jinja").write_text("{{ bos_token }}four")
    assert load_chat_template(tmp_path, tmp_path / "own.jinja").render([]) == "<s>four"
    assert load_chat_template(None, tmp_path / "own.jinja").render([]) == "four"


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        ([{"name": "tools", "template": "x"}], "has no chat template named default, but tools: save the one you mean"),
        (7, "The chat_template in .*tokenizer_config.json is not text: fix it"),
        (
            [{"name": ["default"], "template": "x"}],
            "has no chat template named default, but \\['default'\\]: save the one you mean",
        ),
        ("{% if %}", r"tokenizer_config.json is not Jinja \(line 1: .*\): fix it, or name another template"),
    ],
)
def test_no_template_where_there_should_be_one(tmp_path, found, sentence):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": found}))
    with pytest.raises(ConfigError, match=sentence):
        load_chat_template(tmp_path)


def test_what_a_template_may_do():
    def render(source, **kwargs):
        return ChatTemplate(source, "a test", {}, **kwargs).render([{"role": "user", "content": "é<"}])

    assert render("{{ messages[0] | tojson }}") == '{"role": "user", "content": "é<"}'
    assert render("{% for m in messages %}{% break %}{% endfor %}x{% generation %}y{% endgeneration %}") == "xy"
    assert render("{{ strftime_now('%Y') | int > 2000 }}") == "True"
    assert render("{{ strftime_now is defined }}", knows_date=False) == "False"
    assert render("{{ strftime_now('%d %b %Y') }}", knows_date=False) == "26 Jul 2024"
    with pytest.raises(ChatTemplateError, match=r"The chat template of a test refuses the conversation \(no such role\): "):
        render("{{ raise_exception('no such role') }}")
    with pytest.raises(ChatTemplateError, match="'__class__' of 'str' object is unsafe"):
        render("{{ ''.__class__.__mro__ }}")
    with pytest.raises(ChatTemplateError, match=r"fails on the conversation \(TypeError: "):
        render("{{ 'a' + 1 }}")


HUNGRY = "{% if messages[0].content == 'much' %}{{ 'a' * 10 ** 10 }}{% endif %}{{ messages[0].content }}"


def test_a_template_that_needs_too_much_is_stopped_and_can_be_used_again():
    template = ChatTemplate(HUNGRY, "a test", {})
    for _ in range(2):
        with pytest.raises(
            ChatTemplateLimit, match=r"^The chat template of a test needs more than 512 MiB of memory to render: "
        ):
            template.render([{"role": "user", "content": "much"}])
        assert template.render([{"role": "user", "content": "little"}]) == "little"
    template.close()


def test_a_file_of_slow_renderings_has_a_limit_as_a_whole(read, monkeypatch):
    """Each takes less than its own limit."""
    monkeypatch.setattr("jaxllm.data.template_process.SECONDS_TOGETHER", 1)
    slow = "{% for i in range(9000) %}{% for j in range(1000) %}{% endfor %}{% endfor %}" + CHATML
    with pytest.raises(ConfigError, match=r"takes more than 0\.02 s of processor time for each rendering and 1 s more: fix it"):
        read([{"messages": CONVERSATION}] * 100, slow)


def test_short_messages_may_be_mostly_marks():
    template = ChatTemplate(CHATML.replace("<|im_start|>", "<|im_start|>" + "-" * 300), "a test", {})
    messages = [{"role": role, "content": "a"} for _ in range(300) for role in ("user", "assistant")]
    assert len(template.render_answers(messages, range(585, 600, 2), SPECIAL)[1]) == 8


def test_limits_grow_with_the_conversation():
    text = "law " * 2**22
    assert ChatTemplate(CHATML, "a test", {}).render([{"role": "user", "content": text}]).count("law") == 2**22


def test_a_conversation_on_which_a_template_is_stopped_is_named(read, tmp_path):
    with pytest.raises(ConfigError, match=r"^\S*chat\.jsonl:2: The chat template of a test needs more than 512 MiB of memory"):
        read([{"prompt": "x", "completion": "y"}, {"prompt": "much", "completion": "y"}], HUNGRY + "{{ messages[-1].content }}")


def test_texts_have_all_characters_in_any_number():
    """More texts than are rendered together."""
    messages = [{"role": role, "content": f"\U0001f44d \u2028 {n}"} for n in range(40) for role in ("user", "assistant")]
    text, spans = template_of(CHATML).render_answers(messages, range(1, 80, 2), SPECIAL)
    assert [text[start:stop] for start, stop in spans] == [f"\U0001f44d \u2028 {n}<|im_end|>" for n in range(40)]


def test_a_template_that_writes_half_a_surrogate_pair_is_at_fault():
    with pytest.raises(ChatTemplateError, match="surrogates not allowed"):
        ChatTemplate("{{ '\\ud83d' }}", "a test", {}).render([])


def test_nothing_of_a_template_runs_when_the_conversations_have_been_read(tokenizer, conversations):
    gc.collect()
    before, template = children(), template_of(CHATML)
    read_conversations([str(conversations)], tokenizer, template)
    assert children() == before
    template.render([])
    assert len(children() - before) == 1
    del template
    gc.collect()
    assert children() == before


def test_a_template_does_not_outlive_its_process():
    program = (
        "import os, sys, time; from jaxllm.data.chat import ChatTemplate\n"
        "template = ChatTemplate('x', 'a test', {}); template.render([])\n"
        "print(template._process._running.pid, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child = Path("/proc", process.stdout.readline().strip())
        assert child.exists()
        process.kill()
    for _ in range(100):
        # Who takes the place of a parent may let a child that has ended stay in the list.
        if not child.exists() or "State:\tZ" in (child / "status").read_text():
            return
        time.sleep(0.05)
    pytest.fail("the child runs on")


def children():
    """Process ids of the children that render."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if stat.read_text().rpartition(")")[2].split()[1] == str(os.getpid()):
                found |= {stat.parent.name} if b"template_process" in (stat.parent / "cmdline").read_bytes() else set()
    return found


# ------------------------------------------------------------------------------------------------------------- in a config


MODEL = {"num_layers": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 1, "vocab_size": 400}
TRAIN = {"steps": 1, "sequence_length": 192, "global_batch_sequences": 2}


@pytest.fixture
def conversations(tmp_path):
    """Sixty short conversations, all different."""
    path = tmp_path / "chat.jsonl"
    records = [{"prompt": f"What is {n} + {n}?", "completion": f"It is {2 * n}."} for n in range(60)]
    path.write_text("\n".join(map(json.dumps, records)))
    return path


def config_of(folder, path, **data):
    template = folder / "chatml.jinja"
    template.write_text(CHATML)
    given = {
        "source": "chat",
        "paths": [str(path)],
        "tokenizer": str(folder),
        "chat_template": str(template),
        "held_out_fraction": 0.2,
    }
    return load_config({"model": MODEL, "train": TRAIN, "data": {k: v for k, v in (given | data).items() if v is not None}})


def test_packed_rows_count_the_answers_alone(folder, conversations):
    data = load_data(config_of(folder, conversations, packing="best_fit"))
    (source,) = data.sources
    stream = data.stream()
    rows = stream.samples(np.arange(stream.sources[0].packing.num_samples))
    mask, segments = rows["mask"], rows["segments"]
    assert segments.max() > 1
    counted = decoder_of(folder).decode(rows["targets"][mask].tolist(), skip_special_tokens=False)
    assert sorted(counted.split("<|im_end|>")[:-1]) == sorted(f"It is {2 * n}." for n in said_in(source, source.train))
    # The input of a target is in the same conversation.
    np.testing.assert_array_equal(rows["targets"][:, :-1][mask[:, :-1]], rows["tokens"][:, 1:][mask[:, :-1]])
    np.testing.assert_array_equal(segments[:, :-1][mask[:, :-1]], segments[:, 1:][mask[:, :-1]])
    assert not mask[:, -1].any()


def said_in(source, which):
    """The numbers in the questions of these conversations."""
    keys = {key_of(n): n for n in range(60)}
    return [keys[int(source.documents.keys[document])] for document in which]


def key_of(n):
    return _key([{"role": "user", "content": f"What is {n} + {n}?"}, {"role": "assistant", "content": f"It is {2 * n}."}])


def test_a_run_says_how_many_conversations_are_cut(folder, conversations):
    config = config_of(folder, conversations)
    fits = load_data(config)
    assert "cut" not in fits.description
    longest = int(fits.sources[0].documents.lengths.max())
    longer = int((fits.sources[0].documents.lengths == longest).sum())
    train = config.train.model_copy(update={"sequence_length": longest - 1})
    data = load_data(config.model_copy(update={"train": train}))
    assert f"; {longer} conversations are longer than a sequence and are cut; " in data.description


def test_which_conversations_are_held_out_depends_on_nothing_but_what_they_say(folder, conversations, tmp_path):
    def held_out(path, **data):
        (source,) = load_data(config_of(folder, path, **data)).sources
        return {int(key) for key in source.documents.keys[source.held_out]}

    first = held_out(conversations)
    lines = conversations.read_text().splitlines()
    other = tmp_path / "other.jsonl"
    other.write_text("\n".join(lines[::-1]))
    assert held_out(other) == first
    template = tmp_path / "llama.jinja"
    template.write_text(LLAMA_3)
    assert held_out(conversations, chat_template=str(template)) == first


def test_a_template_changes_the_fingerprint(folder, conversations, tmp_path):
    template = tmp_path / "llama.jinja"
    template.write_text(LLAMA_3)
    chatml, llama = (load_data(config_of(folder, conversations, **d)) for d in ({}, {"chat_template": str(template)}))
    assert chatml.fingerprint != llama.fingerprint
    # The fingerprint includes which tokens are scored, even if the text is the same.
    template.write_text(CHATML.replace("{% if add_generation_prompt %}", "{% if false %}"))
    assert load_data(config_of(folder, conversations, chat_template=str(template))).fingerprint == chatml.fingerprint


def test_conversations_mix_with_texts(folder, conversations, text_file):
    mixture = [
        {"name": "chat", "source": "chat", "paths": [str(conversations)], "weight": 1},
        {"name": "words", "source": "files", "paths": [str(text_file)], "weight": 1},
    ]
    config = config_of(folder, conversations, source=None, paths=None, mixture=mixture)
    stream = load_data(config).stream()
    ks = np.arange(40)
    rows = stream.samples(ks)
    of_chat = np.array([stream.locate(k)[0] == 0 for k in ks])
    # All texts but their EOS tokens.
    assert rows["mask"][~of_chat].mean() > 0.99
    share = rows["mask"][of_chat].mean()
    assert 0.1 < share < 0.5


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ({"paths": None}, "data.source=chat needs data.paths: give files of JSON lines or glob patterns."),
        ({"paths": ["nowhere/*.jsonl"]}, "data.paths: no file matches 'nowhere/*.jsonl'"),
        ({"chat_template": "nowhere.jinja"}, "data.chat_template=nowhere.jinja is not a file"),
        ({"source": "files"}, "data.chat_template belongs to data.source=chat: name that source, or remove the template."),
        ({"tokenizer": None}, "data.source=chat needs a tokenizer: set data.tokenizer to the folder of the model."),
    ],
)
def test_what_is_missing_is_named(folder, conversations, data, sentence):
    with pytest.raises(ConfigError) as refused:
        config_of(folder, conversations, **data)
    assert sentence in str(refused.value)


def test_a_template_whose_marks_are_no_tokens_is_said(folder, conversations, tmp_path, caplog):
    """With them a model learns to end its turns; without, only a limit ends what it writes."""
    load_data(config_of(folder, conversations))
    assert not caplog.records
    other = tmp_path / "other"
    other.mkdir()
    trained = json.loads((folder / "tokenizer.json").read_text())
    # Another token has the place of each mark.
    (other / "tokenizer.json").write_text(json.dumps(trained).replace("<|im_", "<|other_"))
    (other / "tokenizer_config.json").write_text((folder / "tokenizer_config.json").read_text())
    load_data(config_of(folder, conversations, tokenizer=str(other)))
    (record,) = caplog.records
    assert re.fullmatch(
        r"The chat template of \S+chatml.jinja ends an answer with no special token of the tokenizer .*other.*, so a model "
        r"that learns from it does not stop by itself: name a template of this tokenizer \(data.chat_template\), or a "
        r"tokenizer with its marks\.",
        record.getMessage(),
    ), record.getMessage()


MARKS_WITH_END = FORGETS_WITH_MARKS.replace(
    "{% endgeneration %}{% else %}", "{{ '<|im_end|>' }}{% endgeneration %}{{ '\n' }}{% else %}"
).replace("{{ text }}{% endif %}\n    {{- '<|im_end|>\n' }}", "{{ text + '<|im_end|>\n' }}{% endif %}")


@pytest.mark.parametrize(
    ("template", "messages"),
    [(CHATML, CONVERSATION), (LLAMA_2, CONVERSATION), (LLAMA_3, CONVERSATION), (MARKS_WITH_END, THOUGHTFUL)],
    ids=["chatml", "llama 2", "llama 3", "marks"],
)
def test_transformers_writes_and_marks_the_same(read, folder, template, messages):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), bos_token="<s>", eos_token="</s>", chat_template=template
    )
    ids, scored = whole(read([{"messages": messages}], template))
    for prompt in (False, True):
        text = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
        assert template_of(template).render(messages, add_generation_prompt=prompt) == text
    found = theirs.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask="endgeneration" in template)
    assert found["input_ids"] == ids.tolist()
    if "endgeneration" in template:
        assert found["assistant_masks"] == scored.astype(int).tolist()


def test_the_real_template_scores_the_real_answers(smollm2_folder, chatterbot_file):
    tokenizer, template = load_tokenizer(smollm2_folder), load_chat_template(smollm2_folder)
    documents = read_conversations([str(chatterbot_file)], tokenizer, template)
    assert len(documents.lengths) == 2025
    records = [json.loads(line)["messages"] for line in Path(chatterbot_file).read_text().splitlines()]
    for number in range(0, 2025, 97):
        said = [message["content"] + "<|im_end|>" for message in records[number] if message["role"] == "assistant"]
        assert answers(documents, smollm2_folder, number) == said
