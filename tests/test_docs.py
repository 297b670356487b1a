"""The operations guide names every setting, metric and alert there is, and no other."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import REGISTRY, CollectorRegistry

import controlplane.ingest.metrics
import controlplane.middleware  # for what it registers
import workers.metrics
from controlplane.health.catalogue import OVERLAY
from controlplane.local import runfile

DOCS = runfile.REPOSITORY / "docs"
PROMTOOL = shutil.which("promtool")
#: Read elsewhere than in our settings: by a library, and where the catalogues are.
FOREIGN = {"PROMETHEUS_MULTIPROC_DIR", OVERLAY}


@pytest.fixture(scope="module")
def guide() -> str:
    return "".join((DOCS / f"{page}.md").read_text() for page in ("operations", "monitoring"))


@pytest.fixture(scope="module")
def alerts() -> list[dict[str, Any]]:
    groups = yaml.safe_load((DOCS / "alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


@pytest.fixture
def metrics(db: None) -> set[str]:
    """The name of each of our metrics as it stands in a query, without a histogram's endings."""
    fleet = CollectorRegistry()
    fleet.register(workers.metrics.FleetFigures(lambda: True))
    families = [*REGISTRY.collect(), *fleet.collect()]
    return {
        family.name + ("_total" if family.type == "counter" else "")
        for family in families
        if family.name.startswith("drydock_")
    }


def documented(guide: str, heading: str) -> set[str]:
    """The first column of the table under a heading."""
    section = guide.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return set(re.findall(r"^\| `(\w+)", section, re.MULTILINE))


def settings_read() -> set[str]:
    """The name in each env_*(NAME, …) call of the settings."""
    tree = ast.parse((runfile.REPOSITORY / "controlplane" / "settings.py").read_text())
    return {
        str(node.args[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id.startswith("env_")
        and isinstance(node.args[0], ast.Constant)
    }


def test_every_setting_is_in_the_guide_and_no_other(guide: str) -> None:
    assert documented(guide, "Settings") == settings_read() | FOREIGN


def test_every_metric_is_in_the_guide(guide: str, metrics: set[str]) -> None:
    section = guide.split("\n## Monitor\n")[1].split("\n## ")[0]
    named = set(re.findall(r"`(drydock_\w+)", section))
    abbreviated = {"drydock_ingest_writes_waiting_bytes"}  # as "…_waiting_bytes"
    assert named == metrics - abbreviated


def test_each_alert_that_the_guide_names_is_a_rule(
    guide: str, alerts: list[dict[str, Any]]
) -> None:
    section = guide.split("\n## Monitor\n")[1].split("\n## ")[0]
    rows = [line.split(" | ") for line in section.splitlines() if line.startswith("| `")]
    promised = [re.findall(r"`(\w+)", names) for names, *_, when in rows if when.strip(" |")]
    asked = " ".join(rule["expr"] for rule in alerts)
    assert [names for names in promised if not any(name in asked for name in names)] == []


def test_alerts_speak_of_metrics_that_exist(
    alerts: list[dict[str, Any]], metrics: set[str]
) -> None:
    named = {name for rule in alerts for name in re.findall(r"drydock_\w+", rule["expr"])}
    assert {name.removesuffix("_bucket") for name in named} <= metrics


def seconds(duration: str) -> int:
    return int(duration[:-1]) * {"s": 1, "m": 60, "h": 3600}[duration[-1]]


def test_each_range_holds_four_scrapes_or_there_would_be_nothing_to_compare(
    guide: str, alerts: list[dict[str, Any]]
) -> None:
    scraped = guide.split("\n    scrape_interval: ")[1].split()[0]
    ranges = {found for rule in alerts for found in re.findall(r"\[(\w+)\]", rule["expr"])}
    assert min(map(seconds, ranges)) >= 4 * seconds(scraped)


def test_each_outcome_that_is_alerted_on_is_told_before_it_comes(
    alerts: list[dict[str, Any]],
) -> None:
    asked = [re.findall(r'outcome=~?"([^"]+)"', rule["expr"]) for rule in alerts]
    named = {outcome for found in asked for choice in found for outcome in choice.split("|")}
    assert named == set(controlplane.ingest.metrics.WATCHED)


def test_each_alert_says_what_is_and_what_to_do(alerts: list[dict[str, Any]]) -> None:
    for rule in alerts:
        assert rule["alert"].startswith("Drydock")
        assert rule["labels"]["severity"] in {"warning", "critical"}
        assert rule["annotations"].keys() == {"summary", "remedy"}


@pytest.fixture
def helper(guide: str, tmp_path: Path) -> str:
    """The guide's function, for a host on which whoever tries it may be anybody."""
    (line,) = re.findall(r"^drydock\(\) \{.*\}$", guide, re.MULTILINE)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    python = tmp_path / ".venv" / "bin" / "python"
    python.write_text('#!/bin/sh\nprintf "%s\\n" "$DATABASE_URL" "$#" "$@"\n')
    python.chmod(0o755)
    (tmp_path / "environment").write_text("DATABASE_URL=postgresql://drydock@/drydock?host=/run\n")
    line = line.replace("/etc/drydock", str(tmp_path)).replace("/srv/drydock", str(tmp_path))
    return f'sudo() {{ shift 2; "$@"; }}\n{line}\n'


@pytest.mark.parametrize(
    ("before", "database"),
    [
        ("", "postgresql://drydock@/drydock?host=/run"),
        ("DATABASE_URL=postgresql:///mine ", "postgresql://drydock@/drydock?host=/run"),
        ("WITH=DATABASE_URL=postgresql:///restored ", "postgresql:///restored"),
    ],
)
def test_the_guides_function_runs_a_command_in_the_hosts_environment(
    helper: str, before: str, database: str
) -> None:
    script = f"{helper}{before}drydock user 'two words' --superuser"
    told = subprocess.run(["bash", "-euc", script], capture_output=True, text=True, check=True)
    assert told.stdout.splitlines() == [
        database,
        "4",
        "manage.py",
        "user",
        "two words",
        "--superuser",
    ]


def anchors_in(page: Path) -> set[str]:
    """What links to headings of this page end with: GitHub makes it of the heading's words."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ +(.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_between_the_guides_lead_somewhere() -> None:
    for page in [*DOCS.glob("*.md"), *runfile.REPOSITORY.glob("*.md")]:
        links = re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]+))?\)", page.read_text())
        for target, anchor in links:
            there = page.parent / target if target else page
            assert there.exists(), f"{page.name} links to {target}"
            assert not anchor or anchor in anchors_in(there), f"{page.name}: {target}#{anchor}"


def test_every_message_that_the_code_names_is_explained() -> None:
    explained = set(re.findall(r"^\| `(\w+)` \|", (DOCS / "messages.md").read_text(), re.MULTILINE))
    assert messages_told() <= explained


def messages_told() -> set[str]:
    """The kind in each call of trouble(KIND, …) of the runtime."""
    sources = (runfile.REPOSITORY / "runtime").rglob("*.py")
    calls = (node for source in sources for node in ast.walk(ast.parse(source.read_text())))
    return {
        str(call.args[0].value)
        for call in calls
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr in {"trouble", "_trouble"}
        and isinstance(call.args[0], ast.Constant)
    }


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed (Debian: prometheus)")
def test_promtool_accepts_the_alerts() -> None:
    assert PROMTOOL
    checked = subprocess.run(
        [PROMTOOL, "check", "rules", str(DOCS / "alerts.yml")], capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
