"""Moves the stack to another release: patch by patch, with stops a kill cannot lose.

The new tree is made at once, as build/<new release>, and holds all that the rebase
knows, in refs that move together with its branch.  The old tree, the old patch files
and stack.toml are not touched; so an abort has only the new tree to remove, and what
the last step wrote, if it came to that.

``refs/stack/rebase/state``
    A blob: the target, the patches in order, what became of each, where it stopped.
``refs/stack/rebase/old``
    A record commit (see ``worktree``) of the stack as it was.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from . import apply, base, carry, export, git, history, ledger, patchfile, pins, target
from . import trailers as trailers_module
from .apply import Applied
from .carry import DROPPING, STOPPING, FileConflict, Hunk, Outcome
from .errors import CONFLICT, REFUSED, USAGE, StackError
from .patchfile import SERIES, SUFFIX, Patch
from .pins import Pin, Project
from .report import Progress, Step
from .worktree import (
    APPLIED,
    BASE,
    BRANCH,
    EXPORTING,
    HALF_MADE,
    PENDING,
    Tree,
    source_id,
)

STATE = "refs/stack/rebase/state"
OLD = "refs/stack/rebase/old"

CONTINUE, SKIP, ABORT = "continue", "skip", "abort"
# How far a stop has come: the tree is being made ready; it is; a person was told.
PREPARING, PREPARED, TOLD = "preparing", "prepared", "told"

SKIPPED = "skipped"
ACCEPTED = "accepted"  # as it was or as it was edited


@dataclass
class State:
    """What a rebase knows; all of it is in :data:`STATE`."""

    origin: str  # the release that the stack comes from
    source: str  # tree id of its series and patch files at the start
    pin: dict[str, Any]  # of the target
    pinned: bool
    clone: str  # where the target's history is; empty if nowhere
    proof: str
    asked: str  # what --to said
    patches: list[str]
    tip: str  # the last commit that was made
    outcomes: list[dict[str, Any]] = field(default_factory=list)
    stop: dict[str, Any] | None = None  # an outcome
    phase: str = ""  # of the stop
    prepared: str = ""  # the tree that was made ready for a person there
    finishing: bool = False


@dataclass(frozen=True)
class Result:
    """What one run of the command came to."""

    origin: str
    target: target.Target
    outcomes: tuple[Outcome, ...]
    stop: Outcome | None
    why: str  # the message of the patch that it stopped at
    path: Path
    patches: Path
    left: int  # patches not looked at yet
    new_pin: bool  # a table was added to stack.toml


class Rebase:
    """A rebase in progress."""

    def __init__(self, project: Project, tree: Tree):
        self.project = project
        self.tree = tree
        self.repository = tree.repository
        blob = self.repository.resolve(STATE)
        assert blob is not None
        data = json.loads(self.repository.read(blob))
        self.state = State(**data)

    def save(self, tip: str | None = None) -> None:
        """Write the state and, if it moves, the branch with it."""
        if tip is not None:
            self.state.tip = tip
        content = json.dumps(asdict(self.state), indent=1).encode()
        refs: dict[str, str | None] = {STATE: self.repository.write_blob(content)}
        if tip is not None:
            refs[BRANCH] = tip
        self.repository.update_refs(refs)

    @property
    def tip(self) -> str:
        return self.state.tip

    @property
    def outcomes(self) -> tuple[Outcome, ...]:
        return tuple(map(_outcome, self.state.outcomes))

    @property
    def target(self) -> target.Target:
        clone = (
            base.open_repository(Path(self.state.clone)) if self.state.clone else None
        )
        pin = self.tree.pin
        old = self.project.pin(self.state.origin)
        found = clone and history.between(clone, old.commit, pin.commit)
        return target.Target(
            pin, self.state.pinned, "", self.state.proof, found or None, clone
        )

    def stack(self) -> list[Applied]:
        """The old stack's patches and commits, as they were at the start."""
        repository = self.repository
        files = self.tree.recorded_files(OLD)
        folder = self.project.root / "patches" / self.state.origin
        chain = repository.text("rev-list", "--reverse", OLD + "^").split()[1:]
        return [
            Applied(
                Patch(name, folder / (name + SUFFIX), files[name + SUFFIX]),
                commit,
                repository.commit(commit).tree,
            )
            for name, commit in zip(self.state.patches, chain, strict=True)
        ]


