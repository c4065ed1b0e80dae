"""What all tests share: one torch thread per process, the long tail on request, ranks on a mesh."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.resume import resume

os.environ.setdefault("OMP_NUM_THREADS", "1")  # also for the processes that tests start


settings.register_profile("shared-machine", deadline=None)  # a busy machine is no fault of the code
settings.load_profile("shared-machine")


LONG_CASES = frozenset((Path(__file__).parent / "long_cases.txt").read_text().splitlines())
"""Cases of several seconds each, of a kind that a shorter case covers: `make test-all` runs them."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--exhaustive", action="store_true", help="also run the whole matrix (make test-all)")
    parser.addoption(
        "--resume", action="store_true", help="leave out what has passed before with this very code"
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--resume"):
        config.pluginmanager.register(resume())


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--exhaustive"):
        return
    for item in items:
        if item.get_closest_marker("exhaustive") or item.nodeid.removeprefix("tests/") in LONG_CASES:
            item.add_marker(pytest.mark.skip(reason="long: runs with --exhaustive"))


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Forked ranks share few cores, and a parent that used threads cannot be forked safely."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def on_mesh() -> Callable[..., list[Any]]:
    """`on_mesh(function, layout, *args)`: `function(mesh, *args)` on every rank; results by rank."""
    from fivefold.core.layout import Layout
    from fivefold.runtime.launch import Rank, run_ranks
    from fivefold.runtime.mesh import Mesh

    def run(function: Callable[..., Any], text: str, *args: Any) -> list[Any]:
        layout = Layout.parse(text)

        def on_rank(rank: Rank) -> Any:
            return function(Mesh(layout, rank.rank, rank.device), *args)

        return run_ranks(on_rank, ranks=layout.world_size, device="cpu")

    return run
