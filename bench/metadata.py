#!/usr/bin/env python3
"""Decode metadata of DeepSeek-V4 on a GPU: time and launches per step, and graphs.

The builders for the sliding window, C4A and C128A of two vLLM trees get the same
seeded batches, each tree in a process of its own.

    python3 bench/metadata.py --before vllm --after build/v0.22.0 --output FILE.json \\
        [--plot FILE.svg]
    python3 bench/metadata.py --from FILE.json --plot FILE.svg

Needs a GPU with PyTorch, Triton and what vLLM imports.  Neither tree is built: vLLM
runs on its CPU platform, as in gpu_identity.py.  Exit code 1 if a build of the tree
`after` waits for the device, allocates, moves its tensors, needs more than 3 launches
or has other rows than `before`, or if a replayed graph differs from eager.

Times are medians in microseconds, for the three builders together.  *idle*: the host's
time while the device has nothing to do.  *done*: until the device is done, too.
*busy*: the host's time while the device works on the step before, which is what
async scheduling sees; a build that waits has that step's rest in it.  *rows*: done,
for the rows that each C4A layer makes inside of the graph.

A plot needs matplotlib. `--tiny` is for a look at the script itself: small shapes, and
without a GPU Triton's interpreter (TRITON_INTERPRET=1), where only rows and imports
mean anything.
"""

import argparse
import datetime
import hashlib
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parent.parent
SEED = 20261130

WINDOW, TOPK, HEADS = 128, 512, 64
SWA_PAGE, PAGE = 64, 256  # tokens
RATIOS = {"swa": 1, "c4a": 4, "c128a": 128}
MAX_SEQS, MAX_TOKENS = 512, 8192
POISON = 0x7FFFFFFF
BUSY_CYCLES = 4_000_000  # about 2 ms
GOAL = 8.0

# name: decodes, tokens of each, maximum length, length of a prefill in the same step
CASES = {
    "batch 1": (1, 1, 131072, 0),
    "batch 8": (8, 1, 131072, 0),
    "batch 32": (32, 1, 131072, 0),
    "batch 128": (128, 1, 131072, 0),
    "batch 512": (512, 1, 131072, 0),
    "batch 128, 2 tokens": (128, 2, 131072, 0),
    "batch 128, 1M tokens": (128, 1, 1048576, 0),
    "batch 127 and a prefill": (127, 1, 131072, 1024),
}
TINY = {"batch 3": (3, 1, 4096, 0), "batch 2 and a prefill": (2, 2, 4096, 5)}


# ------------------------------------------------------------------ one tree


def load():
    """Import the tree on PYTHONPATH; sets the globals of the rest of this script."""
    global torch, rocm, DEVICE, GPU, CommonAttentionMetadata
    global MLAAttentionSpec, SlidingWindowMLASpec, real_decode
    import torch
    from harness import bootstrap

    GPU = torch.cuda.is_available()
    DEVICE = torch.device("cuda:0" if GPU else "cpu")
    bootstrap.install(hide_gpus=not GPU)
    if not GPU:
        torch.Tensor.is_cpu = property(lambda tensor: False)
        torch.Tensor.pin_memory = lambda tensor: tensor
        from harness import triton_interpreter

        triton_interpreter.install()
    from vllm.models.deepseek_v4.amd import rocm
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.attention.backends.mla import flashmla_sparse, sparse_swa
    from vllm.v1.kv_cache_interface import MLAAttentionSpec, SlidingWindowMLASpec

    # What only NVIDIA's kernels need, and a whole model's configuration.
    flashmla_sparse.get_mla_dims = lambda config: None
    flashmla_sparse.num_compute_units = lambda index: 100
    sparse_swa.get_mla_metadata = lambda: (None, None)
    real_decode = rocm.rocm_sparse_attn_decode


