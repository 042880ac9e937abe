"""bench/instructions.py: what a key costs, and the tables that the docs have of it."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "bench"))
import instructions  # noqa: E402
import ogs_tiles  # noqa: E402

RESULT = max((ROOT / "bench" / "results").glob("instructions-gfx942-*.json"))
TILES = max((ROOT / "bench" / "results").glob("ogs-tiles-gfx942-*.json"))
PRODUCT = "\tv_mfma_f32_16x16x16_bf16 v[0:3], v[4:5], v[6:7], v[0:3]\n"
LOOP = f".LBB0_1:\n{PRODUCT}{PRODUCT}\tv_add_u32 v0, v0, v1\n\ts_cbranch_scc1 .LBB0_1\n"
END = "\ts_endpgm\n.Lfunc_end0:\n"
TOLD = {
    "kernel": "_sparse_prefill_kernel",
    "heads": 64,
    "block_h": 16,
    "block_k": 32,
    "num_warps": 4,
}


def test_a_key_costs_what_all_waves_of_all_heads_issue_for_it():
    (loop,) = instructions.key_loops(LOOP + END, TOLD)
    assert loop["iteration"] == {"MFMA": 2, "VALU": 1, "scalar": 1}
    # 4 programs of 4 waves visit it, and an iteration has 32 keys.
    assert loop["per_key"] == {"MFMA": 1.0, "VALU": 0.5, "scalar": 0.5}


def test_few_heads_cost_a_key_as_much_as_a_full_block():
    (loop,) = instructions.key_loops(LOOP + END, TOLD | {"heads": 8})
    (full,) = instructions.key_loops(LOOP + END, TOLD | {"heads": 16})
    assert loop == full


def test_products_tell_how_often_each_is_computed():
    # 4 waves of 128 products of 16 x 16 x 16 are 4 x 16 heads x 32 keys x 512 lanes.
    once = LOOP.replace(PRODUCT, PRODUCT * 16)
    assert instructions.key_loops(once + END, TOLD)[0]["products"] == 1.0
    assert instructions.product("v_mfma_f32_32x32x8_bf16") == 2 * 32 * 32 * 8
    assert instructions.product("v_add_u32") == 0


def test_a_loop_without_products_is_none_over_keys():
    other = ".LBB0_2:\n\tv_add_u32 v0, v0, v1\n\ts_cbranch_scc1 .LBB0_2\n"
    assert len(instructions.key_loops(LOOP + other + END, TOLD)) == 1


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (END, "0 loops over keys"),
        (LOOP + LOOP.replace("LBB0_1", "LBB0_2") + END, "2 loops over keys"),
        (
            LOOP.replace(
                "\tv_add",
                ".LBB0_2:\n\tv_mov_b32 v0, v1\n\ts_cbranch_scc0 .LBB0_2\n\tv_add",
            )
            + END,
            "a loop is in the one over keys",
        ),
    ],
)
def test_other_loops_than_the_kernel_has_are_refused(text, what):
    with pytest.raises(SystemExit, match=what):
        instructions.key_loops(text, TOLD)


@pytest.mark.parametrize("what", ["decode", "prefill"])
def test_the_tables_of_the_docs_are_those_of_the_result(what):
    page = (ROOT / "docs" / "concerns" / f"sparse-{what}.md").read_text("utf-8")
    assert RESULT.name in page
    for line in instructions.table(json.loads(RESULT.read_text("utf-8")), what):
        assert line in page.splitlines()


def test_the_table_of_the_experts_tiles_is_that_of_the_result():
    page = (ROOT / "docs" / "concerns" / "mxfp4-ogs-tiles.md").read_text("utf-8")
    assert TILES.name in page
    result = json.loads(TILES.read_text("utf-8"))
    assert {tuple(row[key] for key in ogs_tiles.KEYS) for row in result["rows"]} == {
        tile or (64, 256, 128, 1) for tile in ogs_tiles.TILES
    }
    for line in ogs_tiles.table(result):
        assert line in page.splitlines()


def test_the_result_is_of_the_kernels_that_the_patches_have():
    patches = ROOT / "patches" / "v0.22.0"
    last = ""
    for name in (patches / "series").read_text("utf-8").splitlines():
        if name.startswith("#"):
            continue
        text = (patches / name).read_text("utf-8")
        found = re.search(
            rf"^diff --git a/\S+/{instructions.PATCHED} .*\n(?:new file .*\n)?"
            r"index \w+\.\.(\w{40})",
            text,
            re.MULTILINE,
        )
        last = found[1] if found else last
    result = json.loads(RESULT.read_text("utf-8"))
    assert result["patched"] == {instructions.PATCHED: last}
