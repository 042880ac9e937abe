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
import subprocess
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
            alternates = self.git_dir / "objects" / "info" / "alternates"
            alternates.parent.mkdir(exist_ok=True)
            places = [other.git_dir / "objects", *filter(None, [other.objects])]
            alternates.write_bytes(b"".join(os.fsencode(p) + b"\n" for p in places))
            yield self

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
    ) -> subprocess.CompletedProcess[bytes]:
        """Run a git command and return it, whatever its exit status."""
        where: list[str | os.PathLike[str]] = [f"--git-dir={self.git_dir}"]
        if self.work_tree is not None:
            where.append(f"--work-tree={self.work_tree}")
        return process.run(
            ["git", *_OPTIONS, *where, *arguments],
            cwd=self.work_tree,
            env={**_ENVIRONMENT, **self._objects_environment(), **(env or {})},
            stdin=stdin,
        )

    def run(
        self,
        *arguments: str,
        stdin: bytes | None = None,
        env: Mapping[str, str] | None = None,
    ) -> bytes:
        """Run a git command and return its output.

        Raises:
            GitError: if it fails; git's own words are in the details.
        """
        done = self.start(*arguments, stdin=stdin, env=env)
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

    def cherry_pick(self, commit: str, onto: str) -> tuple[str | None, list[str]]:
        """Merge what ``commit`` changes into the tree of the commit ``onto``.

        A true three-way merge, in a repository and a work tree of its own, so that
        no ref moves and no setting or attribute of this repository counts.

        Returns:
            The merged tree (None on conflict), and the paths in conflict.
        """
        with (
            Repository.borrowing(self) as plain,
            tempfile.TemporaryDirectory(prefix="stack-merge-") as folder,
        ):
            # What it writes goes where ours does.
            objects = self.objects or self.git_dir / "objects"
            plain.run("config", "core.bare", "false")
            plain.update_refs({"HEAD": onto})
            merging = Repository(plain.git_dir, Path(folder), objects)
            merging.run("reset", "--hard", "--quiet")
            done = merging.start("cherry-pick", "--no-commit", commit)
            listing = merging.run("diff", "--name-only", "--diff-filter=U", "-z")
            conflicts = [os.fsdecode(path) for path in listing.split(b"\0") if path]
            if conflicts:
                return None, conflicts
            _check(done, ("cherry-pick",))
            return merging.text("write-tree"), []

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

    def copy_tree_from(self, source: Repository, tree: str) -> None:
        """Copy the objects of one tree from another repository, without history."""
        listing = source.run("rev-list", "--objects", "--no-object-names", tree)
        pack = process.start(
            [
                *("git", *_OPTIONS, f"--git-dir={source.git_dir}"),
                *("pack-objects", "--stdout", "--quiet"),
            ],
            stdin=subprocess.PIPE,
            env=_ENVIRONMENT,
        )
        assert pack.stdin and pack.stdout and pack.stderr
        unpack = process.start(
            [
                *("git", *_OPTIONS, f"--git-dir={self.git_dir}"),
                *("index-pack", "--stdin", "--fix-thin"),
            ],
            stdin=pack.stdout.fileno(),
            env=_ENVIRONMENT,
        )
        pack.stdout.close()
        pack.stdin.write(listing)
        pack.stdin.close()
        _, unpack_words = unpack.communicate()
        pack_words = pack.stderr.read()
        if pack.wait() or unpack.returncode:
            raise GitError(
                f"copying tree {tree} from {source.git_dir} failed",
                details=process.tail(pack_words + unpack_words),
            )
        # index-pack names each object by its content: an altered one is missing.
        self.run("rev-list", "--objects", "--quiet", tree)

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
