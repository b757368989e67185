"""What llama.cpp says of a GGUF file. Its prebuilt libraries are those of node-llama-cpp, fetched by npm once per machine."""

import json
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import real_material

SCRIPT = Path(__file__).with_name("ask_llama_cpp.mjs")
LIMIT_S = 60


@dataclass(frozen=True)
class Answers:
    """Attributes:
    eos: id of the EOS token.
    encoded: ids of each text, with the BOS token if the file asks for it.
    probabilities_SV: of the next id after each of the ids, in float32.
    continuation: the ids that follow the prompt, each the likeliest.
    """

    eos: int
    encoded: list[list[int]]
    probabilities_SV: np.ndarray
    continuation: list[int]


def ask(file: Path, ids: Sequence[int] = (), texts: Sequence[str] = (), prompt: str = "", more: int = 0) -> Answers:
    """Skips the test where node-llama-cpp cannot be had.

    Args:
      ids: at most 64, also together with `more`.
      more: how many ids shall follow the prompt.
    """
    library = real_material.node_llama_cpp() / "node_modules" / "node-llama-cpp" / "dist" / "index.js"
    asked = {"library": str(library), "file": str(file), "ids": [int(one) for one in ids], "texts": [*texts]}
    command = [shutil.which("node"), str(SCRIPT)]
    content = json.dumps(asked | {"prompt": prompt, "more": more})
    done = subprocess.run(command, input=content, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    # It gives the likeliest first.
    probabilities_SV = np.array([[probability for _, probability in sorted(row)] for row in said["probabilities"]])
    return Answers(said["eos"], said["encoded"], probabilities_SV, said["continuation"])
