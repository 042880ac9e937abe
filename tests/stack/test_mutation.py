"""Every gate sees one changed byte, names the file and says what mends it."""

from __future__ import annotations

import re
import shutil

import pytest
from lab import RELEASE, flip, git, mentions, put, replace
from stackkit import apply, patchfile, pins, verify, worktree
from stackkit.errors import StackError


def test_any_byte_of_a_diff(lab):
    """Each is seen by apply, or by the proof that export writes the same bytes."""
    project = pins.find_project(lab.root)
    pin = project.pin(None)
    tree = worktree.Tree(project, pin)
    path = lab.patches / "core-beta.patch"
    good = path.read_bytes()
    start = good.index(b"diff --git")
    before = tree.repository.resolve("refs/heads/stack~3")
    unseen = []
    for position in range(start, len(good), 3):
        flip(path, position)
        try:
            patch = patchfile.Patch("core-beta", path, path.read_bytes())
            made = apply.commit_patch(tree.repository, before, patch)
            verify._canonical(tree, [apply.Applied(patch, *made)])
            unseen.append((position, good[position - 10 : position + 10]))
        except StackError as error:
            assert str(path) in error.message
        path.write_bytes(good)
    assert unseen == []


PLACES = {
    "old blob": rb"index (.)",
    "new blob": rb"index \w+\.\.(.)",
    "context": rb"\n (B)19",
    "added": rb"\n\+(B)",
    "removed": rb"\n-(B)",
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("verb", ["apply", "verify"])
def test_patch(lab, verb, place):
    path = lab.patches / "core-beta.patch"
    position = re.search(PLACES[place], path.read_bytes()).start(1)
    data = bytearray(path.read_bytes())
    data[position] = ord("0") if data[position] != ord("0") else ord("1")
    path.write_bytes(data)
    result = lab.run(verb)
    assert result.code == 1
    mentions(result, f"patches/{RELEASE}/core-beta.patch")
    if verb == "apply":
        mentions(result, "mend:")


def test_head_of_a_patch(lab):
    replace(lab.patches / "core-beta.patch", "From 00000", "From 00001")
    result = lab.run("apply")
    assert result.code == 1
    mentions(result, "core-beta.patch:1", "mend:")


def test_every_byte_of_the_series(lab):
    path = lab.patches / "series"
    good = path.read_bytes()
    for position in range(len(good) - 1):
        flip(path, position)
        with pytest.raises(StackError) as caught:
            patchfile.load(lab.patches)
        assert str(path) in caught.value.message
        assert caught.value.mend
        path.write_bytes(good)
    flip(path, 3)
    result = lab.run("apply")
    assert result.code == 1
    mentions(result, str(path), "mend:")


def _pin(lab) -> dict[str, str]:
    text = (lab.root / "stack.toml").read_text()
    return dict(re.findall(r'^(\w+) = (".*?"|\[.*\])$', text, re.MULTILINE))


# Which verb sees a changed value; nothing can know a wrong toolchain.
SEEN_BY = {
    "default": "apply", "tag": "apply", "url": "lint", "commit": "apply",
    "tree": "apply", "name": "apply", "sha256": "apply", "generated": "apply",
}  # fmt: skip


@pytest.mark.parametrize("key", SEEN_BY)
def test_value_of_stack_toml(fresh, key):
    shutil.rmtree(fresh.cache)  # the name of the archive counts, too
    value = _pin(fresh)[key]
    for position in (1, len(value) // 2, len(value) - 2):
        changed = list(value)
        old = changed[position]
        changed[position] = "1" if old != "1" else "2"
        replace(fresh.root / "stack.toml", f"{key} = {value}",
                f"{key} = {''.join(changed)}")  # fmt: skip
        result = fresh.run(SEEN_BY[key])
        assert result.code in (1, 2), (key, position, result.text)
        mentions(result, "mend:")
        if key not in ("name",):
            assert re.search(r"stack\.toml|pinned|TOML", result.text)
        git(fresh.root, "checkout", "-q", "stack.toml")


def test_value_tables_cover_stack_toml(fresh):
    toolchain = {"rocm", "torch", "triton", "aiter", "base_image", "ruff"}
    assert set(_pin(fresh)) == set(SEEN_BY) | toolchain


@pytest.mark.parametrize(
    "old, new, words",
    [
        ('tree = "', 'tree = "X', "tree must be 40 hexadecimal digits"),
        ('tag = "', 'tog = "', "lacks the key 'tag'"),
        ('rocm = "', 'extra = "x"\nrocm = "', "has unknown keys: extra"),
        ('rocm = "7.2.2"', "rocm = 7", "rocm must be a str"),
        ("generated = [", "generated = [1, ", "must be a list of strings"),
        ("[release", "[rilease", "lacks the key 'tag'"),
        ('default = "', 'default = ', "not valid TOML"),
        ("# ", "", ""),
    ],
)  # fmt: skip
def test_malformed_stack_toml_is_a_usage_error(fresh, old, new, words):
    if not words:
        put(fresh.root, "stack.toml", b"\xff\xfe")
        words = "not valid TOML"
    else:
        replace(fresh.root / "stack.toml", old, new)
    result = fresh.run("status")
    assert result.code == 2
    mentions(result, f"{fresh.root}/stack.toml", words, "mend:")


@pytest.mark.parametrize("verb", ["apply", "lint", "verify", "doctor"])
def test_gitlink(lab, verb):
    commit = git(lab.clone, "rev-parse", "HEAD")
    other = ("0" if commit[0] != "0" else "1") + commit[1:]
    git(lab.root, "update-index", "--cacheinfo", f"160000,{other},vllm")
    result = lab.run(verb)
    assert result.code == 1
    mentions(result, "stack.toml", commit, other)
    if verb in ("apply", "lint", "doctor"):
        mentions(result, "mend:", "git update-index --add --cacheinfo")


@pytest.mark.parametrize("verb", ["apply", "lint"])
def test_missing_gitlink(lab, verb):
    git(lab.root, "update-index", "--force-remove", "vllm")
    result = lab.run(verb)
    assert result.code == 1
    mentions(result, "submodule entry of vllm is missing", "mend:")


def test_applied_tree(lab):
    flip(lab.tree / "vllm/beta.py", 5)
    result = lab.run("apply")
    assert result.code == 4
    mentions(result, "uncommitted vllm/beta.py", "mend:")
