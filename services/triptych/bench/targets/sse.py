"""Server-sent events out of a byte stream, as the HTML standard describes them; only `data` matters here."""


class SseParser:
    """Feed it bytes as they arrive, however they are cut; it returns the data of each event that became complete."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, received: bytes) -> list[bytes]:
        """Returns the data of the events that end in `received`, in order."""
        *lines, self._rest = (self._rest + received).split(b"\n")
        events = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if not line:
                if self._data:
                    events.append(b"\n".join(self._data))
                    self._data = []
            elif line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
        return events
