import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triptych.config import RouterSettings
from triptych.errors import InvalidRequest
from triptych.v1 import inference_pb2
from triptych.vision.reduction import Floats, reduce_tokens
from triptych.vision.reduction_spec import MAX_TOKENS, Method, Reduction, from_message, parse_reduction, to_message

METHODS: tuple[Method, ...] = ("kmeans", "merge")
methods = st.sampled_from(METHODS)


@st.composite
def images(draw: st.DrawFn) -> Floats:
    """Features of some images: any scale, any number of repeated tokens."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    tokens, hidden = draw(st.integers(1, 40)), draw(st.integers(1, 12))
    kinds = rng.standard_normal((draw(st.integers(1, 3)), draw(st.integers(1, tokens)), hidden))
    chosen = rng.integers(0, kinds.shape[1], (len(kinds), tokens))
    scale = 10.0 ** draw(st.integers(-30, 30))
    features = np.take_along_axis(kinds, chosen[:, :, None], axis=1) * scale + draw(st.integers(-2, 2)) * scale
    return features.astype(np.float32)


@given(images(), methods, st.integers(1, 50))
@settings(max_examples=200, deadline=None)
def test_every_image_keeps_exactly_the_tokens_asked_for_or_all_it_has(
    features: Floats, method: Method, tokens: int
) -> None:
    reduced = reduce_tokens(features, Reduction(method, tokens))
    assert reduced.shape == (len(features), min(tokens, features.shape[1]), features.shape[2])
    assert reduced.dtype == np.float32
    assert np.isfinite(reduced).all()
    if tokens >= features.shape[1]:
        assert reduced is features


@given(images(), methods, st.integers(1, 39))
@settings(max_examples=200, deadline=None)
def test_tokens_that_are_left_are_means_of_disjoint_groups_in_the_order_of_their_mean_positions(
    features: Floats, method: Method, tokens: int
) -> None:
    # A channel of its own for each position shows who went where; small enough not to decide it.
    count = features.shape[1]
    largest = float(np.abs(features).max()) or 1.0
    marks = np.broadcast_to(np.eye(count, dtype=np.float32) * np.float32(largest * 1e-3), (len(features), count, count))
    reduced = reduce_tokens(np.concatenate([features, marks], axis=2), Reduction(method, tokens))
    shares = reduced[:, :, features.shape[2] :].astype(np.float64) / (largest * 1e-3)
    members = shares > 1e-6
    np.testing.assert_array_equal(members.sum(axis=1), 1)  # Each token of the image is in exactly one group.
    np.testing.assert_allclose(shares, members / members.sum(axis=2, keepdims=True), rtol=1e-3, atol=1e-6)
    positions = (members @ np.arange(count)) / members.sum(axis=2)
    assert (np.diff(positions, axis=1) >= 0).all()
    means = (members / members.sum(axis=2, keepdims=True)) @ features.astype(np.float64)
    np.testing.assert_allclose(reduced[:, :, : features.shape[2]], means, rtol=1e-4, atol=largest * 1e-5)


@given(images(), methods, st.integers(1, 39))
@settings(max_examples=50, deadline=None)
def test_the_same_image_gives_the_same_tokens_whatever_is_beside_it(
    features: Floats, method: Method, tokens: int
) -> None:
    reduction = Reduction(method, tokens)
    together = reduce_tokens(features, reduction)
    np.testing.assert_array_equal(together, reduce_tokens(features.copy(), reduction))
    for index in range(len(features)):
        alone = reduce_tokens(features[index : index + 1], reduction)
        np.testing.assert_allclose(alone[0], together[index], rtol=1e-4, atol=1e-4 * np.abs(features).max())


@given(methods, st.integers(2, 30), st.floats(-1e3, 1e3, width=32, allow_subnormal=False), st.data())
@settings(max_examples=50, deadline=None)
def test_constant_features_stay_what_they_are(method: Method, tokens: int, value: float, data: st.DataObject) -> None:
    features = np.full((2, tokens, 5), value, np.float32)
    kept = data.draw(st.integers(1, tokens))
    np.testing.assert_allclose(reduce_tokens(features, Reduction(method, kept)), features[:, :kept], rtol=1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_groups_that_are_plain_to_see_are_found(method: Method) -> None:
    rng = np.random.default_rng(3)
    centres = 10 * rng.standard_normal((4, 32))
    groups = np.repeat(np.arange(4), 9)
    features = (centres[groups] + 0.01 * rng.standard_normal((36, 32))).astype(np.float32)
    np.testing.assert_allclose(reduce_tokens(features[None], Reduction(method, 4))[0], centres, atol=0.05)


@pytest.mark.parametrize("text", ["none", "kmeans:1", "merge:9999", "kmeans:128"])
def test_what_is_written_survives_the_way_through_a_message(text: str) -> None:
    reduction = parse_reduction(text)
    assert from_message(to_message(reduction), Reduction("merge", 7)) == reduction
    assert str(reduction or "none") == text


def test_without_a_number_128_tokens_are_kept() -> None:
    assert parse_reduction("kmeans") == Reduction("kmeans", 128) == parse_reduction("kmeans:128")
    message = inference_pb2.TokenReduction(method=inference_pb2.REDUCTION_METHOD_MERGE)
    assert from_message(message, None) == Reduction("merge", 128)


@pytest.mark.parametrize(
    "text", ["", "kmeans:0", "kmeans:", "merge:-3", "none:3", "pool:3", "kmeans:10000", "merge:03"]
)
def test_what_cannot_be_meant_is_refused_and_the_rule_is_told(text: str) -> None:
    with pytest.raises(
        InvalidRequest, match="none, kmeans, merge, kmeans:N or merge:N with N from 1 to 9999"
    ) as caught:
        parse_reduction(text)
    assert caught.value.reason == "REDUCTION_INVALID"


def test_messages_out_of_range_are_refused() -> None:
    kmeans = inference_pb2.REDUCTION_METHOD_KMEANS
    for message in (
        inference_pb2.TokenReduction(method=kmeans, tokens=MAX_TOKENS + 1),
        inference_pb2.TokenReduction(method=kmeans, tokens=-1),
        inference_pb2.TokenReduction(method=9, tokens=5),  # type: ignore[arg-type]
        inference_pb2.TokenReduction(tokens=5),
        inference_pb2.TokenReduction(method=inference_pb2.REDUCTION_METHOD_NONE, tokens=5),
    ):
        with pytest.raises(InvalidRequest) as caught:
            from_message(message, None)
        assert caught.value.reason == "REDUCTION_INVALID"


def test_the_routers_default_counts_where_a_request_says_nothing() -> None:
    default = parse_reduction(RouterSettings(token_reduction="merge:9").token_reduction)
    assert from_message(inference_pb2.TokenReduction(), default) == Reduction("merge", 9)
    assert from_message(to_message(None), default) is None
