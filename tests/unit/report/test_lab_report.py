"""The lab's report: one page that opens offline, whatever the layouts did."""

from __future__ import annotations

import errno
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from html_page import Page, check_alone, figures
from rich.console import Console

from fivefold.errors import ConfigError, RecordError
from fivefold.report.lab_report import (
    LabResult,
    LayoutResult,
    render,
    scientific,
    summary_table,
    verdict,
    write_report,
)

HOSTILE = (
    '</title></svg></style><script>alert(1)</script><img src="https://x.test/a" onerror=a> $\\frac{ & \x00'
)


DEGREES = ("dp", "tp", "pp", "cp", "ep")


def layout(text: str = "dp1", **changes: Any) -> LayoutResult:
    degrees = {axis: int((re.search(rf"{axis}(\d+)", text) or [0, 1])[1]) for axis in DEGREES}
    ranks = math.prod(degree for axis, degree in degrees.items() if axis != "ep")
    values: dict[str, Any] = {
        "layout": text,
        "ranks": ranks,
        **degrees,
        "passed": True,
        "microbatches": 4,
        "oversubscribed": ranks > 2,
        "tokens_per_s": 5000.0,
        "step_time_s": 0.1 * ranks,
        "cpu_time_s_per_step": 0.08,
        "cpu_s": (0.08 / ranks,) * ranks,
        "wall_s": (0.1 * ranks,) * ranks,
        "peak_memory_bytes": tuple(10_000_000 + 1000 * rank for rank in range(ranks)),
        "comm_frac": 0.1,
        "comm_s_by_axis": {"data": 0.011, "tp": 0.02} if ranks > 1 else {},
        "comm_bytes_by_axis": {"data": 1e6, "tp": 2e6} if ranks > 1 else {},
        "events_match": True,
        "max_rel_err": 3e-7 if ranks > 1 else 0.0,
        "loss_max_rel_err": 1e-7 if ranks > 1 else 0.0,
        "losses": tuple(5.0 - 0.01 * step + 1e-7 * ranks for step in range(30)),
        "bubble_frac": 0.25 if degrees["pp"] > 1 else None,
        "bubble_theory": 0.2 if degrees["pp"] > 1 else None,
    }
    return LayoutResult(**{**values, **changes})


def failed(text: str, error: str) -> LayoutResult:
    return LayoutResult(layout=text, ranks=2, passed=False, error=error)


def lab(*layouts: LayoutResult, **changes: Any) -> LabResult:
    values: dict[str, Any] = {
        "model": "tiny",
        "parameters": 1_310_000,
        "machine": {"cpu": "some cpu", "cores": 2, "memory": 8 * 2**30, "device": "cpu"},
        "steps": 30,
        "seq_len": 128,
        "global_batch": 8,
        "lr": 1e-3,
        "versions": {"torch": "2.13.0"},
        "date": "2026-01-02",
        "layouts": layouts,
    }
    return LabResult(**{**values, **changes})


GRID = tuple(layout(text) for text in ("dp1", "dp2", "tp2", "pp2", "dp2 tp2", "dp2 tp2 pp2"))


@pytest.fixture(scope="module")
def html() -> str:
    """The grid, and a layout that failed with a link in its error."""
    return render(lab(*GRID, failed("dp4", "see http://example.test/help")))


def test_every_layout_stands_in_the_table_and_in_every_figure_with_rows(html: str) -> None:
    page, drawn = Page(html), figures(html)
    assert "6 of 7 layouts are the same model as one device; not the same: dp4" in page.words
    assert list(drawn) == ["error", "loss", "throughput", "cpu", "memory", "communication", "bubble"]
    table = html[html.index("<tbody>") : html.index("</tbody>")]
    for text in (one.layout for one in (*GRID, failed("dp4", ""))):
        assert f"<code>{text}</code>" in table
        for name in ("error", "throughput", "cpu", "memory", "communication"):
            assert drawn[name].count(text) == 1
        assert drawn["bubble"].count(text) == ("pp2" in text)


def test_figures_hold_the_numbers(html: str) -> None:
    drawn = figures(html)
    assert drawn["throughput"].count("5 k · oversubscribed") == 2
    assert drawn["memory"].count("9.54 MiB · 1.00×") == 6
    assert drawn["communication"].count("2.86 MiB") == drawn["communication"].count("31 ms") == 5
    assert drawn["communication"].count("none") == 2
    assert drawn["bubble"].count("25% against 20% · p = 2, m = 4") == 2
    assert drawn["error"].count("3.0e-7") == 5


def test_the_page_stands_alone(html: str) -> None:
    check_alone(html, "http://example.test/help")  # plain text, not a link


