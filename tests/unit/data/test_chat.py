from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from preparing import make_tokenizer, run, write_jsonl

from fivefold.data.chat import conversation, is_chat
from fivefold.data.prepared import PreparedDataset
from fivefold.errors import DataError

pytest.importorskip("tokenizers")

TALK = {
    "messages": [
        {"role": "system", "content": ""},
        {"role": "user", "content": "2 + 2?"},
        {"role": "assistant", "content": "4 <|im_end|> é"},
        {"role": "user", "content": "sure?"},
        {"role": "assistant", "content": "yes"},
    ]
}
PAIR = {"prompt": "2 + 2 =", "completion": " 4"}


def one(
    folder: Path, record: dict[str, Any], **options: Any
) -> tuple[list[int], list[bool], PreparedDataset]:
    """Tokens and mask of the only document of a file."""
    source = write_jsonl(folder / "a.jsonl", [record])
    run(source, folder / "out", **options)
    data = PreparedDataset(folder / "out", 4, 0)
    tokens, counts = data.document_tokens(0)
    return tokens.tolist(), counts.tolist(), data


def test_messages_as_bytes(tmp_path: Path) -> None:
    tokens, counts, _ = one(tmp_path, TALK)
    before = "<|im_start|>system\n<|im_end|>\n<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n"
    between = "\n<|im_start|>user\nsure?<|im_end|>\n<|im_start|>assistant\n"
    parts = [
        (before, False),
        ("4 <|im_end|> é<|im_end|>", True),
        (between, False),
        ("yes<|im_end|>", True),
        ("\n", False),
    ]
    body = [(byte, counts) for text, counts in parts for byte in text.encode()]
    assert tokens == [256, *[byte for byte, _ in body], 257]
    assert counts == [False, *[answer for _, answer in body], False]


def test_a_prompt_and_its_completion_as_bytes(tmp_path: Path) -> None:
    tokens, counts, _ = one(tmp_path, PAIR)
    assert tokens == [256, *b"2 + 2 =", *b" 4", 257]
    assert counts == [False] * 8 + [True] * 3  # eos is learned: the answer ends there


def test_markers_are_one_token_where_the_tokenizer_has_them(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    path = make_tokenizer(tmp_path / "t", chat=True)
    library = Tokenizer.from_file(str(path))
    tokens, counts, _ = one(tmp_path, TALK, tokenizer=str(path))
    start, end = (library.token_to_id(name) for name in ("<|im_start|>", "<|im_end|>"))
    assert tokens.count(start) == 5
    assert tokens.count(end) == 5  # the one that the answer spells is letters
    answers = [token for token, answer in zip(tokens, counts) if answer]
    library.encode_special_tokens = True
    pieces = [library.encode(text, add_special_tokens=False).ids for text in ("4 <|im_end|> é", "yes")]
    assert answers == [*pieces[0], end, *pieces[1], end]


def test_the_mask_reaches_the_batches(tmp_path: Path) -> None:
    """Over many records, cut into shards that do not fill bytes of bits: every label that counts, once an epoch."""
    rng = np.random.default_rng(0)
    records = [
        {"messages": [{"role": "user", "content": "q" * n}, {"role": "assistant", "content": "a" * m}]}
        for n, m in rng.integers(1, 30, (80, 2)).tolist()
    ]
    source = write_jsonl(tmp_path / "a.jsonl", records)
    manifest = run(source, tmp_path / "out", shard_mib=0.001, validation_frac=0.2)
    assert len(manifest.of("train")) > 3
    for split in ("train", "validation"):
        data = PreparedDataset(tmp_path / "out", 16, 0, split)
        batch = data.rows(np.arange(len(data)))
        labels = batch.labels_BS[batch.loss_mask_BS]
        assert len(labels) == manifest.loss_tokens(split)
        assert (labels == ord("a")).sum() + (labels != ord("a")).sum() == len(labels)
        assert ord("q") not in labels
        ends = len("<|im_end|>") * data.documents
        assert len(labels) - ends == sum(
            int((data.document_tokens(d)[0] == ord("a")).sum())
            - "<|im_start|>user\nassistant\n".count("a")
            - 1  # of <|im_start|>, a second time
            for d in range(data.documents)
        )


def test_auto_tells_chat_from_text(tmp_path: Path) -> None:
    for n, (record, chat) in enumerate(
        [(TALK, True), (PAIR, True), ({"text": "x"}, False), ({**TALK, "text": "x"}, False)]
    ):
        write_jsonl(tmp_path / f"{n}.jsonl", [record])
        assert run(tmp_path / f"{n}.jsonl", tmp_path / str(n)).chat == chat
    assert is_chat(TALK)
    assert not is_chat([TALK])


def test_the_same_talk_written_otherwise_falls_into_the_same_split() -> None:
    other = {
        "id": 7,
        "messages": [{"content": m["content"], "x": 1, "role": m["role"]} for m in TALK["messages"]],
    }
    assert conversation(TALK).digest() == conversation(other).digest()
    a, b = ({"prompt": p, "completion": c} for p, c in (("ab", "c"), ("a", "bc")))
    assert conversation(a).digest() != conversation(b).digest()


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"messages": []}, "no list of {role, content}"),
        ({"messages": {"role": "user"}}, "no list of {role, content}"),
        ({"messages": ["hello"]}, "has no role or no content"),
        ({"messages": [{"role": "user"}]}, "has no role or no content"),
        ({"messages": [{"role": "user", "content": "x"}]}, "no assistant message with text"),
        ({"messages": [{"role": "assistant", "content": ""}]}, "no assistant message with text"),
        ({"messages": [{"role": "a\nb", "content": "x"}]}, "is no role"),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "image"}]}]},
            "content is a list, not text",
        ),
        ({"prompt": "x", "completion": ""}, "completion is empty"),
        ({"prompt": 3, "completion": "x"}, "prompt is a int, not text"),
        ({"question": "x"}, "neither 'messages' nor 'prompt' and 'completion' .its keys: question."),
        ({"prompt": "\ud800", "completion": "x"}, "cannot be written as UTF-8"),
    ],
)
def test_records_without_an_answer_are_named(tmp_path: Path, record: dict[str, Any], message: str) -> None:
    source = tmp_path / "a.jsonl"
    import json

    source.write_text("\n".join(json.dumps(r) for r in (TALK, record, PAIR)))
    with pytest.raises(DataError, match=rf"a.jsonl:2: .*{message}") as caught:
        run(source, tmp_path / "out", format="chat")
    assert "\n" not in str(caught.value)
    manifest = run(source, tmp_path / "out", format="chat", on_error="skip")
    assert (manifest.documents("train"), manifest.skipped) == (2, 1)
    assert manifest.skipped_examples[0].startswith(f"{source}:2: ")


def test_chat_and_text_are_not_prepared_together(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [TALK])
    (tmp_path / "b.txt").write_text("text")
    with pytest.raises(
        DataError, match=r"a.jsonl is chat and .*b.txt is text: prepare them into two folders"
    ):
        run(tmp_path, tmp_path / "out")
