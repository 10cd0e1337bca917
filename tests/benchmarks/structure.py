"""Counts what makes the code easy or hard to find one's way in; prints a figure a line.

    python tests/benchmarks/structure.py [CHECKOUT]

Read are the services and the Python client without the generated stubs, as text: nothing of them is imported.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import tokenize
from collections import Counter
from pathlib import Path

SOURCES = ("services/meshrl", "clients/python/meshrl")
FOLDERS = ("orchestrator", "inference", "trainer", "rollout", "weights", "versions")
CONFIGURATION = ("core/config/*.py", "launch/config/shared_keys.py")
DECLARATIONS = (
    "core/config/shared.py",
    "core/config/older_keys.py",
)  # sections of programs, and the table of spellings
MANY_PARAMETERS = 10
NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER,
}  # fmt: skip
ANY = re.compile(r"\bAny\b")


def modules(root: Path) -> dict[Path, str]:
    """The text of every module by its path."""
    paths = (path for source in SOURCES for path in sorted((root / source).rglob("*.py")))
    return {path: path.read_text() for path in paths if "v1" not in path.parts}


def one_caller(tree: ast.Module) -> list[str]:
    """Private functions that are named once in their module beside their definition."""
    defined = Counter(
        node.name
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and node.name.startswith("_")
        and not node.name.startswith("__")
    )
    named = Counter(
        node.id if isinstance(node, ast.Name) else node.attr
        for node in ast.walk(tree)
        if isinstance(node, (ast.Name, ast.Attribute))
    )
    return [name for name in defined if defined[name] == named[name] == 1]


def called_once(tree: ast.Module) -> int:
    """Those of them that are called there. The others are handed on, as callbacks, threads' targets or routes."""
    called = {
        node.func.id if isinstance(node.func, ast.Name) else node.func.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, (ast.Name, ast.Attribute))
    }
    return len(called.intersection(one_caller(tree)))


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """How many it takes, without self, cls and autograd's ctx."""
    given = function.args
    names = [argument.arg for argument in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return len([name for name in names if name not in ("self", "cls", "ctx")])


def arrows(folder: Path) -> int:
    """Pairs of a folder's direct modules and subfolders of which the first imports the second."""
    package = f"meshrl.{folder.name}."
    found: set[tuple[str, str]] = set()
    for path in folder.rglob("*.py"):
        room = path.relative_to(folder).parts[0].removesuffix(".py")
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(package):
                other = (node.module or "").removeprefix(package).split(".")[0]
                if other != room:
                    found.add((room, other))
    return len(found)


def code_lines(text: str) -> int:
    """Lines of a module that hold code: neither blank nor a comment or docstring alone."""
    docstrings = {
        line
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    held = {line for token in tokens if token.type not in NO_CODE for line in range(token.start[0], token.end[0] + 1)}
    return len(held - docstrings)


def configuration(services: Path) -> list[str]:
    """The text of each module that reads a configuration; what declares one is left out."""
    paths = {path for pattern in CONFIGURATION for path in services.glob(pattern)}
    return [path.read_text() for path in sorted(paths - {services / name for name in DECLARATIONS})]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkout", nargs="?", type=Path, default=Path(__file__).parents[2])
    root: Path = parser.parse_args().checkout
    texts = modules(root)
    trees = {path: ast.parse(text) for path, text in texts.items()}
    functions = [
        node
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]
    classes = Counter(
        name for text in texts.values() for name in re.findall(r"^class ([A-Za-z]\w*)", text, re.MULTILINE)
    )
    sizes = Counter(path.parent for path in texts if path.name != "__init__.py")
    most = max(sizes, key=lambda folder: sizes[folder])
    lines = [line for text in texts.values() for line in text.splitlines()]
    private = [one for one in functions if one.name.startswith("_") and not one.name.startswith("__")]
    wide = [one for one in functions if parameters(one) >= MANY_PARAMETERS]
    print(f"lines: {len(lines)}")
    print(f"lines that name Any: {sum(ANY.search(line) is not None for line in lines)}")
    print(f"private functions: {len(private)}")
    print(f"  of them with one caller: {sum(len(one_caller(tree)) for tree in trees.values())}")
    print(f"    which calls them and does not hand them on: {sum(map(called_once, trees.values()))}")
    print(f"callables with {MANY_PARAMETERS} or more parameters: {len(wide)}")
    print(f"public class names used twice: {sum(count > 1 for count in classes.values())}")
    print(f"files of more than 400 lines: {sum(len(text.splitlines()) > 400 for text in texts.values())}")
    print(f"modules side by side: at most {sizes[most]}, in {most.relative_to(root)}")
    readers = configuration(root / "services/meshrl")
    print(f"lines that read a configuration: {sum(len(text.splitlines()) for text in readers)}")
    print(f"  of them code: {sum(map(code_lines, readers))}")
    for name in FOLDERS:
        print(f"import arrows inside {name}: {arrows(root / 'services/meshrl' / name)}")


if __name__ == "__main__":
    main()
