#!/usr/bin/env python3
"""Instructions that sparse attention of DeepSeek-V4 issues for each key, on gfx942.

Needs no GPU. Compiles the main kernels of decode and prefill as v0.22.0, v0.33.0 (with
its choices for gfx942) and the patched tree launch them, with each Triton of
ci/codegen, and reads the loop over keys in the machine code.

    .venv/bin/python bench/instructions.py run --patched build/v0.22.0 \\
        --v0.22.0 vllm --v0.33.0 vllm-0.33.0.tar.gz --output instructions.json
    .venv/bin/python bench/instructions.py table instructions.json

`.venv` is the one of `make test`. A tree is a folder or an sdist. `table` prints the
tables of the docs.

The unit is one instruction of one wave, for each key of a query: an iteration's
instructions, times the waves of a program, times the programs over the rank's heads
that visit the key, over the keys of an iteration. A branch is taken so that most
instructions are issued. It is a count, not a time: a product of matrices takes a SIMD 8
or 16 times as long as a sum, and waits are one instruction each. What a kernel does
before and after the loop is not in it, nor is the kernel that joins splits.
"""

import argparse
import datetime
import functools
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import trees

ROOT = Path(__file__).resolve().parent.parent
for part in ("ci", "scripts"):
    sys.path.insert(0, str(ROOT / part))

from codegen.__main__ import Compiler, compile_only_driver  # noqa: E402
from stackkit import assembly, budgets, codegen, git, pins, testenv  # noqa: E402

ARCH, UNITS = "gfx942", 304
NOPE, HEAD_DIM, KEY = 448, 512, 584
WINDOW, TOPK = 128, 512
#: heads, queries: every entry of the patched tables, and the heads of a rank
DECODE = [(64, 128), (64, 8), (16, 128), (8, 128)]
PREFILL = [(64, 2048), (32, 2048), (16, 2048), (8, 2048)]
#: Main kernels, and how many loops over keys each has: one, or the window's and then
#: the selected keys'.
KERNELS = {
    "_sparse_decode_kernel": 1,
    "_sparse_prefill_kernel": 1,
    "_sparse_attn_decode_ragged_kernel": 2,
    "_sparse_attn_decode_partial_kernel": 2,
    "_sparse_attn_prefill_ragged_kernel": 1,
}
PATCHED = "triton_sparse_mla.py"
#: v0.22.0 names a type that no compiler has for gfx942; with the one that it means:
MENDED = "v0.22.0, FNUZ"
WRONG_TYPE, RIGHT_TYPE = "tl.float8e4b15", "tl.float8e4b8"
TREES = ("v0.22.0", MENDED, "v0.33.0", "patched")


# ------------------------------------------------------- with one Triton: compile


class Recorder(Compiler):
    """Keeps with each kernel how it was launched."""

    def __init__(self, folder: Path, jobs: int, names=frozenset(KERNELS)):
        super().__init__(folder, names, jobs)
        self.arch, self.told = ARCH, {}

    def answer(self, module, kernel):
        return super().answer(module, kernel) | self.told

    def take_over(self) -> None:
        """From now on a launch compiles."""
        from triton.backends.compiler import GPUTarget
        from triton.runtime import driver
        from triton.runtime.jit import JITFunction

        recorder, real = self, JITFunction.run

        def launch(self, *args, grid, warmup, **kwargs):
            def compile_():
                return real(self, *args, grid=grid, warmup=True, **kwargs)

            told = {"num_warps": kwargs["num_warps"], "grid": grid}
            for name in kwargs.keys() & {"BLOCK_H", "BLOCK_K"}:
                told[name.lower()] = kwargs[name]
            recorder.told |= told
            recorder.launch(compile_, self.fn)

        JITFunction.run = launch
        driver.set_active(compile_only_driver(GPUTarget("hip", ARCH, 64)))


