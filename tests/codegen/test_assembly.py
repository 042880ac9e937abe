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
