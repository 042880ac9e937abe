"""graph, range-diff, bisect and ledger."""

from __future__ import annotations

import re
import sys

import pytest
from lab import (
    RELEASE,
    change_id,
    changes_nothing,
    git,
    mentions,
    put,
    release,
    replace,
    upstream,
)
from stackkit import bisect
from stackkit.errors import StackError

# -- graph ---------------------------------------------------------------------------


def nodes(result) -> dict[str, dict]:
    return {node["patch"]: node for node in result.json["patches"]}


def test_graph_finds_what_a_patch_is_built_on(lab):
    with changes_nothing(lab):
        found = nodes(lab.ok("graph", "--json"))
    assert [name for name, node in found.items() if not node["alone"]] == ["core-more"]
    more = found["core-more"]
    assert more["text"] == more["declared"] == ["core-alpha"]
    assert (more["missing"], more["unfound"]) == ([], [])


def test_graph_tells_what_is_not_declared(lab):
    replace(lab.patches / "core-more.patch", "Depends-On: core-alpha\n", "")
    lab.ok("apply")
    result = lab.run("graph")
    assert result.code == 1
    mentions(result, "needs core-alpha (its text) not declared")
    assert '"core-more" -> "core-alpha" [color=red]' in lab.run("graph", "--dot").out


def test_graph_tells_what_is_declared_for_nothing(lab):
    replace(lab.patches / "core-more.patch", "Depends-On: core-alpha\n",
            "Depends-On: core-alpha, docs-crlf\n")  # fmt: skip
    lab.ok("apply")
    result = lab.ok("graph")
    mentions(result, "declares docs-crlf, for no need that was found")


def test_graph_finds_a_need_by_name_alone(two):
    """No file in common: only the name tells."""
    two.add_patch("core-table", lambda tree: put(
        tree, "vllm/table.py", "def dialect_of(cache):\n    return cache\n"))  # fmt: skip
    two.add_patch("core-user", lambda tree: put(
        tree, "vllm/user.py",
        "from vllm.table import dialect_of\n\nX = dialect_of(1)\n"), depends="core-table")  # fmt: skip
    two.ok("apply")
    found = nodes(two.ok("graph", "--json"))
    assert found["core-user"]["names"] == {"core-table": ["dialect_of", "table"]} or (
        "dialect_of" in found["core-user"]["names"]["core-table"]
    )
    assert found["core-user"]["text"] == []
    assert not found["core-user"]["alone"]


def test_graph_finds_a_need_of_a_test_by_its_import(two):
    """A helper of another patch's tests: without it, the tests cannot be run."""
    two.add_patch("core-helper", lambda tree: put(
        tree, "tests/ops/some_helper.py", "def check_it(x):\n    return x\n"))  # fmt: skip
    two.add_patch("core-user", lambda tree: put(
        tree, "tests/ops/test_user.py",
        "from tests.ops import some_helper as other\n\nX = other\n"))  # fmt: skip
    two.ok("apply")
    result = two.run("graph", "--json")
    assert result.code == 1
    user = nodes(result)["core-user"]
    assert user["names"] == {"core-helper": ["some_helper"]}
    assert user["missing"] == ["core-helper"]


def test_graph_takes_the_keyword_of_a_call_for_a_use(two):
    """The merge goes through; only the call would fail."""
    two.add_patch("core-table", lambda tree: put(
        tree, "vllm/table.py", "def table_of(x, spare_rows=0):\n    return x + spare_rows\n"))  # fmt: skip
    two.add_patch("core-user", lambda tree: put(
        tree, "vllm/user.py", "def use(make):\n    spare_rows = 2\n"
        "    return make(1, spare_rows=spare_rows)\n"))  # fmt: skip
    two.ok("apply")
    user = nodes(two.run("graph", "--json"))["core-user"]
    assert user["names"] == {"core-table": ["spare_rows"]}


def test_graph_does_not_blame_a_patch_for_the_imports_of_others(two):
    two.add_patch("core-table", lambda tree: put(
        tree, "vllm/table.py", "def dialect_of(x):\n    return x\n"))  # fmt: skip
    two.add_patch("core-first", lambda tree: replace(
        tree / "vllm/alpha.py", "def f0", "from vllm.table import dialect_of as _d\n\n\ndef f0"
    ), depends="core-table")  # fmt: skip
    two.add_patch("core-second", lambda tree: replace(
        tree / "vllm/alpha.py", "def f5(x):\n", "def f5(x):\n    x = abs(x)\n"))  # fmt: skip
    two.ok("apply")
    assert nodes(two.ok("graph", "--json"))["core-second"]["names"] == {}


