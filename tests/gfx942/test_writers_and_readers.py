"""What each writer of a DeepSeek-V4 cache stores, through every reader of that cache.

Writers: the Triton insert, the compressor (C4A, C128A, indexer), and bytes from the
definition of the format, which is what the C++ writer of the window's keys is held to by
its own test. Readers: gather, both decode kernels, and the Triton and torch logits of
prefill and decode. The reference is float64 keys that were never quantized, so a reader
of another dialect, which is off by two, cannot pass.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from vllm.models.deepseek_v4.common.ops import cache_utils, fused_indexer_q
from vllm.models.deepseek_v4.common.ops import fused_compress_quant_cache as compressor
from vllm.v1.attention.ops import rocm_aiter_mla_sparse as sparse
from vllm.v1.attention.ops.fp8_dialect import Fp8Cache

NOPE, ROPE, HEAD, INDEX = 448, 64, 512, 128
RECORD = {HEAD: 584, INDEX: 132}
EPS = 1e-6
# Of the compressed keys, which are in one attention with the others.
SMALL = 2.0**-12
TOKENS = 7

dialects = pytest.mark.parametrize("fnuz", [False, True], ids=["ocp", "fnuz"])
# Tokens of a page, and whether its byte offset passes 2^31.
pages_of = pytest.mark.parametrize(
    ("size", "far"), [(1, False), (16, False), (64, False), (256, False), (64, True)]
)


@pytest.fixture
def gfx942(fake_platform, monkeypatch):
    def use(fnuz: bool) -> None:
        platform = type(fake_platform("gfx942"))
        dtype = torch.float8_e4m3fnuz if fnuz else torch.float8_e4m3fn
        monkeypatch.setattr(platform, "is_fp8_fnuz", classmethod(lambda cls: fnuz))
        monkeypatch.setattr(platform, "fp8_dtype", classmethod(lambda cls: dtype))
        # Asserted before a launch, which the interpreter takes.
        monkeypatch.setattr(torch.Tensor, "is_cpu", property(lambda self: False))
        torch.manual_seed(0)

    return use


class Pages:
    """A cache, NaN where nothing is written, and where TOKENS tokens are in it.

    The sequence ends within a page, and one token more has no slot.
    """

    def __init__(self, dims: int, size: int, fnuz: bool, far: bool):
        self.size, self.fnuz = size, fnuz
        used = -(-TOKENS // size)
        page = size * RECORD[dims]
        count = 2**31 // page + used + 2 if far else used + 2
        self.cache = torch.empty(count, size, RECORD[dims], dtype=torch.uint8)
        order = torch.arange(count - used - 1, count)
        order = order[torch.randperm(used + 1)]
        self.cache[order] = 0x80 if fnuz else 0xFF
        self.cache[0] = 0x80 if fnuz else 0xFF
        self.table = order[:used].int()[None]
        at = torch.arange(TOKENS)
        self.slots = self.table[0][at // size].long() * size + at % size

    def slots_and_none(self) -> torch.Tensor:
        return torch.cat([self.slots, torch.tensor([-1])])


def rotate(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """Pairs of the last 64 lanes of fp64 [tokens, ..., n]."""
    cos, sin = cos_sin.double().chunk(2, dim=-1)
    shape = (len(x),) + (1,) * (x.dim() - 2) + (ROPE // 2,)
    cos, sin = cos.view(shape), sin.view(shape)
    even, odd = x[..., -ROPE::2], x[..., -ROPE + 1 :: 2]
    pairs = torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1)
    return torch.cat([x[..., :-ROPE], pairs.flatten(-2)], dim=-1)


def angles(count: int) -> torch.Tensor:
    angle = torch.rand(count, ROPE // 2) * 6
    return torch.cat([angle.cos(), angle.sin()], dim=-1)


def by_format(pages: Pages) -> torch.Tensor:
    """Keys whose bytes come from the definition. [TOKENS, 512] fp64."""
    dtype = torch.float8_e4m3fnuz if pages.fnuz else torch.float8_e4m3fn
    limit = 224.0 if pages.fnuz else 448.0
    keys = torch.randn(TOKENS, HEAD).bfloat16()
    for key, slot in zip(keys, pages.slots.tolist()):
        page, row = pages.cache[slot // pages.size].flatten(), slot % pages.size
        tiles = key[:NOPE].float().view(7, 64)
        exponent = torch.log2(tiles.abs().amax(-1).double() / limit).ceil().int()
        codes = torch.ldexp(tiles, -exponent[:, None]).clamp(-limit, limit).to(dtype)
        page[row * 576 :][:NOPE] = codes.view(torch.uint8).flatten()
        page[row * 576 + NOPE :][:128] = key[NOPE:].view(torch.uint8)
        scales = page[pages.size * 576 + row * 8 :][:8]
        scales[:7] = (exponent + 127).to(torch.uint8)
        scales[7] = 0
    return keys.double()


def by_insert(pages: Pages) -> torch.Tensor:
    keys = torch.randn(TOKENS + 1, HEAD).bfloat16()
    cache = pages.cache.flatten(1)
    slots = pages.slots_and_none()
    cache_utils.quantize_and_insert_k_cache(keys, cache, slots, pages.size)
    return keys[:-1].double()


def by_compressor(pages: Pages, ratio: int, dims: int, size: float) -> torch.Tensor:
    """Compressed keys of a sequence of (TOKENS + 1) * ratio tokens."""
    overlap = ratio == 4
    width, windows = dims * (1 + overlap), TOKENS + 1
    positions = torch.arange(windows * ratio)
    kv, gate = torch.randn(2, windows, ratio, width)
    state = torch.cat([kv, gate], dim=-1).flatten(0, 1)
    state_size = 4
    order = torch.randperm(len(state) // state_size)
    states = torch.empty(len(order), state_size, 2 * width)
    states[order] = state.view(states.shape)
    weight = (torch.rand(dims) + 0.5) * size
    cos_sin = angles(len(positions))
    full = (positions + 1) % ratio == 0
    slots = torch.zeros(len(positions), dtype=torch.int64)
    slots[full] = pages.slots_and_none()
    quant_block, record, scales = (64, 576, 8) if dims == HEAD else (dims, dims, 4)
    compressor.compress_norm_rope_store_triton(
        states,
        len(positions),
        torch.zeros(len(positions), dtype=torch.int32),
        positions,
        positions,
        order[None].int(),
        state_size,
        width,
        cos_sin,
        pages.cache,
        SimpleNamespace(slot_mapping=slots),
        {},
        dims,
        ROPE,
        ratio,
        overlap,
        False,
        weight,
        EPS,
        quant_block,
        record,
        scales,
    )
    kv, gate = kv.double(), gate.double()
    if overlap:
        # A window takes the first half of the one before, and its own second half.
        none = torch.zeros(1, ratio, dims).double()
        before = torch.cat([none, kv[:-1, :, :dims]])
        before_gate = torch.cat([none - math.inf, gate[:-1, :, :dims]])
        kv = torch.cat([before, kv[..., dims:]], dim=1)
        gate = torch.cat([before_gate, gate[..., dims:]], dim=1)
    keys = (kv * gate.softmax(1)).sum(1)
    keys *= torch.rsqrt(keys.square().mean(-1, keepdim=True) + EPS) * weight.double()
    return rotate(keys, cos_sin[::ratio])[:-1]


WRITERS = {
    "format": (Fp8Cache.SWA_MAIN, by_format),
    "insert": (Fp8Cache.SWA_MAIN, by_insert),
    "c4a": (
        Fp8Cache.COMPRESSED_EXTRA,
        lambda pages: by_compressor(pages, 4, HEAD, SMALL),
    ),
    "c128a": (
        Fp8Cache.COMPRESSED_EXTRA,
        lambda pages: by_compressor(pages, 128, HEAD, SMALL),
    ),
}


def gathered(pages: Pages, which: Fp8Cache, monkeypatch) -> torch.Tensor:
    out = torch.full((1, TOKENS + 1, HEAD), math.nan).bfloat16()
    lengths = torch.tensor([TOKENS], dtype=torch.int32)
    cache_utils.dequantize_and_gather_k_cache(
        out, pages.cache, lengths, None, pages.table, pages.size, 1, cache=which
    )
    assert out[0, 0].isnan().all()
    return out[0, 1:]


def decoded(pages: Pages, which: Fp8Cache, monkeypatch, tiled: bool) -> torch.Tensor:
    """A query over one key returns it. The other cache has what the format says."""
    monkeypatch.setattr(sparse, "_TILED_BY_HEADS", tiled)
    other = Pages(HEAD, 16, pages.fnuz, False)
    by_format(other)
    own = pages.slots.int(), torch.arange(TOKENS + 1, dtype=torch.int32)
    none = own[0][:0], torch.zeros(TOKENS + 1, dtype=torch.int32)
    is_main = which == Fp8Cache.SWA_MAIN
    main, extra = (pages, other) if is_main else (other, pages)
    main_lists, extra_lists = (own, none) if is_main else (none, own)
    out = torch.full((TOKENS, 3, HEAD), math.nan).bfloat16()
    sparse.rocm_sparse_attn_decode(
        q=torch.zeros(TOKENS, 3, HEAD).bfloat16(),
        kv_cache=extra.cache,
        swa_k_cache=main.cache,
        swa_only=False,
        swa_ragged_indices=main_lists[0],
        swa_ragged_indptr=main_lists[1],
        topk_ragged_indices=extra_lists[0],
        topk_ragged_indptr=extra_lists[1],
        attn_sink=None,
        scale=1.0,
        head_dim=HEAD,
        nope_head_dim=NOPE,
        rope_head_dim=ROPE,
        output=out,
    )
    assert torch.equal(out[:, 0], out[:, 2])
    return out[:, 1]


READERS = {
    "gather": gathered,
    "decode gfx942": lambda *args: decoded(*args, tiled=True),
    "decode": lambda *args: decoded(*args, tiled=False),
}


@dialects
@pages_of
@pytest.mark.parametrize("writer", WRITERS)
def test_keys_come_back(monkeypatch, gfx942, writer, size, fnuz, far):
    gfx942(fnuz)
    which, write = WRITERS[writer]
    pages = Pages(HEAD, size, fnuz, far)
    keys = write(pages)
    # Half a step of three mantissa bits, and two roundings to bf16; what is small
    # beside the largest of its block is off by half the smallest step.
    tolerance = keys.abs() / 15 + keys.abs().max() * 2.0**-16
    for name, read in READERS.items():
        error = (read(pages, which, monkeypatch).double() - keys).abs()
        assert (error <= tolerance).all(), f"{writer} through {name}"


def paged(reader, q, weights, pages):
    arguments = (
        q[:, None],
        pages.cache[:, :, None],
        weights,
        torch.full((len(q),), TOKENS, dtype=torch.int32),
        pages.table.repeat(len(q), 1),
    )
    if reader is sparse.rocm_fp8_paged_mqa_logits:
        arguments += (torch.zeros(1, dtype=torch.int32),)
    return reader(*arguments, TOKENS + 1)[:, :TOKENS]


def prefill(reader, q, weights, pages):
    """Keys as the C++ gather gives them."""
    flat, row = pages.cache.flatten(1), pages.slots % pages.size
    page = pages.slots // pages.size
    data = [flat[p, r * INDEX :][:INDEX] for p, r in zip(page, row)]
    start = pages.size * INDEX
    scales = [flat[p, start + 4 * r :][:4] for p, r in zip(page, row)]
    scales = torch.stack(scales).view(torch.float32)
    keys = torch.stack(data).view(q.dtype)
    starts = torch.zeros(len(q), dtype=torch.int32)
    return reader(q, (keys, scales), weights, starts, starts + TOKENS)


@dialects
@pages_of
def test_index_scores_are_right(gfx942, size, fnuz, far):
    gfx942(fnuz)
    pages = Pages(INDEX, size, fnuz, far)
    keys = by_compressor(pages, 4, INDEX, 1.0)
    q, weights = torch.randn(5, 64, INDEX).bfloat16(), torch.rand(5, 64).bfloat16()
    cos_sin = angles(5)
    codes, folded = fused_indexer_q.fused_indexer_q_rope_quant(
        torch.arange(5), q, cos_sin, weights, 0.25, 0.5
    )
    scores = torch.einsum("thd,nd->thn", rotate(q.double(), cos_sin), keys).relu()
    expected = (scores * weights.double()[..., None]).sum(1) * 0.25 * 0.5
    for read, reader in (
        (paged, sparse.rocm_fp8_paged_mqa_logits),
        (paged, sparse.fp8_paged_mqa_logits_torch),
        (prefill, sparse.rocm_fp8_mqa_logits),
        (prefill, sparse.fp8_mqa_logits_torch),
    ):
        actual = read(reader, codes, folded, pages).double()
        error = (actual - expected).norm(dim=-1) / expected.norm(dim=-1)
        # Both are rounded to three bits of mantissa, and errors of 128 lanes add up
        # as a random walk.
        assert (error < 0.02).all(), f"{reader.__name__}: {error}"
