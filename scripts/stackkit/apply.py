"""Turns the base and the series into commits, exactly or not at all."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path

from . import git, patchfile, superproject
from .base import IDENTITY
from .errors import CONFLICT, StackError
from .patchfile import Patch
from .pins import Pin, Project
from .report import Progress, Step
from .worktree import BASE, BRANCH, State, Tree, source_id


@dataclass(frozen=True)
class Applied:
    """A patch and the commit it became."""

    patch: Patch
    commit: str
    tree: str


@dataclass(frozen=True)
class Result:
    """What an apply did."""

    path: Path
    commits: list[Applied]
    base: str
    source: str | None  # where the base came from; None if it was there
    changed: bool
    backup: str | None

    @property
    def tree_id(self) -> str:
        return self.commits[-1].tree if self.commits else self.base


def commit_patch(
    repository: git.Repository, parent: str, patch: Patch
) -> tuple[str, str]:
    """Write the commit that ``patch`` makes of ``parent``.

    Returns:
        The ids of the commit and of its tree.

    Raises:
        StackError: if a blob before or after is not the one the patch names.
    """
    before = repository.commit(parent).tree
    paths = [change.path for change in patch.files]
    present = repository.entries(paths, tree=before)
    for change in patch.files:
        actual = present[change.path].blob if change.path in present else git.NO_BLOB
        if actual != change.old:
            raise StackError(
                f"{patch.path}: {change.path} was changed from blob "
                f"{_name(change.old)}, but the tree has {_name(actual)} here",
                mend="the patch belongs to another base or another place in the "
                "series; git log -p patches/ shows what moved, and if the file was "
                "edited by hand, git checkout takes that back",
            )
    with repository.scratch_index() as index:
        repository.read_tree(before, index)
        try:
            repository.apply_to_index(patch.diff, index)
        except git.GitError as error:
            raise StackError(
                f"{patch.path}: the diff is damaged",
                mend=f"git checkout {patch.path}",
                details=error.details,
            ) from error
        after = repository.entries(paths, index=index)
        for change in patch.files:
            actual = after[change.path].blob if change.path in after else git.NO_BLOB
            if actual != change.new:
                raise StackError(
                    f"{patch.path}: gives blob {_name(actual)} of {change.path}, but "
                    f"its index line says {_name(change.new)}",
                    mend="the patch was edited by hand; change the tree in build/ and "
                    "run scripts/stack export instead",
                )
        tree = repository.write_tree(index)
    author, message = patch.author_and_message
    committer = git.Identity(IDENTITY.name, IDENTITY.email, author.date)
    return repository.write_commit(tree, [parent], message, author, committer), tree


def _name(blob: str) -> str:
    return "(no file)" if blob == git.NO_BLOB else blob[:12]


def commits_of(repository: git.Repository, patches: list[Patch]) -> list[Applied]:
    """The commits of ``patches`` on the base, written as objects only."""
    parent = repository.resolve(BASE)
    assert parent is not None
    done = []
    for patch in patches:
        parent, tree = commit_patch(repository, parent, patch)
        done.append(Applied(patch, parent, tree))
    return done


def stack_tree(pin: Pin, commits: list[Applied]) -> str:
    """The tree of the whole stack."""
    return commits[-1].tree if commits else pin.tree


def moved_commit(
    repository: git.Repository, commit: str, tree: str, parent: str
) -> str:
    """``commit`` again, with another tree and parent: same message, author, dates."""
    old = repository.commit(commit)
    return repository.write_commit(tree, [parent], old.message, old.author, old.author)


def chosen_tip(
    repository: git.Repository,
    commits: list[Applied],
    chosen: Container[str],
    tip: str,
    step: Step,
    *,
    why: str,
    mend: str,
) -> str:
    """Commits of the chosen patches alone, as objects; returns the tip.

    Args:
        repository: Has the commits.
        commits: The whole stack.
        chosen: Names of the patches that stay.
        tip: The base of the stack.
        step: Told of each patch that is merged.
        why, mend: Of the error, after the name of a patch that conflicts.

    Raises:
        StackError: if a patch does not merge without those that are left out.
    """
    moved = False
    with repository.merging() as merging:
        for applied in commits:
            if applied.patch.name not in chosen:
                moved = True
                continue
            if not moved:
                tip = applied.commit
                continue
            step(applied.patch.name)
            merge = merging.pick(applied.commit, tip)
            if merge.tree is None:
                raise StackError(
                    f"{applied.patch.name} {why}",
                    mend=mend,
                    details=tuple(conflict.path for conflict in merge.conflicts),
                    code=CONFLICT,
                )
            tip = moved_commit(repository, applied.commit, merge.tree, tip)
    return tip


def known_commits(tree: Tree, patches: list[Patch]) -> list[Applied]:
    """As :func:`commits_of`, from the record if it is of these very patches."""
    repository = tree.repository
    tip, source = tree.applied()
    if tip and source == source_id(patches, series_bytes(tree)):
        chain = repository.chain(BASE, tip)
        if len(chain) == len(patches):
            return [
                Applied(patch, commit, repository.commit(commit).tree)
                for patch, commit in zip(patches, chain, strict=True)
            ]
    return commits_of(repository, patches)


def series_bytes(tree: Tree) -> bytes:
    return (tree.project.patches(tree.pin) / patchfile.SERIES).read_bytes()


def apply(
    project: Project,
    pin: Pin,
    *,
    option: Path | None,
    discard: bool,
    dry_run: bool,
    progress: Progress,
    step: Step,
) -> Result:
    """Bring build/<release> to the base with every patch of the series on it.

    The caller holds the project's lock.  Files change only after every patch has
    been applied to objects; a tree that is there already is left alone.

    Args:
        project, pin: What to build.
        option: The user's ``--base``, or None.
        discard: Whether unexported work may be replaced (it is backed up).
        dry_run: Whether to stop before any ref or file of the tree changes.
        progress: Told of download progress.
        step: Told what is being done, in words.

    Raises:
        StackError: if the base is not the pinned one, a patch does not apply
            exactly, or work would be lost.
    """
    superproject.check_gitlink(project, pin)
    patches = patchfile.load(project.patches(pin))
    tree = Tree(project, pin)
    step(f"base {pin.tag}")
    if dry_run:
        state = tree.state()
        with tree.rehearsal(option, progress) as source:
            step(f"{len(patches)} patches")
            planned = _plan(tree, state, patches)
        if state.head and not planned.current and not state.interrupted:
            tree.protect(state, discard, back_up=False)
        return planned.result(tree, source, None)
    source = tree.ensure_base(option, progress)
    if tree.recover(discard=discard):
        step("finished an interrupted run")
    state = tree.state()
    step(f"{len(patches)} patches")
    planned = _plan(tree, state, patches)
    backup = None
    if not planned.current:
        backup = tree.protect(state, discard) if state.head else None
        tree.switch(tree.record(planned.tip, patches, series_bytes(tree)), backup)
    return planned.result(tree, source, backup)


def tree_of(project: Project, pin: Pin, progress: Progress) -> tuple[str, int]:
    """The tree id that the patch files give, and their number; changes nothing.

    Raises:
        StackError: if the base cannot be had, or a patch does not apply exactly.
    """
    superproject.check_gitlink(project, pin)
    patches = patchfile.load(project.patches(pin))
    tree = Tree(project, pin)
    with tree.rehearsal(None, progress):
        commits = known_commits(tree, patches)
    return stack_tree(pin, commits), len(commits)


@dataclass(frozen=True)
class _Plan:
    commits: list[Applied]
    base: str
    tip: str
    current: bool  # the tree is there already, and nothing else is in it

    def result(self, tree: Tree, source: str | None, backup: str | None) -> Result:
        changed = not self.current
        return Result(tree.path, self.commits, self.base, source, changed, backup)


def _plan(tree: Tree, state: State, patches: list[Patch]) -> _Plan:
    commits = known_commits(tree, patches)
    tip = commits[-1].commit if commits else tree.repository.resolve(BASE)
    assert tip is not None
    current = (
        state.head == tip
        and state.source == source_id(patches, series_bytes(tree))
        and state.branch == BRANCH
        and not (state.work or state.operation or state.interrupted)
    )
    return _Plan(commits, tree.repository.commit(BASE).tree, tip, current)
