"""Documents of token ids that a Python program hands over (Trainer's and fit's documents=)."""

import re
import sys

import numpy as np
import pytest
from tiny import TINY

import jaxllm
from jaxllm.config import ConfigError, load_config
from jaxllm.data.iterables import given_documents
from jaxllm.data.sources import load_data


class MapStyle:
    """As PyTorch's datasets: no __iter__, and no IndexError at the end."""

    def __init__(self, items):
        self._items = items

    def __len__(self):
        return len(self._items)

    def __getitem__(self, number):
        return self._items[number % len(self._items)]


def texts(tmp_path, count=40):
    """A folder of files, and the ids of each."""
    rng = np.random.default_rng(0)
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(count):
        (folder / f"{number:02}.txt").write_bytes(rng.integers(97, 123, rng.integers(5, 60)).astype(np.uint8).tobytes())
    config = load_config({**TINY, "data": {"source": "files", "paths": [f"{folder}/*.txt"], "held_out_fraction": 0.0}})
    documents = load_data(config).sources[0].documents
    numbers = np.arange(count)
    return config, documents.read(numbers, np.zeros_like(numbers), documents.lengths)


def with_source(config, **data):
    return load_config(config.model_dump(mode="json") | {"data": {"source": "documents", **data}})


def samples_of(data, count=8):
    return data.stream().samples(np.arange(count))


def same(found, expected):
    assert found.keys() == expected.keys()
    for name in found:
        np.testing.assert_array_equal(found[name], expected[name], err_msg=name)


@pytest.mark.parametrize("form", ["lists", "arrays", "rows", "map style", "iterator", "datasets"])
def test_samples_are_those_of_a_file_of_the_same_tokens(tmp_path, form):
    config, ids = texts(tmp_path)
    items = {
        "lists": lambda: [one.tolist() for one in ids],
        "arrays": lambda: [one.astype(np.int64) for one in ids],
        "rows": lambda: [{"input_ids": one.tolist(), "attention_mask": [1] * len(one)} for one in ids],
        "map style": lambda: MapStyle(ids),
        "iterator": lambda: iter(ids),
        "datasets": lambda: pytest.importorskip("datasets").Dataset.from_dict({"input_ids": [one.tolist() for one in ids]}),
    }[form]()
    found = load_data(with_source(config, held_out_fraction=0.0), given=items)
    same(samples_of(found), samples_of(load_data(config)))
    assert found.description.startswith(f"documents of the caller: {sum(map(len, ids)):,} tokens of 40 documents to train on")


def test_padding_is_left_out_and_masks_say_what_counts(caplog):
    rows = [
        {"input_ids": [1, 2, 3, 0, 0], "attention_mask": [1, 1, 1, 0, 0], "labels": [-100, 2, 3, -100, -100], "text": "a"},
        {"input_ids": [4, 5, 6], "completion_mask": [0, 1, 1], "assistant_masks": [1, 1, 0]},
        {"input_ids": [], "url": None},
    ]
    found = given_documents(rows, None, 8)
    numbers = np.arange(2)
    spans = numbers, np.zeros_like(numbers), found.lengths
    assert [one.tolist() for one in found.read(*spans)] == [[1, 2, 3], [4, 5, 6]]
    assert [one.tolist() for one in found.scored(*spans)] == [[False, True, True], [False, True, False]]
    assert caplog.messages == ["documents= is read without 2 padding tokens, 1 empty documents, the columns text, url."]
    # All count: the text alone decides what is read.
    assert given_documents([[1, 2]], None, 8).scored(*(np.zeros(1, int),) * 2, np.array([2])) is None


def test_the_same_document_is_on_one_side_wherever_it_comes(tmp_path):
    config, ids = texts(tmp_path)
    twice = [*ids, *ids]
    data = load_data(with_source(config, held_out_fraction=0.3), given=twice)
    held_out = {twice[number].tobytes() for number in data.sources[0].held_out}
    assert held_out
    assert not held_out & {twice[number].tobytes() for number in data.sources[0].train}
    assert data.fingerprint != load_data(with_source(config, held_out_fraction=0.3), given=twice[::-1]).fingerprint


