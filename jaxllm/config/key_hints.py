"""What an unknown key may mean: another trainer's name (foreign_keys.yaml), a key of another section, or one with a slip."""

import difflib
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from pydantic import BaseModel

from jaxllm.untrusted import read_yaml


@cache
def foreign_keys() -> dict[str, str]:
    """Names of other trainers, in lower case, with the key here or the end of a sentence that answers them."""
    table = read_yaml(Path(__file__).with_name("foreign_keys.yaml"))
    return {name: answer for answer, names in table.items() for name in names.split()}


def meant(root: type[BaseModel], names: Sequence[str], siblings: Mapping[str, str], cutoff: float = 0.8) -> str | None:
    """The end of a sentence that refuses a key; None if nothing like it is known.

    Args:
      root: the class of the config.
      names: of the key, after those of the sections that it was written in, which the config may not have.
      siblings: the keys that its section has, and how each is written in full.
      cutoff: how near to it the name of a key elsewhere must be; 1: the same.
    """
    names = [name.lower().replace("-", "_") for name in names]
    tails, is_ours = [".".join(names[at:]) for at in range(len(names))], names[0] in root.model_fields
    for name in (*tails, *([] if is_ours else reversed(names[:-1]))):
        if answer := foreign_keys().get(name):
            return f"did you mean {answer}?" if re.fullmatch(r"\w+(\.\w+)+", answer) else f"{answer}."
    homes: dict[str, list[str]] = {}
    for section, field in root.model_fields.items():
        for key in getattr(field.annotation, "model_fields", ()):
            homes.setdefault(key, []).append(f"{section}.{key}")
    near = difflib.get_close_matches(names[-1] if is_ours else names[0], siblings, n=1, cutoff=0.5)
    beside = [siblings[key] for key in near]
    elsewhere = [home for key in difflib.get_close_matches(names[-1], homes, n=1, cutoff=cutoff) for home in homes[key]]
    # In a section that there is, its own keys come first.
    found = (beside or elsewhere) if is_ours else (elsewhere or beside)
    return f"did you mean {' or '.join(found)}?" if found else None
