"""rebase and drift: every verdict, the traps of textual re-application, the flow."""

from __future__ import annotations

import json
import os
import re
import subprocess

import pytest
from lab import (
    SHAPE,
    TWIN,
    TWINS,
    changes_nothing,
    format_patch,
    git,
    make_sdist,
    mentions,
    put,
    release,
    replace,
    snapshot,
    toml,
    upstream,
)
from stackkit import landing, ledger, pins

NEW = "v1.3.0"


def write(path, text):
    """An edit that gives a file this content."""
    return lambda tree: put(tree, path, text)


def change(path, old, new):
    """An edit that changes one place of a file."""
    return lambda tree: replace(tree / path, old, new)


def both(*edits):
    return lambda tree: [edit(tree) for edit in edits]


def verdicts(result) -> dict[str, str]:
    (target,) = result.json["targets"]
    return {patch["patch"]: patch["verdict"] for patch in target["patches"]}


def outcome(result, name) -> dict:
    (target,) = result.json["targets"]
    return next(patch for patch in target["patches"] if patch["patch"] == name)


def drift(lab, to="../upstream"):
    return lab.run("drift", "--to", str(lab.root / to) if "/" in to else to, "--json")


SIX = "    x = x + 6\n"
IN_B = f"{SIX}    x = x * 9\n"


def edit_b(tree):
    """Add a line in the middle of the second of two like functions."""
    text = (tree / "vllm/twin.py").read_text()
    head, name, body = text.partition("def b(x):\n")
    put(tree, "vllm/twin.py", head + name + body.replace("    x = x + 6\n", IN_B))


@pytest.fixture
def twin(two):
    """A patch that changes the second of two like functions."""
    two.add_patch("core-twin", edit_b)
    two.ok("apply")
    return two


