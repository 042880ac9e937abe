"""Proofs from scratch that the stack is what it says: nothing cached is believed."""

from __future__ import annotations

import ast
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from . import apply, base, export, git, patchfile, superproject, worktree
from .errors import StackError
from .pins import Pin, Project
from .report import Progress, Step


@dataclass(frozen=True)
class Check:
    """One proof and its outcome."""

    name: str
    ok: bool
    detail: str


def verify(
    project: Project, pin: Pin, *, progress: Progress, step: Step
) -> list[Check]:
    """Prove base, exactness, interoperability and the applied tree.

    The caller holds the project's lock.  Files change nowhere; a missing base is
    fetched.

    Raises:
        StackError: if the base cannot be had at all.
    """
    checks = []

    def prove(name: str, proof: Callable[[], str]) -> None:
        step(name)
        try:
            checks.append(Check(name, True, proof()))
        except StackError as error:
            told = "; ".join([error.message, *error.details])
            checks.append(Check(name, False, told))

    tree = worktree.Tree(project, pin)
    tree.ensure_base(None, progress)
    patches = patchfile.load(project.patches(pin))
    prove("submodule entry", lambda: _gitlink(project, pin))
    prove("submodule is pristine", lambda: _pristine(project, pin))
    prove("archive", lambda: _archive(project, pin))
    prove("base tree", lambda: _base(tree))
    prove("patches apply exactly", lambda: _exact(tree, patches))
    if checks[-1].ok:
        commits = apply.commits_of(tree.repository, patches)
        prove("every prefix parses", lambda: _parses(tree, commits))
        prove("patches are as export writes them", lambda: _canonical(tree, commits))
        prove("git am gives the same commits", lambda: _interoperates(tree, commits))
        prove("applied tree", lambda: _applied(tree, commits))
    return checks


def _gitlink(project: Project, pin: Pin) -> str:
    superproject.check_gitlink(project, pin)
    return superproject.gitlink(project) or "not a git checkout"


def _pristine(project: Project, pin: Pin) -> str:
    repository = base.submodule_repository(project)
    if repository is None:
        return "not initialised"
    head = repository.resolve("HEAD")
    edited = git.Repository(repository.git_dir, project.submodule).dirty()
    if head != pin.commit or edited:
        raise StackError(
            f"vllm/ is at {head} with {len(edited)} edited files; edits belong in "
            f"build/{pin.release}, and git submodule update --force vllm resets it"
        )
    return pin.commit


def _archive(project: Project, pin: Pin) -> str:
    archive = base.cached_archive(project, pin)
    if archive is None or pin.sdist is None:
        return "none in the cache"
    actual = base.hash_file(archive)
    if actual != pin.sdist.sha256:
        raise base.wrong_archive(archive, pin.sdist.sha256, actual, str(archive))
    return f"sha256 {actual}"


def _base(tree: worktree.Tree) -> str:
    repository = tree.repository
    actual = repository.resolve(worktree.BASE + "^{tree}")
    if actual != tree.pin.tree:
        raise StackError(f"pinned tree {tree.pin.tree}, actual tree {actual}")
    # Hash every object of the base again: a damaged one has another id.
    repository.run("fsck", "--full", "--no-dangling", "--no-progress", worktree.BASE)
    return f"tree {actual}"


def _exact(tree: worktree.Tree, patches: list[patchfile.Patch]) -> str:
    commits = apply.commits_of(tree.repository, patches)
    return f"{len(commits)} patches, tree {commits[-1].tree}" if commits else "none"


def _parses(tree: worktree.Tree, commits: list[apply.Applied]) -> str:
    count = 0
    for applied in commits:
        for change in applied.patch.files:
            if change.path.endswith(".py") and change.new != git.NO_BLOB:
                source = tree.repository.read(change.new)
                try:
                    ast.parse(source, change.path)
                except (SyntaxError, ValueError) as error:  # ValueError: a null byte
                    raise StackError(f"{applied.patch.path}: {error}") from error
                count += 1
    return f"{count} Python files"


def _canonical(tree: worktree.Tree, commits: list[apply.Applied]) -> str:
    with git.Repository.borrowing(tree.repository) as plain:
        for applied in commits:
            if plain.format_patch(applied.commit) != applied.patch.content:
                raise StackError(
                    f"{applied.patch.path} was edited by hand or made by another tool; "
                    "scripts/stack apply, then scripts/stack export, rewrites it"
                )
    return f"{len(commits)} files, byte for byte"


def _interoperates(tree: worktree.Tree, commits: list[apply.Applied]) -> str:
    with (
        git.Repository.borrowing(tree.repository) as plain,
        tempfile.TemporaryDirectory(prefix="stack-am-") as folder,
    ):
        start = tree.repository.resolve(worktree.BASE)
        assert start is not None
        work = git.Repository(plain.git_dir, Path(folder))
        plain.run("config", "core.bare", "false")
        plain.update_refs({worktree.BRANCH: start})
        # Only the files that the patches touch are put on disk.
        work.run("read-tree", start)
        touched = {change.path for a in commits for change in a.patch.files}
        names = {kind: [] for kind in (True, False)}
        for path in work.entries():
            names[path in touched].append(os.fsencode(path) + b"\0")
        work.run(
            *("update-index", "--skip-worktree", "-z", "--stdin"),
            stdin=b"".join(names[False]),
        )
        work.run(
            *("checkout-index", "--index", "-z", "--stdin"), stdin=b"".join(names[True])
        )
        who = {
            "GIT_COMMITTER_NAME": base.IDENTITY.name,
            "GIT_COMMITTER_EMAIL": base.IDENTITY.email,
        }
        work.run(
            *("am", "--quiet", "-k", "--keep-cr", "--no-scissors", "--no-gpg-sign"),
            *("--whitespace=nowarn", "--committer-date-is-author-date"),
            *(str(applied.patch.path) for applied in commits),
            env=who,
        )
        tip = work.resolve(worktree.BRANCH)
    if commits and tip != commits[-1].commit:
        raise StackError(f"git am made {tip}, apply makes {commits[-1].commit}")
    return f"{tip}"


def _applied(tree: worktree.Tree, commits: list[apply.Applied]) -> str:
    state = tree.state()
    if state.head is None:
        return "not checked out"
    if state.work:
        raise StackError("holds unexported work", details=state.work)
    tip = commits[-1].commit if commits else tree.repository.resolve(worktree.BASE)
    if state.head != tip:
        raise StackError("is of other patches; run scripts/stack apply")
    changed = export.drift(tree.project, tree.pin)
    if changed:
        raise StackError("differs from the patch files: " + str(changed))
    return f"commit {tip}"
