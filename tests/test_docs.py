"""The documents are true: paths and commands they name exist, and the README's example prints what it says."""

import contextlib
import io
import re
import warnings
from pathlib import Path

import pytest
from click.testing import CliRunner

from attnworks.backends import cpu
from attnworks.workbench.cli import main

ROOT = Path(__file__).parent.parent
DOCUMENTS = [
    *("README.md", "AGENTS.md", "CONTRIBUTING.md", "CHANGELOG.md"),
    *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")),
]
CODE = re.compile(r"`([^`\n]+)`|```\w*\n(.*?)```", re.DOTALL)
PATH = re.compile(r"\.?[\w][\w./-]*(/|\.(py|md|toml|txt|h|cpp|yaml|sh|json)\b)[\w./]*")
# In a fresh clone these are made by the commands the documents describe.
MADE = (".venv", "build")


def text(name: str) -> str:
    return (ROOT / name).read_text()


def snippets(name: str) -> list[str]:
    """Everything in backquotes, code blocks line by line."""
    return [line for inline, block in CODE.findall(text(name)) for line in (inline or block).splitlines()]


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_lead_somewhere(name):
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", text(name)):
        if "://" not in target:
            assert ((ROOT / name).parent / target).exists(), f"{name} links to {target}"


@pytest.mark.parametrize("name", DOCUMENTS)
def test_paths_exist(name):
    paths = []
    for snippet in snippets(name):
        words = snippet.split() or [""]
        for before, word in zip(["", *words[:-1]], (word.rstrip(".,:;") for word in words), strict=True):
            # What follows an option may be a file that the command writes.
            if not before.startswith("--") and PATH.fullmatch(word):
                paths.append(word)
    for path in paths:
        if not path.startswith(MADE):
            assert (ROOT / path).exists() or (ROOT / name).parent.joinpath(path).exists(), f"{name} names {path}"


@pytest.mark.parametrize("name", DOCUMENTS)
def test_make_targets_exist(name):
    targets = set(re.findall(r"^([a-z-]+):", text("Makefile"), re.MULTILINE))
    named = {target for snippet in snippets(name) for target in re.findall(r"(?:^|\s)make ([a-z-]+)", snippet)}
    assert named <= targets


@pytest.mark.parametrize("name", DOCUMENTS)
def test_commands_and_their_options_exist(name):
    for snippet in snippets(name):
        if match := re.match(r"(?:\.venv/bin/)?attnworks ([a-z]+)([^#]*)", snippet):
            helped = CliRunner().invoke(main, [match[1], "--help"])
            assert helped.exit_code == 0, f"{name}: attnworks {match[1]}"
            for option in re.findall(r"--[a-z-]+", match[2]):
                assert option in helped.output, f"{name}: attnworks {match[1]} {option}"


def test_every_command_is_in_the_readme():
    listed = CliRunner().invoke(main, ["--help"]).output
    commands = re.findall(r"^  ([a-z]+)  ", listed.split("Commands:")[1], re.MULTILINE)
    assert commands
    for command in commands:
        assert f"attnworks {command}" in text("README.md")


@pytest.mark.skipif(not cpu.isas(), reason="the README shows a machine with the native extension")
def test_the_readmes_example_prints_what_it_says():
    code, printed = re.search(r"```python\n(.*?)```.*?```text\n(.*?)```", text("README.md"), re.DOTALL).groups()
    with contextlib.redirect_stdout(io.StringIO()) as out, warnings.catch_warnings():
        warnings.simplefilter("error")
        exec(code, {})
    assert out.getvalue() == printed


@pytest.mark.skipif(not cpu.isas(), reason="the example asks the native backend why it refuses")
def test_the_example_of_masks_runs_and_prints_what_it_says():
    blocks = re.findall(r"```python\n(.*?)```", text("docs/masks.md"), re.DOTALL)
    (printed,) = re.findall(r"```text\n(.*?)```", text("docs/masks.md"), re.DOTALL)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec("".join(blocks), {})
    assert out.getvalue() == printed


def test_the_checks_above_see_what_they_check():
    assert "src/attnworks/api.py" in snippets("AGENTS.md")
    assert "attnworks verify     # every backend over named cases" in "\n".join(snippets("README.md"))
