"""One log format for every process: a line of JSON with an event's name and its fields.

Must import nothing of Django: granian reads its own format from here, before any application.
"""

from __future__ import annotations

import logging
from typing import Any

import structlog

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")

_shared_processors: list[structlog.typing.Processor] = [
    structlog.contextvars.merge_contextvars,
    structlog.stdlib.add_log_level,
    structlog.stdlib.add_logger_name,
    structlog.processors.TimeStamper(fmt="iso", utc=True, key="time"),
]


def configure(*, json_lines: bool, level: str) -> dict[str, Any]:
    """Set up structlog for this process; returns what `logging.config.dictConfig` takes."""
    logging.captureWarnings(True)  # Python's own would stand between the lines as plain text
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *_shared_processors,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"line": {"()": formatter, "json_lines": json_lines}},
        "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "line"}},
        "root": {"handlers": ["stderr"], "level": level},
        "loggers": {
            "django.request": {"level": "ERROR"},
            # A line for each ring of the doorbell says nothing that a step's own line does not.
            "celery": {"level": "WARNING"},
            "kombu": {"level": "WARNING"},
        },
    }


def formatter(*, json_lines: bool = True) -> structlog.stdlib.ProcessorFormatter:
    """Writes a log record, whoever made it, as one line; a traceback is a field of it."""
    rendering: list[structlog.typing.Processor] = (
        [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(default=str)]
        if json_lines
        else [structlog.dev.ConsoleRenderer(colors=False)]
    )
    return structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=_shared_processors,
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *rendering],
    )
