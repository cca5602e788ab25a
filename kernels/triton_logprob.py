# mypy: disable-error-code="no-untyped-def"
"""`linear_logprob` on Triton: over chunks of logits, or without any logits.

With logits: the chunks of `triton_rows` and `triton_epilogue.upstream_rows`; backward computes each
chunk again and turns it into dZ, 8·R·D·V in all.

Without logits, for scoring that needs no gradient: one program multiplies one [BLOCK_R, BLOCK_V]
tile and keeps of it, for each row, the maximum, the sum of the other exponentials and
Σ exp(z - m)(z - m); the tile that holds an action's label stores its logit. A second kernel
combines the tiles of a row in one fixed order. Extra memory: 12 bytes for each row and tile of
columns (at V = 151936: 14 KB a row, instead of 594 KB of logits). No loop over the vocabulary
inside a program: the accumulator is the only large state, and nothing spills. A row's numbers do
not depend on which rows share its tile, so a row alone equals the row in a batch bit for bit.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from .rows import Gradients, Live, padded
from .triton_epilogue import launch, upstream_rows
from .triton_rows import ALIGN, Products, add_rows, chunk_rows, first_actions, float16_gain
from .triton_softmax import Configuration, combine, configuration, final_logit

SMALL_ROWS = 512
NARROW_WIDTH = 2048
STEP_D = 32  # the product goes over the width by whole steps
GROUP = 8  # row blocks that share a tile of the head while it is in cache


def without_logits(rows: int, width: int, vocab: int, free_bytes: float = math.inf) -> bool:
    """Whether scoring `rows` rows without gradients should keep no logits, by bytes and rows.

    free_bytes  device memory that is left

    1. The tiles need a width that is a multiple of 32: others keep logits.
    2. A chunk keeps 4 · vocab bytes for each of its rows, the tiles 12 bytes a row and 128 columns,
       a fortieth. Where a chunk does not fit, the tiles are taken.
    3. Up to 512 rows, below the balance of A100 to H200, both are bound by reading the head, and
       the tiles save 8 bytes an element (written once, read once).
    4. Above, a chunk costs these 8 bytes, and the tiles a product slower than the library's. With
       the library at 70 % of the H200's 990 TFLOP/s and 4.8 TB/s, traffic is 1.7 ps an element and
       the product 2 · width / 690 TFLOP/s = 2.9 ps · (width / 1000): at three quarters of the
       library's speed the tiles win below a width of about 1700, and up to 2048 they are taken for
       their memory.

    These are predictions of a model, not measurements. Example at V = 151936: 8192 rows of width
    576 True, of width 4096 False, and True with less than 1.2 GB free; 64 rows of width 4096 True.
    """
    if width % STEP_D:
        return False
    chunk = min(chunk_rows(vocab, "cuda"), padded(rows))
    return 4 * vocab * chunk > free_bytes or rows <= SMALL_ROWS or width <= NARROW_WIDTH


def free_bytes(device: torch.device) -> float:
    """What torch may still allocate there: free for everyone, and its own cache."""
    if device.type != "cuda":
        return math.inf
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return float(torch.cuda.mem_get_info(device)[0] + cached)


def score(
    hidden_RD: Tensor,
    head_VD: Tensor,
    bias_V: Tensor | None,
    live: Live,
    temperature: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """(logprob_A, entropy_A) of the live actions, over chunks of logits."""
    pass_ = _Upstream(head_VD, bias_V, live, temperature, softcap)
    for chunk in live.chunks(pass_.products.chunk, pass_.products.chunk):
        pass_.products.logits(pass_.products.hidden(hidden_RD.detach(), chunk.row_C))
        pass_.launch(chunk.start, len(chunk.row_C), None, None, 1.0)
    return pass_.logprob_A, pass_.entropy_A


def differentiate(
    hidden_RD: Tensor,
    head_VD: Tensor,
    bias_V: Tensor | None,
    live: Live,
    temperature: float,
    softcap: float | None,
    upstream: tuple[Tensor | None, Tensor | None],
    gradients: Gradients,
) -> None:
    """Adds the gradients of hidden, head and bias for upstream gradients (logprob, entropy) of the
    live actions. The buffer of logits is gone when this returns, before anything is rounded."""
    glogprob_A, gentropy_A = (None if g is None else g.float().contiguous() for g in upstream)
    if glogprob_A is None:
        glogprob_A = torch.zeros(len(live.label_A), device=head_VD.device)
    wide = gradients.dbias_V is not None
    pass_ = _Upstream(head_VD, bias_V, live, temperature, softcap, wide)
    size_A = glogprob_A.abs() if gentropy_A is None else glogprob_A.abs() + gentropy_A.abs()
    gain = float16_gain(head_VD.dtype, size_A, live, temperature)
    for chunk in live.chunks(pass_.products.chunk, pass_.products.chunk):
        x_CD = pass_.products.hidden(hidden_RD.detach(), chunk.row_C)
        pass_.products.logits(x_CD)
        count = len(chunk.row_C)
        pass_.launch(chunk.start, count, glogprob_A, gentropy_A, gain)
        dz_CV = pass_.products.all_rows(count)
        add_rows(gradients, pass_.products, chunk.row_C, dz_CV, x_CD, gain)


class _Upstream:
    """Launches of `upstream_rows` over the chunks of one call."""

    def __init__(
        self,
        head_VD: Tensor,
        bias_V: Tensor | None,
        live: Live,
        temperature: float,
        softcap: float | None,
        wide: bool = False,
    ) -> None:
        self.live, self.first_R = live, first_actions(live)
        self.temperature, self.softcap = temperature, softcap
        self.products = Products(head_VD, bias_V, len(live.row_R), wide=wide)
        count, device = len(live.label_A), head_VD.device
        self.logprob_A, self.entropy_A, self._slope_A = (
            torch.empty(count, device=device) for _ in range(3)
        )

    def launch(
        self,
        start: int,
        count: int,
        glogprob_A: Tensor | None,
        gentropy_A: Tensor | None,
        gain: float,
    ) -> None:
        """Rows start : start + count of the call, whose logits are in the buffer."""
        z_CV, dz_CV, bias_V = self.products.buffer_CV, self.products.dz_CV, self.products.bias_V
        upstream_rows[(count,)](
            z_CV,
            dz_CV,
            z_CV if bias_V is None else bias_V,
            self.live.label_A,
            self.first_R,
            z_CV if glogprob_A is None else glogprob_A,
            z_CV if gentropy_A is None else gentropy_A,
            self.logprob_A,
            self.entropy_A,
            self._slope_A,
            start,
            self.products.vocab,
            z_CV.stride(0),
            dz_CV.stride(0),
            float(self.temperature),
            1.0 if self.softcap is None else float(self.softcap),
            gain,
            HAS_BIAS=bias_V is not None,
            HAS_CAP=self.softcap is not None,
            HAS_ENTROPY=gentropy_A is not None,
            GRADIENT=glogprob_A is not None,
            **launch(self.products.vocab),
        )


def tile_shape(width: int, dtype: torch.dtype, options: bool) -> dict[str, int]:
    """Tile and warps of the no-logits product, from (D, dtype, bias or softcap) and never from the
    rows.

    128 × 256 spills (34 instructions on sm_90, 471 on sm_80), 128 × 128 does not, except with a
    bias or a softcap on sm_100 (18): those take 64 columns. Example: bfloat16 at D = 2048 without
    either gives tiles of 128 × 128 × 64 on 8 warps.
    """
    if dtype == torch.float32:
        return {"BLOCK_R": 32, "BLOCK_V": 64, "BLOCK_D": STEP_D, "num_warps": 4, "num_stages": 3}
    return {
        "BLOCK_R": 128,
        "BLOCK_V": 64 if options else 128,
        "BLOCK_D": STEP_D if width % 64 else 64,
        "num_warps": 8,
        "num_stages": 3,
    }


@triton.jit(do_not_specialize=["rows"])
def tile_statistics(
    p_x,
    p_w,
    p_bias,
    p_label,
    p_first,
    p_stat,
    p_target,
    rows,
    vocab,
    width,
    stride_x,
    stride_w,
    stride_stat,
    temperature,
    softcap,
    HAS_BIAS: tl.constexpr,
    HAS_CAP: tl.constexpr,
    INTERPRET: tl.constexpr,
    GROUP_R: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """(m, rest, dot) of each row over one tile of columns, into stat[row, {0, 1, 2}, tile]."""
    blocks_r = tl.cdiv(rows, BLOCK_R)
    blocks_v = tl.cdiv(vocab, BLOCK_V)
    i_program = tl.program_id(0)
    i_group = i_program // (GROUP_R * blocks_v)
    height = tl.minimum(blocks_r - i_group * GROUP_R, GROUP_R)
    i_inside = i_program - i_group * GROUP_R * blocks_v
    i_r = i_group * GROUP_R + i_inside % height
    i_v = i_inside // height
    o_r = i_r * BLOCK_R + tl.arange(0, BLOCK_R)
    o_v = i_v * BLOCK_V + tl.arange(0, BLOCK_V)
    o_d = tl.arange(0, BLOCK_D)
    m_r = o_r < rows
    m_v = o_v < vocab
    # Rows and columns beyond the end read the last one: no mask inside the loop.
    in_r = tl.minimum(o_r, rows - 1).to(tl.int64)
    in_v = tl.minimum(o_v, vocab - 1).to(tl.int64)
    p_xb = p_x + in_r[:, None] * stride_x + o_d[None, :]
    p_wb = p_w + in_v[None, :] * stride_w + o_d[:, None]
    acc = tl.zeros([BLOCK_R, BLOCK_V], tl.float32)
    for _ in range(0, width, BLOCK_D):
        x = tl.load(p_xb)
        w = tl.load(p_wb)
        if INTERPRET:  # the interpreter multiplies the bits of bfloat16
            x = x.to(tl.float32)
            w = w.to(tl.float32)
        acc = tl.dot(x, w, acc, input_precision="ieee")
        p_xb += BLOCK_D
        p_wb += BLOCK_D
    bias = 0.0
    if HAS_BIAS:
        bias = tl.load(p_bias + in_v)[None, :]
    z, _ = final_logit(acc, bias, temperature, softcap, HAS_CAP)
    z = tl.where(m_v[None, :], z, float("-inf"))
    # Labels first: the logits are dead once they are shifted, and registers are what is scarce.
    a_first = tl.load(p_first + o_r, mask=m_r, other=0)
    a_last = tl.load(p_first + o_r + 1, mask=m_r, other=0)
    most = tl.max(a_last - a_first, 0)
    for k in range(0, most):  # the k-th action of every row
        m_a = a_first + k < a_last
        label = tl.load(p_label + a_first + k, mask=m_a, other=-1)
        place = (label - i_v * BLOCK_V).to(tl.int32)
        hit = place[:, None] == tl.arange(0, BLOCK_V)[None, :]
        target = tl.sum(tl.where(hit, z, 0.0), 1)
        mine = (place >= 0) & (place < BLOCK_V)
        tl.store(p_target + a_first + k, target, mask=m_a & mine)
    m = tl.max(z, 1)
    z = tl.where(z == float("-inf"), float("-inf"), z - m[:, None])
    e = tl.exp(z)
    dot = tl.sum(tl.where(e == 0.0, 0.0, e * z), 1)
    rest = tl.sum(tl.where(z == 0.0, 0.0, e), 1)
    rest += tl.sum((z == 0.0).to(tl.float32), 1) - 1.0
    rest = tl.where((m == float("-inf")) & (rest < 0.0), 0.0, rest)  # NaN stays
    p_out = p_stat + o_r.to(tl.int64) * 3 * stride_stat + i_v
    tl.store(p_out, m, mask=m_r)
    tl.store(p_out + stride_stat, rest, mask=m_r)
    tl.store(p_out + 2 * stride_stat, dot, mask=m_r)


@triton.jit
def combine_tiles(
    p_stat,
    p_target,
    p_first,
    p_logprob,
    p_entropy,
    tiles,
    stride_stat,
    BLOCK: tl.constexpr,
):
    """Log-probabilities and entropies of a row's actions from the statistics of its tiles."""
    i_row = tl.program_id(0).to(tl.int64)
    o_t = tl.arange(0, BLOCK)
    m_t = o_t < tiles
    p_row = p_stat + i_row * 3 * stride_stat + o_t
    m = tl.load(p_row, mask=m_t, other=float("-inf"))
    rest = tl.load(p_row + stride_stat, mask=m_t, other=0.0)
    dot = tl.load(p_row + 2 * stride_stat, mask=m_t, other=0.0)
    top, logsum, _, entropy = combine(m, rest, dot)
    for a in range(tl.load(p_first + i_row), tl.load(p_first + i_row + 1)):
        tl.store(p_logprob + a, (tl.load(p_target + a) - top) - logsum)
        tl.store(p_entropy + a, entropy)


