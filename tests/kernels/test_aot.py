"""Budgets of the compiled kernels: measuring proven on a small kernel, then every configuration."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import triton

from fastturn.kernels import aot

ROOT = Path(__file__).parents[2]
SMALL = Path(__file__).parent / "small_product.py"


@pytest.fixture(scope="module")
def small() -> aot.Measured:
    return aot.measure((80, 90), [SMALL])


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")


def budgets_of(measured: aot.Measured) -> dict[str, Any]:
    plain = {
        name: {target: asdict(used) for target, used in by_target.items()}
        for name, by_target in measured.items()
    }
    return {"triton": triton.__version__, "configurations": plain}


def test_a_small_product_uses_matrix_instructions_and_no_stack(small: aot.Measured) -> None:
    for target, used in small["product/64"].items():
        assert (used.spills, used.stack) == (0, 0), target
        assert 32 < used.registers <= 255 and used.matrix > 0 and used.global_ > 0
    # Two operand tiles of 8 KiB in three stages; sm_80 keeps one stage in registers.
    assert small["product/64"]["sm_80"].shared_dynamic == 2 * 2 * 64 * 64 * 2
    assert small["product/64"]["sm_90"].shared_dynamic == 3 * 2 * 64 * 64 * 2


def test_registers_that_do_not_fit_are_seen_as_spills(small: aot.Measured) -> None:
    for target, used in small["product/512"].items():
        assert used.spills > 0 and used.stack > 0 and used.registers >= 254, target
    found = aot.violations(small, budgets_of(small))
    assert [(v.name, v.target, v.what) for v in found] == [
        ("product/512", target, "spills") for target in ("sm_80", "sm_90")
    ]


def test_the_interpreter_of_the_tests_does_not_matter(
    small: aot.Measured, interpreted: None
) -> None:
    again = aot.measure((90,), [SMALL], match="/64$")
    assert again == {"product/64": {"sm_90": small["product/64"]["sm_90"]}}


def test_a_broken_budget_is_shown_with_both_numbers(small: aot.Measured) -> None:
    good = {"product/64": small["product/64"]}
    budgets = budgets_of(good)
    assert aot.violations(good, budgets) == []
    budgets["configurations"]["product/64"]["sm_80"]["registers"] -= 1
    (found,) = aot.violations(good, budgets)
    got = small["product/64"]["sm_80"].registers
    assert found == aot.Violation("product/64", "sm_80", "registers", got - 1, got)
    text = aot.report([found])
    assert f"budget {got - 1}, measured {got}" in text and "scripts/budgets --update" in text


def test_better_than_the_budget_is_fine_but_matrix_instructions_may_not_vanish(
    small: aot.Measured,
) -> None:
    used = small["product/64"]["sm_90"]
    budgets = budgets_of({"product/64": {"sm_90": used}})

    def what(changed: aot.Resources) -> list[str]:
        found = aot.violations({"product/64": {"sm_90": changed}}, budgets)
        return [v.what for v in found]

    assert what(replace(used, registers=used.registers - 8, global_=1)) == []
    assert what(replace(used, matrix=0)) == ["matrix"]
    assert what(replace(used, shared_dynamic=228 << 10)) == [
        "shared memory (hardware)",
        "shared_dynamic",
    ]


def test_new_and_gone_configurations_are_violations(small: aot.Measured) -> None:
    good = {"product/64": small["product/64"]}
    empty = {"triton": triton.__version__, "configurations": {}}
    assert {v.budget for v in aot.violations(good, empty)} == {"not in the budgets"}
    (gone,) = aot.violations({}, budgets_of(good))
    assert (gone.name, gone.measured) == ("product/64", "gone")
    assert aot.violations({}, budgets_of(good), match="other") == []


def test_another_compiler_is_held_to_the_hardware_and_to_no_spills(small: aot.Measured) -> None:
    budgets = budgets_of(small) | {"triton": "0.0"}
    for by_target in budgets["configurations"].values():
        for used in by_target.values():
            used["registers"] = 1
    assert {v.what for v in aot.violations(small, budgets)} == {"spills"}


def test_budgets_survive_their_file(small: aot.Measured, tmp_path: Path) -> None:
    aot.save(small, tmp_path / "budgets.json")
    assert aot.load(tmp_path / "budgets.json") == budgets_of(small)


def test_a_kernel_that_does_not_compile_says_why(tmp_path: Path) -> None:
    text = SMALL.read_text().replace("tl.dot(b_a, b_b, b_c)", "tl.dot(b_a, b_c, b_c)")
    (tmp_path / "broken.py").write_text(text)
    with pytest.raises(RuntimeError, match=r"compiling for sm_80 failed(.|\n)*b_c"):
        aot.measure((80,), [tmp_path / "broken.py"], match="/64$")


# Compiled in every run, for all targets: the largest of each kind, and what spilled before.
FAST = (
    r"^(surrogate_rows/V151936/bf16/full|tile_statistics/D2048/V(151936/bf16/plain|50257/bf16/full)"
    r"|combine_tiles/V151936/128|query_gradients/E128/bf16/plain)$"
)


def test_the_largest_configurations_are_within_their_budgets() -> None:
    measured = aot.measure(match=FAST)
    assert len(measured) == 5
    found = aot.violations(measured, aot.load(), FAST)
    assert not found, "\n" + aot.report(found)


@pytest.mark.slow
def test_every_configuration_is_within_its_budget() -> None:
    """Minutes where Triton's cache is cold: 300 compilations."""
    found = aot.violations(aot.measure(), aot.load())
    assert not found, "\n" + aot.report(found)


def test_every_configuration_has_a_budget_without_spills() -> None:
    """Nothing is compiled: names, and the numbers that no budget may hold."""
    code = (
        "from fastturn.kernels import aot;"
        "print(*sorted(c.name for m in aot.modules() for c in m.configurations()), sep='\\n')"
    )
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-P", "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    budgets = aot.load()["configurations"]
    assert done.stdout.splitlines() == sorted(budgets)
    for name, by_target in budgets.items():
        assert list(by_target) == [f"sm_{target}" for target in aot.TARGETS], name
        assert not any(used["spills"] for used in by_target.values()), name


def test_the_documented_table_is_the_budgets() -> None:
    document = (ROOT / "docs" / "kernels.md").read_text()
    assert document == aot.documented(document, aot.load()), "run scripts/budgets --update"


def test_a_document_without_markers_is_named() -> None:
    with pytest.raises(ValueError, match="expected the markers"):
        aot.documented("# Kernels\n", aot.load())
