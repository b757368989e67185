"""Files by pattern are those that glob finds, and a limit ends the search."""

import glob
import os

import pytest

from jaxllm.config import ConfigError, file_patterns
from jaxllm.config.file_patterns import Listing
from jaxllm.data import sources
from jaxllm.data.sources import read_texts

PATTERNS = [
    *("*", "**", "**/", "**/*", "**/*.txt", "*/**", "*/**/*.txt", "a/**/*.txt", "a/**/b/*.txt", "**/b/**/*", "**/b/*.txt"),
    *(
        "**/.hidden",
        "**/.*",
        ".folder/**",
        "a**/*.txt",
        "**/**",
        "**/**/1.txt",
        "**/[12].txt",
        "./**/1.txt",
        "a//**//1.txt",
        "**//**/1.txt",
        "a/**/b/**/c/*",
    ),
    *("[ab]/**/1.txt", "a/1.txt", "nothing/**", "nothing", "a/1.txt/**", "**/?[*].txt", "a\0/**", ""),
]


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """Folders with hidden files and folders, odd names, a link to a file, one to nothing, and one that makes a circle."""
    monkeypatch.chdir(tmp_path)
    for folder in (".", "a", "a/b", "a/b/c", "b", "b/b", ".folder", "a/.folder", "a/x[1]"):
        os.makedirs(folder, exist_ok=True)
        for name in ("1.txt", "2.txt", "3.md", ".hidden", "x*.txt"):
            (tmp_path / folder / name).write_text("text")
    os.symlink("1.txt", "a/linked.txt")
    os.symlink("nowhere", "a/dangling.txt")
    os.symlink("../b", "a/to_b")
    os.symlink("..", "b/b/circle")
    return tmp_path


def is_behind_a_link(path):
    return any(os.path.islink(path[:end]) for end in range(1, len(path) + 1) if path[end : end + 1] in ("/", ""))


@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_files_are_those_of_glob_and_each_once(tree, pattern):
    found = list(Listing().files(pattern))
    if "\0" in pattern:
        assert not found
        return
    expected = {path for path in glob.iglob(pattern, recursive=True) if os.path.isfile(path)}
    without_links = {path for path in expected if not is_behind_a_link(path)}
    assert without_links <= set(found) <= expected
    assert sorted(map(os.path.realpath, found)) == sorted(set(map(os.path.realpath, expected)))


@pytest.mark.parametrize(
    "links", [{"l": "."}, {"l": ".", "m": "."}, {"a/up": "..", "a/m": "../b"}, {"x": "a", "y": "a"}, {"x": "y", "y": "x"}]
)
@pytest.mark.parametrize("pattern", ["**/*.txt", "*/**/*.txt", "*/*/*.txt", "*/*", "**/a/*.txt", "*/a/**", "*/b/1.txt"])
def test_links_multiply_no_file(tmp_path, monkeypatch, links, pattern, capfd):
    monkeypatch.chdir(tmp_path)
    for folder in ("a", "b", "a/b"):
        os.makedirs(folder)
        (tmp_path / folder / "1.txt").write_text("text")
    without = set(Listing().files(pattern))
    for name, target in links.items():
        os.symlink(target, name)
    found = list(Listing().files(pattern))
    assert sorted(found, key=is_behind_a_link) == found
    assert without <= set(found)
    real = list(map(os.path.realpath, found))
    assert len(real) == len(set(real)) <= 3
    assert list(Listing().files(pattern)) == found
    if (pattern, links) == ("**/*.txt", {"l": ".", "m": "."}):
        assert "**/*.txt: left out 2 times what is listed already" in capfd.readouterr().err


def test_what_is_too_much_to_read_at_the_start_is_refused(tree, monkeypatch):
    assert len(read_texts(("**/*.txt",))) > 20
    monkeypatch.setattr(sources, "MOST_FILES", 20)
    with pytest.raises(ConfigError, match=r"^data\.paths is too much to tok.* \(it names more than 20 files"):
        read_texts(("**/*.txt",))
    monkeypatch.setattr(sources, "MOST_ENTRIES", 30)
    with pytest.raises(ConfigError, match=r" \(below \*\*/\*\.txt are more than 30 files and folders\): name a smaller"):
        read_texts(("**/*.txt",))


def test_a_long_search_says_how_far_it_is(tree, monkeypatch, capfd):
    monkeypatch.setattr(file_patterns, "_SECONDS_BETWEEN_LINES", -1)
    list(Listing().files("**/*.txt"))
    assert "jaxllm: listing **/*.txt: " in capfd.readouterr().err


def test_a_pattern_may_have_many_stars(tree):
    assert list(Listing().files("**/" * 3000 + "3.md")) != []
    assert list(Listing().files("**/nothing/" * 3000 + "3.md")) == []
