"""Modules that are not ours under every strategy, against themselves on one device and a plain training loop."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fivefold
from fivefold.core.layout import Layout
from fivefold.core.optimizer import OptimizerConfig
from fivefold.errors import ConfigError, LaunchError, LayoutError, ModelError, WorkloadError
from fivefold.nn.own_stage import Arrival, PassOn
from fivefold.strategies.tensor import outside as tensor
from fivefold.verify.verify import Verdict

from .own_models import DENSE, example, make, without_casts

SEQ_LEN, BATCH, RATE = 16, 8, 0.01
OPTIMIZER = OptimizerConfig(clip_norm=0.5)

ZERO = [f"dp2 zero{level}" for level in range(4)]
SOME = [
    *ZERO, "dp4 zero2/2", "tp2", "tp2 nosp", "tp4", "cp2", "cp2:gather", "cp2:ulysses", "pp2", "pp4", "pp2*2",
    "pp2:zbh1", "pp2:zbv", "pp2:dualpipev", "pp2:gpipe@1+3", "dp2 tp2 pp2", "tp2 cp2", "tp2 cp2 nosp", "tp2 pp2:zbv",
    "dp2 pp2 zero3", "dp2 tp2 zero3", "dp2 cp2 zero1", "cp4:ring2xulysses2", "tp2 pp2 cp2", "tp2 pp2:zbh1 nosp",
]  # fmt: skip
"""Layouts of every strategy alone, with its options, and of several."""

EXPERTS = [
    *ZERO, "tp2", "cp2", "pp2", "dp2 ep2", "tp2 ep2", "cp2 ep2", "dp2 pp2 ep2", "dp2 tp2 ep4 zero2", "dp2 ep2 zero3",
    "dp2 tp2 pp2 ep2", "dp4 ep2 zero1", "dp2 pp2:zbv ep2", "dp2 tp2 cp2 ep2",
]  # fmt: skip

FAST = {"dp2 zero3"}


def layouts(fast: set[str]) -> list[Any]:
    return [text if text in fast else pytest.param(text, marks=pytest.mark.exhaustive) for text in SOME]


def passed(verdict: Verdict, bound: float) -> None:
    assert verdict.passed, verdict.cause
    assert verdict.bound == bound
    assert verdict.events_match


@pytest.mark.parametrize("text", layouts(FAST))
def test_llama_in_float32(text: str) -> None:
    passed(fivefold.verify_model(make("llama"), text, device="cpu"), 1e-5)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize("text", SOME)
def test_every_family_in_float64_with_its_casts_patched(name: str, text: str) -> None:
    with without_casts():
        passed(fivefold.verify_model(make(name), text, dtype="float64", device="cpu"), 1e-10)


@pytest.mark.parametrize(
    "text", ["tp2 ep2", *(pytest.param(t, marks=pytest.mark.exhaustive) for t in EXPERTS)]
)
def test_mixtral_in_float32(text: str) -> None:
    passed(fivefold.verify_model(make("mixtral"), text, device="cpu"), 1e-5)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["mixtral", "qwen3 moe"])
@pytest.mark.parametrize("text", EXPERTS)
def test_experts_in_float64_with_casts_patched(name: str, text: str) -> None:
    if name == "qwen3 moe" and "ep4" in text:
        pytest.skip("6 experts")
    model = make(name, experts_implementation="eager")  # its grouped products take no float64
    with without_casts():
        passed(fivefold.verify_model(model, text, dtype="float64", device="cpu"), 1e-10)


@pytest.mark.parametrize("text", layouts({"tp2 cp2"}))
def test_the_example_in_float64(text: str) -> None:
    own = example()
    passed(
        fivefold.verify_model(own.make_model(), text, roles=own.ROLES, dtype="float64", device="cpu"), 1e-10
    )


def batches(steps: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(53, (BATCH, SEQ_LEN), generator=generator) for _ in range(steps)]


def plain_losses(model: nn.Module, steps: int) -> list[float]:
    """A training loop of PyTorch alone."""
    vectors = [p for p in model.parameters() if p.ndim == 1]
    others = [p for p in model.parameters() if p.ndim > 1]
    groups = [
        {"params": others, "weight_decay": OPTIMIZER.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=RATE, betas=OPTIMIZER.betas, eps=OPTIMIZER.eps)
    losses = []
    for tokens in batches(steps):
        logits = model(input_ids=tokens).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        adamw.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.clip_norm or 1.0)
        adamw.step()
        losses.append(float(loss.detach()))
    return losses


def in_float64(name: str) -> nn.Module:
    """The grouped products of experts take no float64."""
    changes = {"experts_implementation": "eager"} if name == "mixtral" else {}
    return make(name, torch.float64, **changes)


def losses_on_rank(name: str, text: str, steps: int) -> tuple[list[float], list[bool]]:
    """The losses of a rank, and whether the objects of the model are those it had before."""
    model: Any = in_float64(name)
    before = dict(model.named_modules())
    parallel = fivefold.parallelize(
        model, text, seq_len=SEQ_LEN, global_batch=BATCH, micro_batch=2, optimizer=OPTIMIZER
    )
    losses = [parallel.step(tokens[parallel.rows], lr=RATE).loss for tokens in batches(steps)]
    after = dict(model.named_modules())
    kept = [*after, "model.embed_tokens", "model.layers.0.self_attn.q_proj"] if "pp" not in text else [*after]
    stand_ins = [name for name in kept if type(after[name]) in (PassOn, Arrival)]
    return losses, [after[name] is before[name] for name in kept if name not in stand_ins]


@pytest.mark.parametrize(
    ("name", "text"),
    [("llama", "dp1"), ("qwen3", "dp2 tp2 pp2")] + [
        pytest.param(name, text, marks=pytest.mark.exhaustive)
        for name, text in [*product(DENSE, SOME), ("mixtral", "tp2 ep2"), ("mixtral", "dp2 tp2 pp2 ep2")]
    ],
)  # fmt: skip
def test_losses_are_those_of_a_plain_loop_and_objects_survive(name: str, text: str) -> None:
    """Adam, clipping, the next token as label: nothing of it is from here."""
    ranks = Layout.parse(text).world_size
    with without_casts():
        seen = fivefold.run_ranks(lambda _: losses_on_rank(name, text, 4), ranks=ranks, device="cpu")
        want = plain_losses(in_float64(name), 4)
    for losses, objects in seen:
        assert losses == pytest.approx(want, rel=1e-10)
        assert all(objects)
    assert want[-1] < want[0] + 0.5


def weights_of(text: str, zero_steps: bool) -> dict[str, Tensor]:
    """The whole weights that every rank gets after a step with a learning rate of (almost) nothing."""
    model = make("mixtral")
    parallel = fivefold.parallelize(model, text, seq_len=SEQ_LEN, global_batch=BATCH)
    if not zero_steps:
        parallel.step(batches(1)[0][parallel.rows], lr=1e-50)
    return {name: value.clone() for name, value in parallel.weights()}


@pytest.mark.parametrize(
    "text",
    [
        "dp2 ep2 zero3",
        *(pytest.param(t, marks=pytest.mark.exhaustive) for t in ("dp2 tp2 pp2", "tp2 ep2 zero2")),
    ],
)
def test_whole_weights_are_those_that_were_given(text: str) -> None:
    ranks = Layout.parse(text).world_size
    want = dict(make("mixtral").named_parameters())
    for steps in (True, False):
        for got in fivefold.run_ranks(lambda _, s=steps: weights_of(text, s), ranks=ranks, device="cpu"):
            assert set(got) == set(want)
            assert all(torch.equal(got[name], want[name].detach()) for name in want)


@pytest.mark.exhaustive
def test_a_rank_whose_experts_nobody_chose() -> None:
    model: Any = make("mixtral")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.gate.weight.zero_()  # equal scores: the first two of four experts
    passed(fivefold.verify_model(model, "dp2 ep2", steps=1, device="cpu"), 1e-5)


@pytest.mark.exhaustive
def test_places_without_a_dim_for_sequences() -> None:
    own = example()

    class Numbering(own.TinyGPT):  # type: ignore[misc, name-defined]
        def forward(self, tokens: Tensor) -> Tensor:
            return super().forward(tokens, torch.arange(tokens.shape[1]))  # type: ignore[no-any-return]

    passed(fivefold.verify_model(Numbering(), "tp2", roles=own.ROLES, dtype="float64", device="cpu"), 1e-10)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("module", "name", "fault"),
    [
        (tensor, "broadcast_input", lambda x, axis: x),
        (tensor, "all_gather", lambda x, axis, dim: torch.cat([x] * axis.degree, dim)),
    ],
)
def test_a_planted_fault_is_found(
    module: Any, name: str, fault: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "tp2 nosp" if name == "broadcast_input" else "tp2"
    monkeypatch.setattr(module, name, fault)
    assert not fivefold.verify_model(make("llama"), text, steps=1, device="cpu").passed


def test_user_mistakes() -> None:
    with pytest.raises(LaunchError, match="this process is alone"):
        fivefold.parallelize(make("llama"), "dp2", seq_len=SEQ_LEN, global_batch=BATCH)
    with pytest.raises(LayoutError, match="heads = 4 is not divisible by 3"):
        fivefold.parallelize(make("llama"), "tp3", seq_len=SEQ_LEN, global_batch=BATCH)
    with pytest.raises(LayoutError, match="5 pipeline stages but LlamaForCausalLM has 4 layers"):
        fivefold.parallelize(make("llama"), "pp5", seq_len=SEQ_LEN, global_batch=BATCH)
    with pytest.raises(ModelError, match="no table of roles is known for TinyGPT"):
        fivefold.parallelize(example().make_model(), "dp2", seq_len=SEQ_LEN, global_batch=BATCH)
    with pytest.raises(ModelError, match=r"model.layers.0.self_attn has attention_dropout = 0.1"):
        fivefold.parallelize(make("llama", attention_dropout=0.1), "tp2", seq_len=SEQ_LEN, global_batch=BATCH)
    parallel = fivefold.parallelize(make("llama"), "dp1", seq_len=SEQ_LEN, global_batch=BATCH)
    tokens = torch.zeros(BATCH, SEQ_LEN, dtype=torch.int64)
    for given, said in (
        ((tokens[:, 1:],), r"tokens of shape \[8, 15\]: data rank 0 of dp1 takes \[8, 16\]"),
        ((tokens[0],), r"tokens of shape \[16\]"),
        ((tokens[None],), r"tokens of shape \[1, 8, 16\]"),
        ((tokens.float(),), "tokens are torch.float32; they are a tensor of torch.int64"),
        ((tokens.tolist(),), "tokens are a list"),
        ((tokens + 53,), "tokens have 53, which is no token; the vocabulary has 0 to 52"),
        ((tokens - 1,), "tokens have -1, which is no token"),
        ((tokens, tokens - 1), "labels have -1, which is no token; .* 0 to 52, or -100 where none counts"),
        ((tokens, tokens[:1]), r"labels of shape \[1, 16\]"),
        ((tokens, tokens.int()), "labels are torch.int32"),
    ):
        for call in (parallel.step, parallel.evaluate):
            with pytest.raises(WorkloadError, match=said):
                call(*given)
    for rate in (float("nan"), float("inf"), -1.0, "0.1"):
        with pytest.raises(ConfigError, match="a learning rate is a finite number of at least 0"):
            parallel.step(tokens, lr=rate)
    assert torch.isfinite(torch.tensor(parallel.step(tokens, tokens - 100, lr=0.1).loss))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"seq_len": 0}, "seq_len: expected a number above 0"),
        ({"seq_len": 1.5}, "seq_len: expected a whole number"),
        ({"global_batch": -1}, "global_batch: expected a number above 0"),
        ({"micro_batch": "auto"}, "micro_batch: expected a whole number"),
        ({"dtype": "fp8"}, "dtype: expected 'float32'"),
        ({"optimizer": "sgd"}, "optimizer: expected keys"),
        ({"recompute": True}, "recompute: expected text"),
    ],
)
def test_settings_that_do_not_hold(changes: dict[str, Any], said: str) -> None:
    settings = {"seq_len": SEQ_LEN, "global_batch": BATCH, **changes}
    with pytest.raises(ConfigError, match=f"^parallelize: {said}") as caught:
        fivefold.parallelize(make("llama"), "dp1", **settings)
    assert "\n" not in str(caught.value)


def test_grouped_products_in_float64_are_refused() -> None:
    with pytest.raises(
        ModelError, match=r"take no float64; make it with experts_implementation='eager', or use"
    ):
        fivefold.verify_model(make("mixtral"), "dp2 ep2", dtype="float64", device="cpu")


def test_a_parameter_that_nothing_reads() -> None:
    model = make("llama")
    model.model.layers[0].input_layernorm.spare = nn.Parameter(torch.ones(2))  # type: ignore[union-attr]
    parallel = fivefold.parallelize(model, "dp1", seq_len=SEQ_LEN, global_batch=BATCH)
    with pytest.raises(
        ModelError, match=r"layers.0.input_layernorm.spare has no gradient: nothing that the loss"
    ):
        parallel.step(batches(1)[0])
