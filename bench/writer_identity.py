#!/usr/bin/env python3
"""Whether every FP8 writer obeys the identity of the two dialects, on the CPU.

Runs each Triton writer of a DeepSeek-V4 cache in Triton's interpreter, as gfx942 and
as gfx950, on the same random values, and compares: FNUZ with maximum 224 must store
the bytes that OCP with maximum 448 stores, 0x80 apart, which must be 0x00, and scales
twice as large. Of the C++ insert the arithmetic runs, compiled for the host; a GPU
makes a byte of the result by one instruction, here the format's definition does.

    python bench/writer_identity.py --tree TREE [--writer NAME]... [--output FILE]

Needs the packages of `tests/requirements.txt`, PyTorch and Triton 3.9.0, as the
`.venv` of `make test` has them.  Ten million elements a writer take an hour of CPU
time.
"""

import argparse
import concurrent.futures
import datetime
import functools
import importlib
import json
import multiprocessing
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parent.parent
SEED = 20261130
#: Elements of one piece of work, a multiple of a page of 64 tokens of 512.
PIECE = 1 << 17


def module(name):
    return importlib.import_module(f"vllm.models.deepseek_v4.common.ops.{name}")


def values(torch, generator, rows, dim):
    """Rows of many magnitudes [rows, dim], with underflows of both signs and zeros."""
    x = torch.randn(rows, dim, generator=generator)
    x *= 2.0 ** torch.randint(-14, 10, (rows, 1), generator=generator)
    kind = torch.rand(rows, dim, generator=generator)
    return torch.where(kind < 0.02, x * 1e-7, torch.where(kind > 0.995, x * 0.0, x))


