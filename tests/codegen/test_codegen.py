"""What the compiling process leaves is read right, and the cache is believed right."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from stackkit import codegen, git, pins, testenv, worktree
from test_assembly import KERNEL

ROOT = Path(__file__).resolve().parent.parent.parent
PROJECT = pins.load(ROOT)
TOLD = {"module": "vllm.ops", "kernel": "_kernel", "variant": "", "arch": "gfx942"}


def leave(folder: Path, told: dict, complaints: str = "", text: str = KERNEL) -> None:
    (folder / "a.json").write_text(json.dumps({**TOLD, **told}))
    (folder / "a.err").write_text(complaints)
    (folder / "a.s").write_text(text)


def test_a_kernel_is_read(tmp_path):
    leave(tmp_path, {"lds": 8}, "warning: something harmless\n")
    [cell] = codegen.cells(tmp_path, "3.9.0", tmp_path)
    assert cell.name == "_kernel, gfx942, Triton 3.9.0"
    assert cell.error == ""
    assert cell.figures is not None and cell.figures.lds == 8


def test_a_complaint_fails_a_kernel_that_was_returned(tmp_path):
    """As Triton 3.9.0 does with inline assembly of another GPU."""
    leave(tmp_path, {"lds": 8}, "noise\nerror: unknown asm constraint 'f'\n")
    [cell] = codegen.cells(tmp_path, "3.9.0", tmp_path)
    assert cell.figures is None
    assert cell.error == "error: unknown asm constraint 'f'"


def test_a_process_that_died_fails(tmp_path):
    leave(tmp_path, {"died": True})
    [cell] = codegen.cells(tmp_path, "3.6.0", tmp_path)
    assert (cell.figures, cell.error) == (None, "the compiler died")


def test_an_exception_is_told_by_its_last_line(tmp_path):
    leave(tmp_path, {"error": "CompilationError: at 1:2:\n  x = y\n\nno such type\n"})
    [cell] = codegen.cells(tmp_path, "3.9.0", tmp_path)
    assert cell.error == "no such type"


def test_messages_do_not_name_the_folder_of_the_tree(tmp_path):
    tree = Path("/some/where/tree")
    leave(tmp_path, {"lds": 8}, f"{tree}/vllm/ops.py:9:0: error: broken\n")
    [cell] = codegen.cells(tmp_path, "3.9.0", tree)
    assert cell.error == "vllm/ops.py:9:0: error: broken"


@pytest.fixture
def machine(tmp_path):
    tree = worktree.Tree(PROJECT, PROJECT.pin(None))
    return codegen._Machine(tree, tmp_path, ("3.9.0",), 1, lambda what: None)


def test_the_cache_key_changes_with_all_that_matters(machine, monkeypatch, tmp_path):
    def key(tree="a", triton="3.9.0", arch="gfx942"):
        return machine._cache_file(tree, triton, arch)

    keys = {key(), key(tree="b"), key(triton="3.6.0"), key(arch="gfx950")}
    assert len(keys) == 4
    assert key() in keys
    before = key()
    monkeypatch.setattr(testenv, "digest", lambda project: "other packages")
    assert key() != before


@pytest.mark.parametrize("file", ["ci/codegen/launches.py", "ci/harness/platforms.py"])
def test_the_cache_key_changes_with_the_harness(machine, monkeypatch, tmp_path, file):
    copy = tmp_path / "project"
    for part in ("ci/codegen", "ci/harness", "tests"):
        (copy / part).mkdir(parents=True)
        for path in (ROOT / part).glob("*.*"):
            (copy / part / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(machine.tree, "project", pins.Project(copy, "v0.22.0", {}))
    before = machine._cache_file("a", "3.9.0", "gfx942")
    with open(copy / file, "a") as stream:
        stream.write("#\n")
    assert machine._cache_file("a", "3.9.0", "gfx942") != before


def test_kept_figures_come_back(machine, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    leave(tmp_path, {"lds": 8})
    cells = codegen.cells(tmp_path, "3.9.0", tmp_path)
    machine._keep("a" * 40, {"3.9.0": ["gfx942"]}, cells)
    found, cached = machine.compile("a" * 40, ("gfx942",), ())
    assert (found, cached) == (cells, 1)


@pytest.mark.parametrize("content", ["", "[{}]", "[1]", '{"x": 1}'])
def test_a_damaged_cache_is_as_none(tmp_path, content):
    path = tmp_path / "a.json"
    assert codegen._read(path) is None
    path.write_text(content)
    assert codegen._read(path) is None


def test_a_death_without_a_word_is_not_kept(machine, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    leave(tmp_path, {"died": True})
    cells = codegen.cells(tmp_path, "3.9.0", tmp_path)
    machine._keep("a" * 40, {"3.9.0": ["gfx942"]}, cells)
    assert not machine._cache_file("a" * 40, "3.9.0", "gfx942").exists()


SOURCE = """
import triton

