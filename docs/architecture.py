"""Measures the code, for the table of CONTRIBUTING.md.

    python docs/architecture.py              prints the table
    python docs/architecture.py --write      writes it into CONTRIBUTING.md; a test fails where that is old

Lines of a closure and of the package are to the nearest hundred, and of a file to ten: not every change moves the table.
Functions, comments and docstrings are counted by the syntax tree. The import closure follows imports at the top of modules
(tests/test_architecture.py, which holds the budgets).
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from pathlib import Path

import numpy as np

CHECKOUT = Path(__file__).parents[1]
sys.path[:0] = [str(CHECKOUT / folder) for folder in ("tests", "benchmarks", ".")]

import test_architecture as budgets  # noqa: E402
from markdown_sections import write_between  # noqa: E402

BRANCHES = ast.If | ast.IfExp | ast.For | ast.While | ast.Try | ast.Match


def spread(values: list[int], to: int = 0) -> str:
    median, most_of = (f"{round(float(np.percentile(values, share)), -to):.0f}" for share in (50, 90))
    return f"{median} / {most_of} / {round(max(values), -to)}"


def function_of(file: str, name: str) -> ast.FunctionDef | ast.ClassDef:
    tree = budgets.tree(budgets.PACKAGE / file)
    return next(n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.ClassDef) and n.name == name)


def length(node: ast.FunctionDef | ast.ClassDef) -> int:
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def prose_share() -> tuple[float, float]:
    """(lines of comments, lines of docstrings) per line of code."""
    comments = docstrings = code = 0
    for file in budgets.FILES:
        text = file.read_text(encoding="utf-8")
        mine = 0
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
                mine += (node.end_lineno or node.lineno) - node.lineno + 1
        alone = sum(
            token.type == tokenize.COMMENT and token.line.lstrip().startswith("#")
            for token in tokenize.generate_tokens(io.StringIO(text).readline)
        )
        docstrings, comments = docstrings + mine, comments + alone
        code += sum(bool(line.strip()) for line in text.splitlines()) - mine - alone
    return comments / code, docstrings / code


def hundreds(lines: int) -> str:
    return f"{round(lines, -2):,}"


def rows() -> list[tuple[str, str]]:
    found = [function for file in budgets.FILES for function in budgets.functions(file)]
    lengths = [length(function) for function in found]
    files = [file.read_text(encoding="utf-8").count("\n") for file in budgets.FILES]
    step, attention = function_of("train/step.py", "make_train_step"), function_of("model/layers.py", "Attention")
    branches = sum(isinstance(node, BRANCHES) for node in ast.walk(step))
    arguments = [
        a for f in found for a in (*f.args.posonlyargs, *f.args.args, *f.args.kwonlyargs) if a.arg not in ("self", "cls")
    ]
    comments, docstrings = prose_share()

    def closure(module: str) -> str:
        modules = budgets.closure(module)
        return f"{len(modules)} / {hundreds(sum(map(budgets.source_lines, modules)))} / {budgets.chain(module)}"

    return [
        ("lines of a function, median / 90th percentile / most", spread(lengths)),
        ("functions above 60 lines", f"{100 * np.mean(np.array(lengths) > 60):.1f}%"),
        ("lines of a file, median / 90th percentile / most", spread(files, to=1)),
        ("train step with its factory, lines / branches", f"{length(step)} / {branches}"),
        ("attention class, lines", str(length(attention))),
        ("import closure of the train step, modules / lines / chain", closure("jaxllm.train.step")),
        ("of `jaxllm/train/build.py`, which makes the step for a mesh", closure("jaxllm.train.build")),
        ("of the training loop", closure("jaxllm.run.loop")),
        ("comments, docstrings, per line of code", f"{100 * comments:.0f}%, {100 * docstrings:.0f}%"),
        ("parameters annotated", f"{100 * np.mean([a.annotation is not None for a in arguments]):.0f}%"),
        ("lines of the package", hundreds(sum(files))),
        ("rooms", str(len({budgets.name(file).split("/")[0] for file in budgets.FILES} - {"__init__.py"}))),
    ]


def table() -> str:
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows())])


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        write_between(CHECKOUT / "CONTRIBUTING.md", "house", table())
    else:
        print(table())
