"""Where the base comes from, and the proof that it is the pinned one."""

from __future__ import annotations

import contextlib
import http.server
import os
import shutil
import threading
import zlib
from pathlib import Path

import pytest
from lab import (
    GENERATED,
    RELEASE,
    archive,
    changes_nothing,
    flip,
    git,
    members,
    mentions,
    put,
    replace,
    sha256,
)
from stackkit import index


@pytest.fixture
def fresh(fresh):
    """Here the cache starts empty."""
    shutil.rmtree(fresh.cache)
    return fresh


def _pinned_tree(lab) -> str:
    return git(lab.clone, "rev-parse", "HEAD^{tree}")


def _commit(lab) -> str:
    return git(lab.clone, "rev-parse", "HEAD")


def _submodule(lab):
    (lab.root / "vllm").rmdir()
    git(lab.root, "clone", "-q", str(lab.clone), "vllm")


def _bundle(lab) -> str:
    target = lab.folder / "release.bundle"
    git(lab.clone, "bundle", "create", "-q", str(target), RELEASE, "main")
    return str(target)


def _github(lab) -> str:
    """As GitHub serves a tag: another top folder, and the commit as a comment."""
    target = lab.folder / "github.tar.gz"
    git(lab.clone, "archive", "--prefix=vllm-0b3ba88/", f"--output={target}", RELEASE)
    return str(target)


def _linked(lab) -> str:
    target = lab.folder / "linked-clone"
    git(lab.clone, "worktree", "add", "-q", "--detach", str(target))
    return str(target)


def _bare(lab) -> str:
    git(lab.folder, "clone", "-q", "--bare", str(lab.clone), "bare.git")
    return str(lab.folder / "bare.git")


OPTIONS = {
    "clone": lambda lab: str(lab.clone),
    "bare clone": _bare,
    "linked work tree": _linked,
    "bundle": _bundle,
    "sdist": lambda lab: str(lab.sdist),
    "GitHub archive": _github,
    "tar": lambda lab: str(
        archive(lab.folder / "x.tar", members(lab.clone), "other-top", "w")
    ),
    "tar.xz": lambda lab: str(
        archive(lab.folder / "x.tar.xz", members(lab.clone), "top", "w:xz")
    ),
}


@pytest.mark.parametrize("kind", OPTIONS)
def test_base_option_gives_the_pinned_tree(fresh, kind):
    result = fresh.ok("apply", "--base", OPTIONS[kind](fresh), "--json")
    assert fresh.git("rev-parse", "refs/stack/base^{tree}") == _pinned_tree(fresh)
    assert result.json["source"].startswith("option (")
    assert fresh.git("fsck", "--full", "--no-dangling") == ""


def test_relative_base_is_looked_up_from_the_named_directory(fresh, tmp_path):
    result = fresh.spawn("apply", "-C", str(fresh.root), "--base", "../upstream",
                         cwd=tmp_path)  # fmt: skip
    assert result.code == 0, result.text


@pytest.mark.parametrize("source", ["submodule", "cache", "index"])
def test_sources_are_tried_in_order(fresh, source):
    if source == "submodule":
        _submodule(fresh)
        fresh.fill_cache()
    if source == "cache":
        fresh.fill_cache()
        fresh.sdist.unlink()
    result = fresh.ok("apply", "--json")
    assert result.json["source"].startswith(source)
    assert fresh.git("rev-parse", "refs/stack/base^{tree}") == _pinned_tree(fresh)


def test_submodule_without_the_commit_is_passed_over(fresh):
    (fresh.root / "vllm").rmdir()
    git(fresh.root, "init", "-q", "vllm")
    assert fresh.ok("apply", "--json").json["source"].startswith("index")


def test_submodule_stays_as_it_was(fresh):
    _submodule(fresh)
    before = {k: v for k, v in fresh.everything().items() if k.startswith("vllm/")}
    fresh.ok("apply")
    after = {k: v for k, v in fresh.everything().items() if k.startswith("vllm/")}
    assert after == before


def _one_byte(lab) -> str:
    files = members(lab.clone)
    mode, content = files["vllm/beta.py"]
    files["vllm/beta.py"] = (mode, content.replace(b"B7 = 7", b"B7 = 8"))
    return str(archive(lab.folder / "altered.tar.gz", files, "vllm-1.2.0"))


def _mode(lab) -> str:
    files = members(lab.clone)
    files["tools/run.sh"] = ("100644", files["tools/run.sh"][1])
    return str(archive(lab.folder / "altered.tar.gz", files, "vllm-1.2.0"))


