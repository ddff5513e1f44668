"""What the router does around the encoder: bypasses, counters, and an encoder that is replaced under a request."""

from dataclasses import replace

from tests.router.conftest import Rig
from tests.router.fakes import SPEC, ask, png
from triptych.router.metrics import RouterMetrics
from triptych.v1 import inference_pb2

RED, BLUE = png((255, 0, 0)), png((0, 0, 255))


def lookups(metrics: RouterMetrics) -> dict[tuple[str, str], int]:
    samples = [sample for metric in metrics.lookups.collect() for sample in metric.samples]
    return {
        (sample.labels["lookup"], sample.labels["outcome"]): int(sample.value)
        for sample in samples
        if sample.name.endswith("_total")
    }


async def test_text_alone_never_touches_the_vision_path(rig: Rig) -> None:
    rig.encoder.spec, rig.encoder.ready = None, False
    assert (await rig.answer(ask("how are you?"))).text == "abc"
    assert rig.encoder.calls == 0
    assert not lookups(rig.router.metrics)


async def test_each_look_up_is_counted_and_a_hit_never_reaches_the_encoder(rig: Rig) -> None:
    first = await rig.answer(ask(RED, "?"))
    await rig.answer(ask(RED, "another?"))
    rig.worker.kv.add(bytes.fromhex(first.started.images[0].identity))
    await rig.answer(ask(RED, BLUE, "?"))
    assert rig.encoder.calls == 2
    assert lookups(rig.router.metrics) == {
        ("kv", "hit"): 1,
        ("kv", "miss"): 3,
        ("embedding", "hit"): 1,
        ("embedding", "miss"): 2,
        ("encoder", "hit"): 2,
    }


async def test_an_encoder_replaced_between_name_and_features_is_asked_anew(rig: Rig) -> None:
    replaced = replace(SPEC, version="2", fingerprint="beef")

    async def replace_it() -> None:
        rig.encoder.spec = replaced

    rig.worker.probe = replace_it
    answer = await rig.answer(ask(RED, "?"))
    assert rig.encoder.calls == 2
    (image,) = answer.started.images
    assert image.source == inference_pb2.FEATURE_SOURCE_ENCODER
    again = await rig.answer(ask(RED, "?"))
    assert again.started.images[0].identity == image.identity
    assert again.started.images[0].source == inference_pb2.FEATURE_SOURCE_ENCODER_CACHE
