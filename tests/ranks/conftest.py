"""What tests of the command line share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from .command_line import CommandLine


@pytest.fixture
def fivefold(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[CommandLine]:
    """`fivefold("train", "train.yaml", "layout=tp2")` in a folder of its own, with a store of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FIVEFOLD_RECORDS", str(tmp_path / "records.sqlite"))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    shell = CommandLine(tmp_path, capfd)
    shell.prepare()
    yield shell
    shell.end_all()
