"""Environments: the protocol (`base`), tools (`tools`), and the built-in domains.

Importing this package registers the built-in domains.
"""

from fastturn.envs import (  # noqa: F401  (registers the built-in domains)
    calculator,
    frontdesk,
    gym,
    math,
    search,
    shell,
    tau2,
    verifiers,
    workshop,
)
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
    register,
)
from fastturn.envs.loading import load_domain, load_function

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
