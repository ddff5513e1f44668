"""What clients may send: OpenAI's request bodies, checked for type and range; translate.py decides what they mean.

Unknown members are refused, as OpenAI's own server does. Everything that is ours alone is under `triptych`.
"""

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, model_validator

from triptych.vision.reduction_spec import PATTERN, RULE

VisualKvName = Literal["exact", "offload_visual", "compress_visual_low_rank", "compress_visual_merge"]
"""Values of VisualKvPolicy: a checked body holds plain JSON types."""

MAX_INT32 = 2**31 - 1
INT64 = 2**63

Schema = dict[str, JsonValue]


def _only(*values: JsonValue) -> Schema:
    """Documents which values are supported; others pass validation and are refused by name in translate.py."""
    return {"enum": list(values)}


Resolution = Literal["high", "medium", "low", "thumbnail"]


class Closed(BaseModel):
    """Takes only the members it names, and no value of another JSON type."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class Open(BaseModel):
    """Takes members it does not name: they have no meaning here."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)


def _well_formed(value: str) -> str:
    # JSON can say half a surrogate pair; no text can hold one.
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise ValueError("holds half a surrogate pair, which is no character") from None
    return value


Text = Annotated[str, AfterValidator(_well_formed)]


class TextPart(Closed):
    """A piece of text."""

    type: Literal["text"]
    text: Text


class ImageUrl(Closed):
    """A picture and how closely to look at it."""

    url: Text = Field(
        description="a data: URL, or https where the gateway's knob image_hosts allows the host",
        json_schema_extra={"pattern": "^(data:|https://)"},
    )
    detail: Literal["auto", "low", "high"] | None = Field(None, description="auto, the default, is high")


class ImagePart(Closed):
    """A picture among a message's text."""

    type: Literal["image_url"]
    image_url: ImageUrl


Part = Annotated[TextPart | ImagePart, Field(discriminator="type")]


def _as_parts(value: object) -> object:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


Content = Annotated[
    list[Part], Field(min_length=1), BeforeValidator(_as_parts, json_schema_input_type=str | list[Part])
]
StopString = Annotated[Text, Field(min_length=1, max_length=256)]
Stop = Annotated[
    list[StopString],
    Field(max_length=16),
    BeforeValidator(_as_list, json_schema_input_type=StopString | Annotated[list[StopString], Field(max_length=16)]),
]
Prompts = Annotated[
    list[Text],
    Field(min_length=1, max_length=128),
    BeforeValidator(_as_list, json_schema_input_type=str | Annotated[list[str], Field(min_length=1, max_length=128)]),
]


class Message(Closed):
    """One turn of the dialogue; the last must be the user's."""

    model_config = ConfigDict(
        json_schema_extra={
            "anyOf": [
                {"properties": {"role": {"const": "assistant"}}},
                {"required": ["content"], "properties": {"content": {"type": ["string", "array"]}}},
            ]
        }
    )

    role: Literal["system", "developer", "user", "assistant"]
    content: Content | None = Field(None, description="text, or text and pictures in order; null only for assistant")
    name: str | None = Field(None, description="accepted and ignored")
    refusal: str | None = Field(None, description="accepted and ignored")

    @model_validator(mode="after")
    def _has_content(self) -> "Message":
        if self.content is None and self.role != "assistant":
            raise ValueError("content is required")
        return self


class StreamOptions(Closed):
    """What a stream tells beside the text."""

    include_usage: bool | None = Field(None, description="ends the stream with a chunk that holds the token counts")
    include_obfuscation: bool | None = Field(None, description="accepted and ignored")


class ResponseFormat(Open):
    """Only text is produced."""

    type: Literal["text", "json_object", "json_schema"] = Field(json_schema_extra=_only("text"))


class Options(Closed):
    """Triptych's own wishes; OpenAI has none of these."""

    priority: Literal["interactive", "standard", "economy"] | None = Field(None, description="scheduling class")
    resolution: Resolution | None = Field(None, description="of every picture, whatever its `detail` says")
    reduction: str | None = Field(
        None, pattern=PATTERN, description=f"keeps fewer visual tokens of every picture: {RULE}"
    )
    draft: bool | None = Field(
        None, description="true: begin with a draft encoder's features; text comes once they have been checked"
    )
    draft_threshold: float | None = Field(
        None, gt=0, le=1, description="least similarity at which the draft is kept, the mean cosine of its tokens"
    )
    cache_salt: Text | None = Field(None, max_length=64, description="requests with different salts share no cache")
    degrade: bool | None = Field(
        None, description="true, the default: rather a text-only answer, or less resolution, than an error"
    )
    request_id: str | None = Field(
        None, pattern=r"^[A-Za-z0-9._:-]{1,100}$", description="name for logs and traces; wins over x-request-id"
    )
    timeout_s: float | None = Field(None, gt=0, le=86400, description="deadline of the whole request, in seconds")
    top_k: int | None = Field(None, ge=0, le=MAX_INT32, description="keeps the k most likely tokens; 0 keeps all")
    repetition_penalty: float | None = Field(None, gt=0, le=10, description="1 changes nothing")
    ignore_eos: bool | None = Field(None, description="generates until max_tokens; for measurements")
    visual_kv: VisualKvName | None = Field(
        None, description="where the pictures' KV lives while the answer is generated; compress_* change answers"
    )


