"""What a stack is to be put on: a pinned release, another release, a clone.

A release that stack.toml does not pin comes from the package index, verified by the
hash that the index states, and is called "not pinned" wherever its identity is shown.
"""

from __future__ import annotations

import os
import re
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

from . import base, git, history
from .errors import USAGE, StackError
from .history import History
from .pins import UNKNOWN, Pin, Project, Sdist, Toolchain
from .report import Progress

NEWEST = "newest"
_VERSION = re.compile(r"v?(\d+\.\d+\.\d+(?:\.?(?:rc|post)\d+)?)")
_COMMIT_LINE = re.compile(r"^__commit_id__ = .*'g?([0-9a-f]{7,40})'", re.MULTILINE)


@dataclass(frozen=True)
class Target:
    """A tree to put the stack on; its objects are in the repository it was read into.

    ``pin`` is what stack.toml says of it or, if it is not pinned, would say.
    """

    pin: Pin
    pinned: bool
    source: str
    proof: str  # how the identity was established
    history: History | None  # upstream's commits since the stack's own base
    clone: git.Repository | None  # has the commit itself, not just its tree

    @property
    def release(self) -> str:
        return self.pin.release

    def describe(self) -> dict[str, object]:
        """The identity, for people and for JSON."""
        return {
            "release": self.pin.release,
            "pinned": self.pinned,
            "commit": self.pin.commit,
            "tree": self.pin.tree,
            "sha256": self.pin.sdist.sha256 if self.pin.sdist else None,
            "source": self.source,
            "proof": self.proof,
            "history": self.history is not None,
        }

    def __str__(self) -> str:
        state = "as pinned" if self.pinned else f"not pinned; {self.proof}"
        return f"vLLM {self.release}, tree {self.pin.tree} ({state})"


def resolve(
    repository: git.Repository,
    project: Project,
    like: Pin,
    text: str,
    directory: Path,
    progress: Progress,
) -> Target:
    """Bring the tree that ``text`` names into ``repository``.

    Args:
        repository: Where the objects go.
        project: The checkout.
        like: The pin of the stack that is to be moved.
        text: A release, a path (a clone, a bundle or an archive; ``PATH@REF`` for
            another commit than a clone's HEAD), a ref of the submodule, or "newest"
            for the newest release on the package index.
        directory: What a relative path is relative to.
        progress: Told of download progress.

    Raises:
        StackError: if nothing has that name, or it is not what it should be.
    """
    if text == NEWEST:
        from . import index  # takes half a second

        text = index.newest(_package(like))
    pin = project.pins.get(text) or project.pins.get("v" + text)
    if pin is not None:
        return _pinned(repository, project, like, pin, None, progress)
    submodule = base.submodule_repository(project)
    version = _VERSION.fullmatch(text)
    if version:
        tag = f"refs/tags/v{version[1]}"
        if submodule is not None and submodule.resolve(tag):
            return _from_clone(repository, like, submodule, tag, str(project.submodule))
        return _from_index(repository, project, like, version[1], progress)
    path = directory / text
    if path.exists():
        return _from_path(repository, project, like, path, progress)
    name, _, ref = text.rpartition("@")
    clone = base.open_repository(directory / name) if name else None
    if clone is not None:
        return _from_clone(repository, like, clone, ref, str(directory / name))
    if submodule is not None and submodule.resolve(text + "^{commit}"):
        return _from_clone(repository, like, submodule, text, str(project.submodule))
    raise StackError(
        f"{text!r} is no release, no path, and no ref of the submodule",
        mend="name a release (0.23.0), a clone (../vllm or ../vllm@main), a bundle or "
        "an archive",
        code=USAGE,
    )


def _package(pin: Pin) -> str:
    return pin.sdist.name if pin.sdist else "vllm"


def _pinned(
    repository: git.Repository,
    project: Project,
    like: Pin,
    pin: Pin,
    option: Path | None,
    progress: Progress,
) -> Target:
    source = "the applied tree"
    if option is not None or not repository.has(pin.tree):
        source = str(base.fill(repository, project, pin, option, progress))
    submodule = base.submodule_repository(project)
    found = submodule and history.between(submodule, like.commit, pin.commit)
    return Target(pin, True, source, "stack.toml", found, None)


def _from_index(
    repository: git.Repository,
    project: Project,
    like: Pin,
    version: str,
    progress: Progress,
) -> Target:
    from . import index

    name = _package(like)
    folder = base.archives(project)
    archive = folder / f"{name}-{version}.tar.gz"
    record = archive.with_name(archive.name + ".sha256")
    try:
        sha256 = index.offered_sha256(name, version)
    except StackError:
        known = record.read_text().split() if record.is_file() else []
        if not (archive.is_file() and known == [base.hash_file(archive)]):
            raise
        sha256, proof = known[0], "sha256 as the index stated it earlier"
    else:
        archive = index.download_sdist(name, version, sha256, folder, progress)
        proof = "sha256 as the index states it"
        if sha256 is None:
            proof = "the index states no hash: nobody vouches for the archive"
        else:
            record.write_text(sha256 + "\n")
    source = base.Source("index", archive)
    return _from_archive(repository, like, source, "v" + version, proof)


