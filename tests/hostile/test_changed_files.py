"""Files that are nearly right, through the command line: each ends well or in one sentence, whatever was changed in them."""

import contextlib
import io
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml
from covers import seed
from hf_folders import HUB, random_weights, write_folder
from hostile import LIMIT_BYTES, exit_code, peak_bytes, reset_peak_bytes, written_to
from tiny import TINY

VALUES: tuple[Any, ...] = (
    *("x", "", None, True, -1, 0, 0.5, 1e300, 1e-300, float("nan"), float("inf"), 2**31, 2**63 - 1, 2**64, 10**400),
    *([], [1], {}, {"a": 1}, [[]], "9" * 50, "a\nb", "\x1b[2J"),
)
LINE = {
    **{"step": 1, "tokens": 128, "loss": 5.5, "grad_norm": 1.0, "learning_rate": 1e-3, "tokens_per_s_per_device": 900.0},
    **{"unix_s": 1000.0, "data_s": 0.1, "save_s": 0.2, "noise_scale_tokens": 20.0, "noise_scale_low": 9.0, "skipped": 0},
    **{"noise_scale_high": None, "device_peak_flops": 1e14, "memory_peak_bytes": 10**9, "loss_spike": 0, "skipped_steps": 0},
}
FIRST = {"start_unix_s": 990.0, "start_import_s": 1.0, "compile_s": 3.0, "start_other_s": 0.5, "devices": 8, "absent_hosts": 1}


def bytes_changed(content: bytes, draw: random.Random) -> bytes:
    """A few bytes changed, cut out, put in or repeated; or the end is missing."""
    found = bytearray(content)
    for _ in range(draw.choice([1, 1, 2, 8, 64])):
        at, kind = draw.randrange(len(found) + 1), draw.randrange(5)
        if kind == 0:
            found[at : at + 1] = bytes([draw.randrange(256)])
        elif kind == 1:
            del found[at : at + draw.choice([1, 8, 100])]
        elif kind == 2:
            found[at:at] = draw.choice([b"[" * 500, b"9" * 500, b"\0" * 50, b"\xff" * 8, b"\n\n", b"1e999", b"null"])
        elif kind == 3:
            del found[max(at, 8) :]
        else:
            found += found[at:][:4096]
    return bytes(found)


def values_changed(value: Any, draw: random.Random) -> Any:
    """A few of its values replaced or left out, at any depth."""
    places: list[tuple[Any, Any]] = []

    def walk(node: Any) -> None:
        for key in node if isinstance(node, dict) else range(len(node) if isinstance(node, list) else 0):
            places.append((node, key))
            walk(node[key])

    walk(value)
    for node, key in draw.sample(places, min(len(places), draw.choice([1, 1, 2, 4]))):
        if draw.random() < 0.15 and isinstance(node, dict):
            node.pop(key, None)
        elif not isinstance(node, list) or key < len(node):
            node[key] = draw.choice(VALUES)
    return value


def text_changed(text: str, draw: random.Random) -> bytes:
    """A JSON text with other values or other bytes."""
    if draw.random() < 0.4:
        return bytes_changed(text.encode(), draw)
    return json.dumps(values_changed(json.loads(text), draw)).encode()


def changed_run(draw: random.Random) -> tuple[str, ...]:
    Path("run").mkdir()
    lines = [
        {**LINE, "step": n, "tokens": 128 * n, "unix_s": 1000.0 + n, **(FIRST if n in (1, 5) else {})} for n in range(1, 9)
    ]
    lines.insert(4, {"step": 4, "eval_loss": 5.4, "eval_loss/a": 5.4})
    texts = [json.dumps(line).encode() for line in lines]
    for number in draw.sample(range(len(texts)), draw.choice([1, 2, 8])):
        texts[number] = text_changed(json.dumps(lines[number]), draw)
    Path("run/metrics.jsonl").write_bytes(b"\n".join(texts) + b"\n")
    config = {**TINY, "data": {"source": "files", "paths": "words.txt"}, "run": {"dir": "run"}, "parallel": {"data": 8}}
    Path("run/config.yaml").write_bytes(
        text_changed(json.dumps(config), draw) if draw.random() < 0.3 else yaml.safe_dump(config).encode()
    )
    if draw.random() < 0.2:
        shutil.copytree("run", "other")
        return "report", "run", "other", "--out", "page.html"
    return "report", "run", *draw.choice([("--json",), ("--out", "page.html"), ("--gpu", "h100-80gb", "--out", "page.html")])


def changed_hub(draw: random.Random) -> tuple[str, ...]:
    folder = write_folder(Path("hf"), HUB, random_weights(HUB))
    tensors, config = folder / "model.safetensors", folder / "config.json"
    content = tensors.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    kind = draw.randrange(4)
    if kind == 0:
        config.write_bytes(text_changed(config.read_text(), draw))
    elif kind == 1:
        header = text_changed(content[8:end].decode(), draw)
        tensors.write_bytes(len(header).to_bytes(8, "little") + header + content[end:])
    elif kind == 2:
        tensors.write_bytes(bytes_changed(content[:end], draw) + content[end:])
    else:
        length = draw.choice([0, 1, end - 9, end - 7, len(content), 2**31, 2**63 - 1, 2**64 - 1])
        tensors.write_bytes(length.to_bytes(8, "little") + content[8 : draw.choice([None, end, len(content) // 2])])
    return "convert", "from-hf", "hf", "out"


# Of numbers such as 1e300 numpy says that they overflow.
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("count", [25, pytest.param(1500, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("change", [changed_run, changed_hub])
def test_ends_well_or_in_one_sentence(change: Callable[[random.Random], tuple[str, ...]], count, tmp_path, monkeypatch):
    for number in range(count):
        (folder := tmp_path / str(number)).mkdir()
        monkeypatch.chdir(folder)
        words = change(random.Random(f"{seed()} {number}"))
        out, err, before = io.StringIO(), io.StringIO(), reset_peak_bytes()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), mock.patch("os.write", written_to(err)):
            code = exit_code(words)
        said, where = err.getvalue(), f"JAXLLM_TEST_SEED={seed()}, number {number}: {err.getvalue()[-2000:]}"
        assert code in (0, 2), where
        assert peak_bytes() - before < LIMIT_BYTES, where
        assert all(c.isprintable() or c == "\n" for c in said + out.getvalue()), where
        if code == 2:
            assert said.splitlines()[-1].startswith("jaxllm: "), where
            assert said.count("jaxllm: ") == 1, where
        shutil.rmtree(folder)
