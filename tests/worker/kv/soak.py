"""Shows many distinct images to an engine with tiers and watches memory: python -m tests.worker.kv.soak --images 10000

Every third image is one of the latest hundred again. Prints one JSON object: resident bytes, Python's allocated blocks
and the tiers' bytes after each tenth; growth is the last over the second reading, for the first tenth fills the tiers.
"""

import argparse
import gc
import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil
import torch

from tests.worker.driving import ask, drain, load

DEMO = Path(__file__).resolve().parents[3] / "models" / "demo"
VISUAL_TOKENS = 64


def soak(folder: Path, images: int, readings: int = 10) -> dict[str, Any]:
    """Asks one question about each of `images` pictures. Host and disk hold a few hundred of them."""
    dice, process = random.Random(0), psutil.Process()
    resident: list[int] = []
    blocks: list[int] = []
    held: list[dict[str, int]] = []
    with tempfile.TemporaryDirectory() as scratch:
        model = load(folder, kv_blocks=64, kv_host_bytes=16 << 20, kv_disk_dir=scratch, kv_disk_bytes=32 << 20)
        engine, hierarchy = model.engine, model.engine.reuse.hierarchy
        assert hierarchy is not None
        asked = 0
        for number in range(images):
            shown = [number]
            if number % 3 == 2:
                shown.append(number - dice.randrange(1, min(number, 100) + 1))
            for name in shown:
                generator = torch.Generator().manual_seed(name)
                features = torch.randn(VISUAL_TOKENS, model.config.decoder.hidden_size, generator=generator)
                request = ask(model, (name, VISUAL_TOKENS, features), "where is it", max_tokens=2, ignore_eos=True)
                drain(engine, [engine.submit(request)[0]])
                asked += 1
            if number + 1 >= images * (len(resident) + 1) / readings:
                assert hierarchy.flush()
                engine.check_integrity()
                gc.collect()
                resident.append(process.memory_info().rss)
                blocks.append(sys.getallocatedblocks())
                held.append({name: use.text_bytes + use.visual_bytes for name, use in hierarchy.usages().items()})
        hit_rate = engine.reuse.meter.tokens["visual"].hit_rate
        engine.close()
    return {
        "images": images,
        "requests": asked,
        "visual_hit_rate": hit_rate,
        "resident_bytes": resident,
        "python_blocks": blocks,
        "tier_bytes": held,
        "resident_growth": resident[-1] / resident[1],
        "python_blocks_growth": blocks[-1] / blocks[1],
    }


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=DEMO, help="checkpoint folder")
    parser.add_argument("--images", type=int, default=10_000, help="distinct pictures")
    given = parser.parse_args()
    print(json.dumps(soak(given.model, given.images)))


if __name__ == "__main__":
    main()