def test_hostile_text_stays_text() -> None:
    bad = failed(HOSTILE, HOSTILE)
    also = layout("dp2", layout=HOSTILE, comm_bytes_by_axis={HOSTILE: 5.0}, comm_s_by_axis={HOSTILE: 1.0})
    page = Page(
        render(lab(bad, also, model=HOSTILE, machine={HOSTILE: HOSTILE}, versions={"torch": HOSTILE}))
    )
    assert page.count("script") == page.count("img") == 0
    assert "<script>alert(1)</script>" in page.words
    assert "$\\frac{" in page.words


def test_failed_layouts_show_their_error_and_do_not_break_the_plots() -> None:
    wrong = layout("tp2", passed=False, max_rel_err=3.0, events_match=False)
    result = lab(GRID[0], failed("dp2", "rank 1 failed first: out of memory"), wrong)
    page = Page(render(result))
    assert "1 of 3 layouts are the same model as one device; not the same: dp2, tp2" in page.words
    assert page.words.count("rank 1 failed first: out of memory") == 2  # on top and in the table
    assert (
        "first step differs: relative error 3, bound 1e-5; recorded communication is not what was"
        in page.words
    )
    assert "failed, no measurement" in page.words
    assert page.count("svg") == 6  # no pipeline


@pytest.mark.parametrize("layouts", [(layout("dp1"),), (layout("dp2 pp2"),), (failed("dp2", "boom"),), ()])
def test_few_layouts_render(layouts: tuple[LayoutResult, ...], tmp_path: Path) -> None:
    result = lab(*layouts)
    page = Page(write_report(result, tmp_path / "a" / "b").read_text(encoding="utf-8"))
    assert page.words.count(verdict(result)) == 2
    assert all(one.reason is None or one.reason in page.words for one in layouts)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_values_that_are_not_finite_render_and_are_named(value: float) -> None:
    losses = (5.0, 4.9, value, value)
    numbers = dict.fromkeys(("tokens_per_s", "step_time_s", "cpu_time_s_per_step", "comm_frac"), value)
    errors = dict.fromkeys(("max_rel_err", "loss_max_rel_err", "bubble_frac"), value)
    lost = layout("dp2 pp2", passed=False, losses=losses, cpu_s=(value,) * 4, **numbers, **errors)
    page = Page(render(lab(GRID[0], lost)))
    assert "Not finite: dp2 pp2 from step 3." in page.words
    assert f"relative error {'NaN' if math.isnan(value) else 'infinite'}, bound 1e-5" in page.words


def test_all_losses_nan_leaves_the_loss_plot_out() -> None:
    page = Page(render(lab(layout("dp1", losses=(math.nan,) * 3))))
    assert "Do they learn the same?" not in page.words


def test_oversubscribed_is_said_only_where_it_is_true(html: str) -> None:
    assert "oversubscribed" not in Page(render(lab(GRID[1]))).words.lower()
    words = Page(html).words
    assert "2 of 7 layouts have more ranks than this machine has cores (2)" in words
    assert words.count("Not comparable:") == 4


def test_two_renders_of_one_result_are_equal() -> None:
    assert render(lab(GRID[3])) == render(lab(GRID[3]))


def test_lab_json_is_strict_json_and_comes_back_equal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fivefold.report.plots.draw_all", lambda _: {})
    result = lab(*GRID, layout("dp4", losses=(1.0, math.nan, math.inf), max_rel_err=math.nan, passed=False))
    write_report(result, tmp_path)

    def refuse(token: str) -> None:
        raise AssertionError(f"not JSON: {token}")

    data = json.loads((tmp_path / "lab.json").read_text(encoding="utf-8"), parse_constant=refuse)
    back = LabResult.read(data, where="lab.json")
    assert back.model_dump_json() == result.model_dump_json()
    assert back.layouts[:-1] == result.layouts[:-1]
    assert math.isnan(back.layouts[-1].losses[1])
    assert back.layouts[-1].losses[2] == math.inf


def test_unknown_key_of_lab_json_names_the_nearest() -> None:
    data = {**lab().model_dump(mode="json"), "stepz": 3}
    with pytest.raises(ConfigError, match=r"unknown key 'stepz'.*'steps'"):
        LabResult.read(data, where="lab.json")


def test_full_disk_gives_one_line_and_keeps_the_old_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = write_report(lab(), tmp_path).read_bytes()

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(RecordError, match=r"No space left on device; [\d.]+ [KM]iB are needed$") as caught:
        write_report(lab(date="later"), tmp_path)
    assert "\n" not in str(caught.value)
    assert (tmp_path / "report.html").read_bytes() == old
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lab.json", "report.html"]


