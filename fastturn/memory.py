"""What a run needs of memory: what is held all the time, the peak of a step, and that of sampling.

    peak of a step = held + gradients + the largest of its phases

All phases are those of a step of several micro-batches, whose gradients are there from the first
one on. `KEPT` is what autograd keeps of a layer, counted in Qwen3 and Llama of transformers;
`phases` says what else is alive when. The sum is what torch's allocator hands out at most: on CPU a
test compares it with real steps. What the C library, CUDA and Python take comes on top.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from fastturn.algorithms import algorithm_of
from fastturn.config import Config, ConfigError
from fastturn.shape import Shape, shape_of

GIB = 2**30
FLOAT32 = 4
EIGHT_BIT = (1 + FLOAT32 / 256) / FLOAT32  # a code, and a scale for every 256, over float32
# Limits of parts that cannot be imported without torch; a test compares them with the parts.
HEAD_BYTES = {"cpu": 64 << 20, "cuda": 1 << 30}  # logits that the fused head holds at a time
HEAD_ROWS = {"cpu": 1024, "cuda": 8192}
HEAD_GRANULE = 8  # rows are padded to a multiple of it
RESIDENT_TOKENS = 65536  # most tokens that the sampler decodes at once
STORE_GIB = 0.5  # keys and values that it keeps for the next call
KEPT_CACHE = "keys and values kept"
PUBLISHED = "weights to publish from (rank 0 only)"
HOST = " (host)"  # ends the names of uses that are in host memory while devices are GPUs
PROCESS_GIB = 0.43  # resident in a process that has loaded everything and computed one tiny step


class Kept(NamedTuple):
    """What a layer keeps of a token for the backward pass: `size` numbers, several times.

    `size` of (shape, rank of adapters). `wide`: copies in float32; `narrow`: in the dtype that is
    computed in; `trained`: such copies only where the layer's own weights train; `inside`: copies
    inside attention, which are float32 on a CPU and narrow on a GPU.
    """

    what: str
    size: Callable[[Shape, int], float]
    wide: int = 0
    narrow: int = 0
    trained: int = 0
    inside: int = 0


def _both(shape: Shape) -> int:
    return shape.queries + shape.keys


def _mlp(shape: Shape) -> float:
    """Width of the gated MLPs that a token goes through in a layer, the mean of all."""
    sparse = shape.experts_used * shape.expert_mlp + shape.shared_mlp
    share = shape.expert_layers / shape.layers
    return shape.mlp * (1 - share) + sparse * share


# Norms keep their input, 1 / its length, what it is with unit length (for the weight's gradient)
# and, where linear layers read it, the result. Attention keeps queries, keys, values and result;
# the output layer keeps the result once more. MLPs keep gate, its activation, up and the product.
KEPT = (
    Kept("norms", lambda s, r: 2 * s.width, wide=1, narrow=1, trained=1),
    Kept("inverse lengths", lambda s, r: 2 + s.head_norms * (s.heads + s.kv_heads), wide=1),
    Kept("norms of heads", lambda s, r: s.head_norms * _both(s), wide=1, trained=1),
    Kept("queries and results", lambda s, r: s.queries, narrow=1, inside=2),
    Kept("keys and values", lambda s, r: 2 * s.keys, inside=1),
    Kept("MLP", lambda s, r: _mlp(s), narrow=4),
    Kept("to and from experts", lambda s, r: s.experts_used * s.width, narrow=2),
    Kept("router", lambda s, r: s.experts, wide=1),
    Kept("A x of seven adapters", lambda s, r: 7 * r, narrow=1),
)


class Product(NamedTuple):
    """Matrix products of a layer: how many numbers each makes of a token, and how many of them
    there are, the mean of all layers. `adapted` by a pair of narrow ones where adapters train."""

    columns: Callable[[Shape], int]
    copies: Callable[[Shape], float] = lambda s: 1
    adapted: bool = True


def _sparse(shape: Shape) -> float:
    """Share of layers with experts."""
    return shape.expert_layers / shape.layers


PRODUCTS = (
    Product(lambda s: s.queries),
    Product(lambda s: s.keys, lambda s: 2),
    Product(lambda s: s.width),
    Product(lambda s: s.mlp, lambda s: 2 * (1 - _sparse(s))),
    Product(lambda s: s.width, lambda s: 1 - _sparse(s)),
    Product(
        lambda s: s.experts_used * s.expert_mlp + s.shared_mlp, lambda s: 2 * _sparse(s), False
    ),
    Product(lambda s: s.experts_used * s.width, _sparse, False),
    Product(lambda s: s.experts, _sparse, False),
)
# Selective checkpointing computes a product again that is more times as wide as what it sums over.
WIDEST = 8


class Setting(NamedTuple):
    """What of a configuration a step's memory depends on."""

    device: str  # "cpu" or "cuda"
    compute: int  # bytes of a number that is computed with
    stored: int  # and of a weight, a gradient, a moment
    rank: int  # of adapters, 0 when every weight trains
    checkpointing: str  # none, full, selective
    fsdp: bool
    moment: float  # size of a moment of AdamW over that of its weight
    muon: bool  # matrices have one momentum instead
    shards: int  # ranks that share one copy of the weights
    split: bool  # the head's rows stay with their ranks
    offloaded: bool  # what FSDP keeps between uses is not on the device

    @classmethod
    def of(cls, config: Config, ranks: int = 1) -> Setting:
        fsdp = ranks > 1 or config.needs_mesh
        device = device_kind(config.device)
        return cls(
            device=device,
            compute=_compute_bytes(config),
            stored=2 if config.model.dtype == "bfloat16" else FLOAT32,
            rank=config.model.lora_rank,
            checkpointing=config.model.gradient_checkpointing,
            fsdp=fsdp,
            moment=EIGHT_BIT if config.model.dtype == "mixed8" else 1.0,
            muon=config.optim.muon_lr > 0,
            shards=config.dist.shard_ranks or ranks,
            split=config.dist.split_head and fsdp,
            offloaded=config.dist.cpu_offload and device == "cuda",
        )

    @property
    def inside(self) -> int:
        """Bytes of a number inside attention."""
        return FLOAT32 if self.device == "cpu" else self.compute

    @property
    def sharers(self) -> int:
        """Ranks that score each other's actions, each with its rows of the head."""
        return self.shards if self.split else 1


