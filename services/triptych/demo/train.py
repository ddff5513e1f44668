"""Trains the demo checkpoint, or with `--draft` a small tower that imitates the checkpoint's.

`python -m triptych.demo.train --out models/demo --seed 0` takes an hour and a quarter on two quiet cores;
`python -m triptych.demo.train --draft models/demo-draft --out models/demo --steps 900` about a quarter of one.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from transformers import LlavaForConditionalGeneration, PreTrainedTokenizerFast

from triptych.demo.checkpoint import new_model, processor, save
from triptych.demo.draft import distil
from triptych.demo.gaze import Gaze
from triptych.demo.optimising import adamw, set_rate
from triptych.demo.packing import IGNORED, Batch, Packer
from triptych.demo.sight import SightReader, TokenReader, give_structure, learn_to_see
from triptych.demo.tokens import train_tokenizer
from triptych.demo.vision import vision_features

PEAK_RATE: Final = 1.2e-3
CELL_LOSS_WEIGHT: Final = 0.3
TOKEN_LOSS_WEIGHT: Final = 0.3
GAZE_LOSS_WEIGHT: Final = 0.5
SAVE_EVERY: Final = 500


@dataclass(frozen=True, slots=True)
class Score:
    """Exact answers at one resolution.

    Attributes:
        overall: Share of dialogues whose every answer is exact.
        by_kind: The same share for each kind asked.
    """

    overall: float
    by_kind: dict[str, float]


class Batches(Dataset[Batch]):
    """Training batches by index, so that loader processes can make them in any order."""

    def __init__(self, packer: Packer, first: int, end: int) -> None:
        self._packer = packer
        self._first = first
        self._end = end

    def __len__(self) -> int:
        return self._end - self._first

    def __getitem__(self, index: int) -> Batch:
        return self._packer.training_batch(self._first + index)


def answer_logits(model: LlavaForConditionalGeneration, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Logits [answer tokens, vocabulary] and labels at the answers' positions, and the projected visual tokens."""
    inner = model.model
    visual = inner.multi_modal_projector(vision_features(inner.vision_tower, batch.pixels))
    embedding = inner.get_input_embeddings()
    at_image = (batch.ids == model.config.image_token_index)[:, :, None]
    embedded = embedding(batch.ids).masked_scatter(at_image, visual)
    mask = torch.zeros(batch.ids.shape[0], 1, batch.ids.shape[1], batch.ids.shape[1])
    mask.masked_fill_(~batch.visible(), torch.finfo(torch.float32).min)
    hidden = inner.language_model(
        inputs_embeds=embedded, attention_mask=mask, position_ids=batch.positions, use_cache=False
    ).last_hidden_state
    taught = batch.labels != IGNORED
    return F.linear(hidden[taught], embedding.weight), batch.labels[taught], visual


@torch.compiler.set_stance("force_eager")  # type: ignore[untyped-decorator]
@torch.no_grad()
def evaluate(model: LlavaForConditionalGeneration, tokenizer: PreTrainedTokenizerFast, size: int, count: int) -> Score:
    """Exact greedy answers over the first `count` held-out examples at `size` px, rounded up to a multiple of 50.

    An answer is greedy-exact when the most likely token is the right one at each of its positions, so one pass
    does; earlier turns are given with their right answers.
    """
    packer = Packer(tokenizer, 0, 50)
    asked: Counter[str] = Counter()
    exact: Counter[str] = Counter()
    for first in range(0, count, 50):
        batch, told = packer.held_out_batch(first, size)
        logits, labels, _ = answer_logits(model, batch)
        row = (batch.labels != IGNORED).nonzero()[:, 0]
        wrong = set(row[logits.argmax(-1) != labels].tolist())
        asked.update(dialogue.kind for dialogue in told)
        exact.update(dialogue.kind for index, dialogue in enumerate(told) if index not in wrong)
    by_kind = {kind: exact[kind] / total for kind, total in sorted(asked.items())}
    return Score(exact.total() / asked.total(), by_kind)


def compile_layers(model: LlavaForConditionalGeneration) -> None:
    """Fuses each layer's small operations: nearly twice as fast on a CPU, after a minute of compiling."""
    for layer in (*model.model.vision_tower.encoder.layers, *model.model.language_model.layers):
        layer.forward = torch.compile(layer.forward, dynamic=True)


