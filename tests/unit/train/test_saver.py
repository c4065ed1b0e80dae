"""Saving and resuming on one rank: what is written when, what is kept, and what a failing disk does."""

from __future__ import annotations

import errno
import math
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from fivefold.core.cluster import Cluster
from fivefold.core.execution import Execution
from fivefold.core.layout import Layout
from fivefold.core.model_spec import AttentionSpec, BlockSpec, MLPSpec, ModelSpec
from fivefold.core.optimizer import OptimizerConfig
from fivefold.core.plan import Plan
from fivefold.core.workload import Workload
from fivefold.data.batches import SyntheticDataset
from fivefold.errors import CheckpointError, ConfigError
from fivefold.runtime.device import Device
from fivefold.runtime.launch import Rank
from fivefold.train import saver as module
from fivefold.train.checkpoint import Manifest, Piece, checkpoints, write_pieces
from fivefold.train.saver import Saver, load_checkpoint, restart_from, resume_from
from fivefold.train.sections import CheckpointConfig
from fivefold.train.trainer import Trainer

BLOCK = BlockSpec(attention=AttentionSpec(heads=2, kv_heads=2, head_dim=4), mlp=MLPSpec(ffn=12))
SPEC = ModelSpec(name="tiny", hidden=8, vocab=17, blocks=(BLOCK,) * 2)
RANK = Rank(0, 1, Device(torch.device("cpu")))
ADAMW = OptimizerConfig(lr=0.01, warmup_steps=2)


def make(
    spec: ModelSpec = SPEC, optimizer: OptimizerConfig = ADAMW, *, seed: int = 2, batch: int = 4, seq_len: int = 6,
    separate_documents: bool = False, **execution: Any,
) -> Trainer:  # fmt: skip
    plan = Plan(
        model=spec,
        cluster=Cluster.parse("cpu"),
        workload=Workload(seq_len=seq_len, global_batch=batch, separate_documents=separate_documents),
        layout=Layout(),
        execution=Execution(micro_batch=2, optimizer=optimizer, **execution),
    )
    return Trainer(plan, RANK, SyntheticDataset(spec.vocab, seq_len, seed=1), steps=50, seed=seed)


class Saving:
    """A trainer with a saver, and what was warned of."""

    def __init__(self, folder: Path, trainer: Trainer | None = None, **config: Any) -> None:
        self.config = CheckpointConfig(folder=str(folder), **config)
        self.trainer = trainer or make()
        self.warned: list[str] = []
        self.saver = Saver(self.config, self.trainer, RANK, data="d", warn=self.warned.append)

    def run(self, first: int, last: int) -> None:
        """Take and save the steps first ... last, counted from 1."""
        for step in range(first, last + 1):
            self.trainer.step(step - 1)
            self.saver.save(step)
        self.saver.wait()