def device_kind(device: str) -> str:
    """ "cpu" or "cuda"; for "auto" whether this machine has a GPU, which the driver's files say at
    once and torch in seconds."""
    if device != "auto":
        return device
    return "cuda" if any(Path("/dev").glob("nvidia[0-9]*")) else "cpu"


def device_sum(*parts: Mapping[str, float]) -> float:
    """GiB of the uses of all parts that are on the device."""
    return sum(gib for uses in parts for name, gib in uses.items() if not name.endswith(HOST))


def kept_bytes(shape: Shape, setting: Setting) -> float:
    """Bytes that one layer keeps of one token for the backward pass.

    Example: Llama of width 384, MLP 1024, 6 heads of 64 and 2 for keys in float32:
    4 · (6 · 384 + 4 · 1024 + 3 · 384 + 2 · 128 + 2) = 31 240.
    """
    total = 0.0
    for kept in KEPT:
        narrow = kept.narrow + (0 if setting.rank else kept.trained)
        copies = FLOAT32 * kept.wide + setting.compute * narrow + setting.inside * kept.inside
        total += kept.size(shape, setting.rank) * copies
    return total


def selected_bytes(shape: Shape, setting: Setting) -> float:
    """Bytes of results that one layer keeps of one token under selective checkpointing: those of
    matrix products (where adapters train, of their first ones too) and of attention.

    Example: the Llama of `kept_bytes`: 4 · (384 + 2 · 128 + 384 + 2 · 1024 + 384 + 384) = 15 360.
    """
    numbers = 0.0
    for product in PRODUCTS:
        columns, rank = product.columns(shape), setting.rank * product.adapted
        second = columns if rank and columns <= WIDEST * rank else 0
        numbers += product.copies(shape) * (columns + rank + second)
    return numbers * setting.compute + shape.queries * setting.inside


def checkpointed_bytes(shape: Shape, setting: Setting) -> tuple[float, float]:
    """Bytes of one token: what every layer keeps until its backward pass, and what is added in the
    last one when that has been computed again."""
    layer, given = kept_bytes(shape, setting), shape.width * setting.compute
    if setting.checkpointing == "none":
        return layer, 0.0
    if setting.checkpointing == "full":
        return given, layer
    selected = selected_bytes(shape, setting)
    return given + selected, layer - selected


def activations_token(shape: Shape, setting: Setting) -> float:
    """Bytes that all layers keep of one token, with all of the one that is computed again."""
    every, again = checkpointed_bytes(shape, setting)
    return shape.layers * every + again


