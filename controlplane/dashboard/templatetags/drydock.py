"""Filters and tags of every template."""

from __future__ import annotations

from django import template

register = template.Library()
