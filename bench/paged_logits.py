#!/usr/bin/env python3
"""MQA logits of the sparse indexer on a GPU: numbers, graphs, memory and speed.

The patched kernels run beside v0.22.0's torch fallback and v0.33.0's Triton kernel,
in one process and on the same data.

    python3 bench/paged_logits.py prepare FOLDER --patched build/v0.22.0 \\
        --v0.22.0 vllm --v0.33.0 vllm-0.33.0.tar.gz
    python3 FOLDER/paged_logits.py run FOLDER --output paged-logits.json [--sweep]

`run` exits with 1 if a number or a graph is wrong.  "keys" are rows of the indexer's
cache; DeepSeek-V4 has one per 4 tokens, so 32768 keys are a context of 128k tokens.
`--tiny` is for a look at the script itself: small shapes, and without a GPU Triton's
interpreter (TRITON_INTERPRET=1), where neither graphs nor times mean anything.
"""

import argparse
import datetime
import functools
import json
import statistics
import sys
import time
from pathlib import Path

import trees

HEADS, DIM, BLOCK_SIZE = 64, 128, 64
ROW_BYTES = DIM + 4
BLOCK_BYTES = BLOCK_SIZE * ROW_BYTES
BATCHES = (1, 8, 32, 128, 512)
# 512 to 32768 keys are DeepSeek-V4's contexts of 2k to 128k tokens.
KEYS = (512, 2048, 8192, 32768, 131072)
SWEEP_CASES = ((1, 512), (1, 131072), (8, 512), (8, 2048), (8, 8192), (8, 32768),
               (32, 512), (32, 8192), (32, 32768), (128, 512), (128, 2048),
               (128, 32768), (512, 512), (512, 2048), (512, 8192),
               (512, 32768))  # fmt: skip
TOPK = 512
MB = 1 << 20
AGAIN = "v0.33.0 again"  # the same code in a second graph, to see what noise is


def load(folder):
    """Load the trees; sets the globals of the rest of this script."""
    global ENV, torch, DEVICE, FNUZ, FP8, PATCHED, ours, ours_prefill, others
    ENV = trees.load(folder)
    torch, DEVICE, FNUZ, FP8 = ENV.torch, ENV.device, ENV.fnuz, ENV.fp8
    PATCHED = ENV.modules["triton_mqa_logits"]
    ours = PATCHED.fp8_paged_mqa_logits_triton
    ours_prefill = PATCHED.fp8_mqa_logits_triton
    old, new = ENV.modules["v0.22.0"], ENV.modules["v0.33.0"]
    others = {
        "v0.22.0": old.fp8_paged_mqa_logits_torch,
        "v0.33.0": new.rocm_fp8_paged_mqa_logits_triton,
        "v0.22.0 prefill": old.fp8_mqa_logits_torch,
    }


# ------------------------------------------------------------------ the data


def random_fp8(*shape):
    """Bytes that are finite in both dialects."""
    magnitude = torch.randint(0, 0x3D, shape, dtype=torch.uint8, device=DEVICE)
    sign = torch.randint(0, 2, shape, dtype=torch.uint8, device=DEVICE)
    return magnitude | (sign * (magnitude > 0)) << 7


@functools.lru_cache(1)
def pool(num_blocks):
    """[num_blocks, 64, 1, 132] uint8, block-flat."""
    cache = torch.empty(num_blocks, BLOCK_BYTES, dtype=torch.uint8, device=DEVICE)
    split = BLOCK_SIZE * DIM
    for part in cache.split(1 << 16):
        part[:, :split] = random_fp8(len(part), split)
        exponent = torch.randint(-6, 7, (len(part), BLOCK_SIZE), device=DEVICE)
        part[:, split:] = torch.exp2(exponent.float()).view(torch.uint8)
    return cache.view(num_blocks, BLOCK_SIZE, 1, ROW_BYTES)


