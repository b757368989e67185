import hashlib
import shutil
import sysconfig
from pathlib import Path

import pytest

from jaxllm.config import ConfigError, DataConfig
from jaxllm.data.sources import load_corpus


def from_files(*paths, held_out_fraction=0.3):
    return load_corpus(DataConfig(source="files", paths=paths, held_out_fraction=held_out_fraction))


def place(name):
    return int(hashlib.sha256(name.encode()).hexdigest()[:16], 16) / 16**16


@pytest.fixture
def books(tmp_path, monkeypatch):
    """Twenty texts, each holding its own name, in the working directory."""
    for i in range(20):
        path = tmp_path / "books" / f"shelf{i % 3}" / f"{i}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(path.relative_to(tmp_path).as_posix())
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def library():
    return load_corpus(DataConfig())


def test_library_holds_exactly_its_modules(library):
    root = Path(sysconfig.get_paths()["stdlib"])
    foreign = {"site-packages", "dist-packages", "test", "tests", "idle_test", "pydoc_data", "__pycache__"}
    folders = [p for p in root.iterdir() if p.is_dir() and p.name not in foreign]
    found = [*root.glob("*.py"), *(p for folder in folders for p in folder.rglob("*.py"))]
    files = [p for p in found if p.is_file() and not foreign & set(p.relative_to(root).parts)]
    assert library.train_files + library.held_out_files == len(files)
    assert len(library.train) + len(library.held_out) == sum(p.stat().st_size + 1 for p in files)
    text = library.train.tobytes() + library.held_out.tobytes()
    assert (root / "json" / "decoder.py").read_bytes() in text


def test_library_split_follows_the_hash_of_the_relative_path(library):
    root = Path(sysconfig.get_paths()["stdlib"])
    for name in ("json/decoder.py", "traceback.py", "typing.py", "encodings/cp865.py", "inspect.py"):
        kept, other = library.train.tobytes(), library.held_out.tobytes()
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
    corpus = load_corpus(DataConfig(held_out_fraction=0))
    assert corpus.train.tobytes() == b"a\0b\0"
    assert ", 1 skipped (not UTF-8)" in corpus.description


def test_library_without_sources_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(ConfigError, match=r"^There is no Python source beneath .*: use data\.source=files with data\.paths\.$"):
        load_corpus(DataConfig())


def test_files_are_read_in_order_each_ended_by_zero(books):
    names = sorted(p.relative_to(books).as_posix() for p in books.rglob("*.txt"))
    corpus = from_files("books/**/*.txt")
    assert corpus.train.tobytes() == b"".join(n.encode() + b"\0" for n in names if place(n) >= 0.3)
    assert corpus.held_out.tobytes() == b"".join(n.encode() + b"\0" for n in names if place(n) < 0.3)
    assert corpus.train_files + corpus.held_out_files == 20
    assert corpus.train.dtype == corpus.held_out.dtype == "uint8"


def test_split_depends_on_relative_paths_alone(books, tmp_path_factory, monkeypatch):
    here = from_files("books/**/*.txt")
    elsewhere = tmp_path_factory.mktemp("another_place")
    shutil.copytree(books / "books", elsewhere / "books")
    monkeypatch.chdir(elsewhere)
    for pattern in ("books/**/*.txt", "./books/*/*.txt", str(elsewhere / "books" / "**")):
        there = from_files(pattern)
        assert there.train.tobytes() == here.train.tobytes()
        assert there.held_out.tobytes() == here.held_out.tobytes()


def test_a_new_file_moves_no_other(books):
    before = from_files("books/**/*.txt")
    (books / "books" / "new.txt").write_text("new")
    after = from_files("books/**/*.txt")
    documents = [[set(c.train.tobytes().split(b"\0")), set(c.held_out.tobytes().split(b"\0"))] for c in (before, after)]
    assert documents[0][0] <= documents[1][0]
    assert documents[0][1] <= documents[1][1]


def test_overlapping_patterns_read_a_file_once(books):
    once = from_files("books/**/*.txt")
    twice = from_files("books/**/*.txt", "books/shelf0/*.txt", str(books / "books" / "shelf1" / "*"))
    assert twice.train.tobytes() == once.train.tobytes()
    assert twice.held_out.tobytes() == once.held_out.tobytes()


def test_description_tells_different_texts_apart(books):
    first = from_files("books/**/*.txt").description
    assert first == from_files("books/**/*.txt").description
    (books / "books" / "shelf0" / "0.txt").write_text("books/shelf0/O.txt")
    second = from_files("books/**/*.txt").description
    assert first.split("; sha256 ")[0] == second.split("; sha256 ")[0]
    assert first != second


def test_one_file_holds_out_its_end(books):
    (books / "one.txt").write_bytes(b"0123456789" * 10 + b"abc")
    corpus = from_files("one.txt", held_out_fraction=0.25)
    assert corpus.train.tobytes() + corpus.held_out.tobytes() == b"0123456789" * 10 + b"abc\0"
    assert len(corpus.held_out) == 26
    assert (corpus.train_files, corpus.held_out_files) == (1, 1)


@pytest.mark.parametrize("paths", [("books/shelf0/0.txt",), ("books/**",)])
def test_fraction_zero_trains_on_everything(books, paths):
    corpus = from_files(*paths, held_out_fraction=0)
    assert len(corpus.held_out) == corpus.held_out_files == 0
    assert corpus.held_out.dtype == "uint8"
    assert corpus.train.tobytes().count(b"\0") == corpus.train_files == (1 if len(paths[0]) > 8 else 20)


def test_no_file_held_out_names_a_fraction_that_works(books):
    with pytest.raises(ConfigError) as error:
        from_files("books/**", held_out_fraction=0.0001)
    smallest = min(place(p.relative_to(books).as_posix()) for p in books.rglob("*.txt"))
    prefix = "data.held_out_fraction=0.0001 holds out none of the 20 files: raise it to "
    suffix = ", give more files, or set it to 0 to go without held-out text."
    message = str(error.value)
    assert message.startswith(prefix)
    assert message.endswith(suffix)
    advice = float(message.removeprefix(prefix).removesuffix(suffix))
    assert smallest < advice <= smallest + 0.001
    assert from_files("books/**", held_out_fraction=advice).held_out_files >= 1


def test_all_files_held_out_names_a_fraction_that_works(books):
    with pytest.raises(ConfigError, match=r"=1 holds out all 20 files: lower it to 0\.\d+\.$") as error:
        from_files("books/**", held_out_fraction=1)
    advice = float(str(error.value).rpartition(" ")[2].removesuffix("."))
    assert from_files("books/**", held_out_fraction=advice).train_files >= 1


@pytest.mark.parametrize(("fraction", "nothing"), [(1, "to train on"), (0.001, "to hold out")])
def test_one_file_that_cannot_be_cut_is_refused(books, fraction, nothing):
    with pytest.raises(
        ConfigError, match=f"^data.held_out_fraction={fraction} of one file of 19 bytes leaves nothing {nothing}:"
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


def test_arrays_are_read_only(library):
    with pytest.raises(ValueError, match="read-only"):
        library.train[0] = 0
