"""The applied tree, build/<release>: its states, and moving between them safely.

The tree is a git repository with one commit for the base and one for each patch,
on the branch ``stack``.  What the tool knows about it is kept in refs, so that it
moves together with the objects:

``refs/stack/base``
    The base commit.
``refs/stack/applied``
    A record commit: its parent is the tip that apply or export left, its tree the
    bytes of the series and patch files that this tip corresponds to.
``refs/stack/pending``
    A record commit while files are being moved to it; left behind by a kill, it
    tells the next run what to finish.
``refs/stack/exporting``
    The same while patch files are being written.
``refs/stack/backup/*``
    Trees that a user chose to discard.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from . import base, git, process
from .errors import REFUSED, StackError
from .patchfile import SERIES, Patch
from .pins import Pin, Project
from .report import Progress

BRANCH = "refs/heads/stack"
BASE = "refs/stack/base"
APPLIED = "refs/stack/applied"
PENDING = "refs/stack/pending"
EXPORTING = "refs/stack/exporting"
BACKUP = "refs/stack/backup/"

LOCK = ".lock"
HALF_MADE = ".new-"

_OPERATIONS = {
    "rebase-merge": "rebase",
    "rebase-apply": "am or rebase",
    "MERGE_HEAD": "merge",
    "CHERRY_PICK_HEAD": "cherry-pick",
    "REVERT_HEAD": "revert",
}


@contextlib.contextmanager
def lock(
    project: Project,
    waiting: Callable[[], None],
    folder: Path | None = None,
    *,
    reading: bool = False,
) -> Iterator[None]:
    """Hold a lock: one writer at a time in build/ and patches/, or in ``folder``.

    Args:
        project: The checkout.
        waiting: Called once if another run holds the lock.
        folder: What is locked, if not the project.
        reading: Whether nothing will be written, not even the lock: where there
            is none yet, nobody writes.
    """
    place = folder or project.build
    if reading and not (place / LOCK).exists():
        yield
        return
    if not reading:
        place.mkdir(exist_ok=True)
    with open(place / LOCK, "r" if reading else "w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(stream, fcntl.LOCK_EX)
        process.keep_open_in_children(stream.fileno())
        try:
            yield
        finally:
            process.forget_fd(stream.fileno())


@dataclass(frozen=True)
class State:
    """What build/<release> holds right now."""

    applied: str | None  # the tip that apply or export left
    source: str | None  # tree id of the series and patch files it corresponds to
    head: str | None  # the tip of the branch
    branch: str | None  # what HEAD names; None when detached
    unexported: tuple[git.Commit, ...]  # commits that no patch file holds
    removed: tuple[git.Commit, ...]  # applied commits no longer in the branch
    dirty: tuple[str, ...]  # uncommitted paths
    operation: str | None  # a git operation that was left unfinished
    interrupted: bool  # an apply was killed half-way

    @property
    def work(self) -> tuple[str, ...]:
        """What would be lost if the tree were replaced, one line each."""
        return (
            *(f"commit {c.id[:12]} {c.subject}" for c in self.unexported),
            *(f"removed {c.id[:12]} {c.subject}" for c in self.removed),
            *(f"uncommitted {path}" for path in self.dirty),
        )


class Tree:
    """build/<release>."""

    def __init__(self, project: Project, pin: Pin):
        self.project = project
        self.pin = pin
        self.path = project.tree(pin)
        self.repository = git.Repository(self.path / ".git", self.path)

    @property
    def exists(self) -> bool:
        return (self.path / ".git" / "HEAD").is_file()

    def state(self) -> State:
        """Look at the tree; changes nothing."""
        if not self.exists:
            return State(None, None, None, None, (), (), (), None, False)
        repository = self.repository
        applied, source = self.applied()
        head = repository.resolve(BRANCH)
        operations = [
            name
            for file, name in _OPERATIONS.items()
            if (repository.git_dir / file).exists()
        ]
        unexported: list[str] = []
        removed: list[str] = []
        if head and head != applied:
            now = repository.chain(BASE, head)
            then = repository.chain(BASE, applied) if applied else []
            unexported = [commit for commit in now if commit not in then]
            removed = [commit for commit in then if commit not in now]
        return State(
            applied=applied,
            source=source,
            head=head,
            branch=repository.branch(),
            unexported=tuple(repository.commit(commit) for commit in unexported),
            removed=tuple(repository.commit(commit) for commit in removed),
            dirty=tuple(repository.dirty()) if head else (),
            operation=operations[0] if operations else None,
            interrupted=repository.resolve(PENDING) is not None,
        )

    def applied(self) -> tuple[str | None, str | None]:
        """The tip that apply or export left, and the tree id of its patch files."""
        if self.repository.resolve(APPLIED) is None:
            return None, None
        record = self.repository.commit(APPLIED)
        return record.parents[0], record.tree

    def ensure_base(self, option: Path | None, progress: Progress) -> str | None:
        """Make the repository with the verified base in it, if it is not there.

        Args:
            option: The user's ``--base``.
            progress: Told of download progress.

        Returns:
            Where the base came from, or None if it was there.

        Raises:
            StackError: if no source has the pinned tree.
        """
        self.sweep()
        if option is None and self._has_base():
            return None
        if self.exists:
            return self._fill(self.repository, option, progress)
        if base.any_entry(self.path):
            raise StackError(
                f"{self.path} exists and is not a tree of this tool",
                mend=f"move it away: mv {self.path} {self.path}.old",
                code=REFUSED,
            )
        folder = Path(tempfile.mkdtemp(prefix=HALF_MADE, dir=self.project.build))
        try:
            new = git.Repository.create(folder / ".git", folder)
            # A user's own git in the tree must not rewrite line endings.
            new.run("config", "core.autocrlf", "false")
            source = self._fill(new, option, progress)
            folder.chmod(0o755)
            if self.path.is_dir():
                self.path.rmdir()
            folder.rename(self.path)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return source

    def _fill(
        self, repository: git.Repository, option: Path | None, progress: Progress
    ) -> str:
        """Put the verified base into ``repository``; returns where it came from."""
        source = base.fill(repository, self.project, self.pin, option, progress)
        repository.update_refs({BASE: base.commit(repository, self.pin)})
        return str(source)

    def _has_base(self) -> bool:
        if not self.exists:
            return False
        present = self.repository.commit(BASE)
        return present.tree == self.pin.tree and (
            present.message == base.message(self.pin)
        )

    @contextlib.contextmanager
    def rehearsal(
        self, option: Path | None, progress: Progress
    ) -> Iterator[str | None]:
        """Let all that is written vanish when the block ends.

        Where the tree lacks the base, a passing repository has it meanwhile.

        Args:
            option: The user's ``--base``.
            progress: Told of download progress.

        Returns:
            Where the base came from, or None if it was there.

        Raises:
            StackError: if no source has the pinned tree.
        """
        kept = self.repository
        with contextlib.ExitStack() as stack:
            source = None
            if option is None and self._has_base():
                self.repository = stack.enter_context(kept.quarantined())
            else:
                name = stack.enter_context(
                    tempfile.TemporaryDirectory(prefix="stack-rehearsal-")
                )
                passing = git.Repository.create(Path(name) / "bare.git")
                source = self._fill(passing, option, progress)
                self.repository = passing
            try:
                yield source
            finally:
                self.repository = kept

    @contextlib.contextmanager
    def quarantine(self, wanted: bool) -> Iterator[None]:
        """If ``wanted``, let every object written vanish when the block ends."""
        kept = self.repository
        if not wanted:
            yield
            return
        with kept.quarantined() as self.repository:
            try:
                yield
            finally:
                self.repository = kept

    def sweep(self) -> None:
        """Remove what a killed run left half-made (the lock is ours)."""
        for folder in self.project.build.glob(HALF_MADE + "*"):
            shutil.rmtree(folder)
        # Nobody but this tool writes these refs.
        for left in (self.path / ".git" / "refs" / "stack").rglob("*.lock"):
            left.unlink()

    def protect(
        self, state: State, discard: bool, *, back_up: bool = True
    ) -> str | None:
        """Refuse to go on over work that exists nowhere else, or back it up.

        Args:
            state: From :meth:`state`.
            discard: Whether the user gives the work up.
            back_up: Whether what is given up is kept in a ref.

        Returns:
            The backup ref, if something was discarded.

        Raises:
            StackError: (refused) listing the work and the command that saves it.
        """
        if state.operation:
            raise StackError(
                f"{self.path}: a git {state.operation} is unfinished",
                mend=f"finish or abort it there, for example: git -C {self.path} "
                f"{state.operation.split()[0]} --abort",
                code=REFUSED,
            )
        if state.branch != BRANCH:
            where = state.branch or "a detached HEAD"
            raise StackError(
                f"{self.path} is on {where}, not on the branch 'stack'",
                mend=f"git -C {self.path} switch stack",
                code=REFUSED,
            )
        if not state.work:
            return None
        if not discard:
            raise StackError(
                f"{self.path} holds work that no patch file has",
                mend="scripts/stack new NAME commits uncommitted changes, "
                "scripts/stack export saves commits as patches; "
                "scripts/stack apply --discard throws them away (a backup ref is kept)",
                details=state.work,
                code=REFUSED,
            )
        return self._back_up(state) if back_up else None

    def _back_up(self, state: State) -> str:
        assert state.head is not None
        snapshot = self.repository.snapshot(
            state.head, b"Discarded work\n", base.IDENTITY
        )
        return self._keep_commit(snapshot)

    def keep(self, tree: str) -> str:
        """Keep a tree that is about to be given up; returns the backup ref."""
        head = self.repository.resolve(BRANCH)
        assert head is not None
        return self._keep_commit(
            self.repository.write_commit(
                tree, [head], b"Discarded work\n", base.IDENTITY, base.IDENTITY
            )
        )

    def _keep_commit(self, commit: str) -> str:
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        ref = f"{BACKUP}{stamp}-{commit[:8]}"
        self.repository.update_refs({ref: commit})
        return ref

    def record(self, tip: str, patches: list[Patch], series: bytes) -> str:
        """Write the record commit of ``tip`` and the patch files it stands for."""
        entries = {
            name: git.Entry("100644", self.repository.write_blob(content))
            for name, content in _files(patches, series).items()
        }
        tree = self.repository.make_tree(entries)
        return self.repository.write_commit(
            tree, [tip], b"Patch files of this tip\n", base.IDENTITY, base.IDENTITY
        )

    def recorded_files(self, record: str) -> dict[str, bytes]:
        """The series and patch files that a record stands for."""
        entries = self.repository.entries(tree=self.repository.commit(record).tree)
        return {
            name: self.repository.read(entry.blob) for name, entry in entries.items()
        }

    def switch(self, record: str, backup: str | None = None) -> None:
        """Move branch and files to a record's tip.

        Args:
            record: From :meth:`record`.
            backup: The ref that holds the work tree as it is, if it is not clean.

        Raises:
            StackError: if git finds a file in the way; nothing is changed then.
        """
        repository = self.repository
        target = repository.commit(record).parents[0]
        self._require_no_git()
        now = repository.resolve(backup or BRANCH)
        self._require_free_way(now or git.EMPTY_TREE, target)
        with self._private_index() as index:
            environment = {"GIT_INDEX_FILE": os.fspath(index)}
            if backup:
                repository.run("add", "--all", "--", ".", env=environment)
            # A touched or copied file has the same content, whatever its time; one
            # that was edited under --assume-unchanged must stop the merge below.
            repository.start("update-index", "-q", "--really-refresh", env=environment)
            trees = [now, target] if now else [target]
            plan = ("read-tree", "-m", "-u", *trees)
            repository.run(*plan[: -len(trees)], "--dry-run", *trees, env=environment)
            repository.update_refs({PENDING: record})
            repository.run(*plan, env=environment)
            os.replace(index, repository.git_dir / "index")
        self._arrive(record, target)

    def _require_free_way(self, now: str, target: str) -> None:
        # git takes an ignored file for worthless and would write over it.
        in_the_way = [
            path
            for path, (old, _) in self.repository.changed(now, target).items()
            if old.blob == git.NO_BLOB
            and ((self.path / path).is_file() or (self.path / path).is_symlink())
        ]
        if in_the_way:
            raise StackError(
                f"{self.path}: these files, which git ignores, are in the way",
                mend="move them away",
                details=tuple(in_the_way),
                code=REFUSED,
            )

    def _require_no_git(self) -> None:
        """Refuse while a git command of the user's is at work in the tree."""
        for name in ("index", "HEAD", BRANCH, "packed-refs"):
            left = self.repository.git_dir / f"{name}.lock"
            if left.exists():
                raise StackError(
                    f"another git command is running in {self.path}",
                    mend=f"wait for it; if there is none, rm {left}",
                    code=REFUSED,
                )

    def require_unedited(self, new: Mapping[str, bytes]) -> dict[str, bytes]:
        """Require that the patch files on disk may be replaced by ``new``.

        Returns:
            The files of the applied record.

        Raises:
            StackError: (refused) if a file is neither as recorded nor as in
                ``new``, so edited by hand.
        """
        known = self.recorded_files(APPLIED) if self.applied()[0] else {}
        edited = []
        for name in {**known, **new}:
            path = self.project.patches(self.pin) / name
            content = path.read_bytes() if path.is_file() else None
            if content not in (known.get(name), new.get(name)):
                edited.append(str(path.relative_to(self.project.root)))
        if edited:
            raise StackError(
                "these files were edited since the tree was made from them",
                mend="save the edits elsewhere and git checkout the files, or keep "
                "them and give up the tree's commits: scripts/stack apply --discard",
                details=tuple(sorted(edited)),
                code=REFUSED,
            )
        return known

    def write_patches(self, record: str, *, then_switch: bool = False) -> None:
        """Make the series and patch files on disk those of ``record``.

        Files that the applied record names and ``record`` does not are deleted.

        Args:
            record: What is to be written.
            then_switch: Whether the tree is to follow; a killed run is then
                finished to that point.

        Raises:
            StackError: (refused) if a file on disk is of neither, so edited by hand.
        """
        folder = self.project.patches(self.pin)
        new = self.recorded_files(record)
        known = self.require_unedited(new)
        self._require_no_git()
        pending = {PENDING: record} if then_switch else {}
        self.repository.update_refs({EXPORTING: record, **pending})
        folder.mkdir(parents=True, exist_ok=True)
        # The series last: a file is there before it is listed.
        for name in sorted(new, key=lambda name: name == SERIES):
            path = folder / name
            if not path.is_file() or path.read_bytes() != new[name]:
                temporary = folder / f".{name}.new"
                temporary.write_bytes(new[name])
                temporary.replace(path)
        for name in known.keys() - new.keys():
            (folder / name).unlink(missing_ok=True)
        self.repository.update_refs({EXPORTING: None})

    def recover(self, *, discard: bool = False) -> bool:
        """Finish what a killed run left half-done: patch files, then the tree.

        Returns:
            Whether there was anything.

        Raises:
            StackError: (refused) naming files that were edited since.
        """
        record = self.repository.resolve(EXPORTING)
        if record:
            self._require_no_git()
            try:
                self.write_patches(record)
            except StackError as error:
                if error.code != REFUSED or not discard:
                    raise
                # The files on disk are kept; the tree is to follow them.
                self.repository.update_refs({EXPORTING: None, PENDING: None})
        return self._finish_switch(discard) or record is not None

    def _finish_switch(self, discard: bool) -> bool:
        # Every file that the move touches must hold the old content, the new one,
        # or the beginning of the new one; anything else is a user's edit.
        repository = self.repository
        record = repository.resolve(PENDING)
        if record is None:
            return False
        target = repository.commit(record).parents[0]
        now = repository.resolve(BRANCH + "^{tree}") or git.EMPTY_TREE
        changes = repository.changed(now, target)
        edited = [
            path
            for path, (old, new) in changes.items()
            if not self._is_between(path, old, new)
        ]
        if edited and not discard:
            raise StackError(
                f"{self.path}: an apply was interrupted, and these files were edited "
                "after it",
                mend="copy what you need elsewhere, then: scripts/stack apply "
                "--discard (a backup ref is kept)",
                details=tuple(edited),
                code=REFUSED,
            )
        if edited:
            self._back_up_interrupted()
        with self._private_index() as index:
            environment = {"GIT_INDEX_FILE": os.fspath(index)}
            repository.run("read-tree", target, env=environment)
            for path, (_, new) in changes.items():
                file = self.path / path
                # What was a folder may be a file by now, and the other way round.
                if new.blob == git.NO_BLOB and (file.is_file() or file.is_symlink()):
                    file.unlink()
            repository.run(
                *("checkout-index", "--force", "--index", "-z", "--stdin"),
                stdin=b"".join(
                    os.fsencode(path) + b"\0"
                    for path, (_, new) in changes.items()
                    if new.blob != git.NO_BLOB
                ),
                env=environment,
            )
            os.replace(index, repository.git_dir / "index")
        self._arrive(record, target)
        return True

    def _back_up_interrupted(self) -> None:
        head = self.repository.resolve(BRANCH) or self.repository.resolve(BASE)
        assert head is not None
        snapshot = self.repository.snapshot(
            head, b"Work tree of an interrupted apply\n", base.IDENTITY
        )
        self.repository.update_refs({f"{BACKUP}interrupted-{snapshot[:8]}": snapshot})

    def _is_between(self, path: str, old: git.Entry, new: git.Entry) -> bool:
        file = self.path / path
        if file.is_symlink():
            content = os.fsencode(os.readlink(file))
        elif file.is_file():
            content = file.read_bytes()
        else:
            return True
        if git.blob_id(content) in (old.blob, new.blob):
            return True
        if new.blob == git.NO_BLOB:
            return False
        return self.repository.read(new.blob).startswith(content)

    def _arrive(self, record: str, target: str) -> None:
        self.repository.update_refs({BRANCH: target, APPLIED: record, PENDING: None})

    @contextlib.contextmanager
    def _private_index(self) -> Iterator[Path]:
        """A copy of the index under a name that only this tool uses.

        git locks an index by a file beside it; with a name of our own, what a
        killed run left can be removed without touching another program's lock.
        """
        index = self.repository.git_dir / "stack-index"
        index.with_name(index.name + ".lock").unlink(missing_ok=True)
        index.unlink(missing_ok=True)
        current = self.repository.git_dir / "index"
        if current.is_file():
            shutil.copy2(current, index)  # git compares its time with the files'
        yield index


def _files(patches: list[Patch], series: bytes) -> dict[str, bytes]:
    files = {patch.path.name: patch.content for patch in patches}
    return {**files, SERIES: series}


def source_id(patches: list[Patch], series: bytes) -> str:
    """The tree id that :meth:`Tree.record` would give these files."""
    return git.tree_id(
        {
            name: git.Entry("100644", git.blob_id(content))
            for name, content in _files(patches, series).items()
        }
    )
