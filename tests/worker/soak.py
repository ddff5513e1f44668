"""Decodes many tokens and watches memory: python -m tests.worker.soak --tokens 1000000

Prints one JSON object: resident bytes and Python's allocated blocks after each tenth, with the same number of requests
running each time. Growth is the last over the second reading; the first tenth warms up.
"""

import argparse
import gc
import json
import random
import sys
from pathlib import Path
from typing import Any

import psutil

from tests.worker.driving import ask, load
from triptych.worker.engine.events import Completed
from triptych.worker.engine.request import SamplingOptions

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo"
RUNNING = 64


def soak(folder: Path, tokens: int, readings: int = 10) -> dict[str, Any]:
    """Keeps `RUNNING` requests of random lengths going until about `tokens` were decoded."""
    model = load(folder, kv_blocks=2048, speculative_tokens=3)
    engine, process, dice = model.engine, psutil.Process(), random.Random(0)
    words = ["what", "where", "is", "the", "red", "circle", "star", "shape", "how", "many"]
    resident: list[int] = []
    blocks: list[int] = []
    decoded = 0
    while len(resident) < readings:
        while engine.load().running + engine.load().waiting < RUNNING:
            sampling = SamplingOptions(temperature=dice.choice((0.0, 0.8)), seed=dice.randrange(100))
            question = " ".join(dice.choices(words, k=dice.randint(1, 40)))
            length = dice.randint(8, 200)
            engine.submit(ask(model, question, max_tokens=length, ignore_eos=True, sampling=sampling))
        for _, event in engine.step():
            if isinstance(event, Completed):
                decoded += event.usage.output_tokens
        if decoded >= tokens * (len(resident) + 1) / readings:
            gc.collect()
            resident.append(process.memory_info().rss)
            blocks.append(sys.getallocatedblocks())
    engine.check_integrity()
    return {
        "tokens": decoded,
        "resident_bytes": resident,
        "python_blocks": blocks,
        "resident_growth": resident[-1] / resident[1],
        "python_blocks_growth": blocks[-1] / blocks[1],
    }


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=DEMO, help="checkpoint folder")
    parser.add_argument("--tokens", type=int, default=1_000_000, help="tokens to decode")
    given = parser.parse_args()
    print(json.dumps(soak(given.model, given.tokens)))


if __name__ == "__main__":
    main()
