"""Where the pinned vLLM tree comes from, and the proof that it is the pinned one.

Sources, in order: ``--base PATH``, the submodule, the cached archive, the
package index.  Whatever the source, the objects land in a repository of ours and
the tree id is compared with the pin before anything is built on it.
"""

from __future__ import annotations

import hashlib
import lzma
import os
import tarfile
import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from . import git
from .errors import StackError
from .pins import Pin, Project
from .report import Progress

# The base commit is made here, from the tree alone, so that it has one id whether
# the tree came from a clone with history or from an archive without.
IDENTITY = git.Identity(
    "vllm-mi300x maintainers", "maintainers@vllm-mi300x.example", "1780012800 +0000"
)


_ANOTHER = "give a clone, a bundle or an archive of the release with --base PATH"


@dataclass(frozen=True)
class Source:
    """Where a base came from."""

    kind: str  # "option", "submodule", "cache" or "index"
    path: Path

    def __str__(self) -> str:
        return f"{self.kind} ({self.path})"


def cached_archive(project: Project, pin: Pin) -> Path | None:
    """The release's archive in the cache, if it is there (not yet verified)."""
    if pin.sdist is None:
        return None
    version = pin.release.removeprefix("v")
    path = archives(project) / f"{pin.sdist.name}-{version}.tar.gz"
    return path if path.is_file() else None


def archives(project: Project) -> Path:
    """Where the cache keeps source archives."""
    return project.cache / "sdist"


def submodule_repository(project: Project) -> git.Repository | None:
    """The submodule's git directory, if it has been initialised."""
    return open_repository(project.submodule) if any_entry(project.submodule) else None


def any_entry(folder: Path) -> bool:
    return folder.is_dir() and next(folder.iterdir(), None) is not None


def fill(
    repository: git.Repository,
    project: Project,
    pin: Pin,
    option: Path | None,
    progress: Progress,
) -> Source:
    """Bring the pinned tree's objects into ``repository`` and verify them.

    Raises:
        StackError: if no source has it, or the source is not the pinned one; both
            identities are shown.
    """
    source = _choose(project, pin, option, progress)
    if source.kind in ("cache", "index"):
        assert pin.sdist is not None
        actual = hash_file(source.path)
        if actual != pin.sdist.sha256:
            raise wrong_archive(
                source.path, pin.sdist.sha256, actual, f"the cache ({source.path})"
            )
    if source.path.is_dir():
        tree = _from_repository(repository, pin, source.path, source.path)
    elif is_bundle(source.path):
        tree = _from_bundle(repository, pin, source.path)
    else:
        tree = from_archive(repository, source, generated(pin))
    if tree != pin.tree:
        raise StackError(
            f"the base from {source} is not vLLM {pin.tag} as pinned",
            mend="give another source with --base PATH; if the pin was edited, "
            "git checkout stack.toml",
            details=(f"pinned tree {pin.tree}", f"actual tree {tree}"),
        )
    return source


def message(pin: Pin) -> bytes:
    """The message of the base commit; with the tree, all that its id depends on."""
    return f"vLLM {pin.tag}\n\nTree of {pin.url} commit {pin.commit}.\n".encode()


def commit(repository: git.Repository, pin: Pin) -> str:
    """Write the base commit."""
    return repository.write_commit(pin.tree, [], message(pin), IDENTITY, IDENTITY)


def _choose(
    project: Project, pin: Pin, option: Path | None, progress: Progress
) -> Source:
    if option is not None:
        if not option.exists():
            raise StackError(
                f"--base {option}: no such file or directory", mend=_ANOTHER
            )
        return Source("option", option.absolute())
    submodule = submodule_repository(project)
    if submodule is not None and submodule.has(pin.commit):
        return Source("submodule", project.submodule)
    cached = cached_archive(project, pin)
    if cached is not None:
        return Source("cache", cached)
    if pin.sdist is None:
        raise StackError(
            f"stack.toml names no source archive of {pin.release}, and the submodule "
            f"does not have commit {pin.commit}",
            mend=_ANOTHER,
        )
    # Imported here: the network libraries would cost every command their start.
    from . import index

    archive = index.download_sdist(
        pin.sdist.name,
        pin.release.removeprefix("v"),
        pin.sdist.sha256,
        archives(project),
        progress,
    )
    return Source("index", archive)


