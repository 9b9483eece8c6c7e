"""What steps have left, as later steps and people ask for it: digests for inputs, what is gone, how a try ended."""

from __future__ import annotations

from collections.abc import Mapping

from onejob.core.plan import Existing, Output, Source, Step
from onejob.core.records import Execution, StepRow
from onejob.errors import NotFoundError, SourceError
from onejob.loop.keys import source_artifact
from onejob.loop.session import Session


def input_digests(session: Session, step: Step, rows: Mapping[str, StepRow]) -> dict[str, str]:
    """Input name -> artifact digest, for a step whose earlier steps are done; sources are hashed where they lie."""
    digests = {}
    for name, value in step.inputs.items():
        match value:
            case Source():
                artifact, locations = source_artifact(value)
                if not value.files:
                    raise SourceError(f"input {name!r} names no files", place=step.name)
                session.blobs.put(artifact.manifest_bytes())
                session.ledger.add_artifact(artifact, locations=locations)
                digests[name] = artifact.digest
            case Output(earlier, output):
                execution = session.ledger.get_execution(rows[earlier].execution or "")
                digests[name] = execution.outputs[output]
            case Existing(digest):
                digests[name] = session.ledger.get_artifact(digest).digest
    return digests


def missing_outputs(session: Session, execution: Execution) -> str:
    """The first output of a done execution that `gc` has freed, or of which a file is gone; or nothing."""
    for name, digest in execution.outputs.items():
        try:
            artifact = session.ledger.get_artifact(digest)
        except NotFoundError:
            return name
        if not all(session.blobs.has(entry.digest) for entry in artifact.files):
            return name
    return ""


def error_text(execution: Execution) -> str:
    """How an execution ended, in one line."""
    error = execution.error or {}
    text = f"{error['place']}: {error.get('message', '')}" if error.get("place") else error.get("message", "")
    return f"{text} {error.get('cure', '')}".strip() or f"it was {execution.state}"
