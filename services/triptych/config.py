"""Every knob of every service, with its range, default and meaning.

A knob is set by an environment variable, TRIPTYCH_<SERVICE>_<KNOB> in upper case, or by the command line where
`triptych serve --help` shows it. `triptych config` prints them all.
"""

from pathlib import Path
from typing import Literal

from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict

from triptych.vision.reduction_spec import PATTERN
from triptych.visual_kv import VisualKvPolicy

CHECKOUT = Path(__file__).resolve().parents[2]


def bundled(name: str) -> Path:
    """Returns `name` below the working directory, else below the source checkout (so the demo runs from anywhere)."""
    here = Path(name)
    return here if here.exists() or not (CHECKOUT / name).exists() else CHECKOUT / name


class TritonSettings(BaseSettings):
    """How Triton is started, where Triptych starts it."""

    model_config = SettingsConfigDict(env_prefix="TRIPTYCH_TRITON_", protected_namespaces=())

    model_repository: Path = Field(
        default_factory=lambda: bundled("model_repository"), description="folder that `triptych export` wrote"
    )
    tritonserver: Path | None = Field(
        None, description="tritonserver to run; unset: the one on PATH, else the nvidia-pytriton wheel's"
    )
    host: str = Field("127.0.0.1", description="address to listen on")
    grpc_port: int = Field(8001, ge=1, le=65535, description="KServe v2 gRPC port")
    http_port: int = Field(8000, ge=1, le=65535, description="KServe v2 HTTP port (health)")
    metrics_port: int = Field(8002, ge=1, le=65535, description="Prometheus port")
    start_timeout_s: float = Field(60.0, gt=0, description="most seconds from start to readiness")
    control_mode: str = Field(
        "poll", pattern="^(none|poll|explicit)$", description="Triton's model control mode; poll sees new versions"
    )
    poll_interval_s: int = Field(2, ge=1, description="seconds between looks at the repository, in poll mode")
    trace_url: str | None = Field(
        None,
        description="OTLP/HTTP traces URL for Triton's own spans, e.g. http://127.0.0.1:4318/v1/traces; unset: none",
    )


class WorkerSettings(BaseSettings):
    """The engine: prefill, decode and the KV cache."""

    model_config = SettingsConfigDict(env_prefix="TRIPTYCH_WORKER_", protected_namespaces=())

    model_dir: Path = Field(
        default_factory=lambda: bundled("models/demo"), description="Hugging Face LLaVA-format checkpoint folder"
    )
    model_name: str | None = Field(None, description="name clients see; unset: the folder's name")
    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(50061, ge=1, le=65535, description="WorkerService port")
    device: str = Field("auto", pattern="^(auto|cpu|cuda(:[0-9]+)?)$", description="auto: CUDA where there is one")
    dtype: str = Field(
        "auto",
        pattern="^(auto|float32|bfloat16|float16)$",
        description="auto: the checkpoint's own on CUDA, float32 on CPU",
    )
    kernels: Literal["auto", "native", "torch"] = Field(
        "auto", description="what computes on CPU; auto: the C++ engine where it can be built, else torch"
    )
    weights: Literal["auto", "int8"] = Field(
        "auto", description="auto: weights in dtype; int8: half of bfloat16's bytes, C++ engine only, not lossless"
    )
    threads: int | None = Field(
        None, ge=1, description="threads that compute on CPU; unset: one per 8 million parameters, at most all cores"
    )
    kv_blocks: int | None = Field(
        None, ge=8, description="KV blocks of 16 tokens in the device pool; unset: what fits kv_cache_bytes"
    )
    kv_cache_bytes: int = Field(
        256 << 20, ge=1 << 20, description="device memory for the KV pool, and for the draft model's, in bytes"
    )
    max_running: int = Field(64, ge=1, description="most sequences in one step")
    max_waiting: int = Field(512, ge=1, description="most queued requests; one more is refused (RESOURCE_EXHAUSTED)")
    step_token_budget: int = Field(
        512, ge=16, description="most tokens one step computes: all decodes, then prefill chunks up to this"
    )
    speculative_tokens: int = Field(
        0,
        ge=0,
        le=15,
        description="most tokens guessed and checked in one step; answers stay the same; 0: off",
    )
    draft_model: Path | None = Field(
        None,
        description="checkpoint folder whose language model guesses tokens, with the same tokenizer; it may be "
        "model_dir itself with draft_weights=int8; unset: tokens are guessed from earlier text",
    )
    draft_weights: Literal["auto", "int8"] = Field("auto", description="weights of the draft model; auto: as weights")
    max_wait_s: float = Field(5.0, gt=0, description="seconds of waiting that lift a request by one priority class")
    default_max_tokens: int = Field(256, ge=1, description="max_tokens of a request that names none")
    draft_timeout_s: float = Field(
        35.0,
        gt=0,
        description="longest wait of a generation on draft features for the verdict on them, in seconds; more than the "
        "router's encode_timeout_s",
    )
    visual_kv: VisualKvPolicy = Field(
        VisualKvPolicy.EXACT,
        description="where visual KV of running requests lives once their prompt is computed, for requests that do not "
        "say: exact; offload_visual: in host memory, exact; compress_visual_low_rank, compress_visual_merge: lossy",
    )
    visual_kv_ratio: int = Field(
        4, ge=2, le=16, description="how many times smaller compressed visual KV is; divides the model's head_dim"
    )
    visual_kv_basis: Path | None = Field(
        None,
        description="file of `triptych compress`, for compress_visual_low_rank; unset: visual_kv.components in "
        "model_dir, where there is one",
    )
    offload_kv_bytes: int = Field(
        256 << 20, ge=0, description="host memory for visual KV under offload_visual, in bytes; 0 turns the policy off"
    )
    prefix_cache: bool = Field(True, description="keep KV of finished requests for prefix reuse while memory lasts")
    kv_text_share: float = Field(
        0.5, ge=0, le=1, description="share of the KV pool in which cached text is safe from visual KV"
    )
    kv_visual_share: float = Field(
        0.3, ge=0, le=1, description="share of the KV pool in which cached visual KV is safe from text"
    )
    kv_reserve_share: float = Field(
        0.1, ge=0, le=0.5, description="share of the KV pool that requests of one kind leave to those of the other"
    )
    kv_host_bytes: int = Field(
        256 << 20, ge=0, description="host memory for KV that leaves the device, in bytes; 0: it is dropped"
    )
    kv_disk_dir: Path | None = Field(
        None, description="folder for KV that outlives host memory and restarts, one per worker; unset: none"
    )
    kv_disk_bytes: int = Field(4 << 30, ge=1 << 20, description="most bytes of files in kv_disk_dir")
    kv_remote_url: SecretStr | None = Field(
        None, description="redis://[user:password@]host:port of a server for KV that workers share; unset: none"
    )
    kv_remote_timeout_s: float = Field(
        0.2, gt=0, description="longest wait for an answer of that server; later is a miss"
    )
    kv_remote_ttl_s: int = Field(
        86_400, ge=1, description="seconds after which that server forgets KV nobody asked for"
    )
    kv_write_policy: Literal["write_through", "write_back"] = Field(
        "write_through",
        description="when KV is copied to the next tier: as soon as it is there, or before it is evicted",
    )
    kv_prefetch_timeout_s: float = Field(
        1.0, gt=0, description="longest wait for KV from a tier below; what has not come by then is computed again"
    )
    metrics_port: int | None = Field(None, ge=1, le=65535, description="HTTP port for Prometheus; unset: none")
    stall_timeout_s: float = Field(
        30.0, gt=0, description="seconds without engine progress, while there is work, after which readiness is lost"
    )


