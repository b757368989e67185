"""Hostile recipes, overrides and command lines."""

from pathlib import Path

from hostile import Case, train


def recipe(text: str):
    return lambda: Path("base.yaml").write_text(text)


CASES = [
    Case("duplicate key", train(), "line 3: the key steps is there twice", recipe("train:\n  steps: 4\n  steps: 7\n")),
]
