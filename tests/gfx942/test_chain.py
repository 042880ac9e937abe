"""A whole sparse-attention layer on gfx942 against a model of it.

Compress, write, index, top-k, gather, prefill and decode are vLLM's own code: the
layer is built by vLLM, its caches have the shapes that vLLM gives them, its metadata
comes from vLLM's builders, and its Triton kernels run, interpreted on a CPU or
compiled on a GPU. The model is written from the definition of the layer, in float32:
compressors, indexer, shared key and value, sink as in transformers' DeepSeek-V4. It
shares nothing with vLLM but the inputs and the rounding that the formats prescribe.

What the layer's linears would give (queries, keys, gates) is input. Four C++ ops
cannot run without a built vLLM; `Ops` has models of them.

On an NVIDIA GPU, with OCP caches, since Triton has no FNUZ there:

    python -c 'import sys, pytest; from harness import bootstrap; \
bootstrap.install(hide_gpus=False); sys.exit(pytest.main(sys.argv[1:]))' \
-p harness.plugin tests/gfx942/test_chain.py
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from vllm import _custom_ops, forward_context
from vllm.config import CompilationConfig
from vllm.config import vllm as vllm_config
from vllm.model_executor import custom_op
from vllm.model_executor.layers import rotary_embedding
from vllm.models.deepseek_v4 import attention, compressor
from vllm.models.deepseek_v4.amd import model
from vllm.transformers_utils.config import patch_rope_parameters
from vllm.transformers_utils.configs.deepseek_v4 import DeepseekV4Config
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.ops import rocm_aiter_mla_sparse
from vllm.v1.worker import workspace

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# As in DeepSeek-V4-Flash.
WINDOW, TOPK = 128, 512
HEAD, ROPE, INDEX_HEAD = 512, 64, 128
NOPE = HEAD - ROPE
EPS = 1e-6
THETA, COMPRESS_THETA = 10000.0, 160000.0
# Smaller than in DeepSeek-V4-Flash.
HEADS, GROUPS, INDEX_HEADS = 4, 2, 4
HIDDEN, Q_LORA, O_LORA = 128, 64, 16
FACTOR, ORIGINAL = 4, 4096

RATIOS = {"swa": 0, "c4a": 4, "c128a": 128}
LENGTHS = (1, 3, 4, 5, 127, 128, 129, 130, 2047, 2048, 2049, 4097)
LONGEST = max(LENGTHS) + 1  # one more token to decode
MAX_LENGTH = 4352
# Bytes that are NaN, for what nobody has written.
POISON = {True: 0x80, False: 0x7F}

# ---------------------------------------------------------------- the definition


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)
    return x if weight is None else x * weight


def frequencies(compressed: bool) -> torch.Tensor:
    """Radians per position, [32]: YaRN in compressed layers, plain in others."""
    theta = COMPRESS_THETA if compressed else THETA
    pairs = torch.arange(ROPE // 2, dtype=torch.float64)
    plain = theta ** -(2 * pairs / ROPE)
    if not compressed:
        return plain

    def pair_of(rotations: int) -> float:
        wavelength = ORIGINAL / rotations
        return ROPE * math.log(wavelength / (2 * math.pi)) / (2 * math.log(theta))

    low, high = math.floor(pair_of(32)), math.ceil(pair_of(1))
    ramp = ((pairs - low) / (high - low)).clamp(0, 1)
    return plain * (1 - ramp) + plain / FACTOR * ramp


def rope(x: torch.Tensor, positions: torch.Tensor, compressed: bool, sign: int = 1):
    """Rotates the pairs of the last 64 dims of x [tokens, ..., dims]."""
    angles = positions.double()[:, None] * frequencies(compressed)
    shape = (len(positions),) + (1,) * (x.dim() - 2) + (ROPE // 2,)
    cos = angles.cos().float().view(shape)
    sin = sign * angles.sin().float().view(shape)
    even, odd = x[..., -ROPE::2], x[..., -ROPE + 1 :: 2]
    rotated = torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1)
    return torch.cat([x[..., :-ROPE], rotated.flatten(-2)], dim=-1)


def bf16(x: torch.Tensor) -> torch.Tensor:
    return x.bfloat16().float()


def fp8(x: torch.Tensor, block: int, fnuz: bool) -> torch.Tensor:
    """What is left of x [..., n] in FP8 with a power of two per block."""
    dtype = torch.float8_e4m3fnuz if fnuz else torch.float8_e4m3fn
    limit = 224.0 if fnuz else 448.0
    tiles = x.unflatten(-1, (-1, block))
    largest = tiles.abs().amax(-1, keepdim=True).double().clamp(min=1e-4)
    scale = torch.exp2(torch.ceil(torch.log2(largest / limit))).float()
    codes = (tiles / scale).clamp(-limit, limit).to(dtype)
    return (codes.float() * scale).flatten(-2)


def key_record(key: torch.Tensor, fnuz: bool) -> torch.Tensor:
    """What an fp8_ds_mla cache keeps of keys [tokens, 512]."""
    key = bf16(key)
    return torch.cat([fp8(key[:, :NOPE], 64, fnuz), key[:, NOPE:]], dim=-1)


def compress(
    kv: torch.Tensor, gate: torch.Tensor, bias: torch.Tensor, weight: torch.Tensor
) -> torch.Tensor:
    """Compressed keys of all full windows, before their rotation.

    Args:
        kv, gate: [tokens, dims] or [tokens, 2 * dims] (overlapping windows).
        bias: of each position of a window, [ratio, as kv].
        weight: of the norm, [dims].
    """
    ratio, dims = len(bias), len(weight)
    windows = len(kv) // ratio
    shape = (windows, ratio, kv.shape[-1])
    kv = kv[: windows * ratio].view(shape)
    gate = gate[: windows * ratio].view(shape) + bias
    if kv.shape[-1] == 2 * dims:
        # A window takes the first half of the one before, and its own second half.
        nothing = torch.zeros_like(kv[:1, :, :dims])
        kv = torch.cat([torch.cat([nothing, kv[:-1, :, :dims]]), kv[..., dims:]], dim=1)
        gate = torch.cat(
            [torch.cat([nothing - math.inf, gate[:-1, :, :dims]]), gate[..., dims:]],
            dim=1,
        )
    return rms_norm((kv * gate.softmax(dim=1)).sum(dim=1), weight)


@dataclass
class Tokens:
    """What a layer gets for each token of a sequence."""

    qr: torch.Tensor  # [tokens, Q_LORA]
    kv: torch.Tensor  # [tokens, 512]
    gates: torch.Tensor  # [tokens, 2 * (512 or 1024)]: keys, and their gates
    index_gates: torch.Tensor  # [tokens, 2 * 256]
    index_weights: torch.Tensor  # [tokens, INDEX_HEADS]

    def rows(self, at: slice) -> Tokens:
        return Tokens(**{name: value[at] for name, value in vars(self).items()})

    @staticmethod
    def join(parts: list[Tokens]) -> Tokens:
        names = vars(parts[0])
        return Tokens(**{n: torch.cat([getattr(p, n) for p in parts]) for n in names})

    @staticmethod
    def random(count: int, ratio: int, generator: torch.Generator) -> Tokens:
        def normal(dims: int, scale: float = 1.0) -> torch.Tensor:
            return torch.randn(count, dims, generator=generator) * scale

        overlap = 2 if ratio == 4 else 1
        return Tokens(
            qr=normal(Q_LORA).bfloat16(),
            kv=normal(HEAD).bfloat16(),
            gates=normal(2 * overlap * HEAD),
            index_gates=normal(4 * INDEX_HEAD),
            index_weights=normal(INDEX_HEADS).bfloat16(),
        )


@dataclass
class Reference:
    """The layer for one sequence. `weights` are by the names of vLLM's parameters."""

    weights: dict[str, torch.Tensor]
    tokens: Tokens
    ratio: int
    fnuz: bool
    positions: torch.Tensor = field(init=False)
    keys: torch.Tensor = field(init=False)  # of the window
    compressed: torch.Tensor = field(init=False)
    index_keys: torch.Tensor = field(init=False)
    qr: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        t, w = self.tokens, self.weights
        self.positions = torch.arange(len(t.kv))
        self.qr = bf16(rms_norm(t.qr.float(), w["q_norm.weight"]))
        kv = bf16(rms_norm(t.kv.float(), w["kv_norm.weight"]))
        self.keys = key_record(self._rope(kv, self.positions), self.fnuz)
        if self.ratio:
            entry = self._compress(t.gates, "compressor")
            self.compressed = key_record(entry, self.fnuz)
        if self.ratio == 4:
            entry = self._compress(t.index_gates, "indexer.compressor")
            self.index_keys = fp8(bf16(entry), INDEX_HEAD, self.fnuz)

    def _rope(self, x: torch.Tensor, positions: torch.Tensor, sign: int = 1):
        return rope(x, positions, self.ratio > 0, sign)

    def _compress(self, gates: torch.Tensor, name: str) -> torch.Tensor:
        kv, gate = gates.chunk(2, dim=-1)
        bias, weight = (self.weights[f"{name}.{n}"] for n in ("ape", "norm.weight"))
        entry = compress(kv, gate, bias, weight)
        return self._rope(entry, torch.arange(len(entry)) * self.ratio)

    def visible(self, position: int) -> int:
        """How many compressed keys are complete at a position."""
        return (position + 1) // self.ratio if self.ratio else 0

    def index_scores(self, position: int) -> torch.Tensor:
        at = slice(position, position + 1)
        q = bf16(self.qr[at] @ self.weights["indexer.wq_b.weight"].T)
        q = bf16(self._rope(q.view(1, INDEX_HEADS, INDEX_HEAD), self.positions[at]))
        q = fp8(q, INDEX_HEAD, self.fnuz)[0]
        scores = (q @ self.index_keys[: self.visible(position)].T).relu()
        weights = self.tokens.index_weights[position].float()
        return weights @ scores / math.sqrt(INDEX_HEAD * INDEX_HEADS)

    def attend(self, position: int, chosen: torch.Tensor) -> torch.Tensor:
        """[HEADS, 512]: over the window, and the chosen compressed keys."""
        at = slice(position, position + 1)
        q = bf16(self.qr[at] @ self.weights["wq_b.weight"].T).view(1, HEADS, HEAD)
        q = bf16(self._rope(rms_norm(q), self.positions[at]))[0]
        keys = self.keys[max(0, position + 1 - WINDOW) : position + 1]
        if self.ratio:
            keys = torch.cat([keys, self.compressed[chosen]])
        logits = q @ keys.T / math.sqrt(HEAD)
        sinks = self.weights["attn_sink"][:HEADS, None]
        return torch.cat([logits, sinks], dim=-1).softmax(-1)[:, :-1] @ keys

    def project(self, position: int, attended: torch.Tensor) -> torch.Tensor:
        """[HIDDEN]: the layer's output, from what its heads attended to."""
        at = self.positions[position : position + 1]
        values = bf16(self._rope(attended[None], at, sign=-1))
        low = torch.einsum(
            "gd,grd->gr",
            values.view(GROUPS, -1),
            self.weights["wo_a.weight"].view(GROUPS, O_LORA, -1),
        )
        return self.weights["wo_b.weight"] @ bf16(low.flatten())


