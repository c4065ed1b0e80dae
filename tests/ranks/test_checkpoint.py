"""A run that was stopped goes on as if it had not been, whatever the layout it resumes under."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
import torch

from fivefold.core.optimizer import OptimizerConfig
from fivefold.errors import CheckpointError
from fivefold.train.checkpoint import Manifest, checkpoints, file_sha256

from .models import HARD, PLAIN
from .resuming import BATCH, Job, Ran, sample_ids, train, whole

SAVED_UNDER = "dp2 tp2 pp2"
RESUMED_UNDER = ("dp4", "tp4", "pp4", "dp1", "dp8")
LONG = pytest.mark.exhaustive
SAVE_AT, STEPS = 3, 13

HARD4 = HARD.replace(name="hard4", blocks=HARD.blocks[:1] * 4)
"""Tied, biased, vocabulary 53, kv heads 2 < tp 4; layers for four stages."""

ADAMW = OptimizerConfig(lr=3e-3, warmup_steps=4, weight_decay=0.1)
MOMENTUM = OptimizerConfig(name="sgd", lr=0.3, momentum=0.9, warmup_steps=4, weight_decay=0.01)
JOBS = {"tied-adamw": Job(HARD4, ADAMW, STEPS), "untied-momentum": Job(PLAIN, MOMENTUM, STEPS)}


@cache
def uninterrupted(name: str) -> tuple[list[Ran], Path]:
    """The run that saves at step 3 and goes on, and the folder that it saved to."""
    folder = Path(mkdtemp(prefix="fivefold-test-"))
    ranks = train(JOBS[name], SAVED_UNDER, folder=folder, every=SAVE_AT)
    return ranks, folder / f"step-{SAVE_AT:08d}"


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        *(("tied-adamw", layout) for layout in RESUMED_UNDER),
        *(
            pytest.param(name, layout, marks=LONG)
            for name, layout in [
                ("untied-momentum", "pp4"), ("untied-momentum", "dp1"), ("untied-momentum", "dp4"),
                ("untied-momentum", "tp4"),
                ("untied-momentum", "dp8"), ("untied-momentum", "tp2 pp2:gpipe"), ("tied-adamw", "dp2 tp4"),
                ("tied-adamw", "pp3"),
            ]
        ),
    ],
)  # fmt: skip
def test_resumed_under_another_layout(name: str, layout: str) -> None:
    """Ten further steps: losses, norms, weights and moments to 1e-10, the same samples, only own bytes read."""
    job = JOBS[name]
    straight, start = uninterrupted(name)
    resumed = train(job, layout, start=start)
    for ran in resumed:
        assert ran.losses == pytest.approx(straight[0].losses[SAVE_AT:], rel=1e-10)
        assert ran.norms == pytest.approx(straight[0].norms[SAVE_AT:], rel=1e-10)
        assert len(ran.losses) == STEPS - SAVE_AT
        assert ran.updates == STEPS
        assert ran.bytes_loaded == ran.bytes_held, "every rank reads its own part, no more"
    state, expected = whole(resumed), whole(straight)
    assert state.keys() == expected.keys()
    for key, values in expected.items():
        scale = float(values.abs().max())
        assert float((state[key] - values).abs().max()) <= 1e-10 * scale, key
    ids = sample_ids(resumed, job.plan(layout))
    assert ids == {step: list(range(step * BATCH, (step + 1) * BATCH)) for step in range(SAVE_AT, STEPS)}
    before = sample_ids(straight, job.plan(SAVED_UNDER))
    assert ids == {step: before[step] for step in ids}


@pytest.mark.parametrize("name", [*JOBS, "tied-bfloat16"])
def test_resumed_under_the_same_layout_is_bit_for_bit(name: str, tmp_path: Path) -> None:
    """Loss, norm, weights (with bfloat16 their float32 masters) and moments."""
    if name in JOBS:
        job, layout = JOBS[name], SAVED_UNDER
        straight, start = uninterrupted(name)
    else:
        job, layout = Job(HARD4, ADAMW, 8, dtype="bfloat16"), "tp2 pp2"
        straight, start = train(job, layout, folder=tmp_path), tmp_path / "step-00000003"
    resumed = train(job, layout, start=start)
    for ran, before in zip(resumed, straight, strict=True):
        assert ran.losses == before.losses[SAVE_AT:]
        assert ran.norms == before.norms[SAVE_AT:]
        for (key, _, _, values), (other, _, _, expected) in zip(ran.parts, before.parts, strict=True):
            assert key == other
            assert torch.equal(values, expected), key
    if name == "tied-bfloat16":
        assert {values.dtype for *_, values in resumed[0].parts} == {torch.float32}, (
            "masters are what is saved"
        )


def test_asynchronous_saves_equal_synchronous_ones(tmp_path: Path) -> None:
    """The same bytes, though training goes on while the former are written."""
    job = Job(PLAIN, ADAMW, 4, dtype="float32")
    train(job, "dp2 tp2", folder=tmp_path / "async", every=1, asynchronous=True)
    train(job, "dp2 tp2", folder=tmp_path / "sync", every=1, asynchronous=False)
    for step, path in checkpoints(tmp_path / "sync"):
        other = Manifest.load(tmp_path / "async" / path.name)
        manifest = Manifest.load(path)
        assert manifest == other
        assert set(manifest.files) == {"rank-00000.safetensors", "rank-00001.safetensors"}, (
            "one data rank writes"
        )
        assert manifest.step == step
        for name, entry in manifest.files.items():
            assert file_sha256(path / name) == entry.sha256
    assert len(checkpoints(tmp_path / "async")) == 4


def test_each_element_is_stored_once() -> None:
    """No padding, no copy of a tied or replicated tensor."""
    _, start = uninterrupted("tied-adamw")
    manifest = Manifest.load(start)
    names = {key.removeprefix("weights/") for key in manifest.tensors if key.startswith("weights/")}
    assert "embedding.weight" in names
    assert "head.weight" not in names
    for key, entry in manifest.tensors.items():
        stored = sum(int(torch.tensor(piece.shape).prod()) for piece in entry.pieces)
        assert stored == int(torch.tensor(entry.shape).prod()), key
    assert manifest.tensors["weights/embedding.weight"].shape == (HARD4.vocab, HARD4.hidden)


def test_damage_that_one_rank_finds_ends_all(tmp_path: Path) -> None:
    """Each rank checks its share of the files; whoever finds something, the run ends with that line."""
    job = Job(PLAIN, ADAMW, 2, dtype="float32")
    train(job, "tp2", folder=tmp_path, every=1)
    start = tmp_path / "step-00000001"
    for name in ("rank-00000.safetensors", "rank-00001.safetensors"):
        whole_file = (start / name).read_bytes()
        (start / name).write_bytes(whole_file[:-1] + bytes([whole_file[-1] ^ 1]))
        with pytest.raises(CheckpointError, match=rf"{name} is damaged: its checksum"):
            train(job, "tp2", start=start)
        (start / name).write_bytes(whole_file)
    train(job, "tp2", start=start)


def test_a_rank_that_cannot_write(tmp_path: Path) -> None:
    """Its file is in the way of a folder: rank 0 tells of it, the run goes on, nothing is left but older saves."""
    job = Job(PLAIN, ADAMW, 4, dtype="float32")
    (tmp_path / "step-00000002.partial" / "rank-00001.safetensors").mkdir(parents=True)
    ranks = train(job, "tp2", folder=tmp_path, every=1)
    (warning,) = ranks[0].warned
    assert ranks[1].warned == []
    assert warning.startswith(f"checkpoint of step 2 not saved to {tmp_path}/step-00000002: rank 1: ")
    assert [step for step, _ in checkpoints(tmp_path)] == [1, 3, 4]
    assert not list(tmp_path.glob("*.partial"))
    assert json.loads((tmp_path / "step-00000004" / "manifest.json").read_text())["step"] == 4
