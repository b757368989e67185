"""Every input that a red team of November 2026 found not handled: each ends in one sentence and code 2, or is taken rightly."""

import hostile_chat
import hostile_configs
import hostile_data
import hostile_models
import hostile_runs
import hostile_runtime
import pytest
from hostile import Case, run

CASES = [
    *hostile_chat.CASES,
    *hostile_configs.CASES,
    *hostile_data.CASES,
    *hostile_models.CASES,
    *hostile_runs.CASES,
    *hostile_runtime.CASES,
]


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_one_sentence_or_taken_rightly(case: Case, tmp_path, monkeypatch):
    run(case, tmp_path, monkeypatch)


def test_each_name_is_one_case():
    assert len({case.name for case in CASES}) == len(CASES)
