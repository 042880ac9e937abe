"""Modules in the place of packages that a kernel's caller wants and nobody has."""

import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import triton
import triton.language as tl

_ROOTS = ("triton_kernels", "vllm.third_party.triton_kernels")
_DETAILS = "tensor_details.bitmatrix"
_SUMS = f"{_DETAILS}_details.sum_bitmatrix_rows"


@triton.jit
def _keyed_add(x, y):
    """Add the low halves of two words if their high halves are the same."""
    key = y & 0xFFFF0000
    return tl.where((x & 0xFFFF0000) == key, x + y - key, y)


class _NoKernel:
    """A kernel that is another package's, so not compiled here."""

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *args, **kwargs: None


@contextmanager
def triton_kernels(
    sums: torch.Tensor, partial: torch.Tensor
) -> Iterator[Callable[[], Callable]]:
    """What `_patch_make_bitmatrix_metadata` imports, of triton_kernels >= 3.6.

    Args:
        sums, partial: What counting the experts' tokens returns.

    Yields:
        Returns the function that was put into triton_kernels.
    """
    modules = {}
    for root in _ROOTS:
        for name in ("", "tensor", "tensor_details", _DETAILS, _DETAILS + "_details",
                     _SUMS):  # fmt: skip
            full = f"{root}.{name}".rstrip(".")
            modules[full] = types.ModuleType(full)
        for full, module in modules.items():
            parent, _, child = full.rpartition(".")
            if parent in modules:
                setattr(modules[parent], child, module)
        bitmatrix = modules[f"{root}.{_DETAILS}"]
        bitmatrix.BitmatrixMetadata = dict
        bitmatrix._keyed_add = _keyed_add
        bitmatrix.cdiv = triton.cdiv
        bitmatrix._bitmatrix_metadata_compute_stage1 = _NoKernel()
        rows = modules[f"{root}.{_SUMS}"]
        rows.sum_bitmatrix_rows = lambda bitmatrix, **kwargs: (sums, partial)
        # Whose globals get the function, so that they must be its own.
        post_init = types.FunctionType((lambda self: None).__code__, {})
        matrix = type("SparseMatrix", (), {"__post_init__": post_init})
        modules[f"{root}.tensor"].SparseMatrix = matrix
    with mock.patch.dict(sys.modules, modules):
        patched = modules["triton_kernels.tensor"].SparseMatrix.__post_init__
        yield lambda: patched.__globals__["make_bitmatrix_metadata"]
