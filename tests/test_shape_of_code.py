"""Budgets and rules that keep the code readable, as tests: order of imports, lengths, no imports in functions, no probing by name."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "src" / "evenround"
FILES = sorted(PACKAGE.rglob("*.py"))
IDS = [path.relative_to(PACKAGE).as_posix() for path in FILES]

# A module imports only from modules that stand before it. Modules of one package stand together; `base` comes first among them.
ORDER = (
    "version",
    "errors",
    "data",
    "scheme",
    "rules",
    "config",
    "numerics",
    "tensorfile",
    "checkpoint",
    "model",
    "chains",
    "calls",
    "knapsack",
    "mixed",
    "documents",
    "calibration",
    "memory",
    "blocks",
    "states",
    "tune",
    "group",
    "rehearsal",
    "layouts",
    "plan",
    "outlook",
    "export",
    "manifest",
    "record",
    "output",
    "loading",
    "distance",
    "tasks",
    "job",
    "pipeline",
    "evaluate",
    "verify",
    "report",
    "plan_report",
    "terminal",
    "api",
    "cli",
    "__init__",
    "__main__",
)
OPTIONAL_EXTRAS = {"lm_eval", "datasets", "gguf", "matplotlib", "compressed_tensors", "accelerate"}
MAY_PROBE = {"model.py"}
LONGEST_MODULE = 600
LONGEST_FUNCTION = 80

Function = ast.FunctionDef | ast.AsyncFunctionDef


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def functions(path: Path) -> Iterator[Function]:
    return (node for node in ast.walk(tree(path)) if isinstance(node, Function))


def unit(path: Path) -> str:
    """The row of ORDER that a file belongs to: `numerics/integer.py` → `numerics`."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_modules(node: ast.AST) -> list[str]:
    """Dotted names of what an import statement reaches; `from evenround import data` gives `evenround.data`."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        assert node.level == 0, f"line {node.lineno}: relative import"
        return [f"evenround.{alias.name}" for alias in node.names] if node.module == "evenround" else [node.module or ""]
    return []


def imported_units(path: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree(path)):
        for name in imported_modules(node):
            parts = name.split(".")
            if parts[0] == "evenround":
                yield node.lineno, parts[1] if len(parts) > 1 else "__init__"  # type: ignore[attr-defined]


@pytest.mark.parametrize("path", FILES, ids=IDS)
def test_imports_go_one_way(path: Path) -> None:
    own = unit(path)
    assert own in ORDER, f"{own} has no place in ORDER; give it one"
    for line, other in imported_units(path):
        assert other in ORDER, f"line {line}: {other} has no place in ORDER"
        if other == own:
            continue
        assert ORDER.index(other) < ORDER.index(own), f"line {line}: {own} may not import {other}, which stands after it"


@pytest.mark.parametrize("path", FILES, ids=IDS)
def test_no_imports_inside_functions(path: Path) -> None:
    for function in functions(path):
        for node in ast.walk(function):
            for name in imported_modules(node):
                assert name.split(".")[0] in OPTIONAL_EXTRAS, f"{function.name}: imports {name} inside a function"


@pytest.mark.parametrize("path", FILES, ids=IDS)
def test_no_probing_by_literal_name(path: Path) -> None:
    if path.relative_to(PACKAGE).as_posix() in MAY_PROBE:
        pytest.skip("deals with other people's model classes")
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr", "setattr", "delattr"):
            assert not isinstance(node.args[1], ast.Constant), f"line {node.lineno}: {ast.unparse(node)}"


@pytest.mark.parametrize("path", FILES, ids=IDS)
def test_module_is_short_enough(path: Path) -> None:
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= LONGEST_MODULE, f"{lines} lines; split it"


def is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


@pytest.mark.parametrize("path", FILES, ids=IDS)
def test_functions_fit_a_screen(path: Path) -> None:
    for function in functions(path):
        first = next((node for node in function.body if not is_docstring(node)), function.body[-1])
        lines = (function.end_lineno or function.lineno) - first.lineno + 1  # a signature of one argument a line is easy to read
        assert lines <= LONGEST_FUNCTION, f"line {function.lineno}: {function.name} has {lines} lines"


def public(body: list[ast.stmt], owner: str = "") -> Iterator[tuple[str, Function | ast.ClassDef]]:
    """Public functions and classes of a module, and the methods of those classes that derive from nothing."""
    for node in body:
        if isinstance(node, Function | ast.ClassDef) and not node.name.startswith("_"):
            yield owner + node.name, node
            if isinstance(node, ast.ClassDef) and not node.bases:
                yield from public(node.body, f"{node.name}.")


def protocol_methods() -> set[str]:
    """Names of the methods that a Protocol of the package documents; what implements it need not say it again."""
    names: set[str] = set()
    for path in FILES:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ClassDef) and any(ast.unparse(base) == "Protocol" for base in node.bases):
                names |= {method.name for method in node.body if isinstance(method, Function) and ast.get_docstring(method)}
    return names


def speaks_for_itself(name: str, node: Function | ast.ClassDef) -> bool:
    """A method of one statement, or one that a Protocol documents."""
    return "." in name and isinstance(node, Function) and (len(node.body) == 1 or node.name in protocol_methods())


@pytest.mark.parametrize("path", FILES, ids=IDS)
def test_what_is_public_has_a_docstring(path: Path) -> None:
    module = tree(path)
    if module.body:
        assert ast.get_docstring(module), "no module docstring"
    missing = [name for name, node in public(module.body) if not ast.get_docstring(node) and not speaks_for_itself(name, node)]
    assert not missing, f"no docstring: {', '.join(missing)}"


@pytest.mark.parametrize("path", FILES, ids=IDS)
def test_public_signatures_take_no_keyword_bags(path: Path) -> None:
    bags = [name for name, node in public(tree(path).body) if isinstance(node, Function) and node.args.kwarg is not None]
    assert not bags, f"**{bags} in a public signature"


@pytest.mark.parametrize("path", FILES, ids=IDS)
def test_nothing_is_steered_by_environment_variables(path: Path) -> None:
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("os.environ", "os.getenv"):
            pytest.fail(f"line {node.lineno}: {ast.unparse(node)}")