def train(out: Path, seed: int, sight_steps: int, steps: int, rows: int, state: Path | None = None) -> None:
    """Trains from nothing and leaves the checkpoint in `out`, which holds a loadable one from the first seconds on.

    Where `state` names a file, training goes on from it if it exists, and it is renewed with every checkpoint.
    """
    tokenizer = train_tokenizer(seed)
    model = new_model(tokenizer, seed)
    give_structure(model.model.vision_tower)
    reader = SightReader()
    optimizer = adamw(PEAK_RATE, model, reader)
    token_reader = TokenReader()
    token_optimizer = adamw(PEAK_RATE, token_reader)
    parameters = [*model.parameters(), *reader.parameters(), *token_reader.parameters()]
    parts: dict[str, nn.Module | torch.optim.Optimizer] = {
        "model": model,
        "reader": reader,
        "optimizer": optimizer,
        "token_reader": token_reader,
        "token_optimizer": token_optimizer,
    }
    first = 0
    resumes = state is not None and state.exists()
    if state is not None and resumes:
        saved = torch.load(state)
        first = saved["step"]
        for name in parts.keys() & saved.keys():
            parts[name].load_state_dict(saved[name])
    save(out, model, processor(tokenizer))
    gaze = Gaze(model)
    compile_layers(model)
    if not resumes:
        learn_to_see(model, reader, seed, sight_steps)
        _keep(state, 0, parts)
    batches = Batches(Packer(tokenizer, seed, rows), first, steps)
    loader = DataLoader(batches, batch_size=None, num_workers=1, prefetch_factor=8)
    started = time.monotonic()
    for step, batch in enumerate(loader, start=first):
        set_rate(optimizer, PEAK_RATE, step, steps)
        set_rate(token_optimizer, PEAK_RATE, step, steps)
        logits, labels, visual = answer_logits(model, batch)
        answers = F.cross_entropy(logits, labels)
        cells = reader.cell_loss(visual, batch.cells)
        tokens = token_reader.loss(visual, batch.cells)
        looks = gaze.loss(batch)
        optimizer.zero_grad(set_to_none=True)
        token_optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(
            answers + CELL_LOSS_WEIGHT * cells + TOKEN_LOSS_WEIGHT * tokens + GAZE_LOSS_WEIGHT * looks
        )
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        token_optimizer.step()
        if step % 50 == 0:
            exact = (logits.argmax(-1) == labels).float().mean().item()
            seconds = (time.monotonic() - started) / (step + 1 - first)
            print(
                f"step {step}/{steps} px {batch.pixels.shape[1]} length {batch.ids.shape[1]} "
                f"answers {answers.item():.3f} cells {cells.item():.3f} places {tokens.item():.3f} "
                f"looks {looks.item():.3f} right {exact:.3f} {seconds:.3f} s/step",
                flush=True,
            )
        if (step + 1) % SAVE_EVERY == 0 or step + 1 == steps:
            save(out, model)
            _keep(state, step + 1, parts)
            print(f"step {step + 1}: {evaluate(model, tokenizer, 112, 200)}", flush=True)
    for size in (112, 84, 56):
        print(f"{size} px: {evaluate(model, tokenizer, size, 500)}", flush=True)


def _keep(state: Path | None, step: int, parts: dict[str, nn.Module | torch.optim.Optimizer]) -> None:
    if state is not None:
        torch.save({"step": step, **{name: part.state_dict() for name, part in parts.items()}}, state)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("models/demo"), help="folder of the checkpoint")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and data")
    parser.add_argument("--sight-steps", type=int, default=900, help="steps of the first stage, without language")
    parser.add_argument("--steps", type=int, default=10_000, help="steps of the main stage, or of the draft")
    parser.add_argument("--rows", type=int, default=16, help="pictures in a step, eight questions each")
    parser.add_argument("--state", type=Path, help="file to resume from and to keep the training state in")
    parser.add_argument("--draft", type=Path, help="folder of the draft tower to distil from the checkpoint in --out")
    given = parser.parse_args()
    if given.draft is not None:
        distil(given.out, given.draft, given.seed, given.steps)
        return
    train(given.out, given.seed, given.sight_steps, given.steps, given.rows, given.state)


if __name__ == "__main__":
    main()
