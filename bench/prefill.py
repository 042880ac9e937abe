#!/usr/bin/env python3
"""Sparse prefill attention of DeepSeek-V4 on a GPU: numbers and speed.

The patched kernel runs beside v0.22.0's and v0.33.0's, in one process and on the same
data: 2048 queries with 640 keys each, out of keys gathered to bf16.

    python3 bench/prefill.py all --patched build/v0.22.0 --v0.22.0 vllm \\
        --v0.33.0 vllm-0.33.0.tar.gz --output prefill.json [--plot prefill.svg]
    python3 bench/prefill.py prepare FOLDER --patched build/v0.22.0 \\
        --v0.22.0 vllm --v0.33.0 vllm-0.33.0.tar.gz
    python3 FOLDER/prefill.py run FOLDER --output prefill.json
    python3 FOLDER/prefill.py sweep FOLDER --output prefill-sweep.json
    python3 bench/prefill.py plot prefill.json docs/prefill-h200.svg

The commands mean what they mean in `decode.py`, and the folder is the same.
"""

import argparse
import concurrent.futures
import functools
import json
import multiprocessing
import sys
import time


import decode
import trees
from decode import HEAD_DIM, HEADS, NOPE, SCALE, about, attempt, error, judged, write

NUM_KV = 65536
#: heads, queries, keys, ragged
SHAPES = [
    *((h, 2048, 640, False) for h in HEADS),
    *((h, 2048, 128, False) for h in HEADS),
    *((h, 2048, 2176, False) for h in HEADS),
    *((h, 2048, 640, True) for h in HEADS),
    *((h, 512, 640, False) for h in HEADS),
]
TINY = [(64, 2, 70, True), (8, 3, 40, False)]

#: block_h, block_k, num_stages, num_warps
TILES = {
    64: [(64, k, stages, warps) for k in (16, 32, 64) for stages in (1, 2, 3)
         for warps in (4, 8)],
    32: [(32, k, 2, warps) for k in (16, 32) for warps in (4, 8)],
    16: [(16, k, stages, warps) for k in (16, 32, 64) for stages in (1, 2, 3, 4)
         for warps in (2, 4, 8)],
}  # fmt: skip


def case(env, heads, queries, keys, ragged, seed=0, num_kv=NUM_KV):
    """Keys of a query are spread over all that were gathered, as selected ones are."""
    torch = env.torch
    generator = torch.Generator(env.device).manual_seed(seed)
    options = {"device": env.device, "generator": generator}
    lengths = torch.full((queries,), keys, device=env.device)
    if ragged:
        lengths = torch.randint(0, keys + 1, (queries,), **options)
    indptr = torch.zeros(queries + 1, dtype=torch.int32, device=env.device)
    indptr[1:] = lengths.cumsum(0)
    return {
        "q": (2 * torch.randn(queries, heads, HEAD_DIM, **options)).bfloat16(),
        "kv": torch.randn(num_kv, HEAD_DIM, **options).bfloat16(),
        "indices": torch.randint(0, num_kv, (queries * keys,), **options).int(),
        "indptr": indptr,
        "scale": SCALE,
        "attn_sink": torch.randn(heads, **options),
        "nope_head_dim": NOPE,
        "rope_head_dim": HEAD_DIM - NOPE,
    }


def reference(env, arguments, queries):
    """fp64 [len(queries), heads, 512] from the definition."""
    torch = env.torch
    rows = []
    for query in queries:
        start, end = arguments["indptr"][query : query + 2].tolist()
        slots = arguments["indices"][start:end].long()
        slots = slots[(slots >= 0) & (slots < len(arguments["kv"]))]
        key = arguments["kv"][slots].double()
        score = arguments["q"][query].double() @ key.T * SCALE
        sink = arguments["attn_sink"].double()[:, None]
        weights = torch.cat([score, sink], dim=1).softmax(-1)[:, :-1]
        rows.append(weights @ key)
    return torch.stack(rows)


def wrapper(env, tree):
    return env.modules[tree]._rocm_sparse_attn_prefill_ragged_triton


def numbers(env, tiny):
    rows = []
    for heads in HEADS + (17,):
        queries = 4 if tiny else 64
        arguments = case(env, heads, queries, 70 if tiny else 640, True, seed=heads)
        arguments["indices"][::7] = -1
        arguments["indices"][3::11] = 1 << 30
        arguments["indptr"][1] = 0  # no key for the first query
        expected = reference(env, arguments, range(queries))
        row = {"heads": heads}
        row |= judged(lambda tree: wrapper(env, tree)(**arguments), expected)
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


def floor_us(env, heads, queries, keys, num_kv):
    """keys: of all queries together. Each is read once for its query."""
    flop = 4 * keys * heads * HEAD_DIM
    size = 2 * HEAD_DIM * (keys + 2 * queries * heads)
    return trees.floor(env, flop, size)


