"""Reading runs tables: what is refused in one line, what is skipped with its reason, what a row's time is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fivefold.errors import RecordError
from fivefold.estimate.software import era, release_year
from fivefold.plan import memory_rows
from fivefold.plan.priced import bits, counted_flops, price, recompute_of, schedule_of
from fivefold.plan.run_devices import hardware
from fivefold.plan.runs_table import MOST_BYTES, Row, read_rows, unread_columns

RUN: dict[str, Any] = {
    "source": "here", "model_name": "m", "layers": 4, "hidden": 512, "heads": 8, "ffn_hidden": 2048, "seq_len": 1024,
    "vocab": 1000, "gpu": "A100-80GB", "num_gpus": 8, "tp": 2, "pp": 2, "micro_batch": 1, "global_batch": 16,
    "precision": "bf16", "framework": "Megatron-LM", "iter_time_s": 1.5,
}  # fmt: skip


def written(tmp_path: Path, *rows: dict[str, Any], name: str = "runs.jsonl") -> Path:
    path = tmp_path / name
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def rows_of(*rows: dict[str, Any]) -> list[Row]:
    return [Row(i, values) for i, values in enumerate(rows, 1)]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ('"iter_time_s": NaN', "line 2: NaN"),
        ('"iter_time_s": 1' + "0" * 400, "iter_time_s is 1000"),
        ('"layers": 1' + "0" * 400, "layers is 1000"),
        ('"iter_time_s": 1e999', "iter_time_s is inf"),
        ('"iter_time_s": -1', "iter_time_s is -1"),
        ('"tp": 0', "tp is 0"),
        ('"tp": 1.5', "tp is 1.5; a whole number"),
        ('"tp": "two"', "tp is 'two'; a number"),
        ('"tp": true', "tp is 'True'; a number"),
        ('"oom": 1', "oom is '1'; true or false"),
        ('"gpu": 7', "gpu is '7'; a text"),
        ('"hidden": 1e300', "hidden is 1e+300"),
        ('"x": ' + "[" * 100_000, "line 2: nested"),
        ('"x": ' + "9" * 10_000, "line 2: "),
        ("broken", "line 2: not JSON"),
    ],
)
def test_a_damaged_row_is_one_clear_line(tmp_path: Path, change: str, said: str) -> None:
    path = tmp_path / "runs.jsonl"
    path.write_text(json.dumps(RUN) + "\n" + json.dumps(RUN)[:-1] + ", " + change + "}\n")
    with pytest.raises(RecordError, match=r"runs\.jsonl, line 2") as caught:
        read_rows(path)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_is_no_table_is_refused(tmp_path: Path) -> None:
    big = tmp_path / "big.jsonl"
    with big.open("wb") as file:
        file.truncate(MOST_BYTES + 1)
    empty, binary = tmp_path / "empty.jsonl", tmp_path / "binary.jsonl"
    empty.write_text("\n")
    binary.write_bytes(b"\xff\xfe\x00")
    for path, said in (
        (big, "at most 64 MiB"),
        (empty, "no rows"),
        (binary, "not UTF-8"),
        (tmp_path, "cannot read"),
    ):
        with pytest.raises(RecordError, match=said):
            read_rows(path)
    with pytest.raises(RecordError, match="expected one JSON object, got a list"):
        read_rows(written(tmp_path, [1]))  # type: ignore[arg-type]


def test_csv_and_json_lines_are_the_same_table(tmp_path: Path) -> None:
    run = {**RUN, "gated_mlp": True, "oom": False}
    table = tmp_path / "runs.csv"
    table.write_text(",".join(run) + ",mine\n" + ",".join(str(v) for v in run.values()) + ",x\n")
    (from_csv,), (from_json,) = (
        read_rows(table),
        read_rows(written(tmp_path, {**run, "mine": "x", "tflops_kind": None})),
    )
    assert from_csv.values == from_json.values == run
    table.write_text("tp,pp\n1\n")
    with pytest.raises(RecordError, match="another number of cells"):
        read_rows(table)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hidden": None}, "does not say hidden"),
        ({"gpu": "TPU"}, "unknown device 'TPU'"),
        ({"num_gpus": 6}, "6 GPUs are no multiple of tp2 x pp2 x cp1"),
        ({"phase": "decode"}, "an inference run"),
        ({"global_batch": None}, "does not say global_batch or num_microbatches"),
        ({"experts": 4, "ep": 3}, "ep3 x etp1 does not divide"),
    ],
)
def test_a_row_that_cannot_be_priced_is_kept_with_the_reason(changes: dict[str, Any], reason: str) -> None:
    values = {key: value for key, value in {**RUN, **changes}.items() if value is not None}
    priced = price(rows_of(RUN, values))
    assert len(priced.rows) == 1
    ((row, said),) = priced.skipped
    assert row.line == 2
    assert reason in said


def test_the_time_of_a_step_follows_from_whatever_was_measured() -> None:
    """16 sequences of 1024 tokens on 8 GPUs in 2 s, said in five ways."""
    tokens = 16 * 1024
    bare = {key: value for key, value in RUN.items() if key != "iter_time_s"}
    flops = counted_flops(Row(1, bare), hardware=False)
    rate = tokens * flops / 8 / 2
    said = [
        {"iter_time_s": 2.0}, {"tokens_per_s_per_gpu": tokens / 8 / 2}, {"samples_per_s_per_gpu": 1.0},
        {"tflops_per_gpu": rate / 1e12}, {"mfu": rate / 312e12},
    ]  # fmt: skip
    priced = price(rows_of(*({**bare, **one} for one in said), bare))
    assert priced.measured_s[:5].tolist() == pytest.approx([2.0] * 5)
    assert np.isnan(priced.measured_s[5])


def test_flops_are_counted_as_the_source_does() -> None:
    """72 L D^2 (1 + S/6D + V/12LD) per token with full attention (Narayanan et al. 2021, eq. 3, over B S)."""
    L, D, S, V = (RUN[name] for name in ("layers", "hidden", "seq_len", "vocab"))
    full = counted_flops(Row(1, RUN), hardware=False)
    assert full == pytest.approx(72 * L * D**2 * (1 + S / (6 * D) + V / (12 * L * D)))
    causal = counted_flops(Row(1, {**RUN, "flops_convention": "causal"}), hardware=False)
    assert full - causal == pytest.approx(6 * L * S * D)
    again = counted_flops(Row(1, {**RUN, "recompute": "full"}), hardware=True)
    assert again == pytest.approx(96 * L * D**2 * (1 + S / (6 * D) + V / (16 * L * D)))


def test_nothing_that_was_measured_takes_part_in_a_job() -> None:
    measured = dict.fromkeys(
        ("iter_time_s", "tokens_per_s_per_gpu", "samples_per_s_per_gpu", "tflops_per_gpu", "mfu", "hfu",
         "peak_mem_gib"), 7.0,
    )  # fmt: skip
    plain, full = price(rows_of(RUN)).jobs, price(rows_of({**RUN, **measured, "oom": True})).jobs
    for name, column in vars(plain).items():
        if name != "blocks":
            assert np.array_equal(column, vars(full)[name]), name


@pytest.mark.parametrize(
    ("framework", "version", "expected"),
    [
        ("Megatron-DeepSpeed", "2022-02", "megatron-classic"),
        ("Megatron-LM", "", "megatron-classic"),
        ("Megatron-Core", "~v0.9-0.11 (PyTorch 2.5)", "megatron-core"),
        ("NeMo/Megatron-Core", "24.07 (rev 2024-12)", "megatron-core"),
        ("Megatron-Bridge", "25.11 NeMo Container", "megatron-2025"),
        ("Megatron-Bridge", "26.04.01 NeMo Container", "megatron-2026"),
        ("Megatron-Bridge", "26.06 NeMo Container", "megatron-2026b"),
        ("composer/FSDP1", "2024-04", "fsdp"),
        ("NeMo AutoModel (PyTorch FSDP2)", "2026-01", "fsdp-2026"),
        ("Megatron-LM + DeepSpeed ZeRO-3", "2021", "deepspeed-2021"),
        ("Megatron-LM + DeepSpeed ZeRO-3", "2023", "deepspeed"),
        ("my own", "", "other"),
    ],
)
def test_eras(framework: str, version: str, expected: str) -> None:
    assert era(framework, release_year(framework, version)) == expected


def test_words_of_a_table() -> None:
    assert [bits(text) for text in ("bf16", "FP8 (current scaling)", "MXFP8", "NVFP4")] == [16, 8, 8, 4]
    assert [schedule_of(t) for t in ("1F1B (DeepSpeed)", "ZB-2p*", "interleaved 1F1B", "zbv")] == [
        "1f1b", "zb2p", "1f1b", "zbv",
    ]  # fmt: skip
    assert recompute_of("full", 10) == (1.0, False)
    assert recompute_of("full, 4 layers", 10) == (0.4, False)
    assert recompute_of("full/2", 5) == (0.6, False)
    assert recompute_of("selective: core_attn", 10) == recompute_of("selective", 10) == (0.0, True)
    assert recompute_of("selective: mlp", 10) == recompute_of("none", 10) == (0.0, False)


def test_networks_of_a_table() -> None:
    for text, gbit, domain in (
        ("NVLink + 800 Gb/s per node", 100, 8),
        ("8x HDR IB 200Gb/s per node (Selene)", 200, 8),
        ("IB 400Gb/s per GPU", 400, 8),
        ("NVLink72 domain", 400, 72),
    ):
        gpu = "GB200-192GB" if domain == 72 else "H100-80GB"
        found = hardware(gpu, 8, text, 4 if domain == 72 else 8)
        assert (found.nic_bytes_per_s * 8 / 1e9, found.domain) == (gbit, domain)
    assert hardware("A100-80GB", 8, "", None).peak_low_flops_per_s == 312e12  # it has no 8-bit floats


def test_a_layout_stands_for_its_degrees(tmp_path: Path) -> None:
    sizes = {name: value for name, value in RUN.items() if name not in ("tp", "pp")}
    layout = {"tp": 2, "pp": 2, "dp": 2, "cp": 1, "zero_stage": 1, "vpp": 2, "pp_schedule": "1f1b"}
    given = {"sequence_parallel": True, "ep": 1, "etp": 1}
    path = written(tmp_path, {**sizes, "layout": "dp2 tp2 pp2:1f1b*2 zero1"}, {**sizes, **layout, **given})
    one, other = read_rows(path)
    assert one.values == other.values
    assert one.unread == ()
    assert read_rows(written(tmp_path, {**sizes, "layout": "tp2", "tp": 4}))[0].tp == 4
    with pytest.raises(RecordError, match=r"line 1: layout: unknown layout token 'TP2'"):
        read_rows(written(tmp_path, {**sizes, "layout": "TP2"}))


def test_columns_that_nothing_reads_are_named(tmp_path: Path) -> None:
    rows = read_rows(written(tmp_path, {**RUN, "gpus": 8}, {**RUN, "note": "x"}))
    assert unread_columns(rows) == "columns that are not read: gpus (did you mean 'gpu'?), note"
    assert unread_columns(read_rows(written(tmp_path, RUN))) is None


@pytest.mark.parametrize("text", ["attention", "attention+mlp", "mlp+attention", "selective"])
def test_recompute_of_attention_by_our_name_and_by_megatrons(text: str) -> None:
    assert recompute_of(text, 32) == (0.0, True)


@pytest.mark.parametrize("text", ["none", "full", "full/2", "attention", "mlp", "attention+mlp", "moe"])
def test_memory_of_a_row_knows_our_own_words_of_recompute(text: str) -> None:
    assert str(memory_rows.recompute_of(text, "Fivefold")) == text
