"""Memory, traffic and time of large runs, from shapes and data sheets: the tables of docs/scale.md.

    .venv/bin/python scripts/bench scale [--update]

Nothing is measured here. What one rank holds is `fastturn.memory`'s, as in `--dry-run`; the rest is
bytes over bandwidth and FLOPs over their rate, with the assumptions of `Site` and `Work`.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fastturn.config import Config, Dist, Model, Rollouts
from fastturn.devices import DEVICES, Device
from fastturn.memory import GIB, PUBLISHED, Setting, activations_token, held_gib, step_gib
from fastturn.shape import Shape

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "scale.md"
BFLOAT16, FLOAT32 = 2, 4
STEP_BYTES = 7 * FLOAT32  # AdamW reads weight, gradient, two moments, and writes all but gradients
NODE_GPUS = 8
SIZES = (8, 64, 256, 1024)  # GPUs
MEMORY_GIB = {"H100": 79, "H200": 139}  # as torch reports them


@dataclass(frozen=True, slots=True)
class Subject:
    """A model and the GPUs of one of its servers."""

    name: str
    shape: Shape
    parallel: int = 1


def _qwen3(*sizes: int, tied: bool = False, **experts: int) -> Shape:
    """Of the model's own config.json."""
    return Shape(*sizes, 151936, tied=tied, head_norms=True, **experts)


_EXPERTS = {"experts": 128, "experts_used": 8, "expert_mlp": 1536}
SUBJECTS = (
    Subject("Qwen3-1.7B", _qwen3(28, 2048, 16, 8, 128, 6144, tied=True)),
    Subject("Qwen3-8B", _qwen3(36, 4096, 32, 8, 128, 12288)),
    Subject("Qwen3-32B", _qwen3(64, 5120, 64, 8, 128, 25600), 2),
    Subject("Qwen3-235B-A22B", _qwen3(94, 4096, 64, 4, 128, 12288, **_EXPERTS), 8),
)


