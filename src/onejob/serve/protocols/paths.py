"""What a path of the HTTP API names: pure."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import unquote_to_bytes

MODEL_VERBS = frozenset(("", "ready", "config", "stats", "infer", "generate", "generate_stream"))
"""What may follow `/v2/models/NAME` or `/v2/models/NAME/versions/VERSION`."""
FIXED = frozenset(
    (
        "",
        "v2",
        "v2/health/live",
        "v2/health/ready",
        "v2/health/started",
        "v2/models/stats",
        "v2/repository/index",
        "metrics",
    )
)


@dataclass(frozen=True, slots=True)
class Path:
    """A route, and the model and version that the path names."""

    route: str
    """One of FIXED; `model/VERB`, `repository/load`, `repository/unload`, `v1`, `v1/predict`, `v1/labels`."""
    model: str = ""
    version: str | None = None


def parse_path(url: bytes) -> Path | None:
    """The path of a URL; None if it is none of ours."""
    if b"://" in url and not url.startswith(b"/"):  # as proxies are asked; a server must take it, too
        url = b"/" + url.partition(b"://")[2].partition(b"/")[2]
    text = unquote_to_bytes(url.partition(b"?")[0]).decode("utf-8", "replace").strip("/")
    if text in FIXED:
        return Path(text)
    parts = text.split("/")
    match parts:
        case ["v2", "models", name]:
            return Path("model/", name)
        case ["v2", "models", name, verb] if verb in MODEL_VERBS:
            return Path(f"model/{verb}", name)
        case ["v2", "models", name, "versions", version]:
            return Path("model/", name, version)
        case ["v2", "models", name, "versions", version, verb] if verb in MODEL_VERBS:
            return Path(f"model/{verb}", name, version)
        case ["v2", "repository", "models", name, ("load" | "unload") as verb]:
            return Path(f"repository/{verb}", name)
        case ["v1", "models", name, "labels"]:
            return Path("v1/labels", name)
        case ["v1", "models", name]:
            model, colon, verb = name.partition(":")
            if not colon:
                return Path("v1", model)
            return Path("v1/predict", model) if verb == "predict" else None
    return None
