"""From a checkpoint to a Hugging Face folder, with and without ranks; and what a death in between leaves."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fivefold.core.cluster import Cluster
from fivefold.core.model_spec import AttentionSpec, BlockSpec, MLPSpec, ModelSpec
from fivefold.core.plan import Plan
from fivefold.core.workload import Workload
from fivefold.nn.hub import HFCheckpoint
from fivefold.nn.hub_write import HFWriter
from fivefold.runtime.mesh import Mesh
from fivefold.train.checkpoint import MANIFEST, Manifest, Piece, write_pieces
from fivefold.train.export import export_checkpoint

from .command_line import CommandLine, Ended
from .test_data_prepare import make_bpe

SAVING = ("checkpoint.folder=saves", "log.records=null", "log.metrics=null", "steps=3")
LAST = "saves/step-00000003"


def contents(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def prepared(fivefold: CommandLine) -> str:
    """Text in the tokens of a small BPE, which is beside it."""
    text = (fivefold.folder / "corpus" / "text.py").read_text()
    lines = [json.dumps({"text": text[at : at + 2000]}) for at in range(0, len(text), 2000)]
    (fivefold.folder / "a.jsonl").write_text("\n".join(lines))
    make_bpe(fivefold.folder)
    options = ("--out", "tokens", "--tokenizer", "tokenizer.json", "--validation-frac", "0", "--workers", "1")
    ended = fivefold("data", "prepare", "a.jsonl", *options)
    assert ended.code == 0, ended.err
    return "data=tokens"


@pytest.mark.parametrize(
    ("layout", "tied", "dtype"),
    [("tp3 pp2", True, "bfloat16"), ("dp2 zero1", False, "float32"), ("pp2", True, "float64")],
)
def test_the_folder_of_a_checkpoint_is_that_of_the_run(
    fivefold: CommandLine, layout: str, tied: bool, dtype: str
) -> None:
    """Bit for bit, index, config and tokenizer included; transformers loads it."""
    options = (
        "model=" + fivefold.model(vocab_size=1003, tie_word_embeddings=tied, hidden_size=48, num_attention_heads=6,
                                  num_key_value_heads=3),
        prepared(fivefold), f"layout={layout}", f"dtype={dtype}", "seq_len=24", "export=whole",
    )  # fmt: skip
    ended = fivefold("train", "train.yaml", *options, *SAVING, "--json")
    assert ended.code == 0, ended.err
    assert ended.json()["exported"] == "whole"
    ended = fivefold("model", "export", LAST, "again", "--json")
    assert ended.code == 0, ended.err
    assert contents(fivefold.folder / "again") == contents(fivefold.folder / "whole")
    assert {"config.json", "tokenizer.json", "tokenizer_config.json", *ended.json()["files"]} <= set(
        contents(fivefold.folder / "again")
    )
    assert "exists and is not an empty folder" in fivefold("model", "export", LAST, "again").said()
    loads_in_transformers(fivefold.folder / "again", fivefold.folder / "tokenizer.json")


def loads_in_transformers(folder: Path, tokenizer: Path) -> None:
    from tokenizers import Tokenizer
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(str(folder))
    text = "def parse(self, text=None):\n    return  [1, 2]"
    assert (
        loaded(text, add_special_tokens=False)["input_ids"]
        == Tokenizer.from_file(str(tokenizer)).encode(text).ids
    )
    assert loaded.eos_token == "</s>"
    model = AutoModelForCausalLM.from_pretrained(str(folder))
    assert model.config.eos_token_id == loaded.eos_token_id == loaded.convert_tokens_to_ids("</s>")
    written = model.generate(**loaded(text, return_tensors="pt"), max_new_tokens=3, do_sample=False)
    assert isinstance(loaded.decode(written[0]), str)


def test_mistakes_are_one_line(fivefold: CommandLine) -> None:
    assert fivefold("train", "train.yaml", *SAVING, "--json").code == 0
    assert (
        "saves is no checkpoint: it has no manifest.json"
        in fivefold("model", "export", "saves", "out").said()
    )
    path = fivefold.folder / LAST
    file = path / "rank-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
    assert "rank-00000.safetensors is damaged" in fivefold("model", "export", LAST, "out").said()
    data[-3] ^= 1
    file.write_bytes(data)
    config = (path / "model" / "config.json").read_bytes()
    (path / "model" / "config.json").write_bytes(config.replace(b"256", b"255"))
    assert "model/config.json is damaged" in fivefold("model", "export", LAST, "out").said()
    (path / "model" / "config.json").unlink()
    assert "model/config.json is missing" in fivefold("model", "export", LAST, "out").said()
    (path / "model" / "config.json").write_bytes(config)
    assert fivefold("model", "export", LAST, "out").code == 0
    assert sorted(p.name for p in fivefold.folder.glob("*out*")) == ["out"]


def test_a_complete_run_without_its_export_is_only_exported(fivefold: CommandLine) -> None:
    """As after a death between the last save and the end of the export; under any layout, and not twice."""
    assert fivefold("train", "train.yaml", "layout=tp2", *SAVING).code == 0
    before = contents(fivefold.folder / LAST / "model")
    resumed = ("train", "train.yaml", *SAVING, "export=out", "--resume", "auto")
    assert "seed was 0, is 1 now" in fivefold(*resumed, "seed=1").said()
    assert not list(fivefold.folder.glob("*out*"))
    ended = fivefold(*resumed, "--json")
    assert ended.code == 0, ended.err
    told = ended.json()
    assert (told["steps"], told["resumed_at"], told["exported"], told["last_loss"]) == (0, 3, "out", None)
    assert fivefold("model", "export", LAST, "same").code == 0
    assert contents(fivefold.folder / "out") == contents(fivefold.folder / "same")
    assert contents(fivefold.folder / LAST / "model") == before
    assert "is at step 3 of 3: nothing is left to do" in fivefold(*resumed).said()
    assert "export: out exists" in fivefold(*resumed, "steps=4").said()
    in_words = fivefold("train", "train.yaml", *SAVING, "export=other", "--resume", "auto")
    assert in_words.out == "no step was left to take after step 3; the model is in other\n"


def dying(when: str) -> Callable[[], None]:
    """Rank 1 is killed when it should write its files; rank 0 has not begun with its own, or has some."""

    def patch() -> None:
        from fivefold.train import export

        write = export._write_own

        def killed(writer: HFWriter, pairs: Any, mesh: Mesh) -> str | None:
            if mesh.rank == 0 and when == "late":
                return write(writer, pairs, mesh)
            if mesh.rank == 1:
                wait_for(writer.temporary / "model-00001-of-00002.safetensors", when)
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)
            return None

        export._write_own = killed

    return patch


def wait_for(path: Path, when: str) -> None:
    deadline = time.monotonic() + 30
    while when == "late" and not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize("when", ["early", "late"])
def test_a_rank_that_dies_during_the_export(fivefold: CommandLine, when: str) -> None:
    """With a restart, the export is made from the checkpoint and the outcome told; without, nothing looks complete."""
    train = ("train", "train.yaml", "layout=pp2", *SAVING[:1], *SAVING[2:], "export=hf", "--json")
    ended: Ended = fivefold.start(*train, "--restarts", "1", before=dying(when)).ended()
    assert ended.code == 0, ended.err
    told = json.loads(ended.out)
    assert (told["steps"], told["resumed_at"], told["skipped"], told["checkpoints"]) == (3, 0, 0, [3])
    assert 0 < told["last_loss"] < told["first_loss"]
    assert told["peak_memory_bytes"] is None
    assert "is the last step, no other is left to take" in ended.err
    assert HFCheckpoint.open(fivefold.folder / "hf").spec.layers == 2
    assert not list(fivefold.folder.glob("*.partial"))

    again = ("train", "train.yaml", "layout=pp2", *SAVING[1:], "checkpoint.folder=more", "export=new")
    ended = fivefold.start(*again, before=dying(when)).ended()
    assert ended.code == 1
    assert not (fivefold.folder / "new").exists()
    assert fivefold(*again, "--resume", "auto").code == 0
    assert contents(fivefold.folder / "new") == contents(fivefold.folder / "hf")


def test_memory_is_one_parameter(on_mesh: Callable[..., Any], tmp_path: Path) -> None:
    """Most resident memory while 3 times the largest parameter goes by."""
    block = BlockSpec(attention=AttentionSpec(heads=8, kv_heads=8, head_dim=64), mlp=MLPSpec(ffn=2048))
    spec = ModelSpec(name="wide", hidden=512, vocab=20001, blocks=(block,) * 4)
    largest = 20001 * 512 * 4

    def grown(mesh: Mesh) -> int:
        save(spec, mesh, tmp_path / "step-00000001")
        Path("/proc/self/clear_refs").write_text("5")
        before = resident_peak()
        export_checkpoint(tmp_path / "step-00000001", tmp_path / "out")
        return resident_peak() - before

    (most,) = on_mesh(grown, "dp1")
    assert sum(path.stat().st_size for path in (tmp_path / "out").iterdir()) > 3 * largest
    assert most <= 1.1 * largest + 4 * 2**20


def save(spec: ModelSpec, mesh: Mesh, folder: Path) -> None:
    """A checkpoint of weights alone, each parameter cut into two pieces."""
    from fivefold.core.sharding import parameters

    plan = Plan(
        model=spec,
        cluster=Cluster.parse("cpu"),
        workload=Workload(seq_len=8, global_batch=1),
        layout=mesh.layout,
    )
    folder.mkdir()
    pieces = []
    for row in parameters(spec):
        for half in (slice(0, row.shape[0] // 2), slice(row.shape[0] // 2, row.shape[0])):
            region = (half, *(slice(0, size) for size in row.shape[1:]))
            values = torch.zeros([cut.stop - cut.start for cut in region])
            pieces.append(Piece(f"weights/{row.name}", row.shape, region, values))
    tensors, files = write_pieces(folder, 0, pieces)
    manifest = Manifest(
        step=1, next_sample=1, updates=1, seed=0, data="d", plan=plan.model_dump(mode="json"),
        tensors=tensors, files=files,
    )  # fmt: skip
    (folder / MANIFEST).write_text(manifest.to_json())


def resident_peak() -> int:
    """As the kernel counts it, since the last reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024