def _outcome(data: dict[str, Any]) -> Outcome:
    conflicts = []
    for conflict in data["conflicts"]:
        hunks = [
            Hunk(**{k: tuple(v) if isinstance(v, list) else v for k, v in x.items()})
            for x in conflict["hunks"]
        ]
        kept = {"hunks": tuple(hunks), "causes": tuple(conflict["causes"])}
        conflicts.append(FileConflict(**{**conflict, **kept}))
    lists = {k: tuple(v) for k, v in data.items() if isinstance(v, list)}
    return Outcome(**{**data, **lists, "conflicts": tuple(conflicts)})


def find(project: Project) -> Rebase | None:
    """The rebase that is in progress, if there is one."""
    folders = project.build.iterdir() if project.build.is_dir() else ()
    for path in sorted(folders):
        repository = git.Repository(path / ".git")
        blob = None if path.name.startswith(HALF_MADE) else repository.resolve(STATE)
        if blob:
            pin = _pin(json.loads(repository.read(blob))["pin"])
            return Rebase(project, Tree(project, pin))
    return None


def _pin(data: dict[str, Any]) -> Pin:
    sdist = data["sdist"] and pins.Sdist(
        **{**data["sdist"], "generated": tuple(data["sdist"]["generated"])}
    )
    return Pin(
        **{**data, "sdist": sdist, "toolchain": pins.Toolchain(**data["toolchain"])}
    )


def start(
    project: Project,
    pin: Pin,
    text: str,
    *,
    directory: Path,
    progress: Progress,
    step: Step,
) -> Rebase:
    """Make the new tree, with nothing carried to it yet, or find it made already.

    The caller holds the project's lock.

    Raises:
        StackError: if another rebase is in progress, the old stack does not apply or
            holds unexported work, or something is in the new stack's place.
    """
    current = find(project)
    if current is not None:
        release = current.state.pin["release"]
        if text in (current.state.asked, release, release[1:]):
            return current
        raise StackError(
            f"a rebase to {release} is in progress",
            mend="scripts/stack rebase --continue, or scripts/stack rebase --abort",
            code=REFUSED,
        )
    patches = patchfile.load(project.patches(pin))
    tree = Tree(project, pin)
    tree.sweep()
    _require_exported(tree, patches)
    _require_change_ids(patches)
    step(f"base {pin.tag}")
    folder = Path(tempfile.mkdtemp(prefix=HALF_MADE, dir=project.build))
    try:
        new = git.Repository.create(folder / ".git", folder)
        new.run("config", "core.autocrlf", "false")
        with tree.rehearsal(None, progress):
            stack = apply.known_commits(tree, patches)
            series = apply.series_bytes(tree)
            tip = stack[-1].commit if stack else base.commit(tree.repository, pin)
            record = tree.record(tip, patches, series)
            new.copy_from(tree.repository, record)
        step(text)
        found = target.resolve(new, project, pin, text, directory, progress)
        place = project.tree(found.pin)
        _require_room(project, pin, found.pin)
        first = base.commit(new, found.pin)
        state = State(
            origin=pin.release,
            source=source_id(patches, series),
            pin=asdict(found.pin),
            pinned=found.pinned,
            clone=str(found.history.repository.git_dir) if found.history else "",
            proof=found.proof,
            asked=text,
            patches=[patch.name for patch in patches],
            tip=first,
        )
        names = {
            export.NAMES + p.name: new.write_blob(p.trailer("Change-Id").encode())
            for p in patches
        }
        blob = new.write_blob(json.dumps(asdict(state), indent=1).encode())
        new.update_refs({BASE: first, BRANCH: first, OLD: record, STATE: blob, **names})
        folder.chmod(0o755)
        folder.rename(place)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return Rebase(project, Tree(project, found.pin))


def _require_exported(tree: Tree, patches: list[Patch]) -> None:
    state = tree.state()
    if state.head is None:
        return
    same = state.source == source_id(patches, apply.series_bytes(tree))
    if state.work or not same:
        raise StackError(
            f"{tree.path} and {tree.project.patches(tree.pin)} do not agree",
            mend="scripts/stack apply, or scripts/stack export if the tree is newer",
            details=state.work,
            code=REFUSED,
        )


