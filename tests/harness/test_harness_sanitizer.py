"""The interpreter's memcheck and racecheck, on kernels with and without faults."""

import pytest
import torch
import triton
import triton.language as tl
from harness import sanitizer
from triton.runtime.errors import InterpreterError

N = 16


@triton.jit
def rows_kernel(x_ptr, out_ptr, width, N: tl.constexpr, WRITTEN: tl.constexpr):
    """A program copies a row of `width`, and writes WRITTEN of N lanes."""
    row, lanes = tl.program_id(0), tl.arange(0, N)
    x = tl.load(x_ptr + row * width + lanes, mask=lanes < width)
    tl.store(out_ptr + row * width + lanes, x, mask=lanes < WRITTEN)


@triton.jit
def chain_kernel(x_ptr, N: tl.constexpr):
    """A program reads what the one before writes."""
    row = tl.program_id(0)
    tl.store(x_ptr + row + 1, tl.load(x_ptr + row) + 1)


@triton.jit
def own_kernel(x_ptr):
    """A program reads what itself has written."""
    at = x_ptr + tl.program_id(0)
    tl.store(at, tl.load(at) + 1)
    tl.store(at, tl.load(at) + 1)


@triton.jit
def count_kernel(x_ptr):
    tl.atomic_add(x_ptr, 1)


def run_rows(rows: int, width: int, written: int) -> torch.Tensor:
    x = torch.arange(rows * width, dtype=torch.float32)
    out = torch.zeros(rows * width)
    rows_kernel[(rows,)](x, out, width, N=N, WRITTEN=written)
    return out


def test_rows_of_their_own_pass():
    with sanitizer.check():
        out = run_rows(3, 5, 5)
    assert torch.equal(out, torch.arange(15.0))


def test_a_write_into_the_next_row_is_a_race():
    """The result is right: the next program mends it."""
    with sanitizer.check(), pytest.raises(sanitizer.Race, match="0 and 1 write"):
        # The last row has room behind it.
        x, out = torch.arange(16.0), torch.zeros(32)
        rows_kernel[(3,)](x, out, 5, N=N, WRITTEN=7)


def test_a_write_behind_the_tensor_is_found():
    with sanitizer.check(), pytest.raises(InterpreterError, match="writes 2 of 7"):
        run_rows(1, 5, 7)


def test_a_read_behind_the_tensor_is_found():
    short, out = torch.arange(4.0), torch.zeros(5)
    with sanitizer.check(), pytest.raises(InterpreterError, match="reads 1 of 5"):
        rows_kernel[(1,)](short, out, 5, N=N, WRITTEN=5)


def test_a_tensor_is_all_of_its_storage():
    """As memcheck sees it: a view may be followed by what its storage has."""
    whole, out = torch.arange(5.0), torch.zeros(5)
    with sanitizer.check():
        rows_kernel[(1,)](whole[:4], out, 5, N=N, WRITTEN=5)
    assert torch.equal(out, whole)


def test_reading_what_another_program_writes_is_a_race():
    with sanitizer.check(), pytest.raises(sanitizer.Race, match="1 reads what 0"):
        chain_kernel[(3,)](torch.zeros(4), N=N)


def test_launches_do_not_race_with_one_another():
    x = torch.zeros(4)
    with sanitizer.check():
        for _ in range(2):
            chain_kernel[(1,)](x, N=N)
            own_kernel[(4,)](x)
    assert x.tolist() == [4, 5, 4, 4]


def test_atomics_are_no_race():
    count = torch.zeros(1, dtype=torch.int32)
    with sanitizer.check():
        count_kernel[(5,)](count)
    assert count.item() == 5


def test_outside_nothing_is_checked():
    with sanitizer.check():
        pass
    x, out = torch.arange(16.0), torch.zeros(32)
    rows_kernel[(3,)](x, out, 5, N=N, WRITTEN=7)
