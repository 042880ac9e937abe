"""The C++ kernel that writes the SWA cache, as machine code.

vLLM's HIP source is hipified and compiled, device code only, and the assembly is
read: on gfx942 values are scaled for FNUZ and converted by the hardware, and none
becomes an integer on the way; on gfx950 the patches change nothing.  The release
without patches is compiled too, to show that the gate sees its defect.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import importlib.metadata
import importlib.util
import os
import re
import struct
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from . import apply, assembly, codegen, git, hiptools, process, prove, worktree
from .base import hash_file
from .errors import StackError
from .hiptools import Missing, Toolchain
from .pins import Pin, Project
from .report import Progress, Step

SOURCE = "csrc/fused_deepseek_v4_qnorm_rope_kv_insert_kernel.cu"
KERNEL = "fusedDeepseekV4QNormRopeKVRopeQuantInsertKernel"
_SCHEMA = 1
_HIPIFY = "cmake/hipify.py"

# What vLLM's CMake files and PyTorch's give a HIP source of a release build.
_FLAGS = (
    "-std=c++20", "-DNDEBUG", "-D__HIP_PLATFORM_AMD__=1", "-DUSE_ROCM=1",
    "-DHIPBLAS_V2", "-DCUDA_HAS_FP16=1", "-DHIP_ENABLE_WARP_SYNC_BUILTINS=1",
    "-DENABLE_FP8", "-DTORCH_EXTENSION_NAME=_C", "-U__HIP_NO_HALF_CONVERSIONS__",
    "-U__HIP_NO_HALF_OPERATORS__", "-w",
    # Without a symbol that is named after the file's content.
    "-fuse-cuid=none",
)  # fmt: skip


@dataclass(frozen=True)
class Check:
    """One demand on the code, and whether it is met."""

    name: str
    ok: bool
    detail: str


@dataclass(frozen=True)
class Gate:
    """What came out; ``missing`` says why nothing did."""

    checks: tuple[Check, ...] = ()
    toolchain: str = ""
    missing: tuple[str, ...] = ()
    mend: str = ""

    @property
    def ok(self) -> bool:
        return all(check.ok for check in self.checks)


def hipgate(
    project: Project, pin: Pin, *, jobs: int, progress: Progress, step: Step
) -> Gate:
    """Compile the writer of the whole stack and of the release, and compare.

    Args:
        project, pin: The stack.
        jobs: How many compilations at once.
        progress: Told of download progress.
        step: Told what is being done.

    Raises:
        StackError: if the stack does not apply, or the source does not compile.
    """
    with prove.opened(project, pin, progress, step) as (tree, commits, folder):
        applied = apply.stack_tree(pin, commits)
        toolchain = hiptools.find(project, step)
        if isinstance(toolchain, Missing):
            return Gate(missing=toolchain.reasons, mend=hiptools.MEND)
        texts = _Writer(tree, folder, toolchain, step).compile(
            [
                (id_, arch)
                for arch in ("gfx942", "gfx950")
                for id_ in (applied, pin.tree)
            ],
            jobs,
        )
    new, old = texts[applied, "gfx942"], texts[pin.tree, "gfx942"]
    checks = (
        *gfx942(new),
        *gfx950(texts[applied, "gfx950"], texts[pin.tree, "gfx950"]),
        control(new, old),
    )
    name = f"{toolchain.compiler.version}, {toolchain.name}"
    return Gate(checks, name)


def gfx942(text: str) -> Iterator[Check]:
    """What the writer must be on a GPU whose FP8 is FNUZ."""
    found = kernels(text).values()
    converting = [k for k in found if _count(k, r"v_cvt_pk_fp8_f32")]
    yield Check(
        "gfx942: the hardware converts to FP8",
        len(converting) == len(found) > 0,
        f"in {len(converting)} of {len(found)} kernels",
    )
    yield from _maximum("gfx942", text, 224.0)
    back = _count(text, r"v_cvt_f32_i32")
    whole = [c for c in _per_kernel(text, r"v_cvt_i32_f32") if c > 1]
    yield Check(
        "gfx942: no value becomes an integer",
        not back and not whole,
        f"{back} conversions from integers to floats, and {len(whole)} kernels that "
        "make more integers of floats than one scale byte",
    )
    traps = _count(text, r"s_trap")
    yield Check("gfx942: nothing traps", not traps, f"{traps} s_trap")


def gfx950(text: str, base: str) -> Iterator[Check]:
    """What the writer must be on a GPU whose FP8 is OCP: what it was.

    Whether the hardware converts there is up to ROCm's headers: those of 6.4 do not
    know that it can.
    """
    yield from _maximum("gfx950", text, 448.0)
    same = assembly.plain(text) == assembly.plain(base)
    words = "the same" if same else "not the same"
    detail = f"{len(assembly.mnemonics(text))} instructions, {words} as without patches"
    yield Check("gfx950: the code is that of the release", same, detail)


def control(text: str, base: str) -> Check:
    """That the gate can fail: the release must not pass, if a patch mends it."""
    name = "the release without patches does not pass on gfx942"
    if assembly.plain(text) == assembly.plain(base):
        return Check(name, True, "no patch changes its code")
    failed = [check.name for check in gfx942(base) if not check.ok]
    return Check(name, bool(failed), "; ".join(failed) or "it does")


def _maximum(arch: str, text: str, maximum: float) -> Iterator[Check]:
    clamps: set[float] = set()
    scales: set[float] = set()
    for kernel in kernels(text).values():
        uses = constants(kernel)
        clamps |= {abs(x) for x in uses["clamp"] if abs(x) in (224.0, 448.0)}
        scales |= {x for x in uses["divide"] if x in (224.0, 448.0)}
    for what, values in (("clamped to", clamps), ("scaled for", scales)):
        shown = " and ".join(f"{value:g}" for value in sorted(values)) or "neither"
        yield Check(
            f"{arch}: values are {what} {maximum:g}", values == {maximum}, shown
        )


def kernels(text: str) -> dict[str, str]:
    """The instructions of each instance of the kernel, by symbol."""
    found = {}
    for match in re.finditer(
        rf"^(_Z\w*{KERNEL}\w*):(.*?)^\.Lfunc_end", text, re.MULTILINE | re.DOTALL
    ):
        found[match[1]] = match[2]
    return found


def _count(text: str, mnemonic: str) -> int:
    pattern = re.compile(rf"{mnemonic}(_e32|_e64|_sdwa|_dpp)?")
    return sum(bool(pattern.fullmatch(name)) for name in assembly.mnemonics(text))


def _per_kernel(text: str, mnemonic: str) -> list[int]:
    return [_count(kernel, mnemonic) for kernel in kernels(text).values()]


_OPERATION = re.compile(r"^\t([a-z]\w+)\s+([^;\n]*)", re.MULTILINE)
_CLAMPS = re.compile(r"v_(med3|min|max|min3|max3|minmax|maxmin)_f32\w*")
_DIVISIONS = re.compile(r"v_div_fixup_f32\w*")
_PRODUCTS = re.compile(r"v_(mul|fma|fmac|mad|mac)_f32\w*")


def constants(kernel: str) -> dict[str, set[float]]:
    """The constants that a kernel clamps to and divides by.

    A multiplication by the reciprocal counts as a division.  Constants are followed
    through the registers that they are moved to.
    """
    held: dict[str, float] = {}
    uses: dict[str, set[float]] = {"clamp": set(), "divide": set()}
    for match in _OPERATION.finditer(kernel):
        name = match[1]
        target, *sources = (part.strip() for part in match[2].split(","))
        values = [
            x for x in (_constant(part, held) for part in sources) if x is not None
        ]
        if re.fullmatch(r"[sv]_mov_b32\w*", name) and values:
            held[target] = values[0]
            continue
        if _CLAMPS.fullmatch(name):
            uses["clamp"].update(values)
        elif _DIVISIONS.fullmatch(name):
            uses["divide"].update(values)
        elif _PRODUCTS.fullmatch(name):
            uses["divide"].update(float(round(1 / x, 2)) for x in values if x)
        for register in _registers(target):
            held.pop(register, None)
    return uses


def _constant(operand: str, held: dict[str, float]) -> float | None:
    operand = operand.strip("-|")
    if operand in held:
        return held[operand]
    if re.fullmatch(r"0x[0-9a-f]{1,8}", operand):
        return struct.unpack(">f", int(operand, 16).to_bytes(4, "big"))[0]
    return None


def _registers(operand: str) -> list[str]:
    match = re.fullmatch(r"([sv])\[(\d+):(\d+)\]", operand)
    if match is None:
        return [operand]
    return [f"{match[1]}{n}" for n in range(int(match[2]), int(match[3]) + 1)]


class _Writer:
    """Compiles the source of several trees, unless the cache has the assembly."""

    def __init__(
        self, tree: worktree.Tree, folder: Path, toolchain: Toolchain, step: Step
    ):
        self.tree, self.folder, self.toolchain = tree, folder, toolchain
        self.step = step

    def compile(
        self, wanted: list[tuple[str, str]], jobs: int
    ) -> dict[tuple[str, str], str]:
        """The assembly for pairs of tree and architecture."""
        files = {item: self._cache_file(*item) for item in wanted}
        missing = {file: item for item, file in files.items() if not file.is_file()}
        with tempfile.TemporaryDirectory(dir=self.folder) as scratch:
            sources = {
                tree_id: self._hipify(tree_id, Path(scratch) / tree_id)
                for tree_id in dict.fromkeys(tree_id for tree_id, _ in missing.values())
            }
            with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
                for _ in pool.map(
                    lambda job: self._compile(sources[job[1][0]], job[1][1], job[0]),
                    missing.items(),
                ):
                    pass
        return {item: file.read_text() for item, file in files.items()}

    def _cache_file(self, tree_id: str, arch: str) -> Path:
        repository = self.tree.repository
        stubs = sorted((self.tree.project.root / "ci" / "hip").rglob("*.h"))
        parts = [
            *(str(_SCHEMA), arch, self.toolchain.id, *_FLAGS),
            importlib.metadata.version("torch"),
            _listing(repository.entries([_HIPIFY, "csrc"], tree=tree_id)),
            *(hash_file(path) for path in stubs),
        ]
        name = hashlib.sha256("\n".join(parts).encode()).hexdigest()
        return self.tree.project.cache / "hip" / "code" / f"{name}.s"

    def _hipify(self, tree_id: str, target: Path) -> Path:
        """Translate the source of a tree to HIP; returns the folder of the result."""
        self.step(f"hipifying {SOURCE}")
        slot = codegen.check_out(self.tree, tree_id, self.folder)
        target.mkdir()
        tool = [sys.executable, slot / _HIPIFY, "-p", slot / "csrc"]
        done = process.run([*tool, "-o", target / "csrc", SOURCE], cwd=target)
        if done.returncode or not _hip(target).is_file():
            raise StackError(
                f"{SOURCE} cannot be hipified", details=process.tail(done.stderr)
            )
        return target

    def _compile(self, folder: Path, arch: str, target: Path) -> None:
        self.step(f"compiling {SOURCE} for {arch}")
        package = importlib.util.find_spec("torch")
        assert package is not None and package.origin  # testenv installed it
        torch = Path(package.origin).parent / "include"
        includes = (
            *("-I", self.tree.project.root / "ci" / "hip" / "stubs"),
            *("-I", folder / "csrc"),
            *("-isystem", torch),
            *("-isystem", torch / "torch" / "csrc" / "api" / "include"),
        )
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            part = Path(scratch) / target.name
            flags = (*_FLAGS, *map(os.fspath, includes))
            done = self.toolchain.compile(_hip(folder), arch, part, *flags)
            if done.returncode:
                errors = [x for x in process.tail(done.stderr, 200) if "error" in x]
                raise StackError(
                    f"{SOURCE} does not compile for {arch} with {self.toolchain.name}",
                    details=tuple(errors[:10]),
                )
            part.replace(target)


def _listing(entries: dict[str, git.Entry]) -> str:
    return "".join(f"{path} {entry.blob}\n" for path, entry in entries.items())


def _hip(folder: Path) -> Path:
    return (folder / SOURCE).with_suffix(".hip")


def check(gate: Gate) -> None:
    """Raise if the gate ran and a demand is not met.

    Raises:
        StackError: naming the demands.
    """
    bad = [f"{item.name}: {item.detail}" for item in gate.checks if not item.ok]
    if bad:
        raise StackError(f"{len(bad)} demands are not met", details=tuple(bad))
