"""Figures of the code itself: the walk of one parameter, longest files and functions, Unit, stages, the README.

    python benchmarks/house.py                 # this checkout
    python benchmarks/house.py --beside DIR    # also another checkout, one column each

The walk is the list of files that `docs/architecture.md` names in "One parameter through one step", each with all its lines. One
training step of two ranks at stage 3 over shared memory runs under a profiler beside it: every file named there must run, and
everything else that runs is counted too.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import pathlib
import re
import subprocess
import sys
from typing import Any

STAGE_COMPARISON = re.compile(r"\bstage(?:\.number)?\s*(?:==|!=|<=?|>=?|in\b|not in\b)|(?:==|!=|<=?|>=?)\s*(?:\w+\.)*stage\b")


def trace(source: pathlib.Path) -> dict[str, set[str]]:
    """File to functions of the library that run in one step of a small GPT, from the first gather to the next."""
    worker = pathlib.Path(__file__).with_name("house_walk.py")
    done = subprocess.run(
        [sys.executable, str(worker)],
        env={**os.environ, "PYTHONPATH": str(source.parent)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    if done.returncode:
        raise SystemExit(f"the walk could not be traced:\n{done.stderr}")
    found = json.loads(done.stdout.splitlines()[-1])
    return {name: set(functions) for name, functions in found.items()}


def told(root: pathlib.Path) -> list[str]:
    """The files that the document's walk names, in order."""
    text = (root / "docs" / "architecture.md").read_text()
    start = text.index("## One parameter through one step")
    steps = re.findall(r"^\d+\. .*?(?=^\d+\. |^`|\Z)", text[start : text.index("\n## ", start)], re.MULTILINE | re.DOTALL)
    named = re.findall(r"`((?:engine|partition|optim|comm|tiers|schedule)/\w+\.py)`", "".join(steps))
    return list(dict.fromkeys(named))


def count_lines(path: pathlib.Path) -> int:
    """Lines of a file, all of them."""
    return len(path.read_text().splitlines())


def longest_function(files: list[pathlib.Path], source: pathlib.Path) -> tuple[int, str]:
    """(lines, place) of the longest function or method."""
    best = (0, "")
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                assert node.end_lineno is not None
                best = max(best, (node.end_lineno - node.lineno + 1, f"{path.relative_to(source)}:{node.name}"))
    return best


def unit_figures(source: pathlib.Path) -> tuple[int, int]:
    """Attributes that Unit's own methods set, and arguments of its constructor."""
    tree = ast.parse((source / "partition" / "unit.py").read_text())
    unit = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Unit")
    attributes = {
        node.attr
        for node in ast.walk(unit)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }
    attributes |= {node.target.attr for node in ast.walk(unit) if isinstance(node, ast.AnnAssign) and _is_own(node.target)}
    make = next(node for node in unit.body if isinstance(node, ast.FunctionDef) and node.name == "__init__")
    return len(attributes), len(make.args.args) - 1 + len(make.args.kwonlyargs)


def _is_own(node: ast.expr) -> Any:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"


def stage_comparisons(files: list[pathlib.Path], source: pathlib.Path) -> list[str]:
    """Places outside the table that compare stage numbers."""
    found = []
    for path in files:
        if path.name == "stages.py":
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            code = line.split("#")[0]
            if STAGE_COMPARISON.search(code) and not code.lstrip().startswith(('"', "'", "f")):
                found.append(f"{path.relative_to(source)}:{number}")
    return found


def figures(root: pathlib.Path) -> dict[str, str]:
    """Name to value, as text."""
    source = root / "src" / "shardwise"
    files = sorted(source.rglob("*.py"))
    runs = trace(source)
    walk = told(root)
    missing = [name for name in walk if name not in runs]
    longest = max(files, key=count_lines)
    function_lines, function = longest_function(files, source)
    attributes, arguments = unit_figures(source)
    comparisons = stage_comparisons(files, source)
    above = [path for path in files if count_lines(path) > 400]
    return {
        "walk, as the document tells it": f"{len(walk)} files, {sum(count_lines(source / name) for name in walk)} lines",
        "its files": " ".join(walk) + (f" (of which these did not run: {missing})" if missing else ""),
        "everything that runs in a step": f"{len(runs)} files, {sum(map(len, runs.values()))} functions",
        "longest file": f"{longest.relative_to(source)}, {count_lines(longest)} lines",
        "files above 400 lines": str(len(above)),
        "longest function": f"{function}, {function_lines} lines",
        "attributes of Unit": str(attributes),
        "arguments of its constructor": str(arguments),
        "stage comparisons outside the table": f"{len(comparisons)}: {' '.join(comparisons)}",
        "lines in src": str(sum(map(count_lines, files))),
        "words in README": str(len((root / "README.md").read_text().split())),
    }


def main() -> None:
    """Print the figures, one line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--beside", type=pathlib.Path, help="another checkout, built in place")
    chosen = parser.parse_args()
    roots = [pathlib.Path(__file__).resolve().parent.parent, *([chosen.beside.resolve()] if chosen.beside else [])]
    columns = [figures(root) for root in roots]
    for name in columns[0]:
        print(f"{name}: " + " | before: ".join(column[name] for column in columns))


if __name__ == "__main__":
    main()