def case(batch, keys, num_blocks, next_n=1):
    """Arguments of one call, but for the width of the logits."""
    q = random_fp8(batch, next_n, HEADS, DIM).view(FP8)
    weights = torch.randn(batch * next_n, HEADS, device=DEVICE)
    token = torch.arange(next_n, device=DEVICE)
    lengths = (keys - next_n + 1 + token).clamp(min=0).expand(batch, next_n)
    width = -(-keys // BLOCK_SIZE)
    tables = torch.randint(num_blocks, (batch, width), device=DEVICE)
    return [q, pool(num_blocks), weights, lengths.int().contiguous(), tables.int()]


def reference(arguments, width):
    """fp64 [rows, width] from the definition, -inf where there is no key."""
    q, cache, weights, lengths, tables = arguments
    rows = q.flatten(0, 1).double()
    flat = cache.flatten(1)
    out = torch.full((len(rows), width), -torch.inf, device=DEVICE).double()
    for row, length in enumerate(lengths.flatten().tolist()):
        blocks = flat[tables[row // q.shape[1]].long()]
        keys = blocks[:, : BLOCK_SIZE * DIM].contiguous().view(FP8).double()
        scale = blocks[:, BLOCK_SIZE * DIM :].contiguous().view(torch.float32)
        keys, scale = keys.view(-1, DIM)[:length], scale.double().flatten()[:length]
        score = (rows[row] @ keys.T).relu() * weights[row].double()[:, None]
        out[row, :length] = score.sum(0) * scale
    return out


def synchronize():
    if DEVICE == "cuda":
        torch.cuda.synchronize()


# --------------------------------------------------------------------- parts


def numbers(tiny):
    """Relative Frobenius error to fp64, and whether the rest of a row is -inf."""
    rows = []
    keys = 200 if tiny else 5000
    for next_n in (1, 2):
        arguments = case(3, keys, 512 if not tiny else 16, next_n)
        arguments[3] -= torch.tensor([[0], [keys // 3], [keys - next_n]]).to(DEVICE)
        width = keys + 321
        expected = reference(arguments, width)
        inside = expected.isfinite()
        for name in ("v0.22.0", "v0.33.0", "patched"):
            if name == "v0.22.0" and next_n > 1:
                continue  # it takes another layout there
            function = ours if name == "patched" else others[name]
            actual = function(*arguments, width).double()
            error = (actual - expected)[inside].norm() / expected[inside].norm()
            rows.append(
                {
                    "what": name,
                    "next_n": next_n,
                    "error": error.item(),
                    "rest_is_inf": bool((actual[~inside] == -torch.inf).all()),
                }
            )
    q = random_fp8(keys // 10, HEADS, DIM).view(FP8)
    k = random_fp8(keys, DIM).view(FP8)
    scale = torch.exp2(torch.randint(-6, 7, (keys,), device=DEVICE).float())
    weights = torch.randn(len(q), HEADS, device=DEVICE)
    starts = torch.randint(keys // 2, (len(q),), device=DEVICE).int()
    ends = starts + torch.randint(keys // 2, (len(q),), device=DEVICE).int()
    actual = ours_prefill(q, (k, scale), weights, starts, ends).double()
    expected = torch.stack(
        [
            ((x @ k.double().T).relu() * w.double()[:, None]).sum(0) * scale
            for x, w in zip(q.double(), weights, strict=True)
        ]
    )
    column = torch.arange(keys, device=DEVICE)
    inside = (column >= starts[:, None]) & (column < ends[:, None])
    error = (actual - expected)[inside].norm() / expected[inside].norm()
    rest = bool((actual[~inside] == -torch.inf).all())
    rows.append({"what": "patched prefill", "error": error.item(), "rest_is_inf": rest})
    for row in rows:
        ok = row["error"] < 5e-3 and row["rest_is_inf"]
        row["ok"] = ok or not row["what"].startswith("patched")
    return rows


def graphs(tiny):
    """Capture as a server does, with lengths of one query, so with no key. Replay at
    long contexts and back, and compare with eager, bit for bit."""
    if DEVICE == "cpu":
        return {"ok": True, "note": "no graphs on a CPU"}
    keys = 1000 if tiny else 32768
    arguments = case(32, keys, 1024 if tiny else 1 << 16)
    lengths = arguments[3]
    full = lengths.clone()
    checks = []
    for topk in (0, TOPK):
        lengths.zero_()
        ours(*arguments, keys, topk)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = ours(*arguments, keys, topk)
        for step in ("long", "mixed", "short", "long"):
            if step == "short":
                lengths.fill_(1)
            elif step == "mixed":
                lengths.copy_(torch.randint(keys, full.shape, device=DEVICE))
            else:
                lengths.copy_(full)
            logits.fill_(torch.nan)
            graph.replay()
            same = torch.equal(logits, ours(*arguments, keys, topk))
            checks.append({"topk": topk, "step": step, "equals_eager": same})
    return {"ok": all(check["equals_eager"] for check in checks), "checks": checks}


def host_reads():
    """Whether a call waits for the device."""
    if DEVICE == "cpu":
        return {"ok": True, "note": "not on a CPU"}
    found = {}
    arguments = case(4, 1000, 1024)
    calls = {
        "patched": lambda: ours(*arguments, 1000),
        "v0.33.0": lambda: others["v0.33.0"](*arguments, 1000),
        "v0.22.0": lambda: others["v0.22.0"](*arguments, 1000),
    }
    for name, call in calls.items():
        call()
        synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            call()
            found[name] = "none"
        except RuntimeError as error:
            found[name] = str(error).splitlines()[0]
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return {"ok": found["patched"] == "none", "found": found}


def peak(call):
    """Bytes allocated at most during a call, beyond what there was."""
    call()
    synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    synchronize()
    return torch.cuda.max_memory_allocated() - before


def memory(tiny):
    if DEVICE == "cpu":
        return {"ok": True, "note": "not on a CPU"}
    keys = 1024 if tiny else 32768
    rows = 128 * MB // keys if not tiny else 64  # logits of 512 MB
    logits = rows * keys * 4
    prefill = prefill_case(rows, keys)
    result = {
        "prefill": {"rows": rows, "keys": keys, "logits": logits},
        "paged": {"rows": 32, "keys": keys, "logits": 32 * keys * 4},
    }
    result["prefill"]["peak"] = peak(lambda: ours_prefill(*prefill))
    arguments = case(32, keys, 1024)
    result["paged"]["peak"] = peak(lambda: ours(*arguments, keys))
    few = prefill_case(64, keys)
    result["v0.22.0 prefill"] = {
        "rows": 64,
        "keys": keys,
        "logits": 64 * keys * 4,
        "peak": peak(lambda: others["v0.22.0 prefill"](*flat_scale(few))),
    }
    parts = result["prefill"], result["paged"]
    result["ok"] = all(part["peak"] <= part["logits"] + MB for part in parts)
    return result


def prefill_case(rows, keys):
    """The last `rows` queries of a sequence that has as many keys."""
    ends = torch.arange(keys - rows, keys, device=DEVICE).int() + 1
    scale = torch.ones(keys, 1, device=DEVICE)
    return (
        random_fp8(rows, HEADS, DIM).view(FP8),
        (random_fp8(keys, DIM).view(FP8), scale),
        torch.randn(rows, HEADS, device=DEVICE),
        torch.zeros_like(ends),
        ends,
    )


def flat_scale(arguments):
    """v0.22.0's fallback is wrong for a column of scales."""
    q, (k, scale), *rest = arguments
    return q, (k, scale.flatten()), *rest


def time_eager(call, repeats):
    call()
    times = []
    for _ in range(repeats):
        synchronize()
        start = time.perf_counter()
        call()
        synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def speed(tiny, batches, keys_list, num_blocks):
    rows = []
    widths = (None,) if tiny else (None, max(keys_list))
    for batch in batches:
        for keys in keys_list:
            for width, next_n in [(w, 1) for w in widths] + [(None, 2)]:
                if (next_n > 1 and batch != 32) or width == keys:
                    continue
                rows.append(speed_of(batch, keys, width or keys, next_n, num_blocks))
                show(rows[-1])
    return rows


def speed_of(batch, keys, width, next_n, num_blocks):
    traffic = batch * keys * ROW_BYTES + batch * next_n * width * 4
    copies = max(2, min(16, (1 << 30) // traffic))
    cases = [case(batch, keys, num_blocks, next_n) for _ in range(copies)]
    functions = {
        "patched": ours,
        "v0.33.0": others["v0.33.0"],
        AGAIN: others["v0.33.0"],
    }
    versions = {
        name: [functools.partial(function, *arguments, width) for arguments in cases]
        for name, function in functions.items()
    }
    us = trees.time_graphs(ENV, versions, 300 if traffic < 100 * MB else 20)
    # It cannot be captured. As wide as it needs to be, for one token a request.
    if width == keys and next_n == 1:
        call = functools.partial(others["v0.22.0"], *cases[0], width)
        us["v0.22.0"] = time_eager(call, 3)
    rate = traffic / us["patched"] * 1e-6 if DEVICE == "cuda" else 0.0
    return {
        "batch": batch,
        "keys": keys,
        "width": width,
        "next_n": next_n,
        "us": us,
        "bytes": traffic,
        "tb_per_s": rate,
    }


def show(row):
    us = row["us"]
    fallback = f"{us['v0.22.0']:10.0f}" if "v0.22.0" in us else " " * 10
    print(
        f"batch {row['batch']:4} x {row['next_n']} keys {row['keys']:6} "
        f"width {row['width']:6}: v0.22.0 {fallback} v0.33.0 {us['v0.33.0']:9.1f} "
        f"patched {us['patched']:9.1f} us, {row['tb_per_s']:.2f} TB/s",
        flush=True,
    )


def prefill_speed(tiny):
    rows = []
    shapes = ((8, 64),) if tiny else ((128, 8192), (4096, 32768), (512, 262144))
    for queries, keys in shapes:
        arguments = prefill_case(queries, keys)
        call = functools.partial(ours_prefill, *arguments)
        us = {"patched": trees.time_graph(ENV, [call], 10)}
        if queries <= 128:
            fallback = functools.partial(
                others["v0.22.0 prefill"], *flat_scale(arguments)
            )
            us["v0.22.0"] = time_eager(fallback, 3)
        flop = 2 * HEADS * DIM * int(arguments[4].sum())
        tflops = flop / us["patched"] * 1e-6 if DEVICE == "cuda" else 0.0
        rows.append({"queries": queries, "keys": keys, "us": us, "tflop_per_s": tflops})
        print(f"prefill {queries} x {keys}: {us}, {tflops:.0f} TFLOP/s", flush=True)
    return rows


class Launch:
    """A kernel with other launch options than its caller gives it."""

    def __init__(self, kernel, **options):
        self.kernel, self.options = kernel, options

    def __getitem__(self, grid):
        launch = self.kernel[grid]
        return lambda *args, **kwargs: launch(*args, **{**kwargs, **self.options})


def sweep(num_blocks):
    """Other launch shapes of the paged kernel, to see if another is better."""
    name = "_paged_mqa_logits_kernel"
    kernel = getattr(PATCHED, name)
    rows = []
    shapes = [
        (block_n, warps, stages, programs, tiles)
        for block_n, warps, stages in (
            *((64, 4, 2), (64, 4, 3), (64, 4, 4), (128, 4, 2), (128, 8, 3)),
        )
        for programs, tiles in ((1024, 64), (2048, 64), (1024, 256), (2048, 16))
    ]
    for batch, keys in SWEEP_CASES:
        copies = max(2, min(8, (1 << 30) // (batch * keys * ROW_BYTES)))
        cases = [case(batch, keys, num_blocks) for _ in range(copies)]
        theirs = others["v0.33.0"]
        calls = [functools.partial(theirs, *arguments, keys) for arguments in cases]
        us = {"v0.33.0": trees.time_graph(ENV, calls, 10)}
        calls = [functools.partial(ours, *arguments, keys) for arguments in cases]
        results = []
        for block_n, warps, stages, programs, tiles in shapes:
            PATCHED._BLOCK_N = block_n
            PATCHED._TARGET_PROGRAMS, PATCHED._MAX_TILES = programs, tiles
            options = {"num_warps": warps, "num_stages": stages}
            setattr(PATCHED, name, Launch(kernel, **options))
            measured = trees.time_graph(ENV, calls, 10)
            shape = {"block_n": block_n, "programs": programs, "max_tiles": tiles}
            results.append({**options, **shape, "us": measured})
        best = sorted(results, key=lambda result: result["us"])
        rows.append({"batch": batch, "keys": keys, "us": us, "results": results})
        print(f"sweep batch {batch} keys {keys}: {us}, best {best[:3]}", flush=True)
    return rows


# ---------------------------------------------------------------------- main


def run(args):
    load(args.folder)
    torch.manual_seed(0)
    result = {
        "command": " ".join(["python3", *sys.argv]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": ENV.name,
        "torch": torch.__version__,
        "triton": ENV.triton.__version__,
        "dialect": "fnuz" if FNUZ else "ocp",
        "heads": HEADS,
        "tiny": args.tiny,
    }
    failed = []
    for name, part in (
        ("numbers", lambda: numbers(args.tiny)),
        ("graphs", lambda: graphs(args.tiny)),
        ("host_reads", host_reads),
        ("memory", lambda: memory(args.tiny)),
    ):
        result[name] = part()
        parts = result[name] if isinstance(result[name], list) else [result[name]]
        print(f"{name}: {json.dumps(result[name])}", flush=True)
        if not all(part["ok"] for part in parts):
            failed.append(name)
    batches, keys = ((1, 3), (64, 192)) if args.tiny else (args.batches, args.keys)
    num_blocks = 32 if args.tiny else max(1 << 16, max(batches) * max(keys) // 64)
    if DEVICE == "cpu" and not args.tiny:
        sys.exit("speed needs a GPU")
    result["speed"] = speed(args.tiny, batches, keys, num_blocks)
    full = [row for row in result["speed"] if row["width"] == row["keys"]]
    result["summary"] = trees.summary(full)
    if DEVICE == "cuda":
        noise = [row["us"][AGAIN] / row["us"]["v0.33.0"] for row in full]
        result["summary"][AGAIN] = {"least": min(noise), "most": max(noise)}
    print(json.dumps(result["summary"], indent=1))
    result["prefill_speed"] = prefill_speed(args.tiny)
    if args.sweep:
        result["sweep"] = sweep(num_blocks)
    result["failed"] = failed
    if args.output:
        args.output.write_text(json.dumps(result, indent=1) + "\n")
    if failed:
        sys.exit(f"wrong: {', '.join(failed)}")


def _numbers(text):
    return tuple(int(n) for n in text.split(","))


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    trees.add_prepare(commands)
    command = commands.add_parser("run", help="measure")
    command.add_argument("folder", type=Path)
    command.add_argument("--output", type=Path, help="JSON")
    command.add_argument("--tiny", action="store_true")
    command.add_argument("--sweep", action="store_true", help="other launch shapes too")
    command.add_argument("--batches", type=_numbers, default=BATCHES)
    command.add_argument("--keys", type=_numbers, default=KEYS)
    command.set_defaults(function=run)
    args = parser.parse_args()
    args.function(args)


if __name__ == "__main__":
    main()
