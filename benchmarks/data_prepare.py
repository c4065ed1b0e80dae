"""MB/s of `fivefold data prepare` against `datasets` + `tokenizers` doing the same job on the same machine.

    python benchmarks/data_prepare.py --size 200 --rounds 3

Job: JSON Lines files of Python source to token numbers on disk, every document with its bos and eos, byte tokens and a
BPE tokenizer that is trained here on a part of the text. Theirs: `load_dataset("json")`, then `map` with batches and
the same number of processes, one thread each, ending with the Arrow files that `map` writes. Ours also splits off
validation documents and computes a sha256 of every file. Each run is a process of its own with an empty cache; the two
take turns, and who goes first alternates. Both must come to the same number of tokens, or nothing is reported.

MB/s     megabytes of text (not of JSON) per second of wall-clock time, without the import of libraries
CPU      seconds of all processes of a run, imports included: what a busy machine changes least
ratio    median time of theirs / median time of ours
memory   most PSS of all processes of a run together, looked at 20 times a second
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from fivefold.data.corpus import load_corpus
from fivefold.records.machine import machine_facts, versions
from fivefold.units import GIB, MEGA, MIB

FILES = 16
VOCAB = 16_384
TRAIN_BYTES = 8 * MIB
SEED = 0
BOS, EOS = "<|bos|>", "<|eos|>"
"""Names that the text does not hold: ours reads such text letter by letter, the others as the token itself."""


def make_corpus(folder: Path, size_bytes: float) -> int:
    """JSON Lines of the standard library and of variants with shuffled lines; returns the bytes of text."""
    corpus = load_corpus(limit_bytes=GIB)
    bounds = list(zip(corpus.offsets[:-1], corpus.offsets[1:]))
    texts = [corpus.tokens[a + 1 : b - 1].astype("u1").tobytes().decode() for a, b in bounds]
    rng = random.Random(SEED)
    files = [(folder / f"part-{n:02}.jsonl").open("w", encoding="utf-8") for n in range(FILES)]
    written = count = 0
    while written < size_bytes:
        for text in texts:
            lines = text.splitlines(keepends=True)
            if count >= len(texts):
                rng.shuffle(lines)
            text = "".join(lines)
            files[count % FILES].write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
            count, written = count + 1, written + len(text.encode())
            if written >= size_bytes:
                break
    for file in files:
        file.close()
    return written


def train_tokenizer(folder: Path, path: Path) -> None:
    """A byte-level BPE tokenizer, as those of GPT-2 and Llama 3 are, of the first text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts, size = [], 0
    for line in (folder / "part-00.jsonl").open(encoding="utf-8"):
        texts.append(json.loads(line)["text"])
        size += len(texts[-1])
        if size > TRAIN_BYTES:
            break
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(path))


def run_ours(corpus: str, tokenizer: str, out: str, workers: int) -> dict[str, Any]:
    from fivefold.data.prepare import PrepareOptions, prepare

    bos, eos = (None, None) if tokenizer == "byte" else (BOS, EOS)
    options = PrepareOptions(tokenizer=tokenizer, bos_token=bos, eos_token=eos)
    started = time.perf_counter()
    manifest = prepare([corpus], Path(out), options, workers=workers)
    took = time.perf_counter() - started
    return {"seconds": took, "tokens": sum(shard.tokens for shard in manifest.shards)}


def run_theirs(corpus: str, tokenizer: str, out: str, workers: int) -> dict[str, Any]:
    import numpy as np
    from datasets import Features, Sequence, Value, disable_progress_bars, load_dataset
    from tokenizers import Tokenizer

    disable_progress_bars()
    if tokenizer == "byte":

        def encode(batch: dict[str, list[str]]) -> dict[str, Any]:
            rows = []
            for text in batch["text"]:
                body = np.frombuffer(text.encode(), dtype=np.uint8)
                row = np.empty(len(body) + 2, dtype=np.uint16)
                row[0], row[1:-1], row[-1] = 256, body, 257
                rows.append(row)
            return {"tokens": rows}

    else:
        bpe = Tokenizer.from_file(tokenizer)
        bos, eos = bpe.token_to_id(BOS), bpe.token_to_id(EOS)

        def encode(batch: dict[str, list[str]]) -> dict[str, Any]:
            found = bpe.encode_batch_fast(batch["text"], add_special_tokens=False)
            return {"tokens": [np.array([bos, *e.ids, eos], dtype=np.uint16) for e in found]}

    started = time.perf_counter()
    files = sorted(str(path) for path in Path(corpus).glob("*.jsonl"))
    data = load_dataset("json", data_files=files, split="train", cache_dir=out, num_proc=workers)
    features = Features({"tokens": Sequence(Value("uint16"))})
    tokens = data.map(
        encode, batched=True, batch_size=200, num_proc=workers, remove_columns=["text"], features=features
    )
    took = time.perf_counter() - started
    count = sum(len(column.values) for column in tokens.data.column("tokens").chunks)
    return {"seconds": took, "tokens": count}


