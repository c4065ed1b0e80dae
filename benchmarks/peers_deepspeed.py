"""DeepSpeed as an opponent of peers.py: ZeRO, its pipeline, its Ulysses, on the CPU over gloo.

It trains our decoder, so that only the machinery differs. Shims, all that it takes beyond what its manual says:

- `DS_ACCELERATOR=cpu`, and installed with `DS_BUILD_OPS=0`: it compiles no operator of its own. Its optimizer is the
  fused AdamW of torch, collectives are those of gloo. One operator it would compile all the same as it starts,
  which only `inference_all_reduce` uses: it is told that this machine cannot (`__compatible_ops__`).
- It joins the process group that is there rather than making one.
- It averages gradients over data ranks (not over those of Ulysses) and microbatches, ours are sums over valid tokens:
  each microbatch's loss is multiplied by data ranks x microbatches and divided by the global count of valid tokens.
- Attention cores are wrapped for `DistributedAttention`, which wants [B, S, N, H] and we [B, N, S, H]: two views.
- The pipeline's layers hold their rotary angles, made once: its stages pass on nothing but hidden states.
- The pipeline's parameters are marked `model_parallel`: without that it clips every stage by the gradient norm of the
  first one alone.
- Its `MoE` returns a tuple; layers take the first. Experts are three products, as ours; the second choice is the second
  best (`top2_2nd_expert_sampling=False`), no token is dropped. It clips by the mean over ranks of norms that are each
  of other experts: no gradient is clipped in that contest.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.moe.layer import MoE
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from deepspeed.sequence.layer import DistributedAttention
from deepspeed.utils import logger as deepspeed_logger
from torch import Tensor, nn

from fivefold.nn.decoder import Decoder
from single_rank import MICROBATCHES, Step

if TYPE_CHECKING:
    from peers import Job

deepspeed_logger.setLevel(logging.WARNING)
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


class Trained(nn.Module):
    """The decoder and its loss in one forward. Shapes: tokens, labels, mask [B, S] -> sum of token losses."""

    def __init__(self, model: Decoder, positions: Tensor) -> None:
        super().__init__()
        self.model, self.positions = model, positions

    def forward(self, tokens_BS: Tensor, labels_BS: Tensor, mask_BS: Tensor) -> Tensor:
        loss: Tensor = self.model.loss(self.model(tokens_BS, self.positions), labels_BS, mask_BS)
        return loss


def whole_model(job: Job) -> Decoder:
    model = Decoder(job.plan.model)
    model.load_state_dict(job.weights)
    return model


def make_engine(job: Job, module: nn.Module, zero: dict[str, Any], **options: Any) -> Any:
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
    config = {
        "train_micro_batch_size_per_gpu": job.case.micro_batch,
        "gradient_accumulation_steps": MICROBATCHES,
        "gradient_clipping": job.clip_norm,
        "steps_per_print": 10**9,
        "zero_optimization": zero,
    }
    engine, *_ = deepspeed.initialize(
        model=module, optimizer=job.adamw(list(module.parameters())), config=config, **options
    )
    return engine


def loop(job: Job, engine: Any, scale: int) -> Step:
    """The loop that its users write. `scale`: over how many it averages, data ranks x microbatches."""
    batches, mask = job.batches, job.batches.labels != -100

    def step(i: int) -> float:
        valid = mask[i].sum()
        dist.all_reduce(valid)
        total = torch.zeros(())
        for j, (tokens_BS, labels_BS) in enumerate(zip(batches.tokens[i], batches.labels[i])):
            loss = engine(tokens_BS, labels_BS, mask[i, j]) * (scale / valid)
            engine.backward(loss)
            engine.step()
            total += loss.detach()
        dist.all_reduce(total)
        return float(total) / scale

    return step


def zero(job: Job, *, stage: int, all_cut: bool = False) -> Step:
    """ZeRO. By default its stage 3 leaves parameters of fewer than 100,000 elements whole on every rank."""
    config: dict[str, Any] = {"stage": stage}
    if all_cut:
        config["stage3_param_persistence_threshold"] = 0
    engine = make_engine(job, Trained(whole_model(job), job.positions), config)
    return loop(job, engine, job.plan.layout.dp * MICROBATCHES)


class Ulysses(nn.Module):
    """One of our attention cores inside `DistributedAttention`. Shapes: as the core's."""

    def __init__(self, core: nn.Module) -> None:
        super().__init__()
        self.core = core
        self.distributed = DistributedAttention(
            self._local, parallel_state_sp.get_sequence_parallel_group(), scatter_idx=2, gather_idx=1
        )

    def _local(self, q_BSNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor) -> Tensor:
        out_BNSH: Tensor = self.core(
            q_BSNH.transpose(1, 2), k_BSKH.transpose(1, 2), v_BSKH.transpose(1, 2), None
        )
        return out_BNSH.transpose(1, 2)

    def forward(self, q_BNSH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, _: None) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q_BNSH, k_BKSH, v_BKSH))
        out_BSNH: Tensor = self.distributed(q, k, v, 0)
        return out_BSNH.transpose(1, 2)


