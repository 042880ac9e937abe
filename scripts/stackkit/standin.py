"""image --stand-in: the stages of Dockerfile.rocm that need no ROCm, built for real.

The base images cannot be had everywhere, and are of tens of gigabytes.  These stages
need of them no more than a shell, Python and useradd, so that a small Debian can
stand in.  What comes out is looked at.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from . import build, hiptools, image, process
from .doctor import OK, PROBLEM, Finding
from .errors import StackError
from .pins import Pin, Project
from .report import Step

STAGES = ("source", "layout", "overlay")
SUITE = "bookworm"
_SITE = "usr/lib/python3/dist-packages"
_PACKAGES = "python3,passwd"
# User numbers that an image must work for: its own, and one that nobody made.
_USERS = (2000, 1000540000)

MEND = (
    "as root, on Debian: apt-get install -y --no-install-recommends buildah debootstrap"
)


@dataclass(frozen=True)
class StandIn:
    """What was found; ``missing`` says why nothing was."""

    findings: tuple[Finding, ...] = ()
    missing: tuple[str, ...] = ()


def missing() -> tuple[str, ...]:
    """Why the stages cannot be built on this machine."""
    why = [
        f"there is no {program}"
        for program in ("buildah", "debootstrap")
        if shutil.which(program) is None
    ]
    if os.geteuid():
        why.append("only root can build without user namespaces")
    return tuple(why)


def stand_in(project: Project, pin: Pin, made: build.Source, step: Step) -> StandIn:
    """Build the stages on a stand-in, and look at what comes out.

    The context must have been written.

    Args:
        project, pin, made: The stack.
        step: Told what is being done.

    Raises:
        StackError: if a stage does not build.
    """
    why = missing()
    if why:
        return StandIn(missing=why)
    with tempfile.TemporaryDirectory(prefix="stack-image-") as name:
        builder = _Builder(Path(name), step)
        builder.make(
            "scratch", "base", lambda root: _copy(_debian(project, step), root)
        )
        builder.make("localhost/base", "release", lambda root: _install(root, made))
        findings: list[Finding] = []
        looks: dict[str, Callable[[Path], Iterator[Finding]]] = {
            "source": lambda found: source(found, made),
            "layout": layout,
            "overlay": lambda found: overlaid(found, made),
        }
        for stage in STAGES:
            builder.build(project, pin, made, stage)
            with builder.mounted(stage) as found:
                findings += looks[stage](found)
        findings += builder.writable()
    return StandIn(tuple(findings))


def _debian(project: Project, step: Step) -> Path:
    """The files of a small Debian, kept in the cache."""
    home = project.cache / "stand-in" / f"{SUITE}-{_PACKAGES.replace(',', '-')}"
    if home.is_dir():
        return home
    home.parent.mkdir(parents=True, exist_ok=True)
    step("making a small Debian, about 60 MB to download")
    with tempfile.TemporaryDirectory(dir=home.parent) as name:
        half = Path(name) / "root"
        done = process.run(
            ["debootstrap", "--variant=minbase", f"--include={_PACKAGES}", SUITE, half,
             hiptools.debian_mirror()]
        )  # fmt: skip
        if done.returncode:
            raise StackError(
                "debootstrap failed",
                mend="check the network, then run it again",
                details=process.tail(done.stdout, 3),
            )
        half.rename(home)
    return home


def _copy(source: Path, root: Path) -> None:
    # Not in Python, which would read from devices.
    done = process.run(["cp", "--archive", f"{source}/.", root])
    if done.returncode:
        raise StackError(
            f"{source} cannot be copied", details=process.tail(done.stderr, 1)
        )


def _install(root: Path, made: build.Source) -> None:
    """The release's vLLM, unpatched, where pip puts it.

    Of the package as many files as the overlay looks at.
    """
    for path, (before, _) in made.overlay.files.items():
        target = root / _SITE / path
        target.parent.mkdir(parents=True, exist_ok=True)
        if before is not None:
            target.write_bytes(before)
    (root / _SITE / "vllm" / "__init__.py").touch()


class _Builder:
    """buildah, with a storage of its own, gone afterwards."""

    def __init__(self, scratch: Path, step: Step):
        self.step = step
        self.options = (
            *("--root", str(scratch / "storage"), "--runroot", str(scratch / "run")),
            *("--storage-driver", "vfs"),
        )

    def run(self, *arguments: str | Path) -> str:
        done = process.run(["buildah", *self.options, *arguments])
        if done.returncode:
            raise StackError(
                f"buildah {arguments[0]} failed",
                mend=f"look at {image.DOCKERFILE}",
                details=process.tail(done.stdout + done.stderr, 8),
            )
        return done.stdout.decode().strip()

    def make(self, base: str, name: str, fill: Callable[[Path], None]) -> None:
        """Make an image of another one, changed."""
        container = self.run("from", base)
        fill(Path(self.run("mount", container)))
        self.run("umount", container)
        self.run("commit", "--quiet", container, f"localhost/{name}")
        self.run("rm", container)

    def build(self, project: Project, pin: Pin, made: build.Source, stage: str) -> None:
        self.step(f"building the stage {stage}")
        self.run(
            *("bud", "--isolation", "chroot", "--format", "docker", "--layers=false"),
            *("--build-arg", "BASE_IMAGE=localhost/base"),
            *("--build-arg", "RELEASE_IMAGE=localhost/release"),
            *("--target", stage, "--tag", f"localhost/stage-{stage}"),
            *("--file", project.root / image.DOCKERFILE, image.folder(project, pin)),
        )

    @contextlib.contextmanager
    def mounted(self, stage: str) -> Iterator[Path]:
        """The files of a stage."""
        container = self.run("from", f"localhost/stage-{stage}")
        try:
            yield Path(self.run("mount", container))
        finally:
            self.run("rm", container)

    def writable(self) -> Iterator[Finding]:
        """Whether the users that it must work for can write every cache."""
        container = self.run("from", "localhost/stage-layout")
        told = json.loads(self.run("inspect", container))
        pairs = (x.split("=", 1) for x in told["Docker"]["config"]["Env"])
        caches = sorted(v for _, v in pairs if v.startswith("/var/cache/"))
        yield Finding("caches", OK if caches else PROBLEM, f"{len(caches)} are named")
        for user in _USERS:
            files = [f"{path}/{user}" for path in (*caches, "/home/vllm")]
            done = process.run(
                ["buildah", *self.options, "run", "--isolation", "chroot", "--user",
                 f"{user}:0", container, "touch", *files]
            )  # fmt: skip
            detail = process.tail(done.stderr, 1) or ("can write them",)
            state = PROBLEM if done.returncode else OK
            yield Finding(f"user {user}, group 0", state, detail[0])
        self.run("rm", container)


# -- what comes out --------------------------------------------------------------


def source(root: Path, made: build.Source) -> Iterator[Finding]:
    """Whether the stage holds the stack, whole."""
    wrong = []
    with tarfile.open(fileobj=io.BytesIO(made.content)) as tar:
        members = [m for m in tar if not m.isdir()]
        for member in members:
            path = root / "src" / "vllm" / member.name.partition("/")[2]
            if member.issym():
                same = path.is_symlink() and os.readlink(path) == member.linkname
            else:
                stream = tar.extractfile(member)
                assert stream is not None
                same = path.is_file() and path.read_bytes() == stream.read()
            if not same:
                wrong.append(member.name)
    detail = f"{len(members)} files of tree {made.tree[:12]}"
    if wrong:
        detail = f"{len(wrong)} files are wrong: {wrong[0]}"
    yield Finding("source", PROBLEM if wrong else OK, detail)


def layout(root: Path) -> Iterator[Finding]:
    """Whether user, caches and scripts are there."""
    passwd = (root / "etc" / "passwd").read_text()
    user = re.search(r"^vllm:x:2000:0:.*:/home/vllm:", passwd, re.MULTILINE)
    yield Finding("user", OK if user else PROBLEM, "vllm, 2000 of group 0")
    for path in sorted((root / "var" / "cache" / "mi300x").glob("*")):
        told = path.stat()
        right = (told.st_uid, told.st_gid, told.st_mode & 0o7777) == (2000, 0, 0o2775)
        detail = f"user {told.st_uid}, group {told.st_gid}, {told.st_mode & 0o7777:o}"
        yield Finding(f"/{path.relative_to(root)}", OK if right else PROBLEM, detail)
    for name in ("healthcheck.py", "check_image.py", "recipes/tp4.yaml"):
        there = (root / "app" / "mi300x" / name).is_file()
        yield Finding(name, OK if there else PROBLEM, "in /app/mi300x")


def overlaid(root: Path, made: build.Source) -> Iterator[Finding]:
    """Whether exactly the overlay's files were changed, and the record says so."""
    wrong = [
        path
        for path, (_, after) in made.overlay.files.items()
        if _hash(root / _SITE / path)
        != (None if after is None else hashlib.sha256(after).hexdigest())
    ]
    detail = f"{len(made.overlay.files)} files"
    if wrong:
        detail = f"{len(wrong)} of {detail} are wrong: {wrong[0]}"
    yield Finding("overlay", PROBLEM if wrong else OK, detail)
    record = root / "app" / "versions.txt"
    line = f"MI300X_OVERLAY: {made.overlay_version}"
    there = record.is_file() and line in record.read_text().splitlines()
    yield Finding("record", OK if there else PROBLEM, line)


def _hash(path: Path) -> str | None:
    if not path.is_file():
        return None
    return hashlib.sha256(path.read_bytes()).hexdigest()