class SamplingRequest(Closed):
    """What both kinds of completion have in common."""

    model: Text = Field(min_length=1, description="a name that GET /v1/models lists")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=1, le=MAX_INT32)
    temperature: float | None = Field(None, ge=0, le=2, description="1 by default; 0 takes the most likely token")
    top_p: float | None = Field(None, gt=0, le=1)
    n: int | None = Field(None, ge=1, le=128, description="answers wanted; the gateway's knob max_choices limits it")
    stop: Stop | None = Field(None, description="the answer ends before the first of these")
    seed: int | None = Field(None, ge=-INT64, lt=INT64, description="makes sampling repeatable")
    presence_penalty: float | None = Field(
        None, ge=-2, le=2, description="not supported: refused unless 0", json_schema_extra=_only(0, None)
    )
    frequency_penalty: float | None = Field(
        None, ge=-2, le=2, description="not supported: refused unless 0", json_schema_extra=_only(0, None)
    )
    logit_bias: dict[str, float] | None = Field(
        None, description="not supported: refused unless empty", json_schema_extra=_only({}, None)
    )
    user: str | None = Field(None, description="accepted and ignored")
    triptych: Options | None = None


class ChatCompletionRequest(SamplingRequest):
    """Body of POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1, max_length=4096)
    max_completion_tokens: int | None = Field(None, ge=1, le=MAX_INT32, description="wins over max_tokens")
    logprobs: bool | None = Field(None, description="reports how likely each token was")
    top_logprobs: int | None = Field(None, ge=0, le=20, description="needs logprobs")
    response_format: ResponseFormat | None = Field(None, description="anything but text is refused")
    tools: list[JsonValue] | None = Field(
        None, description="not supported: refused unless empty", json_schema_extra=_only([], None)
    )
    tool_choice: JsonValue = Field(None, json_schema_extra=_only("none", "auto", None))
    parallel_tool_calls: bool | None = Field(None, description="accepted and ignored")
    functions: list[JsonValue] | None = Field(
        None, description="not supported: refused unless empty", json_schema_extra=_only([], None)
    )
    function_call: JsonValue = Field(None, json_schema_extra=_only("none", "auto", None))
    modalities: list[Literal["text", "audio"]] | None = Field(
        None, description="anything but text is refused", json_schema_extra=_only(["text"], None)
    )
    audio: JsonValue = Field(None, description="not supported: refused unless null", json_schema_extra=_only(None))
    prediction: JsonValue = Field(None, description="accepted and ignored: a hint for speed")
    web_search_options: JsonValue = Field(
        None, description="not supported: refused unless null", json_schema_extra=_only(None)
    )
    metadata: dict[str, JsonValue] | None = Field(None, description="accepted and ignored")
    store: bool | None = Field(None, description="accepted and ignored: nothing is ever stored")
    service_tier: str | None = Field(None, description="accepted and ignored")
    safety_identifier: str | None = Field(None, description="accepted and ignored")
    prompt_cache_key: str | None = Field(None, description="accepted and ignored: prefixes are found by content")
    prompt_cache_retention: str | None = Field(None, description="accepted and ignored")
    reasoning_effort: str | None = Field(None, description="accepted and ignored")
    verbosity: str | None = Field(None, description="accepted and ignored")


class CompletionRequest(SamplingRequest):
    """Body of POST /v1/completions: texts to be continued as they are, without the chat template."""

    prompt: Prompts = Field(description="one text or several; arrays of tokens are refused")
    best_of: int | None = Field(None, ge=1, le=128, description="refused unless equal to n")
    echo: bool | None = Field(
        None, description="not supported: refused unless false", json_schema_extra=_only(False, None)
    )
    suffix: str | None = Field(
        None, description="not supported: refused unless empty", json_schema_extra=_only("", None)
    )
    logprobs: int | None = Field(None, ge=0, le=20, description="reports this many likely tokens beside each")