class RouterSettings(BaseSettings):
    """Intake, preprocessing, the encoder client and its cache, deadlines."""

    model_config = SettingsConfigDict(env_prefix="TRIPTYCH_ROUTER_", protected_namespaces=())

    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(50051, ge=1, le=65535, description="InferenceService port")
    metrics_port: int | None = Field(None, ge=1, le=65535, description="HTTP port for Prometheus; unset: none")
    triton: str = Field(
        "127.0.0.1:8001", description="gRPC addresses of one or more Tritons with the same models, comma-separated"
    )
    triton_metrics: str = Field(
        "",
        description="their metrics addresses (host:port), comma-separated, in the same order, to see how much others "
        "have queued there; empty: not asked",
    )
    worker: str = Field("127.0.0.1:50061", description="the worker's address")
    vision_model: str = Field("vision", description="Triton model that turns pixels into projected features")
    max_images: int = Field(8, ge=0, description="most images in one request")
    max_image_bytes: int = Field(20 << 20, ge=1 << 10, description="largest encoded image, in bytes")
    max_image_pixels: int = Field(
        64_000_000,
        ge=1 << 10,
        le=178_000_000,
        description="largest raster an image may declare, in pixels, checked before decoding",
    )
    max_inflight_image_bytes: int = Field(
        512 << 20, ge=1 << 10, description="most bytes of encoded images, as sent, in all requests in flight together"
    )
    max_held_bytes: int = Field(
        1 << 30,
        ge=1 << 20,
        description="most bytes of pixels and features that requests hold from preprocessing to their first token; "
        "others wait for room",
    )
    max_text_chars: int = Field(1_000_000, ge=1, description="most characters of text in one request")
    max_inflight: int = Field(256, ge=1, description="most requests at once; one more is refused (RESOURCE_EXHAUSTED)")
    preprocess_threads: int = Field(2, ge=1, description="threads that decode and resize images")
    encoder_cache_bytes: int = Field(
        256 << 20, ge=0, description="budget of the encoder cache, in bytes; 0 turns it off"
    )
    features_remote_url: SecretStr | None = Field(
        None, description="redis://[user:password@]host:port of a server for features that routers share; unset: none"
    )
    features_remote_timeout_s: float = Field(
        0.2, gt=0, description="longest wait for an answer of that server; later, the image is encoded"
    )
    features_remote_ttl_s: int = Field(86_400, ge=1, description="seconds after which that server forgets features")
    shared_memory: bool = Field(
        False, description="pass features to a worker on the same host through POSIX shared memory instead of inline"
    )
    token_reduction: str = Field(
        "none",
        pattern=PATTERN,
        description="what makes an image's visual tokens fewer where a request does not say: none, kmeans:N or "
        "merge:N, N tokens kept, 128 without N",
    )
    speculative_vision: bool = Field(
        False,
        description="begin answers with a draft encoder's features and check them against the encoder's, where a "
        "request does not say",
    )
    draft_model: str = Field("vision_draft", description="Triton model of the draft encoder")
    draft_threshold: float = Field(
        0.95, gt=0, le=1, description="mean cosine of an image's tokens to the encoder's at which a draft is kept"
    )
    encode_timeout_s: float = Field(
        30.0,
        gt=0,
        description="deadline of encoding all images of a request, the wait for others' included; a large ViT takes "
        "seconds an image on a laptop, so a server with a GPU may want less",
    )
    resolution_by_load: bool = Field(True, description="encode images at lower resolution while load is high")
    low_headroom: float = Field(
        0.2, ge=0, le=1, description="share of device memory free for KV, below which images get at most low resolution"
    )
    medium_headroom: float = Field(0.4, ge=0, le=1, description="the same for medium resolution")
    low_pending: int = Field(
        20, ge=0, description="requests without a first token, above which images get at most low resolution"
    )
    medium_pending: int = Field(10, ge=0, description="the same for medium resolution")
    resolution_hold_s: float = Field(
        2.0, ge=0, description="seconds that load must have eased before images get more resolution again"
    )
    encode_pixel_budget: int = Field(
        32 * 336 * 336,
        ge=1 << 10,
        description="most pixels in flight in one encoder, as it sees them, all batches together",
    )
    encode_max_pixels: int = Field(
        4096 * 4096,
        ge=1 << 10,
        description="largest image, in pixels as the encoder sees it; one over the budget is encoded alone",
    )
    encode_max_inflight: int = Field(
        2, ge=1, description="most batches in flight in one encoder; a batch is full at its share of the budget"
    )
    encode_batch_timeout_s: float = Field(
        0.005, ge=0, description="longest that an image waits for others to fill its batch, in seconds"
    )
    encode_lift_s: float = Field(
        1.0, ge=0, description="seconds of waiting that lift an image by one priority class in the encoder's queue"
    )
    encode_shared_memory: bool = Field(
        True, description="pass pixels to a Triton on the same host through POSIX shared memory instead of inline"
    )
    encode_max_waiting: int = Field(
        512, ge=1, description="most images in the encoder's queue; one more is refused (RESOURCE_EXHAUSTED)"
    )
    prefill_timeout_s: float = Field(
        10.0, gt=0, description="deadline from the worker taking a request to its first token, queueing excluded"
    )
    queue_timeout_s: float = Field(30.0, gt=0, description="deadline of a request's wait in the worker's queue")
    next_token_timeout_s: float = Field(
        5.0, gt=0, description="longest gap between two events of the worker's stream before the worker counts as lost"
    )
    worker_silence_s: float = Field(
        3.0, gt=0, description="seconds without a sign of life before the worker is unhealthy"
    )


