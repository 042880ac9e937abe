"""`stack export`: byte-stable, a true round trip, and never over a hand edit."""

from __future__ import annotations

import subprocess

import pytest
from lab import (
    RELEASE,
    change_id,
    changes_nothing,
    format_patch,
    git,
    mentions,
    message,
    put,
    replace,
)


def _commit_new(lab, name, text=None, path="vllm/new.py", content="x = 1\n"):
    put(lab.tree, path, content)
    return _adopt(lab, name, text)


def _adopt(lab, name, text=None):
    """Commit what is there, and give the commit a patch name."""
    lab.commit(name, text if text is not None else message(name))
    return lab.run("new", name)


def _what(result) -> dict[str, str]:
    return {change["name"]: change["what"] for change in result.json["changes"]}


def _rebase(lab, script: str):
    """Edit the stack as `git rebase -i` does, with sed as the editor."""
    import os

    env = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    subprocess.run(
        ["git", "rebase", "-q", "-i", "refs/stack/base"],
        cwd=lab.tree, check=True, capture_output=True,
        env={**env, "GIT_SEQUENCE_EDITOR": f"sed -i {script}", "GIT_EDITOR": "true",
             "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_COMMITTER_NAME": "A Person",
             "GIT_COMMITTER_EMAIL": "person@person.example"},
    )  # fmt: skip


def test_nothing_new_changes_nothing(lab):
    before, head = lab.patch_files(), lab.head()
    times = {p: p.stat().st_mtime_ns for p in lab.patches.iterdir()}
    result = lab.ok("export", "--json")
    assert set(_what(result).values()) == {"unchanged"}
    assert (lab.patch_files(), lab.head()) == (before, head)
    assert {p: p.stat().st_mtime_ns for p in lab.patches.iterdir()} == times


def test_writes_what_plain_git_writes(lab):
    for name in lab.series():
        commit = lab.ok("show", name, "--json").json["patch"]["commit"]
        assert (lab.patches / name).read_bytes() == format_patch(lab.tree, commit)


def test_amended_commit_changes_its_own_patch_only(lab):
    before = lab.patch_files()
    put(lab.tree, "docs/with space.md", "spaced\nand amended\n")
    lab.git("commit", "-q", "-a", "--amend", "--no-edit")
    result = lab.ok("export", "--json")
    assert [n for n, w in _what(result).items() if w == "changed"] == ["core-more"]
    after = lab.patch_files()
    assert [n for n in before if before[n] != after[n]] == ["core-more.patch"]
    assert b"+and amended" in after["core-more.patch"]


def test_edit_deep_in_the_stack_changes_that_patch_and_those_on_the_same_file(lab):
    before = lab.patch_files()
    _rebase(lab, "1s/pick/edit/")
    replace(lab.tree / "vllm/alpha.py", "def f0(x):", "def f0(x, z=0):")
    lab.git("commit", "-q", "-a", "--amend", "--no-edit")
    lab.git("-c", "core.editor=true", "rebase", "--continue")
    lab.ok("export")
    after = lab.patch_files()
    # core-more changes the same file, so its index line names another blob.
    changed = [n for n in before if before[n] != after[n]]
    assert changed == ["core-alpha.patch", "core-more.patch"]
    with changes_nothing(lab):
        lab.ok("apply")


def test_reworded_commit_changes_its_own_patch_only(lab):
    before = lab.patch_files()
    lab.commit("core-more", message("core-more", "[Misc] Reworded",
               depends="core-alpha"), "--amend")  # fmt: skip
    lab.ok("export")
    after = lab.patch_files()
    assert [n for n in before if before[n] != after[n]] == ["core-more.patch"]


def test_committer_and_dates_of_a_rebase_do_not_reach_the_patches(lab):
    before, head = lab.patch_files(), lab.head()
    _rebase(lab, "1s/pick/reword/")
    assert lab.head() != head
    lab.ok("export")
    assert lab.patch_files() == before
    assert lab.head() == head  # the tree's commits are those of the files again


