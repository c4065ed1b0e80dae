"""Validation: the same number at every layout, each held-out label counted once, and nothing changed by measuring."""

from __future__ import annotations

import pytest
import torch

from fivefold.core.cluster import Cluster
from fivefold.core.execution import Execution
from fivefold.core.layout import Layout
from fivefold.core.plan import Plan
from fivefold.core.workload import Workload
from fivefold.data.batches import SyntheticDataset
from fivefold.data.validation import FirstSamples
from fivefold.engine.build import initial_value
from fivefold.nn.decoder import Decoder
from fivefold.runtime.launch import Rank, run_ranks
from fivefold.strategies.compose import parameter_table
from fivefold.train.trainer import Trainer

from .command_line import CommandLine
from .models import HARD

SEQ_LEN, BATCH, SAMPLES = 16, 8, 13  # 13 samples end in the middle of the second global batch


def by_hand() -> float:
    """One module, one pass over the 13 samples, the mean over their valid labels."""
    model = Decoder(HARD).double()
    with torch.no_grad():
        for row in parameter_table(HARD, Layout(), SEQ_LEN):
            value = initial_value(row, Layout(), Layout().coordinate(0), "float64", seed=3)
            model.get_parameter(row.name).copy_(value)
        rows = SyntheticDataset(HARD.vocab, SEQ_LEN, seed=7).global_batch(0, SAMPLES)
        logits = model(torch.from_numpy(rows.tokens_BS), torch.arange(SEQ_LEN)[None])
        losses = -logits.log_softmax(-1).gather(-1, torch.from_numpy(rows.labels_BS)[..., None])[..., 0]
        mask = torch.from_numpy(rows.loss_mask_BS)
        return float((losses * mask).sum() / mask.sum())


@pytest.mark.parametrize("text", ["dp1", "dp2", "tp2", "pp2", "pp3:gpipe", "dp2 tp2 pp2"])
def test_equals_one_pass_by_hand_at_every_layout(text: str) -> None:
    plan = Plan(
        model=HARD,
        cluster=Cluster.parse("cpu"),
        workload=Workload(seq_len=SEQ_LEN, global_batch=BATCH),
        layout=Layout.parse(text),
        execution=Execution(micro_batch=2, dtype="float64"),
    )

    def measured(rank: Rank) -> tuple[list[float], float, float]:
        held_out = FirstSamples(SyntheticDataset(HARD.vocab, SEQ_LEN, seed=7), SAMPLES)
        data = SyntheticDataset(HARD.vocab, SEQ_LEN, seed=5)
        trainer = Trainer(plan, rank, data, steps=3, seed=3, validation=held_out)
        plain = Trainer(plan, rank, data, steps=3, seed=3)
        before = [trainer.validate(), trainer.validate()]
        first, other = trainer.step(0).loss, plain.step(0).loss
        after = trainer.validate()
        assert trainer.step(1).loss == plain.step(1).loss, "measuring changed the training"
        assert first == other
        return before, first, after

    expected = by_hand()
    for before, _, after in run_ranks(measured, ranks=plan.layout.world_size, device="cpu"):
        assert before[0] == before[1] == pytest.approx(expected, rel=1e-12)
        assert after != pytest.approx(expected, rel=1e-6), "a step must change it"


def test_a_run_measures_when_it_is_told_to(fivefold: CommandLine) -> None:
    assert fivefold("data", "prepare", "corpus", "--out", "ready", "--validation-frac", "0").code == 0
    ended = fivefold(
        "train", "train.yaml", "data=ready", "validation.every=2", "validation.data=corpus",
        "validation.samples=20", "layout=dp2", "log.every=5", "--json",
    )  # fmt: skip
    assert ended.code == 0, ended.err
    lines = fivefold.metrics()
    assert [line["step"] for line in lines if "validation_loss" in line] == [2, 4, 5]
    assert ended.json()["validation_loss"] == lines[-1]["validation_loss"]
    shown = fivefold.last_run()
    assert "validation_loss" in str(shown)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["data=corpus"], ["validation", "corpus", "validation.data"]),
        (["data=ready"], ["no validation split", "validation.data"]),
        (["validation.data=absent"], ["absent"]),
    ],
)
def test_what_has_no_validation_split_is_told(
    fivefold: CommandLine, overrides: list[str], words: list[str]
) -> None:
    assert fivefold("data", "prepare", "corpus", "--out", "ready", "--validation-frac", "0").code == 0
    ended = fivefold("train", "train.yaml", "validation.every=2", *overrides)
    assert ended.code == 2
    assert all(word in ended.said() for word in words), ended.said()


def test_samples_beyond_the_count_do_not_count() -> None:
    whole = SyntheticDataset(50, SEQ_LEN, seed=1)
    first = FirstSamples(whole, 5)
    batch = first.global_batch(1, 4)  # samples 4..7
    assert (batch.tokens_BS[0] == whole.global_batch(1, 4).tokens_BS[0]).all()
    assert batch.loss_mask_BS[0].any()
    assert not batch.loss_mask_BS[1:].any()
    assert first.batches(4) == 2