def insert(torch, generator):
    tokens, page = PIECE // 512, 64
    cache = torch.full((tokens // page, page * 584), 0xA5, dtype=torch.uint8)
    kv = values(torch, generator, tokens, 512).bfloat16()
    module("cache_utils").quantize_and_insert_k_cache(
        kv, cache, torch.arange(tokens), page
    )
    return rows_of_512(cache, page)


def rows_of_512(cache, page):
    """FP8 bytes [tokens, 448] and exponents [tokens, 7] of pages of 584-byte rows."""
    data, scales = cache[:, : page * 576], cache[:, page * 576 :]
    data = data.reshape(-1, 576)[:, :448]
    return data, scales.reshape(-1, 8)[:, :7], 1


def compressed(torch, generator, head, ratio, block, stride, scale_bytes):
    """Write PIECE elements through the compressor, with random states and norms."""
    rows, page, overlap = PIECE // head, 64, ratio == 4
    width, block_size = head * (1 + overlap), 4 if overlap else 8
    count = rows * ratio
    positions = torch.arange(ratio - 1, count, ratio)
    cache = torch.full(
        (rows // page, page, stride + scale_bytes), 0xA5, dtype=torch.uint8
    )
    module("fused_compress_quant_cache").compress_norm_rope_store_triton(
        values(torch, generator, count, 2 * width).view(-1, block_size, 2 * width),
        rows,
        torch.zeros(rows, dtype=torch.int32),
        positions,
        torch.arange(rows),
        torch.arange(count // block_size, dtype=torch.int32)[None],
        block_size,
        width,
        torch.randn(count, 64, generator=generator),
        cache,
        SimpleNamespace(slot_mapping=torch.arange(rows)),
        {},
        head,
        64,
        ratio,
        overlap,
        False,
        2.0 ** torch.randint(-14, 10, (head,), generator=generator),
        1e-6,
        block,
        stride,
        scale_bytes,
    )
    return cache.view(rows // page, -1), page


def compressor_c4(torch, generator):
    return rows_of_512(*compressed(torch, generator, 512, 4, 64, 576, 8))


def compressor_c128(torch, generator):
    return rows_of_512(*compressed(torch, generator, 512, 128, 64, 576, 8))


def indexer_k(torch, generator):
    cache, page = compressed(torch, generator, 128, 4, 128, 128, 4)
    data, scales = cache[:, : page * 128], cache[:, page * 128 :]
    scales = scales.contiguous().view(torch.float32).reshape(-1, 1)
    return data.reshape(-1, 128), scales, 2


def indexer_q(torch, generator):
    tokens = PIECE // (64 * 128)
    q = values(torch, generator, tokens * 64, 128).view(tokens, 64, 128).bfloat16()
    data, scales = module("fused_indexer_q").fused_indexer_q_rope_quant(
        torch.arange(tokens),
        q,
        torch.randn(tokens, 64, generator=generator),
        torch.ones(tokens, 64).bfloat16(),
        1.0,
        1.0,
    )
    # With weights of one the folded weight is the scale of the head.
    return data.view(torch.uint8).reshape(-1, 128), scales.reshape(-1, 1), 2


def insert_cpp(torch, generator):
    fp8 = importlib.import_module("tests.kernels.fp8_dialect_utils")
    fnuz = importlib.import_module("vllm.platforms").current_platform.is_fp8_fnuz()
    blocks = values(torch, generator, PIECE * 448 // 512 // 64, 64).bfloat16().float()
    data = torch.cat([blocks.abs().amax(-1, keepdim=True), blocks], dim=-1)
    out = subprocess.run(
        [cpp_driver(fnuz)],
        input=data.numpy().tobytes(),
        capture_output=True,
        check=True,
    ).stdout
    out = torch.frombuffer(bytearray(out), dtype=torch.float32).view(-1, 66)
    return fp8.encode(out[:, 2:], fnuz), out[:, 1:2].to(torch.uint8), 1


@functools.cache
def cpp_driver(fnuz):
    """The program of the patch's test: per block a scale and the scaled values."""
    test = importlib.import_module("tests.kernels.test_deepseek_v4_fp8_dialect_cpp")
    program = Path(tempfile.mkdtemp(dir=FOLDER)) / "driver"
    macros = test.PASSES["gfx942" if fnuz else "gfx950"][0]
    command = [test.CXX, "-O2", "-x", "c++", f"-I{test.CSRC}", *macros, "-"]
    subprocess.run([*command, "-o", program], input=test.DRIVER, text=True, check=True)
    return program


WRITERS = {
    "SWA insert, C++": insert_cpp,
    "SWA insert": insert,
    "compressor, C4A": compressor_c4,
    "compressor, C128A": compressor_c128,
    "indexer K": indexer_k,
    "indexer Q": indexer_q,
}


def start(tree, folder):
    global FOLDER
    FOLDER = folder
    os.environ["TRITON_INTERPRET"] = "1"
    sys.path[:0] = [str(tree), str(ROOT / "ci")]
    from harness import bootstrap, triton_interpreter

    bootstrap.install()
    triton_interpreter.install()
    import torch

    torch.set_num_threads(1)
    # Nothing of vLLM may be imported for the first time while a platform is pretended.
    for name in ("cache_utils", "fused_compress_quant_cache", "fused_indexer_q"):
        module(name)


def compare(piece):
    """Write one piece in both dialects.  Returns what differs from the identity."""
    import torch
    from harness import platforms

    writer, seed = piece
    written = {}
    for gfx in ("gfx950", "gfx942"):
        with platforms.use(gfx):
            generator = torch.Generator().manual_seed(seed)
            written[gfx] = WRITERS[writer](torch, generator)
    ocp, ocp_scales, _ = written["gfx950"]
    fnuz, fnuz_scales, step = written["gfx942"]
    negative_zero = ocp == 0x80
    # Exponent bytes go up by one, scales in fp32 double.
    expected = ocp_scales + 1 if step == 1 else ocp_scales * step
    return writer, {
        "elements": ocp.numel(),
        "0x80 in OCP": int(negative_zero.sum()),
        "0x80 in FNUZ": int((fnuz == 0x80).sum()),
        "bytes that differ": int((fnuz != ocp.masked_fill(negative_zero, 0)).sum()),
        "scales": ocp_scales.numel(),
        "scales that differ": int((fnuz_scales != expected).sum()),
        "distinct bytes": sorted(set(ocp.unique().tolist())),
        "distinct scales": ocp_scales.unique().numel(),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument(
        "--tree", type=Path, required=True, help="the applied vLLM tree"
    )
    parser.add_argument("--millions", type=float, default=10, help="elements a writer")
    parser.add_argument(
        "--writer", action="append", choices=list(WRITERS), help="only this; repeatable"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    # 448 of the 512 elements of a token are stored as FP8.
    pieces = -(-int(arguments.millions * 1e6) // (PIECE * 448 // 512))
    writers = arguments.writer or list(WRITERS)
    work = [(writer, SEED + i) for writer in writers for i in range(pieces)]
    totals = {writer: {} for writer in writers}
    with (
        tempfile.TemporaryDirectory() as folder,
        concurrent.futures.ProcessPoolExecutor(
            arguments.jobs,
            multiprocessing.get_context("spawn"),
            start,
            (arguments.tree.resolve(), folder),
        ) as pool,
    ):
        futures = [pool.submit(compare, piece) for piece in work]
        for done, future in enumerate(concurrent.futures.as_completed(futures), 1):
            writer, found = future.result()
            total = totals[writer]
            seen = set(total.get("distinct bytes", [])) | set(found["distinct bytes"])
            scales = max(total.get("distinct scales", 0), found["distinct scales"])
            for name in found:
                if not name.startswith("distinct"):
                    total[name] = total.get(name, 0) + found[name]
            total |= {"distinct bytes": sorted(seen), "distinct scales": scales}
            print(f"{done}/{len(work)} {writer}", file=sys.stderr, flush=True)
    wrong = 0
    for writer, total in totals.items():
        total["distinct bytes"] = len(total["distinct bytes"])
        bad = total["0x80 in FNUZ"], total["bytes that differ"]
        bad = sum(bad) + total["scales that differ"]
        wrong += bad
        print(f"{'identity holds' if not bad else 'DIFFERS':15} {writer}: {total}")
    import torch
    import triton

    result = {
        "command": " ".join(["python", "bench/writer_identity.py", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat("T", "seconds"),
        "device": "CPU, Triton interpreter",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "seed": SEED,
        "writers": totals,
    }
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
