#!/usr/bin/env python3
"""Which tiles of the MXFP4 experts fit gfx942: registers, LDS, waves and spills.

Needs no GPU. Compiles `matmul_ogs` as the two products of DeepSeek-V4-Flash's experts
launch it on one of two EP ranks, bf16 by MXFP4, for each tile and each Triton of
ci/codegen. The kernels are those that a wheel of vLLM carries.

    pip download --no-deps vllm==0.22.0
    .venv/bin/python bench/ogs_tiles.py run vllm-0.22.0-*.whl --output ogs-tiles.json
    .venv/bin/python bench/ogs_tiles.py table ogs-tiles.json

`.venv` is the one of `make test`. `table` prints the table of the docs.
"""

import argparse
import datetime
import json
import sys
import tempfile
import zipfile
from pathlib import Path
from types import SimpleNamespace

import instructions
from instructions import ARCH, UNITS
from stackkit import assembly, budgets

IN_WHEEL = "vllm/third_party/"
PACKAGE = "triton_kernels"
EXPERTS, TOPK, TOKENS = 128, 6, 2048
#: by product: k, n
SHAPES = {"w13": (4096, 4096), "w2": (2048, 4096)}
#: block_m, block_n, block_k, epilogue_subtile; empty for what triton_kernels chooses
TILES = [
    (),
    (32, 256, 128, 1),
    (64, 256, 64, 1),
    (16, 128, 128, 1),
    (32, 128, 128, 1),
    (64, 128, 128, 1),
    (64, 128, 128, 16),
    (64, 128, 64, 1),
    (128, 128, 64, 1),
    (128, 128, 128, 1),
    (32, 64, 256, 1),
    (128, 256, 128, 1),
]
FIGURES = ("vgpr", "waves", "lds", "spills")
KEYS = ("block_m", "block_n", "block_k", "epilogue_subtile")


def compile_all(args) -> None:
    import torch

    units = SimpleNamespace(multi_processor_count=UNITS)
    torch.cuda.get_device_properties = lambda device=0: units
    sys.path.insert(0, str(args.folder))
    recorder = instructions.Recorder(args.out, args.jobs, {"_matmul_ogs"})
    recorder.take_over()
    from triton_kernels.matmul_ogs_details import opt_flags

    make = opt_flags.make_opt_flags
    import triton_kernels.matmul_ogs as ogs

    def make_and_tell(*arguments):
        chosen = make(*arguments)
        recorder.told |= {key: getattr(chosen, key) for key in (*KEYS, "split_k")}
        return chosen

    ogs.make_opt_flags = make_and_tell
    for tile in TILES:
        for what in SHAPES:
            opt_flags.reset_opt_flags_constraints()
            opt_flags.update_opt_flags_constraints(dict(zip(KEYS, tile)))
            recorder.told = {"what": what, "default": not tile}
            launch(torch, what)
    recorder.finish()


def launch(torch, what: str) -> None:
    """The call of vLLM's experts; memory is reserved and never touched."""
    from triton_kernels.matmul_ogs import PrecisionConfig, matmul_ogs
    from triton_kernels.routing import ExptData, GatherIndx, RoutingData, ScatterIndx
    from triton_kernels.tensor import FP4, wrap_torch_tensor

    k, n = SHAPES[what]
    rows = TOKENS * TOPK
    # The axis that shares scales is contiguous, and next to last.
    weight = torch.empty(EXPERTS, n, k // 2, dtype=torch.uint8).transpose(-2, -1)
    scale = torch.empty(EXPERTS, n, k // 32, dtype=torch.uint8).transpose(-2, -1)
    index = torch.zeros(rows, dtype=torch.int32)
    offsets = torch.zeros(EXPERTS + 1, dtype=torch.int32)
    blocks = {block: offsets for block in (16, 32, 64, 128)}
    experts = ExptData(torch.zeros(EXPERTS, dtype=torch.int32), offsets, blocks, blocks)
    gates = torch.empty(rows, dtype=torch.bfloat16)
    is_first = what == "w13"
    matmul_ogs(
        torch.empty(TOKENS if is_first else rows, k, dtype=torch.bfloat16),
        wrap_torch_tensor(weight, dtype=FP4),
        None,
        RoutingData(gates, experts.hist, EXPERTS, TOPK, experts),
        gather_indx=GatherIndx(index, index) if is_first else None,
        scatter_indx=None if is_first else ScatterIndx(index, index),
        precision_config=PrecisionConfig(weight_scale=wrap_torch_tensor(scale)),
        gammas=None if is_first else gates,
        y=torch.empty(1, rows if is_first else TOKENS, n, dtype=torch.bfloat16),
    )


def row_of(answer: Path, cell: budgets.Cell) -> dict:
    told = json.loads(answer.read_text())
    names = ("what", "default", *KEYS, "split_k", "num_warps")
    row = {name: told[name] for name in names} | {"triton": cell.triton}
    if cell.figures is None:
        return row | {"error": cell.error}
    figures = cell.figures
    return row | {
        "vgpr": figures.vgpr,
        "lds": figures.lds,
        "waves": assembly.waves_per_simd(figures, told["num_warps"]),
        "spills": figures.spills,
        "scratch": figures.scratch,
        "code": figures.code,
    }


def run(args) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with zipfile.ZipFile(args.wheel) as wheel:
            parts = [x for x in wheel.namelist() if x.startswith(IN_WHEEL + PACKAGE)]
            wheel.extractall(folder, parts)
        source = folder / IN_WHEEL
        outs = instructions.compiled(__file__, source, folder, args.jobs)
        rows = instructions.rows_of(outs, folder, row_of)
    result = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat("T", "seconds"),
        "arch": ARCH,
        "triton": list(outs),
        "kernels": f"{PACKAGE} of {args.wheel.name}",
        "command": f"python bench/ogs_tiles.py run {args.wheel.name}",
        "shapes": {"experts": EXPERTS, "tokens": TOKENS, "k, n": SHAPES},
        "rows": rows,
    }
    if args.output:
        args.output.write_text(json.dumps(result, indent=1) + "\n")
    show(result)


def show(result: dict) -> None:
    print("\n".join(table(result)))


def table(result: dict) -> list[str]:
    """Markdown; figures are of the Tritons in turn."""
    heads = ("VGPRs", "waves per SIMD", "LDS", "spilled")
    lines = [["tile", "product", *heads], ["---"] * (2 + len(heads))]
    rows: dict[tuple, list[dict]] = {}
    for row in result["rows"]:
        default, m, n, k, subtile = (row[key] for key in ("default", *KEYS))
        name = f"{m} x {n} x {k}" + " (default)" * default
        name += f", epilogue_subtile {subtile}" * (subtile != 1)
        rows.setdefault((name, row["what"]), []).append(row)
    for names, same in rows.items():
        lines.append([*names, *(each(same, key) for key in FIGURES)])
    return ["| " + " | ".join(line) + " |" for line in lines]


def each(rows: list[dict], key: str) -> str:
    """A figure, or one for each Triton; no figure where it does not compile."""
    return instructions.each("-" if "error" in row else f"{row[key]:g}" for row in rows)


def add_inputs(command: argparse.ArgumentParser) -> None:
    command.add_argument("wheel", type=Path, help="of vLLM")


if __name__ == "__main__":
    instructions.main(__doc__, add_inputs, run, compile_all, show)
