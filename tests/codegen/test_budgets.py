"""A figure that got worse fails with the kernel's name, and nothing else does."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from stackkit import budgets, pins
from stackkit.assembly import Figures
from stackkit.budgets import Cell
from stackkit.codegen import budgets_file, page
from stackkit.errors import StackError

ROOT = Path(__file__).resolve().parent.parent.parent

FIGURES = Figures(
    vgpr=100,
    agpr=0,
    sgpr=50,
    lds=16384,
    spills=0,
    sgpr_spills=0,
    scratch=0,
    waves=4,
    instructions=1000,
    to_fp8=2,
    from_fp8=4,
    loads={1: 8, 16: 2},
    mfma={"f32_16x16x16_bf16": 8},
    code="0123456789ab",
)
CELL = Cell("vllm.ops", "_kernel", "C4", "gfx942", "3.9.0", FIGURES, "")
ON_950 = dataclasses.replace(CELL, arch="gfx950")
WRITTEN = {
    "limits": {"lds": 65536, "spills": 0, "scratch": 0},
    "tolerance": {"vgpr": 8, "instructions_percent": 2},
    "triton": ["3.9.0"],
    "hardware_conversions": [],
    "allowed_spills": [],
    "expected_failures": [],
    "gfx950_changes": [],
    "not_launched": [],
}


def budget(**written) -> budgets.Budgets:
    """Budgets that record CELL and ON_950 as they are."""
    empty = budgets.Budgets(Path("x.json"), {**WRITTEN, **written, "kernels": {}})
    return budgets.record(empty, [CELL, ON_950], {ON_950.key: FIGURES.code})


def problems(changed: Cell, **written) -> list[str]:
    other = ON_950 if changed.arch == CELL.arch else CELL
    found = budgets.judge(budget(**written), [changed, other])
    return [f"{item.cell}: {item.what}" for item in found if item.problem]


def with_figures(cell: Cell = CELL, **changes) -> Cell:
    assert cell.figures is not None
    figures = dataclasses.replace(cell.figures, **changes)
    return dataclasses.replace(cell, figures=figures)


def failed(error: str, cell: Cell = CELL) -> Cell:
    return dataclasses.replace(cell, figures=None, error=error)


def test_what_is_recorded_passes():
    assert problems(CELL) == []


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"vgpr": 109}, "vgpr 109, recorded 100"),
        ({"instructions": 1021}, "instructions 1021, recorded 1000"),
        ({"agpr": 1}, "agpr 1, recorded 0"),
        ({"lds": 16385}, "lds 16385, recorded 16384"),
        ({"sgpr_spills": 1}, "sgpr_spills 1, recorded 0"),
        ({"waves": 3}, "waves 3, recorded 4"),
        ({"to_fp8": 1}, "to_fp8 1, recorded 2"),
        ({"from_fp8": 3}, "from_fp8 3, recorded 4"),
        ({"loads": {1: 9, 16: 2}}, "9 loads of one byte, recorded 8"),
        ({"mfma": {}}, "mfma none, recorded f32_16x16x16_bf16"),
    ],
)
def test_one_worse_figure_fails_with_the_kernels_name(change, told):
    [found] = problems(with_figures(**change))
    assert found == f"_kernel (C4), gfx942, Triton 3.9.0: {told}"


@pytest.mark.parametrize(
    "change", [{"vgpr": 108}, {"instructions": 1020}, {"sgpr": 90}, {"code": "other"}]
)
def test_within_tolerance_passes(change):
    assert problems(with_figures(**change)) == []


def test_a_better_figure_is_only_remarked():
    found = budgets.judge(budget(), [with_figures(vgpr=50, waves=8), ON_950])
    assert [(item.what, item.problem) for item in found] == [
        ("vgpr 50 is better than the recorded 100", False),
        ("waves 8 is better than the recorded 4", False),
    ]


@pytest.mark.parametrize(
    ("change", "limit"),
    [({"spills": 1}, 0), ({"scratch": 4}, 0), ({"lds": 65537}, 65536)],
)
def test_a_limit_holds_even_if_the_record_is_over_it(change, limit):
    cell = with_figures(**change)
    recorded = budgets.record(budget(), [cell, ON_950], {})
    [found] = budgets.judge(recorded, [cell, ON_950])
    [(name, value)] = change.items()
    assert found.what == f"{name} {value}, the limit is {limit}"


def test_spills_that_have_a_reason_are_allowed_where_it_says():
    entry = {"kernel": "_kernel", "variant": "C4", "reason": "x"}
    cell = with_figures(spills=1)
    recorded = budgets.record(budget(allowed_spills=[entry]), [cell, ON_950], {})
    assert budgets.judge(recorded, [cell, ON_950]) == []
    entry["variant"] = "C128"
    found = budgets.judge(recorded, [cell, ON_950], whole=False)
    assert [item.what for item in found] == ["spills 1, the limit is 0"]


def test_hardware_conversions_are_demanded_where_the_dialect_has_them():
    entry = {"kernel": "_kernel", "arch": "gfx942", "to_fp8": 3, "reason": "x"}
    [found] = problems(CELL, hardware_conversions=[entry])
    assert found.endswith(
        "gfx942, Triton 3.9.0: to_fp8 2, at least 3 must be in hardware"
    )


def test_an_entry_for_a_kernel_that_is_gone_fails():
    entry = {"kernel": "_kernel", "arch": "gfx90a", "from_fp8": 4, "reason": "x"}
    found = budget(hardware_conversions=[entry])
    assert [f"{f.cell}: {f.what}" for f in budgets.judge(found, [CELL, ON_950])] == [
        "`_kernel`, gfx90a: hardware_conversions: it is not compiled; take it off"
    ]
    assert budgets.judge(found, [CELL, ON_950], whole=False) == []


def test_a_kernel_that_does_not_compile_fails():
    [found] = problems(failed("error: unknown asm constraint 'f'"))
    assert "does not compile: error: unknown asm constraint 'f'" in found


def test_an_expected_failure_passes_and_must_fail_as_expected():
    entry = {"kernel": "_kernel", "arch": "gfx942", "error": "asm", "reason": "x"}
    assert problems(failed("unknown asm"), expected_failures=[entry]) == []
    [found] = problems(failed("out of memory"), expected_failures=[entry])
    assert "fails, but not by 'asm': out of memory" in found
    [found] = problems(CELL, expected_failures=[entry])
    assert "compiles now: take it off expected_failures" in found


def test_changed_code_fails_on_gfx950():
    changed = with_figures(ON_950, code="ba9876543210")
    [found] = problems(changed)
    assert found == (
        "_kernel (C4), gfx950, Triton 3.9.0: its code is not that of the release "
        "without patches"
    )
    entry = {"kernel": "_kernel", "reason": "x"}
    assert problems(changed, gfx950_changes=[entry]) == []


def test_a_kernel_that_came_or_went_fails():
    new = dataclasses.replace(CELL, variant="C128")
    found = budgets.judge(budget(), [CELL, ON_950, new])
    assert [item.what for item in found] == ["is not recorded"]
    found = budgets.judge(budget(), [CELL])
    assert [(item.cell, item.what) for item in found] == [
        ("_kernel (C4), gfx950, Triton 3.9.0", "is recorded, but nothing launched it")
    ]
    assert budgets.judge(budget(), [CELL], whole=False) == []


def test_the_file_comes_back_as_it_was(tmp_path):
    whole = budget(allowed_spills=[{"kernel": "_kernel", "reason": "x"}])
    path = tmp_path / "v1.json"
    path.write_text(budgets.text(whole))
    again = budgets.load(path)
    assert again.data == whole.data
    assert budgets.text(again) == path.read_text()


def test_the_file_does_not_depend_on_the_order_of_compilation():
    empty = budgets.Budgets(Path("x.json"), {**WRITTEN, "kernels": {}})
    one = budgets.record(empty, [CELL, ON_950], {})
    two = budgets.record(empty, [ON_950, CELL], {})
    assert budgets.text(one) == budgets.text(two)


@pytest.mark.parametrize(
    ("edit", "told"),
    [
        (lambda data: data.pop("limits"), "limits must be a dict"),
        (lambda data: data.update(extra=1), "unknown key 'extra'"),
        (
            lambda data: data.update(allowed_spills=[{"kernel": "_kernel"}]),
            "allowed_spills: an entry lacks its reason",
        ),
    ],
)
def test_a_damaged_file_is_refused(tmp_path, edit, told):
    data = budget().data
    edit(data)
    path = tmp_path / "v1.json"
    path.write_text(json.dumps(data))
    with pytest.raises(StackError, match=told):
        budgets.load(path)


def test_the_page_shows_figures_and_failures():
    cells = [with_figures(spills=3, scratch=16, agpr=4), failed("error: x", ON_950)]
    text = budgets.table(budgets.record(budget(), cells, {}), "v1")
    assert (
        "| C4 | gfx942 | 3.9.0 | 100 (4 AGPR), 3 spilled, 16 B scratch | 50 | 16384 "
        "| 4 | 1000 | 8x1 2x16 | 2 | 4 | 8 f32_16x16x16_bf16 |" in text
    )
    assert "| C4 | gfx950 | 3.9.0 | does not compile |" in text


def test_the_page_of_the_docs_is_what_the_file_says():
    project = pins.load(ROOT)
    pin = project.pin(None)
    found = budgets.load(budgets_file(project, pin))
    assert page(project).read_text("utf-8") == budgets.table(found, pin.release)
    assert found.path.read_text("utf-8") == budgets.text(found)
