from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from fivefold.core.execution import microbatches
from fivefold.core.layout import Layout
from fivefold.core.optimizer import OptimizerConfig, lr_at
from fivefold.errors import ConfigError, LayoutError, WorkloadError
from fivefold.train.config import TrainConfig, load_config, valid_keys

EXAMPLE = Path(__file__).parents[3] / "examples" / "train.yaml"


def load(*overrides: str) -> TrainConfig:
    return load_config(None, ["model=tiny-llama", *overrides])


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    return path


def test_example_names_every_key_with_its_default() -> None:
    assert load_config(EXAMPLE) == TrainConfig(model="tiny-llama")
    data = yaml.safe_load(EXAMPLE.read_text())
    keys = [f"{k}.{s}" for k, v in data.items() for s in (v if isinstance(v, dict) else ())]
    keys += [k for k, v in data.items() if not isinstance(v, dict)]
    assert sorted(keys) == sorted(valid_keys())


def test_actions_are_read_from_their_file(tmp_path: Path) -> None:
    path = tmp_path / "actions.csv"
    path.write_text("# rank 0, then rank 1\n0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    config = load("layout=pp2:custom", f"actions={path}", "global_batch=2")
    assert config.execution.actions == ("0F0, 0F1, 0B0, 0B1", "1F0, 1B0, 1F1, 1B1")
    path.write_text("0F0, oops")
    with pytest.raises(ConfigError, match=r"actions .*actions.csv, line 1, column 6: expected chunk"):
        load("layout=pp2:custom", f"actions={path}")


def test_overrides_reach_every_kind_of_value() -> None:
    config = load_config(
        EXAMPLE,
        [
            "layout=tp2 dp2 pp2:gpipe",
            "optimizer.lr=3e-4",
            "optimizer.betas=[0.8, 0.99]",
            "optimizer.clip_norm=null",
            "micro_batch=auto",
            "data=texts/*.txt",
            "log.metrics=out/m.jsonl",
            "log.records=null",
            "steps=5",
            "steps=7",
        ],
    )
    assert config.layout == Layout(dp=2, tp=2, pp=2, schedule="gpipe")
    assert config.optimizer.lr == 3e-4
    assert config.optimizer.betas == (0.8, 0.99)
    assert config.optimizer.clip_norm is None
    assert config.data == "texts/*.txt"
    assert config.log.metrics == Path("out/m.jsonl")
    assert config.log.records is None
    assert config.steps == 7
    assert load("data=*.txt").data == "*.txt"  # an alias in YAML, a plain text here


def test_json_round_trip() -> None:
    config = load("layout=dp2 pp2", "log.metrics=m.jsonl", "optimizer.lr=3e-4")
    assert TrainConfig.model_validate_json(config.model_dump_json()) == config


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optimizer.lrr=1", "unknown key 'optimizer.lrr' (did you mean 'optimizer.lr'?)"),
        ("lr=1", "unknown key 'lr' (did you mean 'optimizer.lr'?)"),
        ("optimzer.lr=1", "unknown key 'optimzer' (did you mean 'optimizer'?)"),
        ("global_bach=1", "unknown key 'global_bach' (did you mean 'global_batch'?)"),
        ("qqqq=1", "unknown key 'qqqq'; valid keys: model, layout, measured, seq_len"),
        ("steps.x=1", "unknown key 'steps.x': steps is one value, not a section"),
        ("steps", "expected key=value, such as optimizer.lr=3e-4, got 'steps'"),
        ("=3", "expected key=value"),
        ("tp2", "got 'tp2'; a layout of several words is quoted: layout='dp2 tp2'"),
        ("device=cpu", "unknown key 'device'; it is an option: --device"),
        (
            "steps=many",
            "steps: expected a whole number (got 'many')",
        ),
        ("steps=0", "steps: expected a number of at least 1 (got 0)"),
        ("steps=yes", "steps: expected a number, not true or false (got True)"),
        ("steps=1.5", "(got 1.5)"),
        ("steps=", "(got None)"),
        ("seq_len=1", "expected a number of at least 2 (got 1)"),
        ("optimizer.lr=fast", "optimizer.lr: expected a number (got 'fast')"),
        ("optimizer.lr=.nan", "optimizer.lr: expected a finite number (got nan)"),
        ("optimizer.betas=[0.9]", "optimizer.betas.1"),
        ("optimizer.betas=[0.9, 1.0]", "expected a number below 1 (got 1.0)"),
        ("optimizer.clip_norm=0", "expected a number above 0"),
        ("optimizer=sgd", "(got 'sgd')"),
        ("dtype=float8", "dtype: expected 'float32', 'float64', 'bfloat16' or 'float16' (got 'float8')"),
        ("optimizer.momentum=0.9", "momentum does nothing with adamw; leave it at 0.0 or change name"),
        ("micro_batch=0", "micro_batch: expected an integer from 1 to 1000000, or 'auto' (got 0)"),
        (
            "micro_batch=yes",
            "micro_batch: expected an integer from 1 to 1000000, or 'auto' (got True)",
        ),
        (
            "micro_batch=all",
            "micro_batch: expected an integer from 1 to 1000000, or 'auto' (got 'all')",
        ),
        ("log.records=3", "log.records: expected text (got 3)"),
        ("model=7", "model: expected text (got 7)"),
    ],
)
def test_bad_overrides_are_one_line_that_says_what_and_where(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(override)
    text = str(error.value)
    assert message in text
    assert text.startswith("command line: ")
    assert "\n" not in text


def test_settings_that_would_do_nothing_are_refused() -> None:
    said = r"optimizer: momentum does nothing with adamw; leave it at 0\.0 or change name"
    with pytest.raises(ConfigError, match=rf"train\.yaml and command line: {said}"):
        load_config(EXAMPLE, ["optimizer.momentum=0.9"])
    assert load("optimizer.name=sgd", "optimizer.momentum=0.9").optimizer.momentum == 0.9
    with pytest.raises(ConfigError, match="betas does nothing with sgd"):
        load("optimizer.name=sgd", "optimizer.betas=[0.8, 0.9]")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: m\nsteps: x\n", "steps: expected a whole number"),
        ("model: m\nlayuot: dp2\n", "unknown key 'layuot' (did you mean 'layout'?)"),
        (
            "model: m\noptimizer:\n  warmup: 3\n",
            "unknown key 'optimizer.warmup' (did you mean 'optimizer.warmup_steps'?)",
        ),
        ("steps: 3\n", "missing key 'model'"),
        ("model: m\nsteps: 3\nsteps: 4\n", "line 3: key 'steps' is given twice"),
        ("model: &a m\ndata: *a\n", "line 2: aliases (*name) are not supported"),
        ("model: [m\n", "line 2: "),
        ("- model\n", "expected keys and values, got a list"),
        ("model: m\n3: 4\n", "keys are text, got 3"),
        ("model: m\nlog: {3: 4}\n", "unknown key 'log.3'"),
        ("model: !!python/object/apply:os.getcwd []\n", "could not determine a constructor"),
        ("model: " + "[" * 3000 + "]" * 3000, "nested too deeply"),
        ("model: m\nseed: " + "9" * 5000, "not a YAML file"),
        ("? {a: b}\n: c\n", "unhashable"),
    ],
)
def test_bad_files_are_one_line_that_names_the_file(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as error:
        load_config(path)
    assert message in str(error.value)
    assert str(error.value).startswith(f"{path}: ")
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 700


def test_the_file_is_named_even_when_other_keys_come_from_the_command_line(tmp_path: Path) -> None:
    path = write(tmp_path, "model: m\nsteps: x\n")
    with pytest.raises(ConfigError, match=f"^{path}: steps"):
        load_config(path, ["seed=1"])


def test_a_section_that_is_a_scalar_cannot_be_changed_key_by_key(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"optimizer\.lr cannot be set, since the file gives optimizer as 'sgd'"
    ):
        load_config(write(tmp_path, "model: m\noptimizer: sgd\n"), ["optimizer.lr=1"])


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"cannot read training config .*: No such file.*; give a YAML file, or .* model="
    ):
        load_config(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match=r"missing key 'model': name a config first"):
        load_config(None)
    with pytest.raises(ConfigError, match=": Is a directory"):
        load_config(tmp_path)
    with pytest.raises(ConfigError, match="cannot read training config"):
        load_config("a\0b")
    with pytest.raises(ConfigError, match="at most 64 KiB are read"):
        load_config(write(tmp_path, "#" * 70_000))
    (tmp_path / "b.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"b\.yaml is not UTF-8 text"):
        load_config(tmp_path / "b.yaml")


def test_empty_file_is_all_defaults(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, ""), ["model=m"]) == TrainConfig(model="m")


