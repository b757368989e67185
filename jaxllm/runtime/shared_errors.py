"""The error of one process, raised on all of them."""

from __future__ import annotations

import json

from jaxllm.config import ConfigError
from jaxllm.runtime import distributed
from jaxllm.untrusted import parse_json


def raise_together(error: ConfigError | None, kind: type[ConfigError] = ConfigError) -> None:
    """Raises the error of the first process that has one, as `kind` with its sentence and exit code; every process calls it."""
    if text := distributed.first_nonempty("" if error is None else json.dumps([str(error), error.exit_code])):
        sentence, code = parse_json(text)
        found = kind(sentence)
        found.exit_code = code
        raise found
