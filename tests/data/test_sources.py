import hashlib
import json
import shutil
import sysconfig
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from megatron_files import write

from jaxllm.config import ConfigError, load_config
from jaxllm.data.prepare import prepare
from jaxllm.data.sources import load_data
from jaxllm.data.tokenizer import load_tokenizer

MODEL = {"num_layers": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 1, "vocab_size": 256}
TRAIN = {"steps": 1, "sequence_length": 16, "global_batch_sequences": 1}


class Read:
    """The bytes that a data section reads."""

    def __init__(self, vocab_size=256, **data):
        config = load_config({"model": MODEL | {"vocab_size": vocab_size}, "train": TRAIN, "data": data})
        self.data = load_data(config)
        (self.source, *_) = self.data.sources
        self.train, self.held_out = self.text(self.source.train), self.text(self.source.held_out)
        self.train_documents, self.held_out_documents = len(self.source.train), len(self.source.held_out)

    def text(self, which):
        return self.source.text(which).astype(np.uint8).tobytes()


def from_files(*paths, held_out_fraction=0.3, **data):
    return Read(source="files", paths=paths, held_out_fraction=held_out_fraction, **data)


def place(name):
    return int(hashlib.sha256(name.encode()).hexdigest()[:16], 16) / 16**16


@pytest.fixture
def books(tmp_path, monkeypatch):
    """Twenty texts in the working directory, each with its own name as content."""
    for i in range(20):
        path = tmp_path / "books" / f"shelf{i % 3}" / f"{i}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(path.relative_to(tmp_path).as_posix())
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def library():
    return Read()


def test_library_holds_exactly_its_modules(library):
    root = Path(sysconfig.get_paths()["stdlib"])
    foreign = {"site-packages", "dist-packages", "test", "tests", "idle_test", "pydoc_data", "__pycache__"}
    folders = [p for p in root.iterdir() if p.is_dir() and p.name not in foreign]
    found = [*root.glob("*.py"), *(p for folder in folders for p in folder.rglob("*.py"))]
    files = [p for p in found if p.is_file() and not foreign & set(p.relative_to(root).parts)]
    assert library.train_documents + library.held_out_documents == len(files)
    assert len(library.train) + len(library.held_out) == sum(p.stat().st_size + 1 for p in files)
    text = library.train + library.held_out
    assert (root / "json" / "decoder.py").read_bytes() in text


def test_library_split_follows_the_hash_of_the_relative_path(library):
    root = Path(sysconfig.get_paths()["stdlib"])
    for name in ("json/decoder.py", "traceback.py", "typing.py", "encodings/cp865.py", "inspect.py"):
        kept, other = library.train, library.held_out
        if place(name) < 0.05:
            kept, other = other, kept
        text = (root / name).read_bytes() + b"\0"
        assert text in kept
        assert text not in other


def test_library_leaves_out_and_counts_what_is_not_utf8(tmp_path, monkeypatch):
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "a.py").write_text("excluded")
    (tmp_path / "latin.py").write_bytes(b"# caf\xe9")
    (tmp_path / "b.py").write_text("b")
    (tmp_path / "a.py").write_text("a")
    (tmp_path / "notes.txt").write_text("no source")
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    corpus = Read(held_out_fraction=0)
    assert corpus.train == b"a\0b\0"
    assert ", 1 skipped (not UTF-8)" in corpus.data.description


def test_library_without_sources_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(ConfigError, match=r"^There is no Python source below .*: use data\.source=files with data\.paths\.$"):
        Read()


def test_files_are_read_in_order_each_ended_by_zero(books):
    names = sorted(p.relative_to(books).as_posix() for p in books.rglob("*.txt"))
    corpus = from_files("books/**/*.txt")
    assert corpus.train == b"".join(n.encode() + b"\0" for n in names if place(n) >= 0.3)
    assert corpus.held_out == b"".join(n.encode() + b"\0" for n in names if place(n) < 0.3)
    assert corpus.train_documents + corpus.held_out_documents == 20


def test_split_depends_on_relative_paths_alone(books, tmp_path_factory, monkeypatch):
    here = from_files("books/**/*.txt")
    elsewhere = tmp_path_factory.mktemp("another_place")
    shutil.copytree(books / "books", elsewhere / "books")
    monkeypatch.chdir(elsewhere)
    for pattern in ("books/**/*.txt", "./books/*/*.txt", str(elsewhere / "books" / "**")):
        there = from_files(pattern)
        assert there.train == here.train
        assert there.held_out == here.held_out


