"""Who is asked for answers."""

from __future__ import annotations

from typing import Any


class Client:
    def __init__(self, config: Any) -> None:
        self._config = config

    async def get_response(self, prompt: Any, model: str, sampling_args: Any) -> Any:
        asked, more = await self.to_native_prompt(prompt)  # type: ignore[attr-defined]
        answer = await self.get_native_response(asked, model, sampling_args, None, **more)  # type: ignore[attr-defined]
        return await self.from_native_response(answer)  # type: ignore[attr-defined]
