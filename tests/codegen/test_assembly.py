"""Figures are read from assembly as LLVM 22 and Triton 3.9.0 print it."""

from __future__ import annotations

import pytest
from stackkit import assembly
from stackkit.errors import StackError

KERNEL = """\
	.text
	.globl	kernel                          ; -- Begin function kernel
kernel:                                 ; @kernel
	s_load_dwordx2 s[2:3], s[0:1], 0x0
	global_load_dwordx4 v[2:5], v0, s[2:3]
	global_load_ubyte v6, v0, s[2:3]        ; a comment
	buffer_load_ubyte v7, v0, s[4:7], 0 offen
	buffer_load_ushort v8, v0, s[4:7], 0 offen
	buffer_load_dwordx2 v[8:9], v0, s[4:7], 0 offen
	flat_load_sbyte_d16_hi v9, v[0:1]
	ds_read_b128 v[10:13], v1
	v_cvt_pk_f32_fp8_sdwa v[2:3], v2 src0_sel:WORD_1
	v_cvt_pk_f32_fp8_e32 v[4:5], v2
	v_cvt_scalef32_pk_bf16_fp8 v1, v2, v3
	v_cvt_pk_fp8_f32 v1, v2, v3
	v_cvt_f32_f16_e32 v1, v2
	v_mfma_f32_16x16x16_bf16 v[0:3], v[4:5], v[6:7], v[0:3]
	v_mfma_f32_16x16x16_bf16 v[0:3], v[4:5], v[6:7], v[0:3]
	s_endpgm
.Lfunc_end0:
; Occupancy: 2
	.amdgpu_metadata
amdhsa.kernels:
  - .agpr_count:     4
    .private_segment_fixed_size: 0
    .sgpr_count:     18
    .sgpr_spill_count: 3
    .vgpr_count:     192
    .vgpr_spill_count: 1
	.end_amdgpu_metadata
"""


def test_figures_of_a_kernel():
    figures = assembly.figures(KERNEL, lds=16384)
    registers = (figures.vgpr, figures.agpr, figures.sgpr, figures.waves)
    assert registers == (192, 4, 18, 2)
    assert (figures.lds, figures.scratch) == (16384, 0)
    assert (figures.spills, figures.sgpr_spills) == (1, 3)
    assert figures.instructions == 16
    assert figures.loads == {1: 3, 2: 1, 8: 1, 16: 1}
    assert (figures.to_fp8, figures.from_fp8) == (1, 3)
    assert figures.mfma == {"f32_16x16x16_bf16": 2}


@pytest.mark.parametrize("lacking", ["vgpr_count", "Occupancy", "vgpr_spill_count"])
def test_a_text_without_the_compilers_remarks_is_refused(lacking):
    with pytest.raises(StackError, match="does not tell"):
        assembly.figures(KERNEL.replace(lacking, "other"), lds=0)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("; a comment", "; another"),
        ("\ts_endpgm", '\t.loc 1 2 3\n\t.file "elsewhere.py"\n\ts_endpgm'),
        ("\ts_endpgm", "\ts_endpgm   ; /some/folder/kernel.py:12"),
    ],
)
def test_code_id_does_not_see_comments_and_lines(old, new):
    assert old in KERNEL
    assert assembly.code_id(KERNEL.replace(old, new)) == assembly.code_id(KERNEL)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("src0_sel:WORD_1", "src0_sel:WORD_0"),
        ("v_cvt_pk_fp8_f32 v1, v2, v3", "v_cvt_pk_fp8_f32 v1, v2, v4"),
        (".sgpr_count:     18", ".sgpr_count:     19"),
    ],
)
def test_code_id_sees_one_changed_operand(old, new):
    assert old in KERNEL
    assert assembly.code_id(KERNEL.replace(old, new)) != assembly.code_id(KERNEL)


def code(*lines: str) -> str:
    """A kernel of these labels and instructions."""
    shown = (line if line.startswith(".") else f"\t{line}" for line in lines)
    return "kernel:\n" + "\n".join(shown) + "\n.Lfunc_end0:\n\ts_nop 0\n"


def counts(text: str) -> list[tuple[str, int, bool, int]]:
    return [
        (loop.header, loop.depth, loop.has_inner, len(loop.instructions))
        for loop in assembly.loops(text)
    ]


PLAIN = code(
    "s_load_dword s0, s[0:1], 0x0",
    ".LBB0_1:                                ; =>This Inner Loop Header: Depth=1",
    "global_load_dwordx4 v[0:3], v4, s[2:3]",
    "v_mfma_f32_16x16x16_bf16 v[0:3], v[4:5], v[6:7], v[0:3]",
    "v_cvt_pk_f32_fp8_e32 v[4:5], v2",
    "ds_read_b128 v[10:13], v1               ; v_add_u32 in a comment",
    "scratch_load_dword v9, off, s4",
    "s_cbranch_scc1 .LBB0_1",
    "v_mov_b32_e32 v0, 0",
    "s_endpgm",
)


