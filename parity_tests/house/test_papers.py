"""The papers say what is there: links, paths, the index, the license and the bounds of dependencies."""

import importlib.util
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path
    for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("results/**/*.md")]
    if path.is_file()
)
RUNS = sorted(path for path in (ROOT / "results").glob("*/*") if path.is_dir())
LINK = re.compile(r"\]\(([^)\s]+)\)")
PATH = re.compile(r"`((?:oscar_\w+|parity_tests|scripts|docs|results)/[\w./-]*|\w+\.(?:md|toml))`")


def test_pages_are_found() -> None:
    """The tests below have something to check."""
    assert {"README.md", "CONTRIBUTING.md", "CHANGELOG.md"} <= {page.name for page in PAGES}
    assert sum(len(LINK.findall(page.read_text())) for page in PAGES) > 20


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_relative_links_exist(page: Path) -> None:
    """Every relative link of a page leads to a file or folder of the repository."""
    for target in LINK.findall(page.read_text()):
        if "://" in target or target.startswith(("#", "mailto:")):
            continue
        assert (page.parent / target.split("#")[0]).exists(), f"{page.relative_to(ROOT)} links to {target}"


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "README.md", "docs/serving.md", "docs/transformers.md"])
def test_named_paths_exist(name: str) -> None:
    """Every file or folder that a guide names in code type exists."""
    page = ROOT / name
    for target in PATH.findall(page.read_text()):
        found = [base / target for base in (ROOT, page.parent) if (base / target).exists()]
        assert found, f"{name} names {target}"


