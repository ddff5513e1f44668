"""What a comparison found, as one JSON document that further rounds are added to."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from triptych.bench.peers.contestant import OURS
from triptych.bench.report import Figures
from triptych.errors import InvalidRequest


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, protected_namespaces=())


class Entry(_Part):
    """An engine in one type."""

    name: str
    engine: str
    title: str
    access: Annotated[str, Field(description="how the client reaches it")]
    dtype: str

    @property
    def ours(self) -> bool:
        """Whether it is our stack."""
        return self.engine == OURS


class Sample(_Part):
    """One round of one trial against one engine."""

    round: int
    trial: str
    entry: Annotated[str, Field(description="the Entry's name")]
    value: Annotated[float | None, Field(description="the trial's figure; None when a request failed")]
    limit: Annotated[float | None, Field(description="of that moment, for this type")]
    figures: Figures


class Results(_Part):
    """The document."""

    kind: Literal["triptych.bench.peers"] = "triptych.bench.peers"
    version: Annotated[str, Field(description="of the client and of our stack")]
    machine: dict[str, str | int]
    model: str
    entries: list[Entry]
    samples: list[Sample]

    def joined(self, other: "Results") -> "Results":
        """Returns both together, rounds of `other` counted on. Raises InvalidRequest for another model or machine."""
        if (self.model, self.machine) != (other.model, other.machine):
            raise InvalidRequest(f"rounds of {other.model} on this machine cannot be added to those of {self.model}")
        known = {entry.name for entry in self.entries}
        begin = 1 + max((sample.round for sample in self.samples), default=-1)
        return self.model_copy(
            update={
                "version": other.version,
                "entries": [*self.entries, *(entry for entry in other.entries if entry.name not in known)],
                "samples": [
                    *self.samples,
                    *(sample.model_copy(update={"round": sample.round + begin}) for sample in other.samples),
                ],
            }
        )


def read_results(file: Path) -> Results:
    """Returns a document that was written. Raises InvalidRequest when the file is none."""
    try:
        return Results.model_validate_json(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"{file} holds no results of `triptych bench peers`: {type(error).__name__}") from None
