"""Prints a table of the structure and the prose of one or more checkouts, given by their folders.

    python scripts/measure_house.py OLD_CHECKOUT .

Nothing of a checkout is imported: its files are read as they are. Generated modules are left out.
"""

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.support import prose

SHORT_LINES = 60
CONFORMANCE = ("clients", "conformance")
WORDS = {
    "say, tell, hear": r"says?|said|saying|tells?|told|telling|hears?|heard|hearing",
    "who(ever), nobody, somebody": r"who(?:ever|m|se)?|nobody|somebody",
    "what": r"what(?:ever)?",
    "where": r"where",
}
"""The list of words whose number in 1,000 is measured, beside semicolons."""
INFERENCE, WIRE = "services/meshrl/inference", "clients/python/meshrl/wire"
WEIGHT_PATH = (
    *(f"services/meshrl/{name}" for name in ("weights", "versions", "trainer/publishing", "inference/agent")),
    *(f"{INFERENCE}/embedded/{name}.py" for name in ("staging", "broadcast_receiver", "live_weights")),
    *(f"{INFERENCE}/vllm/{name}.py" for name in ("worker", "shadow", "file_reader", "jobs", "version_clock")),
    *(f"{INFERENCE}/vllm/{name}.py" for name in ("adapters", "calls", "gpu_worker")),
    *(f"clients/python/meshrl/client/{name}.py" for name in ("weights", "transfers")),
    *(f"{WIRE}/{name}.py" for name in ("manifest", "manifest_file", "manifest_checks")),
    *(f"{WIRE}/{name}.py" for name in ("types/weights", "convert/weights")),
    "services/meshrl/orchestrator/peers/version_relay.py",
)
"""Folders and modules that bring a version from the trainer to the engines; some are of older checkouts alone."""

HOMES = {
    "lines of metrics.jsonl are parsed": (r"metrics_jsonl|metrics\.jsonl", r"json\.loads"),
    "whole lines of a growing file are taken": (r"rfind\(b?\"\\n\"|endswith\(b?\"\\n\"",),
    "waits double": (
        r"min\(\s*2(?:\.0)? \* \w*(?:wait|pause|delay|_s\b)|(?:wait|pause|delay|_s) \*= 2(?:\.0)?\b"
        r"|2(?:\.0)? ?\*\* ?\w*(?:attempt|tries|failures)|1\.5 \* wait",
    ),
    "memory that a process may use": (r"MemAvailable|memory\.max|SC_(?:AV)?PHYS",),
    "the answer to a repeated request is kept": (r"request_id", r"OrderedDict|popitem|class FirstAnswers"),
    "columns of a table are aligned": (r"\.[lr]just\((?!8)|\{\w+:[<>]\{", r"max\(map\(len|max\(len\(|width"),
    "a free port is found": (r"\.bind\(\([^)]*,\s*0\)\)|create_server\(\([^)]*,\s*0\)",),
    "an HTTP client of a server at a URL is made": (
        r"aiohttp\.ClientSession\(|httpx\.(?:Async)?Client\(|http\.client\.HTTP|urllib\.request\.urlopen",
        r"/version|/v1/models|/health|base_url",
    ),
    "a renderer is made": (r"create_renderer\(|renderers\.create|RENDERER_REGISTRY",),
    "an attention operator is registered": (r"AttentionInterface\.register|ALL_ATTENTION_FUNCTIONS",),
    "folders of steps are found": (r"step_\(\\d|\"step_\*\"|startswith\(\"step_\"|removeprefix\(\"step_\"",),
}
"""Small ideas that want one home: a module that has all the patterns of one is a home of it."""


def lines(paths: Iterable[Path]) -> int:
    return sum(len(path.read_text().splitlines()) for path in paths)


def code_lines(paths: Iterable[Path]) -> int:
    """Lines with code: neither blank, nor a comment, nor part of a docstring."""
    return sum(len(_code(path.read_text())) for path in paths)


def _code(text: str) -> set[int]:
    strings: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            strings.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    numbered = enumerate(text.splitlines(), start=1)
    return {number for number, line in numbered if line.strip() and not line.lstrip().startswith("#")} - strings


def classes(paths: Iterable[Path]) -> Iterator[ast.ClassDef]:
    for path in paths:
        yield from (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef))


def one_caller(paths: Iterable[Path]) -> int:
    """Private functions and methods whose name their module has once beside the definition."""
    count = 0
    for path in paths:
        tree = ast.parse(path.read_text())
        used: Counter[str] = Counter()
        for node in ast.walk(tree):
            if isinstance(node, ast.Name):
                used[node.id] += 1
            elif isinstance(node, ast.Attribute):
                used[node.attr] += 1
        count += sum(
            isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
            and re.match(r"_[a-z]", node.name) is not None
            and used[node.name] == 1
            for node in ast.walk(tree)
        )
    return count