@dataclass(frozen=True, slots=True)
class Site:
    """Nodes of eight GPUs, NVLink 450 GB/s and one 400 Gb/s port for each GPU and direction.
    Shares of the data sheet that are reached: `links` of bandwidths, `matrix` of FLOPs while
    training, `memory` of memory bandwidth while decoding."""

    device: Device
    memory_gib: float
    links: float = 0.8
    matrix: float = 0.4
    memory: float = 0.6

    @property
    def nvlink_s(self) -> float:
        return 450e9 * self.links

    @property
    def port_s(self) -> float:
        return 50e9 * self.links

    @property
    def flops_s(self) -> float:
        return self.device.flops_s * self.matrix

    @property
    def memory_s(self) -> float:
        return self.device.bytes_s * self.memory

    def collective_s(self, size: float, gpus: int) -> float:
        """All-gather to, or reduce-scatter from, `size` bytes: every GPU takes in what it lacks by
        NVLink while every node takes in what it lacks by all its ports.

        Example: 16 GB on 8 GPUs: 7/8 · 16 / 360 = .039 s; on 64: 7/8 · 16 / 320 = .044 s.
        """
        nodes = max(1, gpus // NODE_GPUS)
        inside = size * (gpus - 1) / gpus / self.nvlink_s
        between = size * (nodes - 1) / nodes / (NODE_GPUS * self.port_s)
        return max(inside, between)


def _site(name: str) -> Site:
    return Site(next(device for device in DEVICES if device.name == name), MEMORY_GIB[name])


SITES = tuple(map(_site, MEMORY_GIB))
SITE = SITES[0]


@dataclass(frozen=True, slots=True)
class Work:
    """An iteration of RTPO: K turns, each of `turn` sampled tokens and `answer` tokens of the
    environment, `siblings` at every boundary. All episodes are whole and no group is silent."""

    tasks: int = 1024
    turns: int = 6
    siblings: int = 4
    prompt: int = 512
    turn: int = 1024
    answer: int = 1024
    micro_batch: int = 16384  # packed tokens of a rank
    slots: int = 256  # completions in flight on a server, at most

    @property
    def longest(self) -> int:
        return self.prompt + self.turns * (self.turn + self.answer)

    def decoded(self, stage: int) -> int:
        """Tokens that one sibling of this stage samples, one after the other."""
        return (self.turns - stage) * self.turn

    def packed(self, stage: int) -> int:
        """Tokens that the trainer reads: each context once, and turn `stage` of all siblings."""
        context = self.prompt + stage * (self.turn + self.answer)
        return self.tasks * (context + self.siblings * self.turn)

    @property
    def trunks(self) -> float:
        """Tokens of trunks for each token of a sibling, which servers decode beside them."""
        sampled = sum(self.siblings * self.decoded(k) for k in range(self.turns))
        return self.decoded(0) / sampled


WORK = Work()


def _config(shard_ranks: int = 0) -> Config:
    return Config(
        device="cuda",
        model=Model(dtype="mixed", gradient_checkpointing="full"),
        rollout=Rollouts(engine="vllm", urls=("http://server",), carrier="nccl"),
        dist=Dist(shard_ranks=shard_ranks),
    )


def held(subject: Subject, ranks: int, shard_ranks: int = 0) -> tuple[float, float]:
    """GiB of (a rank, rank 0) at the peak of a step in `model.dtype=mixed`; rank 0 has in addition
    the whole copy in bfloat16 that is published."""
    config, shape = _config(shard_ranks), subject.shape
    uses = held_gib(config, shape, ranks)
    step = step_gib(config, shape, ranks, WORK.micro_batch)
    first = sum(uses.values()) + sum(step.values())
    return first - uses[PUBLISHED], first


def gathered(subject: Subject) -> tuple[float, float]:
    """Bytes of a micro-batch: (all-gathers, reduce-scatters). Blocks are gathered for the forward
    and again for the backward pass, the root once, in bfloat16; gradients are summed in float32."""
    shape = subject.shape
    blocks = shape.parameters - shape.embeddings
    gathers = BFLOAT16 * (2 * blocks + shape.embeddings)
    return float(gathers), float(FLOAT32 * shape.parameters)


def traffic_s(subject: Subject, gpus: int, shard_ranks: int = 0) -> float:
    """Seconds of a micro-batch's collectives. With `shard_ranks` of one node, gathers stay inside
    it and the shards of the gradients are all-reduced between nodes, each through its own port."""
    inside = shard_ranks or gpus
    seconds = sum(SITE.collective_s(size, inside) for size in gathered(subject))
    groups = gpus // inside
    shard = FLOAT32 * subject.shape.parameters / inside
    return seconds + 2 * shard * (groups - 1) / groups / SITE.port_s


def train_token_s(subject: Subject) -> float:
    """Seconds of one GPU for one packed token: forward, again for checkpoints, and backward."""
    return 8 * subject.shape.active_parameters / SITE.flops_s


def publish_s(subject: Subject, trainers: int, rate: float | None = None) -> float:
    """The copy is gathered from float32 shards, then sent from rank 0 through one port (or at
    `rate` bytes a second) to all workers in one pipelined broadcast."""
    sent = BFLOAT16 * subject.shape.parameters / (rate or SITE.port_s)
    return SITE.collective_s(FLOAT32 * subject.shape.parameters, trainers) + sent


def sequences(subject: Subject, site: Site = SITE) -> int:
    """Whole episodes whose keys and values fit on one server: nine tenths of its memory, less the
    weights and 2 GiB a GPU for everything else."""
    room = (
        subject.parallel * (0.9 * site.memory_gib - 2) * GIB - BFLOAT16 * subject.shape.parameters
    )
    return max(0, int(room // (WORK.longest * subject.shape.cache_token * BFLOAT16)))


def token_s(subject: Subject, batch: float, site: Site = SITE) -> float:
    """Seconds of a decoding step of `batch` sequences, half as long as the longest, on one server:
    all weights and their keys and values are read once, then multiplied. Traffic between the GPUs
    of a server is left out."""
    kept = batch * WORK.longest / 2 * subject.shape.cache_token
    read = BFLOAT16 * (subject.shape.parameters + kept) / site.memory_s
    computed = 2 * batch * subject.shape.active_parameters / site.flops_s
    return (read + computed) / subject.parallel


@dataclass(frozen=True, slots=True)
class Iteration:
    """Seconds, summed over stages. `batch`: sequences in flight on a server. `first_gib`: what rank
    0 must hold."""

    site: Site
    first_gib: float
    trainers: int
    servers: int
    batch: float
    decode_s: float
    train_s: float
    publish_s: float
    serial_s: float
    overlapped_s: float

    @property
    def fits(self) -> bool:
        return self.first_gib <= self.site.memory_gib


def stage_s(decode_s: float, train_s: float, head_s: float) -> float:
    """A stage with streaming: nothing is trained before the first whole group at `head_s`.

    Example: decode 10, train 8: 11 when the first group is there after 1, and 18 when all come at
    the end.
    """
    return min(decode_s + train_s, head_s + max(decode_s, train_s))


def iteration(subject: Subject, trainers: int, gpus: int, site: Site = SITE) -> Iteration:
    """With `trainers` of the GPUs; the others serve."""
    servers = (gpus - trainers) // subject.parallel
    rows = WORK.tasks * WORK.siblings
    batch = min(rows / servers, WORK.slots, sequences(subject, site))
    rounds = max(1.0, rows / (servers * batch))
    step_s = token_s(subject, batch, site)
    heads = [WORK.decoded(k) * step_s for k in range(WORK.turns)]
    decodes = [head * rounds * (1 + WORK.trunks) for head in heads]
    trains = [WORK.packed(k) / trainers * train_token_s(subject) for k in range(WORK.turns)]
    publish = publish_s(subject, trainers) * WORK.turns
    stages = zip(decodes, trains, heads, strict=True)
    return Iteration(
        site,
        held(subject, trainers)[1],
        trainers,
        servers,
        batch,
        sum(decodes),
        sum(trains),
        publish,
        sum(decodes) + sum(trains) + publish,
        sum(stage_s(*stage) for stage in stages) + publish,
    )


def splits(subject: Subject, gpus: int) -> Iterator[int]:
    """Trainer GPUs to choose from: whole nodes, or whole servers' worth of one node."""
    unit = NODE_GPUS if gpus > NODE_GPUS else subject.parallel
    yield from range(unit, gpus, unit)


def best(subject: Subject, gpus: int) -> Iteration | None:
    """The split with the shortest iteration on the smallest device that rank 0 fits on; the one on
    the first device where there is none that it fits on; None when one node cannot be both."""
    found = [iteration(subject, n, gpus, site) for site in SITES for n in splits(subject, gpus)]
    order = {site: number for number, site in enumerate(SITES)}
    return min(found, key=lambda it: (not it.fits, order[it.site], it.overlapped_s), default=None)


def number(value: float) -> str:
    """Three digits.  Example: 0.0412 -> 0.0412, 1234.5 -> 1234, 12.34 -> 12.3."""
    digits = 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 else 3
    return f"{value:.{digits}f}"


Table = Callable[[], tuple[tuple[str, ...], list[tuple[str, ...]]]]


def models() -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    heads = ("model", "parameters, 10⁹", "bfloat16, GB", "state, GB", "activations, KiB a token")
    heads += ("full checkpointing", "selective", "keys and values, KiB a token", "GiB an episode")
    heads += ("GPUs of a server", "episodes on it")
    rows = []
    for it in SUBJECTS:
        count, cache = it.shape.parameters, it.shape.cache_token * BFLOAT16
        setting = Setting.of(_config())
        ways = (setting._replace(checkpointing=keep) for keep in ("none", "full", "selective"))
        kept = [activations_token(it.shape, way) / 1024 for way in ways]
        values = [count / 1e9, BFLOAT16 * count / 1e9, 16 * count / 1e9, *kept]
        values += [cache / 1024, cache * WORK.longest / GIB]
        counts = (str(it.parallel), str(sequences(it)))
        rows.append((it.name, *map(number, values), *counts))
    return heads, rows


def traffic() -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    heads = ("model", "gathered, GB", "reduced, GB", "8 GPUs, s", "64 GPUs, s")
    heads += ("64, `shard_ranks=8`, s", "tokens a GPU to hide 8", "64", "64, `shard_ranks=8`")
    rows = []
    for it in SUBJECTS:
        sizes = [size / 1e9 for size in gathered(it)]
        seconds = [traffic_s(it, 8), traffic_s(it, 64), traffic_s(it, 64, 8)]
        tokens = [f"{s / train_token_s(it):.0f}" for s in seconds]
        rows.append((it.name, *map(number, [*sizes, *seconds]), *tokens))
    return heads, rows


def publishing() -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    heads = ("model", "sent, GB", "gather on 8 GPUs, s", "gather on 64, s", "broadcast, s")
    heads += ("gather on 64 + broadcast at 8.25 GB/s, s", "AdamW on 64, ms", "Muon on 64, ms")
    rows = []
    for it in SUBJECTS:
        sent = BFLOAT16 * it.shape.parameters
        gathers = [SITE.collective_s(2 * sent, gpus) for gpus in (8, 64)]
        values = [sent / 1e9, *gathers, sent / SITE.port_s, publish_s(it, 64, 8.25e9)]
        values.append(1000 * it.shape.parameters / 64 * STEP_BYTES / SITE.memory_s)
        muon = number(1000 * muon_s(it, 64)) if not it.shape.experts else "–"
        rows.append((it.name, *map(number, values), muon))
    return heads, rows


def muon_s(it: Subject, gpus: int) -> float:
    """Seconds in which GPUs of several nodes make the momenta of all matrices orthogonal (five
    steps of three products), each of them one at a time, and send them there and back in float32
    through their ports. A dense model.

    Example: 72 matrices [4096, 4096] on 64 are two rounds of 5 · 3 · 2 · 4096³ / 396e12 = 5.2 ms;
    their 4.8 GB take twice 4.8 / 64 / 40 = 1.9 ms.
    """
    s = it.shape
    shapes = [(s.queries, s.width), (s.width, s.queries), *2 * [(s.keys, s.width)]]
    shapes += [*2 * [(s.mlp, s.width)], (s.width, s.mlp)]
    flops = sent = 0.0
    for shape, count in Counter(shapes).items():
        short, long = sorted(shape)
        rounds = -(-count * s.layers // gpus)
        flops += rounds * 5 * (2 * 2 * short**2 * long + 2 * short**3)
        sent += 2 * FLOAT32 * count * s.layers * short * long / gpus
    return flops / SITE.flops_s + sent / SITE.port_s


def memory() -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    heads = ("model", *(f"{ranks} ranks" for ranks in (4, 8, 64, 512)), "64, `shard_ranks=8`")
    rows = []
    for it in SUBJECTS:
        pairs = [held(it, ranks) for ranks in (4, 8, 64, 512)] + [held(it, 64, 8)]
        rows.append((it.name, *(" / ".join(map(number, pair)) for pair in pairs)))
    return heads, rows


def heads() -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """A head that is gathered against one that is split over 8 ranks. Every second token of a
    micro-batch has an action behind it."""
    titles = ("model", "gathered and reduced, GB", "split, GB", "equal at tokens a rank")
    titles += ("step, GiB", "step with `split_head`, GiB")
    rows = []
    for it in SUBJECTS:
        table = it.shape.vocabulary * it.shape.width
        whole = (BFLOAT16 + FLOAT32) * table
        # Hidden states in bfloat16 once, their float32 gradient reduced and gathered; a tied
        # embedding's rows in bfloat16, there and back.
        token = it.shape.width * (0.5 * (BFLOAT16 + 2 * FLOAT32) + it.shape.tied * 2 * BFLOAT16)
        split = 8 * WORK.micro_batch * token
        steps = []
        for config in (_config(), replace(_config(), dist=Dist(split_head=True))):
            uses = step_gib(config, it.shape, 8, WORK.micro_batch, WORK.micro_batch // 2)
            steps.append(sum(uses.values()))
        cells = [number(size / 1e9) for size in (whole, split)] + [f"{whole / token / 8:.0f}"]
        rows.append((it.name, *cells, *map(number, steps)))
    return titles, rows


def sizes() -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    heads = ("model", "GPUs", "of", "trainer GPUs + servers", "in flight on each", "decode, s")
    heads += ("train, s", "publish, s", "serial, s", "overlapped, s", "over the longer")
    rows = []
    for it in SUBJECTS:
        for gpus in SIZES:
            found = best(it, gpus)
            if found is None:
                rows.append((it.name, str(gpus), "–", "one server fills the node", *["–"] * 7))
                continue
            split = f"{found.trainers} + {found.servers} x {it.parallel}"
            seconds = [found.decode_s, found.train_s, found.publish_s]
            seconds += [found.serial_s, found.overlapped_s]
            ratio = found.overlapped_s / max(found.decode_s, found.train_s)
            needs = f"none: {found.first_gib:.0f} GiB on rank 0"
            device = found.site.device.name if found.fits else needs
            cells = (f"{found.batch:.0f}", *map(number, seconds), f"{ratio:.2f}")
            rows.append((it.name, str(gpus), device, split, *cells))
    return heads, rows


TABLES: dict[str, Table] = {
    "models": models,
    "memory": memory,
    "traffic": traffic,
    "heads": heads,
    "publishing": publishing,
    "sizes": sizes,
}


def markdown(name: str) -> str:
    """One of `TABLES` as it stands in the document."""
    heads, rows = TABLES[name]()
    lines = [heads, tuple("---" for _ in heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def documented(text: str) -> str:
    """`text` with every table between its markers made anew; `ValueError` for a missing marker."""
    for name in TABLES:
        head, begin, rest = text.partition(f"<!-- table: {name} -->\n")
        _, end, tail = rest.partition("<!-- end -->")
        if not begin or not end:
            raise ValueError(f"document: expected the markers of the table {name!r}, got none")
        text = f"{head}{begin}{markdown(name)}\n{end}{tail}"
    return text


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench scale", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--update", action="store_true", help="write them into docs/scale.md")
    if parser.parse_args(argv).update:
        DOCUMENT.write_text(documented(DOCUMENT.read_text()))
    else:
        print("\n\n".join(f"{name}\n{markdown(name)}" for name in TABLES))
    return 0
