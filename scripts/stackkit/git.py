"""Git, driven through its own command line, in bytes, from this module alone.

Every call runs without the caller's ``GIT_*`` variables, without system or user
configuration, hooks, signing, or background maintenance, so that the same input
gives the same objects on every machine.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from . import process
from .errors import StackError

MINIMUM_VERSION = (2, 34)
EMPTY_TREE = "4b825dc642cb6eb9a060e54bf8d69288fbee4904"
NO_BLOB = "0" * 40

_ENVIRONMENT = {
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_ATTR_NOSYSTEM": "1",
    "GIT_OPTIONAL_LOCKS": "0",
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_LITERAL_PATHSPECS": "1",
    "GIT_NO_REPLACE_OBJECTS": "1",
}

# A repository's own configuration is still read; these win over it.
_OPTIONS = (
    *("-c", f"core.hooksPath={os.devnull}"),
    *("-c", f"core.attributesFile={os.devnull}"),
    *("-c", f"core.excludesFile={os.devnull}"),
    *("-c", "core.autocrlf=false"),
    *("-c", "core.eol=lf"),
    *("-c", "core.fileMode=true"),
    *("-c", "core.fsmonitor=false"),
    *("-c", "core.quotePath=false"),
    *("-c", "core.safecrlf=false"),
    *("-c", "core.sparseCheckout=false"),
    *("-c", "core.symlinks=true"),
    *("-c", "apply.ignoreWhitespace=no"),
    *("-c", "i18n.commitEncoding=UTF-8"),
    *("-c", "i18n.logOutputEncoding=UTF-8"),
    *("-c", "commit.gpgSign=false"),
    *("-c", "gc.auto=0"),
    *("-c", "maintenance.auto=false"),
    *("-c", "safe.directory=*"),
)


_NO_PLACE = re.compile(
    rb"No space left|File too large|Read-only file|Permission denied|unable to write"
)
_PLACE = (
    "the checkout, the cache and the temporary folder must be writable and have room"
)


class GitError(StackError):
    """A git command failed."""


@dataclass(frozen=True)
class Identity:
    """A person and a moment, as git writes them into a commit."""

    name: str
    email: str
    date: str

    def environment(self, role: str) -> dict[str, str]:
        return {
            f"GIT_{role}_NAME": self.name,
            f"GIT_{role}_EMAIL": self.email,
            f"GIT_{role}_DATE": self.date,
        }


@dataclass(frozen=True)
class Entry:
    """One path of a tree: mode and blob."""

    mode: str
    blob: str


@dataclass(frozen=True)
class Commit:
    """A commit as stored."""

    id: str
    tree: str
    parents: tuple[str, ...]
    author: Identity
    message: bytes

    @property
    def subject(self) -> str:
        return self.message.split(b"\n", 1)[0].decode("utf-8", "replace")


@dataclass(frozen=True)
class Conflict:
    """One path that a merge could not settle.

    ``sides`` says which of base, ours and theirs have the path; ``content`` is the
    file with its conflict markers (base shown, too), or one side's as it is.
    """

    path: str
    sides: frozenset[str]
    content: bytes | None


@dataclass(frozen=True)
class Merge:
    """What a merge gave: a tree, or conflicts."""

    tree: str | None
    conflicts: tuple[Conflict, ...]
    words: tuple[str, ...]  # what git said about the conflicts


_SIDES = {"1": "base", "2": "ours", "3": "theirs"}
# So that a merge follows a file that was moved, however many were, and shows both
# sides of a conflict with what they started from.
_MERGE_OPTIONS = (
    *("-c", "merge.renames=true"),
    *("-c", "merge.renameLimit=100000"),
    *("-c", "merge.directoryRenames=conflict"),
    *("-c", "merge.conflictStyle=diff3"),
    *("-c", "rerere.enabled=false"),
)
_SPARSE = ("-c", "core.sparseCheckout=true", "-c", "core.sparseCheckoutCone=false")


def version() -> tuple[int, ...]:
    """The version of the git on PATH.

    Raises:
        StackError: if there is none.
    """
    try:
        text = process.run(["git", "--version"]).stdout.decode()
    except FileNotFoundError as error:
        raise StackError("git is not installed", mend="apt-get install git") from error
    found = re.search(r"(\d+)\.(\d+)(?:\.(\d+))?", text)
    return tuple(int(part or 0) for part in found.groups()) if found else (0,)


class Repository:
    """A git directory and, when it has one, its work tree."""

    def __init__(
        self,
        git_dir: Path,
        work_tree: Path | None = None,
        objects: Path | None = None,
    ):
        self.git_dir = git_dir
        self.work_tree = work_tree
        # Where new objects go, if not to the git directory.
        self.objects = objects

    @classmethod
    def create(cls, git_dir: Path, work_tree: Path | None = None) -> Repository:
        """Make an empty repository with no template, hooks or remotes."""
        self = cls(git_dir, work_tree)
        command = ["git", *_OPTIONS, "-c", "init.defaultBranch=stack", "init"]
        done = process.run(
            [*command, "--quiet", "--bare", "--template=", git_dir],
            env=_ENVIRONMENT,
        )
        _check(done, ("init",))
        if work_tree is not None:
            self.run("config", "core.bare", "false")
        return self

    @classmethod
    @contextlib.contextmanager
    def borrowing(cls, other: Repository) -> Iterator[Repository]:
        """An empty bare repository that can read another one's objects.

        It has none of the other's configuration or attributes, so what git prints
        from it depends on the objects alone.
        """
        with tempfile.TemporaryDirectory(prefix="stack-bare-") as folder:
            self = cls.create(Path(folder) / "bare.git")
            self.borrow_from(other)
            yield self

    def borrow_from(self, other: Repository) -> None:
        """Let this repository read the objects of another one."""
        alternates = self.git_dir / "objects" / "info" / "alternates"
        alternates.parent.mkdir(exist_ok=True)
        places = [other.git_dir / "objects", *filter(None, [other.objects])]
        alternates.write_bytes(b"".join(os.fsencode(p) + b"\n" for p in places))
        shallow = other.git_dir / "shallow"
        if shallow.is_file():
            shutil.copy2(shallow, self.git_dir / "shallow")

    @contextlib.contextmanager
    def quarantined(self) -> Iterator[Repository]:
        """This repository, but with its new objects gone when the block ends."""
        with tempfile.TemporaryDirectory(prefix="stack-objects-") as folder:
            yield Repository(self.git_dir, self.work_tree, Path(folder))

    def _objects_environment(self) -> dict[str, str]:
        if self.objects is None:
            return {}
        shared = os.fspath(self.git_dir / "objects")
        quoted = shared.replace("\\", "\\\\").replace('"', '\\"')
        return {
            "GIT_OBJECT_DIRECTORY": os.fspath(self.objects),
            "GIT_ALTERNATE_OBJECT_DIRECTORIES": f'"{quoted}"',
        }

    def start(
        self,
        *arguments: str,
        stdin: bytes | None = None,
        env: Mapping[str, str] | None = None,
        options: Sequence[str] = (),
    ) -> subprocess.CompletedProcess[bytes]:
        """Run a git command and return it, whatever its exit status."""
        where: list[str | os.PathLike[str]] = [f"--git-dir={self.git_dir}"]
        if self.work_tree is not None:
            where.append(f"--work-tree={self.work_tree}")
        return process.run(
            ["git", *_OPTIONS, *options, *where, *arguments],
            cwd=self.work_tree,
            env={**_ENVIRONMENT, **self._objects_environment(), **(env or {})},
            stdin=stdin,
        )

    def run(
        self,
        *arguments: str,
        stdin: bytes | None = None,
        env: Mapping[str, str] | None = None,
        options: Sequence[str] = (),
    ) -> bytes:
        """Run a git command and return its output.

        Raises:
            GitError: if it fails; git's own words are in the details.
        """
        done = self.start(*arguments, stdin=stdin, env=env, options=options)
        _check(done, arguments)
        return done.stdout

    def text(self, *arguments: str, env: Mapping[str, str] | None = None) -> str:
        return self.run(*arguments, env=env).decode("utf-8", "surrogateescape").strip()

    # -- objects -------------------------------------------------------------

    def resolve(self, name: str) -> str | None:
        """The id of ``name`` (a ref, ``ref^{tree}``, …), or None."""
        done = self.start("rev-parse", "--verify", "--quiet", "--end-of-options", name)
        return done.stdout.decode().strip() or None

    def has(self, object_id: str) -> bool:
        return self.start("cat-file", "-e", object_id).returncode == 0

    def read(self, object_id: str) -> bytes:
        """The content of a blob."""
        return self.run("cat-file", "blob", object_id)

    def write_blob(self, content: bytes) -> str:
        return self.run("hash-object", "-w", "--stdin", stdin=content).decode().strip()

    def make_tree(self, entries: Mapping[str, Entry]) -> str:
        """Write a tree of ``entries`` (flat names only)."""
        listing = "".join(
            f"{entry.mode} blob {entry.blob}\t{name}\0"
            for name, entry in entries.items()
        )
        return self.run("mktree", "-z", stdin=listing.encode()).decode().strip()

    def commit(self, name: str) -> Commit:
        raw = self.run("cat-file", "commit", name)
        header, _, message = raw.partition(b"\n\n")
        fields: dict[str, list[str]] = {}
        for line in header.decode("utf-8", "surrogateescape").split("\n"):
            key, _, value = line.partition(" ")
            fields.setdefault(key, []).append(value)
        who = re.fullmatch(r"(.*) <(.*)> (\d+) ([+-]\d{4})", fields["author"][0])
        if who is None:
            raise GitError(f"commit {name} has a malformed author line")
        author = Identity(who[1], who[2], f"{who[3]} {who[4]}")
        is_id = re.fullmatch("[0-9a-f]{40}", name) is not None
        object_id = name if is_id else self.text("rev-parse", "--verify", name)
        return Commit(
            object_id,
            fields["tree"][0],
            tuple(fields.get("parent", ())),
            author,
            message,
        )

    def write_commit(
        self,
        tree: str,
        parents: Sequence[str],
        message: bytes,
        author: Identity,
        committer: Identity,
    ) -> str:
        """Write a commit object; the same arguments give the same id everywhere."""
        options = [part for parent in parents for part in ("-p", parent)]
        environment = {
            **author.environment("AUTHOR"),
            **committer.environment("COMMITTER"),
        }
        done = self.run("commit-tree", tree, *options, stdin=message, env=environment)
        return done.decode().strip()

    def chain(self, base: str, tip: str) -> list[str]:
        """Commits after ``base`` up to ``tip``, oldest first."""
        listing = self.text("rev-list", "--reverse", "--topo-order", f"{base}..{tip}")
        return listing.split()

    def entries(
        self, paths: Iterable[str] = (), *, index: Path | None = None, tree: str = ""
    ) -> dict[str, Entry]:
        """Paths with their mode and blob, of ``tree`` or else of ``index``."""
        if tree:
            listing = self.run("ls-tree", "-r", "-z", "--full-tree", tree, "--", *paths)
        else:
            listing = self.run(
                "ls-files", "-s", "-z", "--", *paths, env=_index_environment(index)
            )
        found = {}
        for line in listing.split(b"\0"):
            if line:
                meta, _, path = line.partition(b"\t")
                parts = meta.decode().split()
                blob = parts[2] if tree else parts[1]
                found[os.fsdecode(path)] = Entry(parts[0], blob)
        return found

    def changed(self, old: str, new: str) -> dict[str, tuple[Entry, Entry]]:
        """Paths that differ between two trees, with their old and new entries."""
        listing = self.run("diff-tree", "-r", "-z", "--no-renames", old, new)
        parts = listing.split(b"\0")
        changes = {}
        for meta, path in zip(parts[::2], parts[1::2], strict=False):
            old_mode, new_mode, old_blob, new_blob, _ = meta.decode()[1:].split()
            changes[os.fsdecode(path)] = (
                Entry(old_mode, old_blob),
                Entry(new_mode, new_blob),
            )
        return changes

    @contextlib.contextmanager
    def scratch_index(self) -> Iterator[Path]:
        """A private index file, gone when the block ends."""
        with tempfile.TemporaryDirectory(prefix="stack-index-") as folder:
            yield Path(folder) / "index"

    def read_tree(self, tree: str, index: Path) -> None:
        self.run("read-tree", tree, env=_index_environment(index))

    def write_tree(self, index: Path) -> str:
        return self.text("write-tree", env=_index_environment(index))

    def overlay(self, tree: str, entries: Mapping[str, Entry]) -> str:
        """The tree ``tree`` with ``entries`` put over it."""
        listing = "".join(
            f"{entry.mode} {entry.blob}\t{path}\0" for path, entry in entries.items()
        )
        with self.scratch_index() as index:
            self.read_tree(tree, index)
            self.run(
                *("update-index", "-z", "--add", "--replace", "--index-info"),
                stdin=os.fsencode(listing),
                env=_index_environment(index),
            )
            return self.write_tree(index)

    @contextlib.contextmanager
    def merging(self) -> Iterator[Merging]:
        """A place to merge commits of this repository in.

        It has a git directory and a work tree of its own, so that no ref moves and
        no setting or attribute of this repository counts.  The objects it writes go
        where this repository's do.
        """
        with (
            Repository.borrowing(self) as plain,
            tempfile.TemporaryDirectory(prefix="stack-merge-") as folder,
        ):
            objects = self.objects or self.git_dir / "objects"
            plain.run("config", "core.bare", "false")
            # Only what is in conflict is put on disk.
            (plain.git_dir / "info").mkdir(exist_ok=True)
            (plain.git_dir / "info" / "sparse-checkout").write_text("/nothing\n")
            yield Merging(Repository(plain.git_dir, Path(folder), objects))

    def start_merge(
        self, commit: str, *options: str, sparse: bool = False
    ) -> subprocess.CompletedProcess[bytes]:
        """Merge what ``commit`` changes into the work tree and its index."""
        return self.start(
            *("cherry-pick", "--no-commit", *options, commit),
            options=(*_MERGE_OPTIONS, *(_SPARSE if sparse else ())),
        )

    def unmerged(self) -> dict[str, dict[str, Entry]]:
        """Paths in conflict, with the entry of each stage (1 base, 2 ours, 3 theirs)."""
        found: dict[str, dict[str, Entry]] = {}
        for line in self.run("ls-files", "--unmerged", "-z").split(b"\0"):
            if line:
                meta, _, path = line.partition(b"\t")
                mode, blob, stage = meta.decode().split()
                found.setdefault(os.fsdecode(path), {})[stage] = Entry(mode, blob)
        return found

    def renamed(self, old: str, new: str) -> dict[str, tuple[str, int]]:
        """Paths of ``old`` that ``new`` has under another name: it, and % alike."""
        listing = self.run(
            *("diff-tree", "-r", "-z", "--find-renames", "-l100000"),
            *("--diff-filter=R", "--name-status", old, new),
        ).split(b"\0")
        return {
            os.fsdecode(before): (os.fsdecode(after), int(score[1:]))
            for score, before, after in zip(
                listing[::3], listing[1::3], listing[2::3], strict=False
            )
        }

    def read_many(self, blobs: Iterable[str]) -> dict[str, bytes]:
        """The contents of many blobs, with one call."""
        wanted = list(dict.fromkeys(blobs))
        stream = self.run(
            "cat-file", "--batch", stdin="".join(f"{x}\n" for x in wanted).encode()
        )
        found, place = {}, 0
        for blob in wanted:
            end = stream.index(b"\n", place)
            size = int(stream[place:end].split()[2])
            found[blob] = stream[end + 1 : end + 1 + size]
            place = end + 1 + size + 1
        return found

    def files_with(self, word: str, tree: str) -> list[str]:
        """Files of a tree that have a word."""
        done = self.start("grep", "-z", "-l", "-w", "-F", "-e", word, tree)
        if done.returncode not in (0, 1):
            _check(done, ("grep",))
        prefix = f"{tree}:".encode()
        names = done.stdout.split(b"\0")
        return [os.fsdecode(name.removeprefix(prefix)) for name in names if name]

    def patch_ids(self, *revisions: str, paths: Iterable[str] = ()) -> dict[str, str]:
        """Ids of what commits change, whatever their line numbers and white space.

        Args:
            revisions: As for ``git log``.
            paths: Leave out commits that touch none of these.

        Returns:
            The commit (the newest, if there are several) by its patch id.
        """
        log = self.run(
            *("log", "--format=%H", "--patch", "--full-diff", "--full-index"),
            *("--no-renames", "--unified=3", "--diff-algorithm=myers"),
            *("--no-ext-diff", "--no-textconv", "--no-color", *revisions),
            *("--", *paths),
        )
        listing = self.run("patch-id", "--stable", stdin=log).decode().split()
        pairs = list(zip(listing[::2], listing[1::2], strict=True))
        return dict(reversed(pairs))

    def log(self, *arguments: str, paths: Iterable[str] = ()) -> list[tuple[str, str]]:
        """Commits as (id, subject), newest first."""
        log = self.text("log", "--format=%H %s", "-s", *arguments, "--", *paths)
        return [
            (line[:40], line[41:])
            for line in log.splitlines()
            if re.match("[0-9a-f]{40} ", line)
        ]

    def lines_log(
        self, path: str, first: int, last: int, *arguments: str
    ) -> list[tuple[str, str]]:
        """Commits that touched lines of a file, newest first.

        Args:
            path: As the newest commit has it.
            first, last: Line numbers there, from 1.
            arguments: Revisions, as for ``git log``.
        """
        log = self.text(
            *("log", "--format=%H %s", "-s", f"-L{first},{last}:{path}", *arguments)
        )
        return [(line[:40], line[41:]) for line in log.splitlines() if line]

    def range_diff(self, old: tuple[str, str], new: tuple[str, str]) -> str:
        """``git range-diff`` of two lines of commits, each as (base, tip)."""
        return self.run(
            # The same patches, mostly: rather changed than taken out and put in.
            *("range-diff", "--no-color", "--no-notes", "--creation-factor=100"),
            *(f"{base}..{tip}" for base, tip in (old, new)),
        ).decode("utf-8", "replace")

    def apply_to_index(self, diff: bytes, index: Path) -> None:
        """Apply a diff to an index, with no work tree, fuzz or whitespace repair."""
        self.run(
            *("apply", "--cached", "--whitespace=nowarn", "-p1", "-"),
            stdin=diff,
            env=_index_environment(index),
        )

    def import_tree(self, files: Iterable[tuple[bytes, str, bytes]]) -> str:
        """Write files, given as (mode, path, content), as a tree.

        They go through ``git fast-import``: nothing is unpacked on disk, so no path
        can escape and no mode, line ending or attribute of this machine counts.
        """
        importer = process.start(
            ["git", *_OPTIONS, f"--git-dir={self.git_dir}", "fast-import", "--quiet"],
            stdin=subprocess.PIPE,
            env={**_ENVIRONMENT, **self._objects_environment()},
        )
        assert importer.stdin is not None
        ref = "refs/stack/import"
        finished = False
        try:
            # If git dies, the pipe breaks; its exit status is judged below.
            with contextlib.suppress(BrokenPipeError):
                importer.stdin.write(
                    b"commit %s\ncommitter x <x> 0 +0000\ndata 0\n" % ref.encode()
                )
                for mode, path, content in files:
                    importer.stdin.write(
                        b"M %s inline %s\ndata %d\n%s\n"
                        % (mode, os.fsencode(path), len(content), content)
                    )
                importer.stdin.write(b"done\n")
            finished = True
        finally:
            if not finished:
                importer.kill()
            _, words = importer.communicate()
        if importer.returncode:
            raise GitError("git fast-import failed", details=process.tail(words))
        tree = self.text("rev-parse", "--verify", ref + "^{tree}")
        self.update_refs({ref: None})
        return tree

    def copy_from(self, source: Repository, *objects: str) -> None:
        """Copy trees, or commits with their history, from another repository."""
        listing = source.run("rev-list", "--objects", "--no-object-names", *objects)
        self._receive(source, listing)
        # index-pack names each object by its content: an altered one is missing.
        self.run("rev-list", "--objects", "--quiet", *objects)

    def copy_shallow_from(self, source: Repository, commit: str) -> None:
        """Copy one commit and its tree; its parents are marked as left out."""
        tree = source.commit(commit).tree
        listing = source.run("rev-list", "--objects", "--no-object-names", tree)
        self._receive(source, f"{commit}\n".encode() + listing)
        (self.git_dir / "shallow").write_text(f"{commit}\n")
        self.run("rev-list", "--objects", "--quiet", commit)

    def _receive(self, source: Repository, listing: bytes) -> None:
        """Copy the objects of a listing."""
        pack = process.start(
            [
                *("git", *_OPTIONS, f"--git-dir={source.git_dir}"),
                *("pack-objects", "--stdout", "--quiet"),
            ],
            stdin=subprocess.PIPE,
            env={**_ENVIRONMENT, **source._objects_environment()},
        )
        assert pack.stdin and pack.stdout and pack.stderr
        unpack = process.start(
            [
                *("git", *_OPTIONS, f"--git-dir={self.git_dir}"),
                *("index-pack", "--stdin", "--fix-thin"),
            ],
            stdin=pack.stdout.fileno(),
            env={**_ENVIRONMENT, **self._objects_environment()},
        )
        pack.stdout.close()
        pack.stdin.write(listing)
        pack.stdin.close()
        _, unpack_words = unpack.communicate()
        pack_words = pack.stderr.read()
        if pack.wait() or unpack.returncode:
            raise GitError(
                f"copying objects from {source.git_dir} failed",
                details=process.tail(pack_words + unpack_words),
            )

    # -- refs and work tree --------------------------------------------------

    def update_refs(self, changes: Mapping[str, str | None]) -> None:
        """Set refs (or delete those mapped to None), all or none."""
        lines = [
            f"update {ref} {value}" if value else f"delete {ref}"
            for ref, value in changes.items()
        ]
        script = "\n".join(["start", *lines, "commit", ""])
        self.run("update-ref", "--stdin", "--no-deref", stdin=script.encode())

    def refs(self, prefix: str) -> dict[str, str]:
        listing = self.text("for-each-ref", "--format=%(refname) %(objectname)", prefix)
        return dict(line.split(" ", 1) for line in listing.splitlines())

    def branch(self) -> str | None:
        """The branch that HEAD names, or None when HEAD is detached."""
        done = self.start("symbolic-ref", "--quiet", "HEAD")
        return done.stdout.decode().strip() or None

    def dirty(self) -> list[str]:
        """Paths that differ from HEAD or are untracked, ignored ones left out."""
        listing = self.run(
            *("status", "--porcelain=v1", "-z", "--no-renames"),
            *("--untracked-files=all", "--ignore-submodules=none"),
        )
        return sorted(os.fsdecode(line[3:]) for line in listing.split(b"\0") if line)

    def snapshot(self, parent: str, message: bytes, identity: Identity) -> str:
        """Commit the work tree as it is, untracked files too, moving no ref."""
        with self.scratch_index() as index:
            self.read_tree(parent, index)
            self.run("add", "--all", "--", ".", env=_index_environment(index))
            tree = self.write_tree(index)
        return self.write_commit(tree, [parent], message, identity, identity)

    def filter_messages(self, start: str, branch: str, module: str) -> None:
        """Rewrite the messages of a branch's commits, and nothing else of them.

        Args:
            start: The commit that the branch starts from; it stays.
            branch: The full ref.
            module: Has ``filtered(message, signer)``, which gives the new message.
        """
        code = (
            f"import {module} as module, os\n"
            "signer = os.fsencode(os.environ['STACK_SIGNER'])\n"
            "return module.filtered(message, signer)\n"
        )
        done = process.run(
            [
                *(sys.executable, "-m", "git_filter_repo", "--force", "--quiet"),
                *("--refs", f"{start}..{branch}", "--preserve-commit-hashes"),
                *("--preserve-commit-encoding", "--prune-empty", "never"),
                *("--message-callback", code),
            ],
            cwd=self.work_tree or self.git_dir,
            env={
                **_ENVIRONMENT,
                "PYTHONPATH": os.fspath(Path(__file__).parent.parent),
                "STACK_SIGNER": f"{self.text('config', 'user.name')} "
                f"<{self.text('config', 'user.email')}>",
            },
        )
        _check(done, ("filter-repo",))

    def staged_tree(self) -> str:
        """The tree of the index with all that the work tree changes, and adds, in it."""
        with self.scratch_index() as index:
            shutil.copy2(self.git_dir / "index", index)
            self.run("add", "--all", "--", ".", env=_index_environment(index))
            return self.write_tree(index)

    def format_patch(self, commit: str) -> bytes:
        """The commit as a patch; every option that user settings could move is set."""
        return self.run(
            *("format-patch", "--keep-subject", "--stdout", "--no-stat"),
            *("--no-signature", "--zero-commit", "--full-index", "--binary"),
            *("--no-renames", "--unified=3", "--inter-hunk-context=0"),
            *("--diff-algorithm=myers", "--no-ext-diff", "--no-textconv"),
            *("--src-prefix=a/", "--dst-prefix=b/", "--no-color", "--no-attach"),
            *("--no-thread", "--no-cover-letter", "--no-base"),
            f"{commit}^..{commit}",
        )


class Merging:
    """Commits merged one after the other in one work tree."""

    def __init__(self, repository: Repository):
        self.repository = repository

    def pick(self, commit: str, onto: str) -> Merge:
        """Merge what ``commit`` changes into the tree of the commit ``onto``.

        A true three-way merge, whose base is the tree that ``commit`` was made on.
        """
        repository = self.repository
        done = self._start(commit, onto)
        unmerged = repository.unmerged()
        if not unmerged:
            _check(done, ("cherry-pick",))
            return Merge(repository.text("write-tree"), (), ())
        assert repository.work_tree is not None
        conflicts = []
        for path, stages in sorted(unmerged.items()):
            file = repository.work_tree / path
            is_file = file.is_file() and not file.is_symlink()
            sides = frozenset(_SIDES[stage] for stage in stages)
            content = file.read_bytes() if is_file else None
            conflicts.append(Conflict(path, sides, content))
        said = done.stdout.decode("utf-8", "replace").splitlines()
        words = tuple(line for line in said if line.startswith("CONFLICT"))
        return Merge(None, tuple(conflicts), words)

    def settle(self, commit: str, onto: str) -> str:
        """The tree where each conflict of :meth:`pick` is settled for ``commit``.

        A path that ``onto`` no longer has stays away.  It is nobody's solution; it
        lets the commits after this one be judged by what they themselves change.
        """
        repository = self.repository
        self._start(commit, onto, "-X", "theirs")
        lines = []
        for path, stages in repository.unmerged().items():
            lines.append(f"0 {NO_BLOB}\t{path}\0")
            if "2" in stages:
                lines.append(f"{stages['2'].mode} {stages['2'].blob}\t{path}\0")
        repository.run(
            *("update-index", "-z", "--index-info"),
            stdin=os.fsencode("".join(lines)),
        )
        return repository.text("write-tree")

    def _start(
        self, commit: str, onto: str, *options: str
    ) -> subprocess.CompletedProcess[bytes]:
        repository = self.repository
        repository.update_refs({"HEAD": onto})
        repository.run("reset", "--hard", "--quiet", options=_SPARSE)
        done = repository.start_merge(commit, *options, sparse=True)
        if done.returncode not in (0, 1):  # 1: there are conflicts
            _check(done, ("cherry-pick",))
        return done


def mailinfo(mail: bytes) -> tuple[Identity, bytes]:
    """Author and message of a patch in mail form, nothing stripped from either.

    Raises:
        GitError: if git cannot read it, or a header is missing.
    """
    with tempfile.TemporaryDirectory(prefix="stack-mail-") as name:
        folder = Path(name)
        done = process.run(
            [
                *("git", *_OPTIONS, "mailinfo", "-k", "--no-scissors"),
                *("--encoding=UTF-8", folder / "body", folder / "diff"),
            ],
            cwd=folder,
            # No repository around the temporary folder has a say.
            env={**_ENVIRONMENT, "GIT_CEILING_DIRECTORIES": os.fspath(folder.parent)},
            stdin=mail,
        )
        _check(done, ("mailinfo",))
        text = (folder / "body").read_bytes()
    fields = done.stdout.decode("utf-8", "replace").splitlines()
    found = dict(line.split(": ", 1) for line in fields if ": " in line)
    missing = [key for key in ("Author", "Email", "Date") if not found.get(key)]
    if missing:
        raise GitError(f"the mail header lacks {', '.join(missing)}")
    subject = found.get("Subject", "").encode()
    author = Identity(found["Author"], found["Email"], found["Date"])
    return author, subject + b"\n\n" + text.strip(b"\n") + b"\n"


def mail_count(mail: bytes) -> int:
    """How many mails ``git am`` would take ``mail`` for."""
    with tempfile.TemporaryDirectory(prefix="stack-mail-") as folder:
        done = process.run(
            ["git", *_OPTIONS, "mailsplit", "--keep-cr", f"-o{folder}"],
            env=_ENVIRONMENT,
            stdin=mail,
        )
        _check(done, ("mailsplit",))
    return int(done.stdout)


def configured_identity(repository: Repository | None) -> tuple[str, str]:
    """Name and email of the person at work, from that person's own configuration.

    The one place where a user's settings are read; empty if they are not set.
    """
    where = [f"--git-dir={repository.git_dir}"] if repository else []
    found = [
        process.run(["git", *where, "config", "--get", key]).stdout
        for key in ("user.name", "user.email")
    ]
    name, email = (value.decode("utf-8", "surrogateescape").strip() for value in found)
    return name, email


def blob_id(content: bytes) -> str:
    """The id git gives to ``content``, without asking git."""
    header = b"blob %d\0" % len(content)
    return hashlib.sha1(header + content, usedforsecurity=False).hexdigest()


def tree_id(entries: Mapping[str, Entry]) -> str:
    """The id of a flat tree of ``entries``, without asking git."""
    listing = b"".join(
        b"%s %s\0%s" % (entry.mode.encode(), name, bytes.fromhex(entry.blob))
        for name, entry in sorted((os.fsencode(n), e) for n, e in entries.items())
    )
    header = b"tree %d\0" % len(listing)
    return hashlib.sha1(header + listing, usedforsecurity=False).hexdigest()


def _index_environment(index: Path | None) -> dict[str, str]:
    return {"GIT_INDEX_FILE": os.fspath(index)} if index is not None else {}


def _check(done: subprocess.CompletedProcess[bytes], arguments: Sequence[str]) -> None:
    if done.returncode:
        raise GitError(
            f"git {arguments[0]} failed (exit {done.returncode})",
            mend=_PLACE if _NO_PLACE.search(done.stderr) else "",
            details=process.tail(done.stderr),
        )
