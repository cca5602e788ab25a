"""Who calls at a desk of τ²-bench: a ticket that says everything, a script, or a served model.

A customer is a function of the task and of all that was said: it returns its next words, or None
when it has hung up. `CUSTOMERS` has those that need nothing; an address is a served model.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastturn.config import ConfigError
from fastturn.envs.tau2_desk import Desk, Dialogue, theirs
from fastturn.options import nearest

Customer = Callable[[str, Dialogue], str | None]
YES = "Yes, please go ahead."
DEADLINE_S = 60.0  # of one answer of a served customer
MOST_TOKENS = 512
HANGS_UP = ("###STOP###", "###TRANSFER###", "###OUT-OF-SCOPE###")  # as the package tells its model


def customer(name: str, desk: Desk) -> Customer:
    """The customer `name`: "ticket", "script", or the address of a server with OpenAI's routes.

    Raises `ConfigError` for another name, and where a desk without a customer is given one.
    """
    if desk.solo and name != "ticket":
        raise ConfigError(
            f"data.domain=tau2: user={name!r}: in telecom's solo mode nobody calls; leave out user"
        )
    if name.startswith(("http://", "https://")):
        return served(name.rstrip("/"), desk)
    if name not in CUSTOMERS:
        raise ConfigError(
            f"data.domain=tau2: user={name!r}: expected {', '.join(CUSTOMERS)}, or the address of "
            f"a server, like http://127.0.0.1:8000; the nearest is {nearest(name, CUSTOMERS)!r}"
        )
    lines = CUSTOMERS[name]

    def says(id: str, dialogue: Dialogue) -> str | None:
        said = sum(who == "user" for who, _ in dialogue)
        return dict(enumerate(lines(desk, id))).get(said)

    return says


def consents(text: str) -> bool:
    """Whether a customer's words begin with yes, which is what policies ask for."""
    return text.lower().startswith("yes")


def _ticket(desk: Desk, id: str) -> tuple[str, ...]:
    """Everything at once, in the package's words."""
    task = desk.task(id)
    return (str(task.ticket if desk.solo else task.user_scenario.instructions),)


def _script(desk: Desk, id: str) -> tuple[str, ...]:
    """The same in parts, one whenever the customer is spoken to, and a consent at the end."""
    told = desk.task(id).user_scenario.instructions
    parts = (told.reason_for_call, told.known_info, told.unknown_info, told.task_instructions)
    return (*(part for part in parts if part), YES)


CUSTOMERS: dict[str, Callable[[Desk, str], tuple[str, ...]]] = {
    "ticket": _ticket,
    "script": _script,
}


def served(url: str, desk: Desk) -> Customer:
    """A model behind `url` that plays the customer by the package's own instructions, greedily; the
    same dialogue is answered once, so that siblings hear the same."""
    try:
        import httpx
    except ImportError as error:
        raise ConfigError(
            f"data.domain=tau2: user={url!r} needs httpx: pip install fastturn[rollout]"
        ) from error
    client = httpx.Client(base_url=url, timeout=DEADLINE_S)
    try:
        model = client.get("/v1/models").raise_for_status().json()["data"][0]["id"]
    except (httpx.HTTPError, ValueError, LookupError) as error:
        raise ConfigError(
            f"data.domain=tau2: user={url!r} does not say which model it serves ({error!r}); "
            f"start one with `vllm serve`, or choose user=script"
        ) from error
    guidelines = _guidelines()

    @functools.cache
    def says(id: str, dialogue: Dialogue) -> str | None:
        scenario = str(desk.task(id).user_scenario)
        system = f"{guidelines}\n\n<scenario>\n{scenario}\n</scenario>"
        swapped = {"assistant": "user", "user": "assistant"}  # to the model we are the user
        heard = dialogue or (("assistant", "Hi! How can I help you today?"),)
        body: dict[str, Any] = {
            "model": model,
            "temperature": 0.0,
            "max_tokens": MOST_TOKENS,
            "messages": [
                {"role": "system", "content": system},
                *({"role": swapped[who], "content": text} for who, text in heard),
            ],
        }
        answer = client.post("/v1/chat/completions", json=body).raise_for_status().json()
        text = str(answer["choices"][0]["message"]["content"])
        return None if any(mark in text for mark in HANGS_UP) else text

    return says


def _guidelines() -> str:
    folder = Path(theirs("utils.utils").DATA_DIR) / "tau2" / "user_simulator"
    return (folder / "simulation_guidelines.md").read_text(encoding="utf-8")
