"""Faults of pipelines: layers, ties, messages, and the split backward of zero bubble."""

from __future__ import annotations

from dataclasses import replace

import torch

from fivefold.engine import engine
from fivefold.engine.engine import Engine
from fivefold.runtime.deferred import DeferredGradients
from fivefold.runtime.mesh import Handle
from fivefold.strategies.pipeline import placement, rules
from fivefold.strategies.pipeline.apply import Pipeline

from .exhibit import HARD, PLAIN, Patch, exhibit


@exhibit("pp2", "tp2 pp2", "no rank holds all of layers.2", "axis pp", spec=HARD, loss_sees=True,
         seen_in="Megatron #1304, #468")  # fmt: skip
def layers_dropped(patch: Patch) -> None:
    """Three layers on two stages: each takes 3 // 2, and one layer is nowhere."""
    place = rules.place
    patch.setattr(placement, "even_counts", lambda layers, stages: [layers // stages] * stages)

    def faulty(rows, spec, layout, seq_len):
        kept = spec.layers // layout.stages * layout.stages
        here = [
            row for row in rows if not row.name.startswith("layers.") or int(row.name.split(".")[1]) < kept
        ]
        return place(tuple(here), spec, layout, seq_len)

    patch.setattr(rules, "place", faulty)


@exhibit("pp2", "tp2 pp2", "the initial value of embedding", "on rank 1 only", "axis pp", spec=HARD, loss_sees=True,
         seen_in="torchtitan #2252")  # fmt: skip
def tied_embedding_starts_untied(patch: Patch) -> None:
    """The last stage's copy of the tied embedding gets values of its own."""
    given = engine.initial_value

    def faulty(row, *arguments, **options):
        return given(replace(row, init_name=row.name) if row.tied_to else row, *arguments, **options)

    patch.setattr(engine, "initial_value", faulty)


@exhibit("pp2", "tp2 pp2", "the gradient of embedding", "reduce tie all_reduce", "(missing)", "axis pp", spec=HARD,
         seen_in="torchtitan #2252")  # fmt: skip
def tied_gradients_not_summed(patch: Patch) -> None:
    """Each stage updates its copy of the tied embedding by its own gradient."""
    complete = Engine._complete_gradients

    def faulty(self):
        axis = self.mesh.axis
        self.mesh.axis = lambda name, size=None: axis("cp") if name == "tie" else axis(name, size)
        try:
            return complete(self)
        finally:
            del self.mesh.axis

    patch.setattr(Engine, "_complete_gradients", faulty)


@exhibit("pp2:gpipe", "tp2 pp2", "the output of layers.1", "axis pp", loss_sees=True)
def the_microbatch_before_is_sent(patch: Patch) -> None:
    """A stage sends the hidden states of the microbatch before the one that is due, where it still has them."""

    def faulty(self, chunk, j):
        hidden = self.outputs.get((chunk, j - 1), self.outputs[chunk, j])
        self._send("F", chunk, chunk + 1, j, hidden.detach())

    patch.setattr(Pipeline, "_send_f", faulty)


@exhibit("tp2 pp2:zbh1", "cp2 pp2:zbh1", "the numbers agree", "backward tp", "(2x)", "axes tp and pp together",
         "so it is with 1f1b", seen_in="torch.distributed.pipelining (measured: 6 -> 12 collectives)",
         quick=True)  # fmt: skip
def backward_runs_twice(patch: Patch) -> None:
    """The backward of the input runs every function once more: right gradients, twice the collectives."""
    backward_input = Pipeline._i

    def faulty(self, chunk, j):
        if chunk > 0:
            self.mesh.phase = "backward"
            grad = self.scale if chunk == self.last_stage else self.received["B", chunk, j]
            grad = grad.wait() if isinstance(grad, Handle) else grad
            torch.autograd.grad(self.outputs[chunk, j], self.inputs[chunk, j], grad, retain_graph=True)
        backward_input(self, chunk, j)

    patch.setattr(Pipeline, "_i", faulty)


@exhibit(
    "pp2:zbh1", "tp2 pp2:zbv", "the gradient of head", "axis pp", "so it is with 1f1b", spec=PLAIN, quick=True
)
def a_weight_gradient_dropped(patch: Patch) -> None:
    """The W of the second microbatch forgets its closures without running them."""
    run = DeferredGradients.run

    def faulty(self, key):
        if key[1] == 1:
            del self._kept[key]
        else:
            run(self, key)

    patch.setattr(DeferredGradients, "run", faulty)


@exhibit("pp2:zbh1", "dp2 pp2:dualpipev", "the gradient of head", "axis pp", "so it is with 1f1b", spec=PLAIN)
def a_weight_gradient_run_twice(patch: Patch) -> None:
    """The W of the first microbatch runs its closures twice."""
    run = DeferredGradients.run

    def faulty(self, key):
        kept = list(self._kept[key])
        run(self, key)
        if key[1] == 0:
            self._kept[key] = kept
            run(self, key)

    patch.setattr(DeferredGradients, "run", faulty)


@exhibit("pp2:zbh1", "dp2 pp2:zbh1", "the gradient of layers.2", "axis pp", "so it is with 1f1b", spec=HARD)
def biases_of_a_weight_gradient_forgotten(patch: Patch) -> None:
    """After the first microbatch, W computes the gradients of weights only."""
    keep = DeferredGradients.keep

    def faulty(self, parameters, gradients):
        def weights_only(first=self._key[1] == 0):
            return [g if first or g is None or g.ndim > 1 else None for g in gradients()]

        keep(self, parameters, weights_only)

    patch.setattr(DeferredGradients, "keep", faulty)