def speed(env, shapes, num_kv, rows, save):
    for shape in shapes:
        heads, queries, keys, ragged = shape
        cases = [case(env, *shape, seed=seed, num_kv=num_kv) for seed in range(2)]
        us = {}
        for tree in ("v0.22.0", "v0.33.0", "patched"):
            calls = [functools.partial(wrapper(env, tree), **c) for c in cases]
            us[tree] = attempt(lambda: trees.time_graph(env, calls))
        total = sum(int(c["indptr"][-1]) for c in cases) / 2
        row = dict(zip(("heads", "queries", "keys", "ragged"), shape))
        floor = floor_us(env, heads, queries, total, num_kv)
        rows.append(row | {"us": us, "floor": floor})
        print(json.dumps(rows[-1]), flush=True)
        save()


def run(args):
    env = trees.load(args.folder)
    result = about(env) | {"numbers": numbers(env, args.tiny)}
    result["failed"] = [] if all(r["ok"] for r in result["numbers"]) else ["numbers"]
    result["speed"] = []
    save = functools.partial(write, args.output, result)
    speed(env, TINY if args.tiny else SHAPES, NUM_KV, result["speed"], save)
    result["summary"] = trees.summary(result["speed"])
    print(json.dumps(result["summary"], indent=1))
    write(args.output, result)
    if result["failed"]:
        sys.exit("wrong: numbers")


# ----------------------------------------------------------------- the sweep


def launch_call(env, arguments, tile, out=None):
    module = env.modules["triton_sparse_mla"]
    if out is None:
        out = env.torch.empty_like(arguments["q"])
    names = ("q", "kv", "indices", "indptr", "scale", "attn_sink")
    rest = {name: arguments[name] for name in names}
    module.sparse_prefill(**rest, out=out, tile=module.PrefillTile(*tile))
    return out


def check_tile(folder, tile):
    """In a process of its own: compile a tile and its largest error."""
    started = time.time()
    env = trees.load(folder)
    errors = {}
    for heads in (8, 16, 64) if tile[0] <= 16 else (64,):
        arguments = case(env, heads, 4, 200, True, seed=3)
        arguments["indices"][::7] = -1
        expected = reference(env, arguments, range(4))
        errors[heads] = error(launch_call(env, arguments, tile), expected)
    return {"errors": errors, "seconds": time.time() - started}


def sweep(args):
    deadline = time.time() + args.seconds
    tiles = [tile for group in TILES.values() for tile in group]
    tiles = tiles[:2] if args.tiny else tiles
    checks = {}
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(
        args.jobs, mp_context=context, max_tasks_per_child=1
    ) as executor:
        futures = {executor.submit(check_tile, args.folder, t): t for t in tiles}
        for future in concurrent.futures.as_completed(futures):
            tile = futures[future]
            checks[tile] = attempt(future.result)
            print("tile", tile, checks[tile], flush=True)
    env = trees.load(args.folder)
    result = about(env) | {"tiles": [[tile, checks[tile]] for tile in tiles]}
    rows = result["rows"] = []
    for shape in TINY if args.tiny else SHAPES:
        cases = [case(env, *shape, seed=seed) for seed in range(2)]
        outs = [env.torch.empty_like(c["q"]) for c in cases]
        row = dict(zip(("heads", "queries", "keys", "ragged"), shape)) | {"us": {}}
        for tile in tiles:
            if isinstance(checks[tile], str) or (tile[0] > 16 and shape[0] <= 16):
                continue
            if time.time() > deadline:
                row["cut"] = True
                break
            calls = [
                functools.partial(launch_call, env, c, tile, out)
                for c, out in zip(cases, outs)
            ]
            name = "/".join(map(str, tile))
            row["us"][name] = attempt(lambda: trees.time_graph(env, calls, 5))
        times = {k: v for k, v in row["us"].items() if isinstance(v, float)}
        row["best"] = sorted(times, key=times.get)[:6]
        rows.append(row)
        print(
            shape, [(name, round(times[name], 1)) for name in row["best"]], flush=True
        )
        write(args.output, result)


# ------------------------------------------------------------------ the plot


def plot(args):
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    matplotlib.rcParams["svg.hashsalt"] = "prefill"  # the same data, the same file
    result = json.loads(args.result.read_text())
    rows = [
        row
        for row in result["speed"]
        if (row["queries"], row["keys"], row["ragged"]) == (2048, 640, False)
    ]
    figure, axis = pyplot.subplots(figsize=(6, 4))
    for at, tree in enumerate(("v0.22.0", "v0.33.0", "patched")):
        places = [place + 0.27 * (at - 1) for place in range(len(rows))]
        bars = axis.bar(places, [row["us"][tree] for row in rows], 0.25, label=tree)
        axis.bar_label(bars, fmt="%.0f", fontsize=8)
    for place, row in enumerate(rows):
        if row["floor"]:
            axis.hlines(row["floor"], place - 0.4, place + 0.4, "k", "dotted")
    axis.set_xticks(range(len(rows)), [f"{row['heads']} heads" for row in rows])
    axis.set(yscale="log", ylabel="us, 2048 queries x 640 keys; dotted: floor")
    axis.set_title(f"Sparse prefill, {result['device']}")
    axis.legend()
    figure.tight_layout()
    figure.savefig(args.output, metadata={"Date": None})


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    decode.add_commands(parser, run, sweep, plot)
    args = parser.parse_args()
    args.function(args)


if __name__ == "__main__":
    main()
