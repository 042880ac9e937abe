"""Turns the commits of build/<release> back into patch files, byte for byte."""

from __future__ import annotations

import re
import secrets
import time
from dataclasses import dataclass
from pathlib import Path

from . import apply, git, patchfile, trailers
from .base import IDENTITY
from .errors import REFUSED, USAGE, StackError
from .patchfile import SERIES, SUFFIX, Patch
from .pins import Pin, Project
from .report import Step
from .worktree import APPLIED, BASE, BRANCH, State, Tree, source_id

NAMES = "refs/stack/names/"


@dataclass(frozen=True)
class Change:
    """What an export does to one patch file."""

    name: str
    what: str  # "new", "changed", "unchanged" or "removed"


@dataclass(frozen=True)
class Result:
    changes: list[Change]
    dirty: tuple[str, ...]  # uncommitted paths: in no patch


def open_tree(project: Project, pin: Pin, *, finish: bool) -> tuple[Tree, State]:
    """The applied tree, ready to be read.

    Args:
        project, pin: What to open.
        finish: Whether to complete what a killed run left (the lock is held).

    Raises:
        StackError: if there is none, or a git operation in it is unfinished.
    """
    tree = Tree(project, pin)
    if not tree.exists:
        raise StackError(f"{tree.path} does not exist", mend="scripts/stack apply")
    if finish:
        tree.recover()
    state = tree.state()
    if state.head is None:
        raise StackError(f"{tree.path} is not checked out", mend="scripts/stack apply")
    if state.operation or state.branch != BRANCH:
        tree.protect(state, discard=False)
    return tree, state


def patches_of(tree: Tree, tip: str) -> list[Patch]:
    """The commits from the base to ``tip`` as patches, each proven to come back.

    Raises:
        StackError: naming the commit (and line) that no patch file can hold.
    """
    repository = tree.repository
    if repository.start("merge-base", "--is-ancestor", BASE, tip).returncode:
        raise StackError(
            f"the branch 'stack' of {tree.path} does not start at the base",
            mend="rebase it onto the base: git -C "
            f"{tree.path} rebase --onto {BASE} <first commit of yours>^",
        )
    names = _known_names(tree)
    folder = tree.project.patches(tree.pin)
    parent = repository.resolve(BASE)
    assert parent is not None
    patches: list[Patch] = []
    commits = [repository.commit(commit) for commit in repository.chain(BASE, tip)]
    for commit in commits:
        if len(commit.parents) != 1:
            raise _refuse(commit, "is a merge", "rebase it away: the stack is a line")
    with git.Repository.borrowing(repository) as plain:
        for commit in commits:
            name = _name_of(commit, names)
            if any(patch.name == name for patch in patches):
                raise _refuse(commit, f"has the Change-Id of {name}, as another has")
            path = folder / (name + SUFFIX)
            patch = Patch(name, path, plain.format_patch(commit.id))
            parent = _prove_round_trip(repository, parent, commit, patch)
            patches.append(patch)
    return patches


def _refuse(commit: git.Commit, what: str, mend: str = "") -> StackError:
    return StackError(
        f"commit {commit.id[:12]} {commit.subject!r} {what}",
        mend=mend or "reword it: git rebase -i refs/stack/base, in the tree",
    )


