"""`stack apply`: exact, atomic, idempotent, and it protects work."""

from __future__ import annotations

import pytest
from lab import RELEASE, SHAPE, changes_nothing, git, mentions, put, replace


def test_makes_the_commits_that_git_am_makes(fresh):
    fresh.ok("apply")
    work = fresh.folder / "am"
    git(fresh.folder, "clone", "-q", str(fresh.clone), "am")
    base = git(fresh.tree, "cat-file", "commit", "refs/stack/base")
    made = git(work, "hash-object", "-t", "commit", "-w", "--stdin",
               stdin=base.encode() + b"\n")  # fmt: skip
    git(work, "reset", "-q", "--hard", made)
    for name in fresh.series():
        git(work, "am", "-q", "-k", "--keep-cr", "--whitespace=nowarn",
            "--committer-date-is-author-date", str(fresh.patches / name))  # fmt: skip
    assert git(work, "rev-parse", "HEAD") == fresh.head()


def test_files_on_disk_are_those_of_the_commits(fresh):
    from lab import members

    fresh.ok("apply")
    on_disk = {
        path: data for path, (kind, data) in fresh.files().items() if kind != "dir"
    }
    committed = {path: data for path, (_, data) in members(fresh.tree).items()}
    assert on_disk == committed
    assert fresh.files()["tools/new.sh"][0] == "exec"
    assert fresh.git("status", "--porcelain", "--ignored") == ""


def test_second_apply_changes_nothing(lab):
    with changes_nothing(lab):
        result = lab.ok("apply")
    assert "is up to date: 5 patches" in result.out


def test_base_commit_does_not_depend_on_where_the_base_came_from(fresh, two):
    fresh.ok("apply", "--base", str(fresh.clone))
    first = fresh.git("rev-parse", "refs/stack/base")
    assert first == two.git("rev-parse", "refs/stack/base")


def test_changed_preimage_is_refused_and_nothing_changes(lab):
    # The second patch of alpha.py was made against what the first one leaves.
    series = lab.patches / "series"
    replace(series, "core-alpha.patch\n", "")
    replace(lab.patches / "core-more.patch", "Depends-On: core-alpha\n", "")
    before, head = lab.files(), lab.head()
    result = lab.run("apply")
    assert result.code == 1
    mentions(result, "core-more.patch", "vllm/alpha.py", "from blob", "mend:")
    assert (lab.files(), lab.head()) == (before, head)


def test_same_shaped_function_above_does_not_draw_the_hunk(fresh):
    """git apply and git am put this hunk into another function, with status 0."""
    text = (fresh.clone / "vllm/alpha.py").read_text()
    added = SHAPE.format(name="z0") + "\n\n" + SHAPE.format(name="z1") + "\n\n"
    put(fresh.clone, "vllm/alpha.py", added + text)
    git(fresh.clone, "commit", "-q", "-a", "-m", "Two more functions on top")
    old = git(fresh.clone, "rev-parse", "HEAD^")
    new = git(fresh.clone, "rev-parse", "HEAD")
    trees = [git(fresh.clone, "rev-parse", f"{x}^{{tree}}") for x in (old, new)]
    replace(fresh.root / "stack.toml", old, new)
    replace(fresh.root / "stack.toml", trees[0], trees[1])
    git(fresh.root, "update-index", "--cacheinfo", f"160000,{new},vllm")
    patch = fresh.patches / "core-alpha.patch"
    misplaced = git(fresh.clone, "apply", "--check", "-v", str(patch))
    assert misplaced == ""  # plain git takes it
    result = fresh.run("apply", "--base", str(fresh.clone))
    assert result.code == 1
    mentions(result, "core-alpha.patch", "vllm/alpha.py was changed from blob", "mend:")
    assert not (fresh.tree / "vllm").exists()


def test_changed_patch_moves_only_the_files_that_differ(lab):
    stay = lab.tree / "README.md"
    before = stay.stat().st_mtime_ns
    series = lab.patches / "series"
    replace(series, "misc-names.patch\n", "")
    lab.ok("apply")
    assert (lab.tree / "vllm/old.py").is_file()
    assert not (lab.tree / "tools/new.sh").exists()
    assert stay.stat().st_mtime_ns == before
    assert len(lab.git("rev-list", "refs/stack/base..HEAD").split()) == 4


def test_touched_files_are_not_taken_for_edits(lab):
    """A copied or touched tree has other timestamps but the same content."""
    import os

    for path in ("vllm/beta.py", "docs/crlf.md"):
        os.utime(lab.tree / path, (1, 1))
    replace(lab.patches / "series", "core-more.patch\n", "")
    lab.ok("apply")
    assert b"3838" not in (lab.tree / "vllm/beta.py").read_bytes()


