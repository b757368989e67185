"""Pairs of answers of which one is preferred: how they are read, packed and refused."""

import json

import numpy as np
import pytest

from jaxllm.config import ConfigError, load_config
from jaxllm.data.chat import ChatTemplate
from jaxllm.data.conversations import read_conversations
from jaxllm.data.sources import load_data
from jaxllm.data.tokenizer import load_tokenizer

TEMPLATE = """\
{%- for m in messages %}{{ '<' + m.role + '>' + m.content + '\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"""
USER, GOOD, BAD = (
    {"role": role, "content": text} for role, text in [("user", "2+2?"), ("assistant", "4"), ("assistant", "It is 5")]
)
MODEL = {"num_layers": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "num_kv_heads": 2, "vocab_size": 256}


@pytest.fixture
def read(tmp_path):
    """read(*records, template) -> Documents"""

    def do(*records, template=TEMPLATE):
        (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, records)))
        made = None if template is None else ChatTemplate(template, "a test", {})
        return read_conversations([str(tmp_path / "pairs.jsonl")], load_tokenizer("bytes"), made, pairs=True)

    return do


def texts(documents, number=0):
    """[(text, its scored part)] of a pair."""
    span = np.array([number]), np.array([0]), documents.lengths[[number]]
    (ids,), (scored,), at = documents.read(*span), documents.scored(*span), int(documents.chosen_tokens[number])
    return [(bytes(part).decode(), bytes(part[m]).decode()) for part, m in ((ids[:at], scored[:at]), (ids[at:], scored[at:]))]


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": "2+2?", "chosen": "4", "rejected": "It is 5"},
        {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
        {"prompt": [USER], "chosen": "4", "rejected": "It is 5"},
        {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {"prompt": "2+2?", "chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {"prompt": [USER], "chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {"prompt": "2+2?", "chosen": [GOOD], "rejected": [BAD]},
        {
            "conversations": [{"from": "human", "value": "2+2?"}],
            "chosen": {"from": "gpt", "value": "4"},
            "rejected": {"from": "gpt", "value": "It is 5"},
        },
    ],
    ids=[
        *("texts", "messages", "messages and texts", "conversations", "conversations and a text"),
        *("conversations and messages", "a text and messages", "LLaMA-Factory's"),
    ],
)
def test_all_spellings_of_a_pair_are_the_same_document(read, record):
    documents = read(record)
    assert texts(documents) == [("<user>2+2?\n<assistant>4\n", "4\n"), ("<user>2+2?\n<assistant>It is 5\n", "It is 5\n")]
    assert documents.keys == read({"prompt": "2+2?", "chosen": "4", "rejected": "It is 5"}).keys


def test_a_system_prompt_beside_a_pair_is_before_both_answers(read):
    documents = read({"prompt": "2+2?", "chosen": "4", "rejected": "It is 5", "system": "Add.", "tools": []})
    assert [text for text, _ in texts(documents)] == [
        f"<system>Add.\n<user>2+2?\n<assistant>{answer}\n" for answer in ("4", "It is 5")
    ]


def test_texts_need_no_template(read):
    line = {"prompt": "2+2=", "chosen": "4", "rejected": "5"}
    documents = read(line, line | {"system": "Add."}, template=None)
    assert "pairs.jsonl:2: it has a system prompt, which needs a chat template" in documents.description
    assert texts(documents) == [("2+2=4\0", "4\0"), ("2+2=5\0", "5\0")]


def test_the_fingerprint_changes_with_what_is_preferred_and_with_the_border(read):
    first = read({"prompt": "a", "chosen": "b", "rejected": "c"}, template=None)
    other = read({"prompt": "a", "chosen": "c", "rejected": "b"}, template=None)
    assert len({first.fingerprint, other.fingerprint}) == 2
    documents = [read({"prompt": "a", "chosen": c, "rejected": r}, template=None) for c, r in (("bab", "b"), ("b", "bab"))]
    assert documents[0].fingerprint != documents[1].fingerprint


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"prompt": "a", "chosen": "b"}, "it has no rejected answer"),
        ({"prompt": "a", "completion": "b"}, "it has no chosen answer"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "the chosen and the rejected answer are the same"),
        ({"chosen": "b", "rejected": "c"}, "it has no prompt, and its answers are not lists of messages"),
        ({"chosen": [GOOD], "rejected": [BAD]}, "its answers do not begin with the same message, and it has no prompt"),
        ({"chosen": [USER, GOOD], "rejected": [USER]}, "completion is not a list of messages"),
        ({"prompt": "a", "chosen": "b", "rejected": None}, "its rejected answer is null, neither a text nor messages"),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "tools": [{"type": "function"}]}, "it offers tools, which are not"),
    ],
)
def test_lines_that_are_no_pair_are_named(read, record, reason):
    documents = read({"prompt": "a", "chosen": "b", "rejected": "c"}, record)
    assert f"1 of 2 lines skipped, the first {documents.description.split()[0]}:2: {reason}" in documents.description


