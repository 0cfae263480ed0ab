"""Draw mutants of the package at random: ``draw.py SEED COUNT FILE`` writes them as JSON.

A mutant is one small change of the code that a test should notice. Places are drawn first, each with the same chance, then one of the changes
that cosmic-ray knows for that place. Annotations are left out, as no test runs them.
"""

import ast
import difflib
import itertools
import json
import random
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

ROOT = Path(__file__).resolve().parents[2]
Place = tuple[str, tuple[int, int]]  # file below the root; line and column


def operators() -> dict[str, object]:
    kinds = {name: get_operator(name) for name in sorted(operator_names())}
    return {name: kind() for name, kind in kinds.items() if not kind.arguments()}


def annotated(code: str) -> set[int]:
    """Lines and columns of annotations, each as 1000 * line + column."""
    found: set[int] = set()
    for node in ast.walk(ast.parse(code)):
        for field in ("annotation", "returns"):
            if each := getattr(node, field, None):
                found.update(range(1000 * each.lineno + each.col_offset, 1000 * each.end_lineno + each.end_col_offset))
    return found


def places(codes: dict[str, str]) -> dict[Place, list[tuple[str, int]]]:
    """What can be changed: at each place the operators, and which of their occurrences in the file it is."""
    found: dict[Place, list[tuple[str, int]]] = defaultdict(list)
    known = operators()
    for file, code in codes.items():
        nodes, skipped = list(ast_nodes(get_ast(code))), annotated(code)
        for name, operator in known.items():
            positions = (start for node in nodes for start, _ in operator.mutation_positions(node))
            for number, (line, column) in enumerate(positions):
                if 1000 * line + column not in skipped:
                    found[file, (line, column)].append((name, number))
    return found


def edits(before: str, after: str) -> list[tuple[int, list[str], list[str]]]:
    """Line from 0, lines before, lines after."""
    old, new = before.splitlines(keepends=True), after.splitlines(keepends=True)
    blocks = difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
    return [(a, old[a:b], new[c:d]) for kind, a, b, c, d in blocks if kind != "equal"]


def mutants(codes: dict[str, str], seed: int) -> Iterator[dict[str, object]]:
    known, found, draws = operators(), places(codes), random.Random(seed)
    for file, (line, column) in draws.sample(sorted(found), len(found)):
        name, number = draws.choice(found[file, (line, column)])
        code = codes[file]
        changed = mutate_code(code, known[name], number)
        try:
            is_other = changed is not None and ast.dump(ast.parse(changed)) != ast.dump(ast.parse(code))
        except SyntaxError:
            continue
        if is_other:
            yield {"file": file, "line": line, "operator": name, "edits": edits(code, changed)}


def main(seed: str, count: str, file: str) -> None:
    paths = [path for path in sorted((ROOT / "elasticdl").rglob("*.py")) if path.parent.name != "proto"]
    drawn = mutants({str(path.relative_to(ROOT)): path.read_text() for path in paths}, int(seed))
    Path(file).write_text(json.dumps([*itertools.islice(drawn, int(count))], indent=1))


if __name__ == "__main__":
    main(*sys.argv[1:])
