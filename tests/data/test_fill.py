"""`jaxllm data fill`: its counts are those of the batches that a run reads, and of a row for each document."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from jaxllm.cli.app import app
from jaxllm.config import ConfigError, load_config
from jaxllm.data.loader import SampleStream
from jaxllm.data.measures import fill
from jaxllm.data.sources import load_data

S, B = 32, 4
SIZES = {"num_layers": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "num_kv_heads": 2, "vocab_size": 256}
LENGTHS = (3, 70, 32, 64, 11, 1, 33, 20)


@pytest.fixture
def config(tmp_path):
    """config(kind, packing) -> of texts of LENGTHS, of conversations, or of pairs of which one is too long for a sequence."""
    for number, length in enumerate(LENGTHS):
        (tmp_path / f"{number}.txt").write_text("x" * length)
    answers = [{"prompt": "2+2? ", "completion": "4" * n} for n in (1, 9, 40)]
    pairs = [{"prompt": "2+2="[: 4 * n], "chosen": "4" + "4" * n, "rejected": "5"} for n in (0, 1, 5, 40)]
    for name, records in (("chat", answers), ("preferences", pairs)):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, records)))

    def make(kind, packing, **data):
        paths = [str(tmp_path / ("*.txt" if kind == "files" else f"{kind}.jsonl"))]
        given = {"source": kind, "paths": paths, "tokenizer": "bytes", "packing": packing, "held_out_fraction": 0.0}
        train = {"steps": 1, "sequence_length": S, "global_batch_sequences": B}
        if kind == "preferences":
            train |= {"loss": "dpo", "init_from": str(tmp_path)}
        return load_config({"model": SIZES, "data": given | data, "train": train})

    return make


@pytest.mark.parametrize(
    ("kind", "packing"),
    [("files", "concat"), ("files", "best_fit"), ("chat", "concat"), ("chat", "best_fit"), ("preferences", "best_fit")],
)
def test_the_counts_are_those_of_the_batches(config, kind, packing):
    loaded = config(kind, packing)
    padded, packed = fill(loaded).rows
    data = load_data(loaded)
    (source,) = data.sources
    rows = data.stream().sources[0].in_order(range(packed.sequences + 1))
    assert packed.sequences == np.flatnonzero(rows["segments"].any(1))[-1] + 1
    assert (packed.tokens, packed.targets) == ((rows["segments"] > 0).sum(), rows["mask"].sum())
    # One document after another, each packed alone.
    fits = source.train if kind != "preferences" else source.train[source.documents.lengths[source.train] <= S]
    alone = [data._packed(source, np.array([number])) for number in fits]
    rows = [one.in_order(range(one.packing.num_samples)) for one in alone]
    assert padded.sequences == sum(len(one["tokens"]) for one in rows)
    assert padded.tokens == sum((one["segments"] > 0).sum() for one in rows) == packed.tokens
    assert padded.targets == sum(one["mask"].sum() for one in rows) == packed.targets
    for row in (padded, packed):
        assert row.positions == S * row.sequences
        assert row.token_share == row.tokens / row.positions
        assert row.targets_a_step == pytest.approx(B * S * row.target_share)


def test_each_source_of_a_mixture_has_its_rows(config):
    texts, chat = config("files", "concat"), config("chat", "concat")
    parts = [
        {"name": name, "weight": 1.0, "source": one.data.source, "paths": list(one.data.paths)}
        for name, one in (("texts", texts), ("answers", chat))
    ]
    both = load_config(
        {
            "model": SIZES,
            "data": {"mixture": parts, "tokenizer": "bytes", "held_out_fraction": 0.0},
            "train": {"steps": 1, "sequence_length": S, "global_batch_sequences": B},
        }
    )
    assert isinstance(load_data(both).stream(), SampleStream)
    found = [(row.source, row.way, row.tokens, row.targets, row.sequences) for row in fill(both).rows]
    one_by_one = [
        (name, row.way, row.tokens, row.targets, row.sequences)
        for name, one in (("texts", texts), ("answers", chat))
        for row in fill(one).rows
    ]
    assert found == one_by_one


def test_the_command_prints_what_python_gives(config, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps(config("files", "concat").model_dump(mode="json")))
    found = fill(config("files", "concat"))
    assert json.loads(CliRunner().invoke(app, ["data", "fill", str(recipe), "--json"]).stdout) == found.to_json()
    said = CliRunner().invoke(app, ["data", "fill", str(recipe)]).stdout
    # 234 bytes and 8 ends of documents: 14 sequences of 32 for the documents alone, 8 together.
    assert " 14 sequences;  54.0% of positions hold a token,  52.2% have a loss: 67 tokens a step\n" in said
    assert "  8 sequences;  94.5% of positions hold a token,  91.4% have a loss: 117 tokens a step\n" in said
    assert said.endswith("files: padded, the same tokens take 1.75 times the steps\n")


def test_what_has_no_documents_is_refused(config):
    with pytest.raises(ConfigError, match=r"^data.mask_documents=false makes one text of all documents"):
        fill(config("files", "concat", mask_documents=False))
    given = config("files", "concat").model_dump(mode="json")
    given["data"] |= {"source": "given", "paths": [], "tokenizer": None}
    with pytest.raises(ConfigError, match=r"^data.source=given has no text here: name one\.$"):
        fill(load_config(given))