def test_a_loop_is_what_lies_between_its_header_and_the_jump_back():
    (loop,) = assembly.loops(PLAIN)
    assert (loop.header, loop.depth, loop.has_inner) == (".LBB0_1", 1, False)
    assert loop.classes() == {
        "LDS": 1, "MFMA": 1, "convert": 1, "load": 1, "scalar": 1, "spill": 1,
    }  # fmt: skip


def test_code_without_a_jump_back_has_no_loop():
    assert assembly.loops(PLAIN.replace("scc1 .LBB0_1", "scc1 .LBB0_2").replace(
        "\tv_mov", ".LBB0_2:\n\tv_mov")) == []  # fmt: skip


def test_a_part_under_a_mask_is_counted_and_of_two_branches_the_longer():
    text = code(
        ".LBB0_1:",
        "s_and_saveexec_b64 s[0:1], vcc",
        "s_cbranch_execz .LBB0_2",
        "global_load_ubyte v0, v1, s[2:3]",  # under a mask
        ".LBB0_2:",
        "s_cbranch_scc1 .LBB0_3",
        "v_add_u32 v0, v0, v1",
        "v_add_u32 v0, v0, v1",
        "s_branch .LBB0_4",
        ".LBB0_3:",
        "v_add_u32 v0, v0, v1",
        ".LBB0_4:",
        "s_cbranch_scc0 .LBB0_1",
        "s_endpgm",
    )
    assert counts(text) == [(".LBB0_1", 1, False, 3 + 1 + 3 + 1)]


def test_the_block_that_jumps_back_may_lie_before_the_header():
    text = code(
        "s_branch .LBB0_2",
        ".LBB0_1:",
        "v_add_u32 v0, v0, v1",
        "s_cbranch_scc0 .LBB0_3",
        ".LBB0_2:",
        "v_mul_f32 v0, v0, v1",
        "v_mul_f32 v0, v0, v1",
        "s_branch .LBB0_1",
        ".LBB0_3:",
        "s_endpgm",
    )
    assert counts(text) == [(".LBB0_2", 1, False, 5)]


def test_an_inner_loop_is_not_counted_with_the_outer_one():
    text = code(
        ".LBB0_1:",
        "v_add_u32 v0, v0, v1",
        ".LBB0_2:",
        "v_mul_f32 v0, v0, v1",
        "v_mul_f32 v0, v0, v1",
        "s_cbranch_scc0 .LBB0_2",
        "v_add_u32 v0, v0, v1",
        "s_cbranch_scc1 .LBB0_1",
        ".LBB0_3:",
        "v_mul_f32 v0, v0, v1",
        "s_cbranch_scc1 .LBB0_3",
        "s_endpgm",
    )
    assert counts(text) == [
        (".LBB0_1", 1, True, 3),
        (".LBB0_2", 2, False, 3),
        (".LBB0_3", 1, False, 2),
    ]


def test_an_iteration_of_an_unrolled_loop_is_all_of_its_tiles():
    twice = PLAIN.replace(
        "\tds_read", "\tv_mfma_f32_16x16x16_bf16 v0, v1, v2, v3\n\tds_read"
    )
    (loop,) = assembly.loops(twice)
    assert loop.classes()["MFMA"] == 2


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ("s_cbranch_scc1 .LBB0_1", "s_setpc_b64 s[30:31]", "does not tell where"),
        ("s_cbranch_scc1 .LBB0_1", "s_cbranch_scc1 .LBB0_9", "not in the text"),
        (
            "\tv_cvt_pk",
            ".LBB0_2:\n\tv_cvt_pk",
            "into the middle of a loop",
        ),
    ],
)
def test_code_whose_loops_cannot_be_told_is_refused(old, new, what):
    text = PLAIN.replace(old, new)
    if "middle" in what:
        text = text.replace("\ts_load", "\ts_cbranch_scc0 .LBB0_2\n\ts_load")
    with pytest.raises(StackError, match=what):
        assembly.loops(text)


@pytest.mark.parametrize(
    ("waves", "lds", "num_warps", "expected"),
    [
        (2, 0, 8, 2),  # registers alone: one workgroup of 8
        (2, 65536, 8, 2),
        (4, 65536, 8, 2),  # LDS for one workgroup
        (2, 32769, 4, 1),
        (1, 16384, 2, 1),
        (3, 16384, 8, 2),  # half a workgroup does not fit
        (8, 65536, 2, 0.5),  # two SIMDs have nothing
    ],
)
def test_waves_that_fit_by_registers_and_lds(waves, lds, num_warps, expected):
    text = KERNEL.replace("Occupancy: 2", f"Occupancy: {waves}")
    figures = assembly.figures(text, lds=lds)
    assert assembly.waves_per_simd(figures, num_warps) == expected
