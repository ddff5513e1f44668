"""The C++ engine against a dense fp64 decoder: every head layout, type, instruction set and mix of rows."""

import ctypes
import random
import threading
import time
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.worker.cpu.dense import dense_logits, random_weights, rotary_tables, shape_of
from triptych.worker.cpu import library as native
from triptych.worker.cpu.decoder import CpuDecoder, WeightFormat
from triptych.worker.model.config import DecoderConfig
from triptych.worker.model.step import SequenceRows, StepResult
from triptych.worker.model.weights import DecoderWeights

BLOCK = 16
# Relative to the largest logit. fp32: rounding alone. bf16 products: 8 bits a factor.
FP32_ERROR, BF16_ERROR = 1e-5, 2.5e-2


def rounded(weights: DecoderWeights, weight_format: str) -> DecoderWeights:
    """The values that packed weights stand for."""

    def as_stored(matrix: Tensor) -> Tensor:
        if weight_format == "bf16":
            return matrix.bfloat16().float()
        if weight_format == "int8":
            scale = matrix.abs().amax(1, keepdim=True) / 127
            return (matrix / scale).round() * scale
        return matrix

    return replace(
        weights,
        layers=tuple(
            replace(layer, **{n: as_stored(getattr(layer, n)) for n in ("qkv", "attention_output", "gate_up", "down")})
            for layer in weights.layers
        ),
        head=as_stored(weights.head),
    )


