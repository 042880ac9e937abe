#!/usr/bin/env python3
"""Sparse decode attention of DeepSeek-V4 on a GPU: numbers, graphs and speed.

The patched kernel runs beside v0.22.0's and v0.33.0's, in one process and on the same
data, v0.33.0's with its choices for gfx942.

    python3 bench/decode.py all --patched build/v0.22.0 --v0.22.0 vllm \\
        --v0.33.0 vllm-0.33.0.tar.gz --output decode.json [--plot decode.svg]

or in steps, the middle ones where there is nothing but the folder:

    python3 bench/decode.py prepare FOLDER --patched build/v0.22.0 \\
        --v0.22.0 vllm --v0.33.0 vllm-0.33.0.tar.gz
    python3 FOLDER/decode.py run FOLDER --output decode.json
    python3 FOLDER/decode.py sweep FOLDER --output decode-sweep.json [--seconds 300]
    python3 bench/decode.py plot decode.json docs/decode-h200.svg

`run` exits with 1 if a number or a graph is wrong. `sweep` times every tile of the
launch table, and more, with every useful number of splits. A plot needs matplotlib.
`--tiny` is for a look at the script itself: small shapes, and without a GPU Triton's
interpreter (TRITON_INTERPRET=1), where neither graphs nor times mean anything.
"""

import argparse
import concurrent.futures
import datetime
import functools
import json
import multiprocessing
import sys
import tempfile
import time
from pathlib import Path

import trees

PAGES, PAGE_SIZE = 4096, 64
TOKEN_BYTES = 584
NOPE, HEAD_DIM = 448, 512
SCALE = HEAD_DIM**-0.5
WINDOW, TOPK = 128, 512
HEADS, BATCHES = (64, 16, 8), (1, 8, 32, 128, 512)
#: ||out - reference|| / ||reference||
MAX_ERROR = 2.0e-3

#: heads, queries, keys of the window, selected keys, ragged
SHAPES = [(h, b, WINDOW, TOPK, False) for h in HEADS for b in BATCHES] + [
    (h, b, *rest)
    for h in HEADS
    for b in (8, 128)
    for rest in (
        (WINDOW, 0, False),
        (WINDOW, 1024, False),
        (WINDOW, 2048, False),
        (WINDOW, TOPK, True),
    )
]
TINY = [(64, 2, 40, 60, False), (8, 3, 40, 0, True), (16, 2, 40, 60, True)]

#: block_h, block_k, slices, prefetch, num_warps
TILES = {
    64: [
        (64, 64, 1, False, 8), (64, 64, 1, True, 8), (64, 32, 1, False, 8),
        (64, 32, 1, True, 8), (64, 128, 1, False, 8),
        (32, 32, 4, False, 4), (32, 16, 4, False, 4), (32, 16, 4, True, 4),
        (32, 32, 8, False, 8), (32, 32, 8, True, 8),
    ],
    16: [
        (16, 32, 4, False, 4), (16, 32, 4, True, 4), (16, 16, 4, False, 4),
        (16, 16, 4, True, 4), (16, 64, 4, False, 4), (16, 32, 8, False, 8),
        (16, 32, 8, True, 8), (16, 64, 8, False, 8), (16, 16, 8, False, 8),
    ],
}  # fmt: skip
#: lanes of a program, warps
REDUCE = ((64, 1), (128, 1), (128, 4), (256, 4), (512, 4), (512, 8))
SPLITS = (1, 2, 3, 4, 5, 7, 10, 14, 20, 40)


# ------------------------------------------------------------------ the data


@functools.lru_cache(1)
def pool(env, pages=PAGES):
    """[pages, 64, 584] uint8: normal values, scales of 2^-1 to 2^1."""
    torch = env.torch
    generator = torch.Generator(env.device).manual_seed(1)
    options = {"device": env.device, "generator": generator}
    cache = torch.empty(
        pages, PAGE_SIZE * TOKEN_BYTES, dtype=torch.uint8, device=env.device
    )
    split = PAGE_SIZE * 576
    for part in cache.split(512):
        data = part[:, :split].view(-1, PAGE_SIZE, 576)
        values = torch.randn(*data.shape[:2], NOPE, **options)
        data[..., :NOPE] = values.to(env.fp8).view(torch.uint8)
        rope = torch.randn(*data.shape[:2], 64, **options).bfloat16()
        data[..., NOPE:] = rope.view(torch.uint8)
        scales = torch.randint(126, 129, (len(part), PAGE_SIZE * 8), **options)
        part[:, split:] = scales.to(torch.uint8)
    return cache.view(pages, PAGE_SIZE, TOKEN_BYTES)


