"""Random searches for inputs that make gfx942's attention kernels wrong.

The kernels run as gfx942 launches them, interpreted; each is judged in float64 from its
definition, by PyTorch's own FP8 types. What no row, page or list owns is NaN. No launch
may leave its tensors, nor two of its programs write the same byte. A longer run by hand:

    STACK_SEARCH_SEEDS=300 TRITON_INTERPRET=1 PYTHONPATH=ci:build/v0.22.0 \\
        python -m pytest -p harness.plugin tests/gfx942/test_search.py
"""

from __future__ import annotations

import math
import os
import random
from dataclasses import dataclass

import pytest
import torch
from harness import sanitizer
from vllm.models.deepseek_v4.amd import rocm
from vllm.v1.attention.ops import rocm_aiter_mla_sparse as sparse
from vllm.v1.attention.ops import triton_mqa_logits, triton_sparse_mla
from vllm.v1.worker import workspace

SEEDS = range(int(os.environ.get("STACK_SEARCH_SEEDS", "8")))

INDEX_DIM, INDEX_BYTES = 128, 132
NOPE, ROPE, HEAD = 448, 64, 512
RECORD, SCALES = 576, 8
PAGE_SIZES = (1, 2, 3, 16, 64, 256)
# The most that FP8 products, added in float32, are off by.
LOGIT_ERROR = 1e-5
# bf16 probabilities and output.
ATTENTION_ERROR = 4e-3

search = pytest.mark.parametrize("seed", SEEDS)


@pytest.fixture
def gfx942(fake_platform, monkeypatch):
    """gfx942(fnuz): the platform, with FNUZ caches as it has them or with OCP ones."""

    def use(fnuz: bool) -> torch.dtype:
        platform = type(fake_platform("gfx942"))
        dtype = torch.float8_e4m3fnuz if fnuz else torch.float8_e4m3fn
        monkeypatch.setattr(platform, "is_fp8_fnuz", classmethod(lambda cls: fnuz))
        monkeypatch.setattr(platform, "fp8_dtype", classmethod(lambda cls: dtype))
        # Asserted before a launch, which the interpreter takes.
        monkeypatch.setattr(torch.Tensor, "is_cpu", property(lambda self: False))
        monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
        manager = workspace.WorkspaceManager(torch.device("cpu"))
        monkeypatch.setattr(workspace, "_manager", manager)
        (memory,) = manager.get_simultaneous(((1 << 22,), torch.float32))
        memory.fill_(math.nan)
        return dtype

    with sanitizer.check():
        yield use


