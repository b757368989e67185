import csv
import gzip
import io
import json

import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pyarrow import ipc
from test_prepare import contents, encoded, here, made_up

from jaxllm.config import ConfigError
from jaxllm.data import records
from jaxllm.data.parts import DamagedFile, zstd
from jaxllm.data.rows import CsvRows, elements

TEXTS = made_up(60)


def array(texts, **style):
    return json.dumps([{"id": i, "text": text} for i, text in enumerate(texts)], **style).encode()


def rows(texts):
    sheet = io.StringIO(newline="")
    csv.writer(sheet).writerows([("id", "text"), *enumerate(texts)])
    return sheet.getvalue().encode()


def arrow(texts, opened=ipc.new_file):
    sink = io.BytesIO()
    table = pa.table({"id": range(len(texts)), "text": texts})
    with opened(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=17)
    return sink.getvalue()


FORMS = {
    "a.json": array(TEXTS),
    "b.json": b"\xef\xbb\xbf\n " + array(TEXTS, indent=2, ensure_ascii=False) + b"\n\n",
    "a.json.gz": gzip.compress(array(TEXTS)),
    "a.csv": rows(TEXTS),
    "b.csv": b"\xef\xbb\xbf" + rows(TEXTS).replace(b"\r\n", b"\n\n"),
    "a.csv.zst": zstd.compress(rows(TEXTS)),
    "a.arrow": arrow(TEXTS),
    "b.arrow": arrow(TEXTS, ipc.new_stream),
}


@pytest.mark.parametrize("name", FORMS)
def test_texts_of_tables_come_back_as_their_bytes(tmp_path, name):
    (tmp_path / name).write_bytes(FORMS[name])
    summary = here([tmp_path / name], tmp_path / "out", shard_bytes=400)
    assert contents(tmp_path / "out") == encoded("bytes", TEXTS)
    assert (summary.broken, summary.empty) == (0, 0)


WORDS = st.text('[]{}",\\ aä', max_size=8)
VALUES = st.integers() | WORDS | st.lists(WORDS | st.lists(WORDS), max_size=3) | st.dictionaries(WORDS, WORDS, max_size=3)


@settings(max_examples=60, deadline=None)
@given(st.lists(VALUES), st.integers(1, 7), st.sampled_from([None, 1]))
def test_an_array_is_cut_into_its_elements_wherever_the_blocks_end(values, size, indent):
    source = io.BytesIO(json.dumps(values, indent=indent, ensure_ascii=False).encode() + b" \n")
    found = elements(lambda wanted: source.read(min(wanted, size)), 2**20)
    assert [json.loads(element) for element in found] == values


@settings(max_examples=200, deadline=None)
@given(st.binary() | st.text('[]{}",\\ 1').map(str.encode), st.integers(1, 5))
@example(b"[}]", 1)
def test_any_bytes_are_elements_or_damaged(content, size):
    source = io.BytesIO(b"[" + content)
    try:
        joined = b",".join(elements(lambda wanted: source.read(min(wanted, size)), 2**20))
    except DamagedFile:
        return
    # Less the one bracket that ends the array, of either kind: what is no JSON shows where elements are parsed.
    assert joined.strip() == content.rstrip()[:-1].strip()
    assert content.rstrip()[-1:] in (b"]", b"}")


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(st.text(st.characters(exclude_categories=["Cs"])), min_size=2, max_size=3), min_size=1))
def test_rows_of_csv_come_back(table):
    sheet = io.StringIO(newline="")
    csv.writer(sheet, quoting=csv.QUOTE_ALL).writerows([("a", "b"), *table])
    found = CsvRows(io.BytesIO(sheet.getvalue().encode()).readline, 2**20)
    assert found.names == ["a", "b"]
    assert [row for row, _ in found] == table


BROKEN = {
    # Broken rows are named by number, and the rest is read.
    "a.json": (b'[{"text": "a"}, 7, {"no": 1}, {"text": 5}, {"text"}, {"text": "b"}]', ["a", "b"], [2, 3, 4, 5]),
    "b.json": (b'[{"text": "a"}, {"text": "b"}', ["a"], [2]),
    "c.json": (b'[{"text": "a"}, {"text": "b"}] [3]', ["a", "b"], [3]),
    "d.json": (b'[{"text": "a"},]', ["a"], [2]),
    "a.csv": (b'n,text\n1,a\n2\n3,"b"c\n4,\xff\n5,d\n', ["a", "d"], [2, 3, 4]),
    "b.csv": (b'n,text\n1,a\n2,"b\n3,c\n', ["a"], [2]),
    # A stream that was cut off.
    "a.arrow": (arrow(["a"] * 40, ipc.new_stream)[:-300], ["a"] * 34, [35]),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_is_named_by_its_row(tmp_path, name):
    content, texts, numbers = BROKEN[name]
    (tmp_path / name).write_bytes(content)
    summary = here([tmp_path / name], tmp_path / "out", max_broken_share=1)
    assert contents(tmp_path / "out") == encoded("bytes", texts)
    assert [int(line.partition(" row ")[2].partition(":")[0]) for line in summary.broken_records] == numbers


@pytest.mark.parametrize(
    ("name", "content"),
    [("a.json", b'[{"text": "a"}, {"text": "' + b"b" * 5000 + b'"}]'), ("a.csv", b'text\na\n"' + b"b\n" * 5000)],
)
def test_an_element_or_a_row_has_a_longest(tmp_path, monkeypatch, name, content):
    monkeypatch.setattr(records, "LINE_BYTES", 1000)
    (tmp_path / name).write_bytes(content)
    summary = here([tmp_path / name], tmp_path / "out", max_broken_share=1)
    assert (summary.documents, summary.broken) == (1, 1)
    assert "is longer than 0 MiB" in summary.broken_records[0]


@pytest.mark.parametrize("ending", ["csv", "arrow", "csv.gz"])
def test_a_table_without_the_column_says_which_it_has(tmp_path, ending):
    file = tmp_path / f"a.{ending}"
    file.write_bytes({"csv": rows(TEXTS), "arrow": arrow(TEXTS), "csv.gz": gzip.compress(rows(TEXTS))}[ending])
    with pytest.raises(ConfigError, match=r"has no column body: set --text-key to one of id, text\.$"):
        here([file], tmp_path / "out", text_key="body")


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.arrow", b"no arrow", "a.arrow cannot be read as Arrow ("),
        ("a.csv", b"", "a.csv has no column text: set --text-key to a column, or leave the empty file out"),
        ("a.csv.gz", b"no gzip", "a.csv.gz cannot be read (damaged gzip"),
    ],
)
def test_what_is_no_table_is_refused(tmp_path, name, content, says):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        here([tmp_path / name], tmp_path / "out")
    assert says in str(caught.value)
