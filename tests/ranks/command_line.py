"""The command line as a user types it, in a folder with a small model, a little text and a config."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from fivefold.cli import process
from fivefold.cli.main import run as run_command

MODEL: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 259,
    "max_position_embeddings": 256,
}

ROUTED_CONFIG = {
    "model_type": "mixtral",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 1,
}
"""What makes a small mixture of experts of `MODEL`."""
CONFIG = """\
model: config.json
data: corpus
seq_len: 32
global_batch: 8
micro_batch: 2
steps: 5
optimizer: {warmup_steps: 2}
log: {metrics: metrics.jsonl}
"""


@dataclass(frozen=True)
class Ended:
    """How a command ended, and what it printed."""

    code: int
    out: str
    err: str

    def json(self) -> Any:
        """Standard output as one JSON value: anything before or after it, or a NaN, is an error."""
        return json.loads(self.out, parse_constant=lambda text: pytest.fail(f"{text} is not JSON"))

    def said(self) -> str:
        """What the command itself has to say on standard error, without its progress; one line."""
        lines = [line for line in self.err.splitlines() if line.startswith("fivefold: ")]
        assert len(lines) == 1, self.err
        assert "Traceback" not in self.err
        assert self.err.rstrip().splitlines()[-1] == lines[0], self.err
        return lines[0].removeprefix("fivefold: ")


@dataclass
class Started:
    """A command that runs in a session of its own, as under a terminal."""

    pid: int
    folder: Path
    ranks: list[psutil.Process] = field(default_factory=list)

    def wait_for(self, text: str, timeout_s: float = 60.0) -> None:
        """Until this stands on its standard error."""
        deadline = time.monotonic() + timeout_s
        while text not in self._read("err"):
            assert time.monotonic() < deadline, self._read("err")
            time.sleep(0.02)
        children = psutil.Process(self.pid).children(recursive=True)
        self.ranks = sorted(children, key=lambda process: process.pid)

    def interrupt(self, *, whole_group: bool) -> None:
        """Ctrl-C: a terminal sends it to the whole group; `kill -INT` to the one process."""
        (os.killpg if whole_group else os.kill)(self.pid, signal.SIGINT)

    def ended(self, timeout_s: float = 60.0) -> Ended:
        deadline = time.monotonic() + timeout_s
        while (pair := os.waitpid(self.pid, os.WNOHANG)) == (0, 0):
            assert time.monotonic() < deadline, self._read("err")
            time.sleep(0.02)
        return Ended(os.waitstatus_to_exitcode(pair[1]), self._read("out"), self._read("err"))

    def alive(self) -> list[int]:
        """Ranks that still run."""
        return [rank.pid for rank in self.ranks if rank.is_running() and rank.status() != "zombie"]

    def _read(self, stream: str) -> str:
        path = self.folder / stream
        return path.read_text() if path.exists() else ""


@dataclass
class CommandLine:
    """`fivefold` in `folder`. Called, it runs a command in this process; `start` runs one in another."""

    folder: Path
    capture: pytest.CaptureFixture[str]
    started: list[Started] = field(default_factory=list)

    def __call__(self, *arguments: str) -> Ended:
        self.capture.readouterr()
        code = run_command(list(arguments))
        printed = self.capture.readouterr()
        return Ended(code, printed.out, printed.err)

    def start(self, *arguments: str, before: Callable[[], object] = lambda: None) -> Started:
        """Fork (torch is imported already), then behave like a process that a shell started."""
        self.capture.readouterr()
        pid = os.fork()
        if pid == 0:
            code = 70
            try:
                os.setsid()
                signal.signal(signal.SIGINT, signal.default_int_handler)
                for number, name in ((1, "out"), (2, "err")):
                    os.dup2(os.open(self.folder / name, os.O_WRONLY | os.O_CREAT, 0o600), number)
                sys.stdout, sys.stderr = (os.fdopen(n, "w", buffering=1) for n in (1, 2))
                before()
                code = run_command(list(arguments))
                process.abandon_broken_streams()  # as `main` does
            finally:
                os._exit(code)
        self.started.append(Started(pid, self.folder))
        return self.started[-1]

    def prepare(self) -> None:
        """Write the model, the config and the text that the tests start from."""
        self.model()
        (self.folder / "train.yaml").write_text(CONFIG)
        (self.folder / "corpus").mkdir()
        (self.folder / "corpus" / "text.py").write_bytes(Path(argparse.__file__).read_bytes())

    def end_all(self) -> None:
        """What a failing test leaves behind; a command and its ranks are one process group."""
        for command in self.started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(command.pid, signal.SIGKILL)

    def model(self, name: str = "config.json", **changes: Any) -> str:
        """Write a model config; None takes a field out."""
        fields: Mapping[str, Any] = {k: v for k, v in {**MODEL, **changes}.items() if v is not None}
        (self.folder / name).write_text(json.dumps(fields))
        return name

    def metrics(self, name: str = "metrics.jsonl") -> list[dict[str, float]]:
        """The lines of a metrics file; each must be whole."""
        return [json.loads(line) for line in (self.folder / name).read_text().splitlines()]

    def last_run(self) -> dict[str, Any]:
        shown: dict[str, Any] = self("runs", "show", "last", "--json").json()
        return shown
