"""Ahead-of-time compilation of every Triton kernel, without a GPU, and what the code needs.

Each `triton_*.py` of this package lists its launches as `configurations()`. A configuration is
compiled for sm_80, sm_90 and sm_100 with the divisibility that a real launch has, and the machine
code is read: registers, spills, stack, shared memory, matrix and global-memory instructions.
`budgets.json` holds the most that each may need; `violations` compares.

Compilation runs in processes of its own: under TRITON_INTERPRET=1, as tests set it, decorated
kernels cannot be compiled, and contraction of multiply and add (TRITON_DEFAULT_FP_FUSION) is set
there explicitly. Results are kept in Triton's cache under the hash of the kernel's source.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

FOLDER = Path(__file__).parent
BUDGETS = FOLDER / "budgets.json"
TARGETS = (80, 90, 100)
SHARED_LIMIT = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}  # bytes a block may ask for
TENSOR_MEMORY_LIMIT = 512  # columns, sm_100
WARP = 32
MARKERS = ("<!-- budgets: made by scripts/budgets -->", "<!-- end of budgets -->")

MATRIX = re.compile(r"^(HMMA|HGMMA|IMMA|IGMMA|DMMA|QGMMA|UTC[A-Z]*MMA)\b")
GLOBAL = re.compile(r"^(LDG|STG|LDGSTS|UTMALDG|UTMASTG|UTMAREDG|ATOMG?|REDG?|UBLKCP)\b")
SPILL = re.compile(r"^(STL|LDL)\b")
INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Resources:
    """What one configuration needs on one target.

    spills counts load and store instructions of local memory; bytes of stack are per thread, of
    shared memory per block; matrix and global_ count instructions in the code, not executions;
    tensor_memory is in columns. Example of a small matmul on sm_90: 96 registers, 0 spills,
    4 HGMMA.
    """

    registers: int
    spills: int
    stack: int
    shared_static: int
    shared_dynamic: int
    tensor_memory: int
    matrix: int
    global_: int


Measured = dict[str, dict[str, Resources]]  # configuration -> "sm_80" -> resources


@dataclass(frozen=True, slots=True)
class Violation:
    """One number of one configuration that is not as the budget or the hardware wants it."""

    name: str
    target: str
    what: str
    budget: object
    measured: object


class Configuration(Protocol):
    """One launch as the compiler sees it; what the items of `configurations()` must have.

    signature names the type of every argument ("*bf16", "i32", "constexpr"), constexprs the values
    of those, attrs the divisibility by 16 of argument i as {(i,): [["tt.divisibility", 16]]}.
    """

    name: str
    kernel: Any
    signature: dict[str, str]
    constexprs: dict[str, Any]
    attrs: dict[tuple[int, ...], list[list[Any]]]
    num_warps: int
    num_stages: int


def measure(
    targets: Sequence[int] = TARGETS, sources: Sequence[Path] = (), match: str = ""
) -> Measured:
    """Resources of the configurations whose name matches `match`, for every target.

    `sources` are files with `configurations()`; default: the `triton_*.py` of this package. Each
    target is one process, two at a time. Raises `RuntimeError` with the compiler's message.
    """
    with ThreadPoolExecutor(2) as pool:
        parts = list(pool.map(lambda target: _in_process(target, sources, match), targets))
    found: Measured = {}
    for target, part in zip(targets, parts, strict=True):
        for name, numbers in part.items():
            found.setdefault(name, {})[f"sm_{target}"] = Resources(**numbers)
    return found


def _in_process(target: int, sources: Sequence[Path], match: str) -> dict[str, dict[str, int]]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_DEFAULT_FP_FUSION"] = "1"
    # -P: the current folder stays out of the path, where `kernels` would be a package of its own.
    command = [sys.executable, "-P", "-m", __spec__.name, str(target), *map(str, sources)]
    done = subprocess.run(
        [*command, "--match", match], env=environment, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(
            f"compiling for sm_{target} failed: expected every configuration to compile; "
            f"the last lines were\n{done.stderr[-3000:]}"
        )
    found: dict[str, dict[str, int]] = json.loads(done.stdout)
    return found


def violations(measured: Measured, budgets: Mapping[str, Any], match: str = "") -> list[Violation]:
    """Hardware limits and spills for any compiler; the budget's numbers for the compiler that it
    was made with. A number may be smaller than its budget, except that matrix instructions may not
    vanish. `match` is what `measure` was asked for: other budgets are not missed.
    """
    import triton

    same_compiler = budgets["triton"] == triton.__version__
    found: list[Violation] = []
    known = {name for name in budgets["configurations"] if re.search(match, name)}
    for name in sorted(known - set(measured)):
        found.append(Violation(name, "all", "configuration", "in the budgets", "gone"))
    for name, by_target in measured.items():
        for target, used in by_target.items():
            found += _over_limit(name, target, used)
            allowed = budgets["configurations"].get(name, {}).get(target)
            if allowed is None:
                found.append(Violation(name, target, "configuration", "not in the budgets", "new"))
            elif same_compiler:
                found += _over_budget(name, target, used, Resources(**allowed))
    return found


def _over_limit(name: str, target: str, used: Resources) -> Iterator[Violation]:
    shared, limit = used.shared_static + used.shared_dynamic, SHARED_LIMIT[int(target[3:])]
    if shared > limit:
        yield Violation(name, target, "shared memory (hardware)", limit, shared)
    if used.tensor_memory > TENSOR_MEMORY_LIMIT:
        yield Violation(
            name, target, "tensor memory (hardware)", TENSOR_MEMORY_LIMIT, used.tensor_memory
        )
    if used.spills:
        yield Violation(name, target, "spills", 0, used.spills)


def _over_budget(
    name: str, target: str, used: Resources, allowed: Resources
) -> Iterator[Violation]:
    for field in fields(Resources):
        most, got = getattr(allowed, field.name), getattr(used, field.name)
        vanished = field.name == "matrix" and most > 0 and got == 0
        if (got > most and field.name != "spills") or vanished:
            yield Violation(name, target, field.name.rstrip("_"), most, got)


def report(found: Iterable[Violation]) -> str:
    """A table of violations, one a line, and how to accept them."""
    lines = [
        f"{v.name:44} {v.target:7} {v.what:26} budget {v.budget}, measured {v.measured}"
        for v in found
    ]
    return "\n".join(
        [*lines, "accept intended changes with: .venv/bin/python scripts/budgets --update"]
    )


def load(path: Path = BUDGETS) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def save(measured: Measured, path: Path = BUDGETS) -> None:
    """One line for each configuration and target, so that differences can be read."""
    import triton

    blocks = [
        f"  {json.dumps(name)}: {{\n"
        + ",\n".join(
            f"   {json.dumps(target)}: {json.dumps(asdict(used))}"
            for target, used in by_target.items()
        )
        + "\n  }"
        for name, by_target in sorted(measured.items())
    ]
    text = ",\n".join(blocks)
    version = json.dumps(triton.__version__)
    path.write_text(f'{{\n "triton": {version},\n "configurations": {{\n{text}\n }}\n}}\n')


def table(budgets: Mapping[str, Any]) -> str:
    """The budgets as Markdown: targets divided by slashes, equal configurations in one row."""
    targets = [f"sm_{target}" for target in TARGETS]
    columns = {
        "registers": lambda r: r.registers,
        "spills": lambda r: r.spills,
        "stack, bytes": lambda r: r.stack,
        "shared, KiB": lambda r: round((r.shared_static + r.shared_dynamic) / 1024),
        "matrix instructions": lambda r: r.matrix,
        "global-memory instructions": lambda r: r.global_,
    }
    lines = [
        f"Triton {budgets['triton']}; {' / '.join(targets)}.",
        "",
        "| configuration | " + " | ".join(columns) + " |",
        "|---|" + "---|" * len(columns),
    ]
    alike: dict[str, list[str]] = {}
    for name, by_target in budgets["configurations"].items():
        used = [Resources(**by_target[target]) for target in targets]
        cells = [" / ".join(str(read(one)) for one in used) for read in columns.values()]
        alike.setdefault(" | ".join(cells), []).append(f"`{name}`")
    lines += [f"| {', '.join(names)} | {cells} |" for cells, names in alike.items()]
    return "\n".join(lines)


def documented(text: str, budgets: Mapping[str, Any]) -> str:
    """`text` with the table between its markers made anew; `ValueError` without markers."""
    head, begin, rest = text.partition(MARKERS[0])
    _, end, tail = rest.partition(MARKERS[1])
    if not begin or not end:
        raise ValueError(f"document: expected the markers {' and '.join(MARKERS)}, got none")
    return f"{head}{begin}\n{table(budgets)}\n{end}{tail}"


def modules(sources: Sequence[Path] = ()) -> list[ModuleType]:
    """The modules that list configurations: those files, or the `triton_*.py` of this package."""
    if not sources:
        names = sorted(path.stem for path in FOLDER.glob("triton_*.py"))
        found = [importlib.import_module(f"{__spec__.parent}.{name}") for name in names]
        return [module for module in found if hasattr(module, "configurations")]
    found = []
    for path in sources:
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        found.append(module)
    return found


def _resources(configuration: Configuration, target: int) -> Resources:
    """Compile one configuration, or read its numbers from the cache."""
    import triton
    from triton.runtime.cache import get_cache_manager

    c = configuration
    plain = (c.signature, c.constexprs, c.attrs, c.num_warps, c.num_stages, target)
    parts = (c.kernel.cache_key, repr(plain), triton.__version__, Path(__file__).read_text())
    cache = get_cache_manager(hashlib.sha256("\0".join(parts).encode()).hexdigest())
    kept = cache.get_file("resources.json")
    if kept is not None:
        return Resources(**json.loads(Path(kept).read_text()))
    found = _compiled(configuration, target)
    cache.put(json.dumps(asdict(found)), "resources.json", binary=False)
    return found


def _compiled(configuration: Configuration, target: int) -> Resources:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    c = configuration
    binary = triton.compile(
        ASTSource(c.kernel, c.signature, c.constexprs, c.attrs),
        target=GPUTarget("cuda", target, WARP),
        options={"num_warps": c.num_warps, "num_stages": c.num_stages},
    )
    code = _disassembled(binary.asm["cubin"])
    opcodes = INSTRUCTION.findall(code)

    def number(name: str) -> int:
        found = re.search(rf"\b{name}:(\d+)", code)
        assert found is not None, name
        return int(found[1])

    return Resources(
        registers=number("REG"),
        spills=sum(bool(SPILL.match(opcode)) for opcode in opcodes),
        stack=number("STACK"),
        shared_static=number("SHARED"),
        shared_dynamic=binary.metadata.shared,
        tensor_memory=getattr(binary.metadata, "tmem_size", None) or 0,
        matrix=sum(bool(MATRIX.match(opcode)) for opcode in opcodes),
        global_=sum(bool(GLOBAL.match(opcode)) for opcode in opcodes),
    )


def _disassembled(cubin: bytes) -> str:
    """Resource usage and machine code, by the program inside the triton distribution."""
    import triton

    program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        texts = [
            subprocess.run(
                [program, how, file.name], capture_output=True, text=True, check=True
            ).stdout
            for how in ("--dump-resource-usage", "--dump-sass")
        ]
    return "\n".join(texts)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the resources of every configuration for one target as JSON."""
    parser = argparse.ArgumentParser(description="resources of every configuration, as JSON")
    parser.add_argument("target", type=int, choices=TARGETS)
    parser.add_argument("sources", nargs="*", type=Path)
    parser.add_argument("--match", default="")
    args = parser.parse_args(argv)
    found = {
        c.name: asdict(_resources(c, args.target))
        for module in modules(args.sources)
        for c in module.configurations()
        if re.search(args.match, c.name)
    }
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
