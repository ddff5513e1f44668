"""Which images the encoder takes next. Pure: a queue and what is in flight go in, a plan comes out.

A batch is bounded by the pixels of its images as the encoder sees them, never by their number: a 4K image is four 1080p
images. Only images of one shape share a batch. They are not padded to a common one: an encoder without a mask attends
to the padding, which would change the features; and padding is cheaper than a second call only where the added pixels
cost less than a call's fixed time, a few milliseconds, which is at most one patch row of a small image.

Order: each image has a rank, its arrival put back by `lift_s` for each priority class below the first; the lowest rank
leads the next batch, and images of its shape join it in order of rank. Ranks never change, so an image is passed only
by those that arrive less than `lift_s` per class after it, and by those that join the batches of images before it.
"""

from bisect import bisect_left, insort
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise

from triptych.errors import IntegrityError


class EncodeClass(IntEnum):
    """Priority classes; the value is how many classes stand before it."""

    INTERACTIVE = 0
    STANDARD = 1
    ECONOMY = 2


@dataclass(frozen=True, slots=True)
class Item:
    """An image that waits for the encoder.

    Attributes:
        number: Its own; breaks ties of rank, so later ones are higher.
        shape: Only images of equal shape share a batch: height, width, and whatever else must be equal.
        pixels: Height times width, as the encoder sees it; > 0.
        arrival_s: When it came, on the clock of `plan_batch`'s now_s.
        rank: From `rank_of`.
        alone: Whether it may share no batch, because one that it was in failed.
    """

    number: int
    shape: Hashable
    pixels: int
    arrival_s: float
    rank: float
    alone: bool = False

    @property
    def key(self) -> tuple[float, int]:
        """Its place in the order."""
        return self.rank, self.number


@dataclass(frozen=True, slots=True)
class Limits:
    """The scheduler's knobs; config.py describes them.

    Attributes:
        pixel_budget: Most pixels in flight in one encoder, all batches together.
        max_inflight: Most batches in flight in one encoder. They share the budget, so a batch is full at its
            `max_inflight`th part.
        batch_timeout_s: Longest that an image waits for company.
        lift_s: Seconds of waiting that make up for one priority class.
        max_images: Most images in a batch, where the server has such a limit.
    """

    pixel_budget: int
    max_inflight: int
    batch_timeout_s: float
    lift_s: float
    max_images: int = 1 << 30

    @property
    def full_pixels(self) -> int:
        """Pixels at which a batch of several images is full."""
        return self.pixel_budget // self.max_inflight


@dataclass(frozen=True, slots=True)
class Flight:
    """What is in flight in the encoder that is planned for."""

    batches: int = 0
    pixels: int = 0


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """What the encoder does now.

    Attributes:
        items: The batch, lowest rank first; empty: none leaves now.
        wait_s: With an empty batch: seconds after which one leaves although nothing else happens. None: only an
            arrival or a completion can change the plan.
    """

    items: tuple[Item, ...] = ()
    wait_s: float | None = None

    @property
    def pixels(self) -> int:
        """Pixels of the batch."""
        return sum(item.pixels for item in self.items)


class VisionQueue:
    """Images in the order in which they get their turn. Not thread-safe: one event loop uses it."""

    def __init__(self) -> None:
        self._items: list[Item] = []
        self._pixels = 0

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Item]:
        return iter(self._items)

    def __getitem__(self, index: int) -> Item:
        return self._items[index]

    def __contains__(self, item: Item) -> bool:
        place = self._place(item)
        return place < len(self._items) and self._items[place] is item

    @property
    def pixels(self) -> int:
        """Pixels of all waiting images."""
        return self._pixels

    def pixels_before(self, rank: float) -> int:
        """Returns the pixels of all images that an image of this rank would wait for."""
        return sum(item.pixels for item in self._items if item.rank <= rank)

    def add(self, item: Item) -> None:
        """Puts an image into its place; one that comes back from a lost encoder gets its old one."""
        insort(self._items, item, key=lambda one: one.key)
        self._pixels += item.pixels

    def remove(self, item: Item) -> None:
        """Takes an image out. Raises IntegrityError if it is not here."""
        if item not in self:
            raise IntegrityError("an image was removed from a queue that does not hold it")
        del self._items[self._place(item)]
        self._pixels -= item.pixels

    def check_integrity(self) -> None:
        """Raises IntegrityError unless the images are in order, each is here once, and the pixels add up."""
        if any(second.key <= first.key for first, second in pairwise(self._items)):
            raise IntegrityError("the vision queue is out of order")
        if self._pixels != sum(item.pixels for item in self._items):
            raise IntegrityError("the vision queue's pixels do not add up")

    def _place(self, item: Item) -> int:
        return bisect_left(self._items, item.key, key=lambda one: one.key)


def rank_of(arrival_s: float, priority: EncodeClass, lift_s: float) -> float:
    """Returns the rank of an image: lower goes first."""
    return arrival_s + priority * lift_s


def plan_batch(
    waiting: VisionQueue | Sequence[Item], flight: Flight, limits: Limits, now_s: float, *, arriving: bool
) -> BatchPlan:
    """Chooses the batch that leaves now for an encoder with `flight` under way, if any.

    It leaves when it is full, when the image that waits longest has waited batch_timeout_s, or at once when the encoder
    is idle and no image is `arriving`. An image larger than a full batch leaves alone as soon as the budget has room
    for it, one larger than the budget when nothing else is in flight; none behind it passes meanwhile.

    Pure: changes nothing.
    """
    leader = next(iter(waiting), None)
    if leader is None or flight.batches >= limits.max_inflight:
        return BatchPlan()
    if flight.batches and flight.pixels + leader.pixels > limits.pixel_budget:
        return BatchPlan()
    room = min(limits.full_pixels, limits.pixel_budget - flight.pixels)
    items = [leader]
    pixels = leader.pixels
    full = leader.alone or pixels >= room or limits.max_images <= 1
    for item in waiting if not full else ():
        if item is leader or item.alone or item.shape != leader.shape:
            continue
        if pixels + item.pixels > room or len(items) >= limits.max_images:
            full = True
            break
        items.append(item)
        pixels += item.pixels
    if full or (flight.batches == 0 and not arriving):
        return BatchPlan(tuple(items))
    left_s = min(item.arrival_s for item in waiting) + limits.batch_timeout_s - now_s
    return BatchPlan(tuple(items)) if left_s <= 0 else BatchPlan(wait_s=left_s)