def test_layout_and_batch_rules_keep_their_own_error() -> None:
    with pytest.raises(LayoutError):
        load("layout=dp2 dp2")
    for overrides in (["layout=dp3"], ["layout=dp3", "micro_batch=auto"]):
        with pytest.raises(
            WorkloadError, match=r"16 is not a multiple of dp3 .*nearest global batch: 15 or 18$"
        ):
            load(*overrides)
    with pytest.raises(WorkloadError, match=r"nearest global batch: 12 or 18$"):
        load("layout=dp2", "micro_batch=3")


@pytest.mark.parametrize(
    ("overrides", "rows", "count"),
    [
        (["micro_batch=auto"], 16, 1),
        (["micro_batch=auto", "layout=dp4"], 4, 1),
        (["micro_batch=auto", "layout=pp2"], 2, 8),
        (["micro_batch=auto", "layout=dp8 pp2"], 1, 2),
        (["micro_batch=auto", "seq_len=4096"], 2, 8),
        (["micro_batch=auto", "seq_len=100000"], 1, 16),
        (["micro_batch=2", "layout=dp2"], 2, 4),
    ],
)
def test_microbatch_sizes(overrides: list[str], rows: int, count: int) -> None:
    config = load(*overrides)
    assert config.execution.micro_batch == rows
    assert microbatches(config.workload, config.layout, config.execution) == count


