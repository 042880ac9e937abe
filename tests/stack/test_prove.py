"""`stack prove`: only an assertion or the named exception proves a patch."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from lab import ROOT, format_patch, git, make_project, mentions, message, put, replace
from stackkit import pins, prove, testenv, worktree

HARNESS = """from . import report


def pytest_addoption(parser):
    report.add_option(parser)


def pytest_configure(config):
    report.configure(config)
"""

CODE = """KNOWN = {}


def answer():
    return 1


def look(key):
    return KNOWN[key]


def convert(text):
    return int(text)
"""
FIXED = """import pathlib

KNOWN = {"a": 1}


def answer():
    return 2


def look(key):
    return KNOWN[key]


def convert(text):
    return 0


def refuse():
    raise ValueError


def fails():
    raise OSError
"""

TESTS = """import pathlib

import pytest
from vllm import code

HERE = pathlib.Path(__file__).parent


def test_assert():
    assert code.answer() == 2


@pytest.mark.parametrize("key", ["a", "b"])
def test_some_parameters(key):
    assert key == "b" or code.answer() == 2


def test_did_not_raise():
    with pytest.raises(ValueError):
        getattr(code, "refuse", int)()


def test_named():
    assert code.look("a") == 1


def test_unnamed():
    assert code.look("a") == 1


def test_other_than_named():
    assert code.convert("x") == 0


def test_import_inside():
    from vllm.added import VALUE

    assert VALUE == 1


def test_missing_file():
    assert (HERE.parent / "vllm" / "added.py").read_text()


def test_skips_without():
    if code.answer() == 1:
        pytest.skip("not here")


def test_skips_with():
    assert code.answer() == 2
    pytest.skip("not here")


def test_always_passes():
    assert True


def test_always_fails():
    assert False


@pytest.fixture
def broken():
    assert code.answer() == 2


def test_setup(broken):
    pass


@pytest.fixture
def untidy():
    yield
    assert code.answer() == 2


def test_teardown(untidy):
    pass


@pytest.mark.xfail(strict=True)
def test_xfail():
    assert code.answer() == 1


@pytest.mark.parametrize("n", [1, 2])
def test_skips_one(n):
    if n == 2:
        pytest.skip("not this")
    assert code.answer() == 2
