"""What is here: the pin, the patches, and the applied tree."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from . import apply, base, export, patchfile, trailers, worktree
from .errors import StackError
from .pins import Pin, Project


@dataclass(frozen=True)
class Status:
    """The stack at a glance; nothing is fetched or changed to know it."""

    pin: Pin
    base: str  # where the base is, or would come from
    patches: list[patchfile.Patch]
    applied: dict[str, bool]
    tree_id: str | None
    state: worktree.State | None
    drift: list[export.Change]
    problem: str


def status(project: Project, pin: Pin) -> Status:
    patches = patchfile.load(project.patches(pin))
    tree = worktree.Tree(project, pin)
    source = _base_source(project, pin, tree)
    if not tree.exists:
        return Status(pin, source, patches, {}, None, None, [], "")
    state = tree.state()
    applied: dict[str, bool] = {}
    changes: list[export.Change] = []
    tree_id, problem = None, ""
    try:
        with tree.quarantine(True):
            commits = apply.known_commits(tree, patches)
        present = _trees(tree, state)
        applied = {a.patch.name: a.tree in present for a in commits}
        if state.head:
            tree_id = tree.repository.commit(state.head).tree
            changes = export.drift(project, pin)
    except StackError as error:
        problem = error.message
    return Status(pin, source, patches, applied, tree_id, state, changes, problem)


def _trees(tree: worktree.Tree, state: worktree.State) -> set[str]:
    if state.head is None:
        return set()
    chain = tree.repository.chain(worktree.BASE, state.head)
    return {tree.repository.commit(commit).tree for commit in chain}


def _base_source(project: Project, pin: Pin, tree: worktree.Tree) -> str:
    if tree.exists:
        return f"in {tree.path.relative_to(project.root)}"
    submodule = base.submodule_repository(project)
    if submodule is not None and submodule.has(pin.commit):
        return "the submodule"
    if base.cached_archive(project, pin):
        return "the cached archive"
    return "the package index"


def describe(project: Project, pin: Pin, name: str) -> dict[str, Any]:
    """One patch: its message, trailers, files and commit (None if not applied)."""
    patches = patchfile.load(project.patches(pin))
    patch = patchfile.find(patches, name)
    tree = worktree.Tree(project, pin)
    commit = None
    if tree.exists:
        with tree.quarantine(True):
            commits = apply.known_commits(tree, patches)
        commit = next(a.commit for a in commits if a.patch.name == patch.name)
    added, removed = patch.size
    body, found = trailers.split(patch.message)
    return {
        "name": patch.name,
        "file": str(patch.path.relative_to(project.root)),
        "sha256": patch.sha256,
        "subject": patch.subject,
        "body": body.split("\n", 1)[1].strip("\n"),
        "trailers": [[trailer.key, trailer.value] for trailer in found],
        "files": [change.path for change in patch.files],
        "added": added,
        "removed": removed,
        "commit": commit,
    }


def version(project: Project, pin: Pin, tree_id: str, count: int) -> str:
    """The PEP 440 version of a build of this stack."""
    rocm = "".join(pin.toolchain.rocm.split(".")[:3])
    release = pin.release.removeprefix("v")
    return f"{release}+rocm{rocm}.mi300x.{count}.g{tree_id[:8]}"