def test_reordered_independent_commits_change_the_series_only(lab):
    before, names = lab.patch_files(), lab.series()
    _rebase(lab, "'2{h;d};3{G}'")
    lab.ok("export")
    after = lab.patch_files()
    assert lab.series() == [names[0], names[2], names[1], *names[3:]]
    assert [n for n in before if before[n] != after[n]] == ["series"]


def test_comments_of_the_series_stay_above_their_patch(lab):
    names = lab.series()
    lines = ["# the first", names[0], "", "# about docs", *names[1:], "# the end"]
    put(lab.patches, "series", "\n".join(lines) + "\n")
    lab.ok("apply")
    _rebase(lab, "'2{h;d};3{G}'")
    lab.ok("export")
    wanted = ["# the first", names[0], names[2], "", "# about docs", names[1],
              *names[3:], "# the end"]  # fmt: skip
    assert (lab.patches / "series").read_text().splitlines() == wanted


def test_dropped_commit_is_removed_from_folder_and_series(lab):
    names = lab.series()
    _rebase(lab, "2d")
    result = lab.ok("export", "--json")
    assert _what(result)["docs-crlf"] == "removed"
    assert lab.series() == [n for n in names if n != "docs-crlf.patch"]
    assert not (lab.patches / "docs-crlf.patch").exists()


def test_split_commit_becomes_two_patches(lab):
    lab.git("reset", "-q", "--soft", "HEAD^")
    lab.git("restore", "-q", "--staged", "vllm/beta.py")
    lab.git("commit", "-q", "-m", message("core-more", "[Misc] More",
            depends="core-alpha"))  # fmt: skip
    lab.git("add", "-A")
    lab.git("commit", "-q", "-m", "[Misc] The other half")
    lab.ok("new", "core-half")
    result = lab.ok("export", "--json")
    assert _what(result)["core-half"] == "new"
    assert _what(result)["core-more"] == "changed"
    assert lab.series()[-2:] == ["core-more.patch", "core-half.patch"]


def test_round_trip_gives_the_same_commits(lab):
    lab.ok("export")
    head = lab.head()
    import shutil

    shutil.rmtree(lab.root / "build")
    lab.ok("apply")
    assert lab.head() == head


def test_uncommitted_changes_are_named_and_kept(lab):
    put(lab.tree, "vllm/beta.py", "edited\n")
    result = lab.ok("export")
    mentions(result, "uncommitted, in no patch: vllm/beta.py")
    assert (lab.tree / "vllm/beta.py").read_text() == "edited\n"


def test_hand_edited_patch_file_is_not_overwritten(lab):
    path = lab.patches / "core-beta.patch"
    replace(path, "It was wrong", "It was WRONG")
    edited = path.read_bytes()
    put(lab.tree, "docs/with space.md", "amended\n")
    lab.git("commit", "-q", "-a", "--amend", "--no-edit")
    for options in ((), ("--dry-run",)):
        result = lab.run("export", *options)
        assert result.code == 4
        mentions(result, f"patches/{RELEASE}/core-beta.patch", "mend:")
    assert path.read_bytes() == edited


def test_hand_deleted_patch_file_is_not_written_again(lab):
    (lab.patches / "core-beta.patch").unlink()
    result = lab.run("export")
    assert result.code == 4
    mentions(result, f"patches/{RELEASE}/core-beta.patch")


def test_file_of_the_name_of_a_new_patch_is_not_overwritten(lab):
    _commit_new(lab, "core-new")
    put(lab.patches, "core-new.patch", "mine\n")
    result = lab.run("export")
    assert result.code == 4
    mentions(result, "core-new.patch")
    assert (lab.patches / "core-new.patch").read_text() == "mine\n"


# -- commits that a patch cannot hold --------------------------------------------


def _body(line: str) -> str:
    return message("core-new", body=f"Why it is so.\n\n{line}\nThe end.")


