"""The command line: what it prints, what it refuses with which status, what it does not load."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fastturn import cli, plan
from fastturn.config import Config, ConfigError, override
from fastturn.dist import World
from fastturn.recipes import RECIPES


def fails(capsys: pytest.CaptureFixture[str], *words: str, status: int = 2) -> str:
    """The one line that a refused command writes on stderr."""
    try:
        assert cli.main(words) == status
    except SystemExit as stop:
        assert stop.code == status
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1
    return err


def prints(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert cli.main(words) == 0
    return capsys.readouterr().out


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[Any, ...]]:
    """Calls that reach the trainer, which is replaced: it only claims the folder."""
    calls: list[tuple[Any, ...]] = []

    def train(
        config: Config, recipe: Config, out: Path, resume: bool, world: World, price: float | None
    ) -> dict[str, Any]:
        calls.append((config, recipe, out, resume, *([] if price is None else [price])))
        (out / "config.json").write_text("{}")
        return {}

    monkeypatch.setattr("fastturn.trainer.train", train)
    monkeypatch.chdir(tmp_path)
    return calls


def test_recipes_are_listed_with_a_line_each(capsys):
    lines = prints(capsys, "recipes").splitlines()
    assert [line.split()[0] for line in lines] == list(RECIPES)
    assert all(len(line.split()) > 5 for line in lines)


@pytest.mark.parametrize("words", [["--help"], ["train", "--help"], ["eval", "--help"]])
def test_help(words, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(words)
    assert stop.value.code == 0 and "usage: fastturn" in capsys.readouterr().out


def test_no_command_is_an_error(capsys):
    assert "COMMAND" in fails(capsys)


def test_unknown_recipe_names_the_nearest(capsys):
    assert "unknown recipe 'quickstrt'; the nearest is 'quickstart'" in fails(
        capsys, "train", "quickstrt"
    )


def test_a_setting_in_place_of_the_recipe(capsys):
    assert "fastturn train quickstart seed=1" in fails(capsys, "train", "seed=1")


def test_unknown_key_names_the_nearest(capsys):
    message = fails(capsys, "train", "quickstart", "iteratons=3")
    assert "unknown key 'iteratons'; the nearest is 'iterations'" in message


def test_unknown_option_names_the_nearest(capsys):
    message = fails(capsys, "train", "quickstart", "--dryrun")
    assert "'--dryrun' (the nearest is --dry-run)" in message


def test_rtpo_refuses_two_siblings(capsys):
    message = fails(capsys, "train", "quickstart", "group_size=2", "--dry-run")
    assert "group_size=2: rtpo needs at least 3" in message and "set group_size=3" in message


def test_settings_and_options_mix_in_any_order(trained, tmp_path):
    out = tmp_path / "run"
    assert cli.main(["train", "quickstart", "seed=3", "--out", str(out), "tasks=4"]) == 0
    [(config, recipe, folder, resume)] = trained
    assert (config.seed, config.tasks, folder, resume) == (3, 4, out, False)
    assert recipe == RECIPES["quickstart"]()


def test_a_price_reaches_the_trainer_and_a_wrong_one_is_named(trained, capsys):
    assert cli.main(["train", "quickstart", "--price", "1.9", "--out", "run"]) == 0
    assert trained[-1][-1] == 1.9
    with pytest.raises(SystemExit) as stop:
        cli.main(["train", "quickstart", "--price", "cheap"])
    assert stop.value.code == 2
    assert "'cheap': expected the price of a device-hour" in capsys.readouterr().err


def test_default_folders_are_numbered(trained):
    for _ in range(3):
        assert cli.main(["train", "quickstart", "seed=7"]) == 0
    assert cli.main(["train", "quickstart", "algorithm=grpo"]) == 0
    names = [out.as_posix() for _, _, out, _ in trained]
    assert names == [
        "runs/quickstart-rtpo-seed7",
        "runs/quickstart-rtpo-seed7-2",
        "runs/quickstart-rtpo-seed7-3",
        "runs/quickstart-grpo-seed0",
    ]


def test_resume_without_a_folder_takes_the_newest_run_of_the_name(trained, capsys):
    for _ in range(2):
        assert cli.main(["train", "quickstart"]) == 0
    assert cli.main(["train", "quickstart", "--resume"]) == 0
    assert trained[-1][2:] == (Path("runs/quickstart-rtpo-seed0-2"), True)
    assert "no run named quickstart-rtpo-seed5" in fails(
        capsys, "train", "quickstart", "seed=5", "--resume"
    )


def test_a_folder_with_a_run_is_refused_without_resume(trained, capsys):
    assert cli.main(["train", "quickstart", "--out", "run"]) == 0
    message = fails(capsys, "train", "quickstart", "--out", "run")
    assert "--out run" in message and "--resume" in message and len(trained) == 1
    assert cli.main(["train", "quickstart", "--out", "run", "--resume"]) == 0
    assert trained[-1][3] is True


def test_resuming_a_run_that_never_began_begins_it(trained, capsys):
    assert cli.main(["train", "quickstart", "--out", "run", "--resume"]) == 0
    assert trained[0][3] is False
    assert "starting from the beginning" in capsys.readouterr().err


def test_out_that_is_a_file(trained, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert "it is a file" in fails(capsys, "train", "quickstart", "--out", "file")
    assert "choose another --out" in fails(capsys, "train", "quickstart", "--out", "file/run")
    assert not trained


@pytest.mark.parametrize(
    ("before", "records", "stays"), [(False, "", False), (False, "{}\n", True), (True, "", True)]
)
def test_bad_input_found_by_the_run_leaves_no_folder(
    before, records, stays, trained, monkeypatch, capsys
):
    """Unless the folder was there before, or training had begun."""

    def train(
        config: Config, recipe: Config, out: Path, resume: bool, world: World, price: None
    ) -> None:
        (out / "config.json").write_text("{}")
        (out / "records.jsonl").write_text(records)
        raise ConfigError("data.path='': expected tasks")

    monkeypatch.setattr("fastturn.trainer.train", train)
    if before:
        Path("run").mkdir()
    assert "data.path" in fails(capsys, "train", "quickstart", "--out", "run")
    assert Path("run").exists() is stays


def test_a_failed_run_and_a_defect_have_different_ends(trained, monkeypatch, capsys):
    from fastturn.run import RunError

    def failing(*arguments: object, price: None) -> None:
        raise RunError("three steps in a row were not finite; lower optim.lr")

    def broken(*arguments: object, price: None) -> None:
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr("fastturn.trainer.train", failing)
    assert "lower optim.lr" in fails(capsys, "train", "quickstart", status=1)
    monkeypatch.setattr("fastturn.trainer.train", broken)
    with pytest.raises(RuntimeError, match="shapes do not match"):
        cli.main(["train", "quickstart"])


def test_ctrl_c(trained, monkeypatch, capsys):
    def train(*arguments: object, price: None) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("fastturn.trainer.train", train)
    assert cli.main(["train", "quickstart"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_known_errors_exist():
    """Their names are looked up in loaded modules, where a typing error would go unnoticed."""
    import importlib

    for module, name, _ in cli.KNOWN_ERRORS:
        assert issubclass(getattr(importlib.import_module(module), name), Exception)


@pytest.mark.parametrize("command", ["eval", "report"])
def test_a_folder_that_is_no_run(command, tmp_path, capsys):
    missing = tmp_path / "missing"
    assert "there is no such folder" in fails(capsys, command, str(missing))
    assert f"{command} {tmp_path}: expected the folder of a run" in fails(
        capsys, command, str(tmp_path)
    )


def test_report_prints_the_page(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("fastturn.report.write_report", lambda out, price: out / "report.html")
    (tmp_path / "records.jsonl").write_text("")
    assert prints(capsys, "report", str(tmp_path)).strip() == str(tmp_path / "report.html")


def test_dry_run_says_everything_and_starts_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    out = prints(capsys, "train", "quickstart", "--out", "run", "--dry-run", "seed=3", "tasks=8")
    assert "* seed" in out and "* tasks" in out and "* iterations" not in out
    assert "rollouts an iteration (at most)" in out and "AdamW moments" in out
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        ("context=nonsense", "expected one of keep, strip_think"),
        ("context=truncate:900", "below max_context=256"),
        ("context=summarise:nowhere.py:f", "there is no file"),
        ("data.domain=foo", "the nearest is"),
        ("data.domain=math", "data.path"),
        ("data.path=./nowhere.jsonl", "nowhere.jsonl"),
        ("trackers=foo", "expected any of tensorboard"),
        ("model.path=/nope", "there is no such folder"),
        ("device=cuda", "finds no CUDA device"),
    ],
)
def test_dry_run_refuses_what_the_run_would(pair, message, tmp_path, monkeypatch, capsys):
    """And both in the same words: the run's own check is the same one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    domain = ["data.domain=math"] if pair.startswith("data.path") else []
    said = fails(capsys, "train", "quickstart", "--dry-run", *domain, pair)
    assert message in said
    assert fails(capsys, "train", "quickstart", "--out", "run", *domain, pair) == said
    assert not any(tmp_path.iterdir())


