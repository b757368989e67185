"""jaxllm.prepare against `jaxllm data prepare` on JSON lines of the same texts."""

import json
import subprocess
import sys
from pathlib import Path

import grain
import pytest
from typer.testing import CliRunner

import jaxllm
from jaxllm.cli.app import app
from jaxllm.config import ConfigError
from jaxllm.data.prepare import prepare as prepare_files

TEXTS = [f"{i} law mesh ring äxis \n" * (i % 9 + 1) for i in range(300)]


def bytes_of(folder):
    """All files but the shards' .json, which have the inputs' names and dates."""
    return {
        path.name: path.read_bytes()
        for path in folder.iterdir()
        if not path.name.endswith(".json") or path.name == "manifest.json"
    }


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    parent = tmp_path_factory.mktemp("lines")
    (parent / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    words = [
        "data",
        "prepare",
        str(parent / "texts.jsonl"),
        "--out",
        str(parent / "out"),
        "--tokenizer",
        "bytes",
        "--workers=1",
    ]
    assert CliRunner().invoke(app, words).exit_code == 0
    return bytes_of(parent / "out")


class Rows:
    """As a map dataset of Hugging Face's datasets: rows by number, and iteration."""

    def __len__(self):
        return len(TEXTS)

    def __getitem__(self, number):
        return {"id": number, "text": TEXTS[number]}

    def __iter__(self):
        return (self[number] for number in range(len(self)))


KINDS = {
    "generator": lambda: (text for text in TEXTS),
    "rows": Rows,
    "grain map": lambda: grain.MapDataset.source(TEXTS),
    "grain rows": lambda: grain.MapDataset.source(Rows()),
    "grain iter": lambda: grain.MapDataset.source(TEXTS).to_iter_dataset(),
    # Grain has None in the place of what a filter leaves out.
    "grain filter": lambda: grain.MapDataset.source([*TEXTS, ""]).filter(bool),
}


def here(texts, folder, **options):
    return jaxllm.prepare(texts, folder, **{"tokenizer": "bytes", "workers": 1, "progress": False, **options})


@pytest.mark.parametrize("kind", KINDS)
def test_the_folder_is_that_of_json_lines(kind, expected, tmp_path):
    summary = here(KINDS[kind](), tmp_path / "new/out")
    assert bytes_of(tmp_path / "new/out") == expected
    assert (summary.documents, summary.folder, summary.complete) == (len(TEXTS), str(tmp_path / "new/out"), True)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["out"]


def test_a_folder_that_is_there_is_refused_or_taken(tmp_path):
    first = here(TEXTS, tmp_path / "out")
    with pytest.raises(ConfigError, match=r"out exists: pass reuse=True to train on what it holds, name another folder, or"):
        here(["other"], tmp_path / "out")

    def never():
        raise AssertionError("read")
        yield

    again = here(never(), tmp_path / "out", reuse=True)
    assert (again.documents, again.tokens, again.text_bytes) == (first.documents, first.tokens, first.text_bytes)
    assert again.complete
    assert again.shards_written == 0
    (tmp_path / "words").mkdir()
    (tmp_path / "words/tokenizer.json").write_text(
        '{"model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "a"}}'
    )
    (tmp_path / "words/tokenizer_config.json").write_text('{"eos_token": "b"}')
    with pytest.raises(ConfigError, match=r"out holds tokens of bytes, not of .*words: name another folder"):
        here(never(), tmp_path / "out", reuse=True, tokenizer=str(tmp_path / "words"))


def test_a_stop_leaves_nothing(tmp_path):
    def broken():
        yield "law"
        raise OSError("the dataset's server is away")

    with pytest.raises(OSError, match="server is away"):
        here(broken(), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_text_is_named(tmp_path):
    for texts, says in (
        (["a", 3], "Row 1 of texts is int, not a string: give texts, or rows with text_key"),
        ([{"content": "a", "id": 1}], "Row 0 of texts has no text: set text_key to one of content, id"),
        # Where this is not noticed, it ends as a row that is no text.
        (grain.MapDataset.source([3]).repeat(), "texts has no end: give them once"),
        ([], r"texts holds no text \(it is empty\): check it and text_key"),
        ([None], "Row 0 of texts is NoneType, not a string"),
        ([{"text": None}] * 2, r"texts holds no text \(row 0 of texts: field 'text' is not a string\)"),
        (["", ""], "The inputs hold no text"),
        ("some text", "texts is a text itself: give a list of texts, or `jaxllm data prepare some text`"),
        (
            [f"{Path(__file__).parents[1]}/*.json", "more.txt"],
            r"Row 0 of texts names a file \(.*\*\.json\): give its text, or use `jaxllm data prepare`",
        ),
    ):
        with pytest.raises(ConfigError, match=says):
            here(texts, tmp_path / "out")
        assert list(tmp_path.iterdir()) == []
    assert here([{"content": "a"}, {"content": None}], tmp_path / "out", text_key="content").broken == 1
    assert here(["config.json"], tmp_path / "spoken").documents == 1
    texts = [{"text": "a"}, {"text": None}, {"text": "\ud800"}]
    with pytest.raises(ConfigError) as refused:
        here(texts, tmp_path / "share")
    assert str(refused.value) == (
        "2 of 3 records of texts cannot be used, the first row 1 of texts: field 'text' is not a string: fix them or leave "
        "them out, or set max_broken_share=0.67 to do without them."
    )
    taken = here(texts, tmp_path / "share", max_broken_share=0.67)
    assert (taken.documents, taken.broken) == (1, 2)
    assert taken.broken_records[1] == "row 2 of texts: field 'text' holds half a surrogate pair"
    with pytest.raises(ConfigError, match=r"^max_broken_share=2 is not valid: it should be from 0 to 1\.$"):
        here(["a"], tmp_path / "no", max_broken_share=2)
    prepare_files([__file__], tmp_path / "part", tokenizer="bytes", workers=1, progress=False, shard=(1, 2))
    with pytest.raises(ConfigError, match=r"part is not a prepared folder|part is not complete"):
        here(["a"], tmp_path / "part", reuse=True)


def test_of_two_calls_at_once_the_slower_is_refused_and_neither_takes_the_files_of_the_other(tmp_path):
    def broken():
        yield "law"
        raise OSError("away")

    def while_another_fails():
        yield TEXTS[0]
        with pytest.raises(OSError, match="away"):
            here(broken(), tmp_path / "first")
        yield from TEXTS[1:]

    def while_another_ends():
        yield from TEXTS
        assert here(["other"], tmp_path / "second").documents == 1

    assert here(while_another_fails(), tmp_path / "first").documents == len(TEXTS)
    with pytest.raises(ConfigError, match=r"second exists: pass reuse=True to train on what it holds, name another folder, or"):
        here(while_another_ends(), tmp_path / "second")
    assert here([], tmp_path / "second", reuse=True).documents == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "second"]


def test_workers_of_a_script_without_a_guard_say_so(tmp_path):
    """Each imports the script, which would start workers again."""
    script = tmp_path / "script.py"
    script.write_text(
        f"""
import jaxllm
jaxllm.prepare(({{"text": f"row {{i}} " + "x" * 5000}} for i in range(2500)), {str(tmp_path / "out")!r}, tokenizer="bytes",
               workers=2, progress=False)
"""
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "jaxllm.config.errors.ConfigError: A worker failed while it imported the script that started it: call jaxllm.prepare "
        "under `if __name__ == '__main__':` in a file, not from standard input, or set workers=1."
    )
