"""The five strategies for a module that is not ours.

    parallel = parallelize(model, "dp2 tp2 pp2", seq_len=1024, global_batch=16)      on every rank
    result = parallel.step(tokens[parallel.rows], lr=1e-4)

Shape letters: B sequences of this data rank, G of the global batch, S tokens of a sequence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fivefold.core.cluster import Cluster
from fivefold.core.execution import ITEMSIZE_BYTES, Execution
from fivefold.core.layout import Layout
from fivefold.core.optimizer import OptimizerConfig
from fivefold.core.plan import Plan
from fivefold.core.workload import Workload
from fivefold.engine.engine import Engine, StepResult
from fivefold.engine.own import OwnModel
from fivefold.errors import ConfigError, LaunchError, ModelError, WorkloadError
from fivefold.nn.layers import IGNORED
from fivefold.runtime.device import Device, device_kind, select_device
from fivefold.runtime.mesh import Mesh
from fivefold.strategies.context.order import local_spans
from fivefold.strategies.pipeline.apply import Microbatch


def parallelize(
    model: nn.Module,
    layout: Layout | str,
    *,
    seq_len: int,
    global_batch: int,
    micro_batch: int = 1,
    roles: Mapping[str, str] | None = None,
    weights: str | Path | None = None,
    dtype: str | None = None,
    optimizer: OptimizerConfig | None = None,
    recompute: str = "none",
    device: str = "auto",
) -> Parallel:
    """Cut a module over the ranks of this job, each of which calls this with the same module and arguments.

    The module's objects stay: its forward runs, with weights that are cut and with functions replaced from outside
    where ranks talk. Its weights are the initial ones, the same at every layout.
    `roles`: name pattern of a module -> its role (see `fivefold.nn.own_roles`); None: found by the model's class.
    `weights`: a folder of safetensors files, of which each rank reads its part; None: the values that the module has.
    `dtype`: of parameters and compute; None: the module's own. `micro_batch`, `global_batch`: in sequences.
    `recompute`: `full` or `full/k`: layers, or every k-th, keep only their input and are computed again in backward.
    `device`: `auto` is the current accelerator, or the CPU where there is none or ranks talk through gloo.

    Comm:   process groups are made (phase setup); none of the weights.
    Raises: LayoutError, WorkloadError or ModelError, before the module is changed, for what cannot be cut so: the
            size or module that forbids it is named. LaunchError where there are not as many ranks as the layout has.
    """
    layout = Layout.parse(layout) if isinstance(layout, str) else layout
    own = OwnModel(model, roles, None if weights is None else Path(weights))
    plan = Plan(
        model=own.spec,
        cluster=Cluster.parse("cpu"),
        workload=Workload.read({"seq_len": seq_len, "global_batch": global_batch}, where="parallelize"),
        layout=layout,
        execution=Execution.read(
            {
                "micro_batch": micro_batch,
                "dtype": dtype or _dtype_of(model),
                "optimizer": optimizer or OptimizerConfig(),
                "recompute": recompute,
            },
            where="parallelize",
        ),
    )
    own.check(plan)
    rank, here = _this_rank(layout, device)
    engine = Engine(plan, Mesh(layout, rank, here), seed=0, weights=own.values, model=own)
    own.let_go()
    return Parallel(model, engine, own.parts.own_name)


class Parallel:
    """A module under a layout, on one rank.

    model    the module, whose parts of other ranks are gone        engine    trains it
    rows     the sequences of the global batch that belong here
    """

    def __init__(self, model: nn.Module, engine: Engine, own_name: Callable[[str], str]) -> None:
        """`own_name`: our name of a parameter -> the module's."""
        self.model, self.engine, self._own_name = model, engine, own_name
        layout, workload = engine.plan.layout, engine.plan.workload
        count = workload.global_batch // layout.dp
        first = engine.mesh.coordinate["dp"] * count
        self.rows = slice(first, first + count)
        spans = local_spans(workload.seq_len, layout, engine.mesh.coordinate["cp"])
        places = torch.cat([torch.arange(span.start, span.stop) for span in spans])
        self._places = places.to(engine.mesh.device.device)

    def step(
        self, tokens_BS: Tensor, labels_BS: Tensor | None = None, *, lr: float | None = None
    ) -> StepResult:
        """Train on one global batch, of which each rank gives the sequences `rows`.

        Shapes: tokens [B, S] (int64), labels [B, S], -100 where a label does not count; None: the next tokens.
        The loss is the mean cross entropy over all labels of the global batch that count. `lr`: None: the optimizer's.
        Raises: WorkloadError for other shapes, types or numbers; ConfigError for a rate that is no number from 0.
        """
        load = self._microbatches(tokens_BS, labels_BS)
        if lr is not None and not (isinstance(lr, int | float) and 0 <= lr < math.inf):
            raise ConfigError(f"lr={lr!r}: a learning rate is a finite number of at least 0")
        return self.engine.step(load, self.engine.plan.execution.optimizer.lr if lr is None else lr)

    def evaluate(self, tokens_BS: Tensor, labels_BS: Tensor | None = None) -> float:
        """The mean loss of one global batch, as in `step`; nothing changes."""
        total, count = self.engine.evaluate(self._microbatches(tokens_BS, labels_BS))
        return total / max(1, count)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The whole parameters by the module's own names, on every rank, one at a time; all ranks must go through.

        Memory: one whole parameter. Comm: one all-reduce of each over all ranks (phase setup).
        """
        engine, mesh = self.engine, self.engine.mesh
        mesh.phase = "setup"
        held = {row.name: (row, value) for row, value in engine.data.weights()}
        for row in engine.table:
            if row.tied_to is not None:
                continue
            whole = torch.zeros(row.shape, dtype=engine.dtype, device=mesh.device.device)
            if row.name in held:
                mine, value = held[row.name]
                if mine.written_here(
                    mesh.layout, mesh.coordinate
                ):  # each element by one rank, so that sums are exact
                    region = mine.region(mesh.layout, mesh.coordinate)
                    whole[region] = value[tuple(slice(0, cut.stop - cut.start) for cut in region)].to(
                        engine.dtype
                    )
            yield self._own_name(row.name), mesh.axis("world").all_reduce(whole)

    def _microbatches(self, tokens_BS: Tensor, labels_BS: Tensor | None) -> Callable[[int], Microbatch]:
        plan, device = self.engine.plan, self.engine.mesh.device.device
        self._check("tokens", tokens_BS)
        if labels_BS is None:
            end = tokens_BS.new_full((len(tokens_BS), 1), IGNORED)
            labels_BS = torch.cat((tokens_BS[:, 1:], end), 1)
        else:
            self._check("labels", labels_BS, or_else=IGNORED)
        tokens, labels = (x.to(device)[:, self._places] for x in (tokens_BS, labels_BS))
        count = plan.execution.micro_batch

        def load(index: int) -> Microbatch:
            rows = slice(index * count, (index + 1) * count)
            here = labels[rows]
            return Microbatch(tokens[rows], here.clamp(min=0), here != IGNORED, self._places[None])

        return load

    def _check(self, name: str, x_BS: Tensor, or_else: int = 0) -> None:
        """Raises: WorkloadError for what is no int64 tensor of this rank's sequences, of tokens of the vocabulary."""
        plan, rows = self.engine.plan, self.rows
        wanted, vocab = (rows.stop - rows.start, plan.workload.seq_len), plan.model.vocab
        if not isinstance(x_BS, Tensor) or x_BS.dtype != torch.int64:
            kind = x_BS.dtype if isinstance(x_BS, Tensor) else f"a {type(x_BS).__name__}"
            raise WorkloadError(f"{name} are {kind}; they are a tensor of torch.int64")
        if tuple(x_BS.shape) != wanted:
            rank = self.engine.mesh.coordinate["dp"]
            raise WorkloadError(
                f"{name} of shape {list(x_BS.shape)}: data rank {rank} of {plan.layout} takes {list(wanted)}, "
                f"the sequences {rows.start} to {rows.stop - 1} of the global batch"
            )
        wrong = x_BS[((x_BS < 0) | (x_BS >= vocab)) & (x_BS != or_else)]
        if len(wrong):
            also = f", or {or_else} where none counts" if or_else else ""
            raise WorkloadError(
                f"{name} have {int(wrong[0])}, which is no token; the vocabulary has 0 to {vocab - 1}{also}"
            )


