"""Count the lines of `src` and `tests` by room: ``python tests/lines.py``, which `make lines` runs.

Code is a line with a token of a statement; prose is a line of a docstring or a comment alone.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
_NO_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
_WITH_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def counted(text: str) -> tuple[int, int, int]:
    """Lines of a file: all, code, prose. The rest is blank."""
    prose = set(_docstring_lines(ast.parse(text)))
    code, comments = set[int](), set[int]()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        lines = range(token.start[0], token.end[0] + 1)
        if token.type == tokenize.COMMENT:
            comments.update(lines)
        elif token.type not in (*_NO_CODE, tokenize.ENDMARKER):
            code.update(lines)
    code -= prose
    return len(text.splitlines()), len(code), len(prose | (comments - code))


def _docstring_lines(tree: ast.Module) -> Iterator[int]:
    for node in ast.walk(tree):
        if isinstance(node, _WITH_DOCSTRING) and ast.get_docstring(node, clean=False) is not None:
            yield from range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)
        # A string after an assignment describes what was assigned.
        for one, next_one in zip(_body(node), _body(node)[1:], strict=False):
            if isinstance(one, ast.Assign | ast.AnnAssign) and isinstance(next_one, ast.Expr):
                if isinstance(next_one.value, ast.Constant):
                    yield from range(next_one.lineno, (next_one.end_lineno or 0) + 1)


def _body(node: ast.AST) -> list[ast.stmt]:
    return node.body if isinstance(node, ast.Module | ast.ClassDef) else []


def rooms(base: Path, paths: Iterable[Path]) -> dict[str, list[int]]:
    """Room → files, lines, code, prose."""
    found: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    for path in paths:
        parts = path.relative_to(base).parts
        room = found["/".join(parts[:2]) if len(parts) > 2 else parts[0] if parts[1:] else "."]
        for at, number in enumerate((1, *counted(path.read_text("utf-8")))):
            room[at] += number
    return found


def main() -> None:
    """Print a table for `src` and one for `tests`."""
    for name, base in (("src", ROOT / "src" / "everstate"), ("tests", ROOT / "tests")):
        found = rooms(base, sorted(base.rglob("*.py")))
        total = [sum(each) for each in zip(*found.values(), strict=True)]
        print(f"{name:<28}{'files':>7}{'lines':>9}{'code':>9}{'prose':>9}")
        for room, numbers in (*sorted(found.items()), ("all", total)):
            print(f"  {room:<26}{numbers[0]:>7}" + "".join(f"{each:>9,}" for each in numbers[1:]))


if __name__ == "__main__":
    main()