def case(env, heads, queries, main, extra, ragged, seed=0, pages=PAGES):
    """Arguments of a wrapper. The lists' buffers have a width per query, as the ones
    that outlive a captured graph; if `ragged`, the lengths are less."""
    torch = env.torch
    generator = torch.Generator().manual_seed(seed)
    cache = pool(env, pages)

    def lists(width):
        lengths = torch.full((queries,), width)
        if ragged:
            lengths = torch.randint(0, width + 1, (queries,), generator=generator)
        indptr = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        slots = torch.randint(
            0, pages * PAGE_SIZE, (queries * width,), generator=generator
        )
        return [x.int().to(env.device) for x in (slots, indptr)]

    q = 2 * torch.randn(queries, heads, HEAD_DIM, generator=generator)
    main_indices, main_indptr = lists(main)
    arguments = {
        "q": q.bfloat16().to(env.device),
        "main_cache": cache,
        "main_indices": main_indices,
        "main_indptr": main_indptr,
        "scale": SCALE,
        "attn_sink": torch.randn(heads, generator=generator).to(env.device),
        "nope_head_dim": NOPE,
        "rope_head_dim": HEAD_DIM - NOPE,
    }
    if extra:
        indices, indptr = lists(extra)
        arguments |= {
            "extra_cache": cache,
            "extra_indices": indices,
            "extra_indptr": indptr,
        }
    return arguments


def reference(env, arguments):
    """fp64 from the definition; -1 and what is beyond the cache is no key."""
    torch = env.torch
    cache = arguments["main_cache"]
    flat = cache.flatten(1)
    split = PAGE_SIZE * 576
    q = arguments["q"].double()
    out = torch.zeros_like(q)
    lists = [
        (arguments[f"{name}_indices"].tolist(), arguments[f"{name}_indptr"].tolist())
        for name in ("main", "extra")
        if f"{name}_indices" in arguments
    ]
    for query in range(len(q)):
        slots = [
            slot
            for indices, indptr in lists
            for slot in indices[indptr[query] : indptr[query + 1]]
            if 0 <= slot < cache.shape[0] * PAGE_SIZE
        ]
        if not slots:
            continue
        slots = torch.tensor(slots, device=env.device)
        page, token = slots // PAGE_SIZE, slots % PAGE_SIZE
        data = flat[:, :split].view(-1, PAGE_SIZE, 576)[page, token]
        scales = flat[:, split:].view(-1, PAGE_SIZE, 8)[page, token][:, :7].double()
        nope = data[:, :NOPE].contiguous().view(env.fp8).double()
        nope *= torch.exp2(scales - 127).repeat_interleave(64, dim=1)
        rope = data[:, NOPE:].contiguous().view(torch.bfloat16).double()
        key = torch.cat([nope, rope], dim=1)
        score = torch.cat(
            [q[query] @ key.T * SCALE, arguments["attn_sink"].double()[:, None]], dim=1
        )
        out[query] = score.softmax(-1)[:, :-1] @ key
    return out


def error(actual, expected):
    return ((actual.double() - expected).norm() / expected.norm()).item()


def floor_us(env, heads, queries, keys):
    """keys: of all queries together."""
    flop = 4 * keys * heads * HEAD_DIM
    size = keys * TOKEN_BYTES + 4 * queries * heads * HEAD_DIM
    return trees.floor(env, flop, size)


def keys_of(arguments):
    return sum(
        int(arguments[f"{name}_indptr"][-1])
        for name in ("main", "extra")
        if f"{name}_indptr" in arguments
    )


def wrapper(env, tree):
    return env.modules[tree]._rocm_sparse_attn_decode_ragged_triton


# --------------------------------------------------------------------- parts


