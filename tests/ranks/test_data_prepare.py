"""`fivefold data prepare` in several processes: the same bytes whatever their number and whatever ends them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import multiprocessing
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from fivefold.cli import main as cli
from fivefold.data import work
from fivefold.data.prepared import PreparedDataset
from fivefold.units import GIB, MIB

COMMAND = (
    "import sys; from fivefold.cli import main; main.COMMANDS.setdefault('data', ('fivefold.cli.data', '')); "
)
KILLS = 8


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(cli.COMMANDS, "data", ("fivefold.cli.data", "Tokenise text once."))
    return tmp_path


def corpus(path: Path, size_bytes: int) -> Path:
    """JSON Lines of about so many bytes, no two documents the same."""
    rng = random.Random(0)
    words = [hashlib.sha256(str(n).encode()).hexdigest()[: 2 + n % 9] for n in range(2000)]
    with path.open("w") as file:
        while file.tell() < size_bytes:
            file.write(json.dumps({"text": " ".join(rng.choices(words, k=rng.randrange(20, 800)))}) + "\n")
    return path


def start(*arguments: str, limit_bytes: int | None = None) -> subprocess.Popen[str]:
    def limit() -> None:
        signal.signal(
            signal.SIGINT, signal.SIG_DFL
        )  # ignored where the tests run in the background of a script
        if limit_bytes is not None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))

    command = [sys.executable, "-c", f"{COMMAND}sys.exit(main.run(sys.argv[1:]))", "data", *arguments]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=limit,
        start_new_session=True,
    )


def run(*arguments: str) -> tuple[int, str, str]:
    with start(*arguments) as process:
        out, err = process.communicate(timeout=200)
    return process.returncode, out, err


def contents(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def said(err: str) -> str:
    lines = [line for line in err.splitlines() if line.startswith("fivefold: ")]
    assert len(lines) == 1, err
    assert "Traceback" not in err
    return lines[0].removeprefix("fivefold: ")


def wait_for_units(out: Path, count: int, process: subprocess.Popen[str]) -> None:
    """Until so many units are finished, however fast the machine is just now, or the process has ended."""
    while process.poll() is None and len(list((out / ".work").glob("unit-*.json"))) < count:
        time.sleep(0.002)


def test_the_number_of_processes_does_not_change_a_byte(here: Path) -> None:
    source = str(corpus(here / "a.jsonl", 6 * MIB))
    found = []
    for workers in (1, 2, 3):
        code, out, err = run(
            "prepare", source, "--out", f"o{workers}", "--workers", str(workers), "--shard-mib", "1", "--json"
        )
        assert code == 0, err
        assert json.loads(out)["splits"]["train"]["shards"] >= 6
        found.append(contents(here / f"o{workers}"))
    assert found[0] == found[1] == found[2]


def test_killed_at_any_moment_it_goes_on_to_the_same_bytes(here: Path) -> None:
    """kill -9 of the parent or of a worker at random moments; shards that were finished are not made again."""
    source = str(corpus(here / "a.jsonl", 12 * MIB))
    options = ["--workers", "2", "--shard-mib", "0.5", "--validation-frac", "0.1"]
    with start("prepare", source, "--out", "whole", *options) as process:
        wait_for_plan(here / "whole", process)
        began = time.monotonic()
        process.communicate(timeout=60)
    took_s = time.monotonic() - began
    units = len({path.stem[-5:] for path in (here / "whole").glob("*.tokens")})
    rng, landed = random.Random(1), 0
    for attempt in range(KILLS):
        out = here / f"cut{attempt}"
        with start("prepare", source, "--out", str(out), *options) as process:
            wait_for_plan(out, process)
            wait_for_units(out, rng.randrange(4 * units // 5), process)
            time.sleep(rng.uniform(0, took_s / units))
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                workers = psutil.Process(process.pid).children()
                victim = rng.choice(workers).pid if workers and attempt % 2 else process.pid
                os.kill(victim, signal.SIGKILL)
            _, err = process.communicate(timeout=60)
        if process.returncode == 2:
            assert "a process of the preparation was killed" in said(err)
        if not (out / "manifest.json").exists():
            landed += 1
            finished = [path.name[5:10] for path in (out / ".work").glob("unit-*.json")]
            times = {p: p.stat().st_mtime_ns for number in finished for p in out.glob(f"*-{number}.tokens")}
            code, _, err = run("prepare", source, "--out", str(out), *options)
            assert code == 0, err
            assert all(path.stat().st_mtime_ns == when for path, when in times.items())
        elif (out / ".work").exists():  # killed while clearing up
            assert run("prepare", source, "--out", str(out), *options)[0] == 0
        assert contents(out) == contents(here / "whole")
    assert landed >= KILLS // 2


def test_a_process_that_waits_for_a_dead_one_ends_with_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed with a lock of the pool in its hands, a process holds up the others, and so the pool."""
    monkeypatch.setattr(work, "GRACE_S", 0.5)
    context = multiprocessing.get_context("fork")
    meter, lock = work._Meter(1), context.Lock()
    lock.acquire()

    def wait() -> None:
        work._start_process(None, meter, os.getppid())  # type: ignore[arg-type]
        lock.acquire()

    process = context.Process(target=wait)
    process.start()
    process.join(1)
    assert process.is_alive(), "the work goes on"
    meter.stop()
    process.join(10)
    assert process.exitcode == 1


