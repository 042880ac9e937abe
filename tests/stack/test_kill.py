"""A verb that is killed at any point and run again ends as an undisturbed one.

The tool runs in a fork of the test process and is killed with SIGKILL just before
its N-th effect on the outside: a process start, or a change in the file system.
Killing before each effect covers every state that it can leave behind, except what
git leaves when it is killed itself; that is tested apart.
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
import time

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
from stackkit import cli, process

EFFECTS = ("subprocess.Popen", "os.rename", "os.remove", "os.rmdir", "os.mkdir",
           "os.chmod", "os.truncate", "shutil.rmtree", "shutil.copyfile")  # fmt: skip
WRITES = os.O_WRONLY | os.O_RDWR


def _is_effect(event: str, args) -> bool:
    if event == "open":
        return isinstance(args[2], int) and bool(args[2] & WRITES)
    return event in EFFECTS


def in_fork(lab: Lab, arguments: tuple[str, ...], kill_at: int = -1) -> tuple[int, int]:
    """Run the tool in a fork; returns the wait status and the effects counted."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:  # pragma: no cover
        try:
            os.close(reader)
            _run_child(lab, arguments, kill_at, writer)
        finally:
            os._exit(99)
    os.close(writer)
    with open(reader, "rb") as stream:
        count = len(stream.read())
    return os.waitpid(child, 0)[1], count


def _run_child(lab, arguments, kill_at, writer):  # pragma: no cover
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    sys.stdout = sys.stderr = open(os.devnull, "w")
    os.environ.update(lab.env)
    seen = 0

    def hook(event, args):
        nonlocal seen
        if _is_effect(event, args):
            if seen == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            seen += 1
            os.write(writer, b".")

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
    names = (".git/objects", "objects")
    kept = {
        path: content
        for path, content in snapshot(lab.folder, skip=("objects", "upstream")).items()
        if not any(name in path for name in names)
    }
    return hash(tuple(sorted(kept.items())))


def sweep(lab: Lab, tmp_path, arguments, prepare=lambda lab: None, again=None):
    """Kill at each effect, run again, and compare with an undisturbed run."""
    prepare(lab)
    kept = tmp_path / "kept"
    shutil.move(lab.folder, kept)

    def restored() -> Lab:
        shutil.rmtree(lab.folder, ignore_errors=True)
        shutil.copytree(kept, lab.folder, symlinks=True)
        return lab

    status, effects = in_fork(restored(), arguments)
    assert status == 0
    assert effects > 10
    wanted = state(lab)
    tried = set()
    for number in range(effects):
        status, _ = in_fork(restored(), arguments, number)
        if not (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL):
            break  # fewer effects than in the first run
        disk = _disk(lab)
        if disk in tried:
            continue  # the same state as after another kill: the same next run
        tried.add(disk)
        result = lab.run(*(again or arguments))
        where = f"killed before effect {number}: {result.text}"
        if result.code != 0:
            # A verb that was done but for its last words has nothing left to do.
            assert result.code == 2, where
            assert arguments[0] in ("drop", "new"), where
        assert state(lab) == wanted, where
    assert len(tried) > 3


def test_first_apply(tmp_path, _made):
    shutil.copytree(_made / "two", tmp_path / "first", symlinks=True)
    sweep(Lab(tmp_path / "first"), tmp_path, ("apply",))


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
    sweep(two, tmp_path, ("export",), lambda lab: lab.git("reset", "-q", "--hard", "HEAD^"))


def test_drop(tmp_path, two):
    sweep(two, tmp_path, ("drop", "core-alpha"))


def test_clean(tmp_path, two):
    sweep(two, tmp_path, ("clean", "--cache"))


def test_new(tmp_path, two, monkeypatch):
    """The Change-Id is random and the date is now; here both stand still."""
    from stackkit import export

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
        raise KeyboardInterrupt

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


def test_patch_edited_after_an_interrupted_export_is_not_overwritten(two):
    put(two.tree, "docs/with space.md", "amended\n")
    two.git("commit", "-q", "-a", "--amend", "--no-edit")
    for number in range(500):
        status, _ = in_fork(two, ("export",), number)
        if (two.tree / ".git/refs/stack/exporting").exists():
            break
    assert os.WIFSIGNALED(status)
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
def test_other_verbs_finish_an_interrupted_apply_first(two, verb):
    put(two.patches, "series", "core-beta.patch\n")
    for number in range(500):
        in_fork(two, ("apply",), number)
        if (two.tree / ".git/refs/stack/pending").exists():
            break
    rest = {"export": (), "new": ("core-x",), "drop": ("core-beta",)}[verb]
    result = two.run(verb, *rest)
    assert result.code == (1 if verb == "new" else 0), result.text
    assert not (two.tree / ".git/refs/stack/pending").exists()
    assert two.git("status", "--porcelain") == ""
    names = {"export": ["core-beta.patch"], "new": ["core-beta.patch"], "drop": []}
    assert two.series() == names[verb]


def test_lock_is_held_until_the_git_of_a_killed_run_is_done(two):
    """The lock belongs to git, too: a second run must not work beside it."""
    import fcntl

    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:  # pragma: no cover
        from stackkit import pins, worktree

        os.close(writer)
        with worktree.lock(pins.find_project(two.root), lambda: None):
            process.keep_open_in_children(reader)
            process.run(["sh", "-c", f"kill -9 $PPID; read x <&{reader}"])
        os._exit(0)
    os.waitpid(child, 0)
    with open(two.root / "build/.lock") as stream:
        with pytest.raises(BlockingIOError):
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(writer, b"go on\n")
        fcntl.flock(stream, fcntl.LOCK_EX)
    os.close(reader)
    os.close(writer)


def test_two_runs_at_once_wait_for_each_other(fresh):
    command = [sys.executable, str(STACK), "apply", "-C", str(fresh.root), "--json"]
    env = {**os.environ, **fresh.env}
    runs = [
        subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in range(3)
    ]
    ends = [run.communicate() for run in runs]
    assert [run.returncode for run in runs] == [0, 0, 0], ends
    import json

    changed = sorted(json.loads(out)["changed"] for out, _ in ends)
    assert changed == [False, False, True]
    assert fresh.git("status", "--porcelain") == ""


def test_waiting_for_another_run_is_said(two):
    import fcntl
    import threading

    from stackkit import pins, worktree

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

