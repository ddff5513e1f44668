"""Training batches say what the next token is, and where in the picture to look for it."""

from __future__ import annotations

import pytest
import torch

from triptych.demo.checkpoint import new_model
from triptych.demo.dialogues import PLACES
from triptych.demo.gaze import LAYER, Gaze
from triptych.demo.packing import IGNORED, Batch, Packer
from triptych.demo.sight import cells_of_patches
from triptych.demo.tokens import train_tokenizer
from triptych.demo.train import answer_logits

pytestmark = pytest.mark.slow

ROWS = 4
TOKENIZER = train_tokenizer(0)


@pytest.fixture(scope="module")
def batch() -> Batch:
    return Packer(TOKENIZER, 0, ROWS).training_batch(0)


def test_a_label_is_the_next_token_of_the_same_branch(batch: Batch) -> None:
    for row, position in (batch.labels != IGNORED).nonzero().tolist():
        assert batch.labels[row, position] == batch.ids[row, position + 1]
        assert batch.branches[row, position] == batch.branches[row, position + 1]


def test_branches_see_the_picture_but_not_each_other(batch: Batch) -> None:
    visible = batch.visible()[:, 0]
    for row in range(ROWS):
        later = int((batch.branches[row] == 2).nonzero()[0])
        seen = set(batch.branches[row][visible[row, later]].tolist())
        assert seen == {0, 2}


def test_the_cell_sought_is_the_one_that_the_answer_names(batch: Batch) -> None:
    starts = (batch.sought[:, 1:] != IGNORED) & (batch.sought[:, :-1] == IGNORED)
    found = 0
    for row, before in starts.nonzero().tolist():
        answer = []
        position = before + 1
        while batch.labels[row, position] != TOKENIZER.eos_token_id:
            answer.append(int(batch.labels[row, position]))
            position += 1
        assert TOKENIZER.decode(answer) == PLACES[batch.sought[row, before + 1]]
        found += 1
    assert found >= 4


@pytest.mark.parametrize(("patches", "corner_cells"), [(64, 9), (36, 4), (16, 1)])
def test_a_patch_belongs_to_the_cell_around_its_centre(patches: int, corner_cells: int) -> None:
    cells = cells_of_patches(patches)
    assert int((cells == 0).sum()) == int((cells == 8).sum()) == corner_cells
    assert sorted(set(cells.tolist())) == list(range(9))


def test_learning_where_to_look_brings_attention_to_the_shape(batch: Batch) -> None:
    """One step along its gradient brings the head's attention closer, and changes nothing behind its layer."""
    model = new_model(TOKENIZER, 0)
    gaze = Gaze(model)
    losses = []
    for _ in range(2):
        answer_logits(model, batch)
        loss = gaze.loss(batch)
        losses.append(loss.item())
        model.zero_grad()
        torch.autograd.backward(loss)
        later = model.model.language_model.layers[LAYER + 1]
        assert all(parameter.grad is None for parameter in later.parameters())
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= 0.05 * parameter.grad
    assert 0 < losses[1] < losses[0]