def test_a_new_file_moves_no_other(books):
    before = from_files("books/**/*.txt")
    (books / "books" / "new.txt").write_text("new")
    after = from_files("books/**/*.txt")
    documents = [[set(c.train.split(b"\0")), set(c.held_out.split(b"\0"))] for c in (before, after)]
    assert documents[0][0] <= documents[1][0]
    assert documents[0][1] <= documents[1][1]


def test_overlapping_patterns_read_a_file_once(books):
    once = from_files("books/**/*.txt")
    twice = from_files("books/**/*.txt", "books/shelf0/*.txt", str(books / "books" / "shelf1" / "*"))
    assert twice.train == once.train
    assert twice.held_out == once.held_out


def test_description_tells_different_texts_apart(books):
    first = from_files("books/**/*.txt").data.description
    assert first == from_files("books/**/*.txt").data.description
    (books / "books" / "shelf0" / "0.txt").write_text("books/shelf0/O.txt")
    second = from_files("books/**/*.txt").data.description
    assert first.split("; sha256 ")[0] == second.split("; sha256 ")[0]
    assert first != second


def test_one_file_holds_out_its_end(books):
    (books / "one.txt").write_bytes(b"0123456789" * 10 + b"abc")
    corpus = from_files("one.txt", held_out_fraction=0.25)
    assert corpus.train + corpus.held_out == b"0123456789" * 10 + b"abc\0"
    assert len(corpus.held_out) == 26
    assert (corpus.train_documents, corpus.held_out_documents) == (1, 1)


@pytest.mark.parametrize("paths", [("books/shelf0/0.txt",), ("books/**",)])
def test_fraction_zero_trains_on_everything(books, paths):
    corpus = from_files(*paths, held_out_fraction=0)
    assert len(corpus.held_out) == corpus.held_out_documents == 0
    assert corpus.train.count(b"\0") == corpus.train_documents == (1 if len(paths[0]) > 8 else 20)


def test_no_file_held_out_names_a_fraction_that_works(books):
    with pytest.raises(ConfigError) as error:
        from_files("books/**", held_out_fraction=0.0001)
    smallest = min(place(p.relative_to(books).as_posix()) for p in books.rglob("*.txt"))
    prefix = "data.held_out_fraction=0.0001 holds out none of the 20 documents: raise it to "
    suffix = ", give more documents, or set it to 0 to train without held-out text."
    message = str(error.value)
    assert message.startswith(prefix)
    assert message.endswith(suffix)
    advice = float(message.removeprefix(prefix).removesuffix(suffix))
    assert smallest < advice <= smallest + 0.001
    assert from_files("books/**", held_out_fraction=advice).held_out_documents >= 1


def test_all_files_held_out_names_a_fraction_that_works(books):
    with pytest.raises(ConfigError, match=r"=1 holds out all 20 documents: lower it to 0\.\d+\.$") as error:
        from_files("books/**", held_out_fraction=1)
    advice = float(str(error.value).rpartition(" ")[2].removesuffix("."))
    assert from_files("books/**", held_out_fraction=advice).train_documents >= 1


@pytest.mark.parametrize(("fraction", "nothing"), [(1, "to train on"), (0.001, "to hold out")])
def test_one_file_that_cannot_be_cut_is_refused(books, fraction, nothing):
    with pytest.raises(
        ConfigError, match=f"^data.held_out_fraction={fraction} of one document of 19 tokens leaves nothing {nothing}:"
    ):
        from_files("books/shelf0/0.txt", held_out_fraction=fraction)


def test_undecodable_file_is_refused_by_name_and_place(books):
    (books / "books" / "image.bin").write_bytes(b"abc\xff")
    with pytest.raises(
        ConfigError,
        match=r"^books/image\.bin is not UTF-8 text \(byte 3\): convert it or leave it out of data\.paths\.$",
    ):
        from_files("books/**")


def test_files_without_text_are_refused(books):
    for name in ("x.md", "y.md"):
        (books / name).touch()
    with pytest.raises(ConfigError, match=r"^The files of data\.paths \(\*\.md\) hold no text: name files that do\.$"):
        from_files("*.md")


