"""GET /v1/models."""

from typing import Any

from fastapi import APIRouter

from triptych.gateway.errors import ApiError
from triptych.gateway.replies import ModelCard, ModelList, error_responses
from triptych.gateway.services import Services

_FAILURES = error_responses(401, 429, 500, 503)


def models_router(services: Services) -> APIRouter:
    """Returns the routes."""
    router = APIRouter(prefix="/v1")

    async def served() -> dict[str, Any]:
        model = await services.router.model()
        return {
            "id": model.name,
            "object": "model",
            "created": services.started_s,
            "owned_by": "triptych",
            "triptych": {
                "fingerprint": model.fingerprint,
                "context_tokens": model.context_tokens,
                "native_image_side": model.native_image_side,
                "native_visual_tokens": model.native_visual_tokens,
                "max_images": model.max_images,
                "encoder_version": model.encoder_version,
            },
        }

    @router.get("/models", response_model=ModelList, responses=_FAILURES, summary="Lists the served model")
    async def list_models() -> dict[str, Any]:
        return {"object": "list", "data": [await served()]}

    @router.get(
        "/models/{model:path}",
        response_model=ModelCard,
        responses={**_FAILURES, **error_responses(404)},
        summary="Describes a model",
    )
    async def show(model: str) -> dict[str, Any]:
        card = await served()
        if model != card["id"]:
            raise ApiError(404, f"The model `{model}` does not exist", param="model", code="model_not_found")
        return card

    return router
