"""`triptych bench cache` on the demo model: every tier is really used, and the answers are the same."""

import json

import pytest
from typer.testing import CliRunner

from triptych.bench.cache.capacity import VISUAL_TOKENS, measure_capacity
from triptych.cli import app
from triptych.config import bundled


@pytest.mark.slow
def test_dialogues_beyond_the_device_are_found_again_in_the_tiers() -> None:
    found = measure_capacity(bundled("models/demo"), dialogues=9, on_device=2, turns=3)
    assert found.hit_rate > 0.95
    assert found.bytes_by_tier["host"] > 0
    assert found.bytes_by_tier["disk"] > 9 * VISUAL_TOKENS * 1000
    assert found.tiered_s > 0 < found.recompute_s


@pytest.mark.integration
def test_the_command_measures_every_tier_through_the_whole_stack() -> None:
    arguments = ["bench", "cache", "--model", str(bundled("models/demo"))]
    arguments += ["--repository", str(bundled("model_repository")), "--pictures", "2", "--dialogues", "4", "--json"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    keys = json.loads(result.stdout.splitlines()[-1])
    assert {"device_ratio", "host_ratio", "disk_ratio", "hit_rate"} <= keys.keys()
    assert keys["device_ratio"] > 1
    assert keys["hit_rate"] > 0.95
    assert keys["cached_tokens"]["cold"] == 0
    for place in ("device", "host", "disk"):
        assert keys["cached_tokens"][place] >= 64
