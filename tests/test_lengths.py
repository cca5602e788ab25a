"""Lengths of episodes: fits of data, parts of transcripts, words of the command line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from fastturn.bench.lengths import main
from fastturn.bench.recorded import Results
from fastturn.config import ConfigError
from fastturn.lengths import (
    FITTED,
    PARTS,
    as_lengths,
    counter,
    fit,
    lengths_of,
    parts_of,
)
from fastturn.simulate import Lengths

SAMPLE = {
    "stage": 0,
    "turns": [
        {"context": "what is it ", "action": "<think> so </think> look up ; "},
        {"context": "what is it <think> so </think> look up ; found x ", "action": "x"},
    ],
}


def test_a_lognormal_is_found_again() -> None:
    rng = np.random.default_rng(0)
    found = fit(np.round(rng.lognormal(np.log(80), 0.7, 4000)).tolist())
    assert found.median == pytest.approx(80, rel=0.03) and found.spread == pytest.approx(0.7, 0.03)
    assert found.distance < 0.02 and found.tail == pytest.approx(1.0, abs=0.08)
    assert found.n == 4000


def test_data_that_is_no_lognormal_is_far_from_its_fit() -> None:
    assert fit([10] * 500 + [1000] * 500).distance > 0.2
    assert fit([5, 5, 5, 6]).distance < 0.6


def test_parts_of_a_transcript() -> None:
    found = parts_of([SAMPLE], lambda text: len(text.split()))
    assert found == {"prompt": [3], "think": [3], "call": [3, 1], "observation": [2]}
    stripped = {"stage": 1, "turns": [SAMPLE["turns"][0], {"context": "else", "action": "x"}]}
    assert set(parts_of([stripped], len)) == {"think", "call"}  # the context tells no observation


def test_words_name_a_table_and_change_it() -> None:
    found = lengths_of(["gsm8k", "action=300", "played=0.5"])
    assert (found.think, found.action, found.played) == (FITTED["gsm8k"]["think"], 300.0, 0.5)
    assert lengths_of([]) == Lengths()
    for words, message in (
        (["gsm9k"], "or one of tool-dialogues, gsm8k, hotpotqa"),
        (["played=2"], "played=2: expected a number from 0 to 1"),
        (["action=0"], "action=0: expected a number from 1"),
    ):
        with pytest.raises(ConfigError, match=message):
            lengths_of(words)


def test_the_table_is_what_was_recorded() -> None:
    rows = Results.load().rows
    for name, known in FITTED.items():
        for part, fields in PARTS.items():
            for metric, field in zip(("median", "spread"), fields, strict=True):
                row = rows.get((f"lengths/{name}", part, metric))
                assert (row is None) == (field not in known)
                assert row is None or known[field] == pytest.approx(row.p50, rel=1e-3)


def test_public_data_that_is_missing_or_damaged_is_named(tmp_path: Path) -> None:
    words = ["--data", str(tmp_path), "--no-record"]
    with pytest.raises(ConfigError, match=r"expected the files of tool-dialogues .*No such file"):
        main(words)
    (tmp_path / "sft").mkdir()
    (tmp_path / "sft" / "glaive_toolcall_en_demo.json").write_text('[{"tools": 3}]')
    with pytest.raises(ConfigError, match=r"files of tool-dialogues .*KeyError"):
        main(words)


def test_a_run_of_ones_own_is_fitted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="expected a run with a tokenizer in it"):
        main(["--run", str(tmp_path)])
    words = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    (tmp_path / "tokenizer").mkdir()
    words.save(str(tmp_path / "tokenizer" / "tokenizer.json"))
    count = counter(tmp_path)
    assert count is not None and count("a b c") == 3
    samples = [SAMPLE] * 15
    lines = "".join(json.dumps(sample) + "\n" for sample in samples)
    (tmp_path / "samples.jsonl").write_text(lines)
    assert main(["--run", str(tmp_path), "--no-record"]) == 0
    shown = capsys.readouterr().out
    assert "prompt: 15 in the transcripts, 20 are needed" in shown
    assert "action=1.732" in shown and "recorded" not in shown  # the middle of 3 and 1
    assert as_lengths({"call": fit([4, 4])}) == {"action": pytest.approx(4.0), "spread": 0.0}