def test_folder_that_is_a_file_gives_one_line(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(RecordError, match=r"cannot write the report to .*taken: File exists"):
        write_report(lab(), tmp_path / "taken")


def terminal(result: LabResult, width: int = 80) -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(summary_table(result))
    return console.export_text()


def test_summary_table_fits_80_columns_without_cutting_a_number() -> None:
    text = terminal(lab(*GRID))
    assert "…" not in text
    row = next(line for line in text.splitlines() if line.startswith("dp2 tp2 pp2"))
    assert " ".join(row.split()) == "dp2 tp2 pp2 8 * yes 3.0e-7 5 k 800 ms 80 ms 9.54 MiB 10% 25%"
    assert "oversubscribed" in text


def test_summary_table_says_why_and_takes_no_markup() -> None:
    text = terminal(lab(GRID[0], failed("[red]x", "[bold]boom\x1b[2J\nnext")), width=200)
    assert "[red]x: [bold]boom [2J next" in text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (3.14e-7, "3.1e-7"),
        (1e-5, "1.0e-5"),
        (0.5, "0.5"),
        (3.0, "3"),
        (100.0, "100"),
        (2e10, "2.0e10"),
    ],
)
def test_scientific(value: float, text: str) -> None:
    assert scientific(value) == text


def test_worst_error_lets_nan_win() -> None:
    assert layout("dp2", max_rel_err=1e-7, loss_max_rel_err=2e-7).worst_err == 2e-7
    assert math.isnan(layout("dp2", max_rel_err=math.inf, loss_max_rel_err=math.nan).worst_err or 0)
    assert failed("dp2", "x").worst_err is None


def test_a_busy_machine_makes_times_doubtful() -> None:
    """On 2 cores beside one other process: dp1 has a core of its own, two ranks do not, four are marked anyway."""
    busy = lab(layout("dp1"), layout("dp2"), layout("dp2 tp2"), load_at_start=0.9)
    assert [one.layout for one in busy.disturbed] == ["dp2"]
    page = Page(render(busy)).words
    assert "load 0.90 in the minute before, 2 cores, up to 4 ranks" in page
    assert "Doubtful times: the machine was busy when the lab began" in page
    console = Console(width=120, record=True)
    console.print(summary_table(busy))
    text = console.export_text()
    assert "2 ~" in text
    assert "4 *" in text
    assert "~ doubtful times" in text
    assert LabResult.model_validate_json(busy.model_dump_json()).disturbed == busy.disturbed


@pytest.mark.parametrize("load", [None, 0.0, 0.4])
def test_an_idle_machine_is_only_mentioned(load: float | None) -> None:
    idle = lab(layout("dp1"), layout("dp2"), load_at_start=load)
    assert idle.disturbed == ()
    assert "Doubtful" not in Page(render(idle)).words
    console = Console(width=120, record=True)
    console.print(summary_table(idle))
    assert (
        f"load {'–' if load is None else f'{load:.2f}'} in the minute before, 2 cores"
        in console.export_text()
    )


def test_experts_have_a_figure_and_columns_where_there_are_any(html: str) -> None:
    assert "imbalance" not in html
    routed = {"expert_imbalance": 2.25}
    shared = {**routed, "rank_imbalance": 1.5, "dispatch_bytes": (1024.0, 4096.0)}
    result = lab(
        layout("dp1", **routed),
        layout("dp2 ep2", **shared),
        layout("cp2 ep2", **shared),
        layout("cp2", **routed),
        layout("dp2 cp2:ring_ulysses ep4", **routed),
    )
    page = render(result)
    check_alone(page)
    drawn = figures(page)["experts"]
    assert (drawn.count("1.50"), drawn.count("4 KiB"), drawn.count("none")) == (2, 2, 3)
    words = Page(page).words
    assert "ep cuts the experts," in words
    assert "cp cuts the sequence." in words
    assert "2.25 (1.50) 4 KiB yes" in words
    assert {"ep dp", "dp ep", "cp ep", "cp"} & set(figures(page)["loss"]) == {"dp ep", "cp ep", "cp"}
    assert "bubble" not in page.partition("<tbody>")[0].rpartition("<thead>")[2]  # without any pipeline
    narrow = terminal(result)
    assert "1.50 4 KiB" in " ".join(narrow.split())
    assert "…" not in narrow
    assert "dp2 cp2:ring_ulysses ep4" in terminal(result, width=120)


def test_a_lab_in_float64_has_its_own_bound() -> None:
    wrong = layout("dp2 ep2", passed=False, bound=1e-10, max_rel_err=1e-8)
    page = render(lab(GRID[0], wrong, dtype="float64", bound=1e-10))
    words = Page(page).words
    assert "first step differs: relative error 1.0e-8, bound 1e-10" in words
    assert "stay within 1e-10 of one device" in words
    assert "bound 1e-10" in figures(page)["error"]
    assert "lr 0.001, float64" in words
