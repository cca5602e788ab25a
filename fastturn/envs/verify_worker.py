"""The process behind `verify.Verifier`: one question a line on stdin, one verdict a line on stdout.

Run as a script, `verify_worker.py MEMORY_GIB`; it imports nothing of this package. The parent
enforces the deadline by killing it, so the library's own time limits are off.
"""

import json
import logging
import os
import sys
from collections.abc import Callable
from typing import Any


def main() -> None:
    """Answer questions until stdin ends."""
    cap_memory(float(sys.argv[1]))
    # Only verdicts may reach the parent: whatever else prints goes to stderr.
    verdicts = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from math_verify import parse, verify

    logging.disable(logging.CRITICAL)
    print(json.dumps({"ready": True}), file=verdicts, flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        reply = ask(parse, verify, question["gold"], question["answer"])
        print(json.dumps(reply), file=verdicts, flush=True)


def ask(
    parse: Callable[..., list[Any]], verify: Callable[..., bool], gold: str, answer: str
) -> dict[str, Any]:
    """One verdict; an exception inside the algebra is an error to count, not a wrong answer."""
    try:
        # Unwrapped, an answer such as \left(3, \frac{\pi}{2}\right) parses to its last number.
        golds, answers = (
            parse(f"\\boxed{{{text}}}", parsing_timeout=None, raise_on_error=False)
            for text in (gold, answer)
        )
        if not golds:
            return {"error": f"the gold answer {gold!r} cannot be parsed"}
        return {"right": verify(golds, answers, timeout_seconds=None, raise_on_error=True)}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:300]}


def cap_memory(gib: float) -> None:
    """Limit the address space where the system can (not on Windows)."""
    try:
        import resource
    except ImportError:
        return
    limit = int(gib * (1 << 30))
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


if __name__ == "__main__":
    main()
