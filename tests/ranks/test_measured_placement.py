"""`@measured`: the stage times of a recorded run decide how many layers each stage gets."""

from __future__ import annotations

import json

import pytest

from fivefold.strategies.pipeline.apply import Trace

from .command_line import CommandLine


def test_a_recorded_run_places_the_layers(fivefold: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A first stage that takes four times as long as the second gives layers away."""
    fivefold.model(num_hidden_layers=6)
    none_yet = fivefold("train", "train.yaml", "layout=pp2@measured")
    assert none_yet.code == 2
    assert "@measured needs a recorded run" in none_yet.said()
    true_times = Trace.chunk_s
    monkeypatch.setattr(
        Trace, "chunk_s", property(lambda self: {c: (4.0, 1.0)[c] for c in true_times.fget(self)})
    )  # type: ignore[attr-defined]
    assert fivefold("train", "train.yaml", "layout=pp2", "steps=3", "log.metrics=null").code == 0
    assert fivefold.last_run()["results"]["stage_seconds"] == [4.0, 1.0]
    ended = fivefold("train", "train.yaml", "layout=pp2@measured", "steps=3", "log.metrics=null", "--json")
    assert ended.code == 0, ended.err
    plan = fivefold.last_run()["plan"]
    # Layers cost 4/3 s on average in the first stage, and no less than that is seen in the second.
    first, second = (int(n) for n in plan["layout"].partition("@")[2].split("+"))
    assert first + second == 6
    assert first < second, plan["layout"]


def test_what_was_measured_is_what_ran(fivefold: CommandLine) -> None:
    """Seconds of every virtual stage, those of two chunks on one rank apart."""
    fivefold.model(num_hidden_layers=4)
    assert fivefold("train", "train.yaml", "layout=pp2:1f1b*2", "steps=4", "log.metrics=null").code == 0
    seconds = fivefold.last_run()["results"]["stage_seconds"]
    assert len(seconds) == 4
    assert all(0 < taken < 10 for taken in seconds), json.dumps(seconds)