def test_dry_run_refuses_a_context_that_the_model_does_not_read(tmp_path, capsys):
    from transformers import LlamaConfig

    LlamaConfig(max_position_embeddings=128).save_pretrained(tmp_path)
    pairs = [f"model.path={tmp_path}", "model.max_context=129"]
    assert "reads at most 128" in fails(capsys, "train", "quickstart", "--dry-run", *pairs)


@pytest.mark.parametrize(
    "words",
    [
        ["recipes"],
        ["train", "quickstart", "--dry-run"],
        ["train", "quickstrt"],
        ["eval", "nowhere"],
    ],
)
def test_light_commands_do_not_load_torch(words):
    code = (
        "import sys; from fastturn.cli import main; main(sys.argv[1:]); "
        "print(sorted({'torch', 'transformers', 'matplotlib'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"


def test_the_installed_command():
    """The entry point passes the status on and needs no particular working directory."""
    program = Path(sys.executable).with_name("fastturn")
    done = subprocess.run([program, "train", "x"], capture_output=True, text=True, cwd="/")
    assert done.returncode == 2 and done.stderr.startswith("error: unknown recipe 'x'")


def test_derived_numbers_of_rtpo_and_grpo():
    config = Config(tasks=32, trunks=1, turns=4, group_size=5, iterations=10)
    rtpo = plan.derive(config)
    assert (rtpo["rollouts_iteration"], rtpo["rollouts"]) == (32 * (1 + 4 * 4), 5440)
    assert (rtpo["stages_iteration"], rtpo["groups_stage"], rtpo["rollouts_stage"]) == (4, 32, 128)
    two_trunks = plan.derive(override(config, ["trunks=2", "group_size=3"]))
    assert two_trunks["rollouts_iteration"] == 64 * (1 + 4 * 2)
    grpo = plan.derive(override(config, ["algorithm=grpo", "group_size=16", "trunks=2"]))
    assert (grpo["rollouts_iteration"], grpo["stages_iteration"]) == (512, 1)


@pytest.mark.parametrize(
    ("iterations", "every", "evaluations"), [(10, 0, 2), (10, 5, 3), (11, 5, 4), (0, 5, 2)]
)
def test_evaluations_are_counted(iterations, every, evaluations):
    config = override(Config(), [f"iterations={iterations}", f"eval_every={every}"])
    assert plan.derive(config)["evaluations"] == evaluations


def test_serve_passes_the_recipe_on(monkeypatch, capsys):
    calls: list[Any] = []
    monkeypatch.setattr("fastturn.serve.serve", lambda config, **rest: calls.append((config, rest)))
    pairs = ["model.width=128", "model.lora_rank=8", "rollout.carrier=lora"]
    assert prints(capsys, "serve", "quickstart", *pairs, "--port", "8001", "--run") == ""
    [(config, rest)] = calls
    assert config.model.width == 128
    place = {"port": 8001, "host": "127.0.0.1", "python": None, "parallel": 1}
    assert rest == {"run": True, "carrier": "lora", **place}