def held_gib(config: Config, shape: Shape, ranks: int = 1) -> dict[str, float]:
    """What one of `ranks` processes holds of the model as long as the run lasts, in GiB by use.

    Example: 1.7 billion parameters in float32 on 8 ranks: weights .79, moments 1.58, and 6.33 for
    the whole copy that each samples from, or that rank 0 publishes from when servers sample.
    """
    setting = Setting.of(config, ranks)
    frozen = shape.parameters * setting.stored / setting.shards
    trained, turned = _trained_bytes(shape, setting), _matrices_bytes(shape, setting)
    referred = config.loss.kl_coef > 0 and not config.starts_as_reference
    copy = (shape.parameters + shape.adapters(setting.rank)) * setting.compute
    copied = setting.fsdp or (config.rollout.engine == "local" and algorithm_of(config).lags)
    name = "weights to sample from" if config.rollout.engine == "local" else PUBLISHED
    place = HOST * setting.offloaded
    uses = {
        f"weights{place}": frozen + (trained if setting.rank else 0),
        f"momenta of Muon{place}": setting.muon * turned,
        f"AdamW moments{place}": 2 * (trained - setting.muon * turned) * setting.moment,
        f"reference weights{place}": referred * frozen,
        name: copied * copy,
    }
    return {name: value / GIB for name, value in uses.items() if value}


def step_gib(
    config: Config, shape: Shape, ranks: int = 1, tokens: int = 0, rows: int | None = None
) -> dict[str, float]:
    """What the largest phase of a step adds to what is held, in GiB by use.

    `tokens` of each micro-batch, `rows` of them with an action behind them (None: all). With 0
    tokens it is what no smaller micro-batch can save.
    """
    setting = Setting.of(config, ranks)
    found = phases(shape, setting, tokens, tokens if rows is None else rows)
    most = max(found.values(), key=device_sum)
    uses = {f"gradients{HOST * setting.offloaded}": _trained_bytes(shape, setting), **most}
    return {name: value / GIB for name, value in uses.items() if value}


def phases(shape: Shape, setting: Setting, tokens: int, rows: int) -> dict[str, dict[str, float]]:
    """Bytes by use, of everything that is alive at a point of a step beside weights, moments and
    gradients: in the loss, in the backward pass of the last block, when FSDP sums the gradients of
    the embeddings, and in the steps of the optimisers."""
    compute = setting.compute
    every, again = checkpointed_bytes(shape, setting)
    whole, trained = setting.rank == 0, setting.rank == 0
    table = shape.vocabulary * shape.width
    rows_held = table / setting.sharers
    block = shape.block if whole else shape.adapters(setting.rank) / shape.layers
    root = setting.fsdp * (shape.embeddings - setting.split * table) * compute
    used = root + setting.split * (compute < setting.stored) * rows_held * compute
    summed = FLOAT32 * (1 + 1 / setting.shards)  # float32 in, own share out
    place = HOST * setting.offloaded
    return {
        "loss": {
            "activations": tokens * (shape.layers * every + shape.width * (4 + compute * trained)),
            "gathered weights": used,
            "hidden states of actions": rows
            * shape.width
            * (setting.sharers * (compute + FLOAT32) + setting.split * compute),
            "gradient of the head": trained * rows_held * FLOAT32,
            "head in float32": (compute < FLOAT32 and setting.device == "cpu")
            * rows_held
            * FLOAT32,
            "logits of a head chunk": _logits(shape, setting, rows),
        },
        "backward": {
            "activations": tokens * (shape.layers * every + again),
            "gradients of activations": tokens * compute * 2 * (_mlp(shape) + shape.width),
            "gathered weights": used + setting.fsdp * 2 * shape.block * compute,
            "gradients that are summed": setting.fsdp * block * (compute + summed),
            "gradient of the head": trained * (shape.tied or setting.fsdp) * rows_held * compute,
        },
        "sum": {
            "gathered weights": used,
            "gradients that are summed": trained * root * (1 + summed / compute),
        },
        "AdamW": {f"roots of second moments{place}": _roots(shape, setting)},
        "Muon": {
            f"update of the largest matrix{place}": setting.muon * whole * _update(shape, setting)
        },
    }


