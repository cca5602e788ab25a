"""The messages of the stand-in."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass
class Tool:
    name: str
    description: str
    parameters: dict[str, Any]


@dataclass
class ToolCall:
    id: str
    name: str
    arguments: str


@dataclass
class ResponseMessage:
    content: str
    tool_calls: list[ToolCall] | None
    finish_reason: str
    is_truncated: bool
    role: str = "assistant"

    def model_dump(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class Response:
    id: str
    created: int
    model: str
    message: ResponseMessage
