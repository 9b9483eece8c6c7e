"""The command that stays with an endpoint, as the main process of a container or a service does, and ends it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

from onejob.core.state import EndpointState
from onejob.errors import from_json
from onejob.loop.commands.run import SLOW
from onejob.loop.commands.stop import stop
from onejob.loop.endpoints import DOWN, tend_endpoint
from onejob.loop.service import Service
from onejob.loop.session import Session
from onejob.loop.views import StopView


def stay(session: Session, name: str, asked: Sequence[int]) -> StopView:
    """Keep an endpoint up until a signal is in `asked` (`collected_signals`), then stop it: what was sent is answered.

    It ends, too, when somebody else stops the endpoint, and with its error when that has failed for good. A second
    Ctrl-C ends what is being answered.
    """
    service = Service(session)
    try:
        while not asked:
            session.troubles.guard(f"endpoint/{name}", partial(tend_endpoint, session, name))
            session.troubles.guard("the service", partial(service.tend, name))
            endpoint = session.ledger.get_endpoint(name)
            if endpoint is None or endpoint.state in DOWN:
                break
            time.sleep(SLOW)
        else:
            return stop(session, name)
    except KeyboardInterrupt:
        return stop(session, name, now=True)
    if endpoint is not None and endpoint.state is EndpointState.FAILED and endpoint.error:
        raise from_json({key: str(value) for key, value in endpoint.error.items()})
    return StopView(name, "endpoint", EndpointState.STOPPED, "somebody has stopped it")
