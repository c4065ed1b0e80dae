"""What can be refused before any rank runs: wrong variables, ports in use, peers that do not come."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.errors import LaunchError, RankFailure
from fivefold.runtime.launch import joined_rank, one_line, run_ranks, under_launcher

GOOD = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}


@contextlib.contextmanager
def occupied_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def join(monkeypatch: pytest.MonkeyPatch, timeout_s: float = 5.0, **variables: str) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with joined_rank("cpu", timedelta(seconds=timeout_s)):
        pytest.fail("joined a job that does not exist")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"RANK": "zero"}, "RANK='zero' is not a number"),
        ({"RANK": "-1"}, "RANK='-1' is not a number"),
        ({"RANK": "²"}, "RANK='²' is not a number"),
        ({"WORLD_SIZE": ""}, "WORLD_SIZE='' is not a number"),
        ({"LOCAL_RANK": "a"}, "LOCAL_RANK='a' is not a number"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT='http' is not a number"),
        ({"RANK": "2"}, "RANK=2 must be below WORLD_SIZE=2"),
    ],
)
def test_a_wrong_variable_is_named(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, str], message: str
) -> None:
    with pytest.raises(LaunchError, match=message):
        join(monkeypatch, **{**GOOD, "MASTER_PORT": "29400", **changes})


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_a_missing_variable_is_named(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    variables = {**GOOD, "MASTER_PORT": "29400"}
    del variables[missing]
    with pytest.raises(LaunchError, match=missing) as caught:
        join(monkeypatch, **variables)
    assert len(str(caught.value).splitlines()) == 1


def test_port_in_use_under_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    with occupied_port() as port:
        message = f"cannot meet the other ranks at 127.0.0.1:{port}: the port is in use; set MASTER_PORT"
        with pytest.raises(LaunchError, match=message):
            join(monkeypatch, **GOOD, MASTER_PORT=str(port))


def test_peers_that_do_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    with occupied_port() as port:
        free = port
    began = time.monotonic()
    with pytest.raises(LaunchError, match=f"cannot meet the other ranks at 127.0.0.1:{free}") as caught:
        join(monkeypatch, timeout_s=1.0, **GOOD, MASTER_PORT=str(free))
    assert time.monotonic() - began < 10
    assert len(str(caught.value).splitlines()) == 1


def test_port_in_use_on_this_machine() -> None:
    with occupied_port() as port:
        with pytest.raises(LaunchError, match=f"^port {port} cannot be used .*leave --port out"):
            run_ranks(lambda rank: None, ranks=2, device="cpu", port=port)


@pytest.mark.parametrize("port", [-1, 65536])
def test_a_number_that_is_no_port(port: int) -> None:
    with pytest.raises(LaunchError, match=f"^port {port} cannot be used"):
        run_ranks(lambda rank: None, ranks=2, device="cpu", port=port)


def test_under_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert not under_launcher()
    monkeypatch.setenv("RANK", "1")
    assert under_launcher()


@given(st.text())
def test_a_failure_is_told_inone_line(text: str) -> None:
    line = one_line(ValueError(text))
    assert line.startswith("ValueError")
    assert len(line.splitlines()) == 1
    assert len(str(RankFailure(3, line)).splitlines()) == 1