class World:
    """A decoder, its cache and a few sequences in shuffled blocks, beside their dense logits."""

    def __init__(
        self,
        shape: DecoderConfig,
        lengths: list[int],
        *,
        weight_format: WeightFormat = "fp32",
        cache_type: torch.dtype = torch.float32,
        threads: int = 2,
        bias: bool = False,
        isa: str | None = None,
        library: ctypes.CDLL | None = None,
        seed: int = 0,
    ) -> None:
        self.shape, self.lengths = shape, lengths
        weights = random_weights(shape, seed, bias=bias)
        rotary = rotary_tables(shape, max(lengths) + 1)
        blocks = [-(-length // BLOCK) for length in lengths]
        ids = list(range(sum(blocks) + 3))
        random.Random(seed).shuffle(ids)
        self.tables = [[ids.pop() for _ in range(count)] for count in blocks]
        # What was never written must not be looked at: NaN would spread.
        size = (sum(blocks) + 3, BLOCK, shape.kv_heads, shape.head_dim)
        keys = [torch.full(size, torch.nan, dtype=cache_type) for _ in range(shape.layers)]
        values = [torch.full(size, torch.nan, dtype=cache_type) for _ in range(shape.layers)]
        self.decoder = CpuDecoder(
            shape, weights, rotary, keys, values, weight_format, threads, isa=isa, library=library
        )
        generator = torch.Generator().manual_seed(seed + 1)
        self.embedded = [torch.randn(length, shape.hidden_size, generator=generator) for length in lengths]
        self.expected = [
            dense_logits(shape, rounded(weights, weight_format), rotary, rows, torch.arange(len(rows)))
            for rows in self.embedded
        ]

    def step(self, work: list[tuple[int, int, int, int]]) -> StepResult:
        """Runs rows [start, end) of sequences, given as (sequence, start, end, logits)."""
        return self.decoder.start(
            torch.cat([self.embedded[s][start:end] for s, start, end, _ in work]),
            [SequenceRows(end - start, end, wanted, self.tables[s]) for s, start, end, wanted in work],
            greedy=True,
        )()

    def check(self, work: list[tuple[int, int, int, int]], tolerance: float) -> None:
        """Runs a step and compares its logits with the dense ones."""
        result = self.step(work)
        expected = torch.cat([self.expected[s][end - wanted : end] for s, _, end, wanted in work])
        assert result.logits is not None and result.greedy is not None
        assert result.finite.all()
        error = (result.logits - expected).abs().max() / expected.abs().max()
        assert error < tolerance
        assert torch.equal(result.greedy.long(), result.logits.argmax(-1))


def logits_of(world: World, work: list[tuple[int, int, int, int]]) -> Tensor:
    logits = world.step(work).logits
    assert logits is not None
    return logits


def whole_life(world: World, tolerance: float) -> None:
    """Prefill in chunks over block edges, with decodes of other sequences beside it, then decodes."""
    lengths = world.lengths
    world.check([(0, 0, lengths[0] - 2, 1)], tolerance)
    chunk = max(1, lengths[1] // 3)
    world.check([(0, lengths[0] - 2, lengths[0] - 1, 1), (1, 0, chunk, 0)], tolerance)
    world.check(
        [(0, lengths[0] - 1, lengths[0], 1), (1, chunk, lengths[1] - 1, min(3, lengths[1] - 1 - chunk))], tolerance
    )
    world.check([(1, lengths[1] - 1, lengths[1], 1), (2, 0, lengths[2], lengths[2])], tolerance)


@pytest.mark.parametrize("head_dim", [16, 32, 48, 64, 80, 96, 112, 128, 256])
@pytest.mark.parametrize("group", [1, 3, 7, 8])
def test_fp32_agrees_with_dense_fp64_for_every_head_layout(head_dim: int, group: int) -> None:
    shape = shape_of(hidden_size=72, intermediate_size=100, heads=2 * group, kv_heads=2, head_dim=head_dim)
    whole_life(World(shape, [35, 97, 17], bias=True), FP32_ERROR)


@pytest.mark.parametrize("isa", ["avx2", "avx512"])
@pytest.mark.parametrize(
    ("weight_format", "cache_type"), [("fp32", torch.float32), ("bf16", torch.bfloat16), ("int8", torch.float16)]
)
def test_each_instruction_set_and_type(isa: str, weight_format: WeightFormat, cache_type: torch.dtype) -> None:
    tolerance = {torch.float32: FP32_ERROR, torch.bfloat16: BF16_ERROR, torch.float16: 3e-3}[cache_type]
    if not native.supports(isa):
        pytest.skip(f"this processor has no {isa}")
    whole_life(World(shape_of(), [50, 130, 33], weight_format=weight_format, cache_type=cache_type, isa=isa), tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("isa", ["avx512_bf16", "amx"])
@pytest.mark.parametrize("weight_format", ["bf16", "int8"])
@pytest.mark.parametrize("cache_type", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [16, 48, 64, 128])
def test_bf16_products_in_emulation(
    emulating_library: ctypes.CDLL, isa: str, weight_format: WeightFormat, cache_type: torch.dtype, head_dim: int
) -> None:
    shape = shape_of(hidden_size=72, intermediate_size=112, heads=6, head_dim=head_dim)
    whole_life(
        World(
            shape, [50, 130, 33], weight_format=weight_format, cache_type=cache_type, isa=isa, library=emulating_library
        ),
        BF16_ERROR,
    )


@pytest.mark.parametrize("weight_format", ["bf16", "int8"])
def test_packed_weights_with_float_activations_are_exact(weight_format: WeightFormat) -> None:
    isa = "avx512" if native.supports("avx512") else "avx2"
    whole_life(World(shape_of(), [50, 130, 33], weight_format=weight_format, isa=isa), FP32_ERROR)


@pytest.mark.slow
def test_kernels_for_other_architectures_in_portable_code(emulating_library: ctypes.CDLL) -> None:
    whole_life(World(shape_of(), [50, 130, 33], isa="baseline", library=emulating_library), FP32_ERROR)


@pytest.mark.parametrize("seed", range(40))
def test_random_mixes_of_decodes_and_chunks(seed: int) -> None:
    draw = random.Random(seed)
    kv_heads = draw.choice([1, 2, 3])
    shape = shape_of(
        layers=draw.choice([1, 2, 3]),
        hidden_size=draw.choice([16, 40, 64, 200]),
        intermediate_size=draw.choice([24, 96, 130]),
        heads=kv_heads * draw.randint(1, 8),
        kv_heads=kv_heads,
        head_dim=draw.choice([16, 32, 64, 80, 128]),
        vocabulary=draw.randint(5, 200),
    )
    lengths = [draw.choice([1, 15, 16, 17, 31, 64, 65, 128, 129, 300]) for _ in range(draw.randint(1, 6))]
    world = World(shape, lengths, threads=draw.randint(1, 4), bias=draw.random() < 0.3, seed=seed)
    done = [0] * len(lengths)
    while any(d < n for d, n in zip(done, lengths, strict=True)):
        work = []
        for s in range(len(lengths)):
            if done[s] < lengths[s] and draw.random() < 0.8:
                end = min(lengths[s], done[s] + draw.choice([1, 1, 2, 5, 33, 150, 300]))
                work.append((s, done[s], end, draw.randint(0, end - done[s])))
                done[s] = end
        if work and sum(wanted for *_, wanted in work):
            world.check(work, FP32_ERROR)
        elif work:
            world.step(work)


def test_long_contexts_are_joined_from_parts() -> None:
    world = World(shape_of(layers=1), [1500])
    world.check([(0, 0, 1499, 1)], FP32_ERROR)
    world.check([(0, 1499, 1500, 1)], FP32_ERROR)


def test_a_row_does_not_depend_on_its_batch() -> None:
    alone, together = (World(shape_of(hidden_size=96), [40] * 30, weight_format="bf16") for _ in range(2))
    for world in (alone, together):
        for s in range(30):
            world.step([(s, 0, 39, 0)])
    logits = logits_of(together, [(s, 39, 40, 1) for s in range(30)])
    single = torch.cat([logits_of(alone, [(s, 39, 40, 1)]) for s in range(30)])
    assert torch.equal(logits, single)


def test_positions_may_differ_from_places() -> None:
    shape = shape_of()
    world = World(shape, [40])
    weights, rotary = random_weights(shape, 0, bias=False), rotary_tables(shape, 41)
    positions = torch.cat((torch.arange(20), torch.arange(10, 30)))
    expected = dense_logits(shape, weights, rotary, world.embedded[0], positions)
    result = world.decoder.start(world.embedded[0], [SequenceRows(40, 40, 40, world.tables[0])], positions=positions)()
    assert result.logits is not None
    assert (result.logits - expected).abs().max() / expected.abs().max() < FP32_ERROR


@pytest.mark.parametrize("weight_format", ["fp32", "bf16"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, torch.tensor(-1, dtype=torch.int32).view(torch.float32).item()])
def test_what_is_not_finite_is_told_of_its_own_sequence_only(weight_format: WeightFormat, bad: float) -> None:
    world = World(shape_of(), [40, 40, 1], weight_format=weight_format)
    world.embedded[1][7, 3] = bad
    result = world.step([(0, 0, 40, 1), (1, 0, 40, 0), (2, 0, 1, 1)])
    assert result.finite.tolist() == [True, False, True]
    assert result.logits is not None
    assert result.logits.isfinite().all()


def test_input_that_does_not_fit_is_refused() -> None:
    world = World(shape_of(), [40])
    rows = world.embedded[0]
    for sequence in (
        SequenceRows(41, 40, 1, world.tables[0]),
        SequenceRows(40, 40, 41, world.tables[0]),
        SequenceRows(40, 40, 1, world.tables[0][:1]),
        SequenceRows(40, 40, 1, [10**6] * 3),
        SequenceRows(39, 39, 1, world.tables[0]),
        SequenceRows(0, 40, 0, world.tables[0]),
    ):
        with pytest.raises(ValueError):
            world.decoder.start(rows, [sequence])
    with pytest.raises(ValueError):
        world.decoder.start(rows[:, :-1], [SequenceRows(40, 40, 1, world.tables[0])])


@pytest.mark.parametrize("weight_format", ["fp32", "bf16", "int8"])
def test_threads_that_are_held_up_change_nothing(weight_format: WeightFormat) -> None:
    """With more threads than cores some are always held up; others do what these have in hand, at times both."""
    shape = shape_of(layers=3, hidden_size=192, intermediate_size=320)
    lengths = [90, 40, 300, 17, 64, 129]
    alone, crowd = (World(shape, lengths, weight_format=weight_format, threads=threads) for threads in (1, 9))
    prefill = [(s, 0, length - 1, 0) for s, length in enumerate(lengths)]
    decode = [(s, length - 1, length, 1) for s, length in enumerate(lengths)]
    for world in (alone, crowd):
        world.step(prefill)
    expected = logits_of(alone, decode)
    for _ in range(300):
        assert torch.equal(logits_of(crowd, decode), expected)
        assert torch.equal(logits_of(crowd, decode[2:3]), expected[2:3])


def test_idle_threads_sleep() -> None:
    world = World(shape_of(), [40], threads=4)
    world.check([(0, 0, 40, 1)], FP32_ERROR)
    time.sleep(0.05)
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.05


def test_the_interpreter_runs_while_a_step_does() -> None:
    shape = shape_of(layers=4, hidden_size=512, intermediate_size=1024)
    world = World(shape, [300], threads=1)
    worker = threading.Thread(target=lambda: [world.step([(0, 0, 300, 1)]) for _ in range(20)])
    worker.start()
    counted = 0
    while worker.is_alive():
        counted += 1
        time.sleep(0.0005)
    worker.join()
    assert counted > 10
