"""The OpenAPI document."""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi


def describe(app: FastAPI) -> dict[str, Any]:
    """Returns FastAPI's description without its 422: a body that does not fit is 400 here, as it is at OpenAI."""
    if app.openapi_schema is None:
        document = get_openapi(
            title=app.title, version=app.version, description=app.description, routes=app.routes, tags=app.openapi_tags
        )
        for methods in document["paths"].values():
            for operation in methods.values():
                operation["responses"].pop("422", None)
        for name in ("HTTPValidationError", "ValidationError"):
            document["components"]["schemas"].pop(name, None)
        app.openapi_schema = document
    return app.openapi_schema
