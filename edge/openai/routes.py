"""All routes of OpenAI's dialects, for the application."""

from __future__ import annotations

from starlette.routing import Route

from edge.openai.answers import routes_of
from edge.openai.chat import CHAT
from edge.openai.completions import COMPLETIONS
from edge.openai.embeddings import embed
from edge.openai.models import list_models, show_model
from edge.openai.responses.routes import ROUTES as RESPONSE_ROUTES


def openai_routes() -> list[Route]:
    return [
        *routes_of(CHAT),
        *routes_of(COMPLETIONS),
        Route("/v1/embeddings", embed, methods=["POST"]),
        Route("/v1/models", list_models, methods=["GET"]),
        Route("/v1/models/{name:path}", show_model, methods=["GET"]),
        *RESPONSE_ROUTES,
    ]
