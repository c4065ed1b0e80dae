"""FSDP2 and transformers as opponents of peers.py, in the loops that their users write."""

from __future__ import annotations

import tempfile
from functools import cache
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from fivefold.nn.decoder import Decoder
from single_rank import VOCAB, Case, Step, initial_weights, plan_of

if TYPE_CHECKING:
    from peers import Job


def fsdp2(job: Job, *, once: bool) -> Step:
    """`fully_shard` on each layer and the whole decoder, gathered for each microbatch or `once` a step."""
    model = Decoder(job.plan.model)
    model.load_state_dict(job.weights)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for part in (*model.layers.values(), model):
        fully_shard(part, mesh=mesh, reshard_after_forward=not once)
        assert isinstance(part, FSDPModule)
        part.set_force_sum_reduction_for_comms(True)
        part.set_gradient_divide_factor(1.0)
    parameters = list(model.parameters())
    adamw = job.adamw(parameters)
    batches, mask = job.batches, job.batches.labels != -100

    def step(i: int) -> float:
        valid = mask[i].sum()
        dist.all_reduce(valid)
        total: Tensor = torch.zeros(())
        for j, (tokens_BS, labels_BS) in enumerate(zip(batches.tokens[i], batches.labels[i])):
            if once:
                model.set_requires_gradient_sync(j == len(batches.tokens[i]) - 1)  # type: ignore[operator]
            loss = model.loss(model(tokens_BS, job.positions), labels_BS, mask[i, j]) / valid
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(parameters, job.clip_norm)
        adamw.step()
        adamw.zero_grad(set_to_none=True)
        dist.all_reduce(total)
        return float(total)

    return step


def transformers_tp(job: Job) -> Step:
    """`from_pretrained(tp_plan="auto")`, from the checkpoint in the job's folder."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(job.folder, tp_plan="auto", attn_implementation="sdpa").train()
    parameters = list(model.parameters())
    adamw = job.adamw(parameters)
    kinds = [[p for p in parameters if isinstance(p, DTensor) is cut] for cut in (True, False)]
    # transformers shifts labels itself: label s is token s, not the token after it.
    labels = torch.nn.functional.pad(job.batches.labels[..., :-1], (1, 0), value=-100)

    def clip() -> None:
        norms = [torch.nn.utils.get_total_norm([p.grad for p in kind]) for kind in kinds]
        whole = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
        norm = torch.linalg.vector_norm(torch.stack(whole))
        for kind in kinds:
            torch.nn.utils.clip_grads_with_norm_(kind, job.clip_norm, norm)

    def step(i: int) -> float:
        valid = torch.stack([(row != -100).sum() for row in labels[i]]).sum()
        total = torch.zeros(())
        for tokens_BS, labels_BS in zip(job.batches.tokens[i], labels[i]):
            loss = model(input_ids=tokens_BS, labels=labels_BS, num_items_in_batch=valid).loss
            loss.backward()
            total += loss.detach()
        clip()
        adamw.step()
        adamw.zero_grad(set_to_none=True)
        return float(total)

    return step


@cache
def save_for_transformers(case: Case) -> tempfile.TemporaryDirectory[str]:
    """The weights that our trainer starts from, as a checkpoint of transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from fivefold.nn.hub_names import hf_name

    spec = plan_of(case).model
    config = LlamaConfig(  # type: ignore[call-arg]
        vocab_size=VOCAB, hidden_size=case.hidden, intermediate_size=case.ffn,
        num_hidden_layers=case.layers, num_attention_heads=case.heads, num_key_value_heads=case.kv_heads,
        rms_norm_eps=spec.norm_eps, rope_theta=spec.rope_theta, use_cache=False, tie_word_embeddings=False,
    )  # fmt: skip
    model: nn.Module = LlamaForCausalLM(config)
    model.load_state_dict({hf_name(name): value for name, value in initial_weights(case).items()})
    folder = tempfile.TemporaryDirectory(prefix="fivefold-peers-")
    model.save_pretrained(folder.name)  # type: ignore[operator]
    return folder
