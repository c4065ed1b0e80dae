"""Reads a Hugging Face `config.json` into a `ModelSpec`: checks every field and refuses what it cannot count.

Every field that a family reads is marked; a field that nobody read and that may change the parameters is an
error. The families themselves are in `families/`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fivefold.core.model_spec import (
    MOST_LAYERS,
    MOST_VOCAB,
    MOST_WIDTH,
    BlockSpec,
    Llama3Scaling,
    ModelSpec,
    YarnScaling,
)
from fivefold.core.regular_file import read_text
from fivefold.core.value import describe
from fivefold.errors import ModelError, nearest
from fivefold.units import MIB

MOST_BYTES = 4 * MIB
MOST_POSITIONS = 10**9

HARMLESS = frozenset(
    {
        "_attn_implementation", "_name_or_path", "add_cross_attention", "architectures",
        "attention_dropout", "attention_probs_dropout_prob", "attention_sink_size",
        "attention_softmax_in_fp32", "attn_implementation", "attn_pdrop", "auto_map", "aux_loss_alpha",
        "begin_suppress_tokens", "bos_token_id", "cache_implementation", "chunk_size_feed_forward",
        "classifier_dropout", "context_window_size", "decoder_start_token_id", "dtype", "embd_pdrop",
        "embedding_dropout", "eos_token_id", "ep_size", "finetuning_task", "flash_attn", "flash_rotary",
        "fused_dense", "hidden_dropout", "hidden_dropout_prob", "id2label", "img_processor",
        "initial_context_length", "initializer_range", "is_decoder", "is_encoder_decoder", "label2id",
        "layer_norm_eps", "layer_norm_epsilon", "mamba_ssm_dtype", "max_batch_size", "model_type",
        "n_special", "norm_epsilon", "num_labels", "output_attentions", "output_hidden_states",
        "output_router_logits", "pad_token_id", "prefill_chunk_size", "pretraining_tp",
        "quantization_config", "reorder_and_upcast_attn", "resid_pdrop", "residual_dropout",
        "return_dict", "rms_norm_eps", "router_aux_loss_coef", "router_jitter_noise",
        "router_z_loss_coef", "runner_max_sequence_length", "scale_attention_softmax_in_fp32",
        "sep_token_id", "seq_aux", "task_specific_params", "tensor_parallel_shards",
        "tensor_parallel_size", "tokenizer_class", "torch_dtype", "transformers_version",
        "unsloth_version", "use_cache",
    }
)  # fmt: skip
"""Fields that change neither parameters nor FLOPs in any family: dropout, dtypes, serving limits, ..."""

SUSPICIOUS = re.compile(
    "size|dim|rank|num|^n_|layer|head|expert|bias|norm|tie|ffn|ff_|hidden|intermediate|mlp|width|depth|inner|block|vocab"
    "|adapter|lora|embed|gate|memory|conv|state|mtp|nextn|kernel|attn|attention|position|share|router|moe|window|proj"
)

_REQUIRED: Any = object()


class Fields:
    """The fields of one config: typed, bounded, and marked when read, so that nothing is overlooked."""

    def __init__(self, data: Mapping[str, Any], *, where: str) -> None:
        self.data, self.where = data, where
        self.used: set[str] = set()
        self.notes: list[str] = []
        self.features: list[str] = []

    def refuse(self, key: str, why: str) -> ModelError:
        return ModelError(f"{self.where}: field {key!r} {why}")

    def raw(self, key: str, *aliases: str) -> Any:
        """The first of these fields that is present and not null, or None; all are marked as read."""
        self.used.update((key, *aliases))
        return next((self.data[k] for k in (key, *aliases) if self.data.get(k) is not None), None)

    def size(
        self, key: str, *aliases: str, default: Any = _REQUIRED, most: int = MOST_WIDTH, least: int = 1
    ) -> int:
        """A whole number in [least, most]; absent or null gives the default, or an error without one."""
        value = self.raw(key, *aliases)
        for alias in aliases:
            if self.data.get(alias) not in (None, value):
                raise self.refuse(
                    alias, f"({_short(self.data[alias])}) contradicts {key!r} ({_short(value)})"
                )
        if value is None:
            if default is _REQUIRED:
                raise self.refuse(
                    key, f"is missing: the size of a {self.data.get('model_type')!r} model needs it"
                )
            return int(default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.refuse(key, f"must be a whole number from {least} to {most}, got {_short(value)}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.raw(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.refuse(key, f"must be true or false, got {_short(value)}")
        return value

    def number(self, key: str, *aliases: str, default: float) -> float:
        value = self.raw(key, *aliases)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e30:
            raise self.refuse(key, f"must be a finite number of at least 0, got {_short(value)}")
        return float(value)

    def text(self, key: str, *aliases: str, default: str) -> str:
        value = self.raw(key, *aliases)
        if value is None:
            return default
        if not isinstance(value, str) or len(value) > 100:
            raise self.refuse(key, f"must be a short text, got {_short(value)}")
        return value

    def mapping(self, key: str) -> Mapping[str, Any]:
        value = self.raw(key)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise self.refuse(key, f"must be an object, got {_short(value)}")
        return value

    def indices(self, key: str) -> list[int]:
        """A list of layer numbers; absent or null: empty."""
        value = self.raw(key)
        if value is None:
            return []
        if not isinstance(value, Sequence) or not all(type(i) is int and 0 <= i < self.layers for i in value):
            raise self.refuse(key, f"must list layers from 0 to {self.layers - 1}, got {_short(value)}")
        return list(value)

    def only(self, key: str, *allowed: Any) -> None:
        """Refuse every value of a field but the allowed ones; null and absence mean the first of them."""
        value = self.raw(key)
        if value is not None and value not in allowed:
            raise self.refuse(key, f"is {_short(value)}; supported: {', '.join(_short(v) for v in allowed)}")

    def ignore(self, *keys: str) -> None:
        """Mark fields that this family's definition does not use for anything counted or computed here."""
        self.used.update(keys)

    @property
    def layers(self) -> int:
        return self.size("num_hidden_layers", "n_layer", most=MOST_LAYERS)

    @property
    def hidden(self) -> int:
        return self.size("hidden_size", "n_embd")

    def layer_types(self, default: Sequence[str]) -> list[str]:
        """One word per layer, from `layer_types` or the family's own rule."""
        value = self.raw("layer_types")
        if value is None:
            return list(default)
        if not isinstance(value, Sequence) or len(value) != self.layers:
            n = len(value) if isinstance(value, Sequence) else _short(value)
            raise self.refuse("layer_types", f"must name {self.layers} layers (num_hidden_layers), got {n}")
        return [str(word) for word in value]

    def spec(
        self,
        blocks: Sequence[BlockSpec],
        *,
        tied: bool = False,
        rope_theta: float = 10_000.0,
        scalings: tuple[str, ...] = ("llama3", "yarn"),
        **more: Any,
    ) -> ModelSpec:
        """The finished spec; `tied` and `rope_theta` are the family's defaults for fields left out.

        `scalings`: the kinds of rope scaling that mean in this family what they mean elsewhere.
        """
        theta, scaling = self._rope(rope_theta, scalings)
        values = {
            "hidden": self.hidden,
            "vocab": self.size("vocab_size", most=MOST_VOCAB),
            "blocks": tuple(blocks),
            "tied_embeddings": self.flag("tie_word_embeddings", tied),
            "norm_eps": self.number(
                "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", default=1e-6
            ),
            "rope_theta": theta,
            "rope_scaling": scaling,
            "max_positions": self.size("max_position_embeddings", "n_positions", most=MOST_POSITIONS),
            **more,
        }
        return ModelSpec(
            name="", features=tuple(dict.fromkeys(self.features)), notes=tuple(self.notes), **values
        )

    def rope_field(self, key: str) -> Any:
        """A field of the rotary embedding, from whichever of its three places a config keeps it in."""
        nested = {**self.mapping("rope_scaling"), **self.mapping("rope_parameters")}
        if isinstance(nested.get("full_attention"), Mapping):
            self.features.append("a rotary base per kind of layer")
            nested = dict(nested["full_attention"])
        flat = self.raw(key)
        return nested.get(key, flat)

    def rotated_dims(self, head_dim: int, *, default: float) -> int | None:
        """How many dims of a head rotate, from `partial_rotary_factor`; None: all."""
        part = self.rope_field("partial_rotary_factor")
        part = default if part is None else part
        if isinstance(part, bool) or not isinstance(part, int | float) or not 0 < part <= 1:
            raise self.refuse("partial_rotary_factor", f"must be above 0 and at most 1, got {_short(part)}")
        return None if part == 1 else int(head_dim * part)

    def _rope(
        self, default_theta: float, scalings: tuple[str, ...]
    ) -> tuple[float, Llama3Scaling | YarnScaling | None]:
        theta = self.rope_field("rope_theta")
        theta = self.number("rotary_emb_base", default=default_theta) if theta is None else theta
        if isinstance(theta, bool) or not isinstance(theta, int | float) or not 0 < theta < 1e30:
            raise self.refuse("rope_theta", f"must be a positive number, got {_short(theta)}")
        kind = self.rope_field("rope_type") or self.rope_field("type") or "default"
        if kind == "default":
            return float(theta), None
        if kind == "llama3" and kind in scalings:
            return float(theta), Llama3Scaling(
                factor=self.rope_field("factor"),
                low_freq_factor=self.rope_field("low_freq_factor"),
                high_freq_factor=self.rope_field("high_freq_factor"),
                original_max_positions=self._original_positions(),
            )
        if kind == "yarn" and kind in scalings:
            if theta <= 1:
                raise self.refuse(
                    "rope_theta", f"must be above 1 for rope scaling 'yarn', got {_short(theta)}"
                )
            return float(theta), self._yarn()
        self.features.append(f"rope scaling {_short(kind)}")
        return float(theta), None

    def _yarn(self) -> YarnScaling:
        """Defaults as in transformers: whatever the paper recommends, also where a field is 0 or null."""
        original, factor = self._original_positions(), self.rope_field("factor")
        positions = self.size("max_position_embeddings", most=MOST_POSITIONS)
        truncate = self.rope_field("truncate")
        return YarnScaling(
            factor=positions / original if factor is None else factor,
            original_max_positions=original,
            attention_factor=self.rope_field("attention_factor"),
            beta_fast=self.rope_field("beta_fast") or 32.0,
            beta_slow=self.rope_field("beta_slow") or 1.0,
            mscale=self.rope_field("mscale"),
            mscale_all_dim=self.rope_field("mscale_all_dim"),
            truncate=True if truncate is None else truncate,
        )

    def _original_positions(self) -> int:
        """Positions before scaling; a value beside the scaling goes before one inside, absent: all positions."""
        key = "original_max_position_embeddings"
        flat, nested = self.raw(key), self.rope_field(key)
        if flat is not None and nested != flat:
            raise self.refuse(key, f"is {_short(flat)}, but {_short(nested)} inside the rope scaling")
        if nested is None:
            return self.size("max_position_embeddings", most=MOST_POSITIONS)
        if type(nested) is not int or not 0 < nested <= MOST_POSITIONS:
            raise self.refuse(key, f"must be a whole number of at least 1, got {_short(nested)}")
        return nested

    def finish(self) -> None:
        """Refuse fields that nobody read and that may change the counts; name the others in a note."""
        unread = [
            key for key, value in self.data.items()
            if key not in self.used and key not in HARMLESS and value not in (None, False, 0, "", [], {})
            and not key.endswith(("_token_id", "_token_index")) and not key.startswith("summary_")
        ]  # fmt: skip
        for key in unread:
            if SUSPICIOUS.search(key):
                known = nearest(key, self.used)
                raise self.refuse(
                    key,
                    f"({_short(self.data[key])}) is not known for this model and may change its size{known}",
                )
        if unread:
            self.notes.append(f"fields ignored, not known to change counts: {', '.join(sorted(unread))}")