def ulysses(job: Job) -> Step:
    """Ulysses, its ranks made known by `mpu`: with `mesh_param` it would not sum gradients over them."""
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
    parallel_state_sp.initialize_sequence_parallel(sequence_parallel_size=job.plan.layout.cp)
    model = whole_model(job)
    for layer in model.layers.values():
        attention = layer.get_submodule("attention")
        attention.core = Ulysses(attention.get_submodule("core"))
    engine = make_engine(job, Trained(model, job.positions), {"stage": 0}, mpu=parallel_state_sp)
    return loop(job, engine, MICROBATCHES)


class Expert(nn.Module):
    """One gated expert, from a slice of our stacked weights. Shapes: [..., D] -> [..., D]."""

    def __init__(self, gate_FD: Tensor, up_FD: Tensor, down_DF: Tensor) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Parameter(w.clone()) for w in (gate_FD, up_FD, down_DF))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.silu(F.linear(x, self.gate)) * F.linear(x, self.up), self.down)


class Routed(nn.Module):
    """DeepSpeed's `MoE` in the place of ours. Shapes: x_BSD -> [B, S, D]."""

    def __init__(self, moe: nn.Module, ranks: int, rank: int) -> None:
        super().__init__()
        gate_EFD, up_EFD, down_EDF = (
            moe.get_parameter(f"experts.{name}").data for name in ("gate", "up", "down")
        )
        number = len(gate_EFD)
        self.moe = MoE(
            gate_EFD.shape[2], Expert(gate_EFD[0], up_EFD[0], down_EDF[0]), num_experts=number, ep_size=ranks, k=2,
            drop_tokens=False, use_rts=False, top2_2nd_expert_sampling=False,
        )  # fmt: skip
        self.moe.deepspeed_moe.gate.wg.weight.data.copy_(moe.get_parameter("router.weight"))
        first = rank * number // ranks
        for i, expert in enumerate(self.moe.deepspeed_moe.experts.deepspeed_experts, start=first):
            for own, whole in ((expert.gate, gate_EFD), (expert.up, up_EFD), (expert.down, down_EDF)):
                own.data.copy_(whole[i])

    def forward(self, x_BSD: Tensor, _: Tensor | None) -> Tensor:
        y_BSD: Tensor = self.moe(x_BSD)[0]
        return y_BSD


def experts(job: Job) -> Step:
    """`MoE` with half of the experts on each rank, the rest of the model on both."""
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
    model = whole_model(job)
    for layer in model.layers.values():
        layer.mlp = Routed(layer.get_submodule("mlp"), job.plan.layout.ep, job.rank.rank)
    engine = make_engine(job, Trained(model, job.positions), {"stage": 0})
    return loop(job, engine, job.plan.layout.dp * MICROBATCHES)


class Turned(nn.Module):
    """A decoder layer that knows its rotary angles: hidden states in, hidden states out."""

    def __init__(self, layer: nn.Module, rope: tuple[Tensor, Tensor]) -> None:
        super().__init__()
        self.layer, self.rope = layer, rope

    def forward(self, x_BSD: Tensor) -> Tensor:
        out_BSD: Tensor = self.layer(x_BSD, self.rope, None)
        return out_BSD


def pipeline(job: Job) -> Step:
    """`PipelineModule` with the same cut as ours: embedding and half of the layers, the others with norm and head."""
    model = whole_model(job)
    assert model.embedding is not None
    assert model.norm is not None
    assert model.head is not None
    rope = model.rope(job.positions, torch.float32)
    layers = [Turned(layer, rope) for layer in model.layers.values()]

    def loss(logits_BSV: Tensor, labels: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        labels_BS, mask_BS, valid = labels
        total: Tensor = model.loss(logits_BSV, labels_BS, mask_BS) * (MICROBATCHES / valid)
        return total

    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
    module = PipelineModule(
        layers=[model.embedding, *layers, nn.Sequential(model.norm, model.head)],
        num_stages=job.plan.layout.pp,
        loss_fn=loss,
        partition_method="uniform",
    )
    for parameter in module.parameters():
        parameter.model_parallel = True
    engine = make_engine(job, module, {"stage": 0})
    batches, mask = job.batches, job.batches.labels != -100

    def step(i: int) -> float:
        valid = mask[i].sum()
        feed = [
            (tokens_BS, (labels_BS, mask_BS, valid))
            for tokens_BS, labels_BS, mask_BS in zip(batches.tokens[i], batches.labels[i], mask[i])
        ]
        return float(engine.train_batch(data_iter=iter(feed)))

    return step
