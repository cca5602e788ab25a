"""Questions whose answer is found by searching a corpus on this machine (HotpotQA and its kind).

`data.domain=search:corpus=FILE` has two tools, `search(query)` and `open(id)`; the answer is
`\\boxed{...}`. The reward is the F1 of the answer's words with the gold answer: it tells siblings
apart where exact match calls all of them wrong, and reaches 1 (which counts as success) only with
all the words and no others.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fastturn.config import Config, ConfigError
from fastturn.envs import qa
from fastturn.envs.answers import boxed
from fastturn.envs.base import DomainError, Env, Message, Task, register
from fastturn.envs.calls import spoken
from fastturn.envs.rows import read_rows, split
from fastturn.envs.tools import Grade, Tool, ToolEnv, ToolError
from fastturn.options import nearest

RESULTS = 5  # documents that a search shows
SNIPPET_CHARS = 160
_WORD = r"(?u)\b\w+\b"
_INSTRUCTIONS = (
    "Answer the question from the documents that you find. Search first, open documents to read "
    "more, and search again when something is missing. Then answer in a few words as "
    "\\boxed{answer}."
)
# Keys of the title and of the text of published corpora; the title may be missing.
CORPUS_FORMATS = (("title", "text"), ("title", "contents"), ("title", "paragraph_text"))
QUESTION_FORMATS = (("question", "answer"), ("question", "golden_answers"), ("input", "target"))


@dataclass(frozen=True, slots=True)
class Document:
    """`id` is what `open` takes: the row's own, or its number.

    Example: `Document("7", "Alû", "Alû is a vengeful spirit.")`.
    """

    id: str
    title: str
    text: str

    def line(self) -> str:
        """How a search shows it."""
        more = "..." if len(self.text) > SNIPPET_CHARS else ""
        return f"[{self.id}] {self.title}: {self.text[:SNIPPET_CHARS]}{more}"


@dataclass(frozen=True, slots=True)
class Question:
    """A question as read; `titles` of documents that lead to the answer, where they are known.

    Example: `Question("a.jsonl:1", "If Gallu is a demon Lilu is what?", ("a spirit",))`.
    """

    origin: str
    question: str
    answers: tuple[str, ...]
    titles: tuple[str, ...] = ()

    @property
    def content(self) -> str:
        return " ".join(self.question.split()).casefold()


def read_document(row: Mapping[str, Any], origin: str, number: int) -> Document:
    """`row` through the table of formats. Raises `DomainError` naming keys found and expected."""
    form = next((form for form in CORPUS_FORMATS if isinstance(row.get(form[1]), str)), None)
    if form is None:
        texts = ", ".join(text for _, text in CORPUS_FORMATS)
        raise DomainError(
            f"{origin}: found the keys {', '.join(sorted(row)) or '(none)'}; expected the text of "
            f"a document in one of: {texts}"
        )
    title, text = str(row.get(form[0]) or ""), row[form[1]].strip()
    if not title:
        title, _, text = text.partition("\n")  # as in corpora that are one text a document
    own = row.get("id", row.get("_id", number))
    return Document(str(own), title.strip().strip('"'), text.strip() or title.strip())


def read_question(row: Mapping[str, Any], origin: str) -> Question:
    """`row` through the table of formats. Raises `DomainError` naming keys found and expected."""
    form = next((f for f in QUESTION_FORMATS if all(row.get(key) for key in f)), None)
    if form is None:
        known = "; ".join(" + ".join(form) for form in QUESTION_FORMATS)
        raise DomainError(
            f"{origin}: found the keys {', '.join(sorted(row)) or '(none)'}; expected one of these "
            f"sets, neither of them empty: {known}"
        )
    answers = row[form[1]]
    answers = answers if isinstance(answers, list) else [answers]
    golds = tuple(str(answer) for answer in answers if qa.words(str(answer)))
    if not golds:
        raise DomainError(f"{origin}: the answer {row[form[1]]!r} has no word to compare")
    titles = row.get("supporting_titles") or ()
    return Question(origin, str(row[form[0]]).strip(), golds, tuple(map(str, titles)))


class Corpus:
    """Documents and their index.

    Example: `Corpus([Document("1", "Alû", "a demon")]).search("demon")` is one line.
    """

    def __init__(self, documents: Sequence[Document]) -> None:
        import bm25s

        self._documents = documents
        self._by_id = {document.id: document for document in documents}
        self._tokens = functools.partial(
            bm25s.tokenize, token_pattern=_WORD, stopwords="en", show_progress=False
        )
        self._index = bm25s.BM25()
        texts = [f"{document.title}\n{document.text}" for document in documents]
        self._index.index(self._tokens(texts), show_progress=False)

    @classmethod
    @functools.lru_cache(maxsize=2)
    def read(cls, path: str) -> Corpus:
        """The corpus in the file `path`. Raises `DomainError` for rows that cannot be used."""
        if importlib.util.find_spec("bm25s") is None:
            raise ConfigError(
                "data.domain=search needs the package bm25s, which is not installed; run: "
                'pip install "fastturn[search]"'
            )
        rows = read_rows(path, "data.domain=search:corpus")
        documents = [read_document(row, at, n) for n, (at, row) in enumerate(rows, 1)]
        known: dict[str, str] = {}
        for document, (origin, _) in zip(documents, rows, strict=True):
            if document.id in known:
                raise DomainError(
                    f"{origin}: the id {document.id!r} is also that of {known[document.id]}; ids "
                    "of documents must differ"
                )
            known[document.id] = origin
        return cls(documents)

    def find(self, query: str, count: int = RESULTS) -> list[Document]:
        """The best documents by BM25, none without a word of `query`."""
        places, scores = self._index.retrieve(
            self._tokens([query]), k=min(count, len(self._documents)), show_progress=False
        )
        found = zip(places[0], scores[0], strict=True)
        return [self._documents[int(place)] for place, score in found if score > 0]

    def search(self, query: str) -> str:
        """The tool `search`."""
        if not query.strip():
            raise ToolError("the query is empty; give a few words")
        found = self.find(query)
        return "\n".join(document.line() for document in found) or "no document has these words"

    def open(self, id: str | int) -> str:
        """The tool `open`."""
        document = self._by_id.get(str(id).strip().strip("[]"))
        if document is None:
            raise ToolError(f"there is no document {id!r}; give an id that a search has shown")
        return f"{document.title}\n{document.text}"

    def tools(self) -> list[Tool]:
        """Both tools."""
        query = {"type": "string", "description": "a few words"}
        id = {"type": ["string", "integer"], "description": "an id shown by search, without []"}
        return [
            _tool("search", f"The {RESULTS} best documents for a query.", self.search, query=query),
            _tool("open", "The whole text of a document.", self.open, id=id),
        ]


def _tool(name: str, description: str, function: Callable[..., str], **properties: Any) -> Tool:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return Tool(name, description, parameters, function, bounded=True)


def grade_span(task: Task, text: str) -> Grade:
    """Best-span F1 of the whole text, for models that box nothing. Events: "answer", and
    "exact_match" when the text is a gold answer."""
    golds, said = task.data["answers"], spoken(text)
    exact = ("exact_match",) if qa.exact_match(said, golds) else ()
    return Grade(qa.best_span_f1(said, golds), ("answer", *exact))


def grade(task: Task, text: str) -> Grade:
    """F1 of the boxed answer with the best gold answer. Events: "answer", and "exact_match" when it
    has the same words in the same order; "no_answer" without a box."""
    answer = boxed(spoken(text))
    if answer is None:
        return Grade(0.0, ("no_answer",))
    golds = task.data["answers"]
    exact = ("exact_match",) if qa.exact_match(answer, golds) else ()
    return Grade(qa.f1(answer, golds), ("answer", *exact))


SCORES = {"box": grade, "span": grade_span}


@register("search")
class SearchDomain:
    """Domain "search". `data.path` and `data.eval_path` hold questions, as in "math"; without
    `data.eval_path`, `data.eval_tasks` questions are held out. Instructions and schemas go into the
    prompt only for a pretrained model (`model.path` is set). Option `score`: any of `SCORES`."""

    def __init__(self, config: Config, *, corpus: str = "", score: str = "box") -> None:
        if score not in SCORES:
            raise ConfigError(
                f"data.domain=search:score={score}: expected one of {', '.join(SCORES)}; the "
                f"nearest is {nearest(score, SCORES)!r}"
            )
        self._grade = SCORES[score]
        self._corpus = Corpus.read(corpus)
        training, held_out = split(config.data, _read_questions)
        random.Random(f"order {config.seed}").shuffle(training)
        self.train_tasks: Sequence[Task] = _tasks("train", training)
        self.eval_tasks: Sequence[Task] = _tasks("eval", held_out)
        self._described = bool(config.model.path)
        self._tools = {tool.name: tool for tool in self._corpus.tools()}
        schemas = [tool.schema for tool in self._tools.values()]
        self.tools: list[dict[str, Any]] = schemas if self._described else []
        self._calls = config.turns - 1
        self._timeout_s = config.data.tool_timeout_s

    def env(self) -> Env:
        """One episode."""
        return ToolEnv(self._tools, self._prompt, self._grade, self._timeout_s)

    def _prompt(self, task: Task) -> list[Message]:
        messages = [{"role": "user", "content": task.data["question"]}]
        if self._described:
            messages.insert(0, {"role": "system", "content": _INSTRUCTIONS})
        return messages

    def demonstrator(
        self, task: Task, rng: np.random.Generator
    ) -> Callable[[Sequence[Message]], str]:
        """Searches for the question, then for the titles that lead to the answer where they are
        known, opens what carries such a title, and answers; at most `turns - 1` calls, of which the
        last ones stay. Needs no randomness."""
        calls = [_call("search", query=task.data["question"])]
        for title in task.data["titles"]:
            calls.append(_call("search", query=title))
            right = [d for d in self._corpus.find(title) if d.title == title]
            calls += [_call("open", id=document.id) for document in right[:1]]
        calls = calls[max(0, len(calls) - self._calls) :]

        def policy(messages: Sequence[Message]) -> str:
            done = sum(message["role"] == "tool" for message in messages)
            return calls[done] if done < len(calls) else f"\\boxed{{{task.data['answers'][0]}}}"

        return policy


def _call(name: str, **arguments: str) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def _read_questions(path: str, key: str) -> list[Question]:
    return [read_question(row, origin) for origin, row in read_rows(path, key)]


def _tasks(part: str, questions: Sequence[Question]) -> list[Task]:
    return [
        Task(
            f"{part}-{number}",
            {
                "question": question.question,
                "answers": question.answers,
                "titles": question.titles,
                "origin": question.origin,
            },
        )
        for number, question in enumerate(questions)
    ]
