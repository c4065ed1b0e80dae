"""What the tests of preparing share: sources, a small tokenizer, and preparing in this process."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from fivefold.data.manifest import Manifest
from fivefold.data.prepare import PrepareOptions, prepare

WORDS = ["alpha", "beta", "gamma", "delta", "été", "naïve", "日本", "\n", "  ", "def f(x):", "return x"]


def texts(count: int, seed: int = 0) -> list[str]:
    """Different documents of 1 to 40 words."""
    rng = np.random.default_rng(seed)
    return [f"{n} " + " ".join(rng.choice(WORDS, rng.integers(1, 40))) for n in range(count)]


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def run(
    sources: Path | str | list[Any], out: Path, *, workers: int = 1, restart: bool = False, **options: Any
) -> Manifest:
    """Prepare here (no other process unless asked for); no validation split unless asked for."""
    given = [str(s) for s in sources] if isinstance(sources, list) else [str(sources)]
    asked = PrepareOptions(**{"validation_frac": 0.0, **options})
    return prepare(given, out, asked, workers=workers, restart=restart)


def contents(folder: Path) -> dict[str, str]:
    """Name -> sha256 of every file, at any depth."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def make_tokenizer(folder: Path, *, chat: bool = False, vocab: int = 320) -> Path:
    """A byte-level BPE of the words above, with <s>, </s> and, for chat, the markers of ChatML."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>"] + (["<|im_start|>", "<|im_end|>"] if chat else [])
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(50), trainer)
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"