def compile_all(args) -> None:
    import torch

    env = trees.load(args.folder, ARCH, UNITS)
    env.modules["v0.33.0"]._decode_cu_count = lambda: UNITS  # it asks the GPU
    mended = args.folder / "mended" / f"{trees.SPARSE}.py"
    mended.parent.mkdir(exist_ok=True)
    source = (args.folder / "v0.22.0" / mended.name).read_text()
    assert WRONG_TYPE in source
    mended.write_text(source.replace(WRONG_TYPE, RIGHT_TYPE))
    env.modules[MENDED] = trees.load_file(mended)
    recorder = Recorder(args.out, args.jobs)
    recorder.take_over()
    for tree in TREES:
        for what, shapes in (("decode", DECODE), ("prefill", PREFILL)):
            if (tree, what) == (MENDED, "prefill"):
                continue  # it reads bf16
            for heads, queries in shapes:
                where = {"tree": tree, "what": what, "heads": heads}
                recorder.told = where | {"queries": queries}
                wrapper = f"_rocm_sparse_attn_{what}_ragged_triton"
                inputs = decode if what == "decode" else prefill
                getattr(env.modules[tree], wrapper)(**inputs(torch, heads, queries))
    recorder.finish()


def lists(torch, queries, width):
    indices = torch.zeros(queries * width, dtype=torch.int32)
    return indices, torch.arange(queries + 1, dtype=torch.int32) * width


def query(torch, heads, queries):
    return {
        "q": torch.empty(queries, heads, HEAD_DIM, dtype=torch.bfloat16),
        "scale": HEAD_DIM**-0.5,
        "attn_sink": torch.zeros(heads),
        "nope_head_dim": NOPE,
        "rope_head_dim": HEAD_DIM - NOPE,
    }


