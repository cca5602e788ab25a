"""fastturn: reverse-turn policy optimisation for multi-turn, tool-using language-model agents.

Importing the package loads nothing heavy; each command imports what it needs.
"""

from __future__ import annotations

__version__ = "0.1.0"
