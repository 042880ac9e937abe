"""image: the build context of Dockerfile.rocm, and the command that builds it."""

from __future__ import annotations

import hashlib
import io
import re
import shutil
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from . import build, overlay, patchfile, process, recipes, superproject
from .errors import USAGE, StackError
from .pins import Pin, Project

FOLDER = "image"
DOCKERFILE = "Dockerfile.rocm"
TARGETS = ("serve", "serve-nonroot", "export", "overlay")
NAME = "vllm-mi300x"
# Below build/image/<release>, and named by COPY in the Dockerfile.
SOURCE, SUMS, VERSIONS = "source.tar.gz", "SHA256SUMS", "versions.txt"
OVERLAY, PATCHED = "overlay.tar.gz", "patched-files.sha256"
ATTESTATIONS = ("--sbom=true", "--provenance=mode=max")
# What `docker info` says of an image store that can keep them.
_STORE = b"io.containerd.snapshotter"
_BASE = "-base"
_VERSION_TAG = re.compile(r"v\d+\.\d+\.\d+(-base)?")


@dataclass(frozen=True)
class Image:
    """What is built, and with which command."""

    context: Path
    tag: str
    target: str
    arguments: dict[str, str]  # of the Dockerfile
    command: tuple[str, ...]


def folder(project: Project, pin: Pin) -> Path:
    return project.build / FOLDER / pin.release


def release_image(pin: Pin) -> str:
    """The published image that the base image belongs to."""
    return pin.toolchain.base_image.removesuffix(_BASE)


def require_pinned(image: str, pin: Pin) -> None:
    """Require that the name of an image cannot come to mean another one.

    Raises:
        StackError: if it has neither a digest nor the tag of the release.
    """
    if re.search(r"@sha256:[0-9a-f]{64}$", image):
        return
    name, _, tag = image.rpartition(":")
    if name and _VERSION_TAG.fullmatch(tag):
        if tag.removesuffix(_BASE) == pin.tag:
            return
        raise StackError(
            f"{image} is of {tag}, the stack of {pin.tag}",
            mend=f"use {pin.toolchain.base_image}, or another --release",
            code=USAGE,
        )
    raise StackError(
        f"{image} is not pinned: its tag can come to mean another image",
        mend=f"use {pin.toolchain.base_image}, or a digest: NAME@sha256:...",
        code=USAGE,
    )


def image(
    project: Project,
    pin: Pin,
    made: build.Source,
    *,
    target: str,
    arch: str,
    base: str | None,
    tag: str | None,
    source_url: str,
    attest: bool = True,
    any_toolchain: bool = False,
) -> Image:
    """What would be built; nothing is written.

    Args:
        project, pin, made: The stack.
        target: A stage of the Dockerfile.
        arch: As PYTORCH_ROCM_ARCH wants it.
        base: Another base image than the pinned one.
        tag: Another name for the result.
        source_url: Where the project is published, for the labels.
        attest: Whether SBOM and provenance go with it.
        any_toolchain: Whether the base may have another PyTorch than the release's.

    Raises:
        StackError: if the base is not pinned, or an overlay would be empty.
    """
    base = base or pin.toolchain.base_image
    require_pinned(base, pin)
    if target == "overlay" and not made.overlay.files:
        raise StackError("no patch can be laid over the published image")
    version = made.overlay_version if target == "overlay" else made.version
    tag = tag or f"{NAME}:{version.replace('+', '-')}"  # a tag cannot hold a +
    own = superproject.repository(project)
    revision = own.resolve("HEAD") if own else None
    created = own.text("log", "-1", "--format=%cI") if revision and own else ""
    digest = base.partition("@")[2]
    arguments = {
        "BASE_IMAGE": base,
        "RELEASE_IMAGE": release_image(pin),
        "ROCM_ARCH": arch,
        "TORCH_VERSION": "" if any_toolchain else pin.toolchain.torch,
        "STACK_VERSION": version,
        "VLLM_TAG": pin.tag,
        "VLLM_COMMIT": pin.commit,
        "STACK_TREE": made.overlay.tree if target == "overlay" else made.tree,
        "SERIES_SHA256": series_sha256(project, pin),
        "REVISION": revision or "unknown",
        "CREATED": created,
        "BASE_DIGEST": digest,
        "SOURCE_URL": source_url,
    }
    context = folder(project, pin)
    options = [
        part for k, v in arguments.items() for part in ("--build-arg", f"{k}={v}")
    ]
    command = (
        *("docker", "buildx", "build", "--file", str(project.root / DOCKERFILE)),
        *("--target", target, *options),
        *(("--output", f"type=local,dest={build.folder(project, pin)}")
          if target == "export" else
          (*(ATTESTATIONS if attest else ("--provenance=false",)),
           "--tag", tag, "--load")),
        str(context),
    )  # fmt: skip
    return Image(context, tag, target, arguments, command)