def _require_change_ids(patches: list[Patch]) -> None:
    seen: set[str] = set()
    for patch in patches:
        change = patch.trailer("Change-Id")
        if not change or change in seen:
            raise StackError(
                f"{patch.path}: has no Change-Id of its own, so that it could not be "
                "told from the others",
                mend="scripts/stack lint says what its form is",
            )
        seen.add(change)


def _require_room(project: Project, old: Pin, new: Pin) -> None:
    if new.release == old.release:
        raise StackError(
            f"the stack is on {old.release} already",
            mend="name another release with --to",
            code=USAGE,
        )
    for path in (project.patches(new), project.tree(new)):
        if base.any_entry(path) or path.is_file():
            raise StackError(
                f"{path} exists: the stack has been moved there before",
                mend=f"move it away to do it again: mv {path} {path}.old",
                code=REFUSED,
            )


def run(
    project: Project,
    pin: Pin,
    *,
    text: str | None,
    action: str,
    fate: str,
    directory: Path,
    progress: Progress,
    step: Step,
) -> Result:
    """Start a rebase or go on with it, up to the next stop or the end.

    The caller holds the project's lock, and calls :func:`told` once a person has seen
    where it stopped: a stop that nobody saw is shown again, never passed.

    Args:
        project, pin: The stack that is moved.
        text: See :func:`target.resolve`; None to go on.
        action: "", :data:`CONTINUE` or :data:`SKIP`.
        fate: What the ledger is to say of a skipped patch.
        directory: What a relative path is relative to.
        progress: Told of download progress.
        step: Told what is being done.

    Raises:
        StackError: if there is nothing to go on with, or it cannot go on yet.
    """
    if text is not None:
        rebase = start(
            project, pin, text, directory=directory, progress=progress, step=step
        )
    else:
        rebase = _require(project)
    state = rebase.state
    if state.stop and state.phase == TOLD and action:
        if action == CONTINUE:
            _take(rebase)
        else:
            _skip(rebase, fate)
    if not state.stop and not state.finishing:
        _go_on(rebase, step)
    if state.stop and state.phase == PREPARING:
        _prepare(rebase)
    new_pin = False
    if not state.stop:
        step("patch files")
        new_pin = _finish(rebase)
    return _result(rebase, new_pin)


def told(project: Project) -> None:
    """Note that a person has seen the stop."""
    rebase = find(project)
    if rebase and rebase.state.stop and rebase.state.phase == PREPARED:
        rebase.state.phase = TOLD
        rebase.save()


def _require(project: Project) -> Rebase:
    rebase = find(project)
    if rebase is None:
        raise StackError(
            "no rebase is in progress",
            mend="scripts/stack rebase --to RELEASE starts one",
            code=USAGE,
        )
    return rebase


def _result(rebase: Rebase, new_pin: bool) -> Result:
    state = rebase.state
    stop = _outcome(state.stop) if state.stop else None
    why = ""
    if stop:
        stack = rebase.stack()
        why = next(x.patch.message for x in stack if x.patch.name == stop.patch)
    return Result(
        state.origin,
        rebase.target,
        rebase.outcomes,
        stop,
        why,
        rebase.tree.path,
        rebase.project.patches(rebase.tree.pin),
        len(state.patches) - len(state.outcomes),
        new_pin,
    )


# -- from patch to patch ---------------------------------------------------------


def _go_on(rebase: Rebase, step: Step) -> None:
    """Carry patches until one stops, or none is left."""
    state, repository = rebase.state, rebase.repository
    stack = rebase.stack()
    if len(state.outcomes) == len(stack):
        return
    old = rebase.project.pin(state.origin).tree
    with repository.merging() as merging:
        carrier = carry.Carrier(repository, merging, stack, old, rebase.target)
        for applied in stack[len(state.outcomes) :]:
            step(applied.patch.name)
            outcome = carrier.judge(applied, rebase.tip)
            if outcome.verdict in STOPPING:
                state.stop, state.phase = asdict(outcome), PREPARING
                rebase.save()
                return
            _pass(rebase, applied, outcome)


