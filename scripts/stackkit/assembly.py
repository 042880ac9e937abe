"""Reads AMD GPU assembly: what a kernel uses, loads, converts and multiplies with,
and what one iteration of a loop issues.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from dataclasses import dataclass

from .errors import StackError

_METADATA = {
    "vgpr": r"\.vgpr_count:\s+(\d+)",
    "agpr": r"\.agpr_count:\s+(\d+)",
    "sgpr": r"\.sgpr_count:\s+(\d+)",
    "spills": r"\.vgpr_spill_count:\s+(\d+)",
    "sgpr_spills": r"\.sgpr_spill_count:\s+(\d+)",
    "scratch": r"\.private_segment_fixed_size:\s+(\d+)",
    "waves": r"; Occupancy: (\d+)",
}
_INSTRUCTION = re.compile(r"^\t([a-z]+_[a-z0-9_]+)", re.MULTILINE)
_LOAD = re.compile(r"(?:global|buffer|flat)_load_(?:lds_)?(\w+)")
_BYTES = {"dwordx4": 16, "dwordx3": 12, "dwordx2": 8, "dword": 4}
_TO_FP8 = re.compile(r"v_cvt_(?:scalef32_)?(?:pk_|sr_|sr_pk_)?(?:fp8|bf8)_\w+")
_FROM_FP8 = re.compile(r"v_cvt_(?:scalef32_)?(?:pk_)?(?:f32|f16|bf16)_(?:fp8|bf8)\w*")
_LABEL = re.compile(r"^(\.LBB\w+):")
_LINE = re.compile(r"^\t([a-z]+_[a-z0-9_]+)(?:\s+([^;]*))?")
_NO_RETURN = ("s_endpgm", "s_trap")
_INDIRECT = ("s_setpc", "s_swappc", "s_cbranch_i_fork", "s_cbranch_g_fork")

#: Of a compute unit of gfx942: SIMDs, and bytes of local memory.
_SIMDS, _LDS = 4, 65536
#: What an instruction is, by the first of these that its name begins with.
CLASSES = {
    "v_mfma_": "MFMA",
    "v_cvt_": "convert",
    "v_": "VALU",
    "ds_": "LDS",
    "global_load": "load",
    "buffer_load": "load",
    "flat_load": "load",
    "scratch_": "spill",
    "s_": "scalar",
}


@dataclass(frozen=True)
class Figures:
    """What one compiled kernel needs and does; counts are of its static code."""

    vgpr: int
    agpr: int
    sgpr: int
    lds: int  # bytes
    spills: int  # vector registers kept in scratch memory
    sgpr_spills: int  # scalar registers kept in vector registers
    scratch: int  # bytes for each lane
    waves: int  # that fit on one SIMD
    instructions: int
    to_fp8: int  # hardware conversions
    from_fp8: int
    loads: dict[int, int]  # from global memory, by bytes for each lane
    mfma: dict[str, int]  # matrix instructions by shape and type
    code: str  # changes with any instruction


def mnemonics(text: str) -> list[str]:
    """Every instruction of an assembly text, in order."""
    return _INSTRUCTION.findall(text)


def figures(text: str, lds: int) -> Figures:
    """The figures of one kernel.

    Args:
        text: The assembly of exactly one kernel, as LLVM prints it.
        lds: Bytes of local memory, which Triton's own metadata tell.

    Raises:
        StackError: if the text lacks the compiler's remarks about the kernel.
    """
    found = {}
    for name, pattern in _METADATA.items():
        match = re.search(pattern, text)
        if match is None:
            raise StackError(f"the assembly does not tell {name} of its kernel")
        found[name] = int(match[1])
    names = mnemonics(text)
    return Figures(
        **found,
        lds=lds,
        instructions=len(names),
        to_fp8=sum(bool(_TO_FP8.fullmatch(name)) for name in names),
        from_fp8=sum(bool(_FROM_FP8.fullmatch(name)) for name in names),
        loads=dict(sorted(Counter(filter(None, map(_load_bytes, names))).items())),
        mfma=dict(sorted(Counter(filter(None, map(_mfma, names))).items())),
        code=code_id(text),
    )


def _load_bytes(name: str) -> int | None:
    match = _LOAD.fullmatch(name)
    if match is None:
        return None
    kind = match[1]
    if kind in _BYTES:
        return _BYTES[kind]
    return 2 if "short" in kind else 1


def _mfma(name: str) -> str | None:
    return re.sub(r"_e64$", "", name[7:]) if name.startswith("v_mfma_") else None


@dataclass(frozen=True)
class Loop:
    """A loop of the code, and what a wave issues in one iteration of it."""

    header: str  # label of the block that begins it
    depth: int  # 1 if no other loop is around it
    has_inner: bool  # whether another is in it
    instructions: tuple[str, ...]  # the longest way through, without inner loops

    def classes(self) -> dict[str, int]:
        """How many instructions of each of :data:`CLASSES` are in an iteration."""
        return dict(sorted(Counter(map(class_of, self.instructions)).items()))


def class_of(name: str) -> str:
    """One of the values of :data:`CLASSES`, or "other"."""
    for prefix, value in CLASSES.items():
        if name.startswith(prefix):
            return value
    return "other"


def loops(text: str) -> list[Loop]:
    """The loops of one kernel, in the order of their headers.

    A branch inside an iteration is taken so that most instructions are issued: that
    is, a part under a mask is not skipped. What is in an inner loop is not counted
    with the outer one, for nothing here tells how often it runs.

    Args:
        text: The assembly of exactly one kernel, as LLVM prints it.

    Raises:
        StackError: if it jumps to an address, to a label that it has not, or into
            the middle of a loop.
    """
    blocks, targets = _blocks(text)
    bodies = _loop_bodies(targets)
    found = []
    for header, body in sorted(bodies.items()):
        around = [h for h, other in bodies.items() if h != header and header in other]
        inner = [other for h, other in bodies.items() if h != header and h in body]
        hidden = set().union(*inner)
        longest: dict[int, tuple[str, ...]] = {}
        for block in _in_order(header, body, targets):
            ways = [
                longest[before]
                for before in body
                if before in longest and block in targets[before] and block != header
            ]
            own = () if block in hidden else tuple(blocks[block][1])
            longest[block] = max(ways, key=len, default=()) + own
        ends = [longest[block] for block in body if header in targets[block]]
        label = blocks[header][0]
        longest_way = max(ends, key=len)
        found.append(Loop(label, 1 + len(around), bool(inner), longest_way))
    return found


def _blocks(
    text: str,
) -> tuple[list[tuple[str, list[str]]], list[tuple[int, ...]]]:
    """Basic blocks, each a label and mnemonics, and to which of them each leads."""
    blocks: list[tuple[str, list[str]]] = [("", [])]
    jumps: dict[int, tuple[str, bool]] = {}  # by block: label, and whether always
    ended = set()
    for line in text.splitlines():
        if line.startswith(".Lfunc_end"):
            break
        label = _LABEL.match(line)
        if label:
            blocks.append((label[1], []))
            continue
        match = _LINE.match(line)
        if match is None:
            continue
        name, operands = match[1], (match[2] or "").strip()
        blocks[-1][1].append(name)
        if name.startswith(_INDIRECT):
            raise StackError(f"{name}: the assembly does not tell where it goes")
        if name.startswith(("s_branch", "s_cbranch")):
            jumps[len(blocks) - 1] = operands, name == "s_branch"
        elif name in _NO_RETURN:
            ended.add(len(blocks) - 1)
        else:
            continue
        blocks.append(("", []))
    labels = {label: at for at, (label, _) in enumerate(blocks) if label}
    targets = []
    for at in range(len(blocks)):
        label, always = jumps.get(at, ("", at in ended or at + 1 == len(blocks)))
        if label and label not in labels:
            raise StackError(f"{label}: a jump goes there, and it is not in the text")
        next_ = () if always else (at + 1,)
        targets.append((*((labels[label],) if label else ()), *next_))
    return blocks, targets


def _loop_bodies(targets: list[tuple[int, ...]]) -> dict[int, set[int]]:
    """The blocks of each natural loop, by its header."""
    before: dict[int, set[int]] = {at: set() for at in range(len(targets))}
    for at, leads in enumerate(targets):
        for target in leads:
            before[target].add(at)
    bodies: dict[int, set[int]] = {}
    for header, latch in _back_edges(targets):
        body = bodies.setdefault(header, {header})
        todo = [latch]
        while todo:
            block = todo.pop()
            if block not in body:
                body.add(block)
                todo += before[block]
        if 0 in body and header != 0:
            raise StackError("a jump goes into the middle of a loop")
    return bodies


def _back_edges(targets: list[tuple[int, ...]]) -> list[tuple[int, int]]:
    """Header and last block of each way back, by a walk from the first block."""
    edges = []
    state = {0: "open"}
    stack = [(0, iter(targets[0]))]
    while stack:
        at, leads = stack[-1]
        target = next(leads, None)
        if target is None:
            state[at] = "done"
            stack.pop()
        elif target not in state:
            state[target] = "open"
            stack.append((target, iter(targets[target])))
        elif state[target] == "open":
            edges.append((target, at))
    return edges


def _in_order(header: int, body: set[int], targets: list[tuple[int, ...]]) -> list[int]:
    """The blocks of a loop, each after all that lead to it but by a way back."""
    order: list[int] = []
    seen = {header}
    stack = [(header, iter(targets[header]))]
    while stack:
        at, leads = stack[-1]
        target = next(leads, None)
        if target is None:
            order.append(at)
            stack.pop()
        elif target in body and target not in seen:
            seen.add(target)
            stack.append((target, iter(targets[target])))
    return order[::-1]


def waves_per_simd(figures: Figures, num_warps: int) -> float:
    """Waves of a kernel that fit on one SIMD of gfx942, by registers and LDS.

    A workgroup is there as a whole or not at all, and its waves are spread over the
    four SIMDs of its compute unit.  ``figures.waves`` knows the registers only, for
    Triton asks for LDS when it launches.

    Args:
        figures: Of the kernel.
        num_warps: Waves of a workgroup.
    """
    groups = figures.waves * _SIMDS // num_warps
    if figures.lds:
        groups = min(groups, _LDS // figures.lds)
    return groups * num_warps / _SIMDS


def plain(text: str) -> str:
    """The text without what differs between two compilations of the same code.

    That is comments, file names and line numbers, and what LLVM says of itself.
    """
    lines = []
    for line in text.splitlines():
        line = line.split(";")[0].rstrip()
        if line and not re.match(r"\s*\.(file|loc|ident|addrsig)", line):
            lines.append(line)
    return "\n".join(lines)


def code_id(text: str) -> str:
    """An id that two texts share if, and only if, their code is the same."""
    return hashlib.sha256(plain(text).encode()).hexdigest()[:12]
