"""Red and green: a patch's tests fail on the stack without it and pass with it.

For patch N, *green* is the stack up to and including N, and *red* is the stack up
to N-1 with only N's own test files put over it.  A test that fails in red because
its file or an import is missing proves nothing, so the failure has to be an
assertion, or the exception that the patch's Tests trailer names.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import json
import os
import queue
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from . import apply, git, patchfile, process, testenv, trailers, worktree
from .errors import StackError
from .pins import Pin, Project
from .report import Progress, Step

SLOTS = ".prove"

_SCHEMA = 1
_ASSERTIONS = ("AssertionError", "Failed")  # Failed: pytest.fail and DID NOT RAISE


@dataclass(frozen=True)
class TestProof:
    """One pytest id, without and with the patch."""

    __test__ = False

    node: str
    red: str
    green: str
    ok: bool


@dataclass(frozen=True)
class Proof:
    """One patch, without and with."""

    patch: str
    red_tree: str
    green_tree: str
    tests: tuple[TestProof, ...]
    reason: str  # of a patch that declares "Tests: none"
    cached: bool

    @property
    def ok(self) -> bool:
        return all(test.ok for test in self.tests)


def prove(
    project: Project,
    pin: Pin,
    names: tuple[str, ...],
    *,
    jobs: int,
    progress: Progress,
    step: Step,
) -> list[Proof]:
    """Prove patches (all, if no name is given) of the series.

    Results that hold are kept in the cache by the content of both trees, of the
    harness and of the environment; nothing else makes a result old.

    Args:
        project, pin: The stack.
        names: Patch names.
        jobs: How many trees are tested at once.
        progress: Told of download progress.
        step: Told which patch was decided.

    Raises:
        StackError: if the stack does not apply.
    """
    folder = project.build / SLOTS
    with worktree.lock(project, lambda: step("waiting for another run")):
        tree = worktree.Tree(project, pin)
        tree.ensure_base(None, progress)
        patches = patchfile.load(project.patches(pin))
        wanted = [patchfile.find(patches, name) for name in names] or patches
        _require_tests(wanted)
        commits = apply.known_commits(tree, patches)
        plans = _plans(tree, commits)
        folder.mkdir(exist_ok=True)
    with worktree.lock(project, lambda: step("waiting for another prove"), folder):
        slots: queue.Queue[Path] = queue.Queue()
        for number in range(jobs):
            slots.put(folder / f"slot-{number}")
        with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            futures = [
                pool.submit(_prove_one, tree, plans[patch.name], slots, step)
                for patch in wanted
            ]
            return [future.result() for future in futures]


def known(project: Project, pin: Pin, name: str, progress: Progress) -> Proof | None:
    """What the cache has about one patch as it is now; nothing is run.

    The caller holds no lock.
    """
    with worktree.lock(project, lambda: None):
        tree = worktree.Tree(project, pin)
        tree.ensure_base(None, progress)
        patches = patchfile.load(project.patches(pin))
        wanted = patchfile.find(patches, name)
        _require_tests([wanted])
        plan = _plans(tree, apply.known_commits(tree, patches))[wanted.name]
    tests = trailers.test_ids(wanted.trailers)
    if not tests:
        reason = wanted.trailer("Tests").removeprefix("none: ")
        return Proof(name, plan.red_tree, plan.green_tree, (), reason, False)
    decided = _read(_cache_file(project, plan, tests))
    if not decided:
        return None
    return Proof(name, plan.red_tree, plan.green_tree, decided, "", cached=True)


def _require_tests(patches: list[patchfile.Patch]) -> None:
    # A Tests trailer that cannot be read must not count as one that was proven.
    for patch in patches:
        if not trailers.tests_are_declared(patch.trailers):
            raise StackError(
                f"{patch.path}: a Tests trailer is missing or malformed",
                mend="scripts/stack lint says what its form is",
            )


@dataclass(frozen=True)
class _Plan:
    patch: patchfile.Patch
    red_tree: str
    green_tree: str


def _plans(tree: worktree.Tree, commits: list[apply.Applied]) -> dict[str, _Plan]:
    plans = {}
    before = tree.pin.tree
    for applied in commits:
        tests = [
            change.path
            for change in applied.patch.files
            if change.path.startswith("tests/") and change.new != git.NO_BLOB
        ]
        entries = tree.repository.entries(tests, tree=applied.tree) if tests else {}
        red = tree.repository.overlay(before, entries)
        plans[applied.patch.name] = _Plan(applied.patch, red, applied.tree)
        before = applied.tree
    return plans


def _prove_one(
    tree: worktree.Tree, plan: _Plan, slots: queue.Queue[Path], step: Step
) -> Proof:
    patch = plan.patch
    tests = trailers.test_ids(patch.trailers)
    if not tests:
        reason = patch.trailer("Tests").removeprefix("none: ")
        return Proof(patch.name, plan.red_tree, plan.green_tree, (), reason, False)
    kept = _cache_file(tree.project, plan, tests)
    decided = _read(kept)
    if decided:
        step(f"{patch.name}: cached")
        return Proof(
            patch.name, plan.red_tree, plan.green_tree, decided, "", cached=True
        )
    nodes = [test.node for test in tests]
    slot = slots.get()
    try:
        step(f"{patch.name}: without it")
        red = _run(tree, plan.red_tree, nodes, slot)
        step(f"{patch.name}: with it")
        green = _run(tree, plan.green_tree, nodes, slot)
    finally:
        slots.put(slot)
    decided = tuple(_decide(test, red, green) for test in tests)
    proof = Proof(patch.name, plan.red_tree, plan.green_tree, decided, "", cached=False)
    if proof.ok:
        _write(kept, {"patch": patch.name, "tests": [asdict(t) for t in decided]})
    step(f"{patch.name}: {'proven' if proof.ok else 'NOT proven'}")
    return proof


def _cache_file(project: Project, plan: _Plan, tests: list[trailers.TestId]) -> Path:
    key = json.dumps(
        [
            _SCHEMA,
            plan.red_tree,
            plan.green_tree,
            [(test.node, test.raises) for test in tests],
            testenv.digest(project),
        ]
    )
    name = hashlib.sha256(key.encode()).hexdigest()
    return project.cache / "prove" / f"{name}.json"


def _read(path: Path) -> tuple[TestProof, ...]:
    """What :func:`_write` left at ``path``; nothing, if it is absent or damaged."""
    try:
        found = json.loads(path.read_text("utf-8"))
        return tuple(TestProof(**test) for test in found["tests"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return ()


def _write(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as stream:
        json.dump(value, stream, indent=1)
    os.replace(stream.name, path)


@contextlib.contextmanager
def opened(
    project: Project, pin: Pin, progress: Progress, step: Step
) -> Iterator[tuple[worktree.Tree, list[apply.Applied], Path]]:
    """The repository, the commits of the stack, and the folder of slots, locked.

    Whatever needs a scratch folder has this one, so that a clean waits for it.
    """
    folder = project.build / SLOTS
    with worktree.lock(project, lambda: step("waiting for another run")):
        tree = worktree.Tree(project, pin)
        tree.ensure_base(None, progress)
        commits = apply.known_commits(tree, patchfile.load(project.patches(pin)))
        folder.mkdir(exist_ok=True)
    with worktree.lock(project, lambda: step("waiting for another prove"), folder):
        yield tree, commits, folder


def check_out(tree: worktree.Tree, tree_id: str, slot: Path) -> None:
    """Make ``slot`` hold exactly ``tree_id``, moving only the files that differ."""
    index = slot.with_suffix(".index")
    index.with_name(index.name + ".lock").unlink(missing_ok=True)
    slot.mkdir(exist_ok=True)
    work = git.Repository(tree.repository.git_dir, slot)
    environment = {"GIT_INDEX_FILE": os.fspath(index)}
    before = work.entries(index=index) if index.is_file() else {}
    work.run("read-tree", "--reset", "-u", tree_id, env=environment)
    changed = work.run("diff-files", "--name-only", "-z", env=environment)
    # Ignored files too: what one run leaves must not help the next one.
    others = work.run("ls-files", "--others", "-z", env=environment).split(b"\0")
    stray = [path for path in others if path and b"__pycache__/" not in path]
    if changed or stray:  # a killed run or a test left something
        shutil.rmtree(slot)
        index.unlink()
        check_out(tree, tree_id, slot)
        return
    # Python tells stale byte code by the second and the size of the source, and two
    # versions of a file can agree in both.
    after = work.entries(index=index)
    for path in map(Path, before.keys() | after.keys()):
        if before.get(str(path)) != after.get(str(path)) and path.suffix == ".py":
            for cached in (slot / path.parent).glob(f"__pycache__/{path.stem}.*.pyc"):
                cached.unlink()


def _run(
    tree: worktree.Tree, tree_id: str, nodes: list[str], slot: Path
) -> dict[str, Any]:
    """Run pytest ids on a tree; returns the harness's report.

    The report of a run that died holds its last words instead of tests.
    """
    check_out(tree, tree_id, slot)
    report = slot.with_suffix(".json")
    report.unlink(missing_ok=True)
    done = process.run(
        [
            *(sys.executable, "-m", "pytest", *testenv.PYTEST_OPTIONS, "-q"),
            f"--stack-report={report}",
            *nodes,
        ],
        cwd=slot,
        env=testenv.environment(tree.project, slot),
    )
    if not report.is_file():
        last = process.tail(done.stdout + done.stderr, 3)
        died = f"pytest died (exit {done.returncode}): {' / '.join(last)}"
        return {"tests": [], "collect_errors": [], "died": died}
    return json.loads(report.read_text())


def _decide(
    test: trailers.TestId, red: dict[str, Any], green: dict[str, Any]
) -> TestProof:
    red_words, red_ok = _judge_red(test, red)
    green_words, green_ok = _judge_green(test, green)
    return TestProof(test.node, red_words, green_words, red_ok and green_ok)


def _items(test: trailers.TestId, report: dict[str, Any]) -> list[dict[str, Any]]:
    """The report's items under an id: itself, its parameters, or all of its file."""
    prefixes = (test.node + "[", test.node + "::")
    return [
        item
        for item in report["tests"]
        if item["nodeid"] == test.node or item["nodeid"].startswith(prefixes)
    ]


