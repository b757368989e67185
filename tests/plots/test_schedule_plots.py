"""Figures agree with the schedule table, can be written, and errors give one sentence."""

import sys
from itertools import pairwise

import numpy as np
import pytest

from jaxllm.config import ConfigError
from jaxllm.pipeline_schedule import forward_only, idle_share, make_schedule
from jaxllm.plots.schedule import save, schedule_figure

PIPELINES = [("gpipe", 4, 8, 1), ("1f1b", 4, 8, 1), ("interleaved", 4, 8, 2), ("1f1b", 2, 1, 1)]


@pytest.fixture
def needs_matplotlib():
    pytest.importorskip("matplotlib")


def bars(axes):
    """(x, y, width, height) of each bar that broken_barh drew; the grey background of the stages comes first."""
    corners = [path.vertices for collection in axes.collections for path in collection.get_paths()]
    return [(*c.min(axis=0), *np.ptp(c, axis=0)) for c in corners]


@pytest.mark.usefixtures("needs_matplotlib")
@pytest.mark.parametrize("pipeline", PIPELINES)
@pytest.mark.parametrize("backward_cost", [1.0, 2.5])
def test_the_grey_that_is_left_is_the_idle_share(pipeline, backward_cost):
    _, P, M, V = pipeline
    schedule = make_schedule(*pipeline)
    figure = schedule_figure(schedule, backward_cost=backward_cost)
    timeline, live, most, _ = figure.axes
    rows, units = bars(timeline)[:P], [bar for bar in bars(timeline)[P:] if bar[1] < P - 0.45]
    assert len(units) == 2 * P * V * M
    assert 1 - sum(bar[2] for bar in units) / sum(bar[2] for bar in rows) == pytest.approx(idle_share(P, M, V))
    # Bars in a row do not overlap.
    for i in range(P):
        spans = sorted((x, x + width) for x, y, width, height in units if y < i < y + height)
        assert all(end <= start + 1e-9 for (_, end), (start, _) in pairwise(spans))
    labels = [text.get_text() for text in timeline.texts]
    assert sorted(labels) == sorted([str(m) for m in range(M)] * (2 * P * V + 1))
    assert [patch.get_data().values.max() for patch in live.patches] == schedule.live.max(axis=0).tolist()
    assert [int(text.get_text()) for text in most.texts] == schedule.live.max(axis=0).tolist()


@pytest.mark.usefixtures("needs_matplotlib")
def test_pictures_are_written_large_and_small(tmp_path):
    save(schedule_figure(make_schedule("interleaved", 4, 64, 4), slot_bytes=2**28), tmp_path / "large.png")
    assert (tmp_path / "large.png").read_bytes().startswith(b"\x89PNG")
    save(schedule_figure(forward_only(2, 3)), tmp_path / "evaluation.svg")
    assert b"<svg" in (tmp_path / "evaluation.svg").read_bytes()


@pytest.mark.usefixtures("needs_matplotlib")
def test_bytes_stand_beside_slots_and_crowded_labels_are_left_out():
    timeline, _, most, _ = schedule_figure(make_schedule("1f1b", 4, 100), slot_bytes=2**29).axes
    assert [text.get_text() for text in most.texts] == ["8 = 4.0 GiB", "6 = 3.0 GiB", "4 = 2.0 GiB", "2 = 1.0 GiB"]
    assert not timeline.texts


@pytest.mark.usefixtures("needs_matplotlib")
@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("timeline.gif", r"let it end in \.png or \.svg"),
        ("timeline", r"let it end"),
        ("none/timeline.png", "choose another file"),
    ],
)
def test_files_that_cannot_be_are_refused(tmp_path, name, sentence):
    with pytest.raises(ConfigError, match=sentence):
        save(schedule_figure(make_schedule("1f1b", 2, 2)), tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_without_matplotlib_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"pip install 'jaxllm\[notebook\]'"):
        schedule_figure(make_schedule("1f1b", 2, 2))
