"""Domain "search": measures of short answers, the corpus, its tools, and episodes."""

from __future__ import annotations

import json
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastturn.config import Config, ConfigError, Data, Model
from fastturn.envs import Domain, DomainError, Task, load_domain
from fastturn.envs.calls import parse_action
from fastturn.envs.qa import best_span_f1, exact_match, f1, words
from fastturn.envs.search import Corpus, Document, grade, read_document, read_question
from fastturn.envs.tools import ToolError

DOCUMENTS = [
    {"title": "Gallu", "text": "The Gallu were great demons of the underworld."},
    {"title": "Alû", "text": "Alû is a vengeful spirit. Lilu is a related spirit."},
    {"title": "Chess", "text": "Chess is a board game. " + "It has many openings. " * 30},
]
QUESTIONS = [
    {"question": "What is Lilu?", "answer": "a spirit", "supporting_titles": ["Gallu", "Alû"]},
    {"question": "Is chess a game?", "answer": ["yes", "yes it is"]},
    {"question": "Who were great demons?", "golden_answers": ["The Gallu"]},
]


@pytest.mark.parametrize(
    ("answer", "golds", "exact", "score", "span"),
    [
        ("the Spirit.", ["a spirit"], True, 1.0, 1.0),
        ("Frank Lowy is the man", ["Frank Lowy"], False, 2 / 3, 1.0),
        ("Lowy Frank", ["Frank Lowy"], False, 1.0, 1.0),
        ("yes", ["no"], False, 0.0, 0.0),
        ("yes indeed", ["yes"], False, 0.0, 1.0),
        ("", ["the"], False, 0.0, 0.0),
        ("a", ["the"], False, 0.0, 0.0),
        ("two", ["one", "two three"], False, 2 / 3, 2 / 3),
        ("x Frank y Lowy z", ["Frank Lowy"], False, 4 / 7, 4 / 5),
        ("3.5", ["35"], True, 1.0, 1.0),
    ],
)
def test_measures(
    answer: str, golds: Sequence[str], exact: bool, score: float, span: float
) -> None:
    assert exact_match(answer, golds) is exact
    assert f1(answer, golds) == pytest.approx(score)
    assert best_span_f1(answer, golds) == pytest.approx(span)


WORDS = st.lists(st.sampled_from("bcd"), max_size=8)


@given(WORDS, st.lists(st.sampled_from("bcd"), min_size=1, max_size=4))
def test_the_best_span_is_the_best_of_all_spans(said: list[str], gold: list[str]) -> None:
    spans = [said[i:j] for i in range(len(said)) for j in range(i + 1, len(said) + 1)]
    best = max((f1(" ".join(span), [" ".join(gold)]) for span in spans), default=0.0)
    assert best_span_f1(" ".join(said), [" ".join(gold)]) == pytest.approx(best)


def test_words_of_anything() -> None:
    assert words("The  Cat, 3.5!") == ["cat", "35"]
    assert words("\x00 \ud800") == ["\x00", "\ud800"]


def corpus() -> Corpus:
    return Corpus([read_document(row, "c", n) for n, row in enumerate(DOCUMENTS, 1)])


def test_search_shows_the_best_first_and_nothing_without_a_word() -> None:
    found = corpus().search("vengeful spirit")
    assert found == "[2] Alû: Alû is a vengeful spirit. Lilu is a related spirit."
    assert corpus().search("board game").endswith("...")
    assert corpus().search("zebra") == corpus().search("the of") == "no document has these words"
    with pytest.raises(ToolError, match="the query is empty"):
        corpus().search(" ")


def test_open_takes_ids_as_models_write_them() -> None:
    whole = "Gallu\nThe Gallu were great demons of the underworld."
    assert [corpus().open(id) for id in (1, "1", "[1]")] == [whole] * 3
    with pytest.raises(ToolError, match=r"no document '9'.*that a search has shown"):
        corpus().open("9")


@pytest.mark.parametrize(
    ("row", "document"),
    [
        ({"title": "T", "text": "x"}, Document("7", "T", "x")),
        ({"id": 3, "contents": '"T"\nx y'}, Document("3", "T", "x y")),
        ({"_id": "a", "title": "", "text": "T"}, Document("a", "T", "T")),
    ],
)
def test_corpus_formats(row: dict[str, Any], document: Document) -> None:
    assert read_document(row, "c:7", 7) == document


def test_rows_that_cannot_be_used() -> None:
    with pytest.raises(DomainError, match="c:7: found the keys body; expected the text"):
        read_document({"body": "x"}, "c:7", 7)
    with pytest.raises(DomainError, match="q:1: found the keys q; expected one of these"):
        read_question({"q": "x"}, "q:1")
    with pytest.raises(DomainError, match=r"q:1: the answer 'The\.' has no word"):
        read_question({"question": "x", "answer": "The."}, "q:1")


def opened(tmp_path: Path, documents: Sequence[Any] = DOCUMENTS, **model: Any) -> Domain:
    files = [tmp_path / "corpus.jsonl", tmp_path / "questions.jsonl"]
    for file, rows in zip(files, (documents, QUESTIONS), strict=True):
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = Data(domain=f"search:corpus={files[0]}", path=str(files[1]), eval_tasks=1)
    return load_domain(Config(data=data, turns=6, model=Model(**model)))


def test_an_episode(tmp_path: Path) -> None:
    domain = opened(tmp_path, path="somewhere")
    assert [tool["function"]["name"] for tool in domain.tools] == ["search", "open"]
    for task in (*domain.train_tasks, *domain.eval_tasks):
        env = domain.env()
        messages = env.start(task)
        policy = domain.demonstrator(task, np.random.default_rng(0))
        observation = env.step(parse_action(policy(messages)))
        while not observation.done:
            assert observation.events == ("tool_call",)
            messages += observation.messages
            twin = domain.env()
            twin.restore(pickle.loads(pickle.dumps(env.snapshot())))
            action = parse_action(policy(messages))
            observation = env.step(action)
            assert twin.step(action) == observation
        assert observation.reward == 1.0 and observation.events == ("answer", "exact_match")


def test_grades() -> None:
    task = Task("t", {"answers": ("a spirit",)})
    assert grade(task, "\\boxed{an evil spirit}").reward == pytest.approx(2 / 3)
    assert grade(task, "a spirit") == grade(task, "<think>\\boxed{spirit}</think>")
    assert grade(task, "a spirit").events == ("no_answer",)


def test_a_corpus_that_cannot_be_used(tmp_path: Path) -> None:
    twice = [{"id": 1, "title": "A", "text": "x"}, {"id": 1, "title": "B", "text": "y"}]
    with pytest.raises(DomainError, match=r"corpus\.jsonl:2: the id '1' is also that of .*:1"):
        opened(tmp_path, twice)
    with pytest.raises(ConfigError, match=r"data\.domain=search:corpus is empty"):
        load_domain(Config(data=Data(domain="search")))