def _unfinished_rebase(lab):
    import subprocess

    script = "sed -i 1s/pick/break\\\\npick/"
    subprocess.run(
        ["git", "rebase", "-q", "-i", "refs/stack/base"], cwd=lab.tree, check=True,
        env={"PATH": __import__("os").environ["PATH"], "GIT_SEQUENCE_EDITOR": script,
             "GIT_CONFIG_GLOBAL": "/dev/null", "HOME": "/nonexistent",
             "GIT_COMMITTER_NAME": "x", "GIT_COMMITTER_EMAIL": "x"},
    )  # fmt: skip
    assert (lab.tree / ".git/rebase-merge").is_dir()


WORK = {
    "uncommitted edit": (
        lambda lab: put(lab.tree, "vllm/beta.py", "edited\n"),
        ("uncommitted vllm/beta.py", "scripts/stack export"),
    ),
    "staged edit": (
        lambda lab: (
            put(lab.tree, "vllm/beta.py", "edited\n"), lab.git("add", "vllm/beta.py")
        ),
        ("uncommitted vllm/beta.py", "scripts/stack new NAME"),
    ),
    "deleted file": (
        lambda lab: (lab.tree / "README.md").unlink(),
        ("uncommitted README.md",),
    ),
    "mode change": (
        lambda lab: (lab.tree / "README.md").chmod(0o755),
        ("uncommitted README.md",),
    ),
    "untracked file": (
        lambda lab: put(lab.tree, "vllm/notes.py", "mine\n"),
        ("uncommitted vllm/notes.py",),
    ),
    "unexported commit": (
        lambda lab: (put(lab.tree, "a.py", "1\n"), lab.commit("core-new")),
        ("[Bugfix][ROCm] Do it", "scripts/stack export"),
    ),
    "dropped commit": (
        lambda lab: lab.git("reset", "-q", "--hard", "HEAD^"),
        ("removed", "[Misc] More"),
    ),
    "unfinished rebase": (_unfinished_rebase, ("rebase is unfinished", "--abort")),
    "detached HEAD": (
        lambda lab: lab.git("checkout", "-q", "--detach", "HEAD"),
        ("a detached HEAD", "switch stack"),
    ),
    "another branch": (
        lambda lab: lab.git("checkout", "-q", "-b", "mine"),
        ("refs/heads/mine", "switch stack"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("series_changed", [False, True], ids=["same", "changed"])
@pytest.mark.parametrize("kind", WORK)
def test_work_is_refused_with_a_list_and_the_command_that_saves_it(
    lab, kind, series_changed
):
    make, words = WORK[kind]
    make(lab)
    if series_changed:
        replace(lab.patches / "series", "docs-crlf.patch\n", "")
    files, head = lab.files(), lab.git("rev-parse", "HEAD")
    for options in ((), ("--dry-run",)):
        result = lab.run("apply", *options)
        assert result.code == 4, result.text
        mentions(result, "mend:", str(lab.tree), *words)
    assert (lab.files(), lab.git("rev-parse", "HEAD")) == (files, head)


# The others are about HEAD itself: git's own words undo them.
DISCARDED = [
    kind for kind in WORK if kind.split()[-1] not in ("rebase", "HEAD", "branch")
]


@pytest.mark.parametrize("kind", DISCARDED)
def test_discard_leaves_a_backup_that_holds_all_of_it(lab, kind):
    make, _ = WORK[kind]
    wanted, head = lab.files(), lab.head()
    make(lab)
    lost, lost_head = lab.files(), lab.head()
    result = lab.ok("apply", "--discard", "--json")
    assert (lab.files(), lab.head()) == (wanted, head)
    backup = result.json["backup"]
    lab.git("checkout", "-q", "--detach", backup)
    assert lab.files() == lost
    assert lost_head in lab.git("rev-list", "HEAD").split()


def test_discard_of_nothing_says_that_it_is_up_to_date(lab):
    result = lab.ok("apply", "--discard", "--json")
    assert result.json["backup"] is None
    assert result.json["changed"] is False


def test_discard_keeps_two_backups_made_in_one_second(lab):
    for content in ("one\n", "two\n"):
        put(lab.tree, "vllm/beta.py", content)
        lab.ok("apply", "--discard")
    backups = lab.git("for-each-ref", "refs/stack/backup").splitlines()
    assert len(backups) == 2


def test_hidden_edit_is_not_overwritten(lab):
    lab.git("update-index", "--assume-unchanged", "vllm/beta.py")
    put(lab.tree, "vllm/beta.py", "edited\n")
    replace(lab.patches / "series", "core-beta.patch\n", "")
    replace(lab.patches / "series", "core-more.patch\n", "")
    result = lab.run("apply")
    assert result.code != 0
    assert (lab.tree / "vllm/beta.py").read_text() == "edited\n"


def test_file_in_the_way_is_not_overwritten(lab):
    """An ignored file is nobody's work, but it is not the tool's to remove."""
    put(lab.tree, ".git/info/exclude", "mine.txt\n")
    put(lab.tree, "mine.txt", "mine\n")
    work = lab.folder / "work"
    put(work, "mine.txt", "theirs\n")
    from lab import format_patch, message

    git(work, "add", "-A")
    git(work, "commit", "-q", "-m", message("add-mine"))
    put(lab.patches, "add-mine.patch", format_patch(work, "HEAD"))
    with open(lab.patches / "series", "a") as stream:
        stream.write("add-mine.patch\n")
    head = lab.head()
    result = lab.run("apply")
    assert result.code == 4
    mentions(result, "mine.txt", "mend:")
    assert (lab.tree / "mine.txt").read_text() == "mine\n"
    assert lab.head() == head


def test_running_git_in_the_tree_is_respected(lab):
    (lab.tree / ".git/index.lock").write_bytes(b"")
    replace(lab.patches / "series", "core-more.patch\n", "")
    result = lab.run("apply")
    assert result.code == 4
    mentions(result, "index.lock", "mend:")


@pytest.mark.parametrize("ref", ["refs/stack/pending", "refs/stack/applied"])
def test_ref_lock_left_by_a_killed_git_is_swept(lab, ref):
    (lab.tree / ".git" / (ref + ".lock")).write_bytes(b"")
    replace(lab.patches / "series", "core-more.patch\n", "")
    lab.ok("apply")
    assert len(lab.git("rev-list", "refs/stack/base..HEAD").split()) == 4


@pytest.mark.parametrize("ref", ["refs/heads/stack", "HEAD"])
def test_ref_lock_that_may_be_a_users_is_named(lab, ref):
    (lab.tree / ".git" / (ref + ".lock")).write_bytes(b"")
    replace(lab.patches / "series", "core-more.patch\n", "")
    result = lab.run("apply")
    assert result.code != 0
    mentions(result, ref + ".lock")
    (lab.tree / ".git" / (ref + ".lock")).unlink()
    lab.ok("apply")


def test_foreign_folder_in_the_place_of_the_tree_is_refused(fresh):
    put(fresh.tree, "mine.txt", "mine\n")
    result = fresh.run("apply")
    assert result.code == 4
    mentions(result, str(fresh.tree), "mend: move it away")
    assert (fresh.tree / "mine.txt").read_text() == "mine\n"


def test_empty_series_gives_the_base(fresh):
    put(fresh.patches, "series", "# nothing yet\n")
    fresh.ok("apply")
    tree = git(fresh.clone, "rev-parse", "HEAD^{tree}")
    assert fresh.git("rev-parse", "HEAD^{tree}") == tree


def test_file_becomes_a_folder_and_back(fresh):
    work = fresh.folder / "work"
    from lab import format_patch, message

    (work / "README.md").unlink()
    put(work, "README.md/inner.md", "now a folder\n")
    git(work, "add", "-A")
    git(work, "commit", "-q", "-m", message("docs-folder"))
    put(fresh.patches, "docs-folder.patch", format_patch(work, "HEAD"))
    with open(fresh.patches / "series", "a") as stream:
        stream.write("docs-folder.patch\n")
    fresh.ok("apply")
    assert (fresh.tree / "README.md/inner.md").is_file()
    replace(fresh.patches / "series", "docs-folder.patch\n", "")
    fresh.ok("apply")
    assert (fresh.tree / "README.md").is_file()


def test_unknown_release_is_a_usage_error(fresh):
    result = fresh.run("apply", "--release", "v9.9.9")
    assert result.code == 2
    mentions(result, "v9.9.9", f"choose one of: {RELEASE}")


def test_release_may_be_named_without_the_v(lab):
    lab.ok("apply", "--release", RELEASE.removeprefix("v"))


def test_replace_refs_do_not_change_what_is_read(lab):
    blob = lab.git("rev-parse", "HEAD:vllm/beta.py")
    other = lab.git("rev-parse", "HEAD:README.md")
    lab.git("replace", blob, other)
    replace(lab.patches / "series", "docs-crlf.patch\n", "")
    lab.ok("apply")
    assert b"B38 = 3838" in (lab.tree / "vllm/beta.py").read_bytes()