def _prove_round_trip(
    repository: git.Repository, parent: str, commit: git.Commit, patch: Patch
) -> str:
    """Import ``patch`` again and compare; return the commit it makes of ``parent``."""
    if repository.commit(parent).tree == commit.tree:
        raise _refuse(
            commit,
            "has no diff, so it cannot be a patch",
            "drop it: git rebase -i refs/stack/base, in the tree",
        )
    author, message = patch.author_and_message
    wanted = commit.message.rstrip(b"\n") + b"\n"
    # git am takes trailing spaces and repeated blank lines away, mailinfo the rest.
    message = re.sub(rb"[ \t\r]+$", b"", message, flags=re.MULTILINE)
    message = re.sub(rb"\n{3,}", b"\n\n", message)
    if message != wanted:
        got, want = message.split(b"\n"), wanted.split(b"\n")
        number = next(
            (i for i, (a, b) in enumerate(zip(got, want, strict=False)) if a != b),
            min(len(got), len(want)),
        )
        line = want[number].decode("utf-8", "replace") if number < len(want) else ""
        raise _refuse(
            commit,
            f"has a message that git cannot carry in a patch: line {number + 1}, "
            f"{line!r}, would be lost or changed",
        )
    if git.mail_count(patch.content) != 1:
        lines = enumerate(wanted.decode("utf-8", "replace").split("\n"), 1)
        number, line = next((i, x) for i, x in lines if x.startswith("From "))
        raise _refuse(
            commit,
            f"has a message that git am takes for two: line {number}, {line!r}",
        )
    if (author.name, author.email) != (commit.author.name, commit.author.email):
        raise _refuse(
            commit,
            f"has an author that a patch cannot carry: {commit.author.name} "
            f"<{commit.author.email}>",
            "git commit --amend --reset-author, in the tree",
        )
    try:
        made, tree = apply.commit_patch(repository, parent, patch)
    except StackError as error:
        raise _refuse(
            commit,
            f"cannot be held by a patch: {error.message}",
            "take that file out of the commit, or give it another name",
        ) from error
    if tree != commit.tree:
        raise _refuse(commit, "does not come back from its own patch")
    return made


def _known_names(tree: Tree) -> dict[str, str]:
    """Patch names by Change-Id: of the recorded patches, then of ``stack new``."""
    names = {}
    if tree.repository.resolve(APPLIED):
        for file, content in tree.recorded_files(APPLIED).items():
            if file != SERIES:
                path = tree.project.patches(tree.pin) / file
                patch = Patch(file.removesuffix(SUFFIX), path, content)
                names[patch.trailer("Change-Id")] = patch.name
    for ref, blob in tree.repository.refs(NAMES).items():
        change = tree.repository.read(blob).decode()
        names.setdefault(change, ref.removeprefix(NAMES))
    return names


def _name_of(commit: git.Commit, names: dict[str, str]) -> str:
    message = commit.message.decode("utf-8", "replace")
    found = trailers.values(trailers.split(message)[1], "Change-Id")
    if not found or found[0] not in names:
        what = "has no Change-Id" if not found else "has a Change-Id of no patch"
        raise _refuse(
            commit, what, "give it a patch name: scripts/stack new NAME (newest commit)"
        )
    return names[found[0]]


def _series(folder: Path, patches: list[Patch]) -> bytes:
    """The series in the order of ``patches``, with the comments of ``folder``'s own.

    Comments at the top stay there, others stay above their entry.
    """
    lines = patchfile.series_lines(folder) if (folder / SERIES).is_file() else []
    comments: dict[str, list[str]] = {"": []}
    above = comments[""]
    for line in lines:
        if line.strip() and not line.lstrip().startswith("#"):
            comments.setdefault(
                line.strip(), above if above is not comments[""] else []
            )
            above = []
        else:
            above.append(line)
    out = list(comments[""])
    for patch in patches:
        out += [*comments.get(patch.path.name, []), patch.path.name]
    below = above if above is not comments[""] else []
    return "".join(line + "\n" for line in [*out, *below]).encode()


def export(project: Project, pin: Pin, *, dry_run: bool, step: Step) -> Result:
    """Write the commits of build/<release> as patch files and a series.

    The commits are then replaced by those that the files give, so that a
    following apply has nothing to do.  The caller holds the project's lock.

    Raises:
        StackError: if a commit cannot be held by a patch, or a patch file was
            edited since the tree was made.
    """
    tree, state = open_tree(project, pin, finish=not dry_run)
    assert state.head is not None
    step("commits")
    with tree.quarantine(dry_run):
        patches = patches_of(tree, state.head)
        changes = _changes(tree, patches)
        record, tip = record_of(tree, patches)
        if dry_run:
            tree.require_unedited(tree.recorded_files(record))
        else:
            tree.write_patches(record)
            tree.repository.update_refs({BRANCH: tip, APPLIED: record})
    return Result(changes, state.dirty)