class Batch:
    """A step: decodes with `next_n` tokens each, perhaps a prefill, then padding.

    Its tensors stay where they are; `fill` puts another step of this shape there.
    """

    def __init__(self, decodes, next_n, max_len, prefill):
        self.decodes, self.next_n, self.max_len = decodes, next_n, max_len
        self.prefill = prefill
        self.requests = decodes + (prefill > 0)
        self.num_tokens = decodes * next_n + prefill
        width = -(-max_len // SWA_PAGE)
        self.table = torch.zeros(self.requests, width, dtype=torch.int32, device=DEVICE)
        starts = [next_n * i for i in range(decodes + 1)] + [self.num_tokens]
        self.starts_cpu = torch.tensor(starts[: self.requests + 1], dtype=torch.int32)
        self.starts = self.starts_cpu.to(DEVICE)
        self.seq_lens = torch.zeros(self.requests, dtype=torch.int32, device=DEVICE)
        self.slots = torch.zeros(self.num_tokens, dtype=torch.int64, device=DEVICE)
        self.positions = torch.zeros_like(self.slots)
        self.topk = torch.full((MAX_TOKENS, TOPK), -1, dtype=torch.int32, device=DEVICE)

    def fill(self, rng, live=None, only_query=False):
        """`live` decodes; the others are padding. Returns self."""
        live = self.decodes if live is None else live
        seed = rng.randrange(1 << 30)
        generator = torch.Generator().manual_seed(seed)
        lengths, positions = [], []
        for request in range(self.decodes):
            length = self.next_n
            if not only_query:
                length = rng.choice([1, 127, 128, 129, rng.randint(1, self.max_len)])
            length = max(length, self.next_n) if request < live else 0
            lengths.append(length)
            positions += [max(length - self.next_n + j, 0) for j in range(self.next_n)]
        if self.prefill:
            length = rng.randint(self.prefill, self.max_len)
            lengths.append(length)
            positions += range(length - self.prefill, length)
        self.seq_lens.copy_(torch.tensor(lengths, dtype=torch.int32))
        self.positions.copy_(torch.tensor(positions))
        # A padded request has no tokens: the queries end with the live ones.
        starts = torch.arange(self.requests + 1, dtype=torch.int32) * self.next_n
        if self.prefill:
            starts[-1] = self.num_tokens
        else:
            starts.clamp_(max=live * self.next_n)
        self.starts_cpu.copy_(starts)
        self.starts.copy_(starts)
        self.slots.fill_(7)
        self.slots[live * self.next_n : self.decodes * self.next_n] = -1
        pages = torch.randint(1, 1 << 10, self.table.shape, generator=generator)
        self.table.copy_(pages)
        decodes = self.decodes * self.next_n
        topk = torch.rand(decodes, TOPK, generator=generator)
        keys = (torch.tensor(positions[:decodes])[:, None] + 1) // 4
        # A row is filled from the left, as by vLLM's top-k.
        topk = (topk * keys).int()
        topk[torch.arange(TOPK)[None] >= keys] = -1
        self.topk[:decodes] = topk.to(DEVICE)
        return self

    def common(self):
        return CommonAttentionMetadata(
            query_start_loc=self.starts,
            query_start_loc_cpu=self.starts_cpu,
            seq_lens=self.seq_lens,
            num_reqs=self.requests,
            num_actual_tokens=self.num_tokens,
            max_query_len=max(self.prefill, self.next_n),
            max_seq_len=self.max_len,
            block_table_tensor=self.table,
            slot_mapping=self.slots,
            positions=self.positions,
        )


class Engine:
    """The builders of a tree, and a layer of each kind that reads what they build."""

    def __init__(self, next_n, max_len):
        speculative = SimpleNamespace(
            num_speculative_tokens=next_n - 1, parallel_drafting=False
        )
        hf_config = SimpleNamespace(
            sliding_window=WINDOW, compress_ratios=[1, 4, 128], index_topk=TOPK
        )
        config = SimpleNamespace(
            scheduler_config=SimpleNamespace(
                max_num_batched_tokens=MAX_TOKENS, max_num_seqs=MAX_SEQS
            ),
            speculative_config=speculative if next_n > 1 else None,
            parallel_config=SimpleNamespace(decode_context_parallel_size=1),
            cache_config=SimpleNamespace(cache_dtype="fp8_ds_mla"),
            model_config=SimpleNamespace(
                hf_config=hf_config,
                max_model_len=max_len,
                get_num_attention_heads=lambda parallel_config: HEADS,
            ),
        )
        shape = dict(num_kv_heads=1, head_size=512, dtype=torch.uint8)
        window = SlidingWindowMLASpec(
            block_size=SWA_PAGE, sliding_window=WINDOW, **shape
        )
        builder = rocm.DeepseekV4ROCMAiterMLASparseMetadataBuilder
        window_builder = rocm.DeepseekV4ROCMAiterSparseSWAMetadataBuilder
        self.builders = {"swa": window_builder(window, ["swa"], config, DEVICE)}
        for kind in ("c4a", "c128a"):
            spec = MLAAttentionSpec(
                block_size=PAGE, compress_ratio=RATIOS[kind], **shape
            )
            self.builders[kind] = builder(spec, [kind], config, DEVICE)
        self.context = SimpleNamespace(attn_metadata={})
        rocm.get_forward_context = lambda: self.context

    def build(self, common):
        self.context.attn_metadata = {
            kind: builder.build(0, common) for kind, builder in self.builders.items()
        }

    def layer(self, kind, batch, **attributes):
        swa = SimpleNamespace(prefix="swa", kv_cache=None)
        values = dict(
            prefix=kind,
            compress_ratio=RATIOS[kind],
            topk_indices_buffer=batch.topk,
            kv_cache=None,
            swa_cache_layer=swa,
            attn_sink=None,
            scale=512**-0.5,
            head_dim=512,
            nope_head_dim=448,
            rope_head_dim=64,
        )
        return SimpleNamespace(**{**values, **attributes})

    def decode_only(self):
        """Leave prefill, which other benchmarks measure, out of the next forward."""
        for metadata in self.context.attn_metadata.values():
            metadata.num_prefills = 0

    def forward(self, layer, batch, q, out):
        rocm.DeepseekV4ROCMAiterMLASparseImpl.forward_mqa(
            layer, q, None, batch.positions, out
        )

    def tensors(self, kind, batch):
        """Indices and indptr that the decode kernel gets for a layer's own keys."""
        calls = []
        with decode_replaced(lambda **arguments: calls.append(arguments)):
            self.decode_only()
            q = torch.empty(batch.num_tokens, 1, 1, device=DEVICE)
            self.forward(self.layer(kind, batch), batch, q, q)
        name = "swa" if kind == "swa" else "topk"
        return [calls[0][f"{name}_ragged_{part}"] for part in ("indices", "indptr")]


@contextmanager
def decode_replaced(function):
    rocm.rocm_sparse_attn_decode = function
    try:
        yield
    finally:
        rocm.rocm_sparse_attn_decode = real_decode


def synchronize():
    if GPU:
        torch.cuda.synchronize()


def device_work(call):
    """Names of kernels and copies of a call, or None if they cannot be traced."""
    if not GPU:
        return None
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    call()
    synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        call()
        synchronize()
    names = [e.name for e in trace.events() if e.device_type == DeviceType.CUDA]
    return [name for name in names if "ynchronize" not in name] or None


def median_times(call, repeats, before=lambda: None):
    host, done = [], []
    for _ in range(repeats):
        before()
        start = time.perf_counter()
        call()
        returned = time.perf_counter()
        synchronize()
        done.append(time.perf_counter() - start)
        host.append(returned - start)
    return [round(statistics.median(times) * 1e6, 1) for times in (host, done)]


def time_case(case, tiny):
    decodes, next_n, max_len, prefill = case
    batch = Batch(*case).fill(random.Random(SEED))
    engine = Engine(next_n, max_len)
    common = batch.common()
    repeats = 3 if tiny else 200

    def build():
        engine.build(common)

    for _ in range(2 if tiny else 20):
        build()
    synchronize()
    idle, done = median_times(build, repeats)
    busy = None
    if GPU:
        busy, _ = median_times(
            build, repeats // 4, lambda: torch.cuda._sleep(BUSY_CYCLES)
        )
    launches = {
        kind: device_work(lambda builder=builder: builder.build(0, common))
        for kind, builder in engine.builders.items()
    }
    engine.decode_only()
    layer = engine.layer("c4a", batch)
    q = torch.empty(batch.num_tokens, 1, 1, device=DEVICE)
    with decode_replaced(lambda **arguments: None):
        rows = lambda: engine.forward(layer, batch, q, q)  # noqa: E731
        rows()
        _, rows_done = median_times(rows, repeats)
        launches["rows of a C4A layer"] = device_work(rows)
    return {
        "idle": idle,
        "done": done,
        "busy": busy,
        "rows": rows_done,
        "launches": {k: None if v is None else len(v) for k, v in launches.items()},
        "names": launches,
    }


def rows_of_batches(tiny):
    """Hash of the rows of random steps, poisoned before each build, and whether the
    tensors of a size stay."""
    digest, rng = hashlib.sha256(), random.Random(SEED)
    seen = {}
    for next_n in (1, 2, 3):
        max_len = 2048 if tiny else 131072
        size = 3 if tiny else 24
        engine = Engine(next_n, max_len)
        batch = Batch(size, next_n, max_len, 0)
        kept = []
        for _ in range(1 if tiny else 12):
            batch.fill(rng, live=rng.randint(1, size))
            for kind in RATIOS:
                engine.build(batch.common())
                indices, indptr = engine.tensors(kind, batch)
                indices.fill_(POISON)
                indptr[1:].fill_(POISON)
                engine.build(batch.common())
                tensors = indices, indptr = engine.tensors(kind, batch)
                kept.append(tensors)  # so that no address is used twice
                where = tuple((t.data_ptr(), tuple(t.shape)) for t in tensors)
                seen.setdefault((next_n, kind), set()).add(where)
                bounds = indptr.tolist()
                assert bounds == sorted(bounds) and bounds[0] == 0
                rows = indices[: bounds[-1]].tolist()
                digest.update(json.dumps([kind, bounds, rows]).encode())
    return digest.hexdigest(), all(len(places) == 1 for places in seen.values())


def waits_and_allocations(tiny):
    """What the detector says about 100 random builds, and what they allocated."""
    if not GPU:
        return None, None
    rng, found, allocated = random.Random(SEED), "none", 0
    for decodes, next_n, prefill in ((24, 1, 0), (16, 3, 0), (20, 2, 200)):
        engine = Engine(next_n, 131072)
        batch = Batch(decodes, next_n, 131072, prefill)
        engine.build(batch.fill(rng).common())
        for _ in range(2 if tiny else 34):
            live = None if prefill else rng.randint(1, decodes)
            common = batch.fill(rng, live=live).common()
            synchronize()
            before = torch.cuda.memory_stats()["allocation.all.allocated"]
            torch.cuda.set_sync_debug_mode("error")
            try:
                engine.build(common)
            except RuntimeError as error:
                found = str(error).splitlines()[0]
            finally:
                torch.cuda.set_sync_debug_mode("default")
            allocated += torch.cuda.memory_stats()["allocation.all.allocated"] - before
            if found != "none":
                return found, allocated
    return found, allocated


def graphs(tiny):
    """Capture decode as a server does, with sequences of one query. Then build other
    steps, longer and shorter, and compare replay with eager, bit for bit."""
    if not GPU:
        return None
    rng, wrong = random.Random(SEED), []
    generator = torch.Generator(DEVICE).manual_seed(SEED)

    def cache(page):
        blocks = torch.empty(1 << 10, page * 584, dtype=torch.uint8, device=DEVICE)
        # Finite FP8 codes, small bf16 values, scales of 2^-7.
        blocks.random_(0, 0x38, generator=generator)
        blocks[:, page * 576 :] = 120
        return blocks.view(1 << 10, page, 584)

    for kind in RATIOS:
        for next_n in (1, 2):
            engine = Engine(next_n, 32768)
            batch = Batch(32, next_n, 32768, 0)
            common = batch.fill(rng, only_query=True).common()
            caches = {
                "kv_cache": None if kind == "swa" else cache(PAGE // RATIOS[kind]),
                "swa_k_cache": cache(SWA_PAGE),
            }
            sink = torch.zeros(HEADS, device=DEVICE)
            layer = engine.layer(kind, batch, attn_sink=sink)
            q = torch.randn(batch.num_tokens, HEADS, 512, device=DEVICE).bfloat16()
            out = torch.empty_like(q)
            replace = lambda **kw: real_decode(**{**kw, **caches})  # noqa: B023, E731
            with decode_replaced(replace):
                engine.build(common)
                engine.forward(layer, batch, q, out)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    engine.forward(layer, batch, q, out)
                for step in range(4 if tiny else 12):
                    live = rng.randint(1, 32)
                    batch.fill(rng, live=live, only_query=step % 4 == 3)
                    engine.build(common)
                    out.fill_(torch.nan)
                    graph.replay()
                    replayed = out.clone()
                    out.fill_(torch.nan)
                    engine.forward(layer, batch, q, out)
                    if replayed.isnan().any() or not torch.equal(replayed, out):
                        wrong.append(f"{kind}, {next_n} tokens, step {step}")
    return wrong


def run_tree(output, tiny):
    load()
    if tiny:
        global MAX_SEQS, MAX_TOKENS
        MAX_SEQS, MAX_TOKENS = 8, 64
    rows, stay = rows_of_batches(tiny)
    waits, allocations = waits_and_allocations(tiny)
    result = {
        "rows": rows,
        "tensors_stay": stay,
        "waits": waits,
        "allocations": allocations,
        "graphs_wrong": graphs(tiny),
        "cases": {
            name: time_case(case, tiny)
            for name, case in (TINY if tiny else CASES).items()
        },
    }
    import triton

    result["device"] = torch.cuda.get_device_name() if GPU else "cpu"
    result["torch"], result["triton"] = torch.__version__, triton.__version__
    output.write_text(json.dumps(result))


# ---------------------------------------------------------------- both trees


def result_of(tree, folder, tiny):
    output = folder / "result.json"
    path = [str(tree), str(ROOT / "ci"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    environment["TRITON_CACHE_DIR"] = str(folder / "triton")
    command = [sys.executable, __file__, "--run", "--output", str(output)]
    subprocess.run(command + ["--tiny"] * tiny, check=True, env=environment)
    return json.loads(output.read_text())


def problems(before, after):
    """What is wrong with the tree `after`."""
    if after["rows"] != before["rows"]:
        yield "rows differ from those of the tree before"
    if not after["tensors_stay"]:
        yield "tensors of a size do not stay"
    if after["waits"] not in (None, "none"):
        yield f"a build waits: {after['waits']}"
    if after["allocations"]:
        yield f"builds allocate: {after['allocations']}"
    if after["graphs_wrong"]:
        yield f"replay differs from eager: {', '.join(after['graphs_wrong'])}"
    for case, found in after["cases"].items():
        for what, count in found["launches"].items():
            if count is not None and count > 3:
                yield f"{case}: {what} has {count} launches"


def mean_factor(before, after, what):
    factors = [
        before["cases"][case][what] / found[what]
        for case, found in after["cases"].items()
        if found[what]
    ]
    if not factors:
        return None
    return round(math.exp(statistics.mean(map(math.log, factors))), 2)


def plot(result, path):
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    matplotlib.rcParams["svg.hashsalt"] = "metadata"  # the same data, the same file
    cases = list(result["after"]["cases"])
    figure, axis = pyplot.subplots(figsize=(9, 4))
    for at, (tree, label) in enumerate((("before", "v0.22.0"), ("after", "patched"))):
        times = [result[tree]["cases"][case]["done"] for case in cases]
        places = [place + 0.4 * (at - 0.5) for place in range(len(cases))]
        bars = axis.bar(places, times, 0.38, label=label)
        axis.bar_label(bars, fmt="%.0f", fontsize=8)
    names = [case.replace(", ", ",\n").replace(" and", "\nand") for case in cases]
    axis.set_xticks(range(len(cases)), names)
    axis.tick_params(axis="x", labelsize=8)
    axis.set(yscale="log", ylabel="us for the three builders, until the device is done")
    axis.set_title(f"Decode metadata, {result['after']['device']}")
    axis.legend()
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", type=Path, help="vLLM tree without the stack")
    parser.add_argument("--after", type=Path, help="vLLM tree with the stack")
    parser.add_argument("--output", type=Path, help="JSON")
    parser.add_argument("--plot", type=Path, help="SVG")
    parser.add_argument(
        "--from", dest="result", type=Path, help="JSON of a run to plot"
    )
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--run", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        return run_tree(args.output, args.tiny)
    if args.result and args.plot:
        return plot(json.loads(args.result.read_text()), args.plot)
    if not (args.before and args.after):
        parser.error("--before and --after are needed, or --from and --plot")
    trees = {}
    for name in ("before", "after"):
        with tempfile.TemporaryDirectory() as folder:
            tree = getattr(args, name).resolve()
            trees[name] = result_of(tree, Path(folder), args.tiny)
    before, after = trees["before"], trees["after"]

    print(f"{'':24} {'idle':>15} {'done':>15} {'busy':>15} {'rows':>15}  launches")
    for case, found in after["cases"].items():
        old = before["cases"][case]
        times = [
            f"{old[what]} > {found[what]}" for what in ("idle", "done", "busy", "rows")
        ]
        counts = [
            f"{old['launches'][what]} > {count}"
            for what, count in found["launches"].items()
        ]
        print(f"{case:24} {' '.join(f'{t:>15}' for t in times)}  {', '.join(counts)}")
    factors = {
        what: mean_factor(before, after, what)
        for what in ("idle", "done", "busy", "rows")
    }
    print(f"times faster, geometric mean: {factors} (goal for done: {GOAL})")
    wrong = list(problems(before, after))
    result = {
        "command": " ".join(["python3", "bench/metadata.py", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat("T", "seconds"),
        "seed": SEED,
        "unit": "us, medians",
        "factors": factors,
        "wrong": wrong,
        **trees,
    }
    if args.output:
        args.output.write_text(json.dumps(result, indent=1) + "\n")
    if args.plot:
        plot(result, args.plot)
    for line in wrong:
        print(f"wrong: {line}")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