RUNS = {"ours": run_ours, "theirs": run_theirs}


def cpu_seconds() -> float:
    """Of this process and those that it waited for, imports included."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


class Memory(threading.Thread):
    """The most PSS (shared pages counted once) that a process and its children had together."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.process, self.peak, self.done = psutil.Process(pid), 0, threading.Event()

    def run(self) -> None:
        while not self.done.wait(0.05):
            total = 0
            try:
                everybody = [self.process, *self.process.children(recursive=True)]
            except psutil.Error:
                return
            for process in everybody:
                try:
                    total += process.memory_full_info().pss
                except psutil.Error:
                    continue
            self.peak = max(self.peak, total)


def measure(who: str, corpus: Path, tokenizer: str, workers: int, scratch: Path) -> dict[str, Any]:
    """One run in a process of its own, whose output is removed afterwards."""
    out = scratch / "out"
    command = [sys.executable, __file__, "--run", who, str(corpus), tokenizer, str(out), str(workers)]
    environment = {
        **os.environ,
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) as process:
        memory = Memory(process.pid)
        memory.start()
        said, _ = process.communicate()
        memory.done.set()
        memory.join()
    shutil.rmtree(out, ignore_errors=True)
    if process.returncode:
        raise SystemExit(f"{who} failed with {process.returncode}")
    return {**json.loads(said.splitlines()[-1]), "peak_bytes": memory.peak}


def compare(
    corpus: Path, text_bytes: int, tokenizer: str, rounds: int, workers: int, scratch: Path
) -> dict[str, Any]:
    """Medians over the rounds, after checking that both made the same number of tokens."""
    found: dict[str, list[dict[str, Any]]] = {"ours": [], "theirs": []}
    for number in range(rounds):
        for who in ("ours", "theirs") if number % 2 == 0 else ("theirs", "ours"):
            found[who].append(measure(who, corpus, tokenizer, workers, scratch))
    tokens = {row["tokens"] for rows in found.values() for row in rows}
    if len(tokens) != 1:
        raise SystemExit(f"the two disagree on the number of tokens: {sorted(tokens)}")
    seconds = {who: statistics.median(row["seconds"] for row in rows) for who, rows in found.items()}
    result: dict[str, Any] = {
        "tokenizer": "byte" if tokenizer == "byte" else f"BPE, {VOCAB} tokens",
        "tokens": tokens.pop(),
        "ratio": seconds["theirs"] / seconds["ours"],
    }
    for who, rows in found.items():
        result[who] = {
            "mb_per_s": text_bytes / MEGA / seconds[who],
            "seconds": [row["seconds"] for row in rows],
            "cpu_seconds": statistics.median(row["cpu_seconds"] for row in rows),
            "peak_mib": max(row["peak_bytes"] for row in rows) / MIB,
        }
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=float, default=200, help="megabytes of text (default 200)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each (default 3)")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="processes of each")
    parser.add_argument("--tokenizers", default="byte,bpe", help="which of byte,bpe (default both)")
    parser.add_argument("--out", type=Path, help="write the figures to this JSON file")
    parser.add_argument("--run", nargs=5, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.run:
        who, text, tokenizer, out, workers = asked.run
        result = RUNS[who](text, tokenizer, out, int(workers))
        print(json.dumps({**result, "cpu_seconds": cpu_seconds()}))
        return 0
    results = []
    with tempfile.TemporaryDirectory(prefix="data_prepare-") as name:
        scratch = Path(name)
        corpus = scratch / "corpus"
        corpus.mkdir()
        text_bytes = make_corpus(corpus, asked.size * MEGA)
        bpe = scratch / "tokenizer.json"
        if "bpe" in asked.tokenizers:
            train_tokenizer(corpus, bpe)
        for kind in asked.tokenizers.split(","):
            tokenizer = "byte" if kind == "byte" else str(bpe)
            row = compare(corpus, text_bytes, tokenizer, asked.rounds, asked.workers, scratch)
            results.append(row)
            ours, theirs = row["ours"], row["theirs"]
            print(
                f"{row['tokenizer']}: ours {ours['mb_per_s']:.1f} MB/s, {ours['peak_mib']:.0f} MiB; "
                f"theirs {theirs['mb_per_s']:.1f} MB/s, {theirs['peak_mib']:.0f} MiB; ratio {row['ratio']:.2f} "
                f"(CPU-seconds {ours['cpu_seconds']:.1f} and {theirs['cpu_seconds']:.1f})",
                flush=True,
            )
    if asked.out:
        facts = {
            "machine": machine_facts(),
            "versions": versions(),
            "text_bytes": text_bytes,
            "workers": asked.workers,
        }
        asked.out.write_text(json.dumps({**facts, "results": results}, indent=1) + "\n", encoding="utf-8")
    return 0 if all(r["ratio"] >= 1 and r["ours"]["peak_mib"] * MIB < GIB for r in results) else 1


if __name__ == "__main__":
    sys.exit(main())
