"""What a model is made of: ordered blocks with their sizes. Torch-free; `model_config` reads `config.json`.

Shape letters: D hidden, F ffn, N heads, H head_dim, V vocab, E experts, K top_k.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from fivefold.core.value import Value
from fivefold.errors import ModelError, nearest_numbers

MOST_LAYERS = 10_000
MOST_VOCAB = 10_000_000
MOST_WIDTH = 10_000_000
"""No layer of a language model is wider; a larger number is a damaged config."""

Width = Annotated[int, Field(gt=0, le=MOST_WIDTH)]


class Llama3Scaling(Value):
    """Llama-3 scaling of rotary frequencies (Llama 3.1 model card; transformers `rope_type: llama3`)."""

    kind: Literal["llama3"] = "llama3"
    factor: float = Field(gt=0)
    low_freq_factor: float = Field(gt=0)
    high_freq_factor: float = Field(gt=0)
    original_max_positions: int = Field(gt=0)


class YarnScaling(Value):
    """YaRN scaling of rotary frequencies and of attention (Peng et al. 2023, arXiv:2309.00071, section 3)."""

    kind: Literal["yarn"] = "yarn"
    factor: float = Field(gt=0)
    original_max_positions: int = Field(gt=0)
    attention_factor: float | None = Field(default=None, gt=0)
    """What cosines and sines are multiplied by. None: `amplitude` works it out."""
    beta_fast: float = Field(default=32.0, gt=0)
    """Dims that turn more often than this within the original positions keep their frequency."""
    beta_slow: float = Field(default=1.0, gt=0)
    """Dims that turn less often than this have their frequency divided by `factor`."""
    mscale: float | None = Field(default=None, ge=0)
    mscale_all_dim: float | None = Field(default=None, ge=0)
    """Latent attention scales its softmax by it as well: `softmax_factor`."""
    truncate: bool = True
    """Whether the dims between which frequencies are blended are rounded outwards to whole ones."""

    @model_validator(mode="after")
    def _fast_is_fast(self) -> YarnScaling:
        if self.beta_fast < self.beta_slow:
            raise ValueError(
                f"YaRN's beta_fast {self.beta_fast} is below beta_slow {self.beta_slow}; the paper has 32 and 1"
            )
        return self

    @property
    def amplitude(self) -> float:
        """What cosines and sines are multiplied by: the square root of the paper's 1/t.

        Formula: 0.1 ln(factor) + 1; with both mscales m and a (DeepSeek): (0.1 m ln s + 1) / (0.1 a ln s + 1).
        Source:  Peng et al. 2023, equations 21 and 22; DeepSeek-V2, arXiv:2405.04434, section 3.1.4.
        """
        if self.attention_factor is not None:
            return self.attention_factor
        growth = 0.1 * math.log(max(1.0, self.factor))
        if self.mscale and self.mscale_all_dim:
            return (self.mscale * growth + 1) / (self.mscale_all_dim * growth + 1)
        return growth + 1

    @property
    def softmax_factor(self) -> float:
        """What latent attention multiplies its softmax scale by: (0.1 a ln(factor) + 1)^2, a = `mscale_all_dim`.

        Source: the authors' code of DeepSeek-V2 and V3 (`softmax_scale`), and transformers (`yarn_apply_mscale`).
        """
        return (0.1 * (self.mscale_all_dim or 0.0) * math.log(max(1.0, self.factor)) + 1) ** 2


RopeScaling = Annotated[Llama3Scaling | YarnScaling, Field(discriminator="kind")]


class AttentionSpec(Value):
    """Grouped-query attention: `heads` query heads of `head_dim` share `kv_heads` key/value heads."""

    kind: Literal["gqa"] = "gqa"
    heads: Width
    kv_heads: Width
    head_dim: Width
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    """RMS norm with weights on queries and keys before the rotation."""
    qk_norm_over: Literal["head", "all_heads"] = "head"
    """`head`: one weight [H] shared by all heads (Qwen3). `all_heads`: weights [N*H] and [kv*H] (OLMo 2)."""
    window: int | None = Field(default=None, gt=0)
    """Sliding window: a token sees itself and the `window - 1` tokens before it. None: all before it."""
    chunk: int | None = Field(default=None, gt=0)
    """Chunked attention (Llama 4): a token sees those before it in its own chunk. None: no chunks."""
    rope_dim: int | None = Field(default=None, ge=0)
    """How many dims of a head are rotated. None: all of them; 0: this layer has no rotation."""
    output_gate: bool = False
    """The query projection also makes a gate [N*H] that multiplies the output (Qwen3-Next)."""
    sinks: bool = False
    """One learned logit per head takes part in the softmax (gpt-oss)."""

    @model_validator(mode="after")
    def _heads_share_evenly(self) -> AttentionSpec:
        if self.heads % self.kv_heads:
            legal = nearest_numbers(
                self.kv_heads, [n for n in range(1, self.heads + 1) if self.heads % n == 0]
            )
            raise ValueError(
                f"{self.heads} attention heads cannot share {self.kv_heads} key/value heads evenly: "
                f"{self.heads} % {self.kv_heads} != 0; nearest legal number of key/value heads: {legal}"
            )
        if self.rope_dim is not None and (self.rope_dim > self.head_dim or self.rope_dim % 2):
            raise ValueError(
                f"cannot rotate {self.rope_dim} of {self.head_dim} dims of a head: even and at most all"
            )
        return self


class MLASpec(Value):
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1): K and V from one latent."""

    kind: Literal["mla"] = "mla"
    heads: Width
    q_rank: Width | None = None
    """Rank of the compressed query. None: queries are projected directly (DeepSeek-V2-Lite)."""
    kv_rank: Width
    nope_dim: Width
    rope_dim: Width
    value_dim: Width
    bias: bool = False
    """Bias on the down projections of queries and of keys/values, and on the output projection."""
    rope_interleaved: bool = True
    """Whether dims 2i and 2i+1 rotate together, as the weights are stored; else i and i + half."""

    @property
    def key_dim(self) -> int:
        """Size of a query or key head: a part without position, then a rotated one."""
        return self.nope_dim + self.rope_dim


