"""No reader or writer of a DeepSeek-V4 cache names an FP8 dialect by itself.

The table in vllm/v1/attention/ops/fp8_dialect.py (and its C++ copy) is the only place
with a type, a maximum or a question to the platform; comments and docstrings are free.
"""

from __future__ import annotations

import re
import tokenize
from pathlib import Path

import pytest

NAMES = {
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8e4nv",
    "float8e4b8",
    "float8e4b15",
    "fp8_dtype",
    "is_fp8_fnuz",
    "get_fp8_min_max",
    "finfo",
}
MAXIMA = {448.0, 240.0, 224.0}

PYTHON = (
    "vllm/models/deepseek_v4",
    "vllm/model_executor/layers/sparse_attn_indexer.py",
    "vllm/v1/attention/backends/mla/indexer.py",
    "vllm/v1/attention/backends/mla/rocm_aiter_mla_sparse.py",
    "vllm/v1/attention/backends/mla/sparse_swa.py",
    "vllm/v1/attention/ops/rocm_aiter_mla_sparse.py",
    "vllm/v1/attention/ops/triton_mqa_logits.py",
)
CPP = "csrc/fused_deepseek_v4_qnorm_rope_kv_insert_kernel.cu"

# What may stay: (file, what is named), and why.
ALLOWED = {
    (
        "vllm/models/deepseek_v4/common/ops/fused_inv_rope_fp8_quant.py",
        "float8_e4m3fn",
    ): "activations for the CUDA GEMM, no cache; ROCm takes rocm_inv_rope_einsum",
    (
        "vllm/models/deepseek_v4/common/ops/fused_inv_rope_fp8_quant.py",
        "float8e4nv",
    ): "the same kernel",
    (
        "vllm/models/deepseek_v4/common/ops/fused_inv_rope_fp8_quant.py",
        "finfo",
    ): "the maximum of its own type",
    (
        "vllm/model_executor/layers/sparse_attn_indexer.py",
        "fp8_dtype",
    ): "the op of CUDA; ROCm has rocm_aiter_sparse_attn_indexer",
    (
        "vllm/v1/attention/backends/mla/rocm_aiter_mla_sparse.py",
        "fp8_dtype",
    ): "the MLA cache of DeepSeek-V3.2, which this model does not have",
}


def named(path: Path) -> set[str]:
    """What of NAMES and MAXIMA the code of a Python file uses.

    A local variable may be called fp8_dtype: only the platform's method counts.
    """
    found = set()
    with open(path, "rb") as stream:
        before = ""
        for token in tokenize.tokenize(stream.readline):
            text = token.string
            if token.type == tokenize.NAME and text in NAMES:
                if text != "fp8_dtype" or before == ".":
                    found.add(text)
            elif token.type == tokenize.NUMBER and "." in text:
                if float(text) in MAXIMA:
                    found.add(text)
            if token.type not in (tokenize.NL, tokenize.COMMENT):
                before = text
    return found


def files(tree: Path) -> list[Path]:
    """The files of this model that are imported on ROCm."""
    found = []
    for name in PYTHON:
        path = tree / name
        found += [path] if path.is_file() else sorted(path.rglob("*.py"))
    return [path for path in found if "nvidia" not in path.relative_to(tree).parts]


def test_only_the_table_names_a_dialect(tree):
    uses = {
        (str(path.relative_to(tree.path)), name)
        for path in files(tree.path)
        for name in named(path)
    }
    assert uses - ALLOWED.keys() == set()
    assert ALLOWED.keys() - uses == set(), "these are gone: shorten ALLOWED"


def test_cpp_writer_takes_the_maximum_from_its_header(tree):
    source = (tree.path / CPP).read_text()
    code = re.sub(r"/\*.*?\*/|//[^\n]*", "", source, flags=re.S)
    assert not re.search(r"\b(448|240|224)\.0", code)
    assert '#include "deepseek_v4_fp8_dialect.cuh"' in code


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x = x.to(tl.float8e4nv)", {"float8e4nv"}),
        ("scale = amax / 448.0", {"448.0"}),
        ("t = current_platform.fp8_dtype()", {"fp8_dtype"}),
        ("fp8_dtype = dialect.torch_dtype  # not float8_e4m3fn, 448.0", set()),
        ('"""448.0 and float8e4nv"""\nNOPE_DIM = 448', set()),
    ],
)
def test_the_scan_sees_code_and_nothing_else(tmp_path, text, expected):
    path = tmp_path / "x.py"
    path.write_text(text + "\n")
    assert named(path) == expected
