"""Fine-tune a real model, SmolLM2-135M, under several layouts, and hand the result back to transformers.

    python examples/finetune_smollm2.py MODEL [--work smollm2] [--layouts dp1,dp2,tp3,pp2] [--steps 3]

MODEL is a Hugging Face folder of SmolLM2-135M, or a GGUF file, which transformers turns into one (see README.md here).
What it does, each step with the command that a person would type:

    1  tokenise text with the model's own tokenizer                     fivefold data prepare
    2  let transformers say the loss on the first batch, and some words
    3  under each layout, one step with a learning rate of nothing      fivefold train weights=... export=...
         the loss must be that of transformers to 1e-5, and the exported model the one that was read, bit for bit
    4  under each layout, train                                         fivefold train ... optimizer.lr=1e-4
         transformers loads the export, finds a lower loss on the same batch, and says some words

Exit code 1 where one of these does not hold.
"""

from __future__ import annotations

import argparse
import gc
import json
import shlex
import subprocess
import sys
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from fivefold.data.open import open_data
from fivefold.records.machine import machine_facts, versions

SEQ_LEN, BATCH, SEED = 96, 4, 0
"""96: sequence parallelism over 3 ranks needs a multiple of 3."""
NOTHING = "1e-50"
"""A learning rate that float32 rounds to zero."""
BOUND = 1e-5
QUESTION = "What is gravity?"
TEXT = Path(__file__).resolve().parents[1] / "docs"


def main() -> int:
    options = arguments()
    work: Path = options.work
    work.mkdir(parents=True, exist_ok=True)
    source = hugging_face_folder(options.model, work / "hf")
    tokens = prepare(options.text, source, work / "tokens")
    before = look(source, tokens)
    print(f"transformers: loss {before['loss']:.6f}, says: {before['says']!r}")
    found = {}
    for layout in options.layouts.split(","):
        found[layout] = try_layout(layout, source, tokens, work, options.steps, before)
        print(json.dumps({layout: found[layout]}, indent=1))
    if options.save:
        facts = {
            "date": datetime.now(UTC).date().isoformat(),
            "machine": machine_facts(),
            "versions": {**versions(), "transformers": version("transformers")},
        }
        run = {
            "seq_len": SEQ_LEN,
            "global_batch": BATCH,
            "dtype": "float32",
            "steps": options.steps,
            "bound": BOUND,
        }
        options.save.write_text(
            json.dumps({**facts, **run, "transformers": before, "layouts": found}, indent=1) + "\n"
        )
    failed = [layout for layout, figures in found.items() if not figures["passed"]]
    print(f"failed: {', '.join(failed)}" if failed else "every layout passed")
    return 1 if failed else 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Fine-tune SmolLM2-135M and hand it back to transformers.")
    parser.add_argument("model", type=Path, help="Hugging Face folder, or GGUF file")
    parser.add_argument(
        "--work", type=Path, default=Path("smollm2"), help="folder for everything that is written"
    )
    parser.add_argument("--text", default=str(TEXT), help="text to train on: file, folder or glob")
    parser.add_argument("--layouts", default="dp1,dp2,tp3,pp2")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--save", type=Path, help="file for all figures, as JSON")
    return parser.parse_args()


def hugging_face_folder(model: Path, target: Path) -> Path:
    """The folder itself, or one that is made of a GGUF file: its quantised weights become float32."""
    if model.is_dir():
        return model
    if not (target / "config.json").exists():
        where: dict[str, Any] = {"pretrained_model_name_or_path": str(model.parent), "gguf_file": model.name}
        quantised = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
        fields = {k: v for k, v in quantised.config.to_dict().items() if k != "quantization_config"}
        plain = LlamaForCausalLM(LlamaConfig(**fields)).float()
        plain.load_state_dict(quantised.state_dict())
        AutoTokenizer.from_pretrained(**where).save_pretrained(target)
        plain.save_pretrained(target)
    return target