class GatedDeltaSpec(Value):
    """Linear attention by the gated delta rule (arXiv:2412.06464), as in Qwen3-Next: no KV cache."""

    kind: Literal["gated_delta"] = "gated_delta"
    key_heads: Width
    value_heads: Width
    key_dim: Width
    value_dim: Width
    conv_kernel: Width


class MLPSpec(Value):
    """A dense feed-forward block; `gated` has gate, up and down projections, otherwise up and down."""

    kind: Literal["dense"] = "dense"
    ffn: Width
    gated: bool = True
    activation: str = "silu"
    bias: bool = False


class MoESpec(Value):
    """A routed feed-forward block: each token meets `top_k` of `experts`, and all shared experts.

    A router scores every expert (`scoring`), chooses by score plus selection bias (within the best groups), and weighs
    the chosen by their scores alone. Coefficients of its losses belong to training: `core/router.py`.
    """

    kind: Literal["moe"] = "moe"
    experts: Width
    top_k: Width
    ffn: Width
    """Width of one routed expert."""
    shared_ffn: int = Field(default=0, ge=0, le=MOST_WIDTH)
    """Width of all shared experts together; 0: none."""
    shared_gate: bool = False
    """A learned gate [D] scales the shared experts' output (Qwen-MoE)."""
    gated: bool = True
    activation: str = "silu"
    bias: bool = False
    """Biases in the routed experts (gpt-oss)."""
    router_bias: bool = False
    """A trained bias [E] on the router's logits."""
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    """How logits become scores: over all experts (Mixtral, Qwen), or each by itself (DeepSeek-V3)."""
    groups: int = Field(default=1, gt=0)
    """Experts are in so many groups of neighbours; a token chooses within the best `topk_groups` of them."""
    topk_groups: int = Field(default=1, gt=0)
    group_score: Literal["best", "best_two"] = "best"
    """What a group is judged by: its best score (DeepSeek-V2), or the sum of its two best (DeepSeek-V3)."""
    norm_topk_prob: bool = True
    """Whether the weights of the chosen experts are divided by their sum."""
    routed_scaling: float = Field(default=1.0, gt=0)
    """What the weights are multiplied by at last."""
    selection_bias: bool = False
    """A bias [E] that only the choice sees: a buffer without gradient, moved to balance the load (DeepSeek-V3)."""

    @model_validator(mode="after")
    def _enough_experts(self) -> MoESpec:
        if self.top_k > self.experts:
            raise ValueError(
                f"top_k {self.top_k} is more than the {self.experts} experts; at most {self.experts}"
            )
        if self.experts % self.groups:
            legal = nearest_numbers(
                self.groups, [n for n in range(1, self.experts + 1) if self.experts % n == 0]
            )
            raise ValueError(
                f"{self.experts} experts are not {self.groups} groups of one size; nearest legal number: {legal}"
            )
        size = self.experts // self.groups
        if self.topk_groups > self.groups or self.top_k > self.topk_groups * size:
            raise ValueError(
                f"top_k {self.top_k} in {self.topk_groups} of {self.groups} groups of {size} experts: groups to choose "
                f"from must be {-(-self.top_k // size)} to {self.groups}"
            )
        if self.groups > 1 and self.group_score == "best_two" and size < 2:
            raise ValueError(f"groups of {size} expert have no two best; at most {self.experts // 2} groups")
        return self


Attention = Annotated[AttentionSpec | MLASpec | GatedDeltaSpec, Field(discriminator="kind")]
FeedForward = Annotated[MLPSpec | MoESpec, Field(discriminator="kind")]


