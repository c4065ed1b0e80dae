"""`pytest --resume`: goes on where a stopped run of the same code ended; `make test-all` uses it.

What passed is kept in .test_resume, one name a line, in a file named by a digest of the code and the tests: after any
change everything runs again. A test that failed or was skipped is not kept.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def code_digest(root: Path = ROOT) -> str:
    """A digest of every file of the package, the tests and the project's settings, by name and content."""
    digest = hashlib.sha256()
    folders = [
        path for name in ("src", "tests", "benchmarks", "examples") for path in (root / name).rglob("*")
    ]
    for path in sorted([root / "pyproject.toml", *folders]):
        if path.is_file() and "__pycache__" not in path.parts and not path.name.startswith("."):
            digest.update(f"{path.relative_to(root)}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]


class Resume:
    """Leaves out the tests that have passed before, and writes down those that pass now."""

    def __init__(self, passed: Path) -> None:
        self.file = passed
        self.passed = set(passed.read_text().splitlines()) if passed.is_file() else set()

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        done = [item for item in items if item.nodeid in self.passed]
        items[:] = [item for item in items if item.nodeid not in self.passed]
        config.hook.pytest_deselected(items=done)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            with self.file.open("a") as file:
                file.write(report.nodeid + "\n")

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and self.passed:
            session.exitstatus = pytest.ExitCode.OK  # all of them had passed


def resume(folder: Path = ROOT / ".test_resume") -> Resume:
    folder.mkdir(exist_ok=True)
    return Resume(folder / f"{code_digest()}.txt")