def fivefold(*words: object) -> str:
    """Run a command of ours; its output. Ends this program where it fails."""
    command = ["fivefold", *map(str, words)]
    print("$", shlex.join(command), flush=True)
    ended = subprocess.run([sys.executable, "-m", *command], stdout=subprocess.PIPE, text=True, check=False)
    if ended.returncode:
        sys.exit(ended.returncode)
    return ended.stdout


def prepare(text: str, source: Path, tokens: Path) -> Path:
    if not (tokens / "manifest.json").exists():
        fivefold("data", "prepare", text, "--tokenizer", source, "--out", tokens, "--validation-frac", 0)
    return tokens


def look(folder: Path, tokens: Path) -> dict[str, Any]:
    """What transformers makes of a folder: the loss on the first batch of the run, and an answer."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    batch = open_data(str(tokens), SEQ_LEN, SEED).global_batch(0, BATCH)
    labels_BS = torch.from_numpy(np.where(batch.loss_mask_BS, batch.labels_BS, -100))
    with torch.no_grad():
        logits_BSV = model(torch.from_numpy(batch.tokens_BS)).logits
        loss = torch.nn.functional.cross_entropy(
            logits_BSV.flatten(0, 1), labels_BS.flatten(), ignore_index=-100
        )
        question = tokenizer.apply_chat_template(
            [{"role": "user", "content": QUESTION}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
        answer = model.generate(**question, max_new_tokens=24, do_sample=False)
    says = tokenizer.decode(answer[0, question["input_ids"].shape[1] :], skip_special_tokens=True)
    del model, logits_BSV
    gc.collect()  # ranks need the memory
    return {"loss": float(loss), "says": says}


def try_layout(
    layout: str, source: Path, tokens: Path, work: Path, steps: int, before: dict[str, Any]
) -> dict[str, Any]:
    """One step that changes nothing, then training; each exported and read by transformers."""
    kept, trained = (work / f"{layout}-{name}" for name in ("kept", "trained"))
    common = [
        f"model={source}", f"weights={source}", f"data={tokens}", f"layout={layout}", f"seq_len={SEQ_LEN}",
        f"global_batch={BATCH}", f"seed={SEED}", "optimizer.warmup_steps=0", "log.records=null", "--json",
    ]  # fmt: skip
    first = json.loads(fivefold("train", *common, "steps=1", f"optimizer.lr={NOTHING}", f"export={kept}"))
    same = look(kept, tokens)
    start = time.monotonic()
    last = json.loads(fivefold("train", *common, f"steps={steps}", "optimizer.lr=1e-4", f"export={trained}"))
    seconds = time.monotonic() - start
    after = look(trained, tokens)
    figures = {
        "first_loss": first["first_loss"],
        "difference": abs(first["first_loss"] - before["loss"]),
        "weights_bit_for_bit": bit_for_bit(source, kept),
        "same_words": same["says"] == before["says"],
        "last_loss": last["last_loss"],
        "seconds": round(seconds, 1),
        "tokens_per_s": round(last["tokens_per_s"], 1),
        "peak_memory_bytes": last["peak_memory_bytes"],
        "loss_after": after["loss"],
        "says_after": after["says"],
    }
    passed = (
        figures["difference"] <= BOUND
        and figures["weights_bit_for_bit"]
        and figures["same_words"]
        and last["first_loss"] == first["first_loss"]
        and after["loss"] < before["loss"]
    )
    return {"passed": passed, **figures}


def bit_for_bit(a: Path, b: Path) -> bool:
    """Whether two folders hold the same tensors, in whatever files."""
    one, other = (
        {k: v for f in folder.glob("*.safetensors") for k, v in load_file(f).items()} for folder in (a, b)
    )
    return one.keys() == other.keys() and all(
        torch.equal(value.view(torch.uint8), other[name].view(torch.uint8)) for name, value in one.items()
    )


if __name__ == "__main__":
    sys.exit(main())
