"""What is checked before the ranks of a training run start."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fivefold.catalog.models import resolve
from fivefold.core.families.write import to_config
from fivefold.core.layout import Layout
from fivefold.core.sharding import parameters
from fivefold.engine.build import initial_value
from fivefold.errors import ModelError
from fivefold.nn.hub_write import write_hf
from fivefold.train.config import TrainConfig
from fivefold.train.log import MetricsFile
from fivefold.train.run import prepare


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    """Also where all names and shapes fit: one layer fewer, and other angles."""
    spec, layout = resolve("tiny-llama"), Layout()
    values = [
        (row.name, initial_value(row, layout, layout.coordinate(0), "float32", seed=0))
        for row in parameters(spec)
    ]
    write_hf(tmp_path / "weights", spec, values, dtype="float32")
    (tmp_path / "text.txt").write_text("some text " * 100)
    for field, value in (("num_hidden_layers", 3), ("rope_theta", 77.0)):
        path = tmp_path / "config.json"
        path.write_text(json.dumps({**to_config(spec), field: value}))
        config = TrainConfig(
            model=str(path), weights=str(tmp_path / "weights"), data=str(tmp_path / "text.txt"), seq_len=16
        )
        with pytest.raises(ModelError, match="weights of another model"):
            prepare(config, "cpu")
    prepare(config.replace(model="tiny-llama"), "cpu")


def test_a_metrics_file_of_a_run_that_begins_again_is_moved_aside(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for _ in range(3):
        file = MetricsFile(path)
        file.write({"step": 1, "loss": 2.0})
        file.close()
    assert sorted(found.name for found in tmp_path.iterdir()) == [
        "metrics.jsonl", "metrics.jsonl.1", "metrics.jsonl.2",
    ]  # fmt: skip
    MetricsFile(path, keep=1).close()
    assert json.loads(path.read_text()) == {"step": 1, "loss": 2.0}