def numbers(env, tiny):
    """Error of each tree, with lists that have -1, slots beyond the cache, duplicates
    and queries without keys."""
    rows = []
    for heads in HEADS + (17,):
        for extra in (0, TOPK):
            shape = (heads, 3 if tiny else 16, 40 if tiny else WINDOW, min(extra, 70))
            if not tiny:
                shape = shape[:3] + (extra,)
            arguments = case(env, *shape, True, seed=heads, pages=8 if tiny else PAGES)
            for name in ("main", "extra"):
                if f"{name}_indices" in arguments:
                    indices = arguments[f"{name}_indices"]
                    indices[::7] = -1
                    indices[3::11] = 1 << 30
                    indices[5::13] = indices[4]
            for name in ("main_indptr", "extra_indptr"):
                if name in arguments:
                    arguments[name][1] = 0  # no key for the first query
            expected = reference(env, arguments)
            row = {"heads": heads, "extra": extra}
            row |= judged(lambda tree: wrapper(env, tree)(**arguments), expected)
            rows.append(row)
    return rows


def judged(run, expected):
    """Errors of what run(tree) gives for each tree, and whether the patched one's is
    small enough."""
    errors = {
        tree: attempt(lambda tree=tree: error(run(tree), expected))
        for tree in ("v0.22.0", "v0.33.0", "patched")
    }
    ours = errors["patched"]
    return {"errors": errors, "ok": isinstance(ours, float) and ours <= MAX_ERROR}


