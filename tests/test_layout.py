"""The house rules that a test can check: imports run one way, modules stay small, names are documented."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "minivllm"
FILES = [path for path in sorted(PACKAGE.rglob("*.py")) if path.read_text().strip()]

# Lowest first; a module may import from its own layer and from those before it.
LAYERS = (
    ("labs", "quiet"),
    (
        "config",
        "faults",
        "sampling_params",
        "validation",
        "models.config",
        "models.interfaces",
        "models.demo_model",
        "layers.rotary",
    ),
    (
        "lora.seams",
        "lora.sentences",
        "lora.limits",
        "lora.patterns",
        "lora.refusals",
        "lora.request",
        "lora.names",
        "lora.peft_helper",
        "lora.resolver",
        "lora.lru_cache",
        "lora.stats",
        "economics",
    ),
    (
        "lora.module_weights",
        "lora.lora_weights",
        "lora.options.expert_weights",
        "lora.safetensors_file",
        "lora.pickle_file",
        "lora.weights_files",
        "lora.new_embeddings",
        "lora.target_parameters",
        "lora.lora_model",
    ),
    ("lora.ops",),
    ("lora.punica_wrapper",),
    ("layers", "models", "lora.layers"),
    (
        "lora.replace",
        "lora.utils",
        "lora.expert_parts",
        "lora.wrapped_modules",
        "lora.slot_writer",
        "lora.model_manager",
    ),
    ("lora.options", "lora.io", "lora.gpu", "lora.vllm"),
    ("lora.worker_manager",),
    ("lora",),
    ("core",),
    ("worker",),
    ("engine",),
    ("commands",),
    ("cli",),
)


def module_name(path: Path) -> str:
    name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
    return name.removesuffix(".__init__").removesuffix("__init__")


def layer_of(name: str) -> int:
    """The layer with the longest name that the module's name starts with."""
    found = [
        (len(prefix), number)
        for number, prefixes in enumerate(LAYERS)
        for prefix in prefixes
        if name == prefix or name.startswith(f"{prefix}.")
    ]
    assert found, f"minivllm.{name} is in no layer; add it to LAYERS"
    return max(found)[1]


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def imports_of(tree: ast.AST) -> set[str]:
    """Modules of minivllm that run when this one does; imports for annotations do not."""
    found: set[str] = set()
    for node in ast.iter_child_nodes(tree):
        if is_type_checking(node):
            continue
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("minivllm."):
            found.add(node.module.removeprefix("minivllm."))
        elif isinstance(node, ast.Import):
            found |= {a.name.removeprefix("minivllm.") for a in node.names if a.name.startswith("minivllm.")}
        found |= imports_of(node)
    return found


@pytest.mark.parametrize("path", [f for f in FILES if module_name(f)], ids=module_name)
def test_imports_run_one_way(path):
    layer = layer_of(module_name(path))

    upward = [name for name in imports_of(ast.parse(path.read_text())) if layer_of(name) > layer]

    assert not upward, f"minivllm.{module_name(path)} imports {upward} from above"


def test_the_lora_package_knows_nothing_of_the_engine():
    for path in (PACKAGE / "lora").rglob("*.py"):
        tops = {name.partition(".")[0] for name in imports_of(ast.parse(path.read_text()))}

        assert tops.isdisjoint({"core", "worker", "engine", "commands", "cli"}), path.name


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_a_module_stays_small_and_says_what_it_is(path):
    text = path.read_text()

    assert len(text.splitlines()) <= 340
    assert ast.get_docstring(ast.parse(text))


def test_every_module_of_the_subject_names_the_vllm_file_it_stands_for():
    ours = {"lora/lru_cache.py", "lora/stats.py", "lora/seams.py"}
    for path in [p for folder in ("lora", "core", "worker") for p in (PACKAGE / folder).rglob("*.py")]:
        if path.name == "__init__.py" or str(path.relative_to(PACKAGE)) in ours:
            continue

        assert "vllm/" in ast.get_docstring(ast.parse(path.read_text())), path.name


def test_the_multi_lora_path_can_be_read_in_one_sitting():
    kernels, experts = (
        {"triton_ops", "punica_gpu", "slot_writer"},
        {"fused_moe", "expert_parts", "target_parameters"},
    )
    ends_of_a_model = {"vocab_parallel_embedding", "logits_processor", "new_embeddings"}
    files_of_others = {"sentences", "limits", "patterns", "refusals", "safetensors_file", "pickle_file"}
    beside_it = kernels | experts | ends_of_a_model | files_of_others | {"rotary", "resolver", "stats"}
    parts = [
        path for path in (PACKAGE / "lora").rglob("*.py") if not beside_it & {path.parent.name, path.stem}
    ]
    parts.append(PACKAGE / "worker" / "lora_model_runner_mixin.py")
    parts.append(PACKAGE / "core" / "lora_admission.py")

    lines = sum(code_lines(path) for path in parts)

    # A third of it is signatures, one parameter a line, and the validation of what users bring.
    assert lines <= 2500, f"{lines} lines of code"


def code_lines(path: Path) -> int:
    """Lines that are neither blank, comment nor docstring."""
    text = path.read_text()
    documented = set()
    for node in ast.walk(ast.parse(text)):
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and isinstance(body[0], ast.Expr):
            value = body[0].value
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                documented |= set(range(value.lineno, value.end_lineno + 1))
    return sum(
        bool(line.strip()) and not line.strip().startswith("#") and number not in documented
        for number, line in enumerate(text.splitlines(), 1)
    )
