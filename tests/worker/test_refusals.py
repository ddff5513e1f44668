"""Bad requests over loopback gRPC: refused with a reason, and nobody else is hurt."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.worker.checkpoints import Reference
from tests.worker.driving import identity_of
from tests.worker.serving import Client, image, request
from triptych import tensors
from triptych.v1 import inference_pb2, tensor_pb2, worker_pb2


def malformed_features() -> dict[str, tensor_pb2.Tensor]:
    good = np.ones((16, 64), np.float32)
    infinite = good.copy()
    infinite[3, 3] = np.inf
    short = tensors.to_proto(good)
    short.inline = short.inline[:-4]
    return {
        "too few rows": tensors.to_proto(good[:15]),
        "wrong width": tensors.to_proto(good[:, :63]),
        "one dimension": tensors.to_proto(good.reshape(-1)),
        "integers": tensors.to_proto(good.astype(np.int32)),
        "infinite": tensors.to_proto(infinite),
        "payload too short": short,
        "no payload": tensor_pb2.Tensor(data_type=tensor_pb2.DATA_TYPE_FLOAT32, shape=[16, 64]),
    }


@pytest.mark.parametrize("case", malformed_features())
async def test_a_bad_tensor_is_refused_and_the_next_request_answers(client: Client, case: str) -> None:
    bad = worker_pb2.PromptImage(identity=identity_of(case), token_count=16, features=malformed_features()[case])
    assert (await client.refusal(request(bad))).reason == "TENSOR_MALFORMED"
    assert (await client.answer(request()))[-1].HasField("finished")


def _role(message: worker_pb2.WorkerGenerateRequest) -> None:
    message.prompt.messages[0].role = inference_pb2.ROLE_UNSPECIFIED


def _index(message: worker_pb2.WorkerGenerateRequest) -> None:
    message.prompt.messages[0].parts[0].image_index = 1


def _twice(message: worker_pb2.WorkerGenerateRequest) -> None:
    message.prompt.messages[0].parts.add(image_index=0)


def _unused(message: worker_pb2.WorkerGenerateRequest) -> None:
    message.prompt.messages[0].parts[0].text = "no image"


def _identity(message: worker_pb2.WorkerGenerateRequest) -> None:
    message.prompt.images[0].identity = b"short"


def _count(message: worker_pb2.WorkerGenerateRequest) -> None:
    message.prompt.images[0].token_count = 2**31 - 1


def _part(message: worker_pb2.WorkerGenerateRequest) -> None:
    message.prompt.messages[0].parts.add()


def _empty(message: worker_pb2.WorkerGenerateRequest) -> None:
    message.ClearField("prompt")


def _id(message: worker_pb2.WorkerGenerateRequest) -> None:
    message.request_id = "x" * 129


def _temperature(message: worker_pb2.WorkerGenerateRequest) -> None:
    message.sampling.temperature = float("nan")


def _top_k(message: worker_pb2.WorkerGenerateRequest) -> None:
    message.sampling.top_k = -1


def _top_p(message: worker_pb2.WorkerGenerateRequest) -> None:
    message.sampling.top_p = 0.0


def _penalty(message: worker_pb2.WorkerGenerateRequest) -> None:
    message.sampling.repetition_penalty = 0.0


def _max_tokens(message: worker_pb2.WorkerGenerateRequest) -> None:
    message.stopping.max_tokens = -1


def _stop(message: worker_pb2.WorkerGenerateRequest) -> None:
    message.stopping.stop.append("")


def _stops(message: worker_pb2.WorkerGenerateRequest) -> None:
    message.stopping.stop.extend(["x"] * 17)


def _priority(message: worker_pb2.WorkerGenerateRequest) -> None:
    message.priority = 17  # type: ignore[assignment]


def _long(message: worker_pb2.WorkerGenerateRequest) -> None:
    message.stopping.max_tokens = 10_000


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        *((_role, "INVALID_REQUEST"), (_index, "INVALID_REQUEST"), (_twice, "INVALID_REQUEST")),
        *((_unused, "INVALID_REQUEST"), (_identity, "INVALID_REQUEST"), (_count, "PROMPT_TOO_LONG")),
        *((_part, "INVALID_REQUEST"), (_empty, "INVALID_REQUEST"), (_id, "INVALID_REQUEST")),
        *((_temperature, "INVALID_REQUEST"), (_top_k, "INVALID_REQUEST"), (_top_p, "INVALID_REQUEST")),
        *((_penalty, "INVALID_REQUEST"), (_max_tokens, "INVALID_REQUEST"), (_stop, "INVALID_REQUEST")),
        *((_stops, "INVALID_REQUEST"), (_priority, "INVALID_REQUEST"), (_long, "PROMPT_TOO_LONG")),
    ],
)
async def test_a_bad_request_is_refused(
    client: Client, tiny_reference: Reference, spoil: Callable[[Any], None], reason: str
) -> None:
    message = request(image(tiny_reference, 1))
    spoil(message)
    assert (await client.refusal(message)).reason == reason