class BlockSpec(Value):
    """One decoder layer."""

    attention: Attention
    mlp: FeedForward
    norms: Literal["pre", "post", "sandwich", "shared"] = "pre"
    """Where norms stand: before attention and MLP; after them; both; or one before both (Phi)."""


class ModelSpec(Value):
    """A decoder-only language model as ordered blocks."""

    name: str
    family: str = "llama"
    hidden: Width
    vocab: int = Field(gt=0, le=MOST_VOCAB)
    blocks: tuple[BlockSpec, ...] = Field(min_length=1, max_length=MOST_LAYERS)
    tied_embeddings: bool = False
    norm: Literal["rms", "layer"] = "rms"
    norm_eps: float = Field(default=1e-5, gt=0)
    rope_theta: float = Field(default=10000.0, gt=0)
    rope_scaling: RopeScaling | None = None
    max_positions: int = Field(default=4096, gt=0)
    position_table: int = Field(default=0, ge=0)
    """Rows of a table of learned positions (GPT-2); 0: positions are rotary."""
    head_bias: bool = False
    features: tuple[str, ...] = ()
    """What the computation has beyond the fields above (soft-capped logits, ...), in words; no parameters."""
    notes: tuple[str, ...] = ()
    """What was left out or concluded when a config was read: multi-token prediction, a vision tower, ..."""

    @property
    def layers(self) -> int:
        return len(self.blocks)

    @cached_property
    def kinds_of_blocks(self) -> tuple[BlockSpec, ...]:
        """Every block that differs from the ones before it: what is legal for these is legal for all layers."""
        return tuple(dict.fromkeys(self.blocks))

    @classmethod
    def from_config(cls, source: Mapping[str, Any] | str | Path, *, name: str | None = None) -> ModelSpec:
        """Read a Hugging Face `config.json`: a mapping, a file, or a folder that holds one.

        Raises: ModelError naming the field or model type that is missing, damaged or not supported.
        """
        from fivefold.core import model_config  # the reader builds ModelSpec, so it cannot be imported above

        return model_config.read(source, name=name)


RUNS = (
    "those of Llama 2/3, Mistral, Mixtral, Qwen2/3 (experts too), Phi-3 or DeepSeek-V2/V3 with RMS norms and rotary "
    "positions"
)
"""What the decoder computes, in words for whoever brought another model."""


def plain_parts(block: BlockSpec) -> tuple[AttentionSpec, MLPSpec]:
    """The parts of a block with grouped-query attention and a dense MLP, for code that was told that it is one."""
    assert isinstance(block.attention, AttentionSpec)
    assert isinstance(block.mlp, MLPSpec)
    return block.attention, block.mlp


def require_plain_decoder(spec: ModelSpec) -> None:
    """Raises: ModelError naming what this model has that the decoder does not compute yet."""
    beyond = beyond_plain_decoder(spec)
    if beyond:
        raise ModelError(
            f"{spec.name} cannot be run yet: it has {', '.join(beyond)}. Models that run: {RUNS}, such as tiny-llama; "
            f"`fivefold model show` can still size this one"
        )


def beyond_plain_decoder(spec: ModelSpec) -> tuple[str, ...]:
    """What `spec` has and the decoder lacks.

    It has: GQA, biases, QK-norm per head, window; latent attention; RMS pre-norms, RoPE; dense MLPs and mixtures of
    gated experts.
    Empty means that it computes exactly this model. A runtime refuses a spec that lists anything.
    """
    found: dict[str, None] = dict.fromkeys(spec.features)
    if spec.norm != "rms":
        found["layer norm"] = None
    if spec.position_table:
        found["learned positions"] = None
    if spec.head_bias:
        found["bias on the head"] = None
    for block in spec.kinds_of_blocks:
        found.update(dict.fromkeys(_beyond_plain_block(block)))
    return tuple(found)


def _beyond_plain_block(block: BlockSpec) -> list[str]:
    attention, mlp = block.attention, block.mlp
    if isinstance(attention, AttentionSpec):
        listed = [
            (attention.qk_norm and attention.qk_norm_over != "head", "query/key norm over all heads"),
            (attention.chunk, "chunked attention"),
            (attention.rope_dim == 0, "layers without rotary positions"),
            (attention.rope_dim, "rotation of a part of the head"),
            (attention.output_gate, "gated attention output"),
            (attention.sinks, "attention sinks"),
        ]
    elif isinstance(attention, MLASpec):
        listed = [(attention.value_dim > attention.key_dim, "values wider than keys")]
    else:
        listed = [(True, "linear attention")]
    if isinstance(mlp, MoESpec):
        listed += [(mlp.bias, "biases in experts"), (not mlp.gated, "experts without a gate")]
    listed += [(block.norms != "pre", f"norms placed {block.norms!r}")]
    return [text for present, text in listed if present]
