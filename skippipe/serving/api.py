"""The HTTP interface that OpenAI's clients know, in front of whoever answers (see docs/serving-api.md).

complaints    answers that are errors
limits        who may ask, how much at once and how often
fields        the JSON object that a request is
asking        what it asks for
wording       what clients are told
tally         what is counted
receiving     requests are read up to a limit, and answered while somebody is there
bookkeeping   every request is counted, and whatever goes wrong becomes an answer
endpoints     all of it, at its addresses
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from skippipe.serving.limits import ApiSettings
from skippipe.text.packages import need

if TYPE_CHECKING:
    import uvicorn
    from fastapi import FastAPI

    from skippipe.serving.answering import Answering

EXTRA = "serve"
PURPOSE = "the HTTP interface"
LAST_WORDS_S = 10  # that answers get to be completed when the server is stopped


def app(answering: Answering, settings: ApiSettings) -> FastAPI:
    """UserError if FastAPI is not there."""
    need("fastapi", EXTRA, PURPOSE)
    from skippipe.serving.endpoints import application

    return application(answering, settings)


def server(application: FastAPI, host: str, port: int) -> uvicorn.Server:
    """To be run in the event loop of whoever answers: `await server(…).serve()`; `should_exit = True` stops it."""
    need("uvicorn", EXTRA, PURPOSE)
    import uvicorn

    return uvicorn.Server(
        uvicorn.Config(
            application,
            host=host,
            port=port,
            http="h11",  # strict about what a request is, and there wherever uvicorn is
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_graceful_shutdown=LAST_WORDS_S,
        )
    )