def test_graph_asks_for_the_nearest_needs_only(two):
    """c needs b, b needs a: c does not have to say a."""
    line = "B20 = 2020\n"
    for name, old, new, depends in (
        ("core-b", line, line.replace("2020", "2021"), "core-beta"),
        (
            "core-c",
            line.replace("2020", "2021"),
            line.replace("2020", "2022"),
            "core-b",
        ),
    ):
        two.add_patch(
            name,
            lambda tree, old=old, new=new: replace(tree / "vllm/beta.py", old, new),
            depends=depends,
        )
    two.ok("apply")
    found = nodes(two.ok("graph", "--json"))
    assert found["core-c"]["text"] == ["core-b"]
    assert found["core-b"]["text"] == ["core-beta"]


# -- range-diff ------------------------------------------------------------------------


def pairs(result) -> dict[str, str]:
    return {pair["subject"]: pair["kind"] for pair in result.json["pairs"]}


def test_range_diff_between_two_releases(two):
    upstream(
        two, lambda tree: replace(tree / "vllm/beta.py", "B19 = 19\n", "B19 = 0\n")
    )
    release(two)
    two.run("rebase", "--to", "v1.3.0")
    path = two.root / "build/v1.3.0/vllm/beta.py"
    settled = "B19 = 0\nB20 = 2021\n"
    text = re.sub(r"<<<<<<< .*?>>>>>>> [^\n]*\n", settled, path.read_text(), flags=re.S)
    path.write_text(text)
    git(path.parent, "add", "beta.py")
    two.ok("rebase", "--continue")
    found = pairs(two.ok("range-diff", RELEASE, "v1.3.0", "--json"))
    assert found == {"[Bugfix] Alpha": "same", "[ROCm][Bugfix] Beta": "changed"}
    assert "1:" in two.ok("range-diff", RELEASE, "v1.3.0").out


def test_range_diff_with_an_earlier_commit_and_with_the_tree(lab):
    git(lab.root, "add", "-A", "patches")
    replace(lab.tree / "vllm/beta.py", "B38 = 3838\n", "B38 = 3839\n")
    lab.git("commit", "-q", "-a", "--amend", "--no-edit")
    found = pairs(lab.ok("range-diff", RELEASE, f"build/{RELEASE}", "--json"))
    assert found["[Misc] More"] == "changed"
    lab.ok("export")
    with changes_nothing(lab):
        found = pairs(lab.ok("range-diff", "HEAD", RELEASE, "--json"))
    assert sorted(found.values()) == ["changed", "same", "same", "same", "same"]
    lab.ok("drop", "docs-crlf")
    found = pairs(lab.ok("range-diff", f"HEAD:{RELEASE}", RELEASE, "--json"))
    assert found["[Doc] Docs  with two spaces"] == "removed"


def test_range_diff_of_nothing_is_a_usage_error(two):
    result = two.run("range-diff", "nothing", RELEASE)
    assert result.code == 2
    mentions(result, "no release, no build/RELEASE, and no commit", "mend:")


# -- bisect ----------------------------------------------------------------------------


def test_bisect_finds_the_patch(lab):
    script = "import sys; sys.exit('B20 = 2020' in open('vllm/beta.py').read())"
    result = lab.ok("bisect", "run", "--json", "--", sys.executable, "-c", script)
    assert result.json["suspects"] == ["core-beta"]
    # The two ends first, then halves.
    assert [t["patch"] for t in result.json["trials"]][:2] == ["core-more", "(base)"]
    assert lab.git("status", "--porcelain") == ""
    shown = lab.ok("bisect", "run", "--", sys.executable, "-c", script)
    assert "the first bad patch is core-beta" in shown.out


def test_bisect_says_which_could_not_be_tried(lab):
    script = (
        "import os, sys; bad = 'B20 = 2020' in open('vllm/beta.py').read()\n"
        "sys.exit(125 if os.environ['STACK_PATCH'] in ('core-beta', 'docs-crlf') else bad)"
    )
    result = lab.ok("bisect", "run", "--json", "--", sys.executable, "-c", script)
    assert result.json["suspects"] == ["docs-crlf", "core-beta", "misc-names"]


@pytest.mark.parametrize(
    "code, words", [("0", "core-more is good"), ("1", "(base) is bad")]
)
def test_bisect_without_a_difference_is_refused(lab, code, words):
    result = lab.run(
        "bisect", "run", "--", sys.executable, "-c", f"raise SystemExit({code})"
    )
    assert result.code == 1
    mentions(result, words, "mend:")