"""

# What prove says of each test: whether it proves, and words of the reason.
DECIDED = {
    "test_assert": (True, "1 of 1 failed (AssertionError)", "1 passed"),
    "test_some_parameters": (True, "1 of 2 failed (AssertionError)", "2 passed"),
    "test_did_not_raise": (True, "1 of 1 failed (Failed)", "1 passed"),
    "test_named": (True, "1 of 1 failed (KeyError)", "1 passed"),
    "test_unnamed": (False, "fails for another reason: builtins.KeyError", "1 passed"),
    "test_other_than_named": (False, "another reason: builtins.ValueError", "1 passed"),
    "test_import_inside": (False, "builtins.ModuleNotFoundError in call", "1 passed"),
    "test_missing_file": (False, "builtins.FileNotFoundError in call", "1 passed"),
    "test_skips_without": (False, "1 skipped", "1 passed"),
    "test_skips_with": (False, "1 of 1 failed", "skipped: "),
    "test_always_passes": (False, "passed: the test does not see the defect", "passed"),
    "test_always_fails": (False, "1 of 1 failed", "failed: "),
    "test_setup": (False, "builtins.AssertionError in setup", "1 passed"),
    "test_teardown": (False, "builtins.AssertionError in teardown", "1 passed"),
    "test_xfail": (False, "another reason: None in call", "skipped"),
    "test_skips_one": (False, "1 skipped", "skipped: "),
}
RAISES = {"test_named": "KeyError", "test_other_than_named": "KeyError",
          "test_import_inside": "OSError", "test_missing_file": "KeyError"}  # fmt: skip

PATCHES = {
    "prove-cases": (
        {"vllm/code.py": FIXED, "vllm/added.py": "VALUE = 1\n",
         "tests/test_cases.py": TESTS},
        tuple(
            f"tests/test_cases.py::{name}"
            + (f" raises {RAISES[name]}" if name in RAISES else "")
            for name in DECIDED
        ),
    ),
    "prove-import": (
        {"vllm/top.py": "VALUE = 1\n",
         "tests/test_top.py": "from vllm.top import VALUE\n\n\ndef test_top():\n"
         "    assert VALUE == 1\n"},
        ("tests/test_top.py::test_top",),
    ),
    "prove-dies": (
        {"vllm/dies.py": "DIES = False\n", "tests/test_dies.py":
         "import os\nimport pathlib\n\n\ndef test_dies():\n"
         "    here = pathlib.Path(__file__).parent.parent\n"
         "    if not (here / 'vllm/dies.py').exists():\n        os._exit(7)\n"},
        ("tests/test_dies.py::test_dies",),
    ),
    "prove-nothing": (
        {"tests/test_nothing.py": "def test_is():\n    pass\n"},
        ("tests/test_nothing.py::test_is_not",),
    ),
    "prove-none": ({"docs/x.md": "x\n"}, ("none: only words",)),
    "prove-good": (
        {"vllm/good.py": "VALUE = 2\n", "tests/test_good.py":
         "from vllm import good\n\n\ndef test_good():\n    assert good.VALUE == 2\n"},
        ("tests/test_good.py::test_good",),
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A project whose patches prove what their names say."""
    lab = make_project(tmp_path_factory.mktemp("prove") / "lab", ())
    work = lab.folder / "work"
    for path, text in (("vllm/code.py", CODE), ("vllm/good.py", "VALUE = 1\n")):
        put(work, path, text)
    git(work, "add", "-A")
    git(work, "commit", "-q", "-m", message("core-code", "[Misc] Code"))
    put(lab.patches, "core-code.patch", format_patch(work, "HEAD"))
    for name, (files, tests) in PATCHES.items():
        for path, text in files.items():
            put(work, path, text)
        git(work, "add", "-A")
        git(work, "commit", "-q", "-m", message(name, tests=tests))
        put(lab.patches, f"{name}.patch", format_patch(work, "HEAD"))
    names = ["core-code", *PATCHES]
    put(lab.patches, "series", "".join(f"{n}.patch\n" for n in names))
    put(lab.root, "ci/harness/__init__.py", "")
    put(lab.root, "ci/harness/plugin.py", HARNESS)
    shutil.copy(ROOT / "ci/harness/report.py", lab.root / "ci/harness/report.py")
    for path in (ROOT / "tests").glob("requirements*.txt"):
        put(lab.root, f"tests/{path.name}", "")
    lab.fill_cache()
    return lab


@pytest.fixture(autouse=True)
def _no_install(monkeypatch):
    monkeypatch.setattr(testenv, "ensure", lambda project, step: None)


