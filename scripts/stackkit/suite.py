"""make test: everything that can be shown on this machine."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from . import (
    apply,
    codegen,
    hipgate,
    lint,
    patchfile,
    process,
    prove,
    testenv,
    trailers,
    verify,
    worktree,
)
from .errors import StackError
from .pins import Pin, Project
from .report import Progress, Step


@dataclass(frozen=True)
class Part:
    """One part of the suite and how it ended."""

    name: str
    ok: bool
    seconds: float
    detail: str


PARTS = (
    "lint",
    "apply",
    "verify",
    "tool",
    "harness",
    "prove",
    "tree",
    "codegen",
    "hip",
)


def run(
    project: Project,
    pin: Pin,
    names: tuple[str, ...],
    *,
    jobs: int,
    progress: Progress,
    step: Step,
) -> list[Part]:
    """Run the named parts of the suite, all of them if none is named.

    pytest's own output goes to standard output as it comes.

    Args:
        project, pin: The stack.
        names: Some of :data:`PARTS`.
        jobs: How many processes at once.
        progress: Told of download progress.
        step: Told what is being done.
    """
    parts: dict[str, Callable[[], str]] = {
        "lint": lambda: _lint(project, pin),
        "apply": lambda: _apply(project, pin, progress, step),
        "verify": lambda: _verify(project, pin, progress, step),
        "tool": lambda: _tool(project, jobs),
        "harness": lambda: _harness(project, pin),
        "prove": lambda: _prove(project, pin, jobs, progress, step),
        "tree": lambda: _tree(project, pin, jobs),
        "codegen": lambda: _codegen(project, pin, jobs, progress, step),
        "hip": lambda: _hip(project, pin, jobs, progress, step),
    }
    testenv.ensure(project, step)
    done = []
    for name in names or PARTS:
        step(name)
        start = time.monotonic()
        try:
            detail, ok = parts[name](), True
        except StackError as error:
            detail = "\n".join([error.message, *error.details])
            ok = False
        done.append(Part(name, ok, time.monotonic() - start, detail))
    return done


def _lint(project: Project, pin: Pin) -> str:
    findings = lint.lint(project, pin)
    if findings:
        raise StackError(
            f"{len(findings)} findings",
            details=tuple(f"{f.where}: {f.what}" for f in findings),
        )
    return f"{len(lint.RULES)} rules"


def _apply(project: Project, pin: Pin, progress: Progress, step: Step) -> str:
    with worktree.lock(project, lambda: step("waiting for another run")):
        result = apply.apply(
            project,
            pin,
            option=None,
            discard=False,
            dry_run=False,
            progress=progress,
            step=step,
        )
    return f"{len(result.commits)} patches, tree {result.tree_id[:12]}"


def _verify(project: Project, pin: Pin, progress: Progress, step: Step) -> str:
    with worktree.lock(project, lambda: step("waiting for another run")):
        checks = verify.verify(project, pin, progress=progress, step=step)
    bad = [f"{check.name}: {check.detail}" for check in checks if not check.ok]
    if bad:
        raise StackError(f"{len(bad)} checks failed", details=tuple(bad))
    return f"{len(checks)} checks"


def _prove(
    project: Project, pin: Pin, jobs: int, progress: Progress, step: Step
) -> str:
    proofs = prove.prove(project, pin, (), jobs=jobs, progress=progress, step=step)
    prove.check(proofs)
    tests = sum(len(proof.tests) for proof in proofs)
    cached = sum(proof.cached for proof in proofs)
    return f"{len(proofs)} patches, {tests} pytest ids, {cached} patches cached"


def _pytest(arguments: list[str], cwd: Path, env: dict[str, str]) -> str:
    start = time.monotonic()
    done = process.run(
        [sys.executable, "-m", "pytest", *arguments], cwd=cwd, env=env, capture=False
    )
    if done.returncode:
        raise StackError(f"pytest ended with {done.returncode}")
    return f"pytest passed in {time.monotonic() - start:.0f} s"


def _tool(project: Project, jobs: int) -> str:
    """The tool's own tests, and the rules that all patches keep."""
    options = ["-n", str(jobs), "--dist=loadfile"]
    return _pytest([*options, "tests/stack", "tests/patches"], project.root, {})


def _harness(project: Project, pin: Pin) -> str:
    """The tests that import vLLM; one process, because each import is slow."""
    env = testenv.environment(project, project.tree(pin))
    folders = ["tests/harness", "tests/gfx942", "tests/codegen"]
    return _pytest(["-p", "harness.plugin", *folders], project.root, env)


def _tree(project: Project, pin: Pin, jobs: int) -> str:
    """Every test file that a patch's Tests trailers name, on the whole stack.

    Files that a patch touches without naming them need a GPU.
    """
    patches = patchfile.load(project.patches(pin))
    tests = [test for p in patches for test in trailers.test_ids(p.trailers)]
    files = sorted({test.node.split("::")[0] for test in tests})
    if not files:
        return "no patch carries a test"
    tree = project.tree(pin)
    options = [*testenv.PYTEST_OPTIONS, "-n", str(jobs), "--dist=loadfile"]
    env = {**testenv.environment(project, tree), "PYTHONDONTWRITEBYTECODE": "1"}
    return _pytest([*options, *files], tree, env)


def _codegen(
    project: Project, pin: Pin, jobs: int, progress: Progress, step: Step
) -> str:
    report = codegen.codegen(
        project,
        pin,
        (),
        archs=(),
        update=False,
        jobs=jobs,
        progress=progress,
        step=step,
    )
    codegen.check(report)
    return (
        f"{len(report.cells)} compiled kernels keep their budgets; {report.cached} of "
        f"{report.runs} runs cached"
    )


def _hip(project: Project, pin: Pin, jobs: int, progress: Progress, step: Step) -> str:
    gate = hipgate.hipgate(project, pin, jobs=jobs, progress=progress, step=step)
    if gate.missing:
        return f"not run: {'; '.join(gate.missing)}"
    hipgate.check(gate)
    return f"{len(gate.checks)} demands met, {gate.toolchain}"


def default_jobs() -> int:
    return len(os.sched_getaffinity(0))
