"""What made a run's numbers: the versions of the packages and the commit of the source tree."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
from pathlib import Path

_PACKAGES = ("torch", "transformers", "numpy", "fastturn")


def versions() -> dict[str, str | None]:
    """Version of Python and of the packages that decide a run's numbers; None: not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def commit() -> str:
    """Git commit of the source tree, "+dirty" when files differ from it.

    The installed version ("0.1.0") when the package does not run from a checkout, "unknown" when
    it is not installed either. Never raises.
    """
    root = Path(__file__).resolve().parent.parent
    try:
        # Not any repository that happens to lie above an environment folder: this tree's own.
        if Path(_git(root, "rev-parse", "--show-toplevel")).resolve() == root:
            head = _git(root, "rev-parse", "HEAD")
            return head + ("+dirty" if _git(root, "status", "--porcelain") else "")
    except (OSError, subprocess.SubprocessError):
        pass  # no git, no commit yet, or not a checkout
    return versions()["fastturn"] or "unknown"


def _git(root: Path, *words: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(root), *words], capture_output=True, text=True, timeout=20, check=True
    )
    return done.stdout.strip()
