"""The command `bench`: a load on servers by their URLs, and on endpoints of this home by their names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from onejob import plugins
from onejob.errors import InferenceError, UnavailableError, UsageError
from onejob.loop.resolve import resolve
from onejob.loop.session import Session
from onejob.loop.snapshots import endpoint_view
from onejob.serve.bench import wish as wishes
from onejob.serve.bench.outcome import Ratio, Tick
from onejob.serve.bench.prepare import prepare
from onejob.serve.bench.report import Measured, Searched, Server, Step, measured, ratios, warnings_of
from onejob.serve.bench.run import Findings, Look, Result, measure
from onejob.serve.bench.search import parse_goals
from onejob.serve.bench.target import Target, is_url, parse_header
from onejob.serve.bench.wish import Wish

__all__ = [
    "BenchView",
    "Look",
    "Measured",
    "Ratio",
    "Searched",
    "Server",
    "Step",
    "TargetView",
    "Tick",
    "Wish",
    "bench",
    "is_url",
    "parse_goals",
    "parse_header",
    "wishes",
]

NEEDED = ("uvloop", "httptools")


@dataclass(frozen=True, slots=True)
class TargetView:
    """What was asked."""

    name: str
    """A URL, or an endpoint's name."""
    url: str
    method: str
    path: str
    body_bytes: int
    model: str = ""
    form: str = ""
    """`binary tensors` or `JSON`, where the body was made from the model's metadata."""
    batch: int | None = None


@dataclass(frozen=True, slots=True)
class BenchView:
    """What was measured."""

    targets: tuple[TargetView, ...]
    results: tuple[Measured, ...] = ()
    """By load, then by target."""
    ratios: tuple[Ratio, ...] = ()
    """Of several targets: each over the first."""
    searches: tuple[Searched, ...] = ()
    """With `--slo`: where each target's search ended."""
    warnings: tuple[str, ...] = ()
    interrupted: bool = False
    """A person stopped it; the figures are of the time until then."""

    @property
    def answered(self) -> bool:
        """Whether there is anything good to report: an answer, or a rate that held."""
        return any(search.held for search in self.searches) or any(result.requests_per_s for result in self.results)


def bench(session: Session | None, names: Sequence[str], wish: Wish, *, on_look: Callable[[Look], object]) -> BenchView:
    """Send a load to each of the targets, in turns, and say what came of it.

    A name that is no URL is an endpoint of the session's home.
    """
    for module in NEEDED:
        if plugins.is_missing(module):
            raise UnavailableError(f"needs the module {module!r}", place="bench", cure=f"{plugins.cure(module)}.")
    wishes.loads_of(wish)  # contradictions are told before anything is asked
    urls = [name if is_url(name) else _endpoint_url(session, name) for name in names]
    targets = [prepare(name, url, wish) for name, url in zip(_distinct(names), urls, strict=True)]
    findings = measure(targets, wish, on_look)
    return _view(targets, urls, wish, findings)


def _distinct(names: Sequence[str]) -> list[str]:
    """A server may be compared with itself, to see the noise: its second name is `NAME #2`."""
    return [
        name if (place := names[:number].count(name)) == 0 else f"{name} #{place + 1}"
        for number, name in enumerate(names)
    ]


def _endpoint_url(session: Session | None, name: str) -> str:
    """The address of the model that an endpoint of this home serves; of the endpoint, if it serves a repository."""
    assert session is not None, "names of endpoints need a session"
    target = resolve(session, name)
    if target.kind != "endpoint" or target.endpoint is None:
        cure = "Name an endpoint (`onejob ps` lists them), or give a URL with http://."
        raise UsageError(f"it is {target.noun}, not an endpoint", place=name, cure=cure)
    view = endpoint_view(session, target.endpoint)
    if not view.url:
        raise InferenceError(f"it is {view.state}", place=f"endpoint {name}", cure="Run its job to start it.")
    return view.url if view.repository else f"{view.url}/v2/models/{view.name}"


def _view(targets: Sequence[Target], urls: Sequence[str], wish: Wish, findings: Findings) -> BenchView:
    names = [target.name for target in targets]
    results, warnings = [], []
    for result in findings.results:
        total = result.total
        results.append(measured(names[result.target], total))
        warnings += warnings_of(names[result.target], total)
    searches = [
        Searched(names[found.target], str(wish.goals), found.search.held, found.search.failed, tuple(found.steps))
        for found in findings.searches
    ]
    return BenchView(
        targets=tuple(_target_view(target, url) for target, url in zip(targets, urls, strict=True)),
        results=tuple(results),
        ratios=tuple(_ratios(names, findings.results)),
        searches=tuple(searches),
        warnings=tuple(dict.fromkeys(warnings)),
        interrupted=findings.interrupted,
    )


def _ratios(names: Sequence[str], results: Sequence[Result]) -> list[Ratio]:
    found: list[Ratio] = []
    for load in dict.fromkeys(result.load for result in results):
        same = sorted((result for result in results if result.load == load), key=lambda result: result.target)
        if len(same) == len(names) > 1:
            found += ratios(names, load, [result.rounds for result in same])
    return found


def _target_view(target: Target, url: str) -> TargetView:
    about = target.about
    return TargetView(
        name=target.name,
        url=url,
        method=about["method"],
        path=about["path"],
        body_bytes=about["bytes"],
        model=about.get("model", ""),
        form=about.get("form", ""),
        batch=about.get("batch"),
    )