# ------------------------------------------------------------------------------------------- prepared folders and mixtures


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    """Fifty texts as prepared bytes, as tokens of a 300-id tokenizer, and as Megatron files."""
    folder = tmp_path_factory.mktemp("shelf")
    lines = [json.dumps({"text": f"text number {i} " * (1 + i % 7)}) for i in range(50)]
    (folder / "lines.jsonl").write_text("\n".join(lines))
    (folder / "words.txt").write_text("\n".join(lines).replace("{", "("))
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token=None))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(lines, trainer)
    (folder / "tokenizer").mkdir()
    tokenizer.save(str(folder / "tokenizer" / "tokenizer.json"))
    (folder / "tokenizer" / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    for name, kind in (("bytes", "bytes"), ("tokens", str(folder / "tokenizer"))):
        prepare([str(folder / "lines.jsonl")], folder / name, tokenizer=kind, workers=1, progress=False)
    write(folder / "megatron", [[[i % 256] * (1 + i)] for i in range(60)])
    return folder


def part(name, source, *paths, weight=1.0):
    return {"name": name, "source": source, "paths": list(map(str, paths)), "weight": weight}


def test_a_prepared_folder_holds_its_texts_and_tokenizer(shelf):
    corpus = Read(source="prepared", paths=[str(shelf / "bytes")], held_out_fraction=0.2)
    texts = {f"text number {i} " * (1 + i % 7) for i in range(50)}
    kept, other = (set(text.decode().split("\0")[:-1]) for text in (corpus.train, corpus.held_out))
    assert kept | other == texts
    assert len(kept) + len(other) == 50
    assert corpus.data.unit == "byte"


def test_held_out_documents_are_those_of_their_texts_hash(shelf, tmp_path):
    """The same documents are held out in another order and beside other texts."""
    lines = (shelf / "lines.jsonl").read_text().splitlines()
    more = [json.dumps({"text": f"more {i}"}) for i in range(20)]
    (tmp_path / "again.jsonl").write_text("\n".join(more + lines[::-1]))
    prepare([str(tmp_path / "again.jsonl")], tmp_path / "again", tokenizer="bytes", workers=1, progress=False)
    before, after = (
        set(Read(source="prepared", paths=[str(folder)], held_out_fraction=0.2).held_out.split(b"\0"))
        for folder in (shelf / "bytes", tmp_path / "again")
    )
    assert before <= after
    assert all(text.startswith(b"more") for text in after - before)


def test_several_folders_are_one_source(shelf, tmp_path):
    (tmp_path / "two.jsonl").write_text('{"text": "and another"}\n')
    prepare([str(tmp_path / "two.jsonl")], tmp_path / "two", tokenizer="bytes", workers=1, progress=False)
    paths = [str(shelf / "bytes"), str(tmp_path / "two")]
    one, both = (Read(source="prepared", paths=these, held_out_fraction=0) for these in (paths[:1], paths))
    assert both.train == one.train + b"and another\0"
    assert both.data.fingerprint != one.data.fingerprint


def test_a_mixture_of_every_kind(shelf):
    mixture = [
        part("pages", "prepared", shelf / "tokens", weight=2),
        part("lines", "files", shelf / "words.txt"),
        part("old", "megatron", shelf / "megatron"),
    ]
    data = Read(vocab_size=300, mixture=mixture, held_out_fraction=0).data
    assert data.tokenizer.sha256 == load_tokenizer(str(shelf / "tokenizer")).sha256
    # Texts beside a prepared folder use its tokenizer.
    lines = data.sources[1]
    assert data.tokenizer.decode(lines.text(lines.train)) == (shelf / "words.txt").read_text()
    stream = data.stream()
    assert stream.counts == [2048, 1024, 1024]
    assert stream.samples(np.arange(64))["tokens"].max() < 300
    for name in ("pages (2): tokens", "lines (1): ", "old (1): Megatron-LM files"):
        assert name in data.description


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (
            {"mixture": [("a", "prepared", "bytes"), ("b", "prepared", "tokens")]},
            "a and b have different tokenizers (bytes and tokenizer): prepare all sources with one.",
        ),
        (
            {"source": "prepared", "paths": ["bytes"], "tokenizer": "tokenizer"},
            "have different tokenizers (tokenizer and bytes): prepare all sources with one.",
        ),
        (
            {"source": "prepared", "paths": ["tokens"]},
            "The tokenizer tokenizer has 300 ids and model.vocab_size=256: set model.vocab_size to at least 300, or choose",
        ),
        (
            {"source": "files", "paths": ["words.txt"], "tokenizer": "tokenizer"},
            "The tokenizer tokenizer has 300 ids and model.vocab_size=256",
        ),
        ({"source": "prepared", "paths": ["tokenizer"]}, "tokenizer is not a prepared folder (it has no manifest.json)"),
    ],
)
def test_tokenizers_that_do_not_fit_are_refused(shelf, data, sentence):
    if "mixture" in data:
        data = {"mixture": [part(name, kind, shelf / path) for name, kind, path in data["mixture"]]}
    else:
        data = data | {"paths": [str(shelf / path) for path in data["paths"]]}
    if "tokenizer" in data:
        data |= {"tokenizer": str(shelf / data["tokenizer"])}
    with pytest.raises(ConfigError) as error:
        Read(**data)
    assert sentence in str(error.value)