def _missing(lab) -> str:
    files = members(lab.clone)
    del files["docs/no_end.txt"]
    return str(archive(lab.folder / "altered.tar.gz", files, "vllm-1.2.0"))


@pytest.mark.parametrize("alter", [_one_byte, _mode, _missing])
def test_archive_of_another_tree_is_refused_with_both_identities(fresh, alter):
    path = alter(fresh)
    result = fresh.run("apply", "--base", path)
    assert result.code == 1
    mentions(result, path, f"pinned tree {_pinned_tree(fresh)}", "actual tree", "mend:")
    assert not fresh.tree.exists()
    assert list((fresh.root / "build").glob(".new-*")) == []


def _moved_tag(lab):
    put(lab.clone, "README.md", "# Another\n")
    git(lab.clone, "commit", "-q", "--amend", "-a", "-m", "Another release")
    git(lab.clone, "tag", "-f", RELEASE)
    git(lab.clone, "reflog", "expire", "--expire=now", "--all")
    git(lab.clone, "gc", "-q", "--prune=now")


@pytest.mark.parametrize("form", ["clone", "bundle"])
def test_moved_tag_is_refused_with_both_identities(fresh, form):
    pinned = _commit(fresh)
    _moved_tag(fresh)
    path = _bundle(fresh) if form == "bundle" else str(fresh.clone)
    result = fresh.run("apply", "--base", path)
    assert result.code == 1
    mentions(result, f"{path} does not have commit {pinned}", "mend:")
    if form == "clone":
        mentions(result, f"its tag {RELEASE} is commit {_commit(fresh)}")
    assert not fresh.tree.exists()


def test_pinned_commit_of_another_tree_is_refused_with_both_identities(fresh):
    pinned = _pinned_tree(fresh)
    replace(fresh.root / "stack.toml", pinned, "0" * 40)
    result = fresh.run("apply", "--base", str(fresh.clone))
    assert result.code == 1
    mentions(result, f"pinned tree {'0' * 40}", f"actual tree {pinned}", "stack.toml")


def test_clone_with_one_altered_object_is_refused(fresh):
    """The object has the right name and another content; git itself trusts it."""
    blob = git(fresh.clone, "rev-parse", "HEAD:vllm/beta.py")
    path = fresh.clone / ".git/objects" / blob[:2] / blob[2:]
    content = zlib.decompress(path.read_bytes()).replace(b"B7 = 7", b"B7 = 8")
    put(path.parent, path.name, zlib.compress(content))
    result = fresh.run("apply", "--base", str(fresh.clone))
    assert result.code == 1
    mentions(result, str(fresh.clone), "damaged", "mend:")
    assert not fresh.tree.exists()


def test_truncated_bundle_is_refused(fresh):
    path = Path(_bundle(fresh))
    path.write_bytes(path.read_bytes()[:-40])
    result = fresh.run("apply", "--base", str(path))
    assert result.code == 1
    mentions(result, str(path), "truncated", "mend:")


@pytest.mark.parametrize("mode", ["w:gz", "w:xz", "w:bz2", "w"])
def test_truncated_archive_is_refused_and_not_to_be_deleted(fresh, mode):
    path = archive(fresh.folder / "cut.tar", members(fresh.clone), "top", mode)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    result = fresh.run("apply", "--base", str(path))
    assert result.code == 1
    mentions(result, str(path), "mend:")
    assert "rm " not in result.err  # it is the user's file
    assert not fresh.tree.exists()


@pytest.mark.parametrize("what", ["text file", "folder", "nothing", "empty file"])
def test_what_is_no_base_is_a_sentence(fresh, what):
    path = fresh.folder / "no-base"
    if what == "folder":
        path.mkdir()
    elif what != "nothing":
        put(fresh.folder, "no-base", "text\n" if what == "text file" else "")
    result = fresh.run("apply", "--base", str(path))
    assert result.code == 1
    mentions(result, str(path), "mend:")


ESCAPES = ["../escape.py", "/etc/escape.py", "a\nb.py", ".git/x"]


@pytest.mark.parametrize("name", ESCAPES)
def test_archive_that_would_escape_is_refused(fresh, name):
    files = {**members(fresh.clone), name: ("100644", b"bad\n")}
    path = archive(fresh.folder / "bad.tar.gz", files, "top")
    result = fresh.run("apply", "--base", str(path))
    assert result.code == 1
    assert not (fresh.folder / "escape.py").exists()
    assert not (fresh.root / "build" / "escape.py").exists()