MESSAGES = {
    "dashes": _body("---"),
    "dashes and words": _body("--- a word"),
    "diff": _body("diff --git a/x b/x"),
    "diff -u": _body("diff -u a b"),
    "Index": _body("Index: vllm/x.py"),
    "file names": _body("--- a/x.py\n+++ b/x.py"),
    "mailbox": _body(f"From {'1' * 40} Mon Sep 17 00:00:00 2001"),
    "From: first": message("core-new", body="From: A <a@person.example>\n\nWhy."),
    "Date: first": message("core-new", body="Date: 2001-01-01\n\nWhy."),
    "Subject: first": message("core-new", body="Subject: another\n\nWhy."),
    "scissors": _body("-- >8 --"),
    "signature": _body("-- "),
    "two spaces": message("core-new", "[ROCm]  Two  spaces"),
    "bracket colon": message("core-new", "[kv_offload]: Add x"),
    "Re": message("core-new", "Re: [Bugfix] x"),
    "PATCH": message("core-new", "[PATCH] Add x"),
    "leading space": message("core-new", " Add x"),
    "trailing space": message("core-new", "Add x "),
    "tab": message("core-new", "Add\tx"),
    "non-ASCII": message("core-new", "[Bugfix] Na\u00efve \u6f22", body="M\u00fc."),
    "non-ASCII long": message("core-new", "[Bugfix] " + "\u6f22\u5b57 " * 60),
    "long": message("core-new", "[Bugfix] " + "word " * 90 + "end"),
    "long word": message("core-new", "[Bugfix] " + "w" * 1200),
    "long with spaces": message("core-new", "[Bugfix] " + "a  b " * 60 + "end"),
    "two-line subject": message("core-new", "First line\nsecond line"),
    "equals": message("core-new", "=?UTF-8?q?x?= and more"),
    "blank lines": message("core-new", body="One.\n\n\n\nTwo."),
    "leading blank line": message("core-new", body="\n\nOne."),
    "trailing spaces": _body("with spaces   "),
    "carriage return": _body("with return\r"),
    "tabs": _body("\tindented"),
    "hash": _body("# no comment"),
    "dot": _body("."),
    "From": _body("From here on it is right."),
    ">From": _body(">From quoted"),
    "form feed": _body("a\x0cb"),
    "control": _body("a\x01b\x1b[31m"),
    "long line": _body("x" * 3000),
    "quoted-printable": _body("=3D =20"),
    "header-like": _body("Content-Type: text/plain; charset=latin-1"),
}


@pytest.mark.parametrize("kind", MESSAGES)
def test_message_is_kept_byte_for_byte_or_refused_by_name_and_line(lab, kind):
    text = MESSAGES[kind]
    before = lab.patch_files()
    put(lab.tree, "vllm/new.py", "x = 1\n")
    head = lab.commit("core-new", text)
    named = lab.run("new", "core-new")
    if named.code == 0:
        assert lab.git("rev-parse", "HEAD^{tree}") == lab.git(
            "rev-parse", f"{head}^{{tree}}"
        )
    result = lab.run("export")
    if result.code == 0:
        lab.git("checkout", "-q", "--detach")
        work = lab.folder / "oracle"
        git(lab.folder, "clone", "-q", str(lab.tree), "oracle")
        git(work, "reset", "-q", "--hard", "HEAD^")
        git(work, "am", "-q", "-k", "--keep-cr", "--no-scissors",
            "--committer-date-is-author-date",
            str(lab.patches / "core-new.patch"))  # fmt: skip
        for place, commit in ((lab.tree, "refs/heads/stack"), (work, "HEAD")):
            raw = git(place, "cat-file", "commit", commit).split("\n\n", 1)[1]
            assert raw.rstrip("\n") == text.rstrip("\n")
    else:
        assert result.code == 1
        mentions(result, lab.head()[:12], "line", "mend:")
        assert lab.patch_files() == before