def sampling_gib(config: Config, shape: Shape, rows: int) -> dict[str, float]:
    """Upper estimates of what sampling adds to what is held, in GiB by use, for `rows` completions
    at a time: keys and values at full context, up to the sampler's own limits. Shared contexts make
    them smaller. Those that are kept (`KEPT_CACHE`) stay until the next publish, beside a step."""
    if config.rollout.engine != "local":
        return {}
    resident = min(rows * config.model.max_context, RESIDENT_TOKENS)
    decode = resident * shape.cache_token * _compute_bytes(config) / GIB
    return {KEPT_CACHE: min(decode, STORE_GIB), "keys and values in decoding": decode}


def saving_gib(config: Config, shape: Shape, ranks: int = 1) -> float:
    """Host memory of what a checkpoint is written from: a copy of all that training changes, in
    which moments of 8 bits are wide."""
    setting = Setting.of(config, ranks)
    return (
        3 * _trained_bytes(shape, setting) - setting.muon * _matrices_bytes(shape, setting)
    ) / GIB


def require_memory(config: Config, ranks: int, device_gib: float, host_gib: float) -> None:
    """`ConfigError`, with the arithmetic, when a rank's device, or its share of its machine's
    memory, cannot hold even a step of no tokens."""
    shape = shape_of(config)
    if shape is None:
        return
    uses = held_gib(config, shape, ranks) | step_gib(config, shape, ranks)
    on_host = {name: gib for name, gib in uses.items() if name.endswith(HOST)}
    on_device = {name: gib for name, gib in uses.items() if name not in on_host}
    for part, whole_gib, remedy in (
        (on_device, device_gib, "" if config.dist.cpu_offload else ", dist.cpu_offload=true"),
        (on_host, host_gib, ""),
    ):
        if sum(part.values()) > whole_gib:
            terms = " + ".join(f"{name} {gib:.2f}" for name, gib in part.items())
            raise ConfigError(
                f"{shape.parameters / 1e9:.2f} billion parameters in {config.model.dtype} on "
                f"{ranks} rank{'s' * (ranks > 1)}: {terms} = {sum(part.values()):.2f} GiB on each, "
                f"which has {whole_gib:.2f} GiB; use more ranks, model.dtype=bfloat16{remedy}, or "
                f"a smaller model"
            )


def _compute_bytes(config: Config) -> int:
    return {"float32": 4, "bfloat16": 2}[config.model.compute_dtype]


def _trained_bytes(shape: Shape, setting: Setting) -> float:
    """The trained weights of one rank. Adapters are float32 whatever they adapt."""
    if setting.rank:
        return shape.adapters(setting.rank) * FLOAT32 / setting.shards
    return shape.parameters * setting.stored / setting.shards


def _matrices_bytes(shape: Shape, setting: Setting) -> float:
    """Those among them that are matrices of the blocks, as all adapters are."""
    if setting.rank:
        return _trained_bytes(shape, setting)
    return shape.matrices * setting.stored / setting.shards


def _roots(shape: Shape, setting: Setting) -> float:
    """Bytes that AdamW takes for the larger of its groups, matrices and the rest."""
    matrices, rest = _matrices_bytes(shape, setting), 0.0
    if setting.rank == 0:
        rest = shape.embeddings * setting.stored / setting.shards
    return max(rest, 0.0 if setting.muon else matrices)


def _update(shape: Shape, setting: Setting) -> float:
    """Bytes of Muon's making one matrix orthogonal: the update, under FSDP also what is sent and
    what has come; the matrix before and after an iteration, one that the product copies, two of its
    squares."""
    count, rows, columns = shape.largest_matrix
    split = setting.fsdp and count == 1
    held = count / (1 if split else setting.shards)  # of experts the own ones
    number = 2 if setting.device == "cuda" else setting.stored
    working = number * (3 * rows * columns + 2 * min(rows, columns) ** 2)
    sent = (3 if split else 1) * setting.stored * rows * columns
    return setting.muon * held * (sent + working)


def _logits(shape: Shape, setting: Setting, rows: int) -> float:
    """The head's buffer: a power of two of rows within its limits, or all of them."""
    vocabulary = -(-shape.vocabulary // setting.sharers)
    fits = max(HEAD_BYTES[setting.device] // (vocabulary * FLOAT32), HEAD_GRANULE)
    most = min(1 << (fits.bit_length() - 1), HEAD_ROWS[setting.device])
    needed = -(-rows * setting.sharers // HEAD_GRANULE) * HEAD_GRANULE
    return min(needed, most) * vocabulary * FLOAT32
