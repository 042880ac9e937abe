"""memcheck and racecheck for Triton's interpreter.

The interpreter runs the programs of a grid one after another and reads and writes any
address. So a kernel that writes beyond its row is right there, if the next program mends
it, and wrong on a GPU. `check` looks at every access of the launches inside it:

- memory: it must be in the storage of a tensor that the launch was given;
- races: what a program writes no other program of the launch reads or writes.

Two programs that write the same value to one place are a race here, too. Atomic
operations are not looked at, nor is what happens inside a program.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from triton.runtime import interpreter


class MemoryFault(Exception):
    """An access outside of all tensors of the launch."""


class Race(Exception):
    """Two programs of a launch have to do with one byte, and one writes it."""


class _Launch:
    """The accesses of one launch."""

    def __init__(self, name: str, tensors: list[torch.Tensor]):
        self.name = name
        storages = {t.untyped_storage() for t in tensors}
        spans = sorted((s.data_ptr(), s.data_ptr() + s.nbytes()) for s in storages)
        self.starts = np.array([start for start, _ in spans], dtype=np.uint64)
        self.ends = np.array([end for _, end in spans], dtype=np.uint64)
        self.program = 0
        # (program, first bytes, size)
        self.reads: list[tuple[int, np.ndarray, int]] = []
        self.writes: list[tuple[int, np.ndarray, int]] = []

    def access(self, ptrs: Any, mask: Any, write: bool) -> None:
        active = np.asarray(mask.data).astype(bool)
        first = np.unique(np.asarray(ptrs.data)[active].astype(np.uint64))
        if not first.size:
            return
        size = max(1, ptrs.get_element_ty().primitive_bitwidth // 8)
        at = np.searchsorted(self.starts, first, side="right").astype(np.int64) - 1
        inside = (at >= 0) & (first + np.uint64(size) <= self.ends[at])
        if not inside.all():
            kind = "writes" if write else "reads"
            raise MemoryFault(
                f"{self.name}, program {self.program}: {kind} {(~inside).sum()} of "
                f"{first.size} addresses outside of its tensors"
            )
        (self.writes if write else self.reads).append((self.program, first, size))

    def check_races(self) -> None:
        if not self.writes:
            return
        parts: dict[int, list[np.ndarray]] = {}
        for program, first, size in self.writes:
            parts.setdefault(program, []).append(_bytes(first, size))
        owned = {p: np.unique(np.concatenate(x)) for p, x in parts.items()}
        written = np.concatenate(list(owned.values()))
        writer = np.repeat(list(owned), [len(x) for x in owned.values()])
        order = np.argsort(written, kind="stable")
        written, writer = written[order], writer[order]
        twice = np.flatnonzero(written[1:] == written[:-1])
        if twice.size:
            pair = writer[twice[0]], writer[twice[0] + 1]
            raise Race(f"{self.name}: programs {pair[0]} and {pair[1]} write one byte")
        for program, first, size in self.reads:
            first = first[(first + np.uint64(size) > written[0])]
            first = first[first <= written[-1]]
            at = _bytes(first, size)
            found = np.searchsorted(written, at).clip(max=len(written) - 1)
            other = (written[found] == at) & (writer[found] != program)
            if other.any():
                who = writer[found[other.argmax()]]
                raise Race(f"{self.name}: program {program} reads what {who} writes")


def _bytes(first: np.ndarray, size: int) -> np.ndarray:
    return (first[:, None] + np.arange(size, dtype=np.uint64)).ravel()


def _tensors(values: Any) -> list[torch.Tensor]:
    found = []
    for value in values:
        if isinstance(value, tuple):
            found += _tensors(value)
        elif hasattr(value, "data_ptr"):
            found.append(interpreter._unwrap_tensor(value))
    return found


@contextmanager
def check() -> Iterator[None]:
    """Looks at the accesses of all launches until the end.

    Raises (in the launch):
        MemoryFault, as the text of an InterpreterError; Race.
    """
    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    names = ("create_masked_load", "create_masked_store", "set_grid_idx")
    before = {name: getattr(builder, name) for name in names}
    init_args, call = executor._init_args_hst, executor.__call__
    current: list[_Launch] = []

    def load(self, ptrs, mask, other, cache_policy, is_volatile):
        if not is_volatile:
            current[-1].access(ptrs, mask, write=False)
        return before["create_masked_load"](
            self, ptrs, mask, other, cache_policy, is_volatile
        )

    def store(self, ptrs, value, mask, cache_policy):
        current[-1].access(ptrs, mask, write=True)
        return before["create_masked_store"](self, ptrs, value, mask, cache_policy)

    def set_grid_idx(self, x, y, z):
        _, ny, nz = self.grid_dim
        current[-1].program = (x * ny + y) * nz + z
        return before["set_grid_idx"](self, x, y, z)

    def start(self, args_dev, kwargs):
        args, keywords = init_args(self, args_dev, kwargs)
        tensors = _tensors([*args, *keywords.values()])
        current.append(_Launch(self.fn.__name__, tensors))
        return args, keywords

    def run(self, *args, **kwargs):
        depth = len(current)
        try:
            result = call(self, *args, **kwargs)
            current[-1].check_races()
            return result
        finally:
            del current[depth:]

    replaced = (load, store, set_grid_idx)
    try:
        for name, function in zip(names, replaced, strict=True):
            setattr(builder, name, function)
        executor._init_args_hst, executor.__call__ = start, run
        yield
    finally:
        for name, function in before.items():
            setattr(builder, name, function)
        executor._init_args_hst, executor.__call__ = init_args, call