@pytest.fixture(scope="module")
def proofs(project):
    """One run over all patches; by patch, then by test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(testenv, "ensure", lambda project, step: None)
        result = project.run("prove", "--jobs", "2", "--json")
    assert result.code == 1  # some do not hold
    return {proof["patch"]: proof for proof in result.json["proofs"]}


@pytest.mark.parametrize("name", DECIDED)
def test_outcome_is_judged(proofs, name):
    wanted, red, green = DECIDED[name]
    found = {t["node"].split("::")[1]: t for t in proofs["prove-cases"]["tests"]}[name]
    assert found["ok"] is wanted, found
    assert red in found["red"]
    assert green in found["green"]


def test_case_with_one_bad_test_is_not_proven(proofs):
    assert not proofs["prove-cases"]["ok"]


@pytest.mark.parametrize(
    "name, red",
    [
        ("prove-import", "not collected: "),
        ("prove-dies", "pytest died (exit 7)"),
        ("prove-nothing", "no such test"),
    ],
)
def test_run_that_proves_nothing_says_why(proofs, name, red):
    assert not proofs[name]["ok"]
    assert red in proofs[name]["tests"][0]["red"]


def test_good_patch_is_proven(proofs):
    assert proofs["prove-good"]["ok"]
    assert not proofs["prove-good"]["cached"]


def test_patch_that_declares_no_tests_tells_its_reason(proofs):
    assert proofs["prove-none"]["reason"] == "only words"
    assert proofs["prove-none"]["tests"] == []


def _prove(lab, *names):
    result = lab.run("prove", *names, "--json")
    return result, {proof["patch"]: proof["cached"] for proof in result.json["proofs"]}


def test_second_run_is_cached_only_where_it_was_proven(project, proofs):
    _, cached = _prove(project, "prove-good", "prove-nothing")
    assert cached == {"prove-good": True, "prove-nothing": False}


@pytest.fixture
def copy(project, proofs, tmp_path):
    """A project whose good patch is in the cache."""
    from lab import Lab

    folder = tmp_path / "copy"
    shutil.copytree(project.folder, folder, symlinks=True,
                    ignore=shutil.ignore_patterns("build"))  # fmt: skip
    return Lab(folder)


def test_cache_is_known_by_content_not_by_place_or_time(copy):
    assert _prove(copy, "prove-good")[1] == {"prove-good": True}


@pytest.mark.parametrize(
    "path", ["ci/harness/plugin.py", "ci/harness/report.py", "tests/requirements.txt"]
)
def test_changed_harness_or_environment_is_not_cached(copy, path):
    with open(copy.root / path, "a") as stream:
        stream.write("# a byte\n")
    assert _prove(copy, "prove-good")[1] == {"prove-good": False}


def test_changed_patch_is_not_cached(copy):
    series = copy.patches / "series"
    replace(series, "prove-none.patch\n", "")  # another tree below it
    assert _prove(copy, "prove-good")[1] == {"prove-good": False}


def test_damaged_cache_is_not_believed(copy):
    for path in (copy.cache / "prove").iterdir():
        path.write_bytes(path.read_bytes()[:-20])
    assert _prove(copy, "prove-good")[1] == {"prove-good": False}


TRAILER = "Tests: tests/test_good.py::test_good\n"


@pytest.mark.parametrize(
    "trailer",
    [
        TRAILER.replace("\n", " raises\n"),
        TRAILER.replace("\n", " raises ImportError\n"),
        "Tests: a test\n",
        TRAILER + "Tests: a test\n",
        "",
    ],
)
def test_tests_trailer_that_cannot_be_read_is_not_a_proof(copy, trailer):
    replace(copy.patches / "prove-good.patch", TRAILER, trailer)
    result = copy.run("prove", "prove-good")
    assert result.code == 1
    mentions(result, "prove-good.patch", "Tests trailer is missing or malformed")
    mentions(result, "mend: scripts/stack lint")


def test_unknown_patch_is_a_usage_error(copy):
    assert copy.run("prove", "prove-unknown").code == 2


def _slot(copy):
    copy.ok("apply")
    found = pins.find_project(copy.root)
    tree = worktree.Tree(found, found.pin(None))
    slot = copy.root / "build" / "slot"
    trees = [copy.git("rev-parse", f"HEAD{back}^{{tree}}") for back in ("^", "")]
    return tree, trees, slot


def test_stale_byte_code_does_not_outlive_its_source(copy):
    """Same second and same size: Python would take the old byte code."""
    tree, (red, green), slot = _slot(copy)
    prove.check_out(tree, red, slot)
    stale = slot / "vllm/__pycache__/good.cpython-311.pyc"
    kept = slot / "vllm/__pycache__/code.cpython-311.pyc"
    for path in (stale, kept):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"byte code")
    prove.check_out(tree, green, slot)
    assert not stale.exists()
    assert kept.exists()


@pytest.mark.parametrize("left", ["vllm/stray.py", "ignored.log", "vllm/code.py"])
def test_what_a_run_leaves_does_not_help_the_next(copy, left):
    tree, (red, green), slot = _slot(copy)
    prove.check_out(tree, green, slot)
    put(slot, left, "left\n")
    prove.check_out(tree, green, slot)
    content = Path(slot / left)
    assert not content.exists() or content.read_text() != "left\n"
    prove.check_out(tree, red, slot)
    assert (slot / "vllm/good.py").read_text() == "VALUE = 1\n"


def test_killed_check_out_is_made_good(copy):
    tree, (red, green), slot = _slot(copy)
    prove.check_out(tree, red, slot)
    (slot / "vllm/code.py").unlink()
    slot.with_suffix(".index.lock").write_bytes(b"")
    prove.check_out(tree, green, slot)
    assert (slot / "vllm/code.py").is_file()
    assert (slot / "vllm/good.py").read_text() == "VALUE = 2\n"
