"""Children of the test process: a store is shared by processes, so its tests need some."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import pytest

from fivefold.records.store import Store

FORK = multiprocessing.get_context("fork")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "records.sqlite"


@pytest.fixture
def store(path: Path) -> Iterator[Store]:
    with Store.open(path) as opened:
        yield opened


@pytest.fixture
def spawn() -> Iterator[Callable[..., ForkProcess]]:
    """Fork a child that runs a function; none outlives the test."""
    children: list[ForkProcess] = []

    def start(function: Callable[..., object], *arguments: object) -> ForkProcess:
        child = FORK.Process(target=function, args=arguments)
        child.start()
        children.append(child)
        return child

    yield start
    for child in children:
        child.kill()
        child.join()


@pytest.fixture
def answer(spawn: Callable[..., ForkProcess]) -> Callable[..., Any]:
    """What a function returns in a forked child; its exception comes back as its text."""

    def ask(function: Callable[..., object], *arguments: object) -> Any:
        ours, theirs = FORK.Pipe(duplex=False)

        def run() -> None:
            try:
                theirs.send(function(*arguments))
            except Exception as error:
                theirs.send(f"{type(error).__name__}: {error}")

        child = spawn(run)
        theirs.close()
        assert ours.poll(8), "the child does not answer"
        value = ours.recv()
        child.join()
        return value

    return ask
