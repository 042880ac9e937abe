"""What DeepSeek-V4-Flash launches, through vLLM's own Python functions.

Each function here calls one of them with tensors of the model's real layout, so
that dtypes, strides, constexprs, alignments and num_warps are those of a real run.
Batches are small: no kernel is specialized on their size, but for the few that take
it as a constexpr.

A cache is larger than 2 GiB, as on a real GPU, for Triton addresses smaller tensors
with other instructions. Its memory is reserved and never touched.

A launch that several shapes share has one variant for each: a rank's heads under
tensor parallelism, and the three kinds of layers. C4 compresses 4 tokens into one
key, C128 compresses 128, SWA has the sliding window alone.
"""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch

from . import stand_ins

# By name: in its package, a function of the same name hides each module.
_OPS = "vllm.models.deepseek_v4.common.ops."
cache_utils = import_module(_OPS + "cache_utils")
compressor = import_module(_OPS + "fused_compress_quant_cache")
indexer_q = import_module(_OPS + "fused_indexer_q")
inv_rope = import_module(_OPS + "fused_inv_rope_fp8_quant")
qk_rmsnorm = import_module(_OPS + "fused_qk_rmsnorm")
partial_states = import_module(_OPS + "save_partial_states")
compressor_slots = import_module("vllm.v1.attention.backends.mla.compressor_utils")
experts = import_module(
    "vllm.model_executor.layers.fused_moe.experts.gpt_oss_triton_kernels_moe"
)
flashmla = import_module("vllm.v1.attention.backends.mla.flashmla_sparse")
fp8_linear = import_module("vllm.model_executor.layers.quantization.utils.fp8_utils")
mhc = import_module("vllm.model_executor.kernels.mhc.triton")
platforms = import_module("vllm.platforms")
rocm = import_module("vllm.models.deepseek_v4.amd.rocm")
sequences = import_module("vllm.v1.attention.ops.common")
sparse = import_module("vllm.v1.attention.ops.rocm_aiter_mla_sparse")
sparse_swa = import_module("vllm.v1.attention.backends.mla.sparse_swa")

#: DeepSeek-V4-Flash, by the names of its config.json.
HIDDEN = 4096
HEAD = 512
NOPE = 448
ROPE = 64
Q_LORA = 1024
GROUPS = 8
WINDOW = 128
HC = 4
INDEX_HEADS = 64
INDEX_HEAD = 128
TOPK = 512
EXPERTS = 256
EXPERTS_PER_TOKEN = 6
EPS = 1e-6

#: A batch of two requests that have eight tokens each.
REQUESTS = 2
TOKENS = 16

#: Bytes of a cached key, and of an indexer key.
KEY = 584
INDEX_KEY = 132


@dataclass(frozen=True)
class Launch:
    """One call into vLLM; it may launch several kernels."""

    variant: str
    call: Callable[[], Any]


ALL: list[Launch] = []


def launch(*variants: tuple) -> Callable[[Callable], Callable]:
    """Registers a function: for each variant, its name and the arguments."""

    def register(function: Callable) -> Callable:
        for name, *arguments in variants or (("",),):
            ALL.append(Launch(name, functools.partial(function, *arguments)))
        return function

    return register


