"""The documentation says what the code says: keys, defaults, options, examples, links."""

import ast
import configparser
import os
import re
import runpy
from pathlib import Path
from urllib.parse import urlsplit

import pytest

ROOT = Path(__file__).resolve().parents[2]
SKIPPED = {"build", "dist", "runs", "__pycache__"}


def files():
    """The files of the repository, without what is made or hidden."""
    for folder, folders, names in os.walk(ROOT):
        folders[:] = [f for f in folders if f not in SKIPPED and not f.endswith(".egg-info")
                      and (not f.startswith(".") or f == ".ci")]
        yield from (Path(folder) / name for name in names)


PAGES = sorted(path for path in files() if path.suffix == ".md")


def name_of(path):
    return str(path.relative_to(ROOT))


def prose(page):
    """The text of a page without its code blocks."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors(page):
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", prose(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-")
            for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"[a-z]+:", link):
            continue
        target, _, anchor = link.partition("#")
        path = (page.parent / target).resolve() if target else page
        assert path.exists(), f"{name_of(page)} links to {link}, which does not exist"
        if anchor:
            assert anchor in anchors(path), f"{name_of(page)}: no heading for {link}"


def rows(page, heading):
    """The rows of the first table below a heading: first cell -> the others."""
    below = (ROOT / page).read_text().split(f"\n{heading}\n")[1]
    section = re.split(r"^##", below, maxsplit=1, flags=re.MULTILINE)[0]
    cells = [[cell.strip() for cell in line.strip().strip("|").split("|")]
             for line in section.splitlines() if line.startswith("| `")]
    return {first.strip("`"): rest for first, *rest in cells}


def test_the_tables_of_settings_are_those_that_the_script_writes():
    made = runpy.run_path(str(ROOT / "scripts/settings_tables.py"))
    text = (ROOT / "docs/jobs.md").read_text()
    assert re.findall(r"^<!-- settings: (\w+) -->$", text, flags=re.MULTILINE) == [
        "compile", "train", "ps", "tf"]
    assert text == made["page"](text), "run scripts/settings_tables.py"


def test_the_page_on_starters_names_each_starter_and_collective():
    from hvdtrain.collective_names import COLLECTIVES
    from hvdtrain.launch.options import STARTERS
    told = set(re.findall(r"`([\w-]+)`", (ROOT / "docs/starters.md").read_text()))
    assert {*STARTERS, *COLLECTIVES} <= told


@pytest.mark.parametrize("kind", ["MODELS", "DATASETS"])
def test_jobs_page_has_each_name_of_the_zoo(kind):
    import hvdtrain.zoo
    told = rows("docs/jobs.md", "### `[model]`" if kind == "MODELS" else "### `[data]`")
    assert set(getattr(hvdtrain.zoo, kind)) == set(told)


def options_of(command):
    import typer.main

    from hvdtrain.cli.main import app
    parameters = typer.main.get_command(app).commands[command].params
    return {name for parameter in parameters
            if parameter.param_type_name == "option" and not parameter.hidden
            for name in (*parameter.opts, *parameter.secondary_opts)}


@pytest.mark.parametrize(("command", "page"), [
    ("fit", "docs/jobs.md"), ("launch", "docs/starters.md"), ("world", "docs/starters.md"),
    ("build-horovod", "docs/build-horovod.md"), ("compare", "docs/compare.md"),
    ("lr", "docs/training.md"), ("report", "docs/training.md"), ("plan", "docs/plan.md")])
def test_each_option_is_described(command, page):
    told = set(re.findall(r"(?<![\w-])--?[a-zA-Z][\w-]*", (ROOT / page).read_text()))
    missing = options_of(command) - told - {"--help", "-h"}
    assert not missing, f"{page} does not tell of {', '.join(sorted(missing))}"


def after_docstring(path):
    """The code of a script below its docstring."""
    text = path.read_text()
    return "\n".join(text.splitlines()[ast.parse(text).body[0].end_lineno:]).strip()


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(),
                      flags=re.DOTALL | re.MULTILINE)


def test_the_script_in_the_readme_is_the_example():
    assert after_docstring(ROOT / "examples/python_api.py") == \
        blocks(ROOT / "README.md", "python")[0].strip()


def test_the_jobs_on_the_jobs_page_are_the_examples():
    toml = (ROOT / "examples/digits_mlp.toml").read_text()
    assert blocks(ROOT / "docs/jobs.md", "toml")[0] in toml
    assert blocks(ROOT / "docs/jobs.md", "python")[0] in \
        (ROOT / "examples/digits_mlp.py").read_text()


def test_each_example_is_listed():
    listed = (ROOT / "examples/README.md").read_text()
    for path in (ROOT / "examples").iterdir():
        if path.suffix in (".py", ".toml"):
            assert f"]({path.name})" in listed, f"examples/README.md does not list {path.name}"
        if path.suffix == ".toml":
            assert path.with_suffix(".py").is_file(), f"{path.name} has no twin in Python"


def registry_hosts():
    """Hosts of the package indexes that this machine is set up for."""
    settings = [os.environ.get(name, "") for name in (
        "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "UV_INDEX_URL", "UV_DEFAULT_INDEX", "UV_INDEX")]
    for file in (Path("/etc/pip.conf"), Path.home() / ".config/pip/pip.conf",
                 Path.home() / ".pip/pip.conf"):
        parser = configparser.ConfigParser(interpolation=None)
        if file.is_file():
            parser.read(file)
        settings += [value for section in parser.sections()
                     for key, value in parser.items(section) if key.endswith("index-url")]
    hosts = {urlsplit(url).hostname for setting in settings for url in setting.split()}
    return {host for host in hosts if host}


def test_no_file_names_this_machine():
    # Put together here, so that this file does not hold them itself.
    folders = ["/" + name + "/" for name in ("work", "root", "workspace", "Users")]
    needles = [*folders, str(ROOT) + "/", *registry_hosts(), "--extra-" + "index-url"]
    for path in files():
        text = path.read_bytes().decode("utf-8", "replace")
        found = [needle for needle in needles if needle in text]
        assert not found, f"{name_of(path)} contains {found}"
