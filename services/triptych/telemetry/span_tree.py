"""A trace as a tree: for the terminal, and as plain rows."""

from collections import defaultdict
from collections.abc import Sequence

from rich.tree import Tree

from triptych.telemetry.span_store import Span


def roots_of(spans: Sequence[Span]) -> list[Span]:
    """Returns the spans whose parent is not among `spans`."""
    known = {span.span_id for span in spans}
    return [span for span in spans if span.parent_id not in known]


def rows_of(spans: Sequence[Span]) -> list[dict[str, str | None]]:
    """Returns {name, service, parent} per span, parents before children; `parent` is a span's name or None."""
    by_id = {span.span_id: span for span in spans}
    return [
        {
            "name": span.name,
            "service": span.service,
            "parent": parent.name if (parent := _parent(span, by_id)) else None,
        }
        for _, span in walk(spans)
    ]


def walk(spans: Sequence[Span]) -> list[tuple[int, Span]]:
    """Returns (depth, span) for every span, parents before their children, siblings by start; roots have depth 0."""
    children = _children(spans)
    ordered: list[tuple[int, Span]] = []

    def visit(depth: int, span: Span) -> None:
        ordered.append((depth, span))
        for child in children[span.span_id]:
            visit(depth + 1, child)

    for root in roots_of(spans):
        visit(0, root)
    return ordered


def tree_of(spans: Sequence[Span]) -> Tree:
    """Returns a drawing of the trace: name, service, start relative to the first span, and duration."""
    origin_ns = min((span.start_ns for span in spans), default=0)
    children = _children(spans)
    top = Tree(f"trace {spans[0].trace_id}" if spans else "empty trace", highlight=False)

    def grow(branch: Tree, span: Span) -> None:
        start_ms = (span.start_ns - origin_ns) / 1e6
        label = f"[bold]{span.name}[/] [dim]{span.service}[/]  +{start_ms:.1f} ms, {span.duration_s * 1000:.1f} ms"
        twig = branch.add(label)
        for child in children[span.span_id]:
            grow(twig, child)

    for root in roots_of(spans):
        grow(top, root)
    return top


def _parent(span: Span, by_id: dict[str, Span]) -> Span | None:
    return by_id.get(span.parent_id)


def _children(spans: Sequence[Span]) -> dict[str, list[Span]]:
    children: dict[str, list[Span]] = defaultdict(list)
    for span in sorted(spans, key=lambda span: span.start_ns):
        children[span.parent_id].append(span)
    return children
