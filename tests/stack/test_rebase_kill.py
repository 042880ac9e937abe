"""A rebase killed at any moment, then asked again, ends as an undisturbed one."""

from __future__ import annotations

import json
import re
import shutil

import pytest
import test_kill
from lab import RELEASE, git, put, release, replace, snapshot, upstream
from test_kill import in_fork

NEW = "v1.3.0"


@pytest.fixture
def moved(two):
    """Upstream at v1.3.0: core-alpha merges, core-beta conflicts."""
    upstream(two, lambda tree: (
        replace(tree / "vllm/beta.py", "B20 = 20\n", "B20 = 21\n"),
        replace(tree / "vllm/alpha.py", "def f0", "LATER = 1\n\n\ndef f0"),
    ))  # fmt: skip
    release(two)
    two.ok("drift", "--to", RELEASE)
    two.run("drift", "--to", NEW)  # the archive is in the cache
    return two


def state(lab):
    """All that a user sees: files, refs, what the rebase knows."""
    found = {"project": snapshot(lab.root, skip=("build",)), "build": {}}
    for path in sorted((lab.root / "build").iterdir()):
        if not path.is_dir():
            continue
        refs = git(path, "for-each-ref", "--format=%(refname) %(objectname)")
        found["build"][path.name] = {
            "files": snapshot(path, skip=(".git",)),
            "refs": [
                x for x in refs.splitlines() if not re.search("backup|rebase/state", x)
            ],
            "status": git(path, "status", "--porcelain"),
            "head": git(path, "symbolic-ref", "HEAD"),
        }
        if "rebase/state" in refs:
            found["known"] = json.loads(git(path, "show", "refs/stack/rebase/state"))
    return found


def rebase_is_over(arguments, result) -> bool:
    """What was done but for its last words has nothing left to go on with."""
    return result.code == 2 and "no rebase is in progress" in result.text


def sweep(lab, tmp_path, arguments, code, most=1000):
    test_kill.sweep(
        *(lab, tmp_path, arguments),
        most=most,
        code=code,
        state=state,
        is_over=rebase_is_over,
    )


def resolve(lab):
    path = lab.root / "build" / NEW / "vllm/beta.py"
    text = re.sub(r"<<<<<<< .*?>>>>>>> [^\n]*\n", "B20 = 2021\n", path.read_text(),
                  flags=re.DOTALL)  # fmt: skip
    path.write_text(text)
    git(lab.root / "build" / NEW, "add", "vllm/beta.py")


def test_to_a_stop(tmp_path, moved):
    # Most states are of the copying of objects; a part of them will do.
    sweep(moved, tmp_path, ("rebase", "--to", NEW), 3, most=40)


def test_without_a_stop(tmp_path, two):
    upstream(two, lambda tree: put(tree, "README.md", "Later\n"))
    release(two)
    two.run("drift", "--to", NEW)
    sweep(two, tmp_path, ("rebase", "--to", NEW), 0, most=40)


def test_continue(tmp_path, moved):
    moved.run("rebase", "--to", NEW)
    resolve(moved)
    sweep(moved, tmp_path, ("rebase", "--continue"), 0)


def test_continue_to_another_stop(tmp_path, moved):
    """The second stop is shown, never taken for one that a person has settled."""
    moved.add_patch("core-gone", lambda tree: (tree / "vllm/old.py").unlink())
    moved.ok("apply")
    upstream(moved, lambda tree: put(tree, "vllm/old.py", "GONE = 2\n"))
    git(moved.clone, "tag", "-d", NEW)
    moved.cached.with_name("vllm-1.3.0.tar.gz").unlink()
    release(moved)
    assert moved.run("rebase", "--to", NEW).code == 3
    resolve(moved)
    sweep(moved, tmp_path, ("rebase", "--continue"), 3)


def test_skip(tmp_path, moved):
    moved.run("rebase", "--to", NEW)
    sweep(moved, tmp_path,
          ("rebase", "--skip", "--fate", "superseded [upstream raised it]"), 0)  # fmt: skip


def test_abort(tmp_path, moved):
    moved.run("rebase", "--to", NEW)
    sweep(moved, tmp_path, ("rebase", "--abort"), 0)


def test_abort_of_one_that_was_killed_at_its_end(tmp_path, moved):
    """Whatever the last step had written is taken back."""
    before = snapshot(moved.root, skip=("build",))
    built = state(moved)["build"][RELEASE]
    moved.run("rebase", "--to", NEW)
    keep = tmp_path / "kept"
    keep.mkdir()
    arguments = ("rebase", "--skip", "--fate", "superseded [upstream raised it]")
    in_fork(moved, arguments, keep=keep)
    tried = 0
    for folder in sorted(keep.iterdir(), key=lambda path: int(path.name)):
        shutil.rmtree(moved.folder)
        folder.rename(moved.folder)
        result = moved.run("rebase", "--abort")
        if result.code == 2:  # it was done
            continue
        tried += 1
        assert result.code == 0, result.text
        assert snapshot(moved.root, skip=("build",)) == before, folder.name
        assert state(moved)["build"] == {RELEASE: built}
    assert tried > 5


def test_stop_that_nobody_saw_is_shown_not_passed(moved, monkeypatch):
    """Killed after the work and before the words: --continue must show it first."""
    from stackkit import rebase

    upstream(moved, lambda tree: (
        replace(tree / "vllm/beta.py", "B20 = 21\n", "B20 = 20\n"),
        replace(tree / "vllm/alpha.py", "def f3(", "def g3("),
    ))  # fmt: skip
    with monkeypatch.context() as cut:
        cut.setattr(rebase, "told", lambda project: None)
        assert moved.run("rebase", "--to", str(moved.clone)).code == 1
    result = moved.run("rebase", "--continue")
    assert result.code == 1
    assert "suspect   core-alpha" in result.out
    moved.ok("rebase", "--continue")
