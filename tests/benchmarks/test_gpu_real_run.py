"""benchmarks/gpu_real_run.py at its smallest: a run that is killed and resumed is the undisturbed one, bit for bit."""

import json
from importlib.util import find_spec

import pytest
import scripts


@pytest.mark.slow
@pytest.mark.skipif(not (find_spec("torch") and find_spec("transformers")), reason="needs the extra reference")
def test_a_killed_run_ends_as_the_undisturbed_one(monkeypatch, capsys):
    module, found = scripts.load("benchmarks/gpu_real_run.py"), {}
    # The commands have one CPU device each, as a user's.
    monkeypatch.setenv("XLA_FLAGS", "")
    ended = module.real_run(lambda **figures: found.update(figures), **module.case(dry=True)["options"])
    assert ended == {"finished": True}, json.dumps(found)
    assert found["equal"]["steps"] == found["whole"]["steps"][1]
    assert found["killed"]["steps"][1] < found["whole"]["steps"][1]
    assert found["killed"]["programs"]["compiled"] == 0
    # From a checkpoint, not from the beginning.
    assert found["resumed"]["steps"][0] > 1
    for stage in ("exported", "continued_exported"):
        assert found[stage]["largest_difference"] <= found[stage]["limit"]
