"""The Python package index that the user configured, and downloads from it."""

from __future__ import annotations

import ast
import fcntl
import re
import ssl
import sys
import time
from pathlib import Path

import httpx2
import truststore
from unearth import Link, PackageFinder
from unearth.fetchers.sync import PyPIClient

from . import process
from .base import hash_file, wrong_archive
from .errors import StackError
from .report import Progress

PIP_WHEEL = next(Path(__file__).parent.parent.glob("pip-*.whl"))
_ATTEMPTS = 5


def pip(*arguments: str, **options) -> process.subprocess.CompletedProcess[bytes]:
    """Run the pip that the project ships, in this interpreter's environment."""
    return process.run([sys.executable, PIP_WHEEL / "pip", *arguments], **options)


def settings() -> dict[str, list[str]]:
    """pip's settings (files and ``PIP_*``) that say where packages come from.

    Returns:
        Values by option name (``index-url``, ``extra-index-url``, ``find-links``,
        ``trusted-host``, ``cert``, ``client-cert``, ``proxy``, ``no-index``); an
        absent option is absent.
    """
    found: dict[str, list[str]] = {}
    done = pip("config", "list")
    if done.returncode:
        raise StackError(
            "pip's configuration cannot be read",
            mend="correct the file that it names, or PIP_CONFIG_FILE",
            details=process.tail(done.stderr, 2),
        )
    listing = done.stdout.decode()
    ranked = {"global": 0, "install": 1, "download": 2, ":env:": 3}
    lines = re.findall(r"^([\w:]+)\.([\w-]+)=(.*)$", listing, re.MULTILINE)
    for section, option, value in sorted(lines, key=lambda x: ranked.get(x[0], -1)):
        if section in ranked:
            found[option] = str(ast.literal_eval(value)).split()
    return found


def finder() -> PackageFinder:
    """A finder over the configured index; the package's own default if none is."""
    options = settings()
    trusted = options.get("trusted-host", [])
    session = PyPIClient(
        trusted_hosts=trusted,
        verify=_trust(options),
        proxy=options.get("proxy", [None])[0],
        follow_redirects=True,
    )
    found = PackageFinder(
        session,
        index_urls=options.get("index-url", []),
        trusted_hosts=trusted,
        no_binary=[":all:"],
        ignore_compatibility=True,
    )
    if options.get("no-index", ["0"])[0].lower() in ("1", "true", "yes", "on"):
        found.sources.clear()
    for url in options.get("extra-index-url", []):
        found.add_index_url(url)
    for location in options.get("find-links", []):
        found.add_find_links(location)
    return found


def _trust(options: dict[str, list[str]]) -> ssl.SSLContext:
    """Whom to trust: the configured certificates, else the system's."""
    if "cert" in options:
        context = ssl.create_default_context(cafile=options["cert"][0])
    else:
        context = truststore.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if "client-cert" in options:
        context.load_cert_chain(options["client-cert"][0])
    return context


def newest(name: str) -> str:
    """The newest release of a package on the configured index.

    Raises:
        StackError: if no index offers it.
    """
    try:
        matches = list(finder().find_matches(name))
    except (httpx2.HTTPError, OSError) as error:
        raise StackError(
            f"the package index cannot be reached: {error}",
            mend="check the network and PIP_INDEX_URL",
        ) from error
    if not matches or matches[0].version is None:
        raise StackError(
            f"no configured package index offers {name}",
            mend="check the network and PIP_INDEX_URL",
        )
    return matches[0].version


def _find_sdist(name: str, version: str) -> tuple[PackageFinder, Link]:
    offline = "scripts/stack apply --base PATH takes a clone, a bundle or an archive"
    try:
        source = finder()
        matches = source.find_matches(f"{name}=={version}")
        links = [package.link for package in matches if not package.link.is_wheel]
    except (httpx2.HTTPError, OSError) as error:
        raise StackError(
            f"the package index cannot be reached: {error}",
            mend=f"check the network and PIP_INDEX_URL, or: {offline}",
        ) from error
    if not links:
        raise StackError(
            f"no configured package index offers the source archive of {name} "
            f"{version} (is it reachable?)",
            mend=f"check the network and PIP_INDEX_URL, or: {offline}",
        )
    return source, links[0]


def offered_sha256(name: str, version: str) -> str | None:
    """What the index says the release's source archive hashes to, if it says it.

    Raises:
        StackError: if no index offers the archive.
    """
    _, link = _find_sdist(name, version)
    if link.hash_name == "sha256":
        return link.hash
    return (link.hashes or {}).get("sha256")


def download_sdist(
    name: str, version: str, sha256: str | None, folder: Path, progress: Progress
) -> Path:
    """Fetch a release's source archive and verify it.

    A broken download goes on where it stopped, in this run or the next; one that
    does not verify is thrown away.

    Args:
        name, version: The release on the index.
        sha256: What the archive must hash to; None if nobody says.
        folder: Where the archive is kept.
        progress: Told of bytes done and bytes in all.

    Returns:
        The verified archive.

    Raises:
        StackError: if no index offers it, the network fails for good, or the
            archive is not the pinned one.
    """
    source, link = _find_sdist(name, version)
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / link.filename
    part = target.with_name(target.name + ".part")
    with open(part, "ab") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        if target.is_file() and hash_file(target) == sha256:
            part.unlink(missing_ok=True)  # another run was faster
            return target
        resumed = stream.tell() > 0
        _fetch(source.session, link.url_without_fragment, stream, progress)
        if resumed and hash_file(part) != sha256:
            _empty(stream)
            _fetch(source.session, link.url_without_fragment, stream, progress)
        actual = hash_file(part)
        if sha256 is not None and actual != sha256:
            part.unlink()
            raise wrong_archive(target, sha256, actual, "the package index")
        part.rename(target)
    return target


def _empty(stream) -> None:
    stream.seek(0)  # or tell() would still give the old size
    stream.truncate(0)


def _fetch(session: PyPIClient, url: str, stream, progress: Progress) -> None:
    attempt, furthest = 0, stream.tell()
    while True:
        try:
            _fetch_once(session, url, stream, progress)
            return
        except httpx2.HTTPStatusError as error:
            raise StackError(
                f"the package index refuses the download: {error}",
                mend="check PIP_INDEX_URL, or run it again later",
            ) from error
        except httpx2.HTTPError as error:
            # A slow line that breaks often still gets there; a dead one does not.
            attempt = 1 if stream.tell() > furthest else attempt + 1
            furthest = max(furthest, stream.tell())
            if attempt == _ATTEMPTS:
                raise StackError(
                    f"the download broke off {_ATTEMPTS} times: {error}",
                    mend=f"run it again: it goes on from {stream.tell() / 1e6:.1f} MB",
                ) from error
            time.sleep(min(2**attempt, 10) / 4)


def _fetch_once(session: PyPIClient, url: str, stream, progress: Progress) -> None:
    """Append what is missing of ``url`` to ``stream``, or start over."""
    done = stream.tell()
    headers = {"Range": f"bytes={done}-"} if done else {}
    with session.get_stream(url, headers=headers) as answer:
        if answer.status_code == 416:  # nothing is missing
            return
        if answer.status_code != 206:
            answer.raise_for_status()
            if done:
                _empty(stream)
            done = 0
        total = done + int(answer.headers.get("Content-Length", 0))
        for block in answer.iter_raw():  # as it comes: what came is kept
            stream.write(block)
            done += len(block)
            progress(done, total)
        stream.flush()
        if total and done < total:
            raise httpx2.ReadError(f"{done} of {total} bytes came")