def test_a_mixture_has_them_beside_files(tmp_path):
    config, ids = texts(tmp_path)
    files = {"name": "files", "source": "files", "paths": config.data.paths, "weight": 1.0}
    parts = [files, {"name": "mine", "source": "documents", "weight": 3.0}]
    mixed = load_config(config.model_dump(mode="json") | {"data": {"mixture": parts, "held_out_fraction": 0.0}})
    data = load_data(mixed, given=[one[::-1] for one in ids])
    assert [source.name for source in data.sources] == ["files", "mine"]
    assert data.sources[1].text(np.array([3])).tolist() == ids[3][::-1].tolist()
    with pytest.raises(ConfigError, match=r"data.mixture has two sources of kind documents, and a program hands over one"):
        load_config(config.model_dump(mode="json") | {"data": {"mixture": [parts[1], {**parts[1], "name": "again"}]}})


MASK = "other than 0 and 1, whose meaning is not known: leave it out, or give 0 and 1"
REFUSED = {
    "documents= is int: give a list of documents": 5,
    "documents= has no token that is learnt: all labels or masks leave it out.": [
        {"input_ids": [1, 2], "labels": [-100, -100]}
    ],
    f"Document 0 of documents= has attention_mask {MASK}": [{"input_ids": [1, 2], "attention_mask": [0, -10000]}],
    f"Document 1 of documents= has completion_mask {MASK}": [[1], {"input_ids": [1, 2], "completion_mask": [1, 2]}],
    "Document 0 of documents= has input_ids of bool and shape [2]: it needs an integer": [[True, False]],
    "Document 0 of documents= has the columns input_ids: it needs input_ids": [None],
    "documents= is str: give a list of documents, each a list of token ids.": "a text",
    "documents= has no end: give them once": range(sys.maxsize),
    "documents= holds no token ids: give at least one document.": [[], []],
    "Document 1 of documents= has input_ids of <U6 and shape []: it needs an integer for each token; texts are": [
        [1],
        "a text",
    ],
    "Document 0 of documents= has the columns text: it needs input_ids, the token ids.": [{"text": "a"}],
    "Document 0 of documents= has input_ids of float64 and shape [2]: it needs an integer": [[0.5, 1.0]],
    "Document 0 of documents= has input_ids of int64 and shape [1, 2]: it needs an integer": [[[1, 2]]],
    "Document 0 of documents= has input_ids of object and shape [2]: it needs an integer": [[[1], [1, 2]]],
    "Document 0 of documents= has the id 8, and model.vocab_size=8": [[1, 8]],
    "Document 0 of documents= has the id -100, and model.vocab_size=8": [[-100, 1]],
    "Document 0 of documents= has labels of int64 and shape [1]: it needs an integer": [{"input_ids": [1, 2], "labels": [1]}],
    "Document 0 of documents= has other labels than input_ids: give such targets by batches=": [
        {"input_ids": [1, 2], "labels": [1, 3]}
    ],
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_refusals_are_a_sentence(sentence):
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        given_documents(REFUSED[sentence], None, 8)


def test_what_else_says_what_to_train_on_is_refused(tmp_path):
    config, ids = texts(tmp_path)
    documents = with_source(config)
    cases = [
        (config, {"documents": ids}, "documents= takes the place of data.source=files: set data.source=documents"),
        (documents, {}, "data.source=documents needs them: call jaxllm.Trainer or jaxllm.fit with documents="),
        (documents, {"documents": ids, "batches": iter(())}, "batches= and documents= both say what to train on"),
    ]
    for asked, given, sentence in cases:
        with pytest.raises(ConfigError, match=re.escape(sentence)):
            jaxllm.Trainer(asked, **given)
    with pytest.raises(ConfigError, match="documents needs them"):
        load_data(documents)


def test_a_run_resumes_on_the_same_documents_alone(tmp_path):
    """4 steps = 2 + restore + 2, bit for bit, with evaluations of what is held out."""
    config, ids = texts(tmp_path)

    def run(name, steps, documents):
        overrides = ["parallel.data=8", f"run.dir={tmp_path / name}", f"train.steps={steps}", "train.eval_every_steps=2"]
        overrides += ["optimizer.schedule=constant"]
        wanted = config.model_dump(mode="json", exclude={"data"})
        return jaxllm.fit(load_config(wanted, [*overrides, "data.held_out_fraction=0.3"]), documents=documents)

    whole = run("whole", 4, ids)
    run("halves", 2, ids)
    resumed = run("halves", 4, MapStyle(ids))
    assert resumed.step == 4
    same({"embedding": resumed.state.params["embedding"]}, {"embedding": whole.state.params["embedding"]})
    logs = [(tmp_path / name / "metrics.jsonl").read_text().splitlines()[-1] for name in ("whole", "halves")]
    assert all('"eval_loss"' in line for line in logs)
    with pytest.raises(ConfigError, match="holds a run on other text"):
        run("halves", 4, ids[1:])