def state(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {f"{kind}/{row.name}": values.clone() for kind, row, values in trainer.engine.data.persistent()}


def load(path: Path, trainer: Trainer | None = None, data: str = "d") -> Trainer:
    trainer = trainer or make()
    load_checkpoint(path, trainer, RANK, data=data)
    return trainer


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint after two steps."""
    Saving(tmp_path).run(1, 2)
    return tmp_path / "step-00000002"


def test_a_save_under_way_does_not_see_later_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread writes only after another step was taken."""
    go, began = threading.Event(), threading.Event()

    def held_up(folder: Path, rank: int, pieces: list[Piece], **options: Any) -> Any:
        began.set()
        assert go.wait(30)
        return write_pieces(folder, rank, pieces, **options)

    monkeypatch.setattr(module, "write_pieces", held_up)
    saving = Saving(tmp_path)
    saving.trainer.step(0)
    at_save = state(saving.trainer)
    saving.saver.save(1)
    assert began.wait(30), "save() returned before anything was written"
    saving.trainer.step(1)
    assert not same(state(saving.trainer), at_save)
    assert checkpoints(tmp_path) == [], "not visible before it is whole"
    go.set()
    saving.saver.wait()
    assert same(state(load(tmp_path / "step-00000001")), at_save)


def test_synchronous(tmp_path: Path) -> None:
    saving = Saving(tmp_path, asynchronous=False)
    saving.trainer.step(0)
    saving.saver.save(1)
    assert [step for step, _ in checkpoints(tmp_path)] == [1]


def test_resumed_bit_for_bit_with_count_of_updates(saved: Path) -> None:
    straight, resumed = make(), load(saved)
    for step in (0, 1):
        straight.step(step)
    assert (resumed.start, resumed.engine.data.updates, resumed.skipped) == (2, 2, 0)
    for step in (2, 3):
        assert resumed.step(step).loss == straight.step(step).loss
    assert same(state(resumed), state(straight))


def test_skipped_steps_stay_counted(tmp_path: Path) -> None:
    saving = Saving(tmp_path)
    saving.trainer.skip_nonfinite = True
    saving.run(1, 1)
    norm = next(p for row, p in saving.trainer.engine.parameters[0] if row.name == "norm.weight")
    hook = norm.register_hook(lambda gradient: gradient * math.inf)
    saving.run(2, 2)
    hook.remove()
    saving.run(3, 3)
    resumed = load(tmp_path / "step-00000003")
    assert (resumed.start, resumed.engine.data.updates, resumed.skipped) == (3, 2, 1)
    assert resumed.step(3).loss == saving.trainer.step(3).loss, "Adam's bias correction counts updates"


@pytest.mark.parametrize(
    ("keep", "keep_every", "left"),
    [
        (1, None, [7]),
        (2, None, [6, 7]),
        (9, None, [1, 2, 3, 4, 5, 6, 7]),
        (1, 3, [3, 6, 7]),
        (2, 2, [2, 4, 5, 6, 7]),
    ],
)
def test_keep_rule(tmp_path: Path, keep: int, keep_every: int | None, left: list[int]) -> None:
    saving = Saving(tmp_path, keep=keep, keep_every=keep_every)
    saving.run(1, 7)
    assert [step for step, _ in checkpoints(tmp_path)] == left
    assert len(list(tmp_path.iterdir())) == len(left)
    assert saving.saver.saved == [1, 2, 3, 4, 5, 6, 7]


# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["pieces", "manifest"])
def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    """Half of the file is there when it fills up: warned of, cleared away, the older one stays, later ones work."""
    saving = Saving(tmp_path, keep=1)
    saving.run(1, 1)
    whole = {path.name: path.read_bytes() for path in (tmp_path / "step-00000001").iterdir()}

    def full(folder: Path, *_: Any, **_options: Any) -> Any:
        folder = folder if folder.is_dir() else folder.parent
        (folder / "rank-00000.safetensors").write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(module, "write_pieces" if when == "pieces" else "sync", full)
        saving.run(2, 2)
    (warning,) = saving.warned
    assert warning.startswith(f"checkpoint of step 2 not saved to {tmp_path}/step-00000002: ")
    assert "No space left on device; the run goes on, older ones are kept" in warning
    assert "\n" not in warning
    assert {path.name for path in tmp_path.iterdir()} == {"step-00000001"}
    assert {path.name: path.read_bytes() for path in (tmp_path / "step-00000001").iterdir()} == whole
    saving.run(3, 3)
    assert len(saving.warned) == 1
    assert [step for step, _ in checkpoints(tmp_path)] == [3]


def test_the_folder_is_gone(tmp_path: Path) -> None:
    saving = Saving(tmp_path / "a")
    saving.run(1, 1)
    (tmp_path / "a").rename(tmp_path / "b")
    (tmp_path / "a").write_text("a file in its place")
    saving.run(2, 2)
    assert "not saved" in saving.warned[0]
    assert "Not a directory" in saving.warned[0]
    assert [step for step, _ in checkpoints(tmp_path / "b")] == [1]


def test_a_fault_of_our_own_does_not_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank whose thread died in silence would hold up all others."""
    monkeypatch.setattr(module, "write_pieces", lambda *_, **_options: 1 / 0)
    saving = Saving(tmp_path)
    saving.run(1, 2)
    assert len(saving.warned) == 2
    assert "rank 0: division by zero" in saving.warned[0]


def test_weights_that_became_infinite_are_not_saved(tmp_path: Path) -> None:
    """Gradient and loss of the step were finite; with keep=1 the last good state would be lost."""
    saving = Saving(tmp_path, keep=1)
    saving.run(1, 1)
    saving.trainer.step(1)
    values = next(
        v
        for kind, row, v in saving.trainer.engine.data.persistent()
        if row.name == "layers.1.mlp.down.weight"
    )
    values[2, 3] = math.inf
    saving.saver.save(2)
    saving.saver.wait()
    assert "not saved" in saving.warned[0]
    assert "weights/layers.1.mlp.down.weight has a NaN or an infinity" in saving.warned[0]
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_old_ones_that_cannot_be_removed(tmp_path: Path) -> None:
    """The new one is saved all the same, and that is what is said."""
    saving = Saving(tmp_path, keep=1)
    saving.run(1, 1)
    (tmp_path / "step-00000001.partial").mkdir()
    (tmp_path / "step-00000001.partial" / "in the way").touch()
    saving.run(2, 2)
    (warning,) = saving.warned
    assert warning.startswith(f"old checkpoints are not removed from {tmp_path}: ")
    assert saving.saver.saved == [1, 2]


# ---------------------------------------------------------------------------------------------------------------------


def changed(**fields: Any) -> ModelSpec:
    return SPEC.replace(**fields)


WIDER = BlockSpec(attention=BLOCK.attention, mlp=MLPSpec(ffn=16))


@pytest.mark.parametrize(
    ("other", "data", "words"),
    [
        (lambda: make(changed(vocab=19)), "d", r"is of another model, tiny: vocab was 17, is 19"),
        (lambda: make(changed(tied_embeddings=True)), "d", "tied_embeddings was False, is True"),
        (lambda: make(changed(blocks=(BLOCK,) * 3)), "d", "blocks was 2 layers, is 3 layers"),
        (lambda: make(changed(blocks=(BLOCK, WIDER))), "d", "blocks"),
        (lambda: make(seed=3), "d", "seed was 2, is 3 now; a resumed run must be the same job"),
        (lambda: make(batch=8), "d", "global_batch was 4, is 8"),
        (lambda: make(seq_len=8), "d", "seq_len was 6, is 8"),
        (lambda: make(separate_documents=True), "d", "separate_documents was False, is True"),
        (lambda: make(dtype="float64"), "d", "dtype was float32, is float64"),
        (lambda: make(optimizer=OptimizerConfig(name="sgd")), "d", "optimizer.name was adamw, is sgd"),
        (make, "e", "data fingerprint was d, is e"),
    ],
)
def test_another_job_is_named(saved: Path, other: Any, data: str, words: str) -> None:
    trainer = other()
    before = state(trainer)
    with pytest.raises(CheckpointError, match=words) as caught:
        load(saved, trainer, data)
    assert str(caught.value).startswith(str(saved))
    assert same(state(trainer), before), "nothing was loaded"


def test_another_name_and_other_settings_are_no_other_job(saved: Path) -> None:
    """More steps, another learning rate and microbatch: the person's choice."""
    load(saved, make(changed(name="renamed"), OptimizerConfig(lr=0.5, warmup_steps=0), bucket_mib=1.0))


def test_sgd_with_and_without_momentum(tmp_path: Path) -> None:
    plain, momentum = OptimizerConfig(name="sgd"), OptimizerConfig(name="sgd", momentum=0.9)
    Saving(tmp_path / "a", make(optimizer=plain)).run(1, 1)
    Saving(tmp_path / "b", make(optimizer=momentum)).run(1, 1)
    with pytest.raises(
        CheckpointError, match=r"lacks tensors of this run: momentum_buffer/embedding\.weight.* more"
    ):
        load(tmp_path / "a" / "step-00000001", make(optimizer=momentum))
    with pytest.raises(CheckpointError, match="has tensors that this run lacks: momentum_buffer/embedding"):
        load(tmp_path / "b" / "step-00000001", make(optimizer=plain))


# ---------------------------------------------------------------------------------------------------------------------


def config(folder: Path | None) -> CheckpointConfig:
    return CheckpointConfig(folder=str(folder) if folder else None)


def test_fresh_start(tmp_path: Path) -> None:
    assert resume_from(config(None), None) is None
    assert resume_from(config(tmp_path / "new" / "folder"), None) is None
    assert resume_from(config(tmp_path / "new" / "folder"), "auto") is None, "none there yet"


def test_fresh_start_into_another_runs_folder(saved: Path) -> None:
    with pytest.raises(
        CheckpointError, match="holds checkpoints up to step 2; go on with --resume auto, or save else"
    ):
        resume_from(config(saved.parent), None)


def test_auto_takes_the_newest_complete_one(saved: Path) -> None:
    (saved.parent / "step-00000009").mkdir()
    stale = saved.parent / "step-00000003.partial"
    stale.mkdir()
    (stale / "manifest.json").write_text("{}")
    (saved.parent / "step-mine.partial").mkdir()
    assert resume_from(config(saved.parent), "auto") == saved
    assert not stale.exists(), "what a killed save left is cleared away"
    assert (saved.parent / "step-mine.partial").exists(), "nothing else is"


def test_auto_needs_a_folder() -> None:
    with pytest.raises(ConfigError, match=r"--resume auto needs checkpoint\.folder"):
        resume_from(config(None), "auto")


def test_a_checkpoint_by_its_path(saved: Path, tmp_path: Path) -> None:
    assert resume_from(config(None), str(saved)) == saved
    assert resume_from(config(saved.parent), str(saved)) == saved
    assert resume_from(config(tmp_path / "elsewhere"), str(saved)) == saved
    for path in (tmp_path, tmp_path / "absent", saved / "manifest.json"):
        with pytest.raises(CheckpointError, match=r"is no checkpoint: it has no manifest\.json"):
            resume_from(config(None), str(path))


def test_an_older_one_beside_newer_ones_is_refused(saved: Path, tmp_path: Path) -> None:
    """The keep rule would drop each new save at once, as older than those."""
    older = saved.parent / "step-00000001"
    assert Manifest.load(older).step == 1
    with pytest.raises(CheckpointError, match="holds checkpoints up to step 2"):
        resume_from(config(saved.parent), str(older))
    Saving(tmp_path / "other").run(1, 1)
    with pytest.raises(CheckpointError, match="other holds checkpoints up to step 1"):
        resume_from(config(tmp_path / "other"), str(saved))


def test_where_a_run_starts_again(saved: Path, tmp_path: Path) -> None:
    """From its newest save; before the first one, from what it was resumed from."""
    assert restart_from(config(saved.parent), None) == saved
    assert restart_from(config(tmp_path / "new"), None) is None
    assert restart_from(config(tmp_path / "new"), "auto") is None
    assert restart_from(config(tmp_path / "new"), str(saved)) == saved
    assert restart_from(config(None), str(saved)) == saved


def test_a_folder_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for resume in (None, "auto"):
        with pytest.raises(CheckpointError, match=r"cannot save checkpoints to .*file/x: Not a directory"):
            resume_from(config(tmp_path / "file" / "x"), resume)