def read(source: Mapping[str, Any] | str | Path, *, name: str | None = None) -> ModelSpec:
    """The model that a config describes: a mapping, a `config.json`, or a folder that holds one.

    Raises: ModelError naming the file and the field or model type.
    """
    from fivefold.core.families.table import find_family  # families are written in terms of Fields

    if isinstance(source, Mapping):
        data, where = source, name or "model config"
    else:
        path = Path(source)
        path = path / "config.json" if path.is_dir() else path
        data, where = load_json(path), str(path)
        name = name or (path.parent.name if path.name == "config.json" else path.stem)
    text, notes = _text_model(data, where)
    family, build, more = find_family(text, data, where)
    fields = Fields(text, where=where)
    try:
        spec = build(fields)
    except ValidationError as error:
        raise ModelError(f"{where}: {describe(error, ModelSpec)}") from None
    fields.finish()
    return spec.replace(name=name or family, family=family, notes=(*more, *notes, *fields.notes))


def load_json(path: Path) -> Mapping[str, Any]:
    """A JSON object from an untrusted file of at most 4 MiB."""
    text = read_text(path, MOST_BYTES, "model config", ModelError)
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else error
        raise ModelError(f"model config {path} is not valid JSON: {reason}") from None
    if not isinstance(data, dict):
        raise ModelError(f"model config {path} must hold a JSON object, got {_short(data)}")
    return data


def _text_model(data: Mapping[str, Any], where: str) -> tuple[Mapping[str, Any], list[str]]:
    """The language model of a config: the config itself, or its nested `text_config`."""
    nested = data.get("text_config")
    if nested is None:
        return data, []
    if not isinstance(nested, Mapping):
        raise ModelError(f"{where}: field 'text_config' must be an object, got {_short(nested)}")
    text = dict(nested)
    if data.get("tie_word_embeddings") is not None:  # the outer class owns the head
        text["tie_word_embeddings"] = data["tie_word_embeddings"]
    return text, ["text model only: towers and projectors for other inputs are not counted"]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