def test_a_prompt_that_the_answers_do_not_hold_is_counted(read, caplog):
    for prompt, warnings in (("2+2? ", 0), ("Judge: 2+2?", 1)):
        caplog.clear()
        read({"prompt": prompt, "chosen": [USER, GOOD], "rejected": [USER, BAD]})
        assert [record.getMessage().rpartition(": ")[0].rpartition(": ")[2] for record in caplog.records] == [
            "prompt that is none of the messages of its answers (1 of them, such as Judge"
        ] * warnings


def config_of(tmp_path, records, data=(), train=()):
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(map(json.dumps, records)))
    given = {"source": "preferences", "paths": str(path), "tokenizer": "bytes", "packing": "best_fit", "held_out_fraction": 0.2}
    settings = {"steps": 1, "sequence_length": 64, "global_batch_sequences": 2, "loss": "dpo", "init_from": str(tmp_path)}
    both = {"data": given | dict(data), "train": settings | dict(train)}
    return load_config({"model": MODEL} | {name: {k: v for k, v in one.items() if v is not None} for name, one in both.items()})


PAIRS = [{"prompt": f"{n}+{n}=", "chosen": f"{2 * n}", "rejected": f"about {2 * n + 1}"} for n in range(40)]


def test_rows_hold_whole_pairs_side_by_side(tmp_path):
    data = load_data(config_of(tmp_path, PAIRS))
    stream = data.stream()
    rows = stream.samples(np.arange(stream.sources[0].packing.num_samples))
    found = []
    for tokens, targets, mask, positions, segments in zip(*(rows[k] for k in KEYS), strict=True):
        assert segments.max() % 2 == 0
        for number in range(1, segments.max() + 1):
            here = segments == number
            np.testing.assert_array_equal(positions[here], np.arange(here.sum()))
            # The last token of a text has no target: the next text is another.
            assert not mask[here][-1]
            np.testing.assert_array_equal(targets[here][:-1], tokens[here][1:])
            answer = bytes(targets[here & mask].tolist()).decode()
            prompt = bytes(tokens[here].tolist()).decode().removesuffix(answer)
            found.append((prompt, answer, number % 2 == 1))
    (source,) = data.sources
    keys = dict(zip(source.documents.keys.tolist(), PAIRS, strict=True))
    train = [keys[int(source.documents.keys[n])] for n in source.train]
    expected = [(p["prompt"], p[name] + "\0", name == "chosen") for p in train for name in ("chosen", "rejected")]
    assert sorted(found) == sorted(expected)
    assert 0 < len(train) < 40


KEYS = ("tokens", "targets", "mask", "positions", "segments")


def test_pairs_longer_than_a_sequence_are_left_out_and_counted(tmp_path):
    long = {"prompt": "why? ", "chosen": "a" * 30, "rejected": "b" * 30}
    data = load_data(config_of(tmp_path, [*PAIRS, long, long | {"chosen": "c" * 30}], {"held_out_fraction": 0.0}))
    assert "; 2 pairs are longer than a sequence and are left out; " in data.description
    stream = data.stream()
    rows = stream.samples(np.arange(stream.sources[0].packing.num_samples))
    assert rows["segments"].max() > 2
    assert sum(int(row.max()) for row in rows["segments"]) == 2 * len(PAIRS)


def test_nothing_that_fits_is_refused(tmp_path):
    long = {"prompt": "why? ", "chosen": "a" * 30, "rejected": "b" * 30}
    with pytest.raises(ConfigError, match=r"No pair of preferences fits into train\.sequence_length=64: use longer sequences"):
        load_data(config_of(tmp_path, [long], {"held_out_fraction": 0.0})).stream()


@pytest.mark.parametrize(
    ("data", "train", "sentence"),
    [
        ({"packing": "concat"}, {}, "data.source=preferences needs whole pairs: set data.packing=best_fit."),
        ({"tokenizer": None}, {}, "data.source=preferences needs a tokenizer: set data.tokenizer to the folder of the model."),
        ({}, {"loss": None}, "data.source=preferences holds pairs of answers: set train.loss=dpo."),
        ({"source": "chat"}, {}, "train.loss=dpo learns from pairs of answers alone: set data.source=preferences."),
        (
            {},
            {"init_from": None},
            "train.loss=dpo needs a model to begin with, which is the reference too: set train.init_from.",
        ),
        ({"paths": None}, {}, "data.source=preferences needs data.paths: give files of JSON lines or glob patterns."),
    ],
)
def test_what_does_not_belong_together_is_refused(tmp_path, data, train, sentence):
    with pytest.raises(ConfigError) as refused:
        config_of(tmp_path, PAIRS, data, train)
    assert sentence in str(refused.value)
