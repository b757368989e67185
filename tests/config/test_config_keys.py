"""Every key of the config is read by something that runs: one that only validators look at would be accepted and mean nothing.

From the syntax trees alone: `section.key`, where `section` is spelled out (config.train.steps), or is a name that was assigned
or annotated as that section in the same file (train = config.train; model: ModelConfig).
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel

from jaxllm import config as config_module
from jaxllm.config import Config, RopeScaling, SourceConfig

PACKAGE = Path(config_module.__file__).parent
SECTIONS: dict[str, type[BaseModel]] = {name: field.annotation for name, field in Config.model_fields.items()}
OTHERS = {"rope_scaling": RopeScaling, "sources": SourceConfig, "mixture": SourceConfig}
CLASSES = {cls.__name__: cls for cls in (*SECTIONS.values(), *OTHERS.values())}
NAMED = {**SECTIONS, **OTHERS}
CHECKS = ("_check", "_derive", "check_split", "check_diloco", "check_batch_schedule")


def keys() -> list[tuple[str, str]]:
    return [(cls.__name__, key) for cls in CLASSES.values() for key in cls.model_fields]


def is_checked_only(function: ast.AST) -> bool:
    """Validators, and the functions they call, refuse configs; reading a key there gives it no meaning."""
    return isinstance(function, ast.FunctionDef) and function.name.startswith(CHECKS)


def walk(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    for child in ast.iter_child_nodes(node):
        if not is_checked_only(child):
            yield from walk(child)


def last_name(node: ast.AST) -> str | None:
    """train of `train` and of `self.config.train`."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else None


def aliases(tree: ast.AST) -> dict[str, set[type[BaseModel]]]:
    """What names of a file stand for sections: assigned, looped over, or annotated."""
    found: dict[str, set[type[BaseModel]]] = {}

    def note(target: ast.AST, value: ast.AST) -> None:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            for one, of in zip(target.elts, value.elts, strict=False):
                note(one, of)
        elif (name := last_name(target)) is not None:
            if isinstance(value, ast.Attribute) and value.attr in NAMED:
                found.setdefault(name, set()).add(NAMED[value.attr])
            elif isinstance(value, ast.Name) and value.id in found:
                # self._config = config
                found.setdefault(name, set()).update(found[value.id])

    # Twice: a name may be passed on before this walk, which goes by depth, came to where it is annotated.
    for node in [*ast.walk(tree), *ast.walk(tree)]:
        match node:
            case ast.Assign(targets=[target], value=value) | ast.NamedExpr(target=target, value=value):
                note(target, value)
            case ast.For(target=target, iter=value) | ast.comprehension(target=target, iter=value):
                note(target, value)
            case ast.arg(arg=name, annotation=annotation) if annotation is not None:
                for cls in CLASSES.values():
                    if cls.__name__ in ast.unparse(annotation):
                        found.setdefault(name, set()).add(cls)
            case ast.ClassDef(name=name) if name in CLASSES:
                # Properties and methods of a section.
                found.setdefault("self", set()).add(CLASSES[name])
    return found


def read_in(tree: ast.AST) -> set[tuple[str, str]]:
    known = aliases(tree)
    read = set()
    for node in walk(tree):
        if not isinstance(node, ast.Attribute) or not isinstance(node.ctx, ast.Load):
            continue
        owner = last_name(node.value)
        if owner == "data" and isinstance(node.value, ast.Attribute) and last_name(node.value.value) != "config":
            # Trainer.data, and what DataConfig calls so too.
            continue
        classes = {NAMED[owner]} if owner in NAMED else set()
        for cls in classes | known.get(owner, set()):
            if node.attr in cls.model_fields:
                read.add((cls.__name__, node.attr))
    return read


@pytest.fixture(scope="module")
def read():
    return set().union(*(read_in(ast.parse(path.read_text(encoding="utf-8"))) for path in PACKAGE.rglob("*.py")))


def test_somebody_reads_every_key(read):
    assert [f"{section}.{key}" for section, key in keys() if (section, key) not in read] == []


def test_validators_alone_do_not_count():
    source = """
class TrainConfig:
    def _check(self):
        return self.steps
    def tokens(self):
        return self.seed
def run(config, optimizer: OptimizerConfig):
    train = config.train
    for part in config.data.sources:
        part.weight
    return train.sequence_length, optimizer.beta1, config.log.every_steps, unknown.keep, trainer.data.packing
class Kept:
    def __init__(self, config: CheckpointConfig):
        self._config = config
        self._config.keep
"""
    assert read_in(ast.parse(source)) == {
        ("TrainConfig", "seed"),
        ("TrainConfig", "sequence_length"),
        ("OptimizerConfig", "beta1"),
        ("LogConfig", "every_steps"),
        ("SourceConfig", "weight"),
        ("CheckpointConfig", "keep"),
    }
