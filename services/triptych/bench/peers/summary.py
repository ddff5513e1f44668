"""From samples to figures: medians over rounds, ratios within rounds, bars. Pure."""

from collections.abc import Sequence
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from triptych.bench.peers.results import Entry, Results
from triptych.bench.peers.trials import Trial
from triptych.bench.statistics import Spread, spread


class Row(BaseModel):
    """One engine in one trial; None where it has no figure."""

    model_config = ConfigDict(frozen=True)

    trial: str
    entry: str
    rounds: Annotated[int, Field(description="rounds with a figure")]
    failed: Annotated[int, Field(description="rounds in which a request failed")]
    value: Spread | None
    share_of_limit: Annotated[Spread | None, Field(description="figure / limit of the same round")]


class Verdict(BaseModel):
    """What a trial says about a bar: ours in one type against the best peer."""

    model_config = ConfigDict(frozen=True)

    trial: str
    ours: Annotated[str, Field(description="our entry")]
    peer: Annotated[str, Field(description="the peer with the best median")]
    value: Annotated[Spread, Field(description="our figure")]
    wanted_value: float | None
    ratio: Annotated[Spread, Field(description="how many times as good ours is, in the same rounds")]
    wanted_ratio: float
    share_of_limit: Spread | None
    wanted_share: float | None

    @property
    def met(self) -> bool:
        """Whether the medians reach the bar."""
        reached = self.share_of_limit is not None and self.share_of_limit.median >= (self.wanted_share or 0)
        return (
            self.ratio.median >= self.wanted_ratio
            and (self.wanted_share is None or reached)
            and self.value.median >= (self.wanted_value or 0)
        )


def summarise(results: Results, trials: Sequence[Trial]) -> list[Row]:
    """Returns a row per trial and entry, in the order of both."""
    rows = []
    for trial in trials:
        for entry in results.entries:
            samples = [one for one in results.samples if (one.trial, one.entry) == (trial.name, entry.name)]
            if not samples:
                continue
            values = [one.value for one in samples if one.value is not None]
            shares = [trial.ratio(one.value, one.limit) for one in samples if one.value is not None and one.limit]
            rows.append(
                Row(
                    trial=trial.name,
                    entry=entry.name,
                    rounds=len(values),
                    failed=len(samples) - len(values),
                    value=spread(values),
                    share_of_limit=spread(shares),
                )
            )
    return rows


def judge(results: Results, trials: Sequence[Trial], *, same_type: bool) -> list[Verdict]:
    """Returns a verdict per trial and type of ours, against the peers of that type; or, without `same_type`, one per
    trial: ours in its best type against the best peer in its own.
    """
    rows = {(row.trial, row.entry): row for row in summarise(results, trials)}
    verdicts = []
    for trial in trials:

        def best(entries: Sequence[Entry], trial: Trial = trial) -> Entry | None:
            known = [
                (found.value.median, entry)
                for entry in entries
                if (found := rows.get((trial.name, entry.name))) and found.value
            ]
            choose = max if trial.better == "higher" else min
            return choose(known, key=lambda pair: pair[0])[1] if known else None

        ours = [entry for entry in results.entries if entry.ours]
        peers = [entry for entry in results.entries if not entry.ours]
        if same_type:
            pairs = [(one, best([peer for peer in peers if peer.dtype == one.dtype])) for one in ours]
        else:
            pairs = [(one, best(peers)) for one in [best(ours)] if one]
        for one, peer in pairs:
            if peer is None or (ratio := _ratio(results, trial, one.name, peer.name)) is None:
                continue
            row = rows[trial.name, one.name]
            assert row.value is not None  # It is in the ratio.
            verdicts.append(
                Verdict(
                    trial=trial.name,
                    ours=one.name,
                    peer=peer.name,
                    value=row.value,
                    wanted_value=trial.bar.least,
                    ratio=ratio,
                    wanted_ratio=trial.bar.ratio,
                    share_of_limit=row.share_of_limit,
                    wanted_share=trial.bar.share,
                )
            )
    return verdicts


def _ratio(results: Results, trial: Trial, ours: str, peer: str) -> Spread | None:
    values = {
        (one.round, one.entry): one.value
        for one in results.samples
        if one.trial == trial.name and one.value is not None
    }
    # A peer whose goodput is 0 has no ratio to it.
    rounds = [number for number, entry in values if entry == ours and values.get((number, peer))]
    return spread([trial.ratio(values[number, ours], values[number, peer]) for number in rounds])
