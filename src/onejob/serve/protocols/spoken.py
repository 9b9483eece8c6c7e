"""How the v2 messages of one version of a model are read and written: made once, with what is remembered of them."""

from __future__ import annotations

from dataclasses import dataclass

from onejob.serve.protocols.answer import Encoder
from onejob.serve.protocols.interface import Interface
from onejob.serve.protocols.plan import Plans
from onejob.serve.service import Service


@dataclass(frozen=True)
class Words:
    """Reads the requests to an engine, and writes its answers."""

    interface: Interface
    plans: Plans
    encoder: Encoder

    @classmethod
    def of(cls, service: Service) -> Words:
        model, identity = service.model, service.identity
        extras = identity.roles.extras
        interface = Interface(
            identity.name,
            model.inputs,
            model.outputs,
            raw=model.raw,
            extras=extras,
            labels=model.labels,
            octets=model.octets,
        )
        return cls(interface, Plans(interface), Encoder(interface, identity.version, {"engine": identity.digest}))
