"""Fewer visual tokens: each token that is left is the mean of those it stands for.

A method only decides which tokens of an image belong together; `reduce_tokens` takes the means and orders them by the
mean position of their members. All in arrays [images, ...]; an image's result never depends on those beside it.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from triptych.vision.reduction_spec import Method, Reduction

Floats = npt.NDArray[np.float32]
Indices = npt.NDArray[np.intp]

SEED = 0
MOST_ROUNDS = 10
"""Most rounds of Lloyd's algorithm; on real features few tokens still change their cluster after that."""

REVISION = "1"
"""Goes into the identity of reduced features: change it with whatever changes the result."""


def reduce_tokens(features: Floats, reduction: Reduction) -> Floats:
    """Returns [images, tokens, hidden] as [images, reduction.tokens, hidden]; unchanged if there are no more tokens."""
    if features.shape[1] <= reduction.tokens:
        return features
    members = _METHODS[reduction.method](features, reduction.tokens)
    return _means(_by_position(members), features)


def _kmeans(features: Floats, count: int) -> Floats:
    """k-means with k-means++ seeding (Arthur and Vassilvitskii, 2007). Returns members [images, count, tokens].

    Everything is computed from the tokens' inner products, so that a round costs nothing in proportion to `hidden`.
    """
    scaled = _scaled(features - features.mean(axis=1, keepdims=True))
    products = scaled @ scaled.transpose(0, 2, 1)
    squares = np.diagonal(products, axis1=1, axis2=2)
    distances = np.maximum(squares[:, :, None] + squares[:, None, :] - 2 * products, 0)
    seeds = _seeds(distances, count)
    labels = np.take_along_axis(distances, seeds[:, None, :], axis=2).argmin(axis=2)
    for _ in range(MOST_ROUNDS):
        labels = _refilled(labels, seeds)
        weights = _averaging(_members(labels, count))
        to_centres = products @ weights.transpose(0, 2, 1)
        centre_squares = np.einsum("ict,itc->ic", weights, to_centres)
        nearest = (centre_squares[:, None, :] - 2 * to_centres).argmin(axis=2)
        if np.array_equal(nearest, labels):
            break
        labels = nearest
    return _members(_refilled(labels, seeds), count)


def _seeds(distances: Floats, count: int) -> Indices:
    """Returns distinct tokens [images, count], each drawn in proportion to its squared distance from those before."""
    images, tokens, _ = distances.shape
    draws = np.random.default_rng(SEED).random(count)  # The same for every image: none depends on its neighbours.
    rows = np.arange(images)
    seeds = np.empty((images, count), np.intp)
    free = np.ones((images, tokens))
    nearest = np.full((images, tokens), np.inf, distances.dtype)
    for index, draw in enumerate(draws):
        # The first is drawn evenly, and so is one where all that are left coincide with a seed.
        weights = np.where(np.isfinite(nearest), nearest, 1.0) * free
        weights = np.where(weights.any(axis=1, keepdims=True), weights, free)
        sums = weights.cumsum(axis=1)
        seeds[:, index] = (sums <= draw * sums[:, -1:]).sum(axis=1)
        free[rows, seeds[:, index]] = 0.0
        nearest = np.minimum(nearest, distances[rows, seeds[:, index]])
    return seeds


def _refilled(labels: Indices, seeds: Indices) -> Indices:
    """Returns labels in which every cluster has a token: one that lost all gets its seed back.

    That may take another cluster's last token, which then gets its own seed back; a seed given back stays.
    """
    count = seeds.shape[1]
    labels = labels.copy()
    while True:
        image, cluster = np.nonzero(~(labels[:, None, :] == np.arange(count)[:, None]).any(axis=2))
        if not len(image):
            return labels
        labels[image, seeds[image, cluster]] = cluster


def _merge(features: Floats, count: int) -> Floats:
    """Bipartite soft matching (Token Merging, Bolya et al., 2023). Returns members [images, count, tokens].

    In each round every second token looks for the most similar one among the others (cosine), and the best pairs
    become one; a token of several weighs as many. At most half of the tokens can go in a round.
    """
    images, tokens, _ = features.shape
    scaled = _scaled(features)
    # Inner products of the sums of each group's members: cosines are those of the means.
    products = scaled @ scaled.transpose(0, 2, 1)
    labels = np.tile(np.arange(tokens), (images, 1))
    moments = np.stack([np.ones(tokens), np.arange(tokens)], axis=1)[None].repeat(images, axis=0)
    while (present := products.shape[1]) > count:
        left = max(count, present - present // 2)
        lengths = np.sqrt(np.maximum(np.diagonal(products, axis1=1, axis2=2), np.finfo(np.float32).tiny))
        similarity = products[:, 0::2, 1::2] / (lengths[:, 0::2, None] * lengths[:, None, 1::2])
        partners = 2 * similarity.argmax(axis=2) + 1
        best = np.argsort(-similarity.max(axis=2), axis=1, kind="stable")[:, : present - left]
        becomes = np.tile(np.arange(present), (images, 1))
        np.put_along_axis(becomes, 2 * best, np.take_along_axis(partners, best, axis=1), axis=1)
        joins = _members(becomes, present)
        moments = joins @ moments
        sizes, sums = moments[:, :, 0], moments[:, :, 1]
        positions = np.where(sizes > 0, sums / np.maximum(sizes, 1), np.inf)
        order = np.argsort(positions, axis=1, kind="stable")[:, :left, None]  # Those that are gone come last.
        joins, moments = np.take_along_axis(joins, order, axis=1), np.take_along_axis(moments, order, axis=1)
        products = joins @ products @ joins.transpose(0, 2, 1)
        labels = np.take_along_axis(joins.argmax(axis=1), labels, axis=1)
    return _members(labels, count)


_METHODS: dict[Method, Callable[[Floats, int], Floats]] = {"kmeans": _kmeans, "merge": _merge}


def _scaled(features: Floats) -> Floats:
    """Returns features divided by each image's largest magnitude, so that no product overflows."""
    largest = np.abs(features).max(axis=(1, 2), keepdims=True)
    scaled: Floats = features / np.where(largest > 0, largest, 1)
    return scaled


def _members(labels: Indices, count: int) -> Floats:
    """Returns [images, count, tokens]: 1 where a token has a label, else 0."""
    members: Floats = (labels[:, None, :] == np.arange(count)[:, None]).astype(np.float32)
    return members


def _averaging(members: Floats) -> Floats:
    """Returns members as weights that sum up to 1; no group may be empty."""
    weights: Floats = members / members.sum(axis=2, keepdims=True)
    return weights


def _means(members: Floats, features: Floats) -> Floats:
    means: Floats = _averaging(members) @ features
    return means


def _by_position(members: Floats) -> Floats:
    """Returns members in the order of their mean positions, which count row by row through the image."""
    positions = _averaging(members) @ np.arange(members.shape[2], dtype=np.float32)
    order = np.argsort(positions, axis=1, kind="stable")
    ordered: Floats = np.take_along_axis(members, order[:, :, None], axis=1)
    return ordered
