"""The check-up of a recipe before its run: everything that would otherwise show after hours.

recipe -> Patient (what the run opens, in a folder that is thrown away) -> CHECKS -> lines
"""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from fastturn.checks import CHECKS
from fastturn.config import Config
from fastturn.dist import open_world
from fastturn.findings import FAIL, SKIP, Line
from fastturn.patient import Patient, Unavailable
from fastturn.progress import Progress
from fastturn.run import Run, open_run


def examine(config: Config, progress: Progress) -> list[Line]:
    """Every check, one after the other. Nothing of the recipe is changed, nothing is left behind.

    Example: of a server without prefix cache, `Line("server flags", "warn", "...: prefix cache
    off", "start servers with ...")`.
    """
    rollout = config.rollout
    deadline_s, patience_s = min(rollout.deadline_s, 30.0), min(rollout.patience_s, 5.0)
    rollout = replace(rollout, deadline_s=deadline_s, patience_s=patience_s)
    config = replace(config, trackers=("none",), rollout=rollout)
    with ExitStack() as stack:

        def open_all() -> Run:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fastturn-")))
            world = stack.enter_context(open_world(config.device, mesh=config.needs_mesh))
            return stack.enter_context(
                open_run(config, config, folder / "run", False, progress, world=world)
            )

        patient = Patient(config, open_all)
        lines = []
        with progress.task("doctor", len(CHECKS)) as bar:
            for name, check, remedy in CHECKS:
                bar.update(check=name)
                try:
                    found = check(patient)
                    lines.append(Line(name, found.status, found.measured, found.remedy))
                except Unavailable as reason:
                    lines.append(Line(name, SKIP, str(reason), ""))
                except Exception as error:  # whatever it is, it is this check's finding
                    lines.append(Line(name, FAIL, f"{type(error).__name__}: {error}", remedy))
                bar.advance(1)
        return lines