def test_generated_files_are_left_out_only_as_stack_toml_says(fresh):
    text = (fresh.root / "stack.toml").read_text()
    assert all(name in text for name in GENERATED)
    replace(fresh.root / "stack.toml", '"setup.cfg", ', "")
    result = fresh.run("apply")
    assert result.code == 1
    mentions(result, "pinned tree", "actual tree")


@pytest.mark.parametrize("position", [0, 100, -1])
def test_one_altered_byte_in_the_cache_is_refused_with_both_identities(fresh, position):
    fresh.fill_cache()
    good = sha256(fresh.cached)
    flip(fresh.cached, position)
    result = fresh.run("apply")
    assert result.code == 1
    mentions(result, str(fresh.cached), f"pinned sha256 {good}",
             f"actual sha256 {sha256(fresh.cached)}", "mend:")  # fmt: skip
    assert not fresh.tree.exists()


def test_base_option_is_verified_again_on_an_applied_tree(lab):
    path = _one_byte(lab)
    with changes_nothing(lab):
        result = lab.run("apply", "--dry-run", "--base", path)
    assert result.code == 1
    head = lab.head()
    result = lab.run("apply", "--base", path)
    assert result.code == 1
    assert lab.head() == head
    lab.ok("apply", "--base", str(lab.sdist))


