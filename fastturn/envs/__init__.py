"""Environments: the protocol (`base`), tools (`tools`), and the built-in domains.

Importing this package registers "calculator" and "math".
"""

from fastturn.envs.base import (
    DOMAINS,
    Action,
    BadCall,
    Domain,
    DomainError,
    Env,
    Message,
    Observation,
    Task,
    ToolCall,
    events_by_call,
    load_domain,
    load_function,
    register,
)
from fastturn.envs import calculator  # noqa: F401, I001  (registers the built-in domains)

__all__ = [
    "DOMAINS",
    "Action",
    "BadCall",
    "Domain",
    "DomainError",
    "Env",
    "Message",
    "Observation",
    "Task",
    "ToolCall",
    "events_by_call",
    "load_domain",
    "load_function",
    "register",
]