def test_execution_and_workload_carry_the_settings() -> None:
    config = load("seq_len=64", "dtype=float64", "optimizer.name=sgd", "bucket_mib=2", "global_batch=8")
    assert (config.workload.seq_len, config.workload.global_batch) == (64, 8)
    execution = config.execution
    assert (execution.dtype, execution.optimizer.name, execution.bucket_mib) == ("float64", "sgd", 2.0)


def optimizer(**changes: Any) -> OptimizerConfig:
    return OptimizerConfig(lr=2.0, warmup_steps=3, min_lr_frac=0.1).replace(**changes)


def test_learning_rate_by_hand() -> None:
    # Warm-up 1/4, 2/4, 3/4 of 2.0; steps 3..11 are a half cosine from 2.0 to 0.2 in 8 equal parts.
    rates = [lr_at(step, optimizer(), 12) for step in range(12)]
    assert rates[:4] == pytest.approx([0.5, 1.0, 1.5, 2.0])
    assert rates[5] == pytest.approx(1.1 + 0.9 * math.sqrt(0.5))
    assert rates[7] == pytest.approx(1.1)
    assert rates[9] == pytest.approx(1.1 - 0.9 * math.sqrt(0.5))
    assert rates[11] == pytest.approx(0.2)
    assert lr_at(500, optimizer(), 12) == pytest.approx(0.2)


def test_constant_schedule_and_short_runs() -> None:
    assert [lr_at(s, optimizer(schedule="constant"), 6) for s in (2, 3, 5)] == [1.5, 2.0, 2.0]
    assert [lr_at(s, optimizer(warmup_steps=0), 1) for s in (0,)] == [2.0]
    assert lr_at(3, optimizer(), 4) == 2.0
    assert lr_at(1, optimizer(warmup_steps=100), 2) == pytest.approx(4 / 101)


@given(st.integers(0, 20), st.integers(1, 60))
def test_learning_rate_rises_then_falls(warmup: int, steps: int) -> None:
    rates = [lr_at(step, optimizer(warmup_steps=warmup), steps) for step in range(steps)]
    top = min(warmup, steps - 1)
    assert rates[: top + 1] == sorted(rates[: top + 1])
    assert rates[top:] == sorted(rates[top:], reverse=True)
    assert all(0 < rate <= 2.0 for rate in rates)


def test_config_imports_neither_torch_nor_numpy() -> None:
    code = "import sys, fivefold.train.config; print(sorted({'torch', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ("[{path: a, weight: 0}]", r"data\.source\.0\.weight: expected a number above 0 \(got 0\)"),
        ("[{path: a, wieght: 2}]", r"unknown key 'data\.source\.0\.wieght' \(did you mean 'weight'\?\)"),
        ("[{path: a}, {weight: 1}]", r"missing key 'data\.source\.1\.path'"),
        ("[a, b]", r"data\.source\.0: expected keys and values"),
        ("3", r"data: expected text, or a list of \{path, weight\} \(got 3\)"),
    ],
)
def test_a_fault_in_a_mixture_is_that_of_the_mixture(data: str, words: str) -> None:
    """Not that a list is no text."""
    with pytest.raises(ConfigError, match=words):
        load(f"data={data}")
