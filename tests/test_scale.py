"""The arithmetic of large runs: by hand, against transformers' own count, and as documented."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

from fastturn.bench import scale
from fastturn.bench.scale import GIB, SITE, SITES, SUBJECTS, WORK

DENSE = SUBJECTS[:3]
MIXTURE = SUBJECTS[3]


def subject(name: str) -> scale.Subject:
    return next(it for it in SUBJECTS if it.name == name)


def counted(config) -> int:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return sum(parameter.numel() for parameter in model.parameters())


def described(shape) -> dict[str, object]:
    return {
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.width,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_width,
        "vocab_size": shape.vocabulary,
        "tie_word_embeddings": shape.tied,
    }


def test_the_document_holds_what_the_code_computes():
    text = scale.DOCUMENT.read_text()
    for name in scale.TABLES:
        begin, end = f"<!-- table: {name} -->\n", "\n<!-- end -->"
        assert text.count(begin) == 1, name
        assert text.split(begin)[1].split(end)[0] == scale.markdown(name), (
            f"docs/scale.md, table {name}: run scripts/bench scale --update"
        )


def test_the_document_states_the_assumptions_of_the_code():
    text = " ".join(scale.DOCUMENT.read_text().split())
    stated = (
        *(f"({site.memory_gib} GiB" for site in SITES),
        f"{SITE.device.flops_s / 1e12:.0f} TFLOP/s",
        *(f"{site.device.bytes_s / 1e12:g} TB/s" for site in SITES),
        f"{SITE.links:.0%} of links".replace("%", " %"),
        f"{SITE.matrix:.0%} of FLOPs".replace("%", " %"),
        f"{SITE.memory:.0%} of memory bandwidth".replace("%", " %"),
        f"{WORK.tasks} tasks, {WORK.turns} turns of {WORK.turn} sampled and {WORK.answer} given",
        f"prompt of {WORK.prompt} (longest episode {WORK.longest:,} tokens)".replace(",", " "),
        f"{WORK.siblings} siblings at every boundary",
        f"micro-batches of {WORK.micro_batch:,} tokens".replace(",", " "),
        f"{WORK.slots} completions in flight",
        f"the port's {SITE.port_s / 1e9:.0f} GB/s",
    )
    for words in stated:
        assert words in text, words


def test_a_changed_number_and_a_missing_table_are_noticed():
    text = scale.DOCUMENT.read_text()
    assert scale.documented(text) == text
    row = scale.markdown("models").splitlines()[2]
    broken = text.replace(row, row.replace("1.72", "1.73"))
    assert broken != text and scale.documented(broken) == text
    with pytest.raises(ValueError, match="the markers of the table 'sizes'"):
        scale.documented(text.replace("<!-- table: sizes -->", ""))


@pytest.mark.parametrize("it", DENSE, ids=lambda it: it.name)
def test_parameters_are_those_of_transformers(it):
    config = Qwen3Config(**described(it.shape), intermediate_size=it.shape.mlp)
    assert it.shape.parameters == it.shape.active_parameters == counted(config)


def test_experts_are_counted_as_stored_and_as_used():
    experts = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1536}
    shape = MIXTURE.shape
    assert shape.parameters == counted(Qwen3MoeConfig(**described(shape), **experts))
    unused = shape.layers * 120 * 3 * 4096 * 1536
    assert shape.active_parameters == shape.parameters - unused
    assert 21.5e9 < shape.active_parameters < 22.5e9


def test_traffic_by_hand():
    # 8 GPUs: seven eighths by NVLink. 64: seven eighths of a node's by its eight ports.
    assert SITE.collective_s(16e9, 8) == pytest.approx(16e9 * 7 / 8 / 360e9)
    assert SITE.collective_s(16e9, 64) == pytest.approx(16e9 * 7 / 8 / 320e9)
    assert SITE.collective_s(16e9, 1) == 0
    it = subject("Qwen3-8B")
    count, embeddings = it.shape.parameters, it.shape.embeddings
    assert embeddings == 2 * 151936 * 4096
    gathers, reduced = scale.gathered(it)
    assert gathers == 4 * count - 2 * embeddings and reduced == 4 * count
    assert scale.traffic_s(it, 64) == pytest.approx((gathers + reduced) * 7 / 8 / 320e9)
    shards = 2 * (4 * count / 8) * 7 / 8 / 40e9
    assert scale.traffic_s(it, 64, 8) == pytest.approx(scale.traffic_s(it, 8) + shards)
    assert scale.traffic_s(it, 8, 8) == scale.traffic_s(it, 8)
    sent = 2 * count / 40e9
    assert scale.publish_s(it, 8) == pytest.approx(4 * count * 7 / 8 / 360e9 + sent)
    assert scale.publish_s(it, 8, 8.25e9) - scale.publish_s(it, 8) == pytest.approx(
        2 * count * (1 / 8.25e9 - 1 / 40e9)
    )


def test_memory_by_hand():
    it = subject("Qwen3-8B")
    rank, first = scale.held(it, 64)
    assert first - rank == pytest.approx(2 * it.shape.parameters / GIB)
    fewer, _ = scale.held(it, 8)
    # State, and each rank's share of a block's summed gradients in float32.
    split = 16 * it.shape.parameters + 4 * it.shape.block
    assert fewer - rank == pytest.approx(split * (1 / 8 - 1 / 64) / GIB)
    assert scale.held(it, 64, 8) == scale.held(it, 8)
    # 36 layers x 8 heads x 128 x keys and values x 2 bytes
    assert it.shape.cache_token * 2 == 36 * 8 * 128 * 2 * 2 == 147456
    room = (0.9 * 79 - 2) * GIB - 2 * it.shape.parameters
    assert scale.sequences(it) == int(room / (12800 * 147456))
    too_big = scale.Subject("", it.shape)
    assert scale.sequences(too_big, scale.Site(SITE.device, 10)) == 0


def test_work_by_hand():
    assert WORK.longest == 512 + 6 * 2048
    assert [WORK.decoded(k) for k in range(6)] == [6144, 5120, 4096, 3072, 2048, 1024]
    assert WORK.packed(0) == 1024 * (512 + 4096) and WORK.packed(5) == 1024 * (512 + 10240 + 4096)
    assert WORK.trunks == pytest.approx(6144 / (4 * 21 * 1024))


def test_a_stage_is_between_its_longer_half_and_both():
    assert scale.stage_s(10, 8, 1) == 11 and scale.stage_s(10, 8, 10) == 18
    for it in SUBJECTS:
        for gpus in scale.SIZES:
            found = scale.best(it, gpus)
            if found is None:
                assert gpus == it.parallel
                continue
            assert max(found.decode_s, found.train_s) < found.overlapped_s
            assert found.overlapped_s <= found.serial_s * (1 + 1e-12)  # sums in another order
            assert found.trainers + found.servers * it.parallel <= gpus
            assert 0 < found.batch <= min(WORK.slots, scale.sequences(it, found.site))
            for trainers in scale.splits(it, gpus):
                other = scale.iteration(it, trainers, gpus, found.site)
                assert other.fits <= found.fits
                assert other.overlapped_s >= found.overlapped_s or not other.fits


def test_what_is_said_about_the_tables_holds():
    for it in DENSE:
        assert scale.traffic_s(it, 64, 8) > scale.traffic_s(it, 64)
    for it in SUBJECTS:
        hidden = scale.traffic_s(it, 64) / scale.train_token_s(it)
        assert (hidden > 8000) == (it is MIXTURE)
    assert 2 * MIXTURE.shape.parameters / GIB > max(site.memory_gib for site in SITES)
    # Rows whose servers have room: decoding lasts as long as the chain of an episode.
    found = scale.best(subject("Qwen3-1.7B"), 1024)
    assert found is not None and found.batch < scale.sequences(subject("Qwen3-1.7B"))
    chain_s = sum(map(WORK.decoded, range(6))) * scale.token_s(subject("Qwen3-1.7B"), found.batch)
    assert found.decode_s == pytest.approx(chain_s * (1 + WORK.trunks))


def test_the_command_prints_every_table(capsys):
    assert scale.main([]) == 0
    said = capsys.readouterr().out
    assert all(scale.markdown(name) in said for name in scale.TABLES)