def open_repository(path: Path) -> git.Repository | None:
    """The repository at ``path``: bare, with .git, or with a .git file."""
    link = path / ".git"
    if link.is_file():  # a submodule or a linked work tree
        target = link.read_text().removeprefix("gitdir:").strip()
        return git.Repository((path / target).resolve())
    if link.is_dir():
        return git.Repository(link)
    if (path / "objects").is_dir():
        return git.Repository(path)
    return None


def _from_repository(
    repository: git.Repository, pin: Pin, path: Path, named: Path
) -> str:
    """Copy the pinned tree from the repository at ``path``; users call it ``named``."""
    source = open_repository(path)
    if source is None:
        raise StackError(f"--base {named}: is not a git repository", mend=_ANOTHER)
    tree = source.resolve(pin.commit + "^{tree}")
    if tree is None:
        tag = source.resolve(f"refs/tags/{pin.tag}^{{commit}}")
        fetch = f"git -C {named} fetch {pin.url} {pin.commit}"
        raise StackError(
            f"{named} does not have commit {pin.commit}",
            mend=fetch if named.is_dir() else _ANOTHER,
            details=(f"its tag {pin.tag} is commit {tag}",) if tag else (),
        )
    if tree == pin.tree:
        try:
            repository.copy_from(source, tree)
        except git.GitError as error:
            raise StackError(
                f"{named} is damaged: it does not have all of tree {tree}",
                mend=f"git -C {named} fsck names what is wrong, or: {_ANOTHER}",
                details=error.details,
            ) from error
    return tree


def is_bundle(path: Path) -> bool:
    with open(path, "rb") as stream:
        return stream.readline(20).rstrip() in (b"# v2 git bundle", b"# v3 git bundle")


def _from_bundle(repository: git.Repository, pin: Pin, path: Path) -> str:
    with tempfile.TemporaryDirectory(prefix="stack-bundle-") as folder:
        clone = git.Repository.create(Path(folder) / "bundle.git")
        try:
            clone.run("bundle", "unbundle", os.fspath(path))
        except git.GitError as error:
            raise StackError(
                f"{path}: the bundle is truncated, damaged or not whole",
                mend=_ANOTHER,
                details=error.details,
            ) from error
        return _from_repository(repository, pin, clone.git_dir, path)


def generated(pin: Pin) -> tuple[str, ...]:
    """What the build backend adds to the tagged tree."""
    return pin.sdist.generated if pin.sdist else ()


def from_archive(
    repository: git.Repository, source: Source, generated: tuple[str, ...]
) -> str:
    """Write an archive's files as a tree, through ``git fast-import``.

    Nothing is unpacked on disk, so no path in the archive can escape and no
    file mode, line ending or attribute of this machine can change a blob.

    Args:
        repository: Where the objects go.
        source: The archive.
        generated: Paths that are left out; one that ends with / is a folder.
    """
    path = source.path
    with open(path, "rb"):
        pass  # an error of the file system is told as such
    try:
        return repository.import_tree(_members(path, generated))
    except (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        mend = f"delete it and run again: rm {path}"
        raise StackError(
            f"{path}: the archive is truncated or damaged: {error}",
            mend=_ANOTHER if source.kind == "option" else mend,
        ) from error


def _members(
    path: Path, generated: tuple[str, ...]
) -> Iterator[tuple[bytes, str, bytes]]:
    """The files of an archive below its top folder: mode, path, content."""
    folders = tuple(name for name in generated if name.endswith("/"))
    with tarfile.open(path, "r:*") as archive:
        for member in archive:
            _, _, name = member.name.partition("/")
            if name in generated or name.startswith(folders) or member.isdir():
                continue
            if not name or "\n" in name or name.startswith('"'):
                raise tarfile.TarError(f"unexpected member {member.name!r}")
            if member.issym():
                yield b"120000", name, os.fsencode(member.linkname)
            elif member.isfile():
                stream = archive.extractfile(member)
                assert stream is not None
                mode = b"100755" if member.mode & 0o100 else b"100644"
                yield mode, name, stream.read()
            else:
                raise tarfile.TarError(f"unexpected member {member.name!r}")


def wrong_archive(path: Path, pinned: str, actual: str, source: str) -> StackError:
    """The refusal of an archive that is not the pinned one."""
    return StackError(
        f"{path.name} from {source} is not the pinned archive",
        mend="if stack.toml was not changed, the archive was altered or cut short: "
        "delete it and run again, or give another source with --base PATH",
        details=(f"pinned sha256 {pinned}", f"actual sha256 {actual}"),
    )


def hash_file(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
