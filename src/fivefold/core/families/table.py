"""The model families that a `config.json` can name. A family that is not here is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fivefold.core.families import dense, moe
from fivefold.core.model_config import Fields
from fivefold.core.model_spec import RUNS, ModelSpec
from fivefold.errors import ModelError, nearest

Build = Callable[[Fields], ModelSpec]

FAMILIES: dict[str, tuple[Build, str]] = {
    "llama": (dense.llama, "LlamaForCausalLM"),
    "mistral": (dense.mistral, "MistralForCausalLM"),
    "qwen2": (dense.qwen2, "Qwen2ForCausalLM"),
    "qwen3": (dense.qwen3, "Qwen3ForCausalLM"),
    "gemma": (dense.gemma, "GemmaForCausalLM"),
    "gemma2": (dense.gemma2, "Gemma2ForCausalLM"),
    "gemma3_text": (dense.gemma3, "Gemma3ForCausalLM"),
    "phi": (dense.phi, "PhiForCausalLM"),
    "phi3": (dense.phi3, "Phi3ForCausalLM"),
    "olmo2": (dense.olmo2, "Olmo2ForCausalLM"),
    "granite": (dense.granite, "GraniteForCausalLM"),
    "starcoder2": (dense.starcoder2, "Starcoder2ForCausalLM"),
    "gpt2": (dense.gpt2, "GPT2LMHeadModel"),
    "gpt_bigcode": (dense.gpt_bigcode, "GPTBigCodeForCausalLM"),
    "gpt_neox": (dense.gpt_neox, "GPTNeoXForCausalLM"),
    "mixtral": (moe.mixtral, "MixtralForCausalLM"),
    "qwen2_moe": (moe.qwen2_moe, "Qwen2MoeForCausalLM"),
    "qwen3_moe": (moe.qwen3_moe, "Qwen3MoeForCausalLM"),
    "qwen3_next": (moe.qwen3_next, "Qwen3NextForCausalLM"),
    "qwen3_5_text": (moe.qwen3_5, "Qwen3_5ForCausalLM"),
    "deepseek": (moe.deepseek, "DeepseekForCausalLM"),
    "deepseek_v2": (moe.deepseek_v2, "DeepseekV2ForCausalLM"),
    "deepseek_v3": (moe.deepseek_v3, "DeepseekV3ForCausalLM"),
    "glm4_moe": (moe.glm4_moe, "Glm4MoeForCausalLM"),
    "gpt_oss": (moe.gpt_oss, "GptOssForCausalLM"),
    "llama4_text": (moe.llama4, "Llama4ForCausalLM"),
    "minimax_m2": (moe.minimax_m2, "MiniMaxM2ForCausalLM"),
}
_SAME = {"kimi_k2": "deepseek_v3", "phi-msft": "phi"}
"""Other names for a family, from configs that ship with the authors' own code."""
_BY_CLASS = {name: family for family, (_, name) in FAMILIES.items()}


def find_family(
    text: Mapping[str, Any], outer: Mapping[str, Any], where: str
) -> tuple[str, Build, list[str]]:
    """The family of a config, its builder and notes. The class in `architectures` decides over `model_type`.

    The outer class of a nested text model names the towers too, so there the nested `model_type` decides.
    """
    nested = text is not outer
    model_type = text.get("model_type")
    model_type = _SAME.get(model_type, model_type) if isinstance(model_type, str) else model_type
    listed = text.get("architectures")
    classes = listed if isinstance(listed, list) and listed else []
    if classes:
        family = _BY_CLASS.get(str(classes[0]))
        if family is None:
            known = nearest(str(classes[0]), _BY_CLASS)
            raise ModelError(
                f"{where}: 'architectures' names {str(classes[0])[:80]!r}, which is not supported{known}; "
                f"can be run: {RUNS}; can be sized as well: {', '.join(sorted(_BY_CLASS))}"
            )
        differs = isinstance(model_type, str) and model_type in FAMILIES and model_type != family
        notes = (
            [f"read as {family}, by its architecture, though model_type says {model_type}"] if differs else []
        )
        return family, FAMILIES[family][0], notes
    if isinstance(model_type, str) and model_type in FAMILIES:
        return model_type, FAMILIES[model_type][0], []
    field = "text_config.model_type" if nested else "model_type"
    found = f"{model_type[:80]!r}" if isinstance(model_type, str) else "missing"
    known = nearest(model_type, FAMILIES) if isinstance(model_type, str) else ""
    raise ModelError(
        f"{where}: {field} {found} is not supported{known}; can be run: {RUNS}; can be sized as well: "
        f"{', '.join(sorted(FAMILIES))}"
    )