@triton.jit
def _helper(x):
    return x

@triton.jit(do_not_specialize=["n"])
def _kernel(p, n):
    return _helper(p)

def wrapper():
    @triton.jit
    def _inner(p):
        return other(p)

def plain(x):
    return _helper(x)
"""


def test_triton_functions_are_found():
    found = codegen.jit_functions(SOURCE)
    assert list(found) == ["_helper", "_kernel", "_inner"]
    assert codegen.called(found["_kernel"]) == {"_helper"}


def test_a_touched_kernel_that_is_not_launched_is_found(tmp_path):
    repository = git.Repository.create(tmp_path / ".git", tmp_path)

    def tree_of(source: str) -> str:
        blob = repository.write_blob(source.encode())
        inner = repository.make_tree({"ops.py": git.Entry("100644", blob)})
        listing = f"040000 tree {inner}\tvllm\0".encode()
        return repository.run("mktree", "-z", stdin=listing).decode().strip()

    class Tree:
        pass

    tree = Tree()
    tree.repository = repository
    tree.pin = Tree()
    tree.pin.tree = tree_of(SOURCE)
    changed = SOURCE.replace("return x", "return x + 1").replace("other(p)", "p")
    changed = changed.replace("_helper(p)", "_helper(p) + n")

    def found(*launched: str, excused: tuple[str, ...] = ()) -> list[str]:
        from stackkit.budgets import Budgets, Cell

        data = {"not_launched": [{"kernel": name} for name in excused]}
        cells = [Cell("ops", name, "", "gfx942", "3", None, "") for name in launched]
        return [
            item.cell
            for item in codegen._unlaunched(
                tree, tree_of(changed), Budgets(Path(), data), cells
            )
        ]

    assert found() == ["_inner", "_kernel"]
    assert found("_kernel", excused=("_inner",)) == []


TINY = """
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from codegen import __main__ as compiling


@triton.jit
def _copy(out, x, BLOCK: tl.constexpr):
    offset = tl.arange(0, BLOCK)
    tl.store(out + offset, tl.load(x + offset))


@triton.jit
def _other_gpu(out, BLOCK: tl.constexpr):
    offset = tl.arange(0, BLOCK)
    value = tl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=f,f", [offset.to(tl.float32)], tl.float32, True, 1
    )
    tl.store(out + offset, value)


compiler = compiling.Compiler(Path(sys.argv[1]), frozenset(), 1)
compiler.arch, compiler.variant = "gfx942", "tiny"
driver.set_active(compiling.compile_only_driver(GPUTarget("hip", "gfx942", 64)))
real = JITFunction.run


def launch(self, *args, grid, warmup, **kwargs):
    compiler.launch(
        lambda: real(self, *args, grid=grid, warmup=True, **kwargs), self.fn
    )


JITFunction.run = launch
x = torch.zeros(256)
_copy[(1,)](x, x, BLOCK=256)
_other_gpu[(1,)](x, BLOCK=256)
compiler.finish()


def broken():
    raise TypeError("the signature changed")


compiler.call(SimpleNamespace(variant="tiny", call=partial(broken)))
"""


def test_the_compiling_process_with_tiny_kernels(tmp_path):
    """One compiles; one, of another GPU's assembly, fails and takes none with it."""
    script = tmp_path / "tiny.py"
    script.write_text(TINY)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "ci")}
    environment.pop("TRITON_INTERPRET", None)
    environment["TRITON_CACHE_DIR"] = str(tmp_path / "cache")
    out = tmp_path / "out"
    out.mkdir()
    subprocess.run([sys.executable, script, out], check=True, env=environment)
    cells = {cell.kernel: cell for cell in codegen.cells(out, "3.9.0", tmp_path)}
    assert list(cells) == ["_copy", "_other_gpu", "broken"]
    assert cells["_copy"].figures is not None
    assert cells["_copy"].figures.loads == {4: 1}
    assert cells["_copy"].variant == "tiny"
    assert "constraint 'f'" in cells["_other_gpu"].error
    told = [json.loads(path.read_text()) for path in sorted(out.glob("*.json"))]
    assert "lds" in told[1], "Triton reports this failure now; then so may the tool"
    assert cells["broken"].error == "TypeError: the signature changed"