def record_of(
    tree: Tree, patches: list[Patch], *, like: Path | None = None
) -> tuple[str, str]:
    """Write the record of ``patches``; return it and the tip it records.

    Args:
        tree, patches: What is recorded.
        like: The folder whose series has the comments, if it is not the tree's own.
    """
    commits = apply.commits_of(tree.repository, patches)
    tip = commits[-1].commit if commits else tree.repository.resolve(BASE)
    assert tip is not None
    folder = like or tree.project.patches(tree.pin)
    return tree.record(tip, patches, _series(folder, patches)), tip


def _changes(tree: Tree, patches: list[Patch]) -> list[Change]:
    changes = []
    for patch in patches:
        if not patch.path.is_file():
            changes.append(Change(patch.name, "new"))
        elif patch.path.read_bytes() != patch.content:
            changes.append(Change(patch.name, "changed"))
        else:
            changes.append(Change(patch.name, "unchanged"))
    recorded = tree.recorded_files(APPLIED) if tree.applied()[0] else {}
    gone = {name.removesuffix(SUFFIX) for name in recorded if name != SERIES}
    gone -= {patch.name for patch in patches}
    return changes + [Change(name, "removed") for name in sorted(gone)]


def drift(project: Project, pin: Pin) -> list[Change]:
    """How the patch files differ from what the applied tree would export."""
    tree, state = open_tree(project, pin, finish=False)
    assert state.head is not None
    with tree.quarantine(True):
        changes = _changes(tree, patches_of(tree, state.head))
    return [change for change in changes if change.what != "unchanged"]


def new(
    project: Project, pin: Pin, name: str, subject: str, *, dry_run: bool
) -> git.Commit:
    """Make the uncommitted changes, or the newest commit, a patch called ``name``.

    The caller holds the project's lock.  A dry run writes the commit as an object
    and moves nothing to it.

    Returns:
        The commit, with the trailers that are still to be filled in.

    Raises:
        StackError: if the name is taken or not legal, or there is nothing to take.
    """
    if not re.fullmatch(trailers.PATCH_NAME, name):
        raise StackError(
            f"{name!r} is not a legal patch name",
            mend="use <topic>-<what>, lower case letters, digits and hyphens",
            code=USAGE,
        )
    tree, state = open_tree(project, pin, finish=not dry_run)
    assert state.head is not None
    if name in _taken_names(tree, state.head):
        raise StackError(
            f"there is a patch {name} already", mend="choose another name", code=USAGE
        )
    with tree.quarantine(dry_run):
        commit = _new(tree, state, name, subject, dry_run)
        return tree.repository.commit(commit)


def _taken_names(tree: Tree, head: str) -> set[str]:
    """The names of the patch files, and of the commits that will be some."""
    names = _known_names(tree)
    folder = tree.project.patches(tree.pin)
    taken = {path.name.removesuffix(SUFFIX) for path in folder.glob("*" + SUFFIX)}
    for commit in tree.repository.chain(BASE, head):
        message = tree.repository.commit(commit).message.decode("utf-8", "replace")
        found = trailers.values(trailers.split(message)[1], "Change-Id")
        taken.update(names[change] for change in found if change in names)
    return taken


def _new(tree: Tree, state: State, name: str, subject: str, dry_run: bool) -> str:
    repository = tree.repository
    assert state.head is not None
    if state.dirty:
        change = _new_change_id()
        message = f"{subject}\n\n{_template(name, change)}".encode()
        now = git.Identity(IDENTITY.name, IDENTITY.email, f"{int(time.time())} +0000")
        commit = repository.snapshot(state.head, message, now)
    else:
        commit, change = _adopt(tree, state.head, name)
    if not dry_run:
        repository.run("read-tree", commit)
        repository.start("update-index", "-q", "--refresh")
        repository.update_refs(
            {BRANCH: commit, NAMES + name: repository.write_blob(change.encode())}
        )
    return commit


