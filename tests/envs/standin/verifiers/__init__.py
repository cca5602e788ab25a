"""Stands in for the package verifiers 0.3: the part of its protocol that the domain relies on."""

from __future__ import annotations

import importlib
import inspect
import json
from typing import Any

from . import types

__version__ = "0.3.1"


def stop(function: Any) -> Any:
    function.stops = True
    return function


class Rubric:
    def __init__(self, funcs: Any = ()) -> None:
        self.funcs = list(funcs)

    async def score_rollout(self, state: dict[str, Any]) -> None:
        given = {**state, **state["input"], "state": state}
        found = [f(**{n: given[n] for n in inspect.signature(f).parameters}) for f in self.funcs]
        state["reward"] = sum([await x if inspect.isawaitable(x) else x for x in found])


class MultiTurnEnv:
    def __init__(
        self, dataset: Any, rubric: Any, eval_dataset: Any = None, max_turns: int = -1
    ) -> None:
        self.dataset, self.eval_dataset, self.rubric = dataset, eval_dataset, rubric
        self.max_turns, self.env_id, self.tool_defs = max_turns, "", None

    @property
    def requires_group_rollouts(self) -> bool:
        return any("states" in inspect.signature(f).parameters for f in self.rubric.funcs)

    def build_dataset(self) -> Any:
        return self.dataset

    def build_eval_dataset(self) -> Any:
        return self.eval_dataset

    async def setup_state(self, state: Any) -> Any:
        return state

    async def get_prompt_messages(self, state: Any) -> Any:
        if not state["trajectory"]:
            return state["prompt"]
        last = state["trajectory"][-1]
        messages = [*last["prompt"], *last["completion"]]
        return [*messages, *await self.env_response(messages, state)]

    async def _over(self, state: Any) -> bool:
        if 0 < self.max_turns <= len(state["trajectory"]):
            return True
        conditions = [f for _, f in inspect.getmembers(self) if hasattr(f, "stops")]
        return any([await condition(state) for condition in conditions])

    async def rollout(self, row: Any, client: Any, model: str, sampling: Any) -> Any:
        state = {"input": row, "prompt": row["prompt"], "trajectory": [], "error": None}
        await self.setup_state(state)
        while not await self._over(state):
            prompt = await self.get_prompt_messages(state)
            answer = await client.get_response(prompt=prompt, model=model, sampling_args=sampling)
            step = {"prompt": prompt, "completion": [answer.message]}
            state["trajectory"].append(step)
        state["completion"] = state["trajectory"][-1]["completion"]
        return state


class ToolEnv(MultiTurnEnv):
    def __init__(self, tools: Any, **options: Any) -> None:
        super().__init__(**options)
        self._map = {tool.__name__: tool for tool in tools}
        kind = {"type": "integer"}
        self.tool_defs = [
            types.Tool(
                name=tool.__name__,
                description=tool.__doc__,
                parameters={
                    "type": "object",
                    "properties": dict.fromkeys(inspect.signature(tool).parameters, kind),
                    "required": list(inspect.signature(tool).parameters),
                },
            )
            for tool in tools
        ]

    @stop
    async def no_tools_called(self, state: Any) -> bool:
        if not state["trajectory"]:
            return False
        return not state["trajectory"][-1]["completion"][-1].tool_calls

    async def env_response(self, messages: Any, state: Any) -> Any:
        return [
            {
                "role": "tool",
                "content": str(self._map[call.name](**json.loads(call.arguments))),
                "tool_call_id": call.id,
            }
            for call in messages[-1].tool_calls
        ]


def load_environment(name: str) -> Any:
    try:
        environment = importlib.import_module(name.replace("-", "_")).load_environment()
    except ImportError as error:
        raise ValueError(f"Could not import {name!r} environment.") from error
    environment.env_id = name
    return environment