# -- downloads -----------------------------------------------------------------


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_GET(self):
        server = self.server
        server.asked.append((self.path, self.headers.get("Range")))
        if self.path == "/simple/vllm/":
            page = f'<a href="/files/{server.file}">{server.file}</a>'.encode()
            self._answer(200, page, "text/html")
        elif self.path.startswith("/files/") and server.status:
            self._answer(server.status, b"no", "text/plain")
        elif self.path.startswith("/files/"):
            self._file()
        else:
            self._answer(404, b"no", "text/plain")

    def _answer(self, status, body, kind):
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _file(self):
        server = self.server
        start = 0
        wanted = self.headers.get("Range")
        if wanted and server.ranges:
            start = int(wanted.removeprefix("bytes=").removesuffix("-"))
            if start >= len(server.content):
                self._answer(416, b"", "text/plain")
                return
        body = server.content[start:]
        self.send_response(206 if wanted and server.ranges else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        cut = server.cuts.pop(0) if server.cuts else None
        self.wfile.write(body[:cut])
        if cut is not None:
            self.close_connection = True


@pytest.fixture
def server(fresh, monkeypatch):
    monkeypatch.setattr(index.time, "sleep", lambda seconds: None)
    made = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    made.file, made.content = fresh.sdist.name, fresh.sdist.read_bytes()
    made.cuts, made.ranges, made.status, made.asked = [], True, 0, []
    thread = threading.Thread(target=made.serve_forever, daemon=True)
    thread.start()
    made.url = f"http://127.0.0.1:{made.server_port}/simple"
    made.env = {"PIP_NO_INDEX": None, "PIP_FIND_LINKS": None, "PIP_INDEX_URL": made.url}
    yield made
    made.shutdown()
    made.server_close()


def _ranges(server):
    return [wanted for path, wanted in server.asked if path.startswith("/files/")]


def test_index_url_of_the_environment_is_used(fresh, server):
    result = fresh.ok("apply", "--json", env=server.env)
    assert result.json["source"].startswith("index")
    assert fresh.cached.read_bytes() == server.content


def test_index_url_of_pips_configuration_file_is_used(fresh, server):
    put(fresh.folder, "pip.conf", f"[global]\nindex-url = {server.url}\n")
    env = {**server.env, "PIP_INDEX_URL": None,
           "PIP_CONFIG_FILE": str(fresh.folder / "pip.conf")}  # fmt: skip
    fresh.ok("apply", env=env)
    assert fresh.cached.is_file()


def test_environment_wins_over_pips_configuration_file(fresh, server):
    put(fresh.folder, "pip.conf", "[global]\nindex-url = http://127.0.0.1:1/simple\n")
    env = {**server.env, "PIP_CONFIG_FILE": str(fresh.folder / "pip.conf")}
    fresh.ok("apply", env=env)


def test_extra_index_is_asked_too(fresh, server):
    env = {**server.env, "PIP_NO_INDEX": None, "PIP_EXTRA_INDEX_URL": server.url,
           "PIP_INDEX_URL": "http://127.0.0.1:1/simple"}  # fmt: skip
    result = fresh.run("apply", env=env)
    # An index that is down stops pip, too; but never with a traceback.
    assert result.code in (0, 1)
    assert result.code == 0 or "mend:" in result.err


def test_unreadable_pip_configuration_is_a_sentence(fresh, server):
    put(fresh.folder, "pip.conf", "index-url = no section\n")
    env = {**server.env, "PIP_CONFIG_FILE": str(fresh.folder / "pip.conf")}
    result = fresh.run("apply", env=env)
    assert result.code == 1
    mentions(result, "pip.conf", "mend:")


def test_broken_download_goes_on_where_it_stopped(fresh, server):
    server.cuts = [300, 400]
    fresh.ok("apply", env=server.env)
    assert _ranges(server) == [None, "bytes=300-", "bytes=700-"]
    assert fresh.cached.read_bytes() == server.content


def test_download_starts_over_when_the_server_ignores_ranges(fresh, server):
    server.cuts, server.ranges = [300, 200, 500], False
    fresh.ok("apply", env=server.env)
    assert fresh.cached.read_bytes() == server.content


def test_download_gives_up_with_a_sentence_and_goes_on_next_time(fresh, server):
    server.cuts = [300, *[0] * 20]
    result = fresh.run("apply", env=server.env)
    assert result.code == 1
    mentions(result, "broke off", "mend: run it again")
    assert not fresh.cached.exists()
    server.cuts, server.asked = [], []
    fresh.ok("apply", env=server.env)
    assert _ranges(server) == ["bytes=300-"]


@pytest.mark.parametrize("left", [b"x" * 300, b"x" * 10**5], ids=["short", "long"])
def test_partial_download_of_other_bytes_is_replaced_in_the_same_run(
    fresh, server, left
):
    put(fresh.cached.parent, fresh.cached.name + ".part", left)
    fresh.ok("apply", env=server.env)
    assert fresh.cached.read_bytes() == server.content
    assert not fresh.cached.with_name(fresh.cached.name + ".part").exists()


def test_complete_partial_download_is_only_verified(fresh, server):
    put(fresh.cached.parent, fresh.cached.name + ".part", server.content)
    fresh.ok("apply", env=server.env)
    assert _ranges(server) == [f"bytes={len(server.content)}-"]


def test_wrong_content_is_refused_with_both_identities_and_not_kept(fresh, server):
    good = sha256(fresh.sdist)
    server.content = server.content[:-1] + b"x"
    result = fresh.run("apply", env=server.env)
    assert result.code == 1
    mentions(result, f"pinned sha256 {good}", "actual sha256", "mend:")
    assert list(fresh.cached.parent.iterdir()) == []


def test_refused_download_is_not_tried_again(fresh, server):
    server.status = 403
    result = fresh.run("apply", env=server.env)
    assert result.code == 1
    mentions(result, "403", "mend:")
    assert len(_ranges(server)) == 1


def test_full_disk_is_a_sentence(fresh, server):
    fresh.cached.parent.mkdir(parents=True)
    fresh.cached.with_name(fresh.cached.name + ".part").symlink_to("/dev/full")
    result = fresh.run("apply", env=server.env)
    assert result.code == 1
    mentions(result, "no space left", "mend:")


@pytest.mark.parametrize("verb", ["apply", "version", "verify"])
def test_no_network_and_no_cache_is_a_sentence(fresh, verb):
    env = {"PIP_NO_INDEX": None, "PIP_FIND_LINKS": None,
           "PIP_INDEX_URL": "http://127.0.0.1:1/simple"}  # fmt: skip
    result = fresh.run(verb, env=env)
    assert result.code == 1
    mentions(result, "package index", "--base PATH", "mend:")


def test_cache_that_cannot_be_written_is_a_sentence(fresh):
    fresh.cache.parent.rmdir()
    put(fresh.folder, "cache", "a file, not a folder\n")
    result = fresh.run("apply")
    assert result.code == 1
    mentions(result, "cache", "XDG_CACHE_HOME", "mend:")


def test_relative_cache_home_is_ignored_as_its_specification_says(fresh, monkeypatch):
    monkeypatch.chdir(fresh.folder)
    home = Path(os.environ["HOME"])
    fresh.ok("apply", env={"XDG_CACHE_HOME": "relative"})
    assert not (fresh.folder / "relative").exists()
    assert (home / ".cache/vllm-mi300x/sdist" / fresh.sdist.name).is_file()


def test_damaged_archive_of_the_right_hash_leaves_nothing_behind(fresh):
    """stack.toml pins it, so it passes the first gate and must fail at the next."""
    good = sha256(fresh.sdist)
    fresh.sdist.write_bytes(fresh.sdist.read_bytes()[:-200])
    replace(fresh.root / "stack.toml", good, sha256(fresh.sdist))
    result = fresh.run("apply")
    assert result.code == 1
    mentions(result, "truncated or damaged", "mend:")
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(fresh.cache)
    assert [p.name for p in (fresh.root / "build").iterdir()] == [".lock"]