def _adopt(tree: Tree, head: str, name: str) -> tuple[str, str]:
    """The newest commit with a Change-Id, its own if it has one, and that id."""
    repository = tree.repository
    last = repository.commit(head)
    text = last.message.decode("utf-8", "replace")
    own = trailers.values(trailers.split(text)[1], "Change-Id")
    if head == repository.resolve(BASE) or (own and own[0] in _known_names(tree)):
        raise StackError(
            f"{tree.path} has no uncommitted change, and its newest commit is a patch "
            "already",
            mend="edit files there first",
        )
    if own:
        return head, own[0]
    change = _new_change_id()
    message = text.rstrip("\n") + "\n\n" + _template(name, change)
    who = git.Identity(IDENTITY.name, IDENTITY.email, last.author.date)
    return (
        repository.write_commit(last.tree, last.parents, message.encode(), who, who),
        change,
    )


def _new_change_id() -> str:
    return "I" + secrets.token_hex(20)


def _template(name: str, change: str) -> str:
    filled = {"Concern": name, "Upstream-Status": "Pending", "Change-Id": change}
    return "".join(
        f"{rule.key}: {filled.get(rule.key, '')}".rstrip() + "\n"
        for rule in trailers.SCHEMA
        if rule.required
    )


def drop(
    project: Project, pin: Pin, name: str, *, dry_run: bool, step: Step
) -> list[Change]:
    """Take a patch out of the series and merge the later ones over the gap.

    The caller holds the project's lock.

    Raises:
        StackError: if another patch depends on it, the tree holds unexported work,
            or a later patch conflicts (then nothing is changed).
    """
    tree, _ = open_tree(project, pin, finish=False)
    before = set(_recorded_names(tree))
    if not dry_run:
        open_tree(project, pin, finish=True)
        if name in before and name not in _recorded_names(tree):
            return [Change(name, "removed")]  # what was killed is done now
    state = tree.state()
    patches = patchfile.load(project.patches(pin))
    target = patchfile.find(patches, name)
    series = apply.series_bytes(tree)
    if state.work or state.source != source_id(patches, series):
        raise StackError(
            f"{tree.path} and {project.patches(pin)} do not agree",
            mend="scripts/stack apply, or scripts/stack export if the tree is newer",
            details=state.work,
            code=REFUSED,
        )
    needing = [
        patch.name
        for patch in patches
        if target.name in trailers.depends_on(patch.trailers)
    ]
    if needing:
        raise StackError(
            f"{', '.join(needing)} depend on {target.name}",
            mend="drop them first, or change their Depends-On",
        )
    with tree.quarantine(dry_run):
        tip = _without(tree, apply.known_commits(tree, patches), target, step)
        kept = patches_of(tree, tip)
        changes = _changes(tree, kept)
        if not dry_run:
            record, _ = record_of(tree, kept)
            tree.write_patches(record, then_switch=True)
            tree.switch(record)
    return changes


def _recorded_names(tree: Tree) -> list[str]:
    return [name.removesuffix(SUFFIX) for name in tree.recorded_files(APPLIED)]


def _without(
    tree: Tree,
    commits: list[apply.Applied],
    target: Patch,
    step: Step,
) -> str:
    """Commits of the stack without ``target``, as objects; returns the tip."""
    repository = tree.repository
    tip = repository.resolve(BASE)
    assert tip is not None
    return apply.chosen_tip(
        repository,
        commits,
        {applied.patch.name for applied in commits} - {target.name},
        tip,
        step,
        why=f"conflicts when {target.name} is taken out",
        mend=f"declare it (Depends-On: {target.name}) and drop it too, or edit it in "
        "the tree first",
    )