def by_tiles(
    hidden_RD: Tensor,
    head_VD: Tensor,
    bias_V: Tensor | None,
    live: Live,
    temperature: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """(logprob_A, entropy_A) of the live actions, without logits and without gradients; the width
    is a multiple of 32."""
    hidden_RD, head_VD = hidden_RD.detach(), head_VD.detach()
    rows, (vocab, width), device = len(live.row_R), head_VD.shape, head_VD.device
    count = len(live.label_A)
    target_A, logprob_A, entropy_A = (torch.empty(count, device=device) for _ in range(3))
    if not count:
        return logprob_A, entropy_A
    x_RD = hidden_RD if rows == len(hidden_RD) else hidden_RD[live.row_R]
    x_RD = x_RD if x_RD.stride(1) == 1 else x_RD.contiguous()
    head_VD = head_VD if head_VD.stride(1) == 1 else head_VD.contiguous()
    shape = tile_shape(width, head_VD.dtype, bias_V is not None or softcap is not None)
    tiles = triton.cdiv(vocab, shape["BLOCK_V"])
    block = max(16, triton.next_power_of_2(tiles))
    stride = -(-tiles // ALIGN) * ALIGN
    stat_R3T = torch.empty(rows, 3, stride, device=device)
    first_R = first_actions(live)
    if bias_V is not None:
        bias_V = bias_V.detach().float().contiguous()
    tile_statistics[(triton.cdiv(rows, shape["BLOCK_R"]) * tiles,)](
        x_RD,
        head_VD,
        stat_R3T if bias_V is None else bias_V,
        live.label_A,
        first_R,
        stat_R3T,
        target_A,
        rows,
        vocab,
        width,
        x_RD.stride(0),
        head_VD.stride(0),
        stride,
        float(temperature),
        1.0 if softcap is None else float(softcap),
        HAS_BIAS=bias_V is not None,
        HAS_CAP=softcap is not None,
        INTERPRET=device.type == "cpu",
        GROUP_R=GROUP,
        **shape,
    )
    warps = max(1, min(8, block // 256))
    combine_tiles[(rows,)](
        stat_R3T,
        target_A,
        first_R,
        logprob_A,
        entropy_A,
        tiles,
        stride,
        BLOCK=block,
        num_warps=warps,
    )
    return logprob_A, entropy_A


OPTIONS = {"plain": (), "full": ("bias", "cap"), "bias": ("bias",), "cap": ("cap",)}


def configurations() -> list[Configuration]:
    """The launches at the shapes of SmolLM2, Qwen3 and GPT-2's ragged vocabulary: plain and with
    all options, single options at one width; half of float32's and float16's."""
    usual, single = ((576, 49152), (2048, 151936), (4096, 151936)), ("bias", "cap")
    ragged = ((2048, 50257), (96, 50257))
    launches = [(size, "bf16", o) for size in usual + ragged for o in ("plain", "full")]
    launches += [(size, "bf16", o) for size in (usual[1], ragged[0]) for o in single]
    launches += [(size, "fp16", o) for size in (usual[1], ragged[0]) for o in ("plain", "full")]
    launches += [(size, "fp32", o) for size in usual for o in ("plain", "full")]
    launches += [(ragged[0], "fp32", "full")]
    found = [_tile_configuration(*launch) for launch in launches]
    for vocab in (49152, 151936):
        for block_v in (128, 64):
            block = triton.next_power_of_2(triton.cdiv(vocab, block_v))
            types = {"p_first": "*i64", "tiles": "i32", "stride_stat": "i32"}
            found.append(
                configuration(
                    f"combine_tiles/V{vocab}/{block_v}",
                    combine_tiles,
                    {n: types.get(n, "*fp32") for n in combine_tiles.arg_names},
                    {"BLOCK": block},
                    ("stride_stat",),
                    (max(1, min(8, block // 256)), 1),
                )
            )
    return found


NARROW = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def _tile_configuration(size: tuple[int, int], narrow: str, name: str) -> Configuration:
    width, vocab = size
    options = OPTIONS[name]
    shape = tile_shape(width, NARROW[narrow], bool(options))
    constants = {k: v for k, v in shape.items() if k.startswith("BLOCK")} | {
        "HAS_BIAS": "bias" in options,
        "HAS_CAP": "cap" in options,
        "INTERPRET": False,
        "GROUP_R": GROUP,
    }
    integers = ("rows", "vocab", "width", "stride_x", "stride_w", "stride_stat")
    types = dict.fromkeys(integers, "i32") | {"temperature": "fp32", "softcap": "fp32"}
    types |= {"p_x": f"*{narrow}", "p_w": f"*{narrow}", "p_label": "*i64", "p_first": "*i64"}
    whole = () if vocab % 16 else ("vocab",)  # the launch tells the compiler what 16 divides
    return configuration(
        f"tile_statistics/D{width}/V{vocab}/{narrow}/{name}",
        tile_statistics,
        {n: types.get(n, "*fp32") for n in tile_statistics.arg_names},
        constants,
        (*whole, "width", "stride_x", "stride_w", "stride_stat"),
        (shape["num_warps"], shape["num_stages"]),
    )
