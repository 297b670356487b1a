"""What a rank under test would tell the control plane."""

from __future__ import annotations

from runtime.client import Message, Sender


class Told(Sender):
    """Sends nothing, keeps everything."""

    def __init__(self) -> None:
        super().__init__("", "", job="j", replica=0, rank=0, placement="p")
        self.messages: list[Message] = []

    def tell(self, message: Message) -> None:
        self.messages.append(message)
