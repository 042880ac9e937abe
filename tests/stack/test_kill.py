"""A verb that is killed at any point and run again ends as an undisturbed one.

The tool runs in a fork of the test process.  Just before each of its effects on the
outside (a process start, a change in the file system) the disk is as SIGKILL would
leave it there; each different state is kept, the tool is run again on it, and the end
is compared with an undisturbed run.  What git leaves when it is killed itself is
tested apart.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from lab import (
    RELEASE,
    STACK,
    Lab,
    format_patch,
    git,
    make_project,
    message,
    put,
    replace,
    snapshot,
)
from stackkit import cli, export, pins, process, worktree

EFFECTS = ("subprocess.Popen", "os.rename", "os.remove", "os.rmdir", "os.mkdir",
           "os.chmod", "os.truncate", "shutil.rmtree", "shutil.copyfile")  # fmt: skip
WRITES = os.O_WRONLY | os.O_RDWR


def _is_effect(event: str, args) -> bool:
    if event == "open":
        return isinstance(args[2], int) and bool(args[2] & WRITES)
    return event in EFFECTS


def in_fork(
    lab: Lab, arguments: tuple[str, ...], kill_at: int = -1, keep: Path | None = None
) -> tuple[int, int]:
    """Run the tool in a fork, up to SIGKILL before its ``kill_at``-th effect.

    Args:
        lab: The project.
        arguments: The verb and its arguments.
        kill_at: Counted from 0; -1 lets it end.
        keep: Where a copy of each different state of the disk is kept.

    Returns:
        The wait status, and the effects counted.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:  # pragma: no cover
        try:
            os.close(reader)
            _run_child(lab, arguments, kill_at, keep, writer)
        finally:
            os._exit(99)
    os.close(writer)
    with open(reader, "rb") as stream:
        count = len(stream.read())
    return os.waitpid(child, 0)[1], count


def _run_child(lab, arguments, kill_at, keep, writer):  # pragma: no cover
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    sys.stdout = sys.stderr = os.fdopen(1, "w")
    os.environ.update(lab.env)
    count, busy, seen = 0, False, set()

    def hook(event, args):
        nonlocal count, busy
        if busy or not _is_effect(event, args):
            return
        busy = True
        if count == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        disk = _disk(lab) if keep else None
        if keep and disk not in seen:
            seen.add(disk)
            shutil.copytree(lab.folder, keep / f"{count}", symlinks=True)
        count += 1
        os.write(writer, b".")
        busy = False

    sys.addaudithook(hook)
    verb, *rest = arguments
    try:
        cli.main([verb, "-C", str(lab.root), *rest], prog_name="stack")
    except SystemExit as end:
        os._exit(end.code or 0)
    os._exit(0)


def state(lab: Lab) -> dict:
    """What a user sees: refs, files, patches; not which objects lie about."""
    found: dict = {"build": [], "patches": lab.patch_files()}
    build = lab.root / "build"
    if build.is_dir():
        found["build"] = sorted(p.name for p in build.iterdir())
    if (lab.tree / ".git" / "HEAD").is_file():
        found["files"] = lab.files()
        found["status"] = lab.git("status", "--porcelain")
        refs = lab.git("for-each-ref", "--format=%(refname) %(objectname)").splitlines()
        # A backup is named after the time; a second one may be made, none may miss.
        found["refs"] = [ref for ref in refs if "/backup/" not in ref]
        found["head"] = lab.git("symbolic-ref", "HEAD")
    if lab.cache.is_dir():
        found["cache"] = snapshot(lab.cache)
    return found


def _disk(lab: Lab) -> int:
    """A hash of all that a next run could look at, objects left out."""
    skip = ("objects", "upstream", "work", "wheels")
    kept = {
        re.sub(r"\.new-[^/]+", ".new-", path): content
        for path, content in snapshot(lab.folder, skip=skip).items()
    }
    return hash(tuple(sorted(kept.items())))


