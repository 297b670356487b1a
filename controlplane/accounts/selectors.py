"""Who stands behind a request."""

from __future__ import annotations

from controlplane.accounts.requests import actor_of

__all__ = ["actor_of"]
