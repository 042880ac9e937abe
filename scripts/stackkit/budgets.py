"""ci/codegen/<release>.json: what each kernel's machine code may cost.

The file has two parts.  People write limits, tolerances and exceptions, each with
its reason; the figures below them are recorded by ``stack codegen --update``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .assembly import Figures
from .errors import USAGE, StackError

_RECORDED = "kernels"
_WRITTEN = {
    "limits": dict,
    "tolerance": dict,
    "triton": list,
    "hardware_conversions": list,
    "allowed_spills": list,
    "expected_failures": list,
    "gfx950_changes": list,
    "not_launched": list,
}
_LIMITS = ("lds", "spills", "scratch")
_NOT_MORE = ("agpr", "lds", "spills", "sgpr_spills", "scratch")
_NOT_LESS = ("waves", "to_fp8", "from_fp8")
_BYTE = 1

Key = tuple[str, str, str, str, str]


@dataclass(frozen=True)
class Cell:
    """One kernel as compiled for one variant and architecture by one Triton."""

    module: str
    kernel: str
    variant: str
    arch: str
    triton: str
    figures: Figures | None
    error: str  # why there are no figures

    @property
    def key(self) -> Key:
        return self.module, self.kernel, self.variant, self.arch, self.triton

    @property
    def name(self) -> str:
        variant = f" ({self.variant})" if self.variant else ""
        return f"{self.kernel}{variant}, {self.arch}, Triton {self.triton}"


@dataclass(frozen=True)
class Finding:
    """One thing that a compiled kernel does not keep."""

    cell: str
    what: str
    problem: bool = True  # else a remark: the record could be tightened


class Budgets:
    """The budgets of one release."""

    def __init__(self, path: Path, data: dict[str, Any]):
        self.path, self.data = path, data

    @property
    def tritons(self) -> tuple[str, ...]:
        return tuple(self.data["triton"])

    def recorded(self) -> dict[Key, dict[str, Any]]:
        return dict(_leaves(self.data[_RECORDED]))

    def exception(self, kind: str, cell: Cell) -> dict[str, str] | None:
        """The first entry of a list of exceptions that speaks of a cell."""
        return next((e for e in self.data[kind] if _speaks_of(e, cell)), None)


def load(path: Path) -> Budgets:
    """Read and check a release's budgets.

    Raises:
        StackError: naming the key that is missing, unknown or malformed.
    """
    try:
        data = json.loads(path.read_text("utf-8"))
    except FileNotFoundError as error:
        raise StackError(
            f"{path}: there are no budgets for this release",
            mend="copy those of another release, empty their kernels, then: "
            "scripts/stack codegen --update",
            code=USAGE,
        ) from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise _malformed(path, f"not valid JSON: {error}") from error
    kinds = {**_WRITTEN, _RECORDED: dict}
    for key in data.keys() - kinds.keys():
        raise _malformed(path, f"unknown key {key!r}")
    for key, kind in kinds.items():
        if not isinstance(data.get(key), kind):
            raise _malformed(path, f"{key} must be a {kind.__name__}")
    for key in ("hardware_conversions", *(k for k in kinds if _is_exceptions(k))):
        for entry in data[key]:
            for field in ("kernel", "reason"):
                if not entry.get(field):
                    raise _malformed(path, f"{key}: an entry lacks its {field}")
    return Budgets(path, data)


def _is_exceptions(key: str) -> bool:
    return _WRITTEN.get(key) is list and key != "triton"


def _malformed(path: Path, what: str) -> StackError:
    return StackError(f"{path}: {what}", mend=f"git diff {path}", code=USAGE)


def _leaves(
    tree: Mapping[str, Any], path: tuple[str, ...] = ()
) -> Iterator[tuple[Any, dict[str, Any]]]:
    for key, value in tree.items():
        if len(path) == 4:
            yield (*path, key), value
        else:
            yield from _leaves(value, (*path, key))


def judge(
    budgets: Budgets, cells: Iterable[Cell], *, whole: bool = True
) -> list[Finding]:
    """Compare what was compiled with the budgets.

    Args:
        budgets: Of the release.
        cells: What was compiled.
        whole: Whether everything was; if so, what is recorded must be there.
    """
    cells = list(cells)
    recorded = budgets.recorded()
    findings: list[Finding] = []
    for cell in cells:
        record = recorded.pop(cell.key, None)
        findings += [
            Finding(cell.name, what, problem)
            for what, problem in _judge(budgets, cell, record)
        ]
    if whole:
        for module, kernel, variant, arch, triton in recorded:
            gone = Cell(module, kernel, variant, arch, triton, None, "")
            what = "is recorded, but nothing launched it"
            findings.append(Finding(gone.name, what))
        findings += _about_nothing(budgets, cells)
    return findings


def _about_nothing(budgets: Budgets, cells: list[Cell]) -> Iterator[Finding]:
    """Entries that people wrote for a kernel that is not there any more."""
    for kind in filter(_is_exceptions, _WRITTEN):
        for entry in budgets.data[kind]:
            if kind == "not_launched" or any(_speaks_of(entry, cell) for cell in cells):
                continue
            yield Finding(_about(entry), f"{kind}: it is not compiled; take it off")


def _speaks_of(entry: Mapping[str, Any], cell: Cell) -> bool:
    about = ("kernel", "variant", "arch", "triton")
    return all(
        entry.get(key, getattr(cell, key)) == getattr(cell, key) for key in about
    )


def _judge(
    budgets: Budgets, cell: Cell, record: dict[str, Any] | None
) -> Iterator[tuple[str, bool]]:
    expected = budgets.exception("expected_failures", cell)
    if cell.figures is None:
        if expected is None:
            yield f"does not compile: {cell.error}", True
        elif expected["error"] not in cell.error:
            yield f"fails, but not by {expected['error']!r}: {cell.error}", True
        return
    if expected is not None:
        yield "compiles now: take it off expected_failures", True
    yield from _within_limits(budgets, cell, cell.figures)
    if record is None or "vgpr" not in record:
        yield "is not recorded", True
        return
    yield from _within_record(budgets, cell.figures, record)
    base = record.get("base")
    changed = base and base != cell.figures.code
    if changed and not budgets.exception("gfx950_changes", cell):
        yield "its code is not that of the release without patches", True


def _within_limits(
    budgets: Budgets, cell: Cell, figures: Figures
) -> Iterator[tuple[str, bool]]:
    for name in _LIMITS:
        value, limit = getattr(figures, name), budgets.data["limits"][name]
        if value > limit:
            if name != "lds" and budgets.exception("allowed_spills", cell):
                continue
            yield f"{name} {value}, the limit is {limit}", True
    wanted = budgets.exception("hardware_conversions", cell) or {}
    for name in ("to_fp8", "from_fp8"):
        value, least = getattr(figures, name), wanted.get(name, 0)
        if value < least:
            yield f"{name} {value}, at least {least} must be in hardware", True


def _within_record(
    budgets: Budgets, figures: Figures, record: dict[str, Any]
) -> Iterator[tuple[str, bool]]:
    tolerance = budgets.data["tolerance"]
    room = {
        "vgpr": tolerance["vgpr"],
        "instructions": record["instructions"]
        * tolerance["instructions_percent"]
        / 100,
    }
    for name in (*room, *_NOT_MORE, *_NOT_LESS):
        value, was = getattr(figures, name), record[name]
        worse = was - value if name in _NOT_LESS else value - was
        if worse > room.get(name, 0):
            yield f"{name} {value}, recorded {was}", True
        elif worse < -room.get(name, 0):
            yield f"{name} {value} is better than the recorded {was}", False
    value, was = figures.loads.get(_BYTE, 0), record["loads"].get(str(_BYTE), 0)
    if value > was:
        yield f"{value} loads of one byte, recorded {was}", True
    if figures.mfma.keys() != record["mfma"].keys():
        yield f"mfma {_list(figures.mfma)}, recorded {_list(record['mfma'])}", True


def _list(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"


def record(budgets: Budgets, cells: Iterable[Cell], base: Mapping[Key, str]) -> Budgets:
    """Budgets with the figures of ``cells``; what people wrote stays.

    Args:
        budgets: What is replaced.
        cells: Everything that was compiled.
        base: Code ids of gfx950 kernels of the release without patches.
    """
    tree: dict[str, Any] = {}
    for cell in sorted(cells, key=lambda cell: cell.key):
        if cell.figures is None:
            value: dict[str, Any] = {"error": cell.error}
        else:
            value = {
                name: getattr(cell.figures, name)
                for name in Figures.__dataclass_fields__
                if name != "code"
            }
            value["loads"] = {str(k): v for k, v in cell.figures.loads.items()}
            if cell.key in base:
                value["base"] = base[cell.key]
        place = tree
        for part in cell.key[:-1]:
            place = place.setdefault(part, {})
        place[cell.triton] = value
    return Budgets(budgets.path, {**budgets.data, _RECORDED: tree})


def text(budgets: Budgets) -> str:
    """The file's content: one line for each exception and each compiled kernel."""
    parts = []
    for key, value in budgets.data.items():
        if key == _RECORDED:
            shown = _tree(value, 1)
        elif value and isinstance(value, list) and isinstance(value[0], dict):
            entries = ",\n    ".join(_flat(entry) for entry in value)
            shown = f"[\n    {entries}\n  ]"
        else:
            shown = _flat(value)
        parts.append(f"  {_flat(key)}: {shown}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _flat(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _tree(value: dict[str, Any], depth: int) -> str:
    if depth > 5 or not value:
        return _flat(value)
    inner = "  " * (depth + 1)
    parts = [f"{inner}{_flat(k)}: {_tree(v, depth + 1)}" for k, v in value.items()]
    return "{\n" + ",\n".join(parts) + "\n" + "  " * depth + "}"


_INTRODUCTION = """\
# What the kernels become

`scripts/stack codegen` compiles each Triton kernel that DeepSeek-V4-Flash on {release}
launches, or that a patch touches, without a GPU, and compares the machine code with
`ci/codegen/{release}.json`. This page is made from that file by
`scripts/stack codegen --update`; do not edit it.

Nothing here was measured on a GPU. The figures are the compiler's: registers, bytes of
local memory (LDS), how many waves the registers leave room for on a SIMD, and counts of
instructions in the static code. Loads are from global memory, written as count x bytes
for each lane. *To FP8* and *from FP8* count hardware instructions that convert.

Limits: LDS {lds} bytes, {spills} spilled vector registers, {scratch} bytes of scratch
memory. Against the record a kernel may use {vgpr} VGPRs and {instructions_percent} % of
instructions more. It may not lose waves, hardware conversions or a kind of matrix
instruction, nor gain loads of one byte. On gfx950 its code must be that of the release
without patches.
"""


def table(budgets: Budgets, release: str) -> str:
    """docs/codegen.md: the recorded figures."""
    data = budgets.data
    words = {**data["limits"], **data["tolerance"], "release": release}
    lines = [_INTRODUCTION.format_map(words)]
    for kind, title in (
        ("expected_failures", "Does not compile, and need not"),
        ("allowed_spills", "Spills registers"),
        ("gfx950_changes", "Differs on gfx950 from the release without patches"),
        ("not_launched", "Touched by a patch, not compiled here"),
    ):
        if data[kind]:
            lines += [f"## {title}", ""]
            lines += [f"- {_about(entry)}: {entry['reason']}" for entry in data[kind]]
            lines.append("")
    for module, kernels in data[_RECORDED].items():
        lines += [f"## {module}", ""]
        for kernel, variants in kernels.items():
            lines += [f"### {kernel}", "", *_kernel_table(variants), ""]
    return "\n".join(lines)


def _about(entry: Mapping[str, str]) -> str:
    parts = [f"`{entry['kernel']}`"]
    parts += [entry[key] for key in ("variant", "arch") if key in entry]
    if "triton" in entry:
        parts.append(f"Triton {entry['triton']}")
    return ", ".join(parts)


def _kernel_table(variants: Mapping[str, Any]) -> list[str]:
    named = any(variants)
    head = ["GPU", "Triton", "VGPR", "SGPR", "LDS", "waves", "instructions", "loads",
            "to FP8", "from FP8", "MFMA"]  # fmt: skip
    head = ["variant", *head] if named else head
    rows = [head, ["---"] * len(head)]
    for variant, archs in variants.items():
        for arch, tritons in archs.items():
            for triton, record in tritons.items():
                row = [variant] * named + [arch, triton, *_cells(record)]
                rows.append(row + [""] * (len(head) - len(row)))
    return ["| " + " | ".join(row) + " |" for row in rows]


def _cells(record: Mapping[str, Any]) -> list[str]:
    if "vgpr" not in record:
        return ["does not compile"]
    vgpr = str(record["vgpr"])
    if record["agpr"]:
        vgpr += f" ({record['agpr']} AGPR)"
    if record["spills"]:
        vgpr += f", {record['spills']} spilled, {record['scratch']} B scratch"
    loads = [f"{count}x{size}" for size, count in record["loads"].items()]
    mfma = [f"{count} {name}" for name, count in record["mfma"].items()]
    plain = ("sgpr", "lds", "waves", "instructions")
    return [
        vgpr,
        *(str(record[name]) for name in plain),
        " ".join(loads),
        *(str(record[name]) for name in ("to_fp8", "from_fp8")),
        ", ".join(mfma),
    ]