def test_ids_beyond_the_vocabulary_are_refused_when_read(shelf, tmp_path):
    prefix = write(tmp_path / "large", [[[300] * 40]])
    data = Read(source="megatron", paths=[str(prefix)], held_out_fraction=0).data
    with pytest.raises(
        ConfigError, match=r"^Source megatron holds the token id 300 and model\.vocab_size=256 \(id \d+ of .*large\.bin\): "
    ):
        data.stream().samples(np.arange(2))


def test_too_short_a_text_is_refused_with_its_length(books):
    data = from_files("books/shelf0/0.txt", held_out_fraction=0.3).data
    with pytest.raises(
        ConfigError, match=r"^The training text of files has 13 tokens, fewer than train\.sequence_length=16: give"
    ):
        data.stream()


def test_a_fingerprint_knows_text_and_fraction(shelf, tmp_path):
    one, fraction, other = (
        Read(source="prepared", paths=[str(shelf / folder)], held_out_fraction=f, vocab_size=300).data.fingerprint
        for folder, f in (("bytes", 0.2), ("bytes", 0.3), ("tokens", 0.2))
    )
    assert len({one, fraction, other}) == 3
    shutil.copytree(shelf / "bytes", tmp_path / "elsewhere")
    moved = Read(source="prepared", paths=[str(tmp_path / "elsewhere")], held_out_fraction=0.2).data
    assert moved.fingerprint == one


def test_held_out_text_is_packed_once(books):
    data = from_files("books/**").data
    assert data.held_out[0] is data.held_out[0]


@pytest.mark.parametrize("small", ["one.txt", "few/*"])
def test_a_source_too_small_to_hold_anything_out_is_trained_on_whole(books, small):
    (books / "few").mkdir()
    for name in ("one.txt", "few/a.txt", "few/b.txt", "few/c.txt"):
        (books / name).write_text("ab")
    fraction = min(place(p.relative_to(books).as_posix()) for p in books.glob("books/*/*.txt")) + 1e-9
    assert all(place(f"few/{letter}.txt") > fraction for letter in "abc")
    mixture = [part("small", "files", small), part("large", "files", "books/**/*.txt")]
    data = Read(mixture=mixture, held_out_fraction=fraction).data
    assert [len(source.held_out) for source in data.sources] == [0, 1]
    assert [len(source.train) for source in data.sources] == [1 if small == "one.txt" else 3, 19]
    assert data.sources[0].train_tokens == 3 * len(data.sources[0].train)
    assert [packed.name for packed in data.held_out] == ["large"]


@pytest.mark.parametrize(
    ("fraction", "paths", "sentence"),
    [
        (0.0001, "few/*", "Source small: data.held_out_fraction=0.0001 holds out none of the 3 documents: raise it to "),
        (0.0001, "few/a.txt", "Source small: data.held_out_fraction=0.0001 of one document of 3 tokens leaves nothing to hold"),
        (1, "few/*", "Source small: data.held_out_fraction=1 holds out all 3 documents: lower it to "),
        (1, "few/a.txt", "Source small: data.held_out_fraction=1 of one document of 3 tokens leaves nothing to train on: "),
    ],
)
def test_a_mixture_that_holds_out_nothing_or_all_names_a_source(books, fraction, paths, sentence):
    (books / "few").mkdir()
    for letter in "abc":
        (books / "few" / f"{letter}.txt").write_text("ab")
    mixture = [part("small", "files", paths), part("large", "files", "books/**/*.txt")]
    with pytest.raises(ConfigError) as error:
        Read(mixture=mixture, held_out_fraction=fraction)
    assert str(error.value).startswith(sentence)
    assert "\n" not in str(error.value)