def drop_or_new_has_nothing_to_do(arguments, result) -> bool:
    """A verb that was done but for its last words has nothing left to do."""
    return result.code == 2 and arguments[0] in ("drop", "new")


def sweep(
    lab: Lab,
    tmp_path,
    arguments,
    prepare=lambda lab: None,
    most=1000,
    *,
    code=0,
    state=state,
    is_over=drop_or_new_has_nothing_to_do,
):
    """Run again on each state that a kill can leave; compare with the undisturbed.

    code: How the undisturbed run ends.
    is_over: Whether a run that ends otherwise only found nothing left to do.
    """
    prepare(lab)
    keep = tmp_path / "kept"
    keep.mkdir()
    status, effects = in_fork(lab, arguments, keep=keep)
    assert status == code << 8
    wanted = state(lab)
    left = sorted(keep.iterdir(), key=lambda path: int(path.name))
    assert effects > 10
    assert len(left) > 2
    for folder in left[:: -(-len(left) // most)]:
        # At its old place, as a user would find it.
        shutil.rmtree(lab.folder)
        folder.rename(lab.folder)
        result = lab.run(*arguments)
        where = f"killed before effect {folder.name}: {result.text}"
        assert result.code == code or is_over(arguments, result), where
        assert state(lab) == wanted, where


def test_kill_leaves_the_state_that_is_kept_for_it(tmp_path, two):
    """The sweeps below rest on this."""
    put(two.patches, "series", "core-beta.patch\n")
    start, keep = tmp_path / "start", tmp_path / "kept"
    keep.mkdir()
    shutil.copytree(two.folder, start, symlinks=True)
    in_fork(two, ("apply",), keep=keep)
    for folder in keep.iterdir():
        number = int(folder.name)
        shutil.rmtree(two.folder)
        shutil.copytree(start, two.folder, symlinks=True)
        status, count = in_fork(two, ("apply",), number)
        assert os.WTERMSIG(status) == signal.SIGKILL
        assert count == number
        assert _without_times(two) == _without_times(Lab(folder))


def _without_times(lab: Lab) -> dict:
    files = snapshot(lab.folder, skip=("objects",))
    return {path: x for path, x in files.items() if not path.endswith("index")}


def test_first_apply(tmp_path, _made):
    shutil.copytree(_made / "two", tmp_path / "first", symlinks=True)
    sweep(Lab(tmp_path / "first"), tmp_path, ("apply",), Lab.fill_cache)


def kept_states(lab: Lab, tmp_path, arguments) -> list[Lab]:
    keep = tmp_path / "kept"
    keep.mkdir()
    in_fork(lab, arguments, keep=keep)
    return [Lab(p) for p in sorted(keep.iterdir(), key=lambda path: int(path.name))]


def test_download(tmp_path, fresh):
    """What lies under the archive's name is whole at any time."""
    shutil.rmtree(fresh.cache)
    seen = set()
    for kept in kept_states(fresh, tmp_path, ("apply", "--dry-run")):
        if kept.cached.exists():
            assert kept.cached.read_bytes() == fresh.sdist.read_bytes()
        seen.add(tuple(sorted(p.name for p in kept.cache.rglob("*") if p.is_file())))
    name = fresh.sdist.name
    assert seen == {(), (name + ".part",), (name,)}


def test_apply_of_a_changed_series(tmp_path, two):
    def prepare(lab):
        put(lab.patches, "series", "core-beta.patch\n")

    sweep(two, tmp_path, ("apply",), prepare)


def test_apply_of_more_patches_with_files_added_and_deleted(tmp_path, _made):
    shutil.copytree(_made / "whole-applied", tmp_path / "more", symlinks=True)

    def prepare(lab):
        replace(lab.patches / "series", "misc-names.patch\n", "")
        replace(lab.patches / "series", "core-more.patch\n", "")

    sweep(Lab(tmp_path / "more"), tmp_path, ("apply",), prepare)


def test_apply_discard(tmp_path, two):
    def prepare(lab):
        put(lab.tree, "vllm/beta.py", "edited\n")
        put(lab.tree, "vllm/notes.py", "mine\n")

    sweep(two, tmp_path, ("apply", "--discard"), prepare)


def test_export(tmp_path, two):
    def prepare(lab):
        put(lab.tree, "docs/with space.md", "amended\n")
        lab.git("commit", "-q", "-a", "--amend", "--no-edit")

    sweep(two, tmp_path, ("export",), prepare)


def test_export_of_a_removed_patch(tmp_path, two):
    def prepare(lab):
        lab.git("reset", "-q", "--hard", "HEAD^")

    sweep(two, tmp_path, ("export",), prepare)


def test_drop(tmp_path, two):
    sweep(two, tmp_path, ("drop", "core-alpha"))


def test_clean(tmp_path, two):
    # Each file removed is a state; a part of them will do.
    sweep(two, tmp_path, ("clean", "--cache"), most=25)


def test_new(tmp_path, two, monkeypatch):
    """The Change-Id is random and the date is now; here both stand still."""
    monkeypatch.setattr(export.secrets, "token_hex", lambda n: "0" * 2 * n)
    monkeypatch.setattr(time, "time", lambda: 1700000000.0)

    def prepare(lab):
        put(lab.tree, "vllm/new.py", "x = 1\n")

    sweep(two, tmp_path, ("new", "core-new"), prepare)


BIG = 400_000


def _big(folder) -> Lab:
    """Two patches, of which the second writes a big file."""
    lab = make_project(folder, ("core-alpha",))
    work = lab.folder / "work"
    put(work, "vllm/big.txt", b"0123456789abcde\n" * (BIG // 16))
    git(work, "add", "-A")
    git(work, "commit", "-q", "-m", message("core-big"))
    put(lab.patches, "core-big.patch", format_patch(work, "HEAD"))
    return lab


def _interrupt_checkout(monkeypatch, lab):
    """Let the kernel kill git in the middle of a file, and the tool with it."""
    real = subprocess.run

    def run(command, **options):
        if "-u" not in command or "--dry-run" in command:
            return real(command, **options)

        def limit():
            resource.setrlimit(resource.RLIMIT_FSIZE, (BIG // 2, BIG // 2))

        assert real(command, **options, preexec_fn=limit).returncode != 0
        raise SystemExit(137)

    with monkeypatch.context() as cut:
        cut.setattr(process.subprocess, "run", run)
        assert lab.run("apply").code != 0


def test_git_killed_in_the_middle_of_a_file(tmp_path, monkeypatch):
    lab = _big(tmp_path / "big")
    lab.ok("apply")
    put(lab.patches, "series", "core-alpha.patch\ncore-big.patch\n")
    shutil.copytree(lab.folder, tmp_path / "undisturbed", symlinks=True)
    other = Lab(tmp_path / "undisturbed")
    other.ok("apply")
    _interrupt_checkout(monkeypatch, lab)
    part = lab.tree / "vllm/big.txt"
    assert part.stat().st_size == BIG // 2  # half a file is there
    (lab.tree / ".git/stack-index.lock").touch()
    assert "interrupted" in lab.run("doctor").text
    lab.ok("apply")
    assert lab.files() == other.files()
    assert lab.head() == other.head()
    assert lab.git("status", "--porcelain") == ""


def test_edit_after_an_interrupted_apply_is_not_overwritten(tmp_path, monkeypatch):
    lab = _big(tmp_path / "big")
    lab.ok("apply")
    put(lab.patches, "series", "core-alpha.patch\ncore-big.patch\n")
    _interrupt_checkout(monkeypatch, lab)
    put(lab.tree, "vllm/big.txt", "mine\n")
    result = lab.run("apply")
    assert result.code == 4
    assert "vllm/big.txt" in result.err
    assert (lab.tree / "vllm/big.txt").read_text() == "mine\n"
    lab.ok("apply", "--discard")
    backup = lab.git("for-each-ref", "--format=%(refname)", "refs/stack/backup")
    assert lab.git("show", f"{backup}:vllm/big.txt") == "mine"
    assert (lab.tree / "vllm/big.txt").stat().st_size == BIG


def _interrupted(lab: Lab, tmp_path, arguments, ref: str) -> Lab:
    """The project as a kill leaves it just after the tool has set a ref."""
    states = kept_states(lab, tmp_path, arguments)
    found = next(x for x in states if (x.tree / ".git/refs/stack" / ref).exists())
    shutil.rmtree(lab.folder)
    found.folder.rename(lab.folder)
    return lab


def test_patch_edited_after_an_interrupted_export_is_not_overwritten(tmp_path, two):
    put(two.tree, "docs/with space.md", "amended\n")
    two.git("commit", "-q", "-a", "--amend", "--no-edit")
    two = _interrupted(two, tmp_path, ("export",), "exporting")
    path = two.patches / "core-beta.patch"
    replace(path, "It was wrong", "It was WRONG")
    edited, lost = path.read_bytes(), two.head()
    for verb in ("apply", "export"):
        result = two.run(verb)
        assert result.code == 4
        assert f"patches/{RELEASE}/core-beta.patch" in result.err
    assert path.read_bytes() == edited
    two.ok("apply", "--discard")  # as the mend says
    assert path.read_bytes() == edited
    assert two.git("log", "-1", "--format=%b").startswith("It was WRONG")
    backups = two.git("for-each-ref", "--format=%(objectname)", "refs/stack/backup")
    assert lost in two.git("rev-list", backups).split()


@pytest.mark.parametrize("verb", ["export", "new", "drop"])
def test_other_verbs_finish_an_interrupted_apply_first(tmp_path, two, verb):
    put(two.patches, "series", "core-beta.patch\n")
    two = _interrupted(two, tmp_path, ("apply",), "pending")
    rest = {"export": (), "new": ("core-x",), "drop": ("core-beta",)}[verb]
    result = two.run(verb, *rest)
    assert result.code == (1 if verb == "new" else 0), result.text
    assert not (two.tree / ".git/refs/stack/pending").exists()
    assert two.git("status", "--porcelain") == ""
    names = {"export": ["core-beta.patch"], "new": ["core-beta.patch"], "drop": []}
    assert two.series() == names[verb]


def test_lock_is_held_until_the_git_of_a_killed_run_is_done(tmp_path, two):
    """The lock belongs to git, too: a second run must not work beside it."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    child = os.fork()
    if child == 0:  # pragma: no cover
        with worktree.lock(pins.find_project(two.root), lambda: None):
            process.run(["sh", "-c", f"kill -9 $PPID; read x <{fifo}"])
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    with open(two.root / "build/.lock") as stream:
        with pytest.raises(BlockingIOError):
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fifo.write_text("go on\n")
        fcntl.flock(stream, fcntl.LOCK_EX)


def test_two_runs_at_once_wait_for_each_other(fresh):
    command = [sys.executable, str(STACK), "apply", "-C", str(fresh.root), "--json"]
    env, null = {**os.environ, **fresh.env}, subprocess.DEVNULL
    runs = [
        subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=null)
        for _ in range(3)
    ]
    ends = [run.communicate() for run in runs]
    assert [run.returncode for run in runs] == [0, 0, 0], ends
    changed = sorted(json.loads(out)["changed"] for out, _ in ends)
    assert changed == [False, False, True]
    assert fresh.git("status", "--porcelain") == ""


def test_waiting_for_another_run_is_said(two):
    project = pins.find_project(two.root)
    told = threading.Event()
    entered = []

    def second():
        with worktree.lock(project, told.set):
            entered.append(True)

    with open(two.root / "build/.lock", "w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        thread = threading.Thread(target=second)
        thread.start()
        assert told.wait(30)
        assert entered == []
    thread.join(30)
    assert entered == [True]
