"""Files that a person names: a pipe or a device is refused, at once, by every reader of the planning commands."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from fivefold.core.cluster import Cluster
from fivefold.core.model_config import load_json
from fivefold.core.plan import Plan
from fivefold.core.regular_file import read_regular, write_whole
from fivefold.errors import UserError
from fivefold.plan.calibration import load
from fivefold.plan.runs_table import read_rows


def parse_cluster(path: Path) -> object:
    return Cluster.parse(str(path))


@pytest.mark.parametrize("reader", [parse_cluster, load_json, Plan.load, load, read_rows])
@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_what_may_never_end_is_refused(tmp_path: Path, reader: Callable[[Path], object], kind: str) -> None:
    path = tmp_path / "named.yaml"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    with pytest.raises(
        UserError, match="Is a directory" if kind == "folder" else "not a regular file"
    ) as caught:
        reader(path)
    assert "\n" not in str(caught.value)


def test_no_more_is_read_than_was_asked(tmp_path: Path) -> None:
    path = tmp_path / "long"
    path.write_bytes(b"abcdef")
    assert read_regular(path, 4) == b"abcd"
    assert read_regular(path, 100) == b"abcdef"


def test_a_file_takes_no_pipes_place_and_links_stay(tmp_path: Path) -> None:
    """Whoever may write into /dev would else lose a device for a report: `--html /dev/null`."""
    pipe, link, file = tmp_path / "pipe", tmp_path / "link", tmp_path / "file"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="not a regular file"):
        write_whole({pipe: "new"})
    assert pipe.is_fifo()
    file.write_text("old")
    link.symlink_to(file)
    write_whole({link: "new"})
    assert link.is_symlink()
    assert file.read_text() == "new"
    assert sorted(tmp_path.iterdir()) == [file, link, pipe]
