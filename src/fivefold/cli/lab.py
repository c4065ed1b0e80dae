"""`fivefold lab`: parse, call, print."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.option(
    "--max-ranks", type=click.IntRange(1, 4096), default=8, show_default=True, help="Largest layout to run."
)
@click.option(
    "--axes", default="dp,tp,pp", show_default=True,
    help="Axes of the grid: of dp, tp, cp and ep degrees 1, 2, 4, of pp 1, 2.",
)  # fmt: skip
@click.option(
    "--steps",
    type=click.IntRange(1, 10**6),
    default=24,
    show_default=True,
    help="Training steps of every layout.",
)
@click.option(
    "--model", "-m", default="small-llama", show_default=True, help="A preset, or a path to a config.json."
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("lab-report"),
    show_default=True,
    help="Folder of the report.",
)
@click.option("--records", type=click.Path(path_type=Path), help="The store. Default: as `fivefold runs`.")
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda, ...")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
def command(
    max_ranks: int,
    axes: str,
    steps: int,
    model: str,
    out: Path,
    records: Path | None,
    device: str,
    as_json: bool,
) -> int:
    """Train a small model on real text under every combination of the degrees of some axes: DP, TP and PP, or AXES.

    \b
      fivefold lab
      fivefold lab --model tiny-moe --axes cp,ep
      fivefold lab --model tiny-mla-moe --axes dp,pp,ep --max-ranks 4

    Each layout is shown to be the same model as one device (or not: exit code 1), measured, recorded, and drawn in
    OUT/report.html, which opens offline. The text is the source code of this Python installation. A model with experts
    is trained in float64, where rounding decides no token's experts.
    """
    from fivefold.catalog.models import resolve
    from fivefold.cli.output import print_json
    from fivefold.cli.process import tell

    spec = resolve(model)

    from fivefold.lab.grid import parse_axes
    from fivefold.lab.lab import Lab
    from fivefold.records.store import Store
    from fivefold.report.lab_report import summary_table

    with Store.open(records) as store:
        lab = Lab(
            spec, max_ranks=max_ranks, axes=parse_axes(axes), steps=steps, out=out, store=store, device=device
        )
        exact = ", in float64: rounding would choose experts" if lab.dtype == "float64" else ""
        tell(f"{len(lab.layouts)} layouts of {spec.name}, {steps} steps each, on {lab.device}{exact} ...")
        for layout, reason in lab.refused.items():
            tell(f"left out {layout}: {reason}")
        result = lab.run(tell)
    report = out / "report.html"
    if as_json:
        layouts = [
            {
                "layout": one.layout,
                "passed": one.passed,
                "tokens_per_s": one.tokens_per_s,
                "peak_memory_bytes": one.peak_bytes,
                "comm_frac": one.comm_frac,
                "max_rel_err": one.max_rel_err,
                "loss_max_rel_err": one.loss_max_rel_err,
                "events_match": one.events_match,
                "expert_imbalance": one.expert_imbalance,
                "rank_imbalance": one.rank_imbalance,
                "dispatch_bytes": max(one.dispatch_bytes, default=None),
                "error": one.reason,
            }
            for one in result.layouts
        ]
        print_json(
            {
                "passed": result.passed,
                "report": str(report),
                "load_at_start": result.load_at_start,
                "cores": result.machine.get("cores"),
                "doubtful_times": [one.layout for one in result.layouts if one.oversubscribed]
                + [one.layout for one in result.disturbed],
                "layouts": layouts,
                "left_out": lab.refused,
            }
        )
    else:
        from fivefold.cli.tables import make_console

        make_console().print(summary_table(result))
        click.echo(f"report: {report}")
    return 0 if result.passed else 1