def test_message_kinds_that_git_mangles_are_refused(lab):
    """So that the test above cannot pass by keeping everything or refusing all."""
    refused = set()
    for kind in ("dashes", "diff", "Index", "mailbox", "two-line subject", "two spaces",
                 "Re", "bracket colon", "non-ASCII"):  # fmt: skip
        put(lab.tree, "vllm/new.py", f"x = {kind!r}\n")
        lab.commit("core-new", MESSAGES[kind])
        lab.run("new", "core-new")
        if lab.run("export", "--dry-run").code:
            refused.add(kind)
        lab.git("reset", "-q", "--hard", "HEAD^")
    assert refused == {"dashes", "diff", "Index", "mailbox", "two-line subject"}


def _merge(lab):
    lab.git("checkout", "-q", "-b", "side", "HEAD^")
    put(lab.tree, "vllm/side.py", "s = 1\n")
    lab.commit("core-side")
    lab.git("checkout", "-q", "stack")
    lab.git("merge", "-q", "-m", message("core-merge"), "side")


COMMITS = {
    "empty": (
        lambda lab: lab.git("commit", "-q", "--allow-empty", "-m", message("core-new")),
        "has no diff",
    ),
    "merge": (_merge, "is a merge"),
    "mode alone": (
        lambda lab: (
            (lab.tree / "README.md").chmod(0o755), lab.commit("core-new")
        ),
        "mode alone",
    ),
    "quoted name": (
        lambda lab: (put(lab.tree, 'vllm/a"b.py', "x\n"), lab.commit("core-new")),
        "quoted name",
    ),
    "name with a tab": (
        lambda lab: (put(lab.tree, "vllm/a\tb.py", "x\n"), lab.commit("core-new")),
        "quoted name",
    ),
    "two of one Change-Id": (
        lambda lab: (put(lab.tree, "vllm/x.py", "x\n"), lab.commit("core-beta")),
        "has the Change-Id of core-beta, as another has",
    ),
    "no Change-Id": (
        lambda lab: (put(lab.tree, "vllm/x.py", "x\n"), lab.commit("x", "Fix x\n")),
        "has no Change-Id",
    ),
    "unknown Change-Id": (
        lambda lab: (put(lab.tree, "vllm/x.py", "x\n"), lab.commit("core-unknown")),
        "has a Change-Id of no patch",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", COMMITS)
def test_commit_that_no_patch_can_hold_is_refused_by_name(lab, kind):
    make, words = COMMITS[kind]
    before = lab.patch_files()
    make(lab)
    head = lab.head()
    if "Change-Id" not in kind:
        lab.run("new", "core-new")
        head = lab.head()
    result = lab.run("export")
    assert result.code == 1
    mentions(result, f"commit {head[:12]}", words, "mend:")
    assert lab.patch_files() == before


def test_branch_that_leaves_the_base_is_refused(lab):
    lab.git("checkout", "-q", "--orphan", "odd")
    lab.git("commit", "-q", "-m", "odd")
    lab.git("branch", "-f", "stack")
    lab.git("checkout", "-q", "stack")
    result = lab.run("export")
    assert result.code == 1
    mentions(result, "does not start at the base", "mend:")


def _rename(tree):
    (tree / "vllm/beta.py").rename(tree / "vllm/gamma.py")


def _to_folder(tree):
    (tree / "docs/crlf.md").unlink()
    put(tree, "docs/crlf.md/x", "x\n")


# One commit each, in this order.
FILES = {
    "CRLF": lambda tree: put(tree, "docs/crlf.md", b"1\r\n2\n3\r\n\r\n"),
    "file to folder": _to_folder,
    "binary": lambda tree: put(tree, "assets/logo.bin", bytes(range(256)) * 9),
    "new binary": lambda tree: put(tree, "assets/new.bin", b"\0\1\2" * 1000),
    "delete binary": lambda tree: (tree / "assets/logo.bin").unlink(),
    "rename": _rename,
    "delete": lambda tree: (tree / "vllm/old.py").unlink(),
    "mode and content": lambda tree: put(tree, "README.md", "#!/bin/sh\n", "100755"),
    "no newline": lambda tree: put(tree, "README.md", "# no newline", "100755"),
    "file to symlink": lambda tree: put(tree, "README.md", "vllm", "120000"),
    "symlink to file": lambda tree: put(tree, "link.py", "x = 1\n"),
    "new symlink": lambda tree: put(tree, "vllm/l.py", "beta.py", "120000"),
    "newline added": lambda tree: put(tree, "docs/no_end.txt", "first\nlast\n"),
    "empty file": lambda tree: put(tree, "vllm/empty.py", ""),
    "emptied": lambda tree: put(tree, "docs/no_end.txt", ""),
    "space": lambda tree: put(tree, "docs/a b  c.md", "x\n"),
    "non-ASCII": lambda tree: put(tree, "docs/\u6f22\u5b57 \u00e9.md", "x\n"),
    "b slash": lambda tree: put(tree, "a/x b/a/x b/y", "x\n"),
    "looks like a patch": lambda tree: put(
        tree, "x.diff", "diff --git a/x b/x\nindex 1..2\n--- a/x\n+++ b/x\n-- \n2.39\n"
    ),
    "looks like a mail": lambda tree: put(
        tree, "x.txt", f"From {'0' * 40} Mon Sep 17 00:00:00 2001\nSubject: x\n\n---\n"
    ),
    "carriage returns alone": lambda tree: put(tree, "x.txt", b"a\rb\rc\n\r\n"),
    "no UTF-8": lambda tree: put(tree, "x.txt", b"\xff\xfe latin \xe9\n"),
    "trailing spaces": lambda tree: put(tree, "x.txt", b"a  \n\n\n \n\t\n"),
}


def test_file_of_every_kind_comes_back_from_its_patch(lab):
    """One commit each; git am is the oracle."""
    lab.git("reset", "-q", "--hard", "refs/stack/base")
    for number, (kind, make) in enumerate(FILES.items()):
        make(lab.tree)
        assert _adopt(lab, f"kind-{number}", message(f"kind-{number}", kind)).code == 0
    trees = lab.git("log", "--reverse", "--format=%T", "refs/stack/base..HEAD").split()
    assert len(trees) == len(FILES)
    lab.ok("export")
    again = lab.git("log", "--reverse", "--format=%T", "refs/stack/base..HEAD").split()
    assert again == trees
    work = lab.folder / "oracle"
    git(lab.folder, "clone", "-q", str(lab.clone), "oracle")
    for name, tree, kind in zip(lab.series(), trees, FILES, strict=True):
        git(work, "am", "-q", "-k", "--keep-cr", "--whitespace=nowarn",
            str(lab.patches / name))  # fmt: skip
        assert git(work, "rev-parse", "HEAD^{tree}") == tree, kind


def test_empty_stack_exports_an_empty_series(lab):
    lab.git("reset", "-q", "--hard", "refs/stack/base")
    result = lab.ok("export", "--json")
    assert set(_what(result).values()) == {"removed"}
    assert sorted(lab.patch_files()) == ["series"]
    lab.ok("apply")


def test_author_of_another_name_comes_back(lab):
    put(lab.tree, "vllm/new.py", "x = 1\n")
    lab.commit("core-new")
    lab.ok("new", "core-new")
    lab.git("commit", "-q", "--amend", "--no-edit",
            "--author=J\u00f6rg \"J.\" O'Neil, Jr. <jo+x@person.example>")  # fmt: skip
    result = lab.run("export")
    if result.code == 0:
        author = lab.git("log", "-1", "--format=%an <%ae>")
        assert author == 'J\u00f6rg "J." O\'Neil, Jr. <jo+x@person.example>'
    else:
        mentions(result, lab.head()[:12], "author", "mend:")


def test_export_before_an_apply_says_what_to_do(fresh):
    result = fresh.run("export")
    assert result.code == 1
    mentions(result, "does not exist", "mend: scripts/stack apply")


def test_change_ids_of_the_fixture_are_well_formed():
    assert len(change_id("x")) == 41
