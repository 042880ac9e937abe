#!/usr/bin/env python3
"""MQA logits of the sparse indexer on a GPU: numbers, graphs, memory and speed.

The patched kernels run beside v0.22.0's torch fallback and v0.33.0's Triton kernel,
in one process and on the same data.  Neither vLLM nor a network is needed where this
runs, only torch and Triton: a folder with the few files of each tree is made first.

    python3 bench/paged_logits.py prepare FOLDER --patched build/v0.22.0 \\
        --v0.22.0 vllm --v0.33.0 vllm-0.33.0.tar.gz
    python3 FOLDER/paged_logits.py run FOLDER --output paged-logits.json [--sweep]

A tree is a folder or an sdist (`unearth --no-binary --download . vllm==0.33.0` gets
one).  v0.33.0's file is only run from the folder; nothing of it is in this project.

`run` exits with 1 if a number or a graph is wrong.  "keys" are rows of the indexer's
cache; DeepSeek-V4 has one per 4 tokens, so 32768 keys are a context of 128k tokens.
`--tiny` is for a look at the script itself: small shapes, and without a GPU Triton's
interpreter (TRITON_INTERPRET=1), where neither graphs nor times mean anything.
"""

import argparse
import datetime
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import json
import shutil
import statistics
import sys
import tarfile
import time
from pathlib import Path
from types import SimpleNamespace

OPS = "vllm/v1/attention/ops/"
FILES = {
    "patched": ["triton_mqa_logits.py", "fp8_dialect.py"],
    "v0.22.0": ["rocm_aiter_mla_sparse.py"],
    "v0.33.0": ["rocm_aiter_mla_sparse.py"],
}

HEADS, DIM, BLOCK_SIZE = 64, 128, 64
ROW_BYTES = DIM + 4
BLOCK_BYTES = BLOCK_SIZE * ROW_BYTES
BATCHES = (1, 8, 32, 128, 512)
# 512 to 32768 keys are DeepSeek-V4's contexts of 2k to 128k tokens.
KEYS = (512, 2048, 8192, 32768, 131072)
SWEEP_CASES = ((1, 512), (1, 131072), (8, 512), (8, 2048), (8, 8192), (8, 32768),
               (32, 512), (32, 8192), (32, 32768), (128, 512), (128, 2048),
               (128, 32768), (512, 512), (512, 2048), (512, 8192), (512, 32768))  # fmt: skip
TOPK = 512
MB = 1 << 20


# ---------------------------------------------------------------- the folder


def prepare(args):
    for tree, names in FILES.items():
        target = args.folder / tree
        target.mkdir(parents=True, exist_ok=True)
        for name in names:
            (target / name).write_bytes(_read(args.trees[tree], OPS + name))
    shutil.copy(__file__, args.folder / Path(__file__).name)
    print(f"wrote {args.folder}")


def _read(tree, path):
    if tree.is_dir():
        return (tree / path).read_bytes()
    with tarfile.open(tree) as archive:
        for member in archive:
            if member.name.partition("/")[2] == path:
                return archive.extractfile(member).read()
    sys.exit(f"{tree} has no {path}")


# ------------------------------------------------- vLLM's modules, pretended


class Anything:
    """What vLLM's modules import and the functions measured here do not use."""

    def __call__(self, *args, **kwargs):  # also as a decorator
        return args[0] if args and callable(args[0]) else self

    def __getattr__(self, name):
        return self

    def __or__(self, other):  # in annotations
        return self

    __ror__ = __or__


class Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every module below `vllm`. `known` has the names that matter."""

    def __init__(self, known):
        self.known = known

    def find_spec(self, fullname, path=None, target=None):
        if fullname.partition(".")[0] != "vllm":
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        vars(module).update(self.known.get(module.__name__, {}))
        module.__getattr__ = self._anything

    @staticmethod
    def _anything(name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()


class Workspace:
    """v0.33.0 keeps its logits in a buffer that lives as long as the server."""

    def __init__(self, device):
        self.buffer = torch.empty(0, dtype=torch.uint8, device=device)

    def get_simultaneous(self, *specs):
        ((shape, dtype),) = specs
        size = dtype.itemsize
        for n in shape:
            size *= n
        if size > len(self.buffer):
            self.buffer = torch.empty(size, dtype=torch.uint8, device=DEVICE)
        return [self.buffer[:size].view(dtype).view(shape)]


def load(folder):
    """Import torch and the files; sets the globals of the rest of this script."""
    global torch, triton, DEVICE, FNUZ, FP8, PATCHED, ours, ours_prefill, others
    import torch
    import triton
    import triton.language

    DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
    if DEVICE == "cpu":
        _correct_interpreter()
    arch = ""
    if DEVICE == "cuda":
        arch = getattr(torch.cuda.get_device_properties(0), "gcnArchName", "")
    FNUZ = arch.startswith("gfx94")
    FP8 = torch.float8_e4m3fnuz if FNUZ else torch.float8_e4m3fn
    workspace = Workspace(DEVICE)
    platform = SimpleNamespace(
        fp8_dtype=lambda: FP8,
        is_fp8_fnuz=lambda: FNUZ,
        is_rocm=lambda: False,
        is_cuda=lambda: DEVICE == "cuda",
    )
    known = {
        "vllm.triton_utils": {"triton": triton, "tl": triton.language},
        "vllm.platforms": {"current_platform": platform},
        "vllm.utils.math_utils": {"cdiv": triton.cdiv},
        "vllm.v1.worker.workspace": {"current_workspace_manager": lambda: workspace},
    }
    sys.meta_path.insert(0, Stubs(known))
    dialect = _load_file(folder / "patched" / "fp8_dialect.py")
    known[OPS.replace("/", ".") + "fp8_dialect"] = vars(dialect)
    PATCHED = _load_file(folder / "patched" / "triton_mqa_logits.py")
    ours = PATCHED.fp8_paged_mqa_logits_triton
    ours_prefill = PATCHED.fp8_mqa_logits_triton
    old, new = (
        _load_file(folder / tree / "rocm_aiter_mla_sparse.py")
        for tree in ("v0.22.0", "v0.33.0")
    )
    others = {
        "v0.22.0": old.fp8_paged_mqa_logits_torch,
        "v0.33.0": new.rocm_fp8_paged_mqa_logits_triton,
        "v0.22.0 prefill": old.fp8_mqa_logits_torch,
    }


def _load_file(path):
    name = f"{path.parent.name}_{path.stem}".replace(".", "_")
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def _correct_interpreter():
    """Triton's interpreter does not compute FP8; the project's harness does."""
    for root in (Path(__file__).resolve().parent.parent, Path.cwd()):
        if (root / "ci" / "harness").is_dir():
            sys.path.insert(0, str(root / "ci"))
            from harness import triton_interpreter

            return triton_interpreter.install()
    sys.exit("without a GPU run this in the project, for ci/harness")


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


def time_graph(calls, repeats):
    """Median microseconds of one of `calls`, which are captured in one graph. Each has
    its own blocks, as the layers of a model have, so that none is in a cache."""
    if DEVICE == "cpu":
        return time_eager(calls[0], 1)
    calls[0]()
    synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for step in range(repeats + 2):
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        if step >= 2:
            times.append(start.elapsed_time(end))
    return statistics.median(times) * 1e3 / len(calls)


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
    us = {}
    for name in ("patched", "v0.33.0"):
        function = ours if name == "patched" else others[name]
        calls = [functools.partial(function, *arguments, width) for arguments in cases]
        us[name] = time_graph(calls, 20)
    # It cannot be captured. As wide as it needs to be, for one token a request.
    if width == keys and next_n == 1:
        call = functools.partial(others["v0.22.0"], *cases[0], width)
        us["v0.22.0"] = time_eager(call, 3)
    return {
        "batch": batch,
        "keys": keys,
        "width": width,
        "next_n": next_n,
        "us": us,
        "bytes": traffic,
        "tb_per_s": traffic / us["patched"] * 1e-6,
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
        us = {"patched": time_graph([call], 10)}
        if queries <= 128:
            fallback = functools.partial(
                others["v0.22.0 prefill"], *flat_scale(arguments)
            )
            us["v0.22.0"] = time_eager(fallback, 3)
        flop = 2 * HEADS * DIM * int(arguments[4].sum())
        tflops = flop / us["patched"] * 1e-6
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
        us = {"v0.33.0": time_graph(calls, 10)}
        calls = [functools.partial(ours, *arguments, keys) for arguments in cases]
        results = []
        for block_n, warps, stages, programs, tiles in shapes:
            PATCHED._BLOCK_N = block_n
            PATCHED._TARGET_PROGRAMS, PATCHED._MAX_TILES = programs, tiles
            options = {"num_warps": warps, "num_stages": stages}
            setattr(PATCHED, name, Launch(kernel, **options))
            measured = time_graph(calls, 10)
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
    device = torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU, interpreted"
    result = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": device,
        "torch": torch.__version__,
        "triton": triton.__version__,
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
    command = commands.add_parser("prepare", help="make the folder for `run`")
    command.add_argument("folder", type=Path)
    for tree in FILES:
        command.add_argument(f"--{tree}", dest=tree, type=Path, required=True)
    command.set_defaults(function=prepare)
    command = commands.add_parser("run", help="measure")
    command.add_argument("folder", type=Path)
    command.add_argument("--output", type=Path, help="JSON")
    command.add_argument("--tiny", action="store_true")
    command.add_argument("--sweep", action="store_true", help="other launch shapes too")
    command.add_argument("--batches", type=_numbers, default=BATCHES)
    command.add_argument("--keys", type=_numbers, default=KEYS)
    command.set_defaults(function=run)
    args = parser.parse_args()
    if args.function is prepare:
        args.trees = {tree: getattr(args, tree) for tree in FILES}
    args.function(args)


if __name__ == "__main__":
    main()
