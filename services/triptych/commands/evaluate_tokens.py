"""`triptych evaluate --reduce`: what fewer visual tokens cost and bring, through a running stack."""

import time
from statistics import median

import numpy as np

from triptych.bench.markdown import table_lines
from triptych.commands.ways import Measured
from triptych.vision.reduction import reduce_tokens
from triptych.vision.reduction_spec import DEFAULT_TOKENS, Method, Reduction

LARGE_TOKENS, LARGE_HIDDEN = 576, 4096
"""The shape of an image's features in LLaVA 1.5 7B."""

HEADINGS = ("reduction", "visual tokens", "exact answers", "encode ms", "reduce ms", "prefill ms", "first token ms")


def reduction_lines(count: int, measured: dict[str, Measured]) -> list[str]:
    """Returns a table and verdicts, in Markdown; `measured` begins with `none`, the others are reductions."""
    rows = [
        [
            name,
            str(each.visual_tokens),
            each.exact,
            *(f"{each.median_ms(stage):.1f}" for stage in ("encode", "reduce", "prefill", "time_to_first_token")),
        ]
        for name, each in measured.items()
    ]
    costs = (
        f"- {method} from {LARGE_TOKENS} tokens of {LARGE_HIDDEN:,} to {DEFAULT_TOKENS} takes "
        f"{_cost_at_large_shape_ms(method):.0f} ms here."
        for method in ("kmeans", "merge")
    )
    return [
        f"{count} held-out scenes, one question at a time; times are medians over the first question of each dialogue:",
        "",
        table_lines(HEADINGS, rows),
        "",
        *(f"- {line}" for line in _verdicts(measured)),
        *costs,
    ]


def _verdicts(measured: dict[str, Measured]) -> list[str]:
    """Returns, for each reduction, whether it saves more time than it costs."""
    prefill_ms = measured["none"].median_ms("prefill")
    lines = []
    for name, each in measured.items():
        if name != "none":
            cost_ms, saved_ms = each.median_ms("reduce"), prefill_ms - each.median_ms("prefill")
            verdict = "costs more time than it saves" if cost_ms >= saved_ms else "saves more time than it costs"
            lines.append(f"{name} {verdict}: {cost_ms:.1f} ms against {saved_ms:.1f} ms of prefill.")
    return lines


def _cost_at_large_shape_ms(method: Method) -> float:
    features = np.random.default_rng(0).standard_normal((1, LARGE_TOKENS, LARGE_HIDDEN)).astype(np.float32)
    seconds = []
    for _ in range(9):
        started_s = time.perf_counter()
        reduce_tokens(features, Reduction(method, DEFAULT_TOKENS))
        seconds.append(time.perf_counter() - started_s)
    return 1e3 * median(seconds)