def series_sha256(project: Project, pin: Pin) -> str:
    """One hash of the order and the content of all patches."""
    digest = hashlib.sha256()
    for patch in patchfile.load(project.patches(pin)):
        digest.update(f"{patch.name} {patch.sha256}\n".encode())
    return digest.hexdigest()


def versions(project: Project, pin: Pin, made: build.Source) -> list[str]:
    """What the image says of itself, in the form of the release's own record."""
    own = superproject.repository(project)
    revision = own.resolve("HEAD") if own else None
    return [
        f"MI300X_VERSION: {made.version}",
        f"MI300X_VLLM_TAG: {pin.tag}",
        f"MI300X_VLLM_COMMIT: {pin.commit}",
        f"MI300X_VLLM_TREE: {pin.tree}",
        f"MI300X_TREE: {made.tree}",
        f"MI300X_REVISION: {revision or 'unknown'}",
        f"MI300X_SERIES_SHA256: {series_sha256(project, pin)}",
        *(
            f"MI300X_PATCH_{number:02}: {patch.name} sha256:{patch.sha256} "
            f"{patch.trailer('Change-Id')}"
            for number, patch in enumerate(made.patches, 1)
        ),
    ]


def write_context(project: Project, pin: Pin, made: build.Source) -> Path:
    """Write what COPY in the Dockerfile names; what lay there before is gone."""
    context = folder(project, pin)
    half = context.with_name(f"{context.name}.new")
    shutil.rmtree(half, ignore_errors=True)
    half.mkdir(parents=True)
    (half / SOURCE).write_bytes(made.content)
    told = overlay.manifest(made.overlay, made.overlay_version, pin.tag, pin.commit)
    overlay.write(made.overlay, told, half / OVERLAY)
    sums = (f"{_sha256(half / name)}  {name}\n" for name in (OVERLAY, SOURCE))
    (half / SUMS).write_text("".join(sums))
    (half / VERSIONS).write_text("\n".join(versions(project, pin, made)) + "\n")
    (half / PATCHED).write_text("".join(_patched(made)))
    shutil.copytree(
        recipes.folder(project, pin), half / "recipes"
    )  # a missing one is a FileNotFoundError that names it
    shutil.copytree(
        project.root / "scripts" / "image",
        half / "image",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    shutil.rmtree(context, ignore_errors=True)
    half.rename(context)
    return context


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _patched(made: build.Source) -> Iterator[str]:
    """The hash of each installed file that a patch touches, as sha256sum has it."""
    wanted = {change.path for patch in made.patches for change in patch.files}
    with tarfile.open(fileobj=io.BytesIO(made.content)) as tar:
        for member in sorted(tar, key=lambda m: m.name):
            path = member.name.partition("/")[2]
            if path in wanted and path.startswith(overlay.PACKAGE) and member.isfile():
                stream = tar.extractfile(member)
                assert stream is not None
                yield f"{hashlib.sha256(stream.read()).hexdigest()}  {path}\n"


def build_image(made: Image) -> None:
    """Run the command.

    Raises:
        StackError: if there is no docker with buildx, it cannot keep what goes with
            the image, or the build fails.
    """
    if shutil.which("docker") is None:
        raise StackError(
            "docker is not installed",
            mend="install it, or take the wheel: scripts/stack build",
        )
    for probe, what in (
        (("docker", "buildx", "version"), "docker has no buildx plugin"),
        (("docker", "info"), "the docker daemon cannot be reached"),
    ):
        done = process.run(probe)
        if done.returncode:
            raise StackError(
                what,
                mend="install docker-buildx-plugin"
                if "buildx" in what
                else "start it, or join its group",
                details=process.tail(done.stderr, 2),
            )
    if ATTESTATIONS[0] in made.command:
        done = process.run(("docker", "info", "--format", "{{.DriverStatus}}"))
        if _STORE not in done.stdout:
            raise StackError(
                "docker's image store cannot keep the SBOM and the provenance",
                mend="turn on docker's containerd image store, or pass "
                "--no-attestations",
            )
    done = process.run(made.command, env={"DOCKER_BUILDKIT": "1"}, capture=False)
    if done.returncode:
        raise StackError(
            f"docker buildx build ended with {done.returncode}",
            mend="look for the first error above",
        )