def _pass(rebase: Rebase, applied: Applied, outcome: Outcome) -> None:
    """Note what became of one patch and, unless it is dropped, move the branch."""
    state = rebase.state
    dropped = {x.patch for x in rebase.outcomes if _is_dropped(x)}
    state.outcomes.append(asdict(outcome))
    state.stop, state.phase = None, ""
    tip = rebase.tip
    if not _is_dropped(outcome):
        assert outcome.tree is not None
        tip = apply.moved_commit(rebase.repository, applied.commit, outcome.tree, tip)
        # What it depended on and was dropped is in the new base.
        tip = _without_dependencies(rebase.repository, tip, dropped)
    rebase.save(tip)


def _is_dropped(outcome: Outcome) -> bool:
    return outcome.verdict in DROPPING or outcome.decision == SKIPPED


def _without_dependencies(
    repository: git.Repository, commit: str, names: set[str]
) -> str:
    found = repository.commit(commit)
    text = found.message.decode("utf-8", "surrogateescape")
    shorter = trailers_module.without_dependencies(text, names)
    if shorter == text:
        return commit
    message = shorter.encode("utf-8", "surrogateescape")
    who = found.author
    return repository.write_commit(found.tree, found.parents, message, who, who)


def _stopped(rebase: Rebase) -> Applied:
    return rebase.stack()[len(rebase.state.outcomes)]


def _prepare(rebase: Rebase) -> None:
    """Put the merge, with its conflicts, into the new tree's files."""
    repository = rebase.repository
    _check_out(rebase)
    repository.start_merge(_stopped(rebase).commit)
    rebase.state.prepared = repository.staged_tree()
    rebase.state.phase = PREPARED
    rebase.save()


def _check_out(rebase: Rebase) -> None:
    """Make the files those of the branch; nothing of a person's is among them."""
    repository = rebase.repository
    for name in ("index.lock", "HEAD.lock"):
        (repository.git_dir / name).unlink(missing_ok=True)  # a killed run of ours
    repository.run("reset", "--hard", "--quiet")
    repository.run("clean", "-f", "-d", "--quiet")


def _take(rebase: Rebase) -> None:
    """Take the files as they are for the patch that it stopped at."""
    repository, state = rebase.repository, rebase.state
    path = rebase.tree.path
    assert state.stop is not None
    stop = _outcome(state.stop)
    unmerged = sorted(repository.unmerged())
    if unmerged:
        raise StackError(
            f"{stop.patch}: these files of {path} are still in conflict",
            mend=f"edit them, then: git -C {path} add FILE, or git -C {path} rm FILE",
            details=tuple(unmerged),
            code=CONFLICT,
        )
    if repository.branch() != BRANCH or repository.resolve("HEAD") != rebase.tip:
        raise StackError(
            f"{path}: commits were made, or another branch was checked out",
            mend=f"git -C {path} switch stack && git -C {path} reset --soft "
            f"{rebase.tip[:12]}, which keeps the files; the commit is made by --continue",
            code=REFUSED,
        )
    before = repository.commit(rebase.tip).tree
    tree = repository.staged_tree()
    changes = repository.changed(before, tree)
    marked = [
        file
        for file, (_, new) in changes.items()
        if new.blob != git.NO_BLOB and _is_marked(repository.read(new.blob))
    ]
    if marked:
        raise StackError(
            f"{stop.patch}: these files of {path} still have conflict markers",
            mend="edit them",
            details=tuple(sorted(marked)),
            code=CONFLICT,
        )
    if not changes:
        raise StackError(
            f"{stop.patch}: nothing is left of it, and a patch must change something",
            mend="scripts/stack rebase --skip --fate 'absorbed vX.Y.Z' drops it, and "
            "the ledger says why",
            code=CONFLICT,
        )
    outcome = replace(stop, decision=ACCEPTED, tree=tree)
    _pass(rebase, _stopped(rebase), outcome)


def _is_marked(content: bytes) -> bool:
    return re.search(rb"^(<{7}|>{7}) ", content, re.MULTILINE) is not None


def _skip(rebase: Rebase, fate: str) -> None:
    """Drop the patch that it stopped at; what was edited there goes into a backup."""
    state, repository = rebase.state, rebase.repository
    assert state.stop is not None
    stop = _outcome(state.stop)
    default = f"{ledger.UNDECIDED} [{stop.verdict} on {rebase.tree.pin.release}]"
    fate = fate or default
    if not ledger.is_fate(fate):
        raise StackError(
            f"{fate!r} does not say what became of {stop.patch}",
            mend=f"--fate is one of: {ledger.FORM}",
            code=USAGE,
        )
    edited = repository.staged_tree()
    if edited != state.prepared:
        rebase.tree.keep(edited)
    _pass(rebase, _stopped(rebase), replace(stop, decision=SKIPPED, fate=fate))