def graphs(env, tiny):
    """Capture with lists that are empty, as padded rows are; replay longer and shorter
    ones, and compare with eager, bit for bit."""
    if env.device == "cpu":
        return [{"ok": True, "note": "no graphs on a CPU"}]
    torch = env.torch
    rows = []
    for heads in HEADS:
        arguments = case(env, heads, 8, WINDOW, TOPK, False)
        full = [arguments[f"{name}_indptr"].clone() for name in ("main", "extra")]
        live = [arguments[f"{name}_indptr"] for name in ("main", "extra")]
        for x in live:
            x.zero_()
        wrapper(env, "patched")(**arguments)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = wrapper(env, "patched")(**arguments)
        for part in (1, 3, 40, 1):
            for x, y in zip(live, full):
                x.copy_(y // part)
            graph.replay()
            same = torch.equal(out, wrapper(env, "patched")(**arguments))
            close = error(out, reference(env, arguments)) <= MAX_ERROR
            rows.append({"heads": heads, "part": part, "ok": same and close})
    return rows


def attempt(function):
    try:
        return function()
    except Exception as problem:
        return f"{type(problem).__name__}: {problem}"[:500]


def cases_of(env, shape, pages):
    heads, queries, main, extra, _ = shape
    copies = max(2, min(8, (64 << 20) // (queries * (main + extra) * TOKEN_BYTES)))
    return [case(env, *shape, seed=seed, pages=pages) for seed in range(copies)]


def speed(env, shapes, pages, rows, save):
    for shape in shapes:
        heads, queries, main, extra, ragged = shape
        cases = cases_of(env, shape, pages)
        us = {}
        for tree in ("v0.22.0", "v0.33.0", "patched"):
            calls = [functools.partial(wrapper(env, tree), **c) for c in cases]
            us[tree] = attempt(lambda: trees.time_graph(env, calls))
        keys = sum(keys_of(c) for c in cases) / len(cases)
        rows.append(
            {
                "heads": heads,
                "queries": queries,
                "main": main,
                "extra": extra,
                "ragged": ragged,
                "us": us,
                "floor": floor_us(env, heads, queries, keys),
            }
        )
        print(json.dumps(rows[-1]), flush=True)
        save()


def run(args):
    env = trees.load(args.folder)
    pages = 8 if args.tiny else PAGES
    result = about(env)
    failed = []
    for name, part in (("numbers", numbers), ("graphs", graphs)):
        result[name] = part(env, args.tiny)
        for row in result[name]:
            print(name, json.dumps(row), flush=True)
        if not all(row["ok"] for row in result[name]):
            failed.append(name)
    save = functools.partial(write, args.output, result)
    result["failed"], result["speed"] = failed, []
    speed(env, TINY if args.tiny else SHAPES, pages, result["speed"], save)
    result["summary"] = trees.summary(result["speed"])
    print(json.dumps(result["summary"], indent=1))
    write(args.output, result)
    if failed:
        sys.exit(f"wrong: {', '.join(failed)}")


def about(env):
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat("T", "seconds"),
        "device": env.name,
        "torch": env.torch.__version__,
        "triton": env.triton.__version__,
        "dialect": "fnuz" if env.fnuz else "ocp",
        "command": " ".join(["python3", *sys.argv]),
    }


def write(path, result):
    if path:
        partial = path.with_suffix(".part")
        partial.write_text(json.dumps(result, indent=1) + "\n")
        partial.replace(path)


# ----------------------------------------------------------------- the sweep


def launch_call(env, arguments, tile, splits, out=None):
    module = env.modules["triton_sparse_mla"]
    if out is None:
        out = env.torch.empty_like(arguments["q"])
    names = ("q", "main_cache", "main_indices", "main_indptr", "scale", "attn_sink")
    rest = {name: arguments[name] for name in names}
    for name in ("extra_cache", "extra_indices", "extra_indptr"):
        rest[name] = arguments.get(name)
    launch = module.DecodeLaunch(module.DecodeTile(*tile), splits)
    module.sparse_decode(**rest, out=out, launch=launch)
    return out


def check_tile(folder, tile, pages):
    """In a process of its own: compile a tile, which fills Triton's cache, and its
    largest error on lists of every kind."""
    started = time.time()
    env = trees.load(folder)
    errors = {}
    for heads in (8, 16, 64) if tile[0] <= 16 else (64,):
        for extra in (0, 200):
            arguments = case(env, heads, 3, WINDOW, extra, True, seed=3, pages=pages)
            arguments["main_indices"][::7] = -1
            arguments["main_indices"][3::11] = 1 << 30
            expected = reference(env, arguments)
            for splits in (1, 3):
                out = launch_call(env, arguments, tile, splits)
                errors[f"{heads}/{extra}/{splits}"] = error(out, expected)
    return {"errors": errors, "seconds": time.time() - started}


def sweep(args):
    deadline = time.time() + args.seconds
    tiles = sorted({tile for group in TILES.values() for tile in group})
    tiles = tiles[:2] if args.tiny else tiles
    pages = 8 if args.tiny else PAGES
    checks = {}
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(
        args.jobs, mp_context=context, max_tasks_per_child=1
    ) as executor:
        futures = {
            executor.submit(check_tile, args.folder, tile, pages): tile
            for tile in tiles
        }
        for future in concurrent.futures.as_completed(futures):
            tile = futures[future]
            checks[tile] = attempt(future.result)
            print("tile", tile, checks[tile], flush=True)
    env = trees.load(args.folder)
    result = about(env) | {"tiles": [[tile, checks[tile]] for tile in tiles]}
    rows = result["rows"] = []
    shapes = TINY if args.tiny else SHAPES
    for shape in shapes:
        heads, queries, main, extra, _ = shape
        cases = cases_of(env, shape, pages)
        outs = [env.torch.empty_like(c["q"]) for c in cases]
        row = dict(zip(("heads", "queries", "main", "extra", "ragged"), shape))
        row["us"] = {}
        for tile in tiles:
            if isinstance(checks[tile], str) or (tile[0] > 16 and heads <= 16):
                continue
            num_tiles = -(-main // tile[1]) + -(-extra // tile[1])
            programs = queries * -(-heads // tile[0])
            for splits in SPLITS:
                if splits > 1 and (splits > num_tiles or programs * splits > 1400):
                    continue
                if time.time() > deadline:
                    row["cut"] = True
                    break
                calls = [
                    functools.partial(launch_call, env, c, tile, splits, out)
                    for c, out in zip(cases, outs)
                ]
                name = "/".join(str(int(x)) for x in (*tile, splits))
                row["us"][name] = attempt(lambda: trees.time_graph(env, calls, 5))
        times = {k: v for k, v in row["us"].items() if isinstance(v, float)}
        row["best"] = sorted(times, key=times.get)[:6]
        row["floor"] = floor_us(env, heads, queries, queries * (main + extra))
        rows.append(row)
        best = [(name, round(times[name], 1)) for name in row["best"]]
        print(shape, f"{deadline - time.time():.0f} s left", best, flush=True)
        write(args.output, result)
    result["reduce"] = sweep_reduce(env, rows[:10], pages, deadline)
    write(args.output, result)


def sweep_reduce(env, rows, pages, deadline):
    """Other shapes of the kernel that joins the splits, at the best tile."""
    module = env.modules["triton_sparse_mla"]
    usual = module._REDUCE_LANES, module._REDUCE_WARPS
    found = []
    for row in rows:
        if not row["best"] or row["best"][0].endswith("/1"):
            continue
        block_h, block_k, slices, prefetch, warps, splits = map(
            int, row["best"][0].split("/")
        )
        tile = block_h, block_k, slices, bool(prefetch), warps
        shape = [row[x] for x in ("heads", "queries", "main", "extra", "ragged")]
        cases = cases_of(env, shape, pages)
        us = {}
        for lanes, reduce_warps in REDUCE:
            if time.time() > deadline:
                break
            module._REDUCE_LANES, module._REDUCE_WARPS = lanes, reduce_warps
            calls = [
                functools.partial(launch_call, env, c, tile, splits) for c in cases
            ]
            us[f"{lanes}/{reduce_warps}"] = attempt(
                lambda: trees.time_graph(env, calls)
            )
        found.append({"shape": shape, "tile": row["best"][0], "us": us})
        print("reduce", json.dumps(found[-1]), flush=True)
    module._REDUCE_LANES, module._REDUCE_WARPS = usual
    return found


# ------------------------------------------------------------------ the plot


def plot(args):
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    matplotlib.rcParams["svg.hashsalt"] = "decode"  # the same data, the same file
    result = json.loads(args.result.read_text())
    figure, axes = pyplot.subplots(1, len(HEADS), figsize=(12, 4), sharey=True)
    for axis, heads in zip(axes, HEADS):
        rows = [
            row
            for row in result["speed"]
            if (row["heads"], row["main"], row["extra"]) == (heads, WINDOW, TOPK)
            and not row["ragged"]
        ]
        batches = [row["queries"] for row in rows]
        for tree, style in (("v0.22.0", "s-"), ("v0.33.0", "^-"), ("patched", "o-")):
            times = [row["us"][tree] for row in rows]
            axis.plot(batches, times, style, label=tree)
        if all(row["floor"] for row in rows):
            floors = [row["floor"] for row in rows]
            axis.plot(batches, floors, "k:", label="floor")
        axis.set(xscale="log", yscale="log", xlabel="queries", title=f"{heads} heads")
        axis.set_xticks(batches, [str(batch) for batch in batches])
        axis.grid(alpha=0.3)
    axes[0].set_ylabel(f"us, {WINDOW} + {TOPK} keys")
    axes[0].legend()
    figure.suptitle(f"Sparse decode, {result['device']}")
    figure.tight_layout()
    figure.savefig(args.output, metadata={"Date": None})


# ---------------------------------------------------------------------- main


def add_commands(parser, run, sweep, plot):
    commands = parser.add_subparsers(required=True)
    trees.add_prepare(commands)
    command = commands.add_parser("run", help="measure")
    command.add_argument("folder", type=Path)
    command.add_argument("--output", type=Path, help="JSON")
    command.add_argument("--tiny", action="store_true")
    command.set_defaults(function=run)
    command = commands.add_parser("sweep", help="other launch shapes")
    command.add_argument("folder", type=Path)
    command.add_argument("--output", type=Path, help="JSON")
    command.add_argument("--tiny", action="store_true")
    command.add_argument("--seconds", type=float, default=300, help="budget")
    command.add_argument("--jobs", type=int, default=16, help="that compile")
    command.set_defaults(function=sweep)
    command = commands.add_parser("plot", help="draw the result of run")
    command.add_argument("result", type=Path)
    command.add_argument("output", type=Path, help="SVG")
    command.set_defaults(function=plot)
    command = commands.add_parser("all", help="prepare, run and plot")
    trees.add_trees(command)
    command.add_argument("--output", type=Path, required=True, help="JSON")
    command.add_argument("--plot", type=Path, help="SVG")
    command.add_argument("--tiny", action="store_true")
    command.set_defaults(function=functools.partial(everything, run, plot))


def everything(run, plot, args):
    with tempfile.TemporaryDirectory() as name:
        args.folder = Path(name)
        trees.prepare(args)
        run(args)
    if args.plot:
        args.result, args.output = args.output, args.plot
        plot(args)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_commands(parser, run, sweep, plot)
    args = parser.parse_args()
    args.function(args)


if __name__ == "__main__":
    main()