def whole_configurations(paths: Iterable[Path]) -> int:
    """Functions with a parameter `config` that is the configuration of a whole program."""
    programs = "RL|SFT|Orchestrator|Trainer|Rollout|Inference|Weights|Evaluation|Synthesis|Trials"
    whole = re.compile(rf"\"?(?:{programs})Config\b")
    return sum(
        isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and any(
            argument.annotation is not None and whole.match(ast.unparse(argument.annotation))
            for argument in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        )
        for path in paths
        for node in ast.walk(ast.parse(path.read_text()))
    )


def all_docstrings(paths: Iterable[Path]) -> str:
    """The text of every docstring, those of attributes and private functions too."""
    return "\n".join(
        node.value.value
        for path in paths
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    )


def weight_path(root: Path) -> Iterator[Path]:
    for place in (root / name for name in WEIGHT_PATH):
        yield from (place.rglob("*.py") if place.is_dir() else [place] if place.exists() else [])


def words(text: str) -> int:
    return len(text.split())


def read(root: Path, *names: str) -> str:
    return "\n".join((root / name).read_text() for name in names if (root / name).exists())


def per_thousand(text: str, phrase: str) -> float:
    return 1000 * len(re.findall(phrase, text, re.IGNORECASE)) / max(words(text), 1)


def measure(root: Path) -> dict[str, float]:
    written, tests = prose.sources(root), list((root / "tests").rglob("*.py"))
    moved = [
        path for path in written if path.relative_to(root).parts[:2] == CONFORMANCE or root / "configs" in path.parents
    ]
    modules = [path for path in written if path not in moved]
    made = {"gen", "dist", "node_modules"}
    typescript = [
        path for path in (root / "clients/typescript").rglob("*.ts") if not made & set(path.relative_to(root).parts)
    ]
    examples = root / "clients/typescript/examples"
    pages = "\n".join(path.read_text() for path in prose.pages(root))
    docs = "\n".join(path.read_text() for path in sorted((root / "docs").glob("*.md")))
    docstrings = all_docstrings(modules)
    core_config, launch_config = (
        list((root / "services/meshrl" / name / "config").rglob("*.py")) for name in ("core", "launch")
    )
    table: dict[str, float] = {
        "lines of product": lines(modules),
        "lines of code of product": code_lines(modules),
        "lines of distributions of their own: conformance, examples": lines(moved),
        "lines of TypeScript, by hand": lines(path for path in typescript if examples not in path.parents),
        "lines of TypeScript, its examples": lines(path for path in typescript if examples in path.parents),
        "lines of the weight path": lines(weight_path(root)),
        "lines of tests": lines(tests),
        "lines of code of core/config": code_lines(core_config),
        "lines of code of launch/config": code_lines(launch_config),
        "modules": len(modules),
        f"modules under {SHORT_LINES} lines": sum(
            0 < len(path.read_text().splitlines()) < SHORT_LINES for path in modules
        ),
        "classes named ...Group...": sum("Group" in node.name for node in classes(modules)),
        "protocols (typing.Protocol)": sum(
            any(ast.unparse(base).startswith("Protocol") for base in node.bases) for node in classes(modules)
        ),
        "private functions with one caller": one_caller(modules),
        "functions that get a whole configuration": whole_configurations(modules),
        "words of docs/": words(docs),
        "words of README, SECURITY, CONTRIBUTING": words(pages) - words(docs),
        "words of docstrings": words(docstrings),
        "words of RESULTS": words(read(root, "tests/benchmarks/RESULTS.md")),
        "words of CHANGELOG": words(read(root, "CHANGELOG.md")),
    }
    texts = [path.read_text() for path in modules]
    for name, patterns in HOMES.items():
        table[f"homes: {name}"] = sum(all(re.search(each, text) for each in patterns) for text in texts)
    for name, text in (
        ("pages", "\n".join(p.text for path in prose.pages(root) for p in prose.page(path))),
        ("docstrings", docstrings),
    ):
        table[f"per 1,000 words of {name}: semicolons"] = per_thousand(text, ";")
        for label, phrase in WORDS.items():
            table[f"per 1,000 words of {name}: {label}"] = per_thousand(text, rf"\b(?:{phrase})\b")
    for area, passages in (
        ("pages", (p for path in prose.pages(root) for p in prose.page(path))),
        ("--help", prose.help_texts(root)),
        ("public docstrings", prose.docstrings(root)),
    ):
        table[f"sentences of {area} that test_words refuses"] = len(prose.faults(passages, root))
    return table


def main(folders: list[str]) -> None:
    tables = [measure(Path(folder).resolve()) for folder in folders]
    width = max(map(len, tables[0]))
    for name in tables[0]:
        cells = (f"{table[name]:>12,.1f}" if "per 1,000" in name else f"{table[name]:>12,.0f}" for table in tables)
        print(f"{name:<{width}}", *cells)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(sys.argv[1:])
