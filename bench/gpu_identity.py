#!/usr/bin/env python3
"""Whether the stack leaves the kernels of other platforms as they were, on a GPU.

Runs every Triton kernel that the dialect patches touch from two vLLM trees on the
same seeded inputs, each tree in a process of its own, and compares the outputs byte
for byte.  With nvcc, also compiles the C++ K insert of both trees and compares the
machine code.

    python3 bench/gpu_identity.py --before TREE --after TREE [--output FILE]

Needs a GPU other than gfx94x, with PyTorch, Triton and what vLLM imports.  Neither
tree is built: vLLM runs on its CPU platform, whose FP8 dialect is the CUDA one.
"""

import argparse
import datetime
import hashlib
import importlib
import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SEED = 20261129


def kernels():
    """Yield (case, output tensors) for every kernel on seeded inputs."""
    import torch
    from harness import bootstrap

    # Neither tree is built, so vLLM's platform is the CPU: OCP, as on CUDA.
    bootstrap.install(hide_gpus=False)
    from vllm.models.deepseek_v4.common.ops import cache_utils
    from vllm.models.deepseek_v4.common.ops import fused_compress_quant_cache as comp
    from vllm.models.deepseek_v4.common.ops import fused_indexer_q as indexer_q
    from vllm.v1.attention.ops import rocm_aiter_mla_sparse as sparse

    # As on gfx950 and other ROCm GPUs: gfx942 has other kernels, see decode.py.
    sparse._TILED_BY_HEADS = False

    # These packages have names that are not their modules.
    qk_rmsnorm = importlib.import_module(
        "vllm.models.deepseek_v4.common.ops.fused_qk_rmsnorm"
    )
    mhc = importlib.import_module("vllm.model_executor.kernels.mhc.triton")

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(SEED)

    def randn(*shape, dtype=torch.float32):
        # Magnitudes over many binades, with zeros of both signs and underflows.
        x = torch.randn(*shape, device=device)
        x = x * 2.0 ** torch.randint(-14, 10, (*shape[:-1], 1), device=device)
        tiny = torch.rand(*shape, device=device) < 0.02
        return torch.where(tiny, x * 1e-7, x).to(dtype)

    def ints(*values, dtype=torch.int32):
        return torch.tensor(values, dtype=dtype, device=device)

    tokens = 4096
    for block_size in (1, 16, 64, 256):
        pages = 2 * tokens // block_size
        cache = torch.zeros(pages, block_size * 584, dtype=torch.uint8, device=device)
        slots = torch.randperm(2 * tokens, device=device)[:tokens]
        slots[::17] = -1
        kv = randn(tokens, 512, dtype=torch.bfloat16)
        cache_utils.quantize_and_insert_k_cache(kv, cache, slots, block_size)
        yield f"insert/block{block_size}", [cache]

        table = torch.randperm(pages, device=device, dtype=torch.int64)
        table = table.to(torch.int32).view(2, -1)
        lengths = ints(tokens - 3, tokens // 2)
        gathered = torch.zeros(2, tokens, 512, dtype=torch.bfloat16, device=device)
        view = cache.view(pages, block_size, 584)
        cache_utils.dequantize_and_gather_k_cache(
            gathered, view, lengths, None, table, block_size, 0
        )
        yield f"gather/block{block_size}", [gathered]

        queries, keys = 64, 640
        for heads in (8, 16, 17, 64):
            indices = torch.randint(-1, 2 * tokens, (queries * keys,), device=device)
            indptr = torch.arange(0, queries * keys + 1, keys, device=device)
            out = sparse._rocm_sparse_attn_decode_ragged_triton(
                q=torch.randn(queries, heads, 512, device=device).bfloat16(),
                main_cache=view,
                main_indices=indices.int(),
                main_indptr=indptr.int(),
                scale=512**-0.5,
                attn_sink=torch.randn(heads, device=device),
                nope_head_dim=448,
                rope_head_dim=64,
                extra_cache=view,
                extra_indices=indices.flip(0).int().contiguous(),
                extra_indptr=indptr.int(),
            )
            yield f"decode/block{block_size}/heads{heads}", [out]

    class Slots:
        slot_mapping = None

    # The MXFP4 kernels are left out: their inline PTX needs a newer GPU.
    # kernel: (head, ratio, quant block, token bytes, scale bytes, row bytes)
    for name, head, ratio, block, stride, scales, row in (
        ("c4a", 512, 4, 64, 576, 8, 584),
        ("c128a", 512, 128, 64, 576, 8, 584),
        ("indexer", 128, 4, 128, 128, 4, 132),
    ):
        overlap = ratio == 4
        width = head * (1 + overlap)
        count, state_block = 2048, 4 if overlap else 8
        state = randn(count // state_block, state_block, 2 * width)
        cache = torch.zeros(64, 64, row, dtype=torch.uint8, device=device)
        positions = torch.arange(count, device=device)
        slots = torch.full((count,), -1, dtype=torch.int64, device=device)
        ends = (positions + 1) % ratio == 0
        slots[ends] = torch.randperm(64 * 64, device=device)[: int(ends.sum())]
        Slots.slot_mapping = slots
        comp.compress_norm_rope_store_triton(
            state,
            count,
            torch.zeros(count, dtype=torch.int32, device=device),
            positions,
            positions,
            torch.arange(count // state_block, dtype=torch.int32, device=device)[None],
            state_block,
            width,
            torch.randn(count, 64, device=device),
            cache,
            Slots,
            {},
            head,
            64,
            ratio,
            overlap,
            False,
            torch.randn(head, device=device),
            1e-6,
            block,
            stride,
            scales,
        )
        yield f"compressor/{name}", [cache]

    count = 1024
    q, weights = indexer_q.fused_indexer_q_rope_quant(
        torch.arange(count, device=device),
        randn(count, 64, 128, dtype=torch.bfloat16),
        torch.randn(count, 64, device=device),
        torch.randn(count, 64, device=device).bfloat16(),
        0.1,
        0.2,
    )
    yield "indexer-q", [q, weights]

    for scale_format in ("ue8m0", None):
        cache = torch.zeros(64, 64, 132, dtype=torch.uint8, device=device)
        slots = torch.randperm(64 * 64, device=device)[:2048]
        k = randn(2048, 128, dtype=torch.bfloat16)
        sparse.indexer_k_quant_and_cache_triton(k, cache, slots, 128, scale_format)
        values = torch.zeros(1500, 128, dtype=torch.float8_e4m3fn, device=device)
        scales = torch.zeros(1500, 4, dtype=torch.uint8, device=device)
        table = torch.randperm(64, device=device).to(torch.int32).view(2, 32)
        owner = (torch.arange(1500, device=device) >= 900).to(torch.int32)
        sparse.cp_gather_indexer_k_quant_cache_triton(
            cache, values, scales, table, ints(0, 900, 1500), owner
        )
        yield f"indexer-k/{scale_format}", [cache, values, scales]

    q = torch.randn(64, 64, 128, device=device).to(torch.float8_e4m3fn)
    k = torch.randn(512, 128, device=device).to(torch.float8_e4m3fn)
    starts = torch.zeros(64, dtype=torch.int32, device=device)
    ends = torch.arange(1, 65, dtype=torch.int32, device=device) * 8
    weights = torch.randn(64, 64, device=device)
    scale = torch.rand(512, device=device)
    logits = sparse.fp8_mqa_logits_torch(q, (k, scale), weights, starts, ends)
    yield "prefill-logits-torch", [logits]

    pages = torch.zeros(64, 64, 1, 132, dtype=torch.uint8, device=device)
    flat = pages.view(64, -1)
    flat[:, : 64 * 128].copy_(
        torch.randn(64, 64 * 128, device=device)
        .to(torch.float8_e4m3fn)
        .view(torch.uint8)
    )
    flat[:, 64 * 128 :].copy_(torch.rand(64, 64, device=device).view(torch.uint8))
    table = torch.randperm(64, device=device).to(torch.int32).view(4, 16)
    logits = sparse.fp8_paged_mqa_logits_torch(
        torch.randn(4, 1, 64, 128, device=device).to(torch.float8_e4m3fn),
        pages,
        torch.randn(4, 64, device=device),
        ints(1000, 1, 64, 65),
        table,
        1024,
    )
    yield "paged-logits-torch", [logits]

    rows = randn(1000, 2048, dtype=torch.bfloat16)
    norm_weights = [torch.rand(n, device=device).bfloat16() for n in (1536, 512)]
    normed = qk_rmsnorm.fused_q_kv_rmsnorm(
        rows[:, :1536], rows[:, 1536:], *norm_weights, 1e-6
    )
    yield "qk-rmsnorm", list(normed)

    hidden, streams = 4096, 4
    out = torch.empty(256, hidden, dtype=torch.bfloat16, device=device)
    mhc.hc_head_reduce_triton_kernel(
        torch.randn(256, streams, hidden, device=device).bfloat16(),
        torch.randn(streams, streams * hidden, device=device) * 1e-2,
        torch.ones(1, device=device),
        torch.zeros(streams, device=device),
        out,
        1e-6,
        1e-6,
    )
    yield "hc-head", [out]


def run_tree(output):
    import torch

    found = {}
    for case, tensors in kernels():
        torch.cuda.synchronize()
        digest = hashlib.sha256()
        for tensor in tensors:
            digest.update(tensor.contiguous().view(torch.uint8).cpu().numpy().tobytes())
        found[case] = {
            "sha256": digest.hexdigest(),
            "bytes": sum(t.numel() * t.element_size() for t in tensors),
        }
    import triton

    about = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cases": found,
    }
    output.write_text(json.dumps(about))


def outputs_of(tree, folder):
    """Run the kernels of one tree in a process of its own."""
    output = folder / f"{tree.name}.json"
    path = [str(tree), str(ROOT / "ci"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    environment["TRITON_CACHE_DIR"] = str(folder / f"triton-{tree.name}")
    command = [sys.executable, __file__, "--run", "--output", str(output)]
    subprocess.run(command, check=True, env=environment)
    return json.loads(output.read_text())


def machine_code(tree, folder):
    """Hash of the C++ K insert as nvcc compiles it for sm_90."""
    import torch

    source = "csrc/fused_deepseek_v4_qnorm_rope_kv_insert_kernel.cu"
    include = Path(torch.__file__).parent / "include"
    # Compiled at the same path, so that no file name can tell the trees apart.
    place = folder / "cubin"
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(tree / "csrc", place / "csrc")
    binary = place / "insert.cubin"
    subprocess.run(
        [
            *("nvcc", "-cubin", "-arch=sm_90", "-O3", "-std=c++20", "-DNDEBUG"),
            *("-DENABLE_FP8", "-DTORCH_EXTENSION_NAME=_C", "--expt-relaxed-constexpr"),
            *("--expt-extended-lambda", "-U__CUDA_NO_HALF_OPERATORS__"),
            *("-U__CUDA_NO_HALF_CONVERSIONS__", f"-I{place / 'csrc'}"),
            *("-isystem", include, "-isystem", include / "torch/csrc/api/include"),
            *("-isystem", sysconfig.get_paths()["include"]),
            *("-o", binary, place / source),
        ],
        check=True,
    )
    return hashlib.sha256(binary.read_bytes()).hexdigest()


def compare(before, after, output):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        old, new = outputs_of(before, folder), outputs_of(after, folder)
        rows = {
            case: {
                "bytes": old["cases"][case]["bytes"],
                "before": old["cases"][case]["sha256"],
                "after": new["cases"][case]["sha256"],
            }
            for case in old["cases"]
        }
        if shutil.which("nvcc"):
            rows["c++ insert, sm_90 machine code"] = {
                "bytes": None,
                "before": machine_code(before, folder),
                "after": machine_code(after, folder),
            }
    for case, row in rows.items():
        row["identical"] = row["before"] == row["after"]
        print(f"{'identical' if row['identical'] else 'DIFFERS':10} {case}")
    result = {
        "command": " ".join(["python3", "bench/gpu_identity.py", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat("T", "seconds"),
        "device": old["device"],
        "torch": old["torch"],
        "triton": old["triton"],
        "python": platform.python_version(),
        "seed": SEED,
        "cases": rows,
    }
    if output:
        output.write_text(json.dumps(result, indent=1) + "\n")
    return all(row["identical"] for row in rows.values())


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--before", type=Path, help="vLLM tree without the stack")
    parser.add_argument("--after", type=Path, help="vLLM tree with the stack")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--run", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        return run_tree(arguments.output)
    if not (arguments.before and arguments.after):
        parser.error("--before and --after are needed")
    same = compare(
        arguments.before.resolve(), arguments.after.resolve(), arguments.output
    )
    sys.exit(0 if same else 1)


if __name__ == "__main__":
    main()