def _from_path(
    repository: git.Repository,
    project: Project,
    like: Pin,
    path: Path,
    progress: Progress,
) -> Target:
    if path.is_dir():
        clone = base.open_repository(path)
        if clone is None:
            raise StackError(
                f"{path} is not a git repository",
                mend="name a clone, a bundle or an archive",
                code=USAGE,
            )
        return _from_clone(repository, like, clone, "HEAD", str(path))
    if base.is_bundle(path):
        return _from_bundle(repository, like, path)
    source = base.Source("option", path)
    try:
        release = _release_of(path)
    except (tarfile.TarError, EOFError, OSError) as error:
        raise StackError(
            f"{path} is no archive that can be read",
            mend="name a clone, a bundle or an archive",
            code=USAGE,
        ) from error
    if release in project.pins:
        pin = project.pins[release]
        return _pinned(repository, project, like, pin, path, progress)
    return _from_archive(
        repository, like, source, release, "nobody vouches for the archive"
    )


def _from_archive(
    repository: git.Repository,
    like: Pin,
    source: base.Source,
    release: str,
    proof: str,
) -> Target:
    generated = base.generated(like)
    tree = base.from_archive(repository, source, generated)
    sdist = Sdist(
        like.sdist.name if like.sdist else "vllm",
        base.hash_file(source.path),
        generated,
    )
    commit = _commit_of(source.path)
    pin = _pin(repository, like, release or f"t{tree[:12]}", commit, tree, sdist)
    return Target(pin, False, str(source), f"{proof} ({sdist.sha256})", None, None)


def _release_of(archive: Path) -> str:
    """The release that an archive's top folder names, or the empty string."""
    with tarfile.open(archive, "r:*") as stream:
        first = stream.next()
        top = first.name.split("/")[0] if first else ""
    version = _VERSION.fullmatch(top.rpartition("-")[2])
    return f"v{version[1]}" if version else ""


def _commit_of(archive: Path) -> str:
    """The commit that an archive says it is of, abbreviated."""
    with tarfile.open(archive, "r:*") as stream:
        for member in stream:
            if member.name.endswith("/vllm/_version.py"):
                content = stream.extractfile(member)
                text = content.read().decode("utf-8", "replace") if content else ""
                found = _COMMIT_LINE.search(text)
                return found[1] if found else UNKNOWN
    return UNKNOWN


def _from_bundle(repository: git.Repository, like: Pin, path: Path) -> Target:
    with tempfile.TemporaryDirectory(prefix="stack-bundle-") as folder:
        clone = git.Repository.create(Path(folder) / "bundle.git")
        clone.run("bundle", "unbundle", os.fspath(path))
        listing = clone.text("bundle", "list-heads", os.fspath(path)).splitlines()
        heads = {line.split(" ", 1)[1]: line.split(" ", 1)[0] for line in listing}
        if "HEAD" not in heads and len(set(heads.values())) != 1:
            raise StackError(
                f"{path}: the bundle has several heads and no HEAD",
                mend="git bundle create FILE HEAD makes one that says which",
                details=tuple(heads),
            )
        head = heads.get("HEAD") or next(iter(heads.values()))
        found = _from_clone(repository, like, clone, head, str(path))
    # What it was read from is gone.
    return Target(found.pin, False, found.source, found.proof, None, None)


def _from_clone(
    repository: git.Repository, like: Pin, clone: git.Repository, ref: str, named: str
) -> Target:
    commit = clone.resolve(ref + "^{commit}")
    if commit is None:
        raise StackError(
            f"{named} has no commit {ref!r}",
            mend=f"git -C {named} fetch",
            code=USAGE,
        )
    tree = clone.commit(commit).tree
    repository.copy_from(clone, tree)
    tags = clone.text("tag", "--points-at", commit).split()
    release = next((tag for tag in tags if _VERSION.fullmatch(tag)), f"g{commit[:12]}")
    pin = _pin(repository, like, release, commit, tree, None)
    found = history.between(clone, like.commit, commit)
    proof = f"commit {commit} of {named}"
    return Target(pin, False, named, proof, found, clone)


def _pin(
    repository: git.Repository,
    like: Pin,
    release: str,
    commit: str,
    tree: str,
    sdist: Sdist | None,
) -> Pin:
    tools = _toolchain(repository, tree)
    return Pin(release, release, like.url, commit, tree, sdist, tools)


def _toolchain(repository: git.Repository, tree: str) -> Toolchain:
    """What the tree's own files say that its ROCm image is built with."""
    docker = _file(repository, tree, "docker/Dockerfile.rocm_base")
    hooks = _file(repository, tree, ".pre-commit-config.yaml")

    def argument(name: str) -> str:
        found = re.search(rf'^ARG {name}="?([^"\s]+)', docker, re.MULTILINE)
        return found[1] if found else ""

    image = re.search(r":(\d[\d.]*)-", argument("BASE_IMAGE"))
    triton, torch = argument("TRITON_BRANCH"), argument("PYTORCH_BRANCH")
    ruff = re.search(r"ruff-pre-commit\n\s*rev: v(\S+)", hooks)
    return Toolchain(
        rocm=argument("ROCM_SDK_VERSION") or (image[1] if image else UNKNOWN),
        torch=argument("TORCH_VERSION") or (f"git{torch}" if torch else UNKNOWN),
        triton=argument("TRITON_VERSION")
        or (f"ROCm/triton {triton}" if triton else UNKNOWN),
        aiter=argument("AITER_BRANCH") or UNKNOWN,
        base_image=UNKNOWN,
        ruff=ruff[1] if ruff else UNKNOWN,
    )


def _file(repository: git.Repository, tree: str, path: str) -> str:
    entry = repository.entries([path], tree=tree).get(path)
    return repository.read(entry.blob).decode("utf-8", "replace") if entry else ""