def by_function(text):
    parts = re.split(r"^def (\w+)\(x\):\n", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


# -- the traps ---------------------------------------------------------------------


def new_function_above(tree):
    put(tree, "vllm/twin.py", TWIN.format(name="z") + "\n\n" + TWINS)


def am(lab, *options) -> str:
    """What plain git makes of the patch on upstream's tree."""
    other = lab.folder / "am"
    git(lab.folder, "clone", "-q", str(lab.clone), "am")
    patch = lab.patches / "core-twin.patch"
    git(other, "am", "-q", *options, str(patch))
    return (other / "vllm/twin.py").read_text()


def test_like_function_above_does_not_take_the_hunk(twin):
    """git am -3 puts it into the function above; a merge, where it belongs."""
    upstream(twin, new_function_above)
    fooled = by_function(am(twin, "-3"))
    assert IN_B in fooled["a"]
    assert IN_B not in fooled["b"]
    result = drift(twin)
    assert verdicts(result)["core-twin"] == "merged"
    release(twin)
    twin.ok("rebase", "--to", NEW)
    text = (twin.root / f"build/{NEW}/vllm/twin.py").read_text()
    landed = by_function(text)
    assert [name for name, body in landed.items() if IN_B in body] == ["b"]


def test_same_fix_upstream_is_absorbed_not_applied_again(twin):
    """git am -3 puts it into the other function, once more."""
    commit = upstream(twin, edit_b, "Fix b (#41)")
    assert am(twin, "-3").count("x * 9") == 2
    found = outcome(drift(twin), "core-twin")
    assert found["verdict"] == "absorbed"
    assert commit[:12] in found["reasons"][0]
    release(twin)
    twin.ok("rebase", "--to", str(twin.clone))
    text = (twin.root / f"build/{NEW}/vllm/twin.py").read_text()
    assert text.count("x * 9") == 1
    (entry,) = ledger.load(pins.find_project(twin.root))
    assert entry.fate == f"absorbed vllm-project/vllm#41, {NEW}"


def test_same_fix_without_history_leaves_nothing(twin):
    upstream(twin, edit_b, "Fix b (#41)")
    release(twin)
    assert outcome(drift(twin, NEW), "core-twin")["verdict"] == "empty"
    twin.ok("rebase", "--to", NEW)
    names = (twin.root / f"patches/{NEW}/series").read_text().split()
    assert names == ["core-alpha.patch", "core-beta.patch"]
    (entry,) = ledger.load(pins.find_project(twin.root))
    assert (entry.patch, entry.fate) == ("core-twin", f"absorbed {NEW}")


def test_same_fix_reviewed_stops(twin):
    """git am -3 puts the variant beside the one upstream has."""
    variant = IN_B.replace("x * 9", "x * int(9)")
    upstream(
        twin,
        lambda tree: (
            edit_b(tree),
            replace(tree / "vllm/twin.py", IN_B, variant),
        ),
        "Fix b (#41)",
    )
    assert "x * 9" in am(twin, "-3")
    assert outcome(drift(twin), "core-twin")["verdict"] == "conflict"


def in_b(old, new):
    """An edit of one line of the second of the two functions."""

    def edit(tree):
        text = (tree / "vllm/twin.py").read_text()
        head, name, body = text.partition("def b(x):\n")
        put(tree, "vllm/twin.py", head + name + body.replace(old, new))

    return edit


def test_same_fix_that_upstream_changed_later_is_absorbed(twin):
    upstream(twin, edit_b, "Fix b (#41)")
    upstream(twin, in_b("x * 9", "x * 10"), "Refine (#42)")
    found = outcome(drift(twin), "core-twin")
    assert found["verdict"] == "absorbed"
    assert "Fix b (#41) makes the same change" in found["reasons"][0]


def undone_and_changed(twin):
    upstream(twin, edit_b, "Fix b (#41)")
    upstream(twin, in_b(IN_B, SIX), "Undo (#42)")
    upstream(twin, in_b(SIX, "    x = x + 8\n"), "Other (#43)")


def made_elsewhere(twin):
    upstream(
        twin,
        lambda tree: put(tree, "vllm/twin.py", TWINS.replace(SIX, IN_B, 1)),
        "Fix a (#41)",
    )
    upstream(twin, in_b(SIX, f"{SIX}    x = x - 7\n"), "Change b (#42)")


@pytest.mark.parametrize("history", [undone_and_changed, made_elsewhere])
def test_same_patch_id_is_no_reason_to_drop_what_is_not_there(twin, history):
    """A patch id knows no place, and nothing of what came after."""
    history(twin)
    found = outcome(drift(twin), "core-twin")
    assert found["verdict"] == "conflict"
    assert "in another place, or it was undone since" in found["reasons"][-1]
    assert found["conflicts"]


# -- the verdicts --------------------------------------------------------------------


def test_clean(two):
    upstream(two, write("README.md", "Later\n"))
    result = drift(two)
    assert result.code == 0
    assert set(verdicts(result).values()) == {"clean"}
    assert result.json["targets"][0]["counts"]["clean"] == 2


def test_merged(two):
    upstream(two, change("vllm/alpha.py", "def f0", "LATER = 1\n\n\ndef f0"))
    result = drift(two)
    assert result.code == 0
    assert verdicts(result) == {"core-alpha": "merged", "core-beta": "clean"}


def test_conflict_names_file_hunk_and_upstream_commit(two):
    upstream(two, change("vllm/beta.py", "B20 = 20\n", "B20 = 21\n"), "Raise B20 (#12)")
    upstream(two, write("README.md", "Later\n"), "Another (#13)")
    result = drift(two)
    assert result.code == 3
    found = outcome(result, "core-beta")
    assert found["verdict"] == "conflict"
    (conflict,) = found["conflicts"]
    assert (conflict["path"], conflict["kind"]) == ("vllm/beta.py", "both changed it")
    (hunk,) = conflict["hunks"]
    assert (hunk["line"], hunk["place"]) == (21, "B20")
    assert hunk["base"] == ["B20 = 20"]
    assert hunk["upstream"] == ["B20 = 21"]
    assert hunk["patch"] == ["B20 = 2020"]
    (cause,) = hunk["causes"]
    assert cause.endswith("Raise B20 (#12)")


def test_conflict_tells_where_the_lines_went(two):
    """Upstream moved what the patch changes to another file."""
    line = "    return compute_the_limit(x)\n"
    body = f"def limit_of(x):\n{line}\n\n"
    put(two.clone, "vllm/limit.py", body + TWIN.format(name="other"))
    git(two.clone, "add", "-A")
    git(two.clone, "commit", "-q", "--amend", "--no-edit")
    git(two.clone, "tag", "-f", "v1.2.0")
    rebuilt = rebuild(two)
    rebuilt.add_patch(
        "core-limit", change("vllm/limit.py", "limit(x)\n", "limit(x) + 1\n")
    )
    rebuilt.ok("apply")
    upstream(rebuilt, both(change("vllm/limit.py", body, ""),
                           write("vllm/moved.py", body)))  # fmt: skip
    (conflict,) = outcome(drift(rebuilt), "core-limit")["conflicts"]
    (hunk,) = conflict["hunks"]
    assert hunk["upstream"] == []
    assert hunk["now_in"] == ["vllm/moved.py"]


def test_conflict_with_a_deleted_file(two):
    upstream(two, lambda tree: (tree / "vllm/beta.py").unlink())
    found = outcome(drift(two), "core-beta")
    assert found["verdict"] == "conflict"
    assert "upstream deleted or rewrote it" in found["conflicts"][0]["kind"]
    assert found["conflicts"][0]["causes"]


def test_conflict_with_a_file_that_both_added(two):
    upstream(two, write("tests/test_alpha.py", "def test_other():\n    pass\n"))
    found = outcome(drift(two), "core-alpha")
    assert found["conflicts"][0]["kind"] == "both added it"


def test_patch_after_a_conflict_is_judged_by_itself(lab):
    upstream(lab, change("vllm/alpha.py", SHAPE.format(name="f3"),
                         SHAPE.format(name="f3").replace("return y", "return y - 1")))  # fmt: skip
    result = drift(lab)
    found = verdicts(result)
    assert found["core-alpha"] == "conflict"
    assert found["core-more"] != "conflict"
    assert outcome(result, "core-more")["rests_on"] == ["core-alpha"]
    assert outcome(result, "core-beta")["rests_on"] == []


def suspect(lab, name, *words) -> None:
    result = drift(lab)
    found = outcome(result, name)
    assert found["verdict"] == "suspect", found
    for word in words:
        assert any(word in reason for reason in found["reasons"]), found["reasons"]


def test_suspect_pull_request_is_named_upstream(two):
    path = two.patches / "core-beta.patch"
    replace(path, "Upstream-Status: Pending",
            "Upstream-Status: Submitted vllm-project/vllm#55")  # fmt: skip
    upstream(two, write("README.md", "Later\n"), "Raise them all (#55)")
    suspect(two, "core-beta", "names its pull request #55")


def test_suspect_status_says_absorbed(two):
    replace(two.patches / "core-beta.patch", "Upstream-Status: Pending",
            "Upstream-Status: Absorbed vllm-project/vllm#55, v1.3.0")  # fmt: skip
    upstream(two, write("README.md", "Later\n"))
    release(two)
    assert outcome(drift(two, NEW), "core-beta")["verdict"] == "suspect"
    release(two, "1.2.9")
    assert outcome(drift(two, "v1.2.9"), "core-beta")["verdict"] == "clean"


def test_suspect_backport_is_there(two):
    commit = upstream(two, write("README.md", "Later\n"))
    replace(two.patches / "core-beta.patch", "Upstream-Status: Pending",
            f"Upstream-Status: Backport {commit}")  # fmt: skip
    suspect(two, "core-beta", "backport")


def test_suspect_undone_since(two):
    work = two.folder / "work"
    diff = git(work, "show", "HEAD", "--", "vllm/beta.py") + "\n"
    upstream(two, lambda tree: git(tree, "apply", stdin=diff.encode()), "Raise (#8)")
    upstream(two, lambda tree: git(tree, "apply", "-R", stdin=diff.encode()), "Undo")
    suspect(two, "core-beta", "makes the same change, yet part of it is not there")


def test_suspect_function_was_renamed(two):
    upstream(two, change("vllm/alpha.py", "def f3(", "def g3("))
    suspect(two, "core-alpha", "adds to g3 what was made for f3")


def test_suspect_function_was_replaced_by_a_like_one(twin):
    """b is gone and c stands in its place, with the same lines: not b's fix."""
    upstream(twin, change("vllm/twin.py", "def b(", "def c("))
    suspect(twin, "core-twin", "adds to c what was made for b")


def test_step_of_a_yaml_file_is_a_place():
    """As where plain apply puts a line into another step of a test pipeline."""
    steps = "steps:\n" + "".join(
        f"- label: {name}\n  commands:\n  - run\n  gpu: 1\n" for name in ("one", "two")
    )
    head, mark, tail = steps.partition("- label: two\n")
    changed = f"{head}{mark}  optional: true\n{tail}"
    found = landing.change("ci.yaml", steps.encode(), changed.encode())
    assert list(found) == ["- label: two"]
    wrong = landing.change(
        "ci.yaml",
        steps.encode(),
        steps.replace("one\n", "one\n  optional: true\n").encode(),
    )
    assert list(landing.strays(found, wrong)) == [
        "adds to - label: one what was made for - label: two: 'optional: true'"
    ]


def test_suspect_most_of_it_is_there(two):
    """Upstream has the same lines elsewhere in the file: no conflict, and applied twice."""
    lines = "VALUE_ONE = compute_the_first(1)\nVALUE_TWO = compute_the_second(2)\n"
    two.add_patch(
        "core-values", change("vllm/beta.py", "B38 = 38\n", f"B38 = 38\n{lines}")
    )
    two.ok("apply")
    upstream(two, change("vllm/beta.py", "B2 = 2\n", f"B2 = 2\n{lines}"))
    suspect(two, "core-values", "2 of 2 distinct lines that it adds are there already")


def test_suspect_what_it_uses_is_gone(two):
    two.add_patch(
        "core-use", write("vllm/use.py", "from vllm.old import GONE\n\nX = GONE\n")
    )
    two.ok("apply")
    upstream(two, lambda tree: (tree / "vllm/old.py").unlink())
    suspect(two, "core-use", "uses GONE, which the new base has nowhere",
            "imports GONE from vllm.old, which the new base does not have")  # fmt: skip


def test_suspect_name_it_uses_is_no_longer_defined(two):
    two.add_patch(
        "core-use", change("vllm/beta.py", "B39 = 39\n", "B39 = 39\nB40 = B1 + 39\n")
    )
    two.ok("apply")
    upstream(two, both(change("vllm/beta.py", "B1 = 1\n", ""),
                       write("vllm/gamma.py", "B1 = 1\n")))  # fmt: skip
    suspect(two, "core-use", "uses B1, which nothing in it defines")


def test_suspect_defined_twice(two):
    added = "\n\ndef helper(x):\n    return x + 1234\n"
    two.add_patch("core-help", lambda tree: put(
        tree, "vllm/alpha.py", (tree / "vllm/alpha.py").read_text() + added))  # fmt: skip
    two.ok("apply")
    other = "def helper(y):\n    return y - 4321\n\n\n"
    upstream(two, change("vllm/alpha.py", "def f0", f"{other}def f0"))
    suspect(two, "core-help", "defines helper 2 times")


def test_suspect_does_not_parse(two):
    """Each side parses; upstream made a string of the lines around the patch."""
    text = 'DOC = """text"""\n'
    two.add_patch("core-doc", change("vllm/beta.py", "B25 = 25\n", f"B25 = 25\n{text}"))
    two.ok("apply")
    upstream(two, both(change("vllm/beta.py", "B22 = 22\n", 'OLD = """\nB22 = 22\n'),
                       change("vllm/beta.py", "B29 = 29\n", 'B29 = 29\n"""\n')))  # fmt: skip
    suspect(two, "core-doc", "does not parse")


def test_suspect_caller_was_mended(two):
    """Upstream mended the same defect one level up; the merge sees nothing."""
    callers = (
        "from vllm.scale import double_scale\n\n\ndef load_block(x):\n"
        "    return double_scale(x)\n"
    )
    before = "def double_scale(x):\n    return x * 2\n"
    put(two.clone, "vllm/scale.py", before)
    put(two.clone, "vllm/load.py", callers)
    git(two.clone, "add", "-A")
    git(two.clone, "commit", "-q", "--amend", "--no-edit")
    git(two.clone, "tag", "-f", "v1.2.0")
    rebuilt = rebuild(two)
    rebuilt.add_patch("core-scale", write(
        "vllm/scale.py", "def double_scale(x):\n    if x.dtype == exponent_only:\n"
        "        return x + 1\n    return x * 2\n"))  # fmt: skip
    rebuilt.ok("apply")
    upstream(rebuilt, write("vllm/load.py", callers.replace(
        "    return double", "    if x.dtype == exponent_only:\n        return x\n"
        "    return double")))  # fmt: skip
    suspect(rebuilt, "core-scale", "load_block, which calls double_scale and now has "
            "dtype, exponent_only")  # fmt: skip


def rebuild(lab):
    """Pin what the clone has now, with no patches."""
    make_sdist(lab.clone, lab.sdist)
    lab.cached.unlink(missing_ok=True)
    put(lab.root, "stack.toml", toml(lab.clone, lab.sdist))
    head = git(lab.clone, "rev-parse", "HEAD")
    git(lab.root, "update-index", "--cacheinfo", f"160000,{head},vllm")
    for path in lab.patches.glob("*.patch"):
        path.unlink()
    put(lab.patches, "series", "")
    lab.ok("clean", "--discard")
    work = lab.folder / "work"
    git(work, "fetch", "-q", str(lab.clone), "HEAD")
    git(work, "reset", "-q", "--hard", head)
    return lab


def test_file_moved_by_upstream_is_followed(two):
    upstream(two, lambda tree: git(tree, "mv", "vllm/beta.py", "vllm/delta.py"))
    found = outcome(drift(two), "core-beta")
    assert found["verdict"] == "merged"
    assert found["moved"] == ["vllm/beta.py is now vllm/delta.py"]


def test_suspect_file_is_hardly_the_one_it_was(two):
    def rewrite(tree):
        lines = (tree / "vllm/beta.py").read_text().splitlines(keepends=True)
        (tree / "vllm/beta.py").unlink()
        other = "".join(f"C{i} = {i}\n" for i in range(16))
        put(tree, "vllm/delta.py", other + "".join(lines[12:]))

    upstream(two, rewrite)
    suspect(two, "core-beta", "taken for vllm/beta.py moved, but only")


@pytest.mark.parametrize("settings", [{}, {"merge.renames": "false"}])
def test_verdicts_do_not_depend_on_the_tree_s_settings(two, settings):
    upstream(two, lambda tree: git(tree, "mv", "vllm/beta.py", "vllm/delta.py"))
    for key, value in settings.items():
        two.git("config", key, value)
    assert verdicts(drift(two))["core-beta"] == "merged"


# -- targets -------------------------------------------------------------------------


def test_release_that_is_not_pinned_says_so(two):
    upstream(two, write("README.md", "Later\n"))
    release(two)
    for name in (NEW, "1.3.0", "newest"):
        (target,) = drift(two, name).json["targets"]
        assert target["to"]["pinned"] is False
        assert target["to"]["release"] == NEW
        tree = git(two.clone, "rev-parse", "HEAD^{tree}")
        assert target["to"]["tree"] == tree
        assert git(two.clone, "rev-parse", "HEAD").startswith(target["to"]["commit"])
    assert "not pinned" in two.run("drift", "--to", NEW).out


def test_release_that_no_index_has_is_a_sentence(two):
    result = two.run("drift", "--to", "9.9.9")
    assert result.code == 1
    mentions(result, "no configured package index offers", "9.9.9", "mend:")


def test_clone_at_another_commit(two):
    upstream(two, write("README.md", "Later\n"))
    git(two.clone, "branch", "side")
    upstream(two, change("vllm/beta.py", "B20 = 20\n", "B20 = 21\n"))
    assert verdicts(drift(two, "../upstream@side"))["core-beta"] == "clean"
    assert verdicts(drift(two))["core-beta"] == "conflict"


def test_bundle_and_archive(two):
    upstream(two, write("README.md", "Later\n"))
    git(two.clone, "bundle", "create", str(two.folder / "x.bundle"), "HEAD")
    assert verdicts(drift(two, "../x.bundle"))["core-beta"] == "clean"
    release(two)
    found = drift(two, "../wheels/vllm-1.3.0.tar.gz").json["targets"][0]
    assert found["to"]["release"] == NEW
    assert "nobody vouches" in found["to"]["proof"]


@pytest.mark.parametrize("content", [b"text\n", b"", b"\x1f\x8bcut"])
def test_file_that_is_no_archive_is_a_usage_error(two, content):
    (two.folder / "x.tar.gz").write_bytes(content)
    with changes_nothing(two):
        result = two.run("rebase", "--to", str(two.folder / "x.tar.gz"))
    assert result.code == 2
    mentions(result, "no archive that can be read", "mend: name a clone")


def test_unknown_target_is_a_usage_error(two):
    result = two.run("drift", "--to", "nothing")
    assert result.code == 2
    mentions(result, "no release, no path, and no ref", "mend:")


def test_drift_and_dry_run_change_nothing(two):
    upstream(two, change("vllm/beta.py", "B20 = 20\n", "B20 = 21\n"))
    path = str(two.clone)
    with changes_nothing(two):
        assert two.run("drift", "--to", path).code == 3
        assert two.run("rebase", "--to", path, "--dry-run").code == 3


def test_drift_before_an_apply(fresh):
    upstream(fresh, write("README.md", "Later\n"))
    assert set(verdicts(drift(fresh)).values()) == {"clean"}
    assert not (fresh.root / "build").exists()


# -- the flow ------------------------------------------------------------------------


@pytest.fixture
def moved(lab):
    """Upstream at v1.3.0, on which core-beta conflicts and the rest merges."""
    upstream(lab, change("vllm/beta.py", "B20 = 20\n", "B20 = 21\n"), "Raise B20 (#12)")
    release(lab)
    return lab


def tree_of(lab):
    return lab.root / "build" / NEW


def series(lab):
    return (lab.root / "patches" / NEW / "series").read_text().split()


def resolve(lab):
    path = tree_of(lab) / "vllm/beta.py"
    text = re.sub(r"<<<<<<< .*?>>>>>>> [^\n]*\n", "B20 = 2021\n", path.read_text(),
                  flags=re.DOTALL)  # fmt: skip
    path.write_text(text)
    git(tree_of(lab), "add", "vllm/beta.py")


def untouched(lab):
    """All but what a rebase makes."""
    skip = (NEW, "cache")
    return {
        path: content
        for path, content in snapshot(lab.root, skip=skip).items()
        if path != "build/.lock"
    }


def test_rebase_without_a_stop(lab):
    upstream(lab, write("README.md", "Later\n"))
    release(lab)
    before = lab.series()
    result = lab.ok("rebase", "--to", NEW)
    assert "stack.toml has a table for v1.3.0" in result.out
    assert series(lab) == before
    assert not lab.run("lint", "--release", NEW).text.count("mend")
    assert lab.ok("apply", "--release", NEW, "--json").json["changed"] is False
    lab.ok("verify", "--release", NEW)
    assert git(tree_of(lab), "status", "--porcelain") == ""
    refs = git(tree_of(lab), "for-each-ref", "--format=%(refname)").splitlines()
    assert sorted(refs) == ["refs/heads/stack", "refs/stack/applied", "refs/stack/base"]
    pin = pins.find_project(lab.root).pin(NEW)
    assert pin.tree == git(lab.clone, "rev-parse", "HEAD^{tree}")
    # The stack that was moved is as it was.
    assert lab.ok("apply", "--json").json["changed"] is False


def test_new_stack_comes_from_its_files_alone(lab):
    upstream(lab, write("README.md", "Later\n"))
    release(lab)
    lab.ok("rebase", "--to", NEW)
    head = git(tree_of(lab), "rev-parse", "HEAD")
    lab.ok("clean", "--cache")
    lab.ok("apply", "--release", NEW)
    assert git(tree_of(lab), "rev-parse", "HEAD") == head


def test_stop_tells_why_and_how_to_go_on(moved):
    result = moved.run("rebase", "--to", NEW)
    assert result.code == 3
    mentions(result, "conflict core-beta", "vllm/beta.py: both changed it", "upstream B20 = 21",
             "patch B20 = 2020", "what the patch is for", "It was wrong, and users saw it.",
             "stopped at core-beta, 2 patches to go", "--continue", "--skip", "--abort")  # fmt: skip
    text = (tree_of(moved) / "vllm/beta.py").read_text()
    assert "<<<<<<< HEAD\nB20 = 21\n||||||| " in text
    # Asked again, it says the same.
    assert moved.run("rebase", "--to", NEW).out == result.out
    assert moved.run("rebase").out == result.out
    assert not (moved.root / "patches" / NEW).exists()


def test_continue_takes_the_files_as_they_are(moved):
    before = moved.series()
    moved.run("rebase", "--to", NEW)
    resolve(moved)
    put(tree_of(moved), "docs/more.md", "written on the way\n")
    result = moved.ok("rebase", "--continue", "--json")
    assert series(moved) == before
    patch = (moved.root / f"patches/{NEW}/core-beta.patch").read_text()
    assert "+B20 = 2021" in patch
    assert "+written on the way" in patch
    found = {p["patch"]: p for p in result.json["patches"]}
    assert found["core-beta"]["decision"] == "accepted"
    moved.ok("lint", "--release", NEW)
    moved.ok("verify", "--release", NEW)


def test_continue_in_conflict_is_refused(moved):
    moved.run("rebase", "--to", NEW)
    result = moved.run("rebase", "--continue")
    assert result.code == 3
    mentions(result, "still in conflict", "vllm/beta.py", "mend:")
    git(tree_of(moved), "add", "vllm/beta.py")
    result = moved.run("rebase", "--continue")
    assert result.code == 3
    mentions(result, "still have conflict markers", "vllm/beta.py", "mend:")


def test_continue_with_nothing_left_is_refused(moved):
    moved.run("rebase", "--to", NEW)
    git(tree_of(moved), "checkout", "-q", "--ours", "vllm/beta.py")
    git(tree_of(moved), "add", "vllm/beta.py")
    result = moved.run("rebase", "--continue")
    assert result.code == 3
    mentions(result, "nothing is left of it", "--skip")


def test_continue_after_a_commit_by_hand_is_refused(moved):
    moved.run("rebase", "--to", NEW)
    resolve(moved)
    git(tree_of(moved), "commit", "-q", "-m", "By hand")
    result = moved.run("rebase", "--continue")
    assert result.code == 4
    mentions(result, "commits were made", "mend:")
    mend = re.search(r"reset --soft (\w+)", result.err)[1]
    git(tree_of(moved), "reset", "--soft", mend)
    moved.ok("rebase", "--continue")


def test_skip_is_recorded_and_lint_asks_for_the_fate(moved):
    moved.run("rebase", "--to", NEW)
    moved.ok("rebase", "--skip")
    assert "core-beta.patch" not in series(moved)
    result = moved.run("lint", "--release", NEW)
    assert result.code == 1
    mentions(result, "core-beta: say what became of it, it is undecided")
    path = moved.root / "docs/ledger.toml"
    text = path.read_text()
    fate = 'fate = "superseded [upstream raised it itself]"'
    path.write_text(re.sub(r'fate = "undecided.*"', fate, text))
    moved.ok("lint", "--release", NEW)
    shown = moved.ok("ledger").out
    assert "core-beta superseded [upstream raised it itself]" in shown


def test_skip_with_a_fate(moved):
    moved.run("rebase", "--to", NEW)
    with changes_nothing(moved):
        result = moved.run("rebase", "--skip", "--fate", "gone")
    assert result.code == 2
    mentions(result, "does not say what became of core-beta", "absorbed")
    moved.ok("rebase", "--skip", "--fate", "absorbed vllm-project/vllm#12, v1.3.0")
    moved.ok("lint", "--release", NEW)


def test_skip_keeps_what_was_edited(moved):
    moved.run("rebase", "--to", NEW)
    resolve(moved)
    moved.ok("rebase", "--skip", "--fate", "not applicable [x]")
    refs = git(
        tree_of(moved), "for-each-ref", "--format=%(refname)", "refs/stack/backup"
    )
    assert "B20 = 2021" in git(tree_of(moved), "show", f"{refs}:vllm/beta.py")


def test_dependency_on_a_dropped_patch_is_met_by_the_base(lab):
    diff = git(lab.folder / "work", "show", "HEAD~4")
    upstream(
        lab, lambda tree: git(tree, "apply", stdin=diff.encode() + b"\n"), "Alpha (#3)"
    )
    release(lab)
    lab.ok("rebase", "--to", NEW)
    assert "core-alpha.patch" not in series(lab)
    patch = (lab.root / f"patches/{NEW}/core-more.patch").read_text()
    assert "Depends-On" not in patch
    lab.ok("lint", "--release", NEW)


@pytest.mark.parametrize("when", ["stopped", "resolved", "skipped to a stop"])
def test_abort_restores_everything(moved, when):
    before = untouched(moved)
    moved.run("rebase", "--to", NEW)
    if when == "resolved":
        resolve(moved)
    if when == "skipped to a stop":
        moved.run("rebase", "--abort")
        upstream(moved, change("vllm/old.py", "GONE", "KEPT"))
        git(moved.clone, "tag", "-f", NEW)
        moved.sdist.with_name("vllm-1.3.0.tar.gz").unlink()
        git(moved.clone, "tag", "-d", NEW)
        release(moved)
        before = untouched(moved)
        moved.run("rebase", "--to", NEW)
        assert moved.run("rebase", "--skip").code == 3
    moved.ok("rebase", "--abort")
    assert untouched(moved) == before
    assert not tree_of(moved).exists()
    result = moved.run("rebase", "--abort")
    assert result.code == 2
    mentions(result, "no rebase is in progress")


def test_two_rebases_at_once_are_refused(moved):
    moved.run("rebase", "--to", NEW)
    with changes_nothing(moved):
        result = moved.run("rebase", "--to", str(moved.clone))
    assert result.code == 4
    mentions(result, "a rebase to v1.3.0 is in progress", "mend:")


def test_rebase_onto_a_stack_that_is_there_is_refused(lab):
    upstream(lab, write("README.md", "Later\n"))
    release(lab)
    lab.ok("rebase", "--to", NEW)
    with changes_nothing(lab):
        result = lab.run("rebase", "--to", NEW)
    assert result.code == 4
    mentions(result, "has been moved there before", "mend: move it away")
    assert lab.run("rebase", "--to", "v1.2.0").code == 2


def test_unexported_work_is_not_left_behind(lab):
    upstream(lab, write("README.md", "Later\n"))
    put(lab.tree, "vllm/beta.py", "edited\n")
    with changes_nothing(lab):
        result = lab.run("rebase", "--to", str(lab.clone))
    assert result.code == 4
    mentions(result, "do not agree", "uncommitted vllm/beta.py", "mend:")


def test_patch_files_edited_during_a_rebase_do_not_count(moved):
    moved.run("rebase", "--to", NEW)
    replace(moved.patches / "core-alpha.patch", "It was wrong", "It was WRONG")
    resolve(moved)
    moved.ok("rebase", "--continue")
    new = (moved.root / f"patches/{NEW}/core-alpha.patch").read_text()
    assert "It was wrong" in new


@pytest.mark.parametrize(
    "options",
    [("--continue", "--skip"), ("--to", "x", "--abort"), ("--dry-run",),
     ("--continue", "--dry-run"), ("--fate", "x"), ()],
)  # fmt: skip
def test_options_that_do_not_go_together(two, options):
    with changes_nothing(two):
        assert two.run("rebase", *options).code == 2


def test_suspect_stop_can_be_accepted(two):
    upstream(two, change("vllm/alpha.py", "def f3(", "def g3("))
    release(two)
    result = two.run("rebase", "--to", NEW)
    assert result.code == 1
    mentions(result, "suspect core-alpha", "adds to g3")
    two.ok("rebase", "--continue")
    assert (
        "return y + 1"
        in by_function((tree_of(two) / "vllm/alpha.py").read_text())["g3"]
    )


def test_rebase_to_a_clone_keeps_no_archive(lab):
    commit = upstream(lab, write("README.md", "Later\n"))
    lab.ok("rebase", "--to", str(lab.clone))
    name = f"g{commit[:12]}"
    pin = pins.find_project(lab.root).pin(name)
    assert (pin.commit, pin.sdist) == (commit, None)
    (lab.root / "build" / name).rename(lab.folder / "gone")
    result = lab.run("apply", "--release", name)
    assert result.code == 1
    mentions(result, "names no source archive", "--base PATH")
    lab.ok("apply", "--release", name, "--base", str(lab.clone))


def test_changes_by_position_are_told_apart_from_upstream_s(two):
    """The rebased patch holds what the patch does, and none of upstream's change."""
    upstream(two, change("vllm/beta.py", "B1 = 1\n", "B1 = 111\n"))
    release(two)
    two.ok("rebase", "--to", NEW)
    patch = (two.root / f"patches/{NEW}/core-beta.patch").read_text()
    lines = [x for x in patch.splitlines() if re.match(r"[+-]B\d", x)]
    assert lines == ["-B20 = 20", "+B20 = 2020"]


# -- the record ----------------------------------------------------------------------


def test_drift_page_is_written_and_checked(lab):
    upstream(lab, change("vllm/beta.py", "B20 = 20\n", "B20 = 21\n"))
    release(lab)
    lab.ok("drift", "--to", NEW, "--update")
    page = lab.root / "docs/drift.md"
    text = page.read_text()
    assert "| core-beta | conflict |" in text
    assert (
        "- **core-beta**: conflict\n  - `vllm/beta.py`: both changed it, in `B20`"
        in text
    )
    page.write_text(text + "\n<!-- by hand -->\n\nRead by a person.\n")
    lab.ok("drift", "--check")
    lab.ok("drift", "--update")
    assert page.read_text().endswith("<!-- by hand -->\n\nRead by a person.\n")
    replace(page, "| core-beta | conflict |", "| core-beta | merged |")
    result = lab.run("drift", "--check")
    assert result.code == 1
    mentions(result, "docs/drift.md is not as this", "mend:")


def test_drift_page_is_of_these_patches(two):
    upstream(two, write("README.md", "Later\n"))
    release(two)
    two.ok("drift", "--to", NEW, "--update")
    replace(two.patches / "core-beta.patch", "It was wrong", "It was WRONG")
    two.ok("apply")
    assert two.run("drift", "--check").code == 1


def test_drift_without_a_record_is_a_usage_error(two):
    result = two.run("drift")
    assert result.code == 2
    mentions(result, "records no release", "mend:")


def test_json_of_a_stop(moved):
    found = json.loads(moved.run("rebase", "--to", NEW, "--json").out)
    assert found["ok"] is False
    assert (found["stop"]["patch"], found["left"]) == ("core-beta", 3)
    assert found["to"]["pinned"] is False


def test_format_patch_oracle(moved):
    """Plain git cherry-pick, as an oracle, gives the trees that the rebase gives."""
    other = moved.folder / "oracle"
    git(moved.folder, "clone", "-q", str(moved.clone), "oracle")
    work = moved.folder / "work"
    git(other, "fetch", "-q", str(work), "HEAD")
    commits = git(work, "rev-list", "--reverse", "v1.2.0..HEAD").split()
    moved.run("rebase", "--to", NEW)
    moved.ok("rebase", "--skip", "--fate", "not applicable [x]")
    for commit in commits:
        subject = git(work, "log", "-1", "--format=%s", commit)
        if subject != "[ROCm][Bugfix] Beta":
            git(other, "cherry-pick", commit)
    made = git(other, "log", "--format=%T %s", f"{NEW}..HEAD")
    ours = git(tree_of(moved), "log", "--format=%T %s", "refs/stack/base..HEAD")
    assert made == ours
    assert format_patch(other, "HEAD").startswith(b"From 0000")
    assert (
        subprocess.run(["git", "-C", other, "fsck"], capture_output=True).returncode
        == 0
    )


def test_twenty_patches_need_less_than_a_minute_of_two_cores(two):
    for number in range(18):
        old = f"B{number} = {number}\n"
        two.add_patch(
            f"core-n{number}", change("vllm/beta.py", old, f"B{number} = {number}00\n")
        )
    two.ok("apply")
    upstream(two, change("vllm/beta.py", "B30 = 30\n", "B30 = 31\n"))
    release(two)
    before = os.times()
    two.ok("rebase", "--to", NEW)
    after = os.times()
    spent = sum(after[:4]) - sum(before[:4])
    assert len(series(two)) == 20
    assert spent < 2 * 60
