"""Reads AMD GPU assembly: what a kernel uses, loads, converts and multiplies with."""

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