# -- the end ---------------------------------------------------------------------


def _dropped_entries(rebase: Rebase) -> list[ledger.Entry]:
    patches = {applied.patch.name: applied.patch for applied in rebase.stack()}
    release = rebase.tree.pin.release
    entries = []
    for outcome in rebase.outcomes:
        if _is_dropped(outcome):
            patch = patches[outcome.patch]
            if outcome.verdict in DROPPING:
                fate, how = _absorbed(outcome, release), "; ".join(outcome.reasons)
            else:
                fate = outcome.fate
                how = f"skipped on {release}: {outcome.verdict}"
            entries.append(
                ledger.Entry(
                    release,
                    patch.name,
                    patch.trailer("Change-Id"),
                    patch.trailer("Concern"),
                    fate,
                    how,
                )
            )
    return entries


def _absorbed(outcome: Outcome, release: str) -> str:
    named = re.search(r"\(#(\d+)\) makes the same change", " ".join(outcome.reasons))
    request = f"vllm-project/vllm#{named[1]}, " if named else ""
    return f"absorbed {request}{release}"


def _pin_text(rebase: Rebase) -> str:
    note = (
        "# Read from the release's own files by scripts/stack rebase; unknown facts\n"
    )
    return f"\n{note}# are to be filled in.\n{rebase.tree.pin.toml()}"


def _finish(rebase: Rebase) -> bool:
    """Write pin, ledger and patch files, and check the tree out; may be repeated.

    Returns:
        Whether stack.toml got a new table.
    """
    tree, state = rebase.tree, rebase.state
    if not state.finishing:
        _check_out(rebase)
        state.finishing = True
        rebase.save()
    tree.recover()
    tip = rebase.tip
    patches = export.patches_of(tree, tip)
    old = rebase.project.root / "patches" / state.origin
    record, _ = export.record_of(tree, patches, like=old)
    _write_pin(rebase)
    ledger.add(rebase.project, _dropped_entries(rebase))
    if tree.repository.resolve(APPLIED) != record:
        tree.write_patches(record, then_switch=True)
        tree.switch(record)
    names = tree.repository.refs(export.NAMES)
    tree.repository.update_refs({STATE: None, OLD: None, **dict.fromkeys(names)})
    return not state.pinned


def _write_pin(rebase: Rebase) -> None:
    path = rebase.project.root / "stack.toml"
    text = path.read_text("utf-8")
    if not rebase.state.pinned and _pin_text(rebase) not in text:
        _replace(path, text + _pin_text(rebase))


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.new")
    temporary.write_text(text, "utf-8")
    os.replace(temporary, path)


def abort(project: Project) -> Path:
    """Take everything back that the rebase made; returns the tree that is gone.

    The caller holds the project's lock.

    Raises:
        StackError: if none is in progress, or a patch file that it wrote was edited.
    """
    Tree(project, project.pin(None)).sweep()  # an abort that was killed
    rebase = _require(project)
    tree = rebase.tree
    if rebase.state.finishing:
        refs = (EXPORTING, PENDING, APPLIED)
        written = next(filter(None, map(tree.repository.resolve, refs)), "")
        folder = project.patches(tree.pin)
        if written:
            files = tree.recorded_files(written)
            tree.require_unedited(files)
            for name in sorted(files, key=lambda name: name != SERIES):
                (folder / name).unlink(missing_ok=True)
                (folder / f".{name}.new").unlink(missing_ok=True)
        if folder.is_dir() and not base.any_entry(folder):
            folder.rmdir()
        ledger.remove(project, _dropped_entries(rebase))
        for path in (project.root / "stack.toml", ledger.place(project)):
            path.with_name(f".{path.name}.new").unlink(missing_ok=True)
        path = project.root / "stack.toml"
        text = path.read_text("utf-8")
        if _pin_text(rebase) in text and not rebase.state.pinned:
            _replace(path, text.replace(_pin_text(rebase), "", 1))
    # Out of sight first, so that a killed run leaves no half of a tree.
    gone = tree.path.rename(tree.path.with_name(f"{HALF_MADE}{tree.path.name}"))
    shutil.rmtree(gone)
    return tree.path