def bf16(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


def f32(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.float32)


def i32(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def i64(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int64)


@functools.cache
def _pool() -> torch.Tensor:
    return torch.empty((1 << 31) + (1 << 26), dtype=torch.uint8)


def cache(rows: int, width: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    """A paged cache ``[pages, rows, width]`` in a pool that is larger than 2 GiB.

    A page begins at a multiple of 576 bytes, as in vLLM's specs of these caches.
    """
    size = dtype.itemsize
    page = -(-rows * width * size // 576) * 576
    pages = _pool().numel() // page
    strides = (page // size, width, 1)
    return _pool().view(dtype).as_strided((pages, rows, width), strides)


def ragged(entries: int, rows: int = TOKENS) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices and indptr, with `entries` for each row."""
    return i32(rows * entries), torch.arange(rows + 1, dtype=torch.int32) * entries


def requests() -> dict[str, torch.Tensor]:
    """Where each request's tokens are, and how long it and its window are."""
    starts = torch.arange(REQUESTS + 1, dtype=torch.int32) * (TOKENS // REQUESTS)
    lens = i32(REQUESTS) + 1000
    return {"query_start_loc": starts, "seq_lens": lens, "gather_lens": lens - 800}


def of_cache(function: Callable, name: str) -> dict[str, Any]:
    """The argument that says which cache it is, where the tree has it.

    The release that the stack is applied to does not have it.
    """
    if "cache" not in inspect.signature(function).parameters:
        return {}
    table = import_module("vllm.v1.attention.ops.fp8_dialect")
    return {"cache": table.Fp8Cache[name]}


@launch()
def indexer_k_insert() -> None:
    k, slots = bf16(TOKENS, INDEX_HEAD), i64(TOKENS)
    pages = cache(64, INDEX_KEY)
    sparse.indexer_k_quant_and_cache_triton(k, pages, slots, 128, "ue8m0")


@launch()
def indexer_k_gather() -> None:
    sparse.cp_gather_indexer_k_quant_cache_triton(
        cache(64, INDEX_KEY),
        torch.empty(TOKENS, INDEX_HEAD, dtype=platforms.current_platform.fp8_dtype()),
        torch.empty(TOKENS, 4, dtype=torch.uint8),
        i32(REQUESTS, 64),
        requests()["query_start_loc"],
        i32(TOKENS),
    )


def accepted(function: Callable, **arguments: Any) -> dict[str, Any]:
    """Those of the arguments that the tree's function has."""
    names = inspect.signature(function).parameters
    return {name: value for name, value in arguments.items() if name in names}


@launch(("64 heads", 64), ("32 heads", 32), ("8 heads", 8))
def prefill(heads: int) -> None:
    indices, indptr = ragged(TOPK + WINDOW)
    sparse.rocm_sparse_attn_prefill(
        q=bf16(TOKENS, heads, HEAD),
        kv=bf16(4096, 1, HEAD),
        **accepted(sparse.rocm_sparse_attn_prefill, indices=indices, topk_length=None),
        scale=HEAD**-0.5,
        head_dim=HEAD,
        nope_head_dim=NOPE,
        rope_head_dim=ROPE,
        attn_sink=f32(heads),
        output=bf16(TOKENS, heads, HEAD),
        ragged_indices=indices,
        ragged_indptr=indptr,
    )


@launch(
    # Where the tile goes by the batch: one for each, shared by programs and not.
    ("C4, 64 heads", 64, 64, TOKENS),
    ("C128, 64 heads", 64, 2, TOKENS),
    ("SWA, 64 heads", 64, 0, TOKENS),
    ("C4, 64 heads, 128 queries", 64, 64, 128),
    ("C128, 64 heads, 128 queries", 64, 2, 128),
    ("C4, 64 heads, 512 queries", 64, 64, 512),
    ("SWA, 64 heads, 512 queries", 64, 0, 512),
    ("C4, 8 heads", 8, 64, TOKENS),
    ("C4, 8 heads, 512 queries", 8, 64, 512),
)
def decode(heads: int, extra_rows: int, queries: int) -> None:
    window, window_indptr = ragged(WINDOW, queries)
    topk, topk_indptr = ragged(TOPK, queries) if extra_rows else (None, None)
    sparse.rocm_sparse_attn_decode(
        q=bf16(queries, heads, HEAD),
        kv_cache=cache(extra_rows, KEY) if extra_rows else None,
        swa_k_cache=cache(64, KEY),
        swa_only=not extra_rows,
        **accepted(
            sparse.rocm_sparse_attn_decode,
            topk_indices=None,
            topk_lens=i32(queries) if extra_rows else None,
            swa_indices=i32(queries, 1, WINDOW),
            swa_lens=i32(queries),
        ),
        swa_ragged_indices=window,
        swa_ragged_indptr=window_indptr,
        topk_ragged_indices=topk,
        topk_ragged_indptr=topk_indptr,
        attn_sink=f32(heads),
        scale=HEAD**-0.5,
        head_dim=HEAD,
        nope_head_dim=NOPE,
        rope_head_dim=ROPE,
        output=bf16(queries, heads, HEAD),
    )


def combine(module: Any, ratio: int, topk: int, function: str) -> None:
    getattr(module, function)(
        i32(TOKENS, topk or TOPK),
        **requests(),
        window_size=WINDOW,
        compress_ratio=ratio,
        topk=topk,
        M=40000,
        N=32768 if topk else 0,
    )


@launch(("C4", 4, TOPK), ("C128", 128, 1024), ("SWA", 1, 0))
def combine_ragged(ratio: int, topk: int) -> None:
    combine(rocm, ratio, topk, "combine_topk_swa_indices_ragged")


@launch(("C4", 4, TOPK))
def combine_common(ratio: int, topk: int) -> None:
    combine(cache_utils, ratio, topk, "combine_topk_swa_indices")


@launch()
def global_topk_ragged() -> None:
    function = rocm.compute_global_topk_ragged_indices_and_indptr
    arguments = accepted(
        function,
        positions=i64(TOKENS),
        token_to_req_indices=i32(TOKENS),
        is_valid_token=i32(TOKENS).bool(),
        slot_mapping=i64(TOKENS),
        req_id_per_token=i32(TOKENS),
        compress_ratio=4,
        topk_lens=i32(TOKENS),
        global_topk_ragged=i32(TOKENS * TOPK),
        topk_indptr=i32(TOKENS + 1),
    )
    function(
        i32(TOKENS, TOPK), block_table=i32(REQUESTS, 64), block_size=64, **arguments
    )


def decode_rows(kernel: str, ratio: int, width: int) -> None:
    """Launch a kernel of a metadata builder, if the tree has it."""
    if not hasattr(rocm, kernel):
        return
    where, table = requests(), i32(REQUESTS, 64)
    compressed = ratio > 1
    getattr(rocm, kernel)[(TOKENS,)](
        i32(TOKENS * width) if width else None,
        i32(TOKENS + 1) if width else None,
        *((i64(8192), i32(8192), 8192) if compressed else ()),
        where["query_start_loc"],
        where["seq_lens"],
        i64(TOKENS) if width else None,
        table,
        table.stride(0),
        256 // ratio if compressed else 64,
        *((REQUESTS, REQUESTS) if compressed else (REQUESTS,)),
        **({"RATIO": ratio} if compressed else {}),
        WIDTH=width,
        MAX_QUERY_LEN=2,
        REQS_PER_LOAD=1024,
        BLOCK_SIZE=min(width, 1024) or 1,
    )


@launch()
def swa_rows() -> None:
    decode_rows("_build_swa_metadata_kernel", 1, WINDOW)


@launch(("C4", 4, 0), ("C128", 128, 8192))
def compressed_rows(ratio: int, width: int) -> None:
    decode_rows("_build_compressed_metadata_kernel", ratio, width)


@launch()
def global_topk() -> None:
    cache_utils.compute_global_topk_indices_and_lens(
        i32(TOKENS, TOPK), i32(TOKENS), i32(REQUESTS, 64), 64, i32(TOKENS).bool()
    )


@launch()
def insert_k() -> None:
    pages = cache(64, KEY)
    insert = cache_utils.quantize_and_insert_k_cache
    named = of_cache(insert, "SWA_MAIN")
    insert(bf16(TOKENS, HEAD), pages.flatten(1), i64(TOKENS), 64, **named)


@launch(
    ("SWA", "SWA_MAIN", 64),
    ("C4", "COMPRESSED_EXTRA", 64),
    ("C128", "COMPRESSED_EXTRA", 2),
)
def gather_k(name: str, rows: int) -> None:
    gather = cache_utils.dequantize_and_gather_k_cache
    lens = requests()
    gather(
        bf16(REQUESTS, 4096, HEAD),
        cache(rows, KEY),
        seq_lens=lens["seq_lens"],
        gather_lens=lens["gather_lens"] if name == "SWA_MAIN" else None,
        block_table=i32(REQUESTS, 64),
        block_size=rows,
        offset=1024 if name == "SWA_MAIN" else 0,
        **of_cache(gather, name),
    )


def compress(head: int, ratio: int, quant: int, stride: int, scales: int) -> None:
    overlap = ratio == 4
    width = head * (2 if overlap else 1)
    rows = 4 if overlap else 8
    compressor.compress_norm_rope_store_triton(
        state_cache=cache(rows, 2 * width, torch.float32),
        num_actual=TOKENS,
        token_to_req_indices=i32(TOKENS),
        positions=i64(TOKENS),
        slot_mapping=i64(TOKENS),
        block_table=i32(REQUESTS, 64),
        block_size=rows,
        state_width=width,
        cos_sin_cache=f32(4096, ROPE),
        kv_cache=cache(256 // ratio, KEY if head == HEAD else INDEX_KEY),
        k_cache_metadata=SimpleNamespace(slot_mapping=i64(TOKENS)),
        pdl_kwargs={},
        head_dim=head,
        rope_head_dim=ROPE,
        compress_ratio=ratio,
        overlap=overlap,
        use_fp4_cache=quant == 32,
        rms_norm_weight=bf16(head),
        rms_norm_eps=EPS,
        quant_block=quant,
        token_stride=stride,
        scale_dim=scales,
    )


@launch(("C4", 4), ("C128", 128))
def compress_key(ratio: int) -> None:
    compress(HEAD, ratio, 64, NOPE + 2 * ROPE, NOPE // 64 + 1)


@launch()
def compress_indexer_key() -> None:
    compress(INDEX_HEAD, 4, 128, INDEX_HEAD, 4)


@launch()
def compress_indexer_key_mxfp4() -> None:
    compress(INDEX_HEAD, 4, 32, INDEX_HEAD // 2, INDEX_HEAD // 32)


@launch(("", False), ("", True))
def indexer_query(use_fp4: bool) -> None:
    indexer_q.fused_indexer_q_rope_quant(
        i64(TOKENS),
        bf16(TOKENS, INDEX_HEADS, INDEX_HEAD),
        f32(4096, ROPE),
        bf16(TOKENS, INDEX_HEADS),
        INDEX_HEAD**-0.5,
        INDEX_HEADS**-0.5,
        use_fp4,
    )


def _mqa_logits() -> Any:
    return import_module("vllm.v1.attention.ops.triton_mqa_logits")


@launch(("", TOKENS, 0), ("skip", TOKENS, TOPK), ("few programs", 2, 0))
def paged_logits(tokens: int, topk: int) -> None:
    dtype = platforms.current_platform.fp8_dtype()
    _mqa_logits().fp8_paged_mqa_logits_triton(
        torch.empty(tokens, 1, INDEX_HEADS, INDEX_HEAD, dtype=dtype),
        cache(64, INDEX_KEY).unsqueeze(2),
        f32(tokens, INDEX_HEADS),
        i32(tokens),
        i32(tokens, 64),
        4096,
        topk=topk,
    )


@launch(("", 0), ("skip", TOPK))
def prefill_logits(topk: int) -> None:
    dtype = platforms.current_platform.fp8_dtype()
    _mqa_logits().fp8_mqa_logits_triton(
        torch.empty(TOKENS, INDEX_HEADS, INDEX_HEAD, dtype=dtype),
        (torch.empty(1024, INDEX_HEAD, dtype=dtype), f32(1024)),
        f32(TOKENS, INDEX_HEADS),
        i32(TOKENS),
        i32(TOKENS),
        topk=topk,
    )


@launch()
def inverse_rope() -> None:
    heads = 64
    inv_rope.fused_inv_rope_fp8_quant(
        bf16(TOKENS, heads, HEAD),
        i64(TOKENS),
        f32(4096, ROPE),
        n_groups=GROUPS,
        heads_per_group=heads // GROUPS,
    )


@launch()
def q_kv_rmsnorm() -> None:
    q, kv = bf16(TOKENS, Q_LORA + HEAD).split([Q_LORA, HEAD], dim=-1)
    qk_rmsnorm.fused_q_kv_rmsnorm(q, kv, bf16(Q_LORA), bf16(HEAD), EPS)


@launch(("C4", HEAD, 4), ("C128", HEAD, 128), ("C4 indexer", INDEX_HEAD, 4))
def save_state(head: int, ratio: int) -> None:
    width = head * (2 if ratio == 4 else 1)
    rows = 4 if ratio == 4 else 8
    kv, score = f32(TOKENS, 2 * width).split([width, width], dim=-1)
    partial_states.save_partial_states(
        kv=kv,
        score=score,
        ape=f32(ratio, width),
        positions=i64(TOKENS),
        state_cache=cache(rows, 2 * width, torch.float32),
        slot_mapping=i64(TOKENS),
        block_size=rows,
        state_width=width,
        compress_ratio=ratio,
        pdl_kwargs={},
    )


@launch()
def pack_queries() -> None:
    dtype = platforms.current_platform.fp8_dtype()
    queries = torch.empty(TOKENS, INDEX_HEADS, INDEX_HEAD, dtype=dtype)
    sequences.pack_seq_triton(queries, i32(REQUESTS) + TOKENS // REQUESTS)


@launch()
def unpack_topk() -> None:
    each = TOKENS // REQUESTS
    sequences.unpack_seq_triton(i32(REQUESTS, each, TOPK), i32(REQUESTS) + each)


@launch()
def hyper_connection_head() -> None:
    mhc._hc_head_triton(
        bf16(TOKENS, HC, HIDDEN),
        f32(HC, HC * HIDDEN),
        f32(1),
        f32(HC),
        bf16(TOKENS, HIDDEN),
        HIDDEN,
        EPS,
        1e-6,
        HC,
    )


@launch(("C4", 4), ("C128", 128))
def compressed_slots(ratio: int) -> None:
    where = requests()
    compressor_slots.get_compressed_slot_mapping(
        TOKENS,
        where["query_start_loc"],
        where["seq_lens"],
        i32(REQUESTS, 64),
        256 // ratio,
        ratio,
    )


@launch()
def c128_topk() -> None:
    width = 1024
    flashmla.build_c128a_topk_metadata(
        i64(TOKENS),
        128,
        8,
        i32(TOKENS),
        i32(REQUESTS, 64),
        2,
        i64(TOKENS),
        i32(TOKENS, width),
        i32(TOKENS),
        i32(TOKENS, width),
        width,
    )


@launch()
def window_of_prefill() -> None:
    where = requests()
    build = sparse_swa.DeepseekSparseSWAMetadataBuilder._build_deepseek_v4_metadata
    builder = SimpleNamespace(window_size=WINDOW)
    arguments = accepted(build, seq_lens_cpu=where["seq_lens"])
    build(
        builder, 0, REQUESTS, where["seq_lens"], where["query_start_loc"], **arguments
    )


@launch()
def window_of_decode() -> None:
    # Its caller is a builder that wants a whole engine's configuration.
    where = requests()
    table = i32(REQUESTS, 64)
    indices = i32(TOKENS, 1, WINDOW)
    sparse_swa._compute_swa_indices_and_lens_kernel[(TOKENS,)](
        indices,
        indices.stride(0),
        i32(TOKENS),
        WINDOW,
        where["query_start_loc"],
        where["seq_lens"],
        i32(TOKENS),
        i32(TOKENS).bool(),
        table,
        table.stride(0),
        64,
        TRITON_BLOCK_SIZE=1024,
    )


@launch()
def quantize_activations() -> None:
    fp8_linear.per_token_group_quant_fp8(bf16(TOKENS, HIDDEN), 128, use_ue8m0=True)


@launch()
def fp8_linear_product() -> None:
    dtype = platforms.current_platform.fp8_dtype()
    fp8_linear.w8a8_triton_block_scaled_mm(
        torch.empty(TOKENS, HIDDEN, dtype=dtype),
        torch.empty(Q_LORA + HEAD, HIDDEN, dtype=dtype),
        f32(TOKENS, HIDDEN // 128),
        f32((Q_LORA + HEAD) // 128, HIDDEN // 128),
        [128, 128],
        torch.bfloat16,
    )


@launch()
def map_experts() -> None:
    experts.map_topk_ids(i32(TOKENS, EXPERTS_PER_TOKEN), i32(EXPERTS))


@launch()
def route() -> None:
    # What comes before and after is triton_kernels', which no package index has.
    ids = torch.zeros(TOKENS, EXPERTS_PER_TOKEN, dtype=torch.int16)
    columns = EXPERTS // 32
    experts.pack_bitmatrix[(1,)](
        torch.zeros(TOKENS, columns, dtype=torch.uint32),
        ids,
        TOKENS,
        columns,
        EXPERTS_PER_TOKEN,
        BLOCK_SIZE_M=512,
        BLOCK_SIZE_K=32,
    )
    sums, partial = i32(EXPERTS), i32(1, EXPERTS)
    with stand_ins.triton_kernels(sums, partial) as make_bitmatrix_metadata:
        experts._patch_make_bitmatrix_metadata()
        bitmatrix = SimpleNamespace(
            shape=(TOKENS, EXPERTS), shape_max=(TOKENS, None), device=ids.device
        )
        make_bitmatrix_metadata()(ids, bitmatrix)