class GatewaySettings(BaseSettings):
    """The OpenAI-compatible HTTP API and the web page."""

    model_config = SettingsConfigDict(env_prefix="TRIPTYCH_GATEWAY_", protected_namespaces=())

    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(8080, ge=1, le=65535, description="HTTP port")
    router: str = Field("127.0.0.1:50051", description="the router's gRPC address")
    worker: str | None = Field(None, description="the worker's gRPC address, for the page's live view; unset: none")
    jaeger_url: str | None = Field(
        None, description="where a browser finds Jaeger's own page, for links to traces; unset: no links"
    )
    api_keys: SecretStr | None = Field(
        None,
        description="comma-separated keys, one of which every /v1 request must bear; unset: no key is asked for. Each "
        "key is a tenant of its own: no cache is shared between two",
    )
    max_body_bytes: int = Field(
        64 << 20, ge=1 << 10, description="largest request body, in bytes (base64 makes images a third larger)"
    )
    body_timeout_s: float = Field(30.0, gt=0, description="most seconds for a request's body to arrive")
    max_inflight: int = Field(
        512, ge=1, description="most /v1 requests at once; one more is refused (429) before its body is read"
    )
    max_inflight_body_bytes: int = Field(
        512 << 20,
        ge=1 << 10,
        description="most bytes of request bodies held together (429); never less than one largest body",
    )
    request_timeout_s: float = Field(
        300.0, gt=0, description="deadline of a generation; a request's own `triptych.timeout_s` may only shorten it"
    )
    max_choices: int = Field(8, ge=1, le=128, description="most answers one request may ask for (n)")
    image_hosts: str = Field(
        "",
        description="comma-separated hosts from which image_url may name https pictures; *.example.org is any host "
        "below it; empty: data: URLs only",
    )
    image_timeout_s: float = Field(10.0, gt=0, description="most seconds for fetching one picture")
    max_image_bytes: int = Field(20 << 20, ge=1 << 10, description="largest picture that is fetched, in bytes")
