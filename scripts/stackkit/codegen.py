"""Compiles the stack's Triton kernels for AMD GPUs and judges the machine code.

The compiling is done by ``ci/codegen`` in a process with vLLM and one Triton; this
module starts it for each Triton version, reads the assembly, keeps the figures in
the cache, and compares them with the budgets of the release.
"""

from __future__ import annotations

import ast
import concurrent.futures
import hashlib
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from . import (
    apply,
    assembly,
    budgets,
    git,
    process,
    prove,
    testenv,
    worktree,
)
from .base import hash_file
from .budgets import Cell, Finding
from .errors import USAGE, StackError
from .pins import Pin, Project
from .report import Progress, Step

ARCHS = ("gfx942", "gfx950")
UNCHANGED = "gfx950"  # where the patches change no code
_SCHEMA = 1
_DIAGNOSTIC = re.compile(r"^.*\berror: .*$", re.MULTILINE)
_DIED = "the compiler died"


@dataclass(frozen=True)
class Report:
    """What was compiled and what is wrong with it."""

    cells: list[Cell]
    findings: list[Finding]
    cached: int  # of the pairs of Triton and architecture
    runs: int
    written: list[Path]

    @property
    def problems(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.problem]


def budgets_file(project: Project, pin: Pin) -> Path:
    return project.root / "ci" / "codegen" / f"{pin.release}.json"


def page(project: Project) -> Path:
    return project.root / "docs" / "codegen.md"


def codegen(
    project: Project,
    pin: Pin,
    names: tuple[str, ...],
    *,
    archs: tuple[str, ...],
    update: bool,
    jobs: int,
    progress: Progress,
    step: Step,
) -> Report:
    """Compile kernels of the whole stack and compare them with the budgets.

    Args:
        project, pin: The stack.
        names: Kernels; all if empty.
        archs: Some of :data:`ARCHS`; all if empty.
        update: Record the figures instead, and write the page of the docs.
        jobs: How many kernels at once.
        progress: Told of download progress.
        step: Told what is being done.

    Raises:
        StackError: if the stack does not apply, there are no budgets, a kernel is
            unknown, or the compiling process does not come to its end.
    """
    whole = not names and not archs
    if update and not whole:
        raise StackError(
            "--update records everything: it takes no kernel and no --arch", code=USAGE
        )
    found = budgets.load(budgets_file(project, pin))
    with prove.opened(project, pin, progress, step) as (tree, commits, folder):
        applied = apply.stack_tree(pin, commits)
        machine = _Machine(tree, folder, found.tritons, jobs, step)
        cells, cached = machine.compile(applied, archs or ARCHS, names)
        if names and not cells:
            raise StackError(
                f"nothing launches {', '.join(names)}",
                mend="ci/codegen/launches.py lists what is launched; names are those "
                "of Triton functions",
                code=USAGE,
            )
        written = []
        if update:
            base, _ = machine.compile(pin.tree, (UNCHANGED,), ())
            codes = {c.key: c.figures.code for c in base if c.figures is not None}
            found = budgets.record(found, cells, codes)
            written = _record(project, pin, found)
    findings = budgets.judge(found, cells, whole=whole)
    if whole:
        findings += _unlaunched(tree, applied, found, cells)
        if not update:
            findings += _stale(project, pin, found)
    runs = len(found.tritons) * len(archs or ARCHS)
    return Report(cells, findings, cached, runs, written)


def check_out(tree: worktree.Tree, tree_id: str, folder: Path) -> Path:
    """Files of the whole stack, or of the release without patches."""
    name = "base" if tree_id == tree.pin.tree else "stack"
    slot = folder / f"codegen-{name}"
    prove.check_out(tree, tree_id, slot)
    return slot


def _record(project: Project, pin: Pin, found: budgets.Budgets) -> list[Path]:
    written = []
    for path, content in (
        (found.path, budgets.text(found)),
        (page(project), budgets.table(found, pin.release)),
    ):
        if not path.is_file() or path.read_text("utf-8") != content:
            path.write_text(content, "utf-8")
            written.append(path)
    return written