def _nothing_ran(test: trailers.TestId, report: dict[str, Any]) -> str:
    if report.get("died"):
        return str(report["died"])
    file = test.node.split("::")[0]
    for error in report["collect_errors"]:
        if error["nodeid"].startswith(file):
            return f"not collected: {error['message']}"
    return "no such test"


def _judge_red(test: trailers.TestId, report: dict[str, Any]) -> tuple[str, bool]:
    items = _items(test, report)
    if not items:
        return _nothing_ran(test, report), False
    allowed = (*_ASSERTIONS, test.raises) if test.raises else _ASSERTIONS
    bad = [item for item in items if item["outcome"] in ("failed", "error")]
    for item in bad:
        names = {name.rsplit(".", 1)[-1] for name in item["mro"]}
        broken = names & set(trailers.PROVES_NOTHING)
        if item["phase"] != "call" or broken or not names & set(allowed):
            what = f"{item['exception']} in {item['phase']}: {item['message']}"
            return f"fails for another reason: {what}", False
    skipped = [item for item in items if item["outcome"] == "skipped"]
    if skipped:
        return f"{len(skipped)} skipped", False
    if not bad:
        return f"{len(items)} passed: the test does not see the defect", False
    words = f"{len(bad)} of {len(items)} failed ({_short(bad[0]['exception'])})"
    return words, True


def _judge_green(test: trailers.TestId, report: dict[str, Any]) -> tuple[str, bool]:
    items = _items(test, report)
    if not items:
        return _nothing_ran(test, report), False
    passed = [item for item in items if item["outcome"] == "passed"]
    if len(passed) < len(items):
        other = next(item for item in items if item["outcome"] != "passed")
        return f"{other['nodeid']} {other['outcome']}: {other['message']}", False
    return f"{len(items)} passed", True


def _short(exception: str | None) -> str:
    return (exception or "").rsplit(".", 1)[-1]


def check(proofs: list[Proof]) -> None:
    """Raise if a proof does not hold.

    Raises:
        StackError: listing the tests that do not prove their patch.
    """
    broken = [
        f"{proof.patch}: {test.node}: without: {test.red}; with: {test.green}"
        for proof in proofs
        for test in proof.tests
        if not test.ok
    ]
    if broken:
        raise StackError(
            f"{len(broken)} tests do not prove their patch", details=tuple(broken)
        )
