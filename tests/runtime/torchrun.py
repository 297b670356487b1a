"""torchrun, whose ranks meet at a port that no connection takes before they listen there."""

from __future__ import annotations

from torch.distributed.elastic.rendezvous import api
from torch.distributed.run import main

from tests.ports import free_port

if __name__ == "__main__":
    api.get_free_port = free_port  # type: ignore[attr-defined]
    main()