def test_bisect_of_no_command(lab):
    assert lab.run("bisect", "run", "--", "no-such-program").code == 2
    assert lab.run("bisect", "run").code == 2


@pytest.mark.parametrize("first", range(1, 20))
def test_search_needs_few_runs(first):
    runs = []

    def run(position):
        runs.append(position)
        return int(position >= first)

    names = [str(i) for i in range(20)]
    assert bisect.search(20, run, names) == [first]
    assert len(runs) <= 7


def test_search_wants_a_good_base():
    with pytest.raises(StackError, match="0 is bad"):
        bisect.search(3, lambda position: 1, ["0", "1", "2"])


# -- ledger ----------------------------------------------------------------------------

ENTRY = """
[[fate]]
release = "v1.2.0"
patch = "core-gone"
change-id = "{change}"
concern = "small"
fate = "{fate}"
how = "read"
"""


def entry(lab, fate="superseded [x]", name="core-gone", **other):
    text = ENTRY.format(change=change_id(name), fate=fate)
    for key, value in other.items():
        text = text.replace(f'{key} = "', f'{key} = "{value}" #')
    put(lab.root, "docs/ledger.toml", text)


def ledger_findings(lab) -> list[str]:
    found = lab.run("lint", "--json").json["findings"]
    return [item["what"] for item in found if item["rule"] == "ledger"]


GOOD = ["absorbed vllm-project/vllm#1, v1.2.0", "absorbed v1.2.0", "superseded [by x]",
        "not applicable [no such path]"]  # fmt: skip


@pytest.mark.parametrize("fate", GOOD)
def test_ledger_takes_each_form_of_fate(lab, fate):
    entry(lab, fate)
    assert ledger_findings(lab) == []
    assert fate in lab.ok("ledger").out


BAD = {
    "fate": (lambda lab: entry(lab, "gone"), "is not one of"),
    "undecided": (lambda lab: entry(lab, "undecided [x]"), "say what became of it"),
    "carried": (lambda lab: entry(lab, name="core-beta"), "core-beta is in the series"),
    "concern": (lambda lab: entry(lab, concern="large"), "does not exist"),
    "release": (lambda lab: entry(lab, release="v9.9.9"), "no release v9.9.9"),
    "page": (lambda lab: put(lab.root, "docs/concerns/lost.md", "# Lost\n"),
             "no patch carries lost"),
    "not TOML": (lambda lab: put(lab.root, "docs/ledger.toml", "x"), "not valid TOML"),
    "key": (lambda lab: put(lab.root, "docs/ledger.toml", "[[fate]]\nx = 'y'\n"),
            "has the keys x"),
    "unknown": (lambda lab: put(lab.root, "docs/ledger.toml", "x = 1\n"), "unknown keys: x"),
    "status": (lambda lab: replace(
        lab.patches / "core-beta.patch", "Status: Pending",
        "Status: Absorbed vllm-project/vllm#1, v1.1.0"), "core-beta is carried, but"),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD)
def test_lint_cross_checks_the_ledger(lab, kind):
    assert ledger_findings(lab) == []
    make, words = BAD[kind]
    make(lab)
    (finding,) = ledger_findings(lab)
    assert words in finding


def test_patch_that_a_later_release_lacks_must_be_in_the_ledger(two):
    upstream(two, lambda tree: put(tree, "README.md", "Later\n"))
    release(two)
    two.ok("rebase", "--to", "v1.3.0")
    two.ok("lint", "--release", "v1.3.0")
    two.ok("drop", "core-beta", "--release", "v1.3.0")
    result = two.run("lint", "--release", "v1.3.0")
    assert result.code == 1
    mentions(result, "core-beta of v1.2.0 is not in the series, and nothing says")
    text = ENTRY.format(change=change_id("core-beta"), fate="superseded [x]")
    put(two.root, "docs/ledger.toml", text.replace('"v1.2.0"', '"v1.3.0"'))
    two.ok("lint", "--release", "v1.3.0")


def test_ledger_shows_every_concern_on_every_release(two):
    upstream(two, lambda tree: put(tree, "README.md", "Later\n"))
    release(two)
    two.ok("rebase", "--to", "v1.3.0")
    found = two.ok("ledger", "--json").json["concerns"]
    assert [(row["concern"], row["release"]) for row in found] == [
        ("small", RELEASE),
        ("small", "v1.3.0"),
    ]
    put(two.root, "docs/concerns/lost.md", "# Lost\n")
    result = two.run("ledger")
    assert result.code == 1
    assert "unknown" in result.out
