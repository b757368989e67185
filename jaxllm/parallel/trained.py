"""The part of a tree of parameters that is trained: gradients, moments and updates have no more.

Frozen weights are stored in the compute dtype, below ZeRO 3 in the layout of the train step. Matmuls make no gradients for them
(ParallelContext.block).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from jaxllm.parallel.types import Tree


def freezes(table: Tree) -> bool:
    """Whether some parameter is frozen. `table`: nested dict of Parameter."""
    return not all(parameter.trainable for parameter in jax.tree.leaves(table))


def trained(tree: Tree, table: Tree) -> Tree:
    """The trained part of a nested dict with an entry for each parameter; all of it if nothing is frozen."""
    return chosen(tree, table, lambda parameter: parameter.trainable) if freezes(table) else tree


def chosen(tree: Tree, table: Tree, which: Callable[[Any], bool]) -> Tree:
    """The part of a nested dict whose Parameters `which` chooses. Its "layers" may be empty, but are there."""
    found = {}
    for name, entry in table.items():
        if isinstance(entry, dict):
            part = chosen(tree[name], entry, which)
            if part or name == "layers":
                found[name] = part
        elif which(entry):
            found[name] = tree[name]
    return found


def with_part(tree: Tree, part: Tree) -> Tree:
    """`tree` with the leaves that are in `part`, a part of it, replaced by these."""
    if not isinstance(tree, dict):
        return part
    return {name: with_part(entry, part[name]) if name in part else entry for name, entry in tree.items()}
