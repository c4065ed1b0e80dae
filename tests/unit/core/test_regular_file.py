"""Files that a person names: what is no regular file or too large is refused, at once, by every reader."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from fivefold.core.cluster import Cluster
from fivefold.core.model_config import load_json
from fivefold.core.plan import Plan
from fivefold.core.regular_file import read_regular, read_text, write_whole
from fivefold.data.encode import load_encoder
from fivefold.data.manifest import is_prepared, read_manifest
from fivefold.errors import UserError
from fivefold.plan import calibration
from fivefold.plan.runs_table import read_rows
from fivefold.strategies.expert.counts_file import read_counts
from fivefold.strategies.pipeline.actions import read_actions
from fivefold.train.checkpoint import Manifest
from fivefold.train.config import load_config

Reader = Callable[[Path], object]

READERS: dict[str, tuple[str, Reader]] = {
    "cluster": ("ours.yaml", lambda path: Cluster.parse(str(path))),
    "model config": ("config.json", load_json),
    "plan": ("plan.json", Plan.load),
    "calibration": ("ours.json", calibration.load),
    "runs table": ("runs.csv", read_rows),
    "actions": ("actions.txt", read_actions),
    "counts of experts": ("counts.json", read_counts),
    "manifest": ("manifest.json", lambda path: Manifest.load(path.parent)),
    "manifest of prepared data": ("manifest.json", lambda path: read_manifest(path.parent)),
    "training config": ("run.yaml", load_config),
    "tokenizer.json": ("other.json", lambda path: load_encoder(str(path))),
}
SAID = {
    "pipe": "not a regular file",
    "device": "not a regular file",
    "folder": "Is a directory|No such file",
    "long": "at most .* are read",
    "absent": "No such file|it has no manifest|does not exist",
}


@pytest.mark.parametrize(("name", "reader"), READERS.values(), ids=READERS)
@pytest.mark.parametrize("kind", SAID)
def test_what_is_no_file_of_a_fair_size_is_refused(
    tmp_path: Path, name: str, reader: Reader, kind: str
) -> None:
    """At once and in one line, by every reader of what a person names."""
    path = tmp_path / name
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    elif kind == "long":
        path.touch()
        os.truncate(path, 2**30)
    with pytest.raises(UserError, match=SAID[kind]) as caught:
        reader(path)
    assert "\n" not in str(caught.value)
    assert str(path.parent) in str(caught.value)


def test_a_folder_with_a_pipe_for_a_manifest_is_not_prepared(tmp_path: Path) -> None:
    """Asked of whatever a training config names as its data; it does not wait for the pipe."""
    os.mkfifo(tmp_path / "manifest.json")
    assert not is_prepared(tmp_path)


def test_no_more_is_read_than_was_asked(tmp_path: Path) -> None:
    path = tmp_path / "long"
    path.write_bytes(b"abcdef")
    assert read_regular(path, 4) == b"abcd"
    assert read_regular(path, 100) == b"abcdef"


def test_a_text_may_have_a_byte_order_mark_and_is_utf8(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes("é".encode("utf-8-sig"))
    assert read_text(path, 5, "text", UserError) == "é"
    with pytest.raises(UserError, match=r"^text .*text has 5 B; at most 4 B are read$"):
        read_text(path, 4, "text", UserError)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match=r"^text .*text is not UTF-8 text$"):
        read_text(path, 5, "text", UserError)


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