def _stale(project: Project, pin: Pin, found: budgets.Budgets) -> Iterable[Finding]:
    path = page(project)
    content = path.read_text("utf-8") if path.is_file() else ""
    if content != budgets.table(found, pin.release):
        where = str(path.relative_to(project.root))
        yield Finding(where, f"is not what {found.path.name} says; use --update")


class _Machine:
    """Compiles the kernels of trees, unless the cache knows what comes out."""

    def __init__(
        self,
        tree: worktree.Tree,
        folder: Path,
        tritons: tuple[str, ...],
        jobs: int,
        step: Step,
    ):
        self.tree, self.folder, self.tritons = tree, folder, tritons
        self.jobs, self.step = jobs, step

    def compile(
        self, tree_id: str, archs: tuple[str, ...], names: tuple[str, ...]
    ) -> tuple[list[Cell], int]:
        """Every kernel, or the named ones, of a tree.

        Returns:
            The kernels, and how many pairs of Triton and architecture were cached.
        """
        cells: list[Cell] = []
        missing: dict[str, list[str]] = {}
        cached = 0
        for triton in self.tritons:
            for arch in archs:
                kept = _read(self._cache_file(tree_id, triton, arch))
                if kept is None:
                    missing.setdefault(triton, []).append(arch)
                else:
                    cached += 1
                    cells += kept
        if missing:
            slot = check_out(self.tree, tree_id, self.folder)
            share = max(1, self.jobs // len(missing))
            workers = min(self.jobs, len(missing))
            with concurrent.futures.ThreadPoolExecutor(workers) as pool:
                for done in pool.map(
                    lambda item: self._run(slot, *item, names, share), missing.items()
                ):
                    cells += done
            if not names:
                self._keep(tree_id, missing, cells)
        if names:
            cells = [cell for cell in cells if cell.kernel in names]
        return cells, cached

    def _cache_file(self, tree_id: str, triton: str, arch: str) -> Path:
        project = self.tree.project
        sources = sorted((project.root / "ci" / "codegen").glob("*.py"))
        parts = [
            *(str(_SCHEMA), tree_id, triton, arch, testenv.digest(project)),
            *(hash_file(path) for path in (*sources, Path(assembly.__file__))),
        ]
        name = hashlib.sha256("\n".join(parts).encode()).hexdigest()
        return project.cache / "codegen" / f"{name}.json"

    def _keep(
        self, tree_id: str, missing: dict[str, list[str]], cells: list[Cell]
    ) -> None:
        for triton, archs in missing.items():
            for arch in archs:
                some = [c for c in cells if (c.triton, c.arch) == (triton, arch)]
                if any(cell.error == _DIED for cell in some):
                    continue  # for want of memory or time, so perhaps not again
                path = self._cache_file(tree_id, triton, arch)
                path.parent.mkdir(parents=True, exist_ok=True)
                with tempfile.NamedTemporaryFile(
                    "w", dir=path.parent, delete=False
                ) as stream:
                    json.dump([asdict(cell) for cell in some], stream)
                os.replace(stream.name, path)

    def _run(
        self,
        slot: Path,
        triton: str,
        archs: list[str],
        names: tuple[str, ...],
        jobs: int,
    ) -> list[Cell]:
        project = self.tree.project
        home = testenv.triton(project, triton, self.step)
        self.step(f"compiling for {' and '.join(archs)} with Triton {triton}")
        environment = testenv.environment(project, slot)
        del environment["TRITON_INTERPRET"]
        if home is not None:
            path = environment["PYTHONPATH"]
            environment["PYTHONPATH"] = os.pathsep.join((str(home), path))
        with tempfile.TemporaryDirectory(dir=self.folder) as out:
            done = process.run(
                [
                    *(sys.executable, "-m", "codegen", "--out", out),
                    *("--jobs", str(jobs), "--triton", triton),
                    *(part for arch in archs for part in ("--arch", arch)),
                    *names,
                ],
                cwd=self.folder,
                env=environment,
            )
            if done.returncode:
                raise StackError(
                    f"compiling with Triton {triton} broke off (exit "
                    f"{done.returncode})",
                    details=process.tail(done.stderr),
                )
            return cells(Path(out), triton, slot)


def cells(folder: Path, triton: str, tree: Path) -> list[Cell]:
    """Read what ``ci/codegen`` left in a folder.

    A kernel whose compiler complained failed, even if it returned.

    Args:
        folder: With one ``.json`` for each kernel, and beside it its assembly
            (``.s``) and standard error (``.err``).
        triton: What compiled them.
        tree: Taken out of messages.
    """
    found = []
    for answer in sorted(folder.glob("*.json")):
        told = json.loads(answer.read_text())
        errors = answer.with_suffix(".err")
        complaints = errors.read_text(errors="replace") if errors.is_file() else ""
        error = _error(told, complaints).replace(f"{tree}{os.sep}", "")
        figures = None
        if not error:
            text = answer.with_suffix(".s").read_text()
            figures = assembly.figures(text, told["lds"])
        where = {key: told[key] for key in ("module", "kernel", "variant", "arch")}
        found.append(Cell(**where, triton=triton, figures=figures, error=error))
    return found


def _error(told: dict[str, Any], complaints: str) -> str:
    diagnostic = _DIAGNOSTIC.search(complaints)
    if diagnostic:
        return diagnostic[0].strip()
    if "error" in told:
        return told["error"].strip().splitlines()[-1].strip()
    return _DIED if told.get("died") else ""


def _read(path: Path) -> list[Cell] | None:
    """What was kept at ``path``; None if it is absent or damaged."""
    try:
        kept = json.loads(path.read_text("utf-8"))
        for item in kept:
            if item["figures"] is not None:
                loads = item["figures"]["loads"]
                item["figures"]["loads"] = {int(k): v for k, v in loads.items()}
                item["figures"] = assembly.Figures(**item["figures"])
        return [Cell(**item) for item in kept]
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _unlaunched(
    tree: worktree.Tree, applied: str, found: budgets.Budgets, cells: list[Cell]
) -> Iterable[Finding]:
    """Triton functions that the patches change and nothing here compiles."""
    repository = tree.repository
    launched = {cell.kernel for cell in cells}
    excused = {entry["kernel"] for entry in found.data["not_launched"]}
    touched: dict[str, str] = {}
    helpers: set[str] = set()
    for path, (old, new) in repository.changed(tree.pin.tree, applied).items():
        if not path.startswith("vllm/") or not path.endswith(".py"):
            continue
        before = _source(repository, old)
        after = _source(repository, new)
        was = {name: ast.dump(node) for name, node in jit_functions(before).items()}
        for name, node in jit_functions(after).items():
            helpers |= called(node)
            if was.get(name) != ast.dump(node):
                touched[name] = path
    for name, path in sorted(touched.items()):
        if name not in launched | excused | helpers:
            what = f"{path}: a patch touches it, and ci/codegen/launches.py does not"
            yield Finding(name, f"{what} launch it")


def _source(repository: git.Repository, entry: git.Entry) -> str:
    return "" if entry.blob == git.NO_BLOB else repository.read(entry.blob).decode()


def jit_functions(source: str) -> dict[str, ast.FunctionDef]:
    """The functions of a Python file that Triton compiles, by name."""
    return {
        node.name: node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef)
        and any(".jit" in ast.unparse(mark) for mark in node.decorator_list)
    }


def called(function: ast.FunctionDef) -> set[str]:
    """The plain names that a function calls."""
    return {
        node.func.id
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }


def check(report: Report) -> None:
    """Raise if a kernel does not keep its budget.

    Raises:
        StackError: naming kernels and figures.
    """
    if report.problems:
        raise StackError(
            f"{len(report.problems)} findings",
            mend="if it is meant: scripts/stack codegen --update",
            details=tuple(f"{f.cell}: {f.what}" for f in report.problems),
        )