def decode(torch, heads, queries):
    # Larger than 2 GiB, as on a real GPU, for Triton addresses smaller tensors with
    # other instructions. Never touched.
    pool = torch.empty((1 << 31) + (1 << 26), dtype=torch.uint8)
    page = -(-64 * KEY // 576) * 576
    cache = pool.as_strided((len(pool) // page, 64, KEY), (page, KEY, 1))
    arguments = query(torch, heads, queries)
    for name, width in (("main", WINDOW), ("extra", TOPK)):
        indices, indptr = lists(torch, queries, width)
        arguments |= {
            f"{name}_cache": cache,
            f"{name}_indices": indices,
            f"{name}_indptr": indptr,
        }
    return arguments


def prefill(torch, heads, queries):
    indices, indptr = lists(torch, queries, WINDOW + TOPK)
    kv = torch.empty(65536, HEAD_DIM, dtype=torch.bfloat16)
    return query(torch, heads, queries) | {
        "kv": kv,
        "indices": indices,
        "indptr": indptr,
    }


# ----------------------------------------------------------------- what they issue


def row_of(answer: Path, cell: budgets.Cell) -> dict:
    """One compiled kernel, from what `Recorder` left."""
    told = json.loads(answer.read_text())
    names = ("tree", "what", "heads", "queries", "kernel", "block_h", "block_k",
             "num_warps", "grid")  # fmt: skip
    row = {name: told[name] for name in names} | {"triton": cell.triton}
    if cell.figures is None:
        return row | {"error": cell.error}
    loops = key_loops(answer.with_suffix(".s").read_text(), told)
    shares = (1,) if len(loops) == 1 else (WINDOW, TOPK)
    per_key: dict[str, float] = {}
    for share, loop in zip(shares, loops):
        for name, count in loop["per_key"].items():
            part = count * share / sum(shares)
            per_key[name] = per_key.get(name, 0) + part
    figures = cell.figures
    return row | {
        "per_key": per_key,
        "all_per_key": sum(per_key.values()),
        "loops": loops,
        "vgpr": figures.vgpr,
        "lds": figures.lds,
        "waves": assembly.waves_per_simd(figures, told["num_warps"]),
        "spills": figures.spills,
        "scratch": figures.scratch,
        "code": figures.code,
    }


def key_loops(text: str, told: dict) -> list[dict]:
    """The loops with products of matrices, which are those over keys.

    Raises:
        SystemExit: if there are not as many as the kernel has, or one is not a loop
            over tiles alone.
    """
    tile = told["block_h"] * told["block_k"]
    waves = told["num_warps"] * -(-told["heads"] // told["block_h"])
    found = []
    for loop in assembly.loops(text):
        classes = loop.classes()
        if "MFMA" not in classes:
            continue
        if loop.has_inner:
            sys.exit(f"{told}: a loop is in the one over keys, {loop.header}")
        flop = sum(map(product, loop.instructions)) * told["num_warps"]
        found.append(
            {
                "header": loop.header,
                "iteration": classes,
                "per_key": {k: n * waves / told["block_k"] for k, n in classes.items()},
                # How often each product that is needed is computed by some wave. If
                # an iteration did several tiles, it would be as many times more.
                "products": flop / (4 * tile * HEAD_DIM),
            }
        )
    if len(found) != KERNELS[told["kernel"]]:
        sys.exit(f"{told}: {len(found)} loops over keys")
    return found


def product(name: str) -> int:
    """Floating-point operations of a matrix instruction."""
    match = re.match(r"v_mfma_f32_(\d+)x(\d+)x(\d+)_", name)
    return 2 * int(match[1]) * int(match[2]) * int(match[3]) if match else 0


def run(args) -> None:
    with tempfile.TemporaryDirectory() as name:
        args.folder = Path(name) / "trees"
        trees.prepare(args)
        patched = (args.folder / "patched" / PATCHED).read_bytes()
        outs = compiled(__file__, args.folder, Path(name), args.jobs)
        rows = rows_of(outs, args.folder, row_of)
        if args.keep:
            for triton, out in outs.items():
                keep(out, args.keep / triton)
    shown = {option: getattr(args, option) for option in trees.FILES}
    result = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat("T", "seconds"),
        "arch": ARCH,
        "triton": list(outs),
        "python": platform.python_version(),
        "command": "python bench/instructions.py run "
        + " ".join(
            f"--{option} {path.name if path.is_absolute() else path}"
            for option, path in shown.items()
        ),
        "patched": {PATCHED: git.blob_id(patched)},
        "unit": "wave instructions for each key of a query, all heads of the rank",
        "rows": rows,
    }
    if args.output:
        args.output.write_text(json.dumps(result, indent=1) + "\n")
    print_tables(result)


def compiled(script: str, source: Path, folder: Path, jobs: int) -> dict[str, Path]:
    """Folders in `folder` with what the command `compile` of a script made of `source`,
    by the Tritons of ci/codegen."""
    project = pins.load(ROOT)
    pin = project.pins[project.default_release]
    tritons = budgets.load(codegen.budgets_file(project, pin)).tritons
    outs = {triton: folder / triton for triton in tritons}
    for triton, out in outs.items():
        out.mkdir()
        options = source, out, triton, "--jobs", jobs
        with_triton(project, triton, script, *options)
    return outs


def rows_of(outs: dict[str, Path], root: Path, row_of) -> list[dict]:
    """A row of each kernel that `compiled` made; errors name files below `root`."""
    return [
        row_of(*pair)
        for triton, out in outs.items()
        for pair in zip(
            sorted(out.glob("*.json")), codegen.cells(out, triton, root), strict=True
        )
    ]


def with_triton(project: pins.Project, version: str, script: str, *options) -> None:
    """Run the command `compile` of a script with a Triton."""
    home = testenv.triton(project, version, print)
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {
            "PYTHONPATH": str(home or ""),
            "TRITON_CACHE_DIR": cache,
            "TRITON_DISABLE_LINE_INFO": "1",
        }
        environment.pop("TRITON_INTERPRET", None)
        print(f"compiling for {ARCH} with Triton {version}", flush=True)
        command = map(str, [sys.executable, script, "compile", *options])
        subprocess.run(list(command), env=environment, check=True)


def keep(folder: Path, target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        (target / path.name).write_bytes(path.read_bytes())


# ----------------------------------------------------------------------- the tables


def print_tables(result: dict) -> None:
    for what in ("decode", "prefill"):
        print(f"\n{what}\n")
        print("\n".join(table(result, what)))


def table(result: dict, what: str) -> list[str]:
    """Markdown. Classes are of the first Triton, the rest is of all."""
    classes = ("VALU", "MFMA", "convert", "LDS", "load", "scalar")
    tritons = result["triton"]
    head = ["heads x queries", "tree", "tile, waves", "per key", "per key and head",
            *classes, "VGPR", "LDS", "waves per SIMD", "spilled"]  # fmt: skip
    lines = [head, ["---"] * len(head)]
    shown = set()
    for heads, queries in DECODE if what == "decode" else PREFILL:
        for tree in TREES:
            wanted = (tree, what, heads, queries)
            same = [
                next(
                    row
                    for row in result["rows"]
                    if row["triton"] == triton
                    and tuple(row.get(k) for k in ("tree", "what", "heads", "queries"))
                    == wanted
                )
                for triton in tritons
                if wanted != (MENDED, "prefill", heads, queries)
            ]
            if not same or "error" in same[0]:
                continue
            row = same[0]
            tile = f"{row['block_h']} x {row['block_k']}, {row['num_warps']}"
            if (tree, heads, tile) in shown:
                continue  # the number of queries changes nothing
            shown.add((tree, heads, tile))
            line = [
                f"{heads} x {queries}",
                tree,
                tile,
                each(f"{r['all_per_key']:.0f}" for r in same),
                each(f"{r['all_per_key'] / heads:.1f}" for r in same),
                *(f"{row['per_key'].get(name, 0):.0f}" for name in classes),
                each(str(r["vgpr"]) for r in same),
                each(f"{r['lds'] / 1024:.0f} KiB" for r in same),
                each(f"{r['waves']:g}" for r in same),
                each(str(r["spills"]) for r in same),
            ]
            lines.append(line)
    return ["| " + " | ".join(line) + " |" for line in lines]


def each(texts) -> str:
    """One text, or one for each Triton."""
    texts = list(texts)
    return texts[0] if len(set(texts)) == 1 else " / ".join(texts)


def main(text: str, add_inputs, run, compile_all, show) -> None:
    """The commands of a script that compiles with each Triton and makes a table.

    Args:
        text: What the script is for.
        add_inputs: Adds to a parser what `run` compiles.
        run, compile_all: The commands.
        show: Prints the tables of a result.
    """
    parser = argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("run", help="compile, and show what came out")
    add_inputs(command)
    command.add_argument("--output", type=Path, help="JSON")
    command.add_argument("--jobs", type=int, default=2, help="kernels at once")
    command.set_defaults(function=run)
    command = commands.add_parser("compile", help="with one Triton, used by run")
    command.add_argument("folder", type=Path)
    command.add_argument("out", type=Path)
    command.add_argument("triton")
    command.add_argument("--jobs", type=int, default=2)
    command.set_defaults(function=functools.partial(_compile, compile_all))
    command = commands.add_parser("table", help="of the docs, from run's JSON")
    command.add_argument("result", type=Path)
    command.set_defaults(
        function=lambda args: show(json.loads(args.result.read_text()))
    )
    args = parser.parse_args()
    args.function(args)


def _compile(compile_all, args) -> None:
    import torch
    import triton

    if triton.__version__ != args.triton:
        sys.exit(f"Triton is {triton.__version__}, not {args.triton}")
    torch.set_num_threads(1)
    compile_all(args)


def add_inputs(command: argparse.ArgumentParser) -> None:
    trees.add_trees(command)
    command.add_argument("--keep", type=Path, help="folder for the assembly")


if __name__ == "__main__":
    main(__doc__, add_inputs, run, compile_all, print_tables)