def _dtype_of(model: nn.Module) -> str:
    found = sorted({str(p.dtype).removeprefix("torch.") for p in model.parameters()})
    if len(found) != 1 or found[0] not in ITEMSIZE_BYTES:
        raise ModelError(
            f"{type(model).__name__} has parameters in {', '.join(found)}; say dtype= {', '.join(ITEMSIZE_BYTES)}"
        )
    return found[0]


def _this_rank(layout: Layout, device: str) -> tuple[int, Device]:
    """(global rank, device) of this process. Raises: LaunchError where the job has other ranks than the layout."""
    if not dist.is_initialized():
        if layout.world_size == 1:
            return 0, select_device(device_kind(device), 0, 1)
        raise LaunchError(
            f"{layout} has {layout.world_size} ranks, this process is alone; start them with torchrun and call "
            f"torch.distributed.init_process_group, or use fivefold.run_ranks"
        )
    ranks = dist.get_world_size()
    if ranks != layout.world_size:
        raise LaunchError(
            f"{layout} has {layout.world_size} ranks, this job has {ranks}; start as many, or change it"
        )
    kind = device_kind(device)
    if kind == "cpu" or dist.get_backend() == "gloo":
        return dist.get_rank(), Device(torch.device("cpu"))
    return dist.get_rank(), Device(torch.device(kind, torch.accelerator.current_device_index()))