# ------------------------------------------------- models of what is not compiled


def put(cache, slots, rows, block_size, start):
    """Rows of bytes into pages [pages, bytes], from an offset of each page on."""
    width = rows.shape[1]
    offsets = start + slots % block_size * width
    columns = offsets[:, None] + torch.arange(width, device=cache.device)
    cache[(slots // block_size)[:, None], columns] = rows


class Ops:
    """Models of four C++ ops, from their documented contracts."""

    def __init__(self, fnuz: bool):
        self.fnuz = fnuz

    def codes(self, x: torch.Tensor, block: int):
        """FP8 bytes of x [rows, n], and an exponent per block."""
        dtype = torch.float8_e4m3fnuz if self.fnuz else torch.float8_e4m3fn
        limit = 224.0 if self.fnuz else 448.0
        tiles = x.unflatten(-1, (-1, block))
        largest = tiles.abs().amax(-1).double().clamp(min=1e-4)
        exponent = torch.ceil(torch.log2(largest / limit)).int()
        codes = torch.ldexp(tiles, -exponent[..., None]).clamp(-limit, limit)
        return codes.to(dtype).view(torch.uint8).flatten(-2), exponent

    def insert(
        self, q, kv, cache, slots, positions, cos_sin, padded_heads, eps, block_size
    ):
        """Norm and rotation of queries; rotation, quantization, insert of keys."""
        assert (
            eps == EPS and padded_heads == q.shape[1] and cos_sin.dtype == torch.float
        )
        cos, sin = cos_sin[positions].chunk(2, dim=-1)

        def rotate(x, cos, sin):
            even, odd = x[..., -ROPE::2], x[..., -ROPE + 1 :: 2]
            new = torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1)
            return torch.cat([x[..., :-ROPE], new.flatten(-2)], dim=-1).bfloat16()

        kept = slots >= 0
        key = rotate(kv.float(), cos, sin)
        self.put_keys(cache, slots[kept], key[kept], block_size)
        return rotate(rms_norm(q.float()), cos[:, None], sin[:, None])

    def put_keys(self, cache, slots, keys, block_size):
        """fp8_ds_mla: the records of a page, then their scales."""
        codes, exponent = self.codes(keys[:, :NOPE].float(), 64)
        tail = keys[:, NOPE:].bfloat16().contiguous().view(torch.uint8)
        put(cache, slots, torch.cat([codes, tail], dim=-1), block_size, 0)
        scales = F.pad((exponent + 127).to(torch.uint8), (0, 1))
        put(cache, slots, scales, block_size, block_size * (NOPE + 2 * ROPE))

    def put_index_keys(self, cache, slots, keys, block_size):
        codes, exponent = self.codes(keys, INDEX_HEAD)
        put(cache, slots, codes, block_size, 0)
        scales = torch.exp2(exponent.float()).view(torch.uint8)
        put(cache, slots, scales, block_size, block_size * INDEX_HEAD)

    @staticmethod
    def gather_index_keys(kv_cache, keys, scales, block_table, starts):
        block_size = kv_cache.shape[1]
        flat = kv_cache.flatten(1)
        for request, table in enumerate(block_table.long()):
            first, last = int(starts[request]), int(starts[request + 1])
            at = torch.arange(last - first, device=flat.device)
            block, row = table[at // block_size], at % block_size
            offsets = torch.arange(INDEX_HEAD, device=flat.device)
            data = flat[block[:, None], row[:, None] * INDEX_HEAD + offsets]
            keys.view(torch.uint8)[first:last] = data
            start = block_size * INDEX_HEAD + row[:, None] * 4
            scales[first:last] = flat[block[:, None], start + offsets[:4]]

    @staticmethod
    def top_k_prefill(logits, starts, ends, indices, rows, stride0, stride1, k):
        """Counted from the row's start, best first, -1 behind."""
        assert rows == len(logits) == len(indices)
        indices.fill_(-1)
        for row, (start, end) in enumerate(zip(starts.tolist(), ends.tolist())):
            count = max(0, end - start)
            best = logits[row, start : start + count].topk(min(k, count)).indices
            if count <= k:
                best = best.sort().values
            indices[row, : len(best)] = best.int()

    @classmethod
    def top_k_decode(cls, logits, next_n, seq_lens, indices, *args):
        assert seq_lens.shape == (len(logits) // next_n, next_n)
        ends = seq_lens.flatten()
        cls.top_k_prefill(logits, torch.zeros_like(ends), ends, indices, *args)


class Linear(nn.Module):
    """Stands for vLLM's linears of one rank, with random weights."""

    def __init__(self, input_size, output_size, *, return_bias=True, **kwargs):
        super().__init__()
        sizes = [output_size] if isinstance(output_size, int) else output_size
        weight = torch.randn(sum(sizes), input_size, dtype=torch.float32)
        weight = (weight / math.sqrt(input_size)).bfloat16()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.return_bias = return_bias

    def forward(self, x):
        y = (x.float() @ self.weight.float().T).bfloat16()
        return (y, None) if self.return_bias else y


# ---------------------------------------------------------------- the layer itself


def layer_config(draft: int) -> SimpleNamespace:
    """What vLLM's layer, caches and builders read of a VllmConfig."""
    hf_config = DeepseekV4Config(
        max_position_embeddings=ORIGINAL * FACTOR,
        rope_theta=THETA,
        rope_scaling={
            "type": "yarn",
            "factor": FACTOR,
            "original_max_position_embeddings": ORIGINAL,
            "beta_fast": 32,
            "beta_slow": 1,
        },
        compress_rope_theta=COMPRESS_THETA,
        compress_ratios=list(RATIOS.values()),
        num_hidden_layers=len(RATIOS),
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        q_lora_rank=Q_LORA,
        o_lora_rank=O_LORA,
        o_groups=GROUPS,
        head_dim=HEAD,
        qk_rope_head_dim=ROPE,
        sliding_window=WINDOW,
        rms_norm_eps=EPS,
        index_topk=TOPK,
        index_n_heads=INDEX_HEADS,
        index_head_dim=INDEX_HEAD,
        quantization_config={"scale_fmt": "ue8m0"},
    )
    patch_rope_parameters(hf_config)
    return SimpleNamespace(
        model_config=SimpleNamespace(
            hf_config=hf_config,
            hf_text_config=hf_config,
            max_model_len=MAX_LENGTH,
            get_num_attention_heads=lambda parallel: HEADS,
        ),
        scheduler_config=SimpleNamespace(
            max_num_batched_tokens=MAX_LENGTH, max_num_seqs=len(LENGTHS)
        ),
        cache_config=SimpleNamespace(cache_dtype="fp8", block_size=256),
        compilation_config=CompilationConfig(custom_ops=["all"]),
        kernel_config=SimpleNamespace(
            ir_op_priority=SimpleNamespace(
                rms_norm=["native"], fused_add_rms_norm=["native"]
            )
        ),
        attention_config=SimpleNamespace(use_fp4_indexer_cache=False),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        speculative_config=SimpleNamespace(
            num_speculative_tokens=draft, parallel_drafting=False
        )
        if draft
        else None,
        quant_config=None,
        additional_config={},
    )


@dataclass(frozen=True)
class Request:
    """Tokens [start, end) of a sequence are new in a step. `pages` names its pages."""

    pages: str
    start: int
    end: int


class Chain:
    """One layer of vLLM with its caches, and sequences in them."""

    def __init__(
        self,
        patch: pytest.MonkeyPatch,
        config: SimpleNamespace,
        kind: str,
        fnuz: bool,
    ):
        self.ratio, self.fnuz, self.patch = RATIOS[kind], fnuz, patch
        self.tokens: dict[str, Tokens] = {}
        self.references: dict[str, Reference] = {}
        self.config = config
        speculative = config.speculative_config
        self.draft = speculative.num_speculative_tokens if speculative else 0
        torch.manual_seed(0)
        # As vLLM's loader builds a model.
        with set_default_torch_dtype(torch.bfloat16), torch.device(DEVICE):
            buffer = torch.full((MAX_LENGTH, TOPK), -7, dtype=torch.int32)
            index = list(RATIOS).index(kind)
            attn = model.DeepseekV4Attention(
                self.config, f"layers.{index}.attn", topk_indices_buffer=buffer
            )
        self.buffer, self.layer = buffer, attn.mla_attn
        self.weights = self._randomize(attn)
        self.groups = self._groups()
        self.layer.attn_gemm_parallel_execute = lambda hidden: self.projections
        self.ops = Ops(fnuz)
        self.step_tokens: Tokens | None = None

    @property
    def projections(self):
        t = self.step_tokens
        qr_kv = torch.cat([t.qr, t.kv], dim=-1).to(DEVICE)
        gates = t.gates.to(DEVICE), t.index_gates.to(DEVICE), t.index_weights.to(DEVICE)
        return qr_kv, *gates

    def _randomize(self, attn: nn.Module) -> dict[str, torch.Tensor]:
        """Fills what vLLM leaves to the loader; returns all by name, in float32."""
        weights = {}
        for name, parameter in attn.named_parameters():
            # Some only the wrapper has, which is called mla_attn.
            name = name.removeprefix("mla_attn.")
            if name.endswith("norm.weight"):
                parameter.data.uniform_(0.5, 1.5)
            elif name.endswith("ape"):
                parameter.data.normal_()
            elif name == "attn_sink":
                # Heavy, none, and in between.
                parameter.data[:HEADS] = torch.tensor([6.0, -30.0, 3.0, 0.0])
            weights[name] = parameter.data.float().cpu()
        return weights

    def _groups(self) -> dict[str, Group]:
        """Gives the layer caches with NaN everywhere. By prefix, what allots pages."""
        layer, groups = self.layer, {}
        users = [layer.swa_cache_layer]
        if self.ratio:
            users += [layer.mla_attn, layer.compressor.state_cache]
        if layer.indexer is not None:
            users += [layer.indexer.k_cache, layer.indexer.compressor.state_cache]
        for user in users:
            spec = user.get_kv_cache_spec(self.config)
            backend = user.get_attn_backend()
            rows = getattr(spec, "storage_block_size", spec.block_size)
            pages = 2 + (LONGEST + 3 * 256) // spec.block_size + 16 * len(LENGTHS)
            shape = backend.get_kv_cache_shape(
                pages,
                rows,
                1,
                spec.head_size,
                getattr(spec, "cache_dtype_str", None) or "auto",
            )
            raw = torch.full(
                (pages, spec.page_size_bytes), POISON[self.fnuz], dtype=torch.uint8
            ).to(DEVICE)
            if spec.dtype == torch.float32:
                raw.view(torch.float32).fill_(math.nan)
            typed = raw.view(spec.dtype)
            stride = (typed.stride(0), shape[2], 1)
            user.kv_cache = torch.as_strided(typed, shape, stride)
            builder = backend.get_builder_cls()(
                spec, [user.prefix], self.config, torch.device(DEVICE)
            )
            groups[user.prefix] = Group(spec, builder, pages)
        return groups

    def sequence(self, name: str, length: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        tokens = Tokens.random(length, self.ratio, generator)
        self.references[name] = Reference(self.weights, tokens, self.ratio, self.fnuz)
        self.tokens[name] = tokens

    def fork(self, name: str, sequence: str) -> None:
        """The same tokens on pages of their own."""
        self.tokens[name] = self.tokens[sequence]
        self.references[name] = self.references[sequence]

    def metadata(self, requests: list[Request]):
        lengths = [request.end for request in requests]
        counts = [request.end - request.start for request in requests]
        # vLLM sorts a batch: what decodes comes first.
        assert sorted(counts, key=lambda count: count > 1 + self.draft) == counts
        starts = torch.tensor([0, *counts]).cumsum(0).int()
        positions = torch.cat([torch.arange(r.start, r.end) for r in requests])
        built = {}
        for prefix, group in self.groups.items():
            table, slots = group.allot(requests)
            built[prefix] = group.builder.build(
                0,
                CommonAttentionMetadata(
                    query_start_loc=starts.to(DEVICE),
                    query_start_loc_cpu=starts,
                    seq_lens=torch.tensor(lengths).int().to(DEVICE),
                    seq_lens_cpu_upper_bound=torch.tensor(lengths).int(),
                    num_reqs=len(requests),
                    num_actual_tokens=len(positions),
                    max_query_len=max(counts),
                    max_seq_len=max(lengths),
                    block_table_tensor=table.to(DEVICE),
                    slot_mapping=slots.to(DEVICE),
                    positions=positions.to(DEVICE),
                ),
            )
        return built, positions

    def _enter(self, requests: list[Request]):
        self.step_tokens = Tokens.join(
            [self.tokens[r.pages].rows(slice(r.start, r.end)) for r in requests]
        )
        built, positions = self.metadata(requests)
        context = SimpleNamespace(
            attn_metadata=built,
            no_compile_layers=self.config.compilation_config.static_forward_context,
        )
        return context, positions.to(DEVICE)

    def profile(self) -> None:
        """vLLM's profiling run, after which the workspace must not grow."""
        self.step_tokens = Tokens.random(1, self.ratio, torch.Generator())
        context = SimpleNamespace(
            attn_metadata=None,
            no_compile_layers=self.config.compilation_config.static_forward_context,
        )
        with forward_context.override_forward_context(context):
            hidden = torch.zeros(1, HIDDEN, dtype=torch.bfloat16, device=DEVICE)
            self.layer(torch.zeros(1, dtype=torch.int64, device=DEVICE), hidden)
        workspace.current_workspace_manager().lock()

    def place(self, request: Request) -> None:
        """Puts keys into the caches as the model has them, in place of a step.

        Not what the compressors keep of their last tokens.
        """
        reference, layer = self.references[request.pages], self.layer
        user = layer.swa_cache_layer
        _, slots = self.groups[user.prefix].allot([request], evict=False)
        keys = reference.keys[request.start : request.end]
        pages = user.kv_cache.flatten(1)
        self.ops.put_keys(pages, slots.to(DEVICE), keys.to(DEVICE), user.block_size)
        targets = []
        if self.ratio:
            targets = [(layer.mla_attn, reference.compressed, self.ops.put_keys)]
        if layer.indexer is not None:
            cache = layer.indexer.k_cache
            targets += [(cache, reference.index_keys, self.ops.put_index_keys)]
        for user, keys, write in targets:
            _, slots = self.groups[user.prefix].allot([request])
            at = torch.arange(request.start, request.end)
            full = (at + 1) % self.ratio == 0
            entry = at[full] // self.ratio
            rows = user.kv_cache.shape[1]
            slots = slots[full] // self.ratio
            pages = user.kv_cache.flatten(1)
            write(pages, slots.to(DEVICE), keys[entry].to(DEVICE), rows)

    def write(self, request: Request) -> None:
        """A step of which only what it leaves in the caches is of interest."""
        context, positions = self._enter([request])
        layer = self.layer
        qr_kv, gates, index_gates, _ = self.projections
        # The norm is of one token, and `step` runs vLLM's; it is slow interpreted.
        weight = layer.kv_norm.weight.float()
        kv = rms_norm(qr_kv[:, Q_LORA:].float(), weight).bfloat16()
        with forward_context.override_forward_context(context):
            q = torch.zeros(len(kv), HEADS, HEAD, dtype=torch.bfloat16, device=DEVICE)
            layer._fused_qnorm_rope_kv_insert(q, kv, positions, context.attn_metadata)
            if layer.compressor is not None:
                layer.compressor(gates, positions, layer.rotary_emb)
            if layer.indexer is not None:
                layer.indexer.compressor(index_gates, positions, layer.rotary_emb)

    def step(self, requests: list[Request]) -> Outputs:
        context, positions = self._enter(requests)
        hidden = torch.zeros(
            len(positions), HIDDEN, dtype=torch.bfloat16, device=DEVICE
        )
        attended = []
        inner = self.layer.mla_attn.forward

        def keep(q, kv, positions, output):
            output.fill_(math.nan)
            inner(q, kv, positions, output)
            attended.append(output.clone())

        self.buffer.fill_(-7)
        with self.patch.context() as patch:
            patch.setattr(self.layer.mla_attn, "forward", keep)
            with forward_context.override_forward_context(context):
                y = self.layer(positions, hidden)
        (o,) = attended
        return Outputs(o.float().cpu(), y.float().cpu(), self.buffer.cpu().clone())


@dataclass
class Outputs:
    attended: torch.Tensor  # [tokens, HEADS, 512]
    hidden: torch.Tensor  # [tokens, HIDDEN]
    topk: torch.Tensor  # [tokens or more, TOPK]


class Group:
    """Pages of one cache. Page 0 is nobody's, as in vLLM."""

    def __init__(self, spec, builder, pages: int):
        self.spec, self.builder = spec, builder
        order = torch.randperm(
            pages - 1, generator=torch.Generator().manual_seed(pages)
        )
        self.free = (order + 1).tolist()
        self.tables: dict[str, list[int]] = {}

    def allot(self, requests: list[Request], evict: bool = True):
        """Block tables [requests, pages] and the slot of every new token."""
        size = self.spec.block_size
        window = getattr(self.spec, "sliding_window", None)
        width = -(-MAX_LENGTH // size)
        tables, slots = [], []
        for request in requests:
            table = self.tables.setdefault(request.pages, [])
            while len(table) * size < request.end:
                table.append(self.free.pop())
            row = torch.tensor(table + [0] * (width - len(table)), dtype=torch.int32)
            # What lies behind the window has been given back.
            gone = 0
            if evict and window is not None:
                gone = max(0, request.start - (window - 1)) // size
            row[:gone] = 0
            tables.append(row)
            at = torch.arange(request.start, request.end)
            slots.append(row[at // size].long() * size + at % size)
        return torch.stack(tables), torch.cat(slots)


@pytest.fixture
def chain(monkeypatch, fake_platform):
    """chain(kind, fnuz) -> a layer on gfx942 whose profiling run is over.

    With `draft`, so many tokens a request are guessed, and decoded with the next one.
    """

    def build(kind: str, fnuz: bool, draft: int = 0) -> Chain:
        platform = type(fake_platform("gfx942"))
        patch = monkeypatch.setattr
        patch(platform, "device_type", DEVICE)
        if not fnuz:
            patch(platform, "is_fp8_fnuz", classmethod(lambda cls: False))
            patch(platform, "fp8_dtype", classmethod(lambda cls: torch.float8_e4m3fn))
        if DEVICE == "cpu":
            patch(torch.cuda, "Event", lambda *args, **kwargs: None)
            patch(torch.Tensor, "pin_memory", lambda self: self)
            # Asserted before a launch, which the interpreter takes.
            patch(torch.Tensor, "is_cpu", property(lambda self: False))
        for module, names in (
            (
                model,
                "MergedColumnParallelLinear ColumnParallelLinear RowParallelLinear",
            ),
            (attention, "ReplicatedLinear"),
            (compressor, "MergedColumnParallelLinear"),
        ):
            for name in names.split():
                patch(module, name, Linear)
        for module in (model, attention):
            patch(module, "get_tensor_model_parallel_world_size", lambda: 1)
        config = layer_config(draft)
        patch(vllm_config, "_current_vllm_config", config)
        patch(
            custom_op,
            "get_cached_compilation_config",
            lambda: config.compilation_config,
        )
        patch(rotary_embedding, "_ROPE_DICT", {})
        ops = Ops(fnuz)
        for name, op in (
            ("fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert", ops.insert),
            ("top_k_per_row_prefill", ops.top_k_prefill),
            ("top_k_per_row_decode", ops.top_k_decode),
        ):
            patch(torch.ops._C, name, op, raising=False)
        patch(_custom_ops, "cp_gather_indexer_k_quant_cache", ops.gather_index_keys)
        # Not through the dispatcher, which knows them for one device only.
        for name, module in (
            ("deepseek_v4_attention", attention),
            ("rocm_aiter_sparse_attn_indexer", rocm_aiter_mla_sparse),
        ):
            patch(torch.ops.vllm, name, getattr(module, name))
        manager = workspace.WorkspaceManager(torch.device(DEVICE))
        patch(workspace, "_manager", manager)
        patch(torch.accelerator, "empty_cache", lambda: None)

        result = Chain(monkeypatch, config, kind, fnuz)
        result.profile()
        return result

    return build


# ------------------------------------------------------------------------ the tests

# Relative to the model's norm. bf16 keeps 8 bits, and the output is rounded to it
# once, the probabilities before that. The projections round twice more.
ATTENDED, PROJECTED = 4e-3, 1.2e-2
# Interpreted: FNUZ, and once OCP, with all caches. Compiled: what the GPU has.
_FNUZ = DEVICE == "cpu" or torch.version.hip is not None
# Where scores of keys chosen and left may be that equal, in standard deviations. An
# NVIDIA GPU adds products of FP8 with fewer bits than fp32 has.
TIE = 1e-4 if _FNUZ else 1e-3


def check(chain: Chain, requests: list[Request], outputs: Outputs) -> None:
    """Every query of a step against the model."""
    row = 0
    for request in requests:
        reference = chain.references[request.pages]
        for position in range(request.start, request.end):
            where = f"{request}, position {position}"
            chosen = torch.arange(reference.visible(position))
            if chain.ratio == 4:
                chosen = check_chosen(reference, position, outputs.topk[row], where)
            expected = reference.attend(position, chosen)
            error = distance(outputs.attended[row], expected)
            assert error < ATTENDED, f"attention of {where}: {error:.2g}"
            expected = reference.project(position, expected)[None]
            error = distance(outputs.hidden[row : row + 1], expected)
            assert error < PROJECTED, f"output of {where}: {error:.2g}"
            row += 1
    assert row == len(outputs.attended) == len(outputs.hidden)


def check_chosen(
    reference: Reference, position: int, row: torch.Tensor, where: str
) -> torch.Tensor:
    """The compressed keys that a query has chosen: the best ones, each once."""
    visible = reference.visible(position)
    chosen = row[row >= 0].long()
    assert (row[row < 0] == -1).all(), where
    assert chosen.unique().numel() == chosen.numel() == min(visible, TOPK), where
    if visible > TOPK:
        scores = reference.index_scores(position)
        assert chosen.max() < visible, where
        left = torch.ones(visible, dtype=torch.bool)
        left[chosen] = False
        margin = (scores[chosen].min() - scores[left].max()) / scores.std()
        assert margin > -TIE, f"keys chosen by {where}: {margin:.2g}"
    elif visible:
        assert chosen.max() < visible, where
    return chosen


def distance(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The greatest of the rows, relative. NaN is a distance of infinity."""
    error = (actual - expected).norm(dim=-1) / expected.norm(dim=-1)
    return float(error.nan_to_num(nan=math.inf).max())


LAYERS = [(kind, _FNUZ) for kind in RATIOS]


def layers(*more: tuple[str, bool]):
    values = [*LAYERS, *more]
    names = [f"{kind}-{'fnuz' if fnuz else 'ocp'}" for kind, fnuz in values]
    return pytest.mark.parametrize("kind, fnuz", values, ids=names)


@layers(*[("c4a", False)] if DEVICE == "cpu" else [])
def test_short_prompts(chain, kind, fnuz):
    """Prompts of 1 to 130 tokens, and a token decoded after each.

    One of 130 tokens has all its queries checked. Those of 127, 128 and 129 are its
    prefixes, of which the last two tokens are new.
    """
    layer = chain(kind, fnuz)
    layer.sequence("130", 131, seed=1)
    layer.sequence("7", 8, seed=3)  # other tokens
    for name in ("1", "3", "4", "5"):
        layer.fork(name, "130")
    prompts = [
        Request("1", 0, 1),  # a single token counts as one to decode
        Request("130", 0, 130),
        *(Request("130", length - 2, length) for length in (127, 128, 129)),
        # More than four: these are gathered after the others, and much shorter.
        *(Request(name, 0, int(name)) for name in ("3", "4", "7", "5")),
    ]
    prefilled = layer.step(prompts)
    check(layer, prompts, prefilled)

    lengths = {"1": [1], "7": [7], "3": [3], "4": [4], "5": [5]}
    lengths["130"] = [126, 127, 128, 129, 130]
    tokens = [
        Request(name, length, length + 1)
        for name, ends in lengths.items()
        for length in ends
    ]
    decoded = layer.step(tokens)
    check(layer, tokens, decoded)
    # As if there had been one prefill. Row 0 is the prompt of one token.
    for row, request in enumerate(tokens[:-1]):
        if request.pages == "7":
            continue
        one = prefilled.attended[1 + request.start]
        assert distance(decoded.attended[row], one) < ATTENDED, request
        one = prefilled.hidden[None, 1 + request.start]
        assert distance(decoded.hidden[row : row + 1], one) < PROJECTED, request


def long_sequence(layer: Chain) -> None:
    """Tokens up to 2046, and from 2049 up to 4095, are in the caches."""
    layer.sequence("long", LONGEST, seed=2)
    for start, middle, end in ((0, 1920, 2046), (2049, 3968, 4095)):
        # The first tokens compress what was not written. It is put there after.
        layer.write(Request("long", middle - 8, end))
        layer.place(Request("long", start, middle))


@layers()
def test_long_prompts(chain, kind, fnuz):
    """Prompts of 2047, 2048, 2049 and 4097 tokens, and a token decoded after each.

    The first three are one prompt whose last tokens are new. Keys far behind are put
    into the caches by the model.
    """
    layer = chain(kind, fnuz)
    long_sequence(layer)
    prompts = [Request("long", 2046, 2049), Request("long", 4095, 4097)]
    prefilled = layer.step(prompts)
    check(layer, prompts, prefilled)
    tokens = [Request("long", n, n + 1) for n in (2047, 2048, 2049, 4097)]
    decoded = layer.step(tokens)
    check(layer, tokens, decoded)
    for row in (0, 1):
        one = prefilled.attended[1 + row]
        assert distance(decoded.attended[row], one) < ATTENDED, tokens[row]


@layers()
def test_draft(chain, kind, fnuz):
    """Two guessed tokens are decoded with the next one of each request."""
    layer = chain(kind, fnuz, draft=2)
    long_sequence(layer)
    layer.sequence("short", 8, seed=3)
    prompt = [Request("short", 0, 5)]
    check(layer, prompt, layer.step(prompt))
    tokens = [
        Request("short", 5, 8),
        Request("long", 2046, 2049),
        Request("long", 4095, 4098),
    ]
    check(layer, tokens, layer.step(tokens))