def test_commands_of_the_readme_can_be_run() -> None:
    """The scripts that README starts without naming a shell are executable."""
    found = re.findall(r"^(scripts/\w+\.sh)", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert len(found) == 2
    for name in found:
        assert (ROOT / name).stat().st_mode & 0o111, f"{name} is not executable"


def test_index_lists_every_page() -> None:
    """docs/README.md links to every page beside it."""
    index = (ROOT / "docs" / "README.md").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        assert page.name == "README.md" or f"]({page.name})" in index, f"{page.name} is not in the index"


@pytest.fixture
def tables() -> Any:
    """scripts/readme_tables.py."""
    spec = importlib.util.spec_from_file_location("readme_tables", ROOT / "scripts" / "readme_tables.py")
    assert spec and spec.loader
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


def test_tables_equal_the_runs(tables: Any) -> None:
    """Tables of the README and the index of the runs are what scripts/readme_tables.py makes of run.json."""
    assert tables.main(["--check"]) == 0
    text = (ROOT / "README.md").read_text()
    shown = {"quality", "peers-short", "tasks", "size", "speed", "families"}
    assert {match[1] for match in tables.BLOCK.findall(text)} == shown
    assert tables.rendered(text.replace("7.75", "7.74")) == text, "a changed number is noticed"


def test_tables_of_peers_and_tasks(tables: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every method of a record has one short row; means and ratios are those of the record."""
    kl = {"bf16": (0.0, 0.0), "hqq:4": (0.5, 0.25), "int2": (0.02, 0.01)}
    bits = {"bf16": (16.0, 1e9), "hqq:4": (4.5, 285e6), "int2": (2.25, 1.5e8)}
    peers = {
        "device": "GPU",
        "settings": {"model": "coder", "context": 32768},
        "texts": [
            {"label": f"evaluation_{name}.txt", "methods": {m: {"kl": pair[i]} for m, pair in kl.items()}}
            for i, name in enumerate(("prose", "code"))
        ],
        "rows": [
            {"method": m, "bits_per_number": b, "cache_bytes": size, "kl": sum(kl[m]) / 2}
            for m, (b, size) in bits.items()
        ],
    }
    shares = {"bf16": (1.0, 0.0, 0.0), "int2": (0.75, -0.25, 0.03)}
    row = {
        "questions": 8,
        **{
            name: {method: found[place] for method, found in shares.items()}
            for place, name in enumerate(("accuracy", "difference", "difference_error"))
        },
    }
    found = {
        "device": "GPU", "model": "coder", "methods": [{"method": name} for name in shares],
        "accuracy": {"4096": {"single": row, "keys": row}, "32768": {"single": row}},
    }  # fmt: skip
    monkeypatch.setattr(tables, "load", {"p/1": peers, "t/1": found}.__getitem__)
    monkeypatch.setattr(tables, "PEERS_SHORT", "p/1")
    monkeypatch.setattr(tables, "TASKS", "t/1")
    text = tables.peers_short()
    assert "coder, 32,768 tokens, GPU ([run](results/p/1/page.md)" in text
    assert text.split("\n\n")[1].splitlines() == [
        "| cache | bits | MB | KL, prose | KL, code | KL to ours |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
        "| BF16 | 16 | 1000 | 0 | 0 | – |",
        "| HQQ, 4 bits | 4.5 | 285 | .5 | .25 | 25 × |",
        f"| {tables.PEER_METHODS['int2']} | 2.25 | 150 | .02 | .01 | 1 × |",
    ]
    text = tables.tasks()
    assert "means over single, keys, 8–16 questions each: coder, GPU" in text
    assert text.split("\n\n")[1].splitlines() == [
        "| cache | 4K | 32K | less BF16, points |",
        "| --- | ---: | ---: | ---: |",
        "| BF16 | 100.0 % | 100.0 % |  |",
        f"| {tables.TASK_METHODS['int2']} | 75.0 % | 75.0 % | -25.0 ± 1.7 |",
    ]


@pytest.mark.parametrize("folder", RUNS, ids=[str(folder.relative_to(ROOT / "results")) for folder in RUNS])
def test_a_run_has_a_record_and_a_page(folder: Path) -> None:
    """results/SUBJECT/DEVICE-DATE/{run.json, page.md, plot.png}, and no raw sweeps."""
    assert re.fullmatch(r"[a-z0-9]+-\d{4}-\d\d-\d\d", folder.name)
    names = {path.name for path in folder.iterdir()}
    assert {"run.json", "page.md"} <= names <= {"run.json", "page.md", "plot.png"}
    assert json.loads((folder / "run.json").read_text())


def test_results_hold_nothing_else() -> None:
    """A file that is no part of a run has no place in results/."""
    for path in (ROOT / "results").rglob("*"):
        if path.is_file() and path != ROOT / "results" / "README.md":
            assert path.parent in RUNS, path


def test_license_and_bounds() -> None:
    """The license is the one in the metadata; libraries whose internals we use have upper bounds."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["license"] == "Apache-2.0" and project["license-files"] == ["LICENSE"]
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text and "END OF TERMS AND CONDITIONS" in text
    requirements = [line for extra in project["optional-dependencies"].values() for line in extra]
    bounded = [line for line in requirements if re.match(r"(jax|transformers)\b", line)]
    assert len(bounded) >= 3 and all("<" in line for line in bounded), bounded


@pytest.mark.parametrize("package", ["oscar_jax", "oscar_torch"])
def test_packages_are_typed(package: str) -> None:
    """Type checkers of users read the packages' hints (PEP 561)."""
    assert (ROOT / package / "py.typed").exists()
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    assert tools["setuptools"]["package-data"][package] == ["py.typed"]


def test_pre_commit_runs_the_checks_of_the_test_script() -> None:
    """The hooks are the commands of scripts/test.sh, none more and none less."""
    script = (ROOT / "scripts" / "test.sh").read_text()
    checks = re.findall(r"^(\.venv/bin/(?:ruff|pyright).*)$", script, re.MULTILINE)
    hooks = re.findall(r"entry: (.*)", (ROOT / ".pre-commit-config.yaml").read_text())
    assert len(checks) == 3 and hooks == checks
