"""What users get wrong about experts: one line each, and exit code 2."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fivefold.catalog.models import preset
from fivefold.cli.main import run
from fivefold.core.sharding import stored
from fivefold.engine.parallelize import parallelize
from fivefold.errors import ModelError
from fivefold.nn.decoder import Decoder
from fivefold.nn.hub_write import write_hf


@pytest.fixture
def line(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """The one line that a command that exits with 2 says."""

    def of(*arguments: object) -> str:
        assert run([*map(str, arguments)]) == 2
        printed = capsys.readouterr()
        (last,) = [text for text in printed.err.splitlines() if text.startswith("fivefold: ")]
        assert printed.err.splitlines()[-1] == last
        assert "Traceback" not in printed.err
        return last

    return of


COMMANDS: list[tuple[str, ...]] = [
    ("train", "model=tiny-moe", "layout={}"),
    ("verify", "-m", "tiny-moe", "--layout", "{}"),
    ("estimate", "-m", "tiny-moe", "--layout", "{}", "--cluster", "16xh100"),
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
@pytest.mark.parametrize(
    ("layout", "said"),
    [
        ("dp16 ep16", "ep16 does not fit tiny-moe: 8 experts are not divisible by 16; nearest legal ep: 8"),
        ("tp2 nosp ep2", "etp1 and tp2 need sequence parallelism, else 2 ranks would dispatch the same tokens; "
         "leave out nosp, or use etp2"),
    ],
)  # fmt: skip
def test_degrees(line: Callable[..., str], command: tuple[str, ...], layout: str, said: str) -> None:
    assert said in line(*(part.format(layout) for part in command))


@pytest.mark.parametrize(
    ("value", "said"),
    [("0", "above 0 (got 0)"), ("-1", "above 0 (got -1)"), ("nan", "a finite number (got 'nan')"),
     ("1001", "at most 1000 (got 1001)"), ("much", "a number (got 'much')")],
)  # fmt: skip
def test_capacity_factors(line: Callable[..., str], value: str, said: str) -> None:
    told = line("train", "model=tiny-moe", f"router.capacity_factor={value}")
    assert "router.capacity_factor: expected" in told
    assert said in told


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (("model=tiny-moe", "log.experts=true"), "experts does nothing without metrics"),
        (
            ("model=tiny-llama", "log.experts=true", "log.metrics=m"),
            "log.experts does nothing: tiny-llama has no",
        ),
    ],
)
def test_counts_that_go_nowhere(line: Callable[..., str], settings: tuple[str, ...], said: str) -> None:
    assert said in line("train", *settings)


def change_tensors(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_checkpoints_with_other_experts(line: Callable[..., str], tmp_path: Path) -> None:
    spec = preset("tiny-moe")
    folder = write_hf(
        tmp_path / "a", spec, ((row.name, torch.zeros(row.shape)) for row in stored(spec))
    ).folder
    commands = ("model", "convert", folder, tmp_path / "b"), ("train", f"model={folder}", f"weights={folder}")
    expert = "model.layers.2.block_sparse_moe.experts.{}."
    taken: dict[str, Tensor] = {}

    def take_away(tensors: dict[str, Tensor]) -> None:
        taken.update({name: tensors.pop(name) for name in [*tensors] if name.startswith(expert.format(5))})

    def put_more(tensors: dict[str, Tensor]) -> None:
        for name, value in taken.items():
            tensors |= {name: value, name.replace(expert.format(5), expert.format(8)): value.clone()}

    change_tensors(folder, take_away)
    assert len(taken) == 3
    for command in commands:
        assert "lacks expert 5 of layer 2 of the mixtral in config.json" in line(*command)
    change_tensors(folder, put_more)
    for command in commands:
        assert "has expert 8 of layer 2, which the mixtral in config.json does not have" in line(*command)


@pytest.mark.parametrize(
    ("roles", "said"),
    [
        ({"transformer.h.*": "layer"}, "no module of Decoder has the role 'layer'"),
        ({}, "no module of Decoder has the role 'layer'"),
        ({"layers.*": "layr"}, "the role 'layr' (did you mean 'layer'?)"),
    ],
)
def test_tables_of_roles(roles: dict[str, str], said: str) -> None:
    with pytest.raises(ModelError) as caught:
        parallelize(Decoder(preset("tiny-moe")), "dp1", seq_len=16, global_batch=2, roles=roles)
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("layout", "code", "rule"),
    [
        ("dp2 ep3", 2, "nearest ep: 2"),
        ("tp2 nosp ep2", 2, "need sequence parallelism"),
        ("dp16 ep16", 1, "8 experts are not divisible by 16"),
        ("dp2 ep2", 0, None),
    ],
)
def test_why_in_json(capsys: pytest.CaptureFixture[str], layout: str, code: int, rule: str | None) -> None:
    """Also of a text that is no layout at all."""
    assert run(["layouts", "-m", "tiny-moe", "--why", layout, "--json"]) == code
    printed = capsys.readouterr()
    told = json.loads(printed.out)
    assert (told["layout"], told["model"], told["legal"]) == (layout, "tiny-moe", rule is None)
    assert told["rule"] is None if rule is None else rule in told["rule"]
    assert bool(printed.err) == (code == 2)
