"""How different OpenAI-compatible servers are told to generate an exact number of tokens."""

from typing import Any, Literal

Dialect = Literal["auto", "openai", "triptych", "vllm", "ignore-eos"]

_BY_OWNER: dict[str, Dialect] = {
    "triptych": "triptych",
    "vllm": "vllm",
    "sglang": "ignore-eos",
    "llamacpp": "ignore-eos",
}


def dialect_of(owner: str) -> Dialect:
    """Returns the dialect of a server by the `owned_by` of its models; plain `openai` when it is not known."""
    return _BY_OWNER.get(owner.lower(), "openai")


def length_fields(dialect: Dialect, tokens: int) -> dict[str, Any]:
    """Returns the body fields that make an answer `tokens` long; plain OpenAI has only the upper bound."""
    match dialect:
        case "triptych":
            return {"max_tokens": tokens, "triptych": {"ignore_eos": True}}
        case "vllm":
            return {"max_tokens": tokens, "min_tokens": tokens, "ignore_eos": True}
        case "ignore-eos":
            return {"max_tokens": tokens, "ignore_eos": True}
        case _:
            return {"max_tokens": tokens}
