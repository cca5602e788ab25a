"""Short answers in words: exact match, F1 of words, and F1 of the best span of a text.

Answers are compared as in SQuAD's evaluation: lower case, without punctuation and articles, as
words. What has no word left is right nowhere.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

_ARTICLES = frozenset(("a", "an", "the"))
_DECIDED = (["yes"], ["no"], ["noanswer"])  # no partial credit: as a part they decide nothing
_PUNCTUATION = str.maketrans("", "", string.punctuation)
MOST_WORDS = 500  # of a text that spans are looked for in


def words(text: str) -> list[str]:
    """The words that count. Example: `words("The  Cat, 3.5!")` is `["cat", "35"]`."""
    plain = text.lower().translate(_PUNCTUATION)
    return [word for word in re.split(r"\s+", plain) if word and word not in _ARTICLES]


def exact_match(answer: str, golds: Sequence[str]) -> bool:
    """Whether `answer` has the words of one of `golds` in their order.

    Example: `exact_match("the spirit.", ["a spirit"])` is True.
    """
    said = words(answer)
    return bool(said) and any(said == words(gold) for gold in golds)


def f1(answer: str, golds: Sequence[str]) -> float:
    """The best harmonic mean of precision and recall of words over `golds`; yes and no count only
    where they are the whole answer.

    Example: `f1("Frank Lowy is the man", ["Frank Lowy"])` is 2/3.
    """
    return max((_f1(words(answer), words(gold)) for gold in golds), default=0.0)


def _f1(said: Sequence[str], gold: Sequence[str]) -> float:
    if said != gold and (said in _DECIDED or gold in _DECIDED):
        return 0.0
    common = (Counter(said) & Counter(gold)).total()
    return 2 * common / (len(said) + len(gold)) if common else 0.0


def best_span_f1(text: str, golds: Sequence[str]) -> float:
    """The best F1 of any run of words of `text` (of its last `MOST_WORDS`): what an answer is worth
    that somebody else finds in the text.

    Example: `best_span_f1("I think Frank Lowy did it", ["Frank Lowy"])` is 1.
    """
    said = words(text)[-MOST_WORDS:]
    return max((_best_span(said, words(gold)) for gold in golds), default=0.0)


def _best_span(said: Sequence[str], gold: Sequence[str]) -> float:
    """The best span begins and ends with a word of `gold`, and ends once it holds all of them."""
    wanted = Counter(gold)
    places = [place for place, word in enumerate(said) if word in wanted]
    best = 0.0
    for number, first in enumerate(places):
        left, common = wanted.copy(), 0
        for last in places[number:]:
            if left[said[last]] > 0:
                left[said[last]] -= 1
                common += 1
            best = max(best, 2 * common / (last - first + 1 + len(gold)))
            if common == len(gold):
                break
    return best
