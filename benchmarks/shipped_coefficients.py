"""Make the shipped coefficients of step time anew: `python benchmarks/shipped_coefficients.py`.

Reads src/fivefold/estimate/beliefs.yaml and fitted_runs.jsonl beside it, writes coefficients.yaml.
"""

from __future__ import annotations

from pathlib import Path

from fivefold.plan.shipped import as_table, refit

HEAD = """\
# What fitted_runs.jsonl taught of the coefficients in beliefs.yaml; made by benchmarks/shipped_coefficients.py.
# name: all, a device family or a software era: [factor beside the believed value, standard deviation of its logarithm]
# A key that no run speaks of is not here: its factor is 1 and its spread the believed one.
# seen: device families and software eras of these runs
seen: [{seen}]
factors:
"""


def main() -> None:
    target = Path(__file__).parents[1] / "src" / "fivefold" / "estimate" / "coefficients.yaml"
    lines = []
    found = refit()
    for name, by_key in as_table(found).items():
        cells = [f"{key}: [{factor:g}, {spread:g}]" for key, (factor, spread) in by_key.items()]
        lines += [f"  {name}:", *(f"    {cell}" for cell in cells)]
    target.write_text(
        HEAD.format(seen=", ".join(sorted(found.seen))) + "\n".join(lines) + "\n", encoding="utf-8"
    )
    print(f"wrote {target}: {len(lines)} lines")


if __name__ == "__main__":
    main()