def wait_for_plan(out: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 60
    while not (out / ".work" / "plan.json").exists() and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.mark.parametrize("moment", [".work/plan.json", ".work/unit-*.json"], ids=["forking", "working"])
def test_ctrl_c_ends_all_processes_and_leaves_what_is_finished(here: Path, moment: str) -> None:
    source = str(corpus(here / "a.jsonl", 12 * MIB))
    with start("prepare", source, "--out", "out", "--workers", "2", "--shard-mib", "0.5") as process:
        while not list((here / "out").glob(moment)):
            assert process.poll() is None
            time.sleep(0.0005)
        workers = psutil.Process(process.pid).children()
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    assert said(err) == "interrupted"
    assert not [
        worker for worker in workers if worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE
    ]
    assert not list((here / "out" / ".work").glob("*.tmp"))
    assert run("prepare", source, "--out", "out", "--workers", "2", "--shard-mib", "0.5")[0] == 0


def test_two_at_a_time_are_refused(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fivefold.data.prepare as prepare_module
    from fivefold.errors import DataError

    (here / "a.txt").write_text("text")
    monkeypatch.setattr(prepare_module, "LOCK_WAIT_S", 0.2)
    options = prepare_module.PrepareOptions(validation_frac=0)
    with prepare_module._locked(here / "out", here / "out" / ".work"):
        with pytest.raises(DataError, match="another process is preparing"):
            prepare_module.prepare(["a.txt"], here / "out", options, workers=1)
    prepare_module.prepare(["a.txt"], here / "out", options, workers=1)


def test_a_write_that_fails_in_a_worker_is_one_line(here: Path) -> None:
    source = str(corpus(here / "a.jsonl", 4 * MIB))
    options = ["prepare", source, "--out", "out", "--workers", "2", "--shard-mib", "1"]
    with start(*options, limit_bytes=MIB) as process:
        _, err = process.communicate(timeout=60)
    assert process.returncode == 2, err
    assert "cannot write" in said(err)
    assert "File too large" in said(err)
    assert not list((here / "out" / ".work").glob("*.tmp"))
    assert run(*options)[0] == 0


def test_a_broken_line_in_a_worker_is_one_line_and_skipped_on_request(here: Path) -> None:
    source = corpus(here / "a.jsonl", 2 * MIB)
    lines = source.read_bytes().splitlines(keepends=True)
    lines[200] = b'{"text": "cut\n'
    source.write_bytes(b"".join(lines))
    options = ["prepare", "a.jsonl", "--out", "out", "--workers", "2", "--shard-mib", "0.25"]
    code, _, err = run(*options)
    assert code == 2, err
    assert said(err).startswith("a.jsonl:201: not JSON: ")
    code, out, err = run(*options, "--on-error", "skip", "--json")
    assert code == 0, err
    found = json.loads(out)
    assert found["skipped"] == 1
    assert found["skipped_examples"][0].startswith("a.jsonl:201: ")
    code, out, err = run("show", "out")
    assert "skipped 1 broken records" in err


@pytest.mark.parametrize("kind", ["byte", "bpe"])
def test_memory_stays_below_a_gibibyte(here: Path, kind: str) -> None:
    """Of all processes together, with documents of 1 MiB among them."""
    source = corpus(here / "a.jsonl", 4 * MIB if kind == "bpe" else 60 * MIB)
    with source.open("a") as file:
        for n in range(4):
            file.write(json.dumps({"text": f"{n} some words of text" * (MIB // 20)}) + "\n")
    tokenizer = "byte"
    if kind == "bpe":
        tokenizer = str(make_bpe(here))
    peak, done = [0], threading.Event()
    with start("prepare", str(source), "--out", "out", "--tokenizer", tokenizer, "--workers", "2") as process:

        def watch() -> None:
            while not done.wait(0.05):
                with contextlib.suppress(psutil.Error):
                    parent = psutil.Process(process.pid)
                    every = [parent, *parent.children(recursive=True)]
                    peak[0] = max(peak[0], sum(one.memory_full_info().pss for one in every))

        watcher = threading.Thread(target=watch)
        watcher.start()
        _, err = process.communicate(timeout=200)
        done.set()
        watcher.join()
    assert process.returncode == 0, err
    assert 30 * MIB < peak[0] < 0.8 * GIB


def make_bpe(folder: Path) -> Path:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=1000, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator((folder / "a.jsonl").read_text()[:300_000].splitlines(), trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def test_show_says_what_is_there_and_verifies(here: Path) -> None:
    talk = {"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]}
    (here / "a.jsonl").write_text(json.dumps(talk) + "\n")
    assert run("prepare", "a.jsonl", "--out", "out", "--validation-frac", "0")[0] == 0
    code, out, err = run("show", "out", "--verify")
    assert code == 0, err
    assert "train: 1 documents, " in out
    assert "Every shard has the sha256" in out
    code, out, _ = run("show", "out", "--document", "0")
    assert out == "<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n«4<|im_end|>»\n\n"
    path = here / "out" / "train-00000.loss"
    path.write_bytes(bytes(len(path.read_bytes())))
    code, out, err = run("show", "out", "--verify", "--json")
    assert code == 2, err
    assert said(err).startswith("shard out/train-00000.loss is damaged: its sha256")
    code, _, err = run("show", "nothing")
    assert "nothing/manifest.json: No such file" in said(err)


def test_readers_in_several_processes_see_the_same(here: Path) -> None:
    import numpy as np

    from fivefold.runtime.launch import Rank, run_ranks

    assert run("prepare", str(corpus(here / "a.jsonl", MIB)), "--out", "out", "--shard-mib", "0.1")[0] == 0
    data = PreparedDataset(here / "out", 64, 3)
    whole = data.global_batch(5, 16).tokens_BS

    def read(rank: Rank) -> Any:
        sizes = {"dp_rank": rank.rank, "dp": 4, "micro_batch": 2, "global_batch": 16}
        return np.concatenate([data.microbatch(5, index, **sizes).tokens_BS for index in range(2)])

    assert (np.concatenate(run_ranks(read, ranks=4, device="cpu")) == whole).all()


def test_options_that_make_no_sense_are_one_line(here: Path) -> None:
    (here / "a.txt").write_text("text")
    for options, message in (
        (["--weights", "1,x"], "is no list of numbers"),
        (["--weights", "1,2"], "2 weights for 1 sources"),
        (["--validation-frac", "1"], "is not in the range"),
        (["--tokenizer", "none.json"], "tokenizer none.json does not exist"),
        (["--format", "csv"], "is not one of"),
    ):
        code, _, err = run("prepare", "a.txt", "--out", "out", *options)
        assert code == 2
        assert message in err
        assert "Traceback" not in err
        assert not (here / "out").exists()