@dataclass
class Choice:
    """What a seed chooses."""

    seed: int

    def __post_init__(self) -> None:
        self.of = random.Random(self.seed)
        self.generator = torch.Generator().manual_seed(self.seed)

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator)

    def codes(self, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        """Bytes that are finite, the largest and the smallest among them."""
        all_codes = torch.arange(256, dtype=torch.uint8)
        finite = all_codes[all_codes.view(dtype).float().isfinite()]
        at = torch.randint(len(finite), shape, generator=self.generator)
        return finite[at]

    def strided(self, x: torch.Tensor, fill: float = math.nan) -> torch.Tensor:
        """x, or x as a part of something larger in all dimensions but the last."""
        if self.of.random() < 0.5:
            return x.clone()
        shape = [n + self.of.randint(0, 3) for n in x.shape[:-1]]
        shape.append(x.shape[-1] + 16 * self.of.randint(0, 2))
        large = torch.full(shape, fill if x.is_floating_point() else 1 << 20)
        large = large.to(x.dtype)
        view = large[tuple(slice(n) for n in x.shape)]
        return view.copy_(x)

    def pages(self, count: int, page_bytes: int, fill: int):
        """Pages [n, page_bytes] of bytes `fill`, and `count` of their numbers.

        Sometimes the last ones are beyond 2^31 bytes, and most are never touched.
        """
        padding = self.of.choice([0, 64, 576])
        far = self.of.random() < 0.25
        total = 2**31 // (page_bytes + padding) + count + 2 if far else count + 2
        memory = torch.empty(total, page_bytes + padding, dtype=torch.uint8)
        if far:
            numbers = list(range(total - count // 2 - 1, total))
            numbers += list(range(1, count + 1 - len(numbers)))
        else:
            numbers = list(range(total))
        self.of.shuffle(numbers)
        memory[[0, *numbers]] = fill
        return memory[:, :page_bytes], numbers[:count]


def nan_byte(dtype: torch.dtype) -> int:
    return 0x80 if dtype == torch.float8_e4m3fnuz else 0xFF


def values(codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return codes.contiguous().view(dtype).double()


# ------------------------------------------------------------------- logits


def logits_of(q, weights, keys, scales):
    """fp64 [keys] of one query, and how far off fp32 sums may be."""
    products = q @ keys.T
    size = q.abs() @ keys.abs().T
    score = (weights[:, None] * products.relu()).sum(0) * scales
    bound = (weights[:, None].abs() * size).sum(0) * scales.abs()
    return score, bound * LOGIT_ERROR


def assert_row(actual, expected, bound, where):
    assert not actual.isnan().any(), where
    none = expected == -math.inf
    assert torch.equal(actual == -math.inf, none), where
    error = (actual.double() - expected)[~none].abs()
    assert (error <= bound[~none] + 1e-30).all(), where


@search
def test_paged_logits_search(monkeypatch, gfx942, seed):
    choice = Choice(seed)
    of = choice.of
    dtype = gfx942(fnuz=of.random() < 0.7)
    batch, next_n = of.randint(1, 5), of.randint(1, 4)
    heads = of.choice([1, 2, 7, 16, 33, 64, 64, 128])
    size = of.choice([1, 3, 16, 64, 64, 256])
    longest = of.choice([1, 63, 64, 65, 129, 300])
    width = of.choice([longest, longest + 1, 2 * longest + 70, max(1, longest - 5)])
    table_width = of.choice([-(-longest // size), 1, -(-longest // size) + 3])
    topk = of.choice([0, 0, 1, 8, 64, 1000])
    monkeypatch.setattr(triton_mqa_logits, "_TARGET_PROGRAMS", of.choice([1, 3, 1024]))
    monkeypatch.setattr(triton_mqa_logits, "_MAX_TILES", of.choice([1, 2, 64]))
    monkeypatch.setattr(triton_mqa_logits, "_BLOCK_FILL", of.choice([64, 1024]))

    lengths = torch.tensor(
        [[of.randint(-2, longest) for _ in range(next_n)] for _ in range(batch)]
    )
    per_token = of.random() < 0.6
    if not per_token:
        last = torch.tensor([[of.choice([0, 1, longest, of.randint(0, longest)])]])
        last = torch.cat([last] * batch)
        lengths = last - next_n + 1 + torch.arange(next_n)
    q = choice.codes(dtype, batch, next_n, heads, INDEX_DIM)
    weights = choice.normal(batch * next_n, heads)

    # Each request owns the pages of its longest row, and no key behind it.
    count = batch * table_width
    cache, numbers = choice.pages(count, size * INDEX_BYTES, nan_byte(dtype))
    table = torch.tensor(numbers).view(batch, table_width)
    for request in range(batch):
        for key in range(min(int(lengths[request].max()), table_width * size)):
            page, row = cache[table[request, key // size]], key % size
            page[row * INDEX_DIM :][:INDEX_DIM] = choice.codes(dtype, INDEX_DIM)
            scale = torch.tensor([2.0 ** of.randint(-8, 8)])
            at = size * INDEX_DIM + 4 * row
            page[at : at + 4] = scale.view(torch.uint8)
    # Some entries of the table are no pages.
    missing = set()
    for _ in range(of.choice([0, 0, 2])):
        at = of.randrange(batch), of.randrange(table_width)
        table[at] = of.choice([-1, len(cache), 0x7FFFFFFF, -(2**31)])
        missing.add(at)

    context = lengths if per_token else lengths[:, -1:]
    context = choice.strided(context.int())
    if not per_token and of.random() < 0.5:
        context = context[:, 0]
    actual = sparse.rocm_fp8_paged_mqa_logits(
        choice.strided(q).view(dtype),
        cache.unflatten(1, (size, 1, INDEX_BYTES)),
        choice.strided(weights),
        context,
        choice.strided(table.int()),
        torch.zeros(1, dtype=torch.int32),
        width,
        topk,
    )
    assert actual.shape == (batch * next_n, width)
    for row in range(batch * next_n):
        request, token = divmod(row, next_n)
        length = max(0, min(int(lengths[request, token]), width, table_width * size))
        expected = torch.full((width,), -math.inf, dtype=torch.float64)
        bound = torch.zeros(width, dtype=torch.float64)
        if length <= topk:
            expected[:length] = 0
        else:
            at = torch.tensor(
                [k for k in range(length) if (request, k // size) not in missing],
                dtype=torch.long,
            )
            pages = cache[table[request, at // size]]
            data = pages[:, : size * INDEX_DIM].unflatten(1, (size, INDEX_DIM))
            data = data[torch.arange(len(at)), at % size]
            scale = pages[:, size * INDEX_DIM : size * INDEX_BYTES].contiguous()
            scale = scale.view(torch.float32)[torch.arange(len(at)), at % size]
            expected[at], bound[at] = logits_of(
                values(q[request, token], dtype),
                weights[row].double(),
                values(data, dtype),
                scale.double(),
            )
        assert_row(actual[row], expected, bound, f"row {row}, {length} keys")


@search
def test_prefill_logits_search(monkeypatch, gfx942, seed):
    choice = Choice(seed)
    of = choice.of
    dtype = gfx942(fnuz=of.random() < 0.7)
    rows = of.choice([1, 2, 3, 17, 40])
    keys = of.choice([rows, 1, 64, 65, 200, 400])
    heads = of.choice([1, 2, 7, 16, 33, 64, 128])
    topk = of.choice([0, 0, 1, 8, 64])
    monkeypatch.setattr(triton_mqa_logits, "_TARGET_PROGRAMS", of.choice([1, 8, 1024]))
    monkeypatch.setattr(triton_mqa_logits, "_BLOCK_FILL", of.choice([64, 1024]))
    if of.random() < 0.5:
        starts = [of.randint(-3, keys + 3) for _ in range(rows)]
        ends = [of.randint(-3, keys + 3) for _ in range(rows)]
    else:  # a few sequences behind one another
        cuts = sorted(of.randint(0, keys) for _ in range(2))
        parts = list(zip([0, *cuts], [*cuts, keys]))
        owner = sorted(of.randrange(3) for _ in range(rows))
        starts = [parts[i][0] for i in owner]
        ends = [of.randint(*parts[i]) for i in owner]

    q = choice.codes(dtype, rows, heads, INDEX_DIM)
    weights = choice.normal(rows, heads)
    k = choice.codes(dtype, keys, INDEX_DIM)
    scales = 2.0 ** torch.randint(-8, 8, (keys,), generator=choice.generator)
    for key in range(keys):
        if not any(a <= key < b for a, b in zip(starts, ends)):
            k[key], scales[key] = nan_byte(dtype), math.nan
    actual = sparse.rocm_fp8_mqa_logits(
        choice.strided(q).view(dtype),
        (k.view(dtype), scales[:, None] if of.random() < 0.5 else scales),
        choice.strided(weights),
        torch.tensor(starts, dtype=torch.int32),
        torch.tensor(ends, dtype=torch.int32),
        topk,
    )
    for row, (start, end) in enumerate(zip(starts, ends)):
        start, end = max(start, 0), min(end, keys)
        expected = torch.full((keys,), -math.inf, dtype=torch.float64)
        bound = torch.zeros(keys, dtype=torch.float64)
        if 0 < end - start <= topk:
            expected[start:end] = 0
        elif end > start:
            expected[start:end], bound[start:end] = logits_of(
                values(q[row], dtype),
                weights[row].double(),
                values(k[start:end], dtype),
                scales[start:end].double(),
            )
        assert_row(actual[row], expected, bound, f"row {row}, [{start}, {end})")


# ---------------------------------------------------------------- attention


def attention_of(q, keys, sink, scale):
    """fp64 [heads, 512] of one query; a key is its own value."""
    if not len(keys):
        return torch.zeros(q.shape, dtype=torch.float64)
    scores = q.double() @ keys.T * scale
    if sink is not None:
        scores = torch.cat([scores, sink.double()[:, None]], dim=-1)
    return scores.softmax(-1)[:, : len(keys)] @ keys


def assert_attention(actual, expected, where):
    assert actual.isfinite().all(), where
    error = (actual.double() - expected).norm(dim=-1)
    # Beside a heavy sink all weights can be less than float32 has.
    bound = ATTENTION_ERROR * expected.norm(dim=-1) + 1e-30
    assert (error <= bound).all(), where


def random_sink(choice: Choice, heads: int):
    kind = choice.of.choice(["none", "usual", "usual", "extreme"])
    if kind == "none":
        return None
    sink = choice.normal(heads)
    if kind == "extreme":
        sink[:: choice.of.randint(1, 3)] = choice.of.choice([-math.inf, -1e4, 8.0])
    # vLLM pads the sinks of a rank.
    return torch.cat([sink, torch.full((choice.of.choice([0, 5]),), math.nan)])


class Cache:
    """fp8_ds_mla pages, NaN but for `slots`."""

    def __init__(self, choice: Choice, dtype: torch.dtype, magnitude: int):
        of = choice.of
        size = self.size = of.choice(PAGE_SIZES)
        used = -(-of.choice([3, 40]) // size)
        pages, numbers = choice.pages(used, size * (RECORD + SCALES), 0xFF)
        if pages.stride(0) % 8:
            pages = pages.contiguous()
        self.pages = pages.unflatten(1, (size, RECORD + SCALES))
        self.keys: dict[int, torch.Tensor] = {}
        for number in numbers:
            page = pages[number]
            for row in range(size):
                if of.random() < (0.05 if size > 64 else 0.3):
                    continue  # never written
                codes = choice.codes(dtype, NOPE)
                exponent = torch.randint(-3, 3, (7,), generator=choice.generator)
                exponent += magnitude - (6 if dtype == torch.float8_e4m3fn else 5)
                tail = (choice.normal(ROPE) * 2.0**magnitude).bfloat16()
                page[row * RECORD :][:NOPE] = codes
                page[row * RECORD + NOPE :][: 2 * ROPE] = tail.view(torch.uint8)
                at = size * RECORD + row * SCALES
                page[at : at + 7] = (exponent + 127).to(torch.uint8)
                page[at + 7] = 0
                nope = values(codes, dtype).unflatten(0, (7, 64))
                nope = nope * 2.0 ** exponent[:, None].double()
                key = torch.cat([nope.flatten(), tail.double()])
                self.keys[number * size + row] = key

    def rows(self, choice: Choice, count: int, longest: int, width: int):
        """Lists, and the ragged tensors that hold them with room for `width`."""
        of = choice.of
        slots = list(self.keys)
        bad = [-1, -(2**31), len(self.pages) * self.size, 2**31 - 1]
        lists = []
        for _ in range(count):
            length = of.choice([0, 1, longest, of.randint(0, longest)])
            few = of.sample(slots, min(len(slots), of.choice([1, 1000])))
            lists.append(
                [of.choice(few if of.random() < 0.8 else bad) for _ in range(length)]
            )
        flat = [slot for row in lists for slot in row]
        # What lies behind the lists belongs to an earlier step.
        flat += [of.choice(slots) for _ in range(count * width - len(flat))]
        bounds = torch.tensor([0] + [len(row) for row in lists]).cumsum(0)
        indices = torch.tensor(flat, dtype=torch.int32)
        return lists, indices, bounds.int()

    def read(self, slots: list[int]) -> torch.Tensor:
        kept = [self.keys[slot] for slot in slots if slot in self.keys]
        return torch.stack(kept) if kept else torch.zeros(0, HEAD).double()


def random_output(choice: Choice, queries: int, heads: int):
    """A slice of bf16 [queries, heads, 512] of a buffer of -7, and the buffer."""
    buffer = torch.full((queries + 2, heads + choice.of.choice([0, 3]), HEAD), -7.0)
    buffer = buffer.bfloat16()
    return buffer[1 : queries + 1, :heads], buffer


def assert_untouched(buffer, queries, heads):
    mask = torch.ones(buffer.shape[:2], dtype=torch.bool)
    mask[1 : queries + 1, :heads] = False
    assert (buffer[mask] == -7).all()


HEADS = (1, 2, 5, 8, 16, 17, 31, 33, 64, 65, 128)


@search
def test_sparse_decode_search(monkeypatch, gfx942, seed):
    choice = Choice(seed)
    of = choice.of
    dtype = gfx942(fnuz=of.random() < 0.8)
    heads, queries = of.choice(HEADS), of.randint(1, 4)
    main = Cache(choice, dtype, 0)
    extra = Cache(choice, dtype, of.choice([-12, 0, 4])) if of.random() < 0.7 else None
    longest = of.choice([3, 31, 32, 33, 90])
    main_rows, indices, indptr = main.rows(choice, queries, longest, 128)
    arguments = dict(swa_ragged_indices=indices, swa_ragged_indptr=indptr)
    extra_rows = [[] for _ in range(queries)]
    arguments |= dict(topk_ragged_indices=None, topk_ragged_indptr=None)
    if extra is not None:
        longest = of.choice([1, 16, 70])
        extra_rows, indices, indptr = extra.rows(choice, queries, longest, 512)
        arguments |= dict(topk_ragged_indices=indices, topk_ragged_indptr=indptr)
    if of.random() < 0.6:
        tile = of.choice([row[2] for row in triton_sparse_mla._DECODE_TABLE[True]])
        launch = triton_sparse_mla.DecodeLaunch(tile, of.choice([1, 2, 3, 7, 64]))
        monkeypatch.setattr(sparse, "decode_launch", lambda *args: launch)
    q = (choice.normal(queries, heads, HEAD) * of.choice([0.1, 1, 3])).bfloat16()
    sink = random_sink(choice, heads)
    scale = of.choice([HEAD**-0.5, 1e-3, 0.2])
    output, buffer = random_output(choice, queries, heads)
    sparse.rocm_sparse_attn_decode(
        q=choice.strided(q),
        kv_cache=None if extra is None else extra.pages,
        swa_k_cache=main.pages,
        swa_only=extra is None,
        attn_sink=sink,
        scale=scale,
        head_dim=HEAD,
        nope_head_dim=NOPE,
        rope_head_dim=ROPE,
        output=output,
        **arguments,
    )
    assert_untouched(buffer, queries, heads)
    for query in range(queries):
        keys = [main.read(main_rows[query])]
        if extra is not None:
            keys.append(extra.read(extra_rows[query]))
        expected = attention_of(
            q[query], torch.cat(keys), None if sink is None else sink[:heads], scale
        )
        assert_attention(output[query], expected, f"query {query} of {queries}")


@search
def test_sparse_prefill_search(gfx942, seed):
    choice = Choice(seed)
    of = choice.of
    gfx942(fnuz=True)
    heads, queries, rows = of.choice(HEADS), of.randint(1, 5), of.choice([1, 20, 90])
    kv = (choice.normal(rows, HEAD) * of.choice([0.1, 1, 8])).bfloat16()
    written = [row for row in range(rows) if row == 0 or of.random() < 0.8]
    lists = []
    for _ in range(queries):
        length = of.choice([0, 1, 15, 16, 17, of.randint(0, 80)])
        few = of.sample(written, min(len(written), of.choice([1, 1000])))
        bad = [-1, -(2**31), rows, 2**31 - 1]
        lists.append(
            [of.choice(few if of.random() < 0.8 else bad) for _ in range(length)]
        )
    for row in set(range(rows)) - set(written):
        kv[row] = math.nan
    q = (choice.normal(queries, heads, HEAD) * of.choice([0.1, 1, 3])).bfloat16()
    sink = random_sink(choice, heads)
    scale = of.choice([HEAD**-0.5, 1e-3, 0.2])
    flat = [slot for row in lists for slot in row] + [0] * of.randint(0, 9)
    bounds = torch.tensor([0] + [len(row) for row in lists]).cumsum(0).int()
    output, buffer = random_output(choice, queries, heads)
    sparse.rocm_sparse_attn_prefill(
        q=choice.strided(q),
        kv=choice.strided(kv)[:, None, :],
        ragged_indices=torch.tensor(flat, dtype=torch.int32),
        ragged_indptr=bounds,
        scale=scale,
        head_dim=HEAD,
        nope_head_dim=NOPE,
        rope_head_dim=ROPE,
        attn_sink=sink,
        output=output,
    )
    assert_untouched(buffer, queries, heads)
    for query, row in enumerate(lists):
        keys = kv[[slot for slot in row if 0 <= slot < rows]].double()
        expected = attention_of(
            q[query], keys, None if sink is None else sink[:heads], scale
        )
        assert_attention(output[query], expected, f"query {query} of {queries}")


# ------------------------------------------------------------------ indices


def random_topk(of: random.Random, width: int, keys: int) -> list[int]:
    """Entries in disorder: keys, some often, and what is none, anywhere."""
    kinds = (
        lambda: of.randrange(max(keys, 1)),
        lambda: of.randrange(max(keys, 1)),
        lambda: of.randrange(3),
        lambda: -1,
        lambda: of.choice([keys, keys + 1, 2**31 - 1, -(2**31), -5]),
    )
    only = of.choice([None, None, -1])
    return [of.choice(kinds)() if only is None else only for _ in range(width)]


@search
def test_decode_indices_search(gfx942, seed):
    choice = Choice(seed)
    of = choice.of
    gfx942(fnuz=True)
    ratio, block_size = of.choice([(4, 64), (4, 1), (4, 3), (128, 2)])
    requests, tokens = of.randint(1, 4), of.randint(1, 40)
    table_width, topk = of.randint(1, 6), of.choice([1, 5, 64, 513, 1025])
    table = [
        [of.choice([of.randrange(1, 9999), -1, 0]) for _ in range(table_width)]
        for _ in range(requests)
    ]
    owner = [of.randrange(requests) for _ in range(tokens)]
    positions = [of.randrange(2 * table_width * block_size * ratio + 2) for _ in owner]
    padded = [of.random() < 0.2 for _ in owner]
    rows = [random_topk(of, topk, (p + 1) // ratio) for p in positions]
    lens = torch.full((tokens,), -7, dtype=torch.int32)
    ragged = torch.full((tokens * topk,), -7, dtype=torch.int32)
    indptr = torch.full((tokens + 1,), -7, dtype=torch.int32)
    indptr[0] = 0
    rocm.compute_global_topk_ragged_indices_and_indptr(
        choice.strided(torch.tensor(rows, dtype=torch.int32)),
        torch.tensor(positions),
        torch.tensor([-1 if none else 3 for none in padded]),
        torch.tensor(owner, dtype=torch.int32),
        choice.strided(torch.tensor(table, dtype=torch.int32)),
        block_size,
        ratio,
        lens,
        ragged,
        indptr,
    )
    bounds = indptr.tolist()
    for token in range(tokens):
        expected = []
        for index in [] if padded[token] else rows[token]:
            page = index // block_size
            if not 0 <= index < (positions[token] + 1) // ratio or page >= table_width:
                continue
            number = table[owner[token]][page]
            if number >= 0:
                expected.append(number * block_size + index % block_size)
        actual = ragged[bounds[token] : bounds[token + 1]].tolist()
        assert actual == expected, token
        assert lens[token] == len(expected)


@search
def test_prefill_indices_search(gfx942, seed):
    choice = Choice(seed)
    of = choice.of
    gfx942(fnuz=True)
    ratio, window = of.choice([1, 4, 128]), of.choice([1, 3, 128])
    topk = 0 if ratio == 1 else of.choice([1, 5, 64, 513])
    lengths = []
    for _ in range(of.randint(1, 3)):
        seq_len = of.choice([1, window, window + 1, ratio, of.randint(1, 700)])
        lengths.append((seq_len, of.randint(1, min(seq_len, 4))))
    N = 0 if ratio == 1 else max(n // ratio for n, _ in lengths) + of.choice([0, 16])
    M = N + window + 4 + of.choice([0, 16])
    tokens = [
        (request, n - count + i)
        for request, (n, count) in enumerate(lengths)
        for i in range(count)
    ]
    rows = [random_topk(of, max(topk, 2), (p + 1) // ratio) for _, p in tokens]
    first = of.choice([0, 9])
    starts = torch.tensor([first] + [count for _, count in lengths]).cumsum(0).int()
    gathered = [count + min(n - count, window - 1) for n, count in lengths]
    ragged, indptr, lens = rocm.combine_topk_swa_indices_ragged(
        choice.strided(torch.tensor(rows, dtype=torch.int32)),
        starts,
        torch.tensor([n for n, _ in lengths], dtype=torch.int32),
        torch.tensor(gathered, dtype=torch.int32),
        window,
        ratio,
        topk,
        M,
        N,
    )
    bounds = indptr.tolist()
    for token, (request, position) in enumerate(tokens):
        first_row = N + gathered[request] - lengths[request][0]
        expected = [i for i in rows[token][:topk] if 0 <= i < (position + 1) // ratio]
        expected += [
            first_row + p for p in range(max(0, position - window + 1), position + 1)
        ]
        actual = ragged[bounds[token] : bounds[token + 1]].tolist()
        assert actual == [request * M + i for i in expected], token
        assert lens[token] == len(expected)
