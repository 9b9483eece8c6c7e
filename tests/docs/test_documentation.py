"""The documentation is true: links resolve; verbs, errors, dependencies and commands are where a reader looks."""

from __future__ import annotations

import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from packaging.requirements import Requirement

from onejob.cli import VERBS, group
from onejob.core.plugin import load
from onejob.errors import OnejobError

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
LINK = re.compile(r"(?<!\!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)|<img[^>]+src=\"([^\"]+)\"")
ALL_VERBS = sorted(name for verbs in VERBS.values() for name in verbs)


def read(name: str) -> str:
    return (ROOT / name).read_text()


def rows(text: str) -> list[list[str]]:
    """The rows of all tables of a page, as their cells."""
    lines = [line.strip() for line in text.splitlines() if line.strip().startswith("|")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip("|"))] for line in lines]


def links() -> Iterator[tuple[str, str]]:
    for page in PAGES:
        text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
        for found in LINK.findall(text):
            target = next(part for part in found if part)
            if not target.startswith(("http://", "https://", "mailto:")):
                yield page.relative_to(ROOT).as_posix(), target


def anchors(page: Path) -> set[str]:
    """The anchors that a forge makes of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize(("page", "target"), list(links()))
def test_links_resolve(page: str, target: str) -> None:
    path, _, anchor = target.partition("#")
    found = (ROOT / page).parent / path if path else ROOT / page
    assert found.exists(), f"{page} links to {target}"
    if anchor:
        assert anchor in anchors(found), f"{page} links to {target}"


def test_every_page_is_reachable_from_the_index() -> None:
    index = read("docs/index.md")
    for page in (ROOT / "docs").rglob("*.md"):
        name = page.relative_to(ROOT / "docs").as_posix()
        assert name == "index.md" or f"({name})" in index, name


@pytest.mark.parametrize("verb", ALL_VERBS)
def test_every_verb_is_documented_with_its_options(verb: str) -> None:
    page = read("docs/cli.md")
    section = re.search(rf"^### {verb}\n(.*?)(?=^##|\Z)", page, flags=re.MULTILINE | re.DOTALL)
    assert section, f"docs/cli.md has no section '### {verb}'"
    command = load(f"onejob.cli.{verb}:command")
    shared = {"--json", "--home", "--quiet", "--verbose", "--help"}
    for parameter in command.params:
        for option in parameter.opts if isinstance(parameter, click.Option) else ():
            where = page if option in shared else section[1]
            assert not option.startswith("--") or f"`{option}" in where, f"docs/cli.md: {verb} {option}"


def test_the_verbs_of_the_page_exist() -> None:
    assert sorted(re.findall(r"^### (\w+)$", read("docs/cli.md"), flags=re.MULTILINE)) == ALL_VERBS


@pytest.mark.parametrize("verb", ALL_VERBS)
def test_help_teaches(verb: str) -> None:
    command = load(f"onejob.cli.{verb}:command")
    text = command.get_help(click.Context(command, info_name=f"onejob {verb}"))
    assert "Examples:" in text
    assert f"onejob {verb}" in text.split("Examples:")[1]
    assert all(p.help for p in command.params if isinstance(p, click.Option)), "an option without help"
    assert len(group.get_help(click.Context(group)).splitlines()) < 50


def errors(root: type[OnejobError] = OnejobError) -> Iterator[type[OnejobError]]:
    yield root
    for child in root.__subclasses__():
        if child.__module__ == "onejob.errors":
            yield from errors(child)


@pytest.mark.parametrize("error", list(errors()), ids=lambda error: error.__name__)
def test_every_error_has_one_row_with_its_exit_code(error: type[OnejobError]) -> None:
    found = [row for row in rows(read("docs/operating.md")) if row[0] == f"`{error.__name__}`"]
    assert len(found) == 1, f"docs/operating.md has {len(found)} rows for {error.__name__}"
    assert found[0][1:3] == [str(error.exit_code), str(error.http_status)]
    assert len(found[0][3]) > 10, "what it means and what to do"


def test_the_rows_of_the_page_are_errors() -> None:
    named = {row[0].strip("`") for row in rows(read("docs/operating.md")) if row[0].endswith("Error`")}
    assert named == {error.__name__ for error in errors()}


def project() -> dict[str, object]:
    return tomllib.loads(read("pyproject.toml"))["project"]


def dependencies(*, without: str = "") -> set[str]:
    data = project()
    extras = {name: lines for name, lines in data["optional-dependencies"].items() if name != without}
    lines = [*data["dependencies"], *(line for extra in extras.values() for line in extra)]
    return {name for line in lines if (name := Requirement(line).name) != "onejob"}


def test_every_dependency_has_a_reason_and_every_reason_a_dependency() -> None:
    reasons = {row[0].strip("`"): row for row in rows(read("docs/dependencies.md")) if row[0].startswith("`")}
    assert set(reasons) == dependencies()
    for name, row in reasons.items():
        assert len(row[-1]) > 20, f"docs/dependencies.md: no reason for {name}"


def test_every_dependency_is_pinned_exactly() -> None:
    lines = [line for line in read("constraints.txt").splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[a-z0-9.-]+==[0-9][0-9a-z.]*", line) for line in lines), "exact versions, and no more"
    pinned = {line.partition("==")[0] for line in lines}
    wanted = dependencies(without="bench")  # never installed for the demo or the tests; it names its own versions
    assert {re.sub(r"[-_.]+", "-", name.lower()) for name in wanted} <= pinned
    bench = [Requirement(line) for line in project()["optional-dependencies"]["bench"]]
    assert all(str(need.specifier).startswith("==") for need in bench if need.name != "onejob")


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", read("Makefile"), flags=re.MULTILINE))


@pytest.mark.parametrize("page", [page.relative_to(ROOT).as_posix() for page in PAGES])
def test_commands_of_the_pages_exist(page: str) -> None:
    text = read(page)
    code = [*re.findall(r"```(?:sh|console|bash)?\n(.*?)```", text, flags=re.DOTALL), *re.findall(r"`([^`\n]+)`", text)]
    for block in code:
        for target in re.findall(r"(?:^|\n|&& |\$ )make ([a-z-]+)", block):
            assert target in make_targets(), f"{page}: make {target}"
        for verb in re.findall(r"(?:^|\n|&& |\$ |bin/)onejob ([a-z]+)", block):
            assert verb in ALL_VERBS, f"{page}: onejob {verb}"


def test_the_readme_begins_with_the_two_commands() -> None:
    first = re.search(r"```sh\n(.*?)```", read("README.md"), flags=re.DOTALL)
    assert first
    assert [line.split()[0] for line in first[1].splitlines() if line] == ["git", "make"]


@pytest.mark.parametrize("script", ["tools/setup.sh", ".ci/run"])
def test_scripts_are_sound_and_executable(script: str) -> None:
    path = ROOT / script
    assert path.stat().st_mode & 0o111
    shell = "bash" if "bash" in path.read_text().splitlines()[0] else "sh"
    subprocess.run([shell, "-n", str(path)], check=True)


def test_the_changelog_keeps_its_form() -> None:
    text = read("CHANGELOG.md")
    assert "## [Unreleased]" in text
    kinds = set(re.findall(r"^### (.+)$", text, flags=re.MULTILINE))
    assert kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
