"""What a replica holds, and how it changes while it runs.

A job's endpoint has one model: while a new engine is tried there are two, until the host settles which one goes on. An
endpoint of a model repository has many, which come and go as clients ask (Triton's repository extension). A client asks
one replica, but all must change: so the replica puts the files where all can read them and asks the host, which has all
replicas open the model and only then, when all could, use it:

    replica -> host   {"ask": n, "verb": "load", "model": NAME, "versions": [{"name", "version", "engine", "options"}]}
                      {"ask": n, "verb": "unload", "model": NAME}
    host -> replicas  {"open": t, "model": NAME, "versions": …}   -> {"opened": t, "error": null | …}
                      {"use": t} or {"drop": t}                   -> {"used": t}
                      {"unload": t, "model": NAME}                -> {"used": t}
    host -> replica   {"answer": n, "error": null | …}

A new version is open and warm before the old one is let go of, and what can't be opened changes nothing.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from onejob.core.artifact import Json
from onejob.core.faults import reach
from onejob.errors import BadRequestError, InferenceError, NotFoundError, OnejobError, UnavailableError, from_json
from onejob.serve.folder import METRICS
from onejob.serve.journal import RequestLog
from onejob.serve.load import Opened, Told, one_model, open_all
from onejob.serve.registry import Registry
from onejob.serve.repository import UNLOADED, prepare
from onejob.serve.router import Router
from onejob.serve.service import Service


class Loader:
    """The models of this replica, and what they record. All methods belong to the loop's thread."""

    def __init__(self, told: Told, log: RequestLog, send: Callable[[Json], None]) -> None:
        self._told = told
        self._log = log
        self._send = send
        self._process = f"{os.getpid()}:{time.time():.3f}"
        engine = (told.former or told.desired)["engine"]
        self.registry = Registry(engine["digest"], self._process, int(told.desired.get("generation", 0)))
        self._opened: dict[Service, Opened] = {}
        self._pending: dict[int, tuple[str, list[Opened]]] = {}
        """Models that are open, until the host says that all could open them."""
        self._asked: dict[int, asyncio.Future[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def is_repository(self) -> bool:
        return "models" in self._told.desired

    def begin(self, opened: Sequence[Opened], former: Opened | None) -> None:
        """Serve what was opened at the start; beside a former engine, a new one is tried."""
        if former is not None:
            (tried,) = opened
            main, new = self._service(former), self._service(tried)
            router = Router(main, new=new, share=self._told.share, shadow=self._told.shadow)
            self.registry.put(main.identity.name, {main.identity.version: router})
            former.start()
            tried.start_trial()
            return
        models: dict[str, list[Opened]] = {}
        for one in opened:
            models.setdefault(one.name, []).append(one)
        for name, versions in models.items():
            self._put(name, versions)
        for name in self._told.desired.get("unloaded", ()):
            self.registry.unavailable[name] = UNLOADED

    def settle(self, *, keep_new: bool) -> None:
        """One of two engines leaves; what it has recorded is sealed, away from the loop's thread."""
        router = self.registry.only
        former, new = (router.main, router.new) if router else (None, None)
        if router is None or new is None or former is None:
            return
        leaves = router.settle(keep_new=keep_new)
        if keep_new:
            self._opened[new].begin_to_serve(new)
        assert leaves is not None
        threading.Thread(target=self._opened[leaves].stop, name="seal", daemon=True).start()

    def close_idle(self, *, all_of_them: bool = False) -> None:
        """Free engines that have left and owe no answer."""
        gone = self.registry.forget_idle(all_of_them=all_of_them)
        for service in gone:
            service.close()
            self._opened.pop(service, None)
        if gone and not all_of_them:
            give_back_memory()

    def stop(self) -> None:
        """Write and seal the rest, and free what can be."""
        self.close_idle(all_of_them=True)
        for opened in list(self._opened.values()):
            opened.stop()
        for service in self.registry.services():
            service.batcher.close()

    # ---- a repository's models

    async def load(self, name: str, config: Mapping[str, Json] | None, files: Mapping[str, bytes]) -> None:
        """Load a model in every replica, by what came with the request or lies in the repository; raises why it can't
        be."""
        source, folder = self._told.desired.get("repository"), self._told.folder
        versions = await asyncio.to_thread(prepare, source, folder, name, config, files)
        await self._ask({"verb": "load", "model": name, "versions": versions})

    async def unload(self, name: str) -> None:
        """Unload a model in every replica; nothing to do for one that is known and not loaded."""
        if self.registry.versions_of(name):
            await self._ask({"verb": "unload", "model": name})
        elif name not in self.registry.unavailable:
            raise NotFoundError(f"failed to unload '{name}', no such model is loaded")

    async def _ask(self, ask: Mapping[str, Json]) -> None:
        """Have the host carry a change to all replicas."""
        number = len(self._asked) + 1 + max(self._asked, default=0)
        answer = self._asked[number] = asyncio.get_running_loop().create_future()
        self._send({"ask": number, **ask})
        try:
            await answer
        finally:
            del self._asked[number]

    def hear(self, message: Mapping[str, Json]) -> None:
        """What the host says about models."""
        if "answer" in message:
            self._take_answer(message)
        elif "open" in message:
            self._soon(self._open(int(message["open"]), message["model"], message["versions"]))
        elif "use" in message:
            name, versions = self._pending.pop(int(message["use"]))
            reach("replica.before_use")
            self._put(name, versions)
            self._send({"used": message["use"]})
        elif "drop" in message:
            _, versions = self._pending.pop(int(message["drop"]), ("", []))
            for opened in versions:
                opened.close()
            give_back_memory()
        elif "unload" in message:
            self.registry.remove(message["model"], UNLOADED)
            self.close_idle()
            self._send({"used": message["unload"]})

    def _take_answer(self, message: Mapping[str, Json]) -> None:
        waits = self._asked.get(int(message["answer"]))
        if waits is None or waits.done():
            return  # its client has gone
        if message.get("error"):
            waits.set_exception(from_json(message["error"]))
        else:
            waits.set_result(None)

    async def _open(self, ticket: int, name: str, versions: Sequence[Mapping[str, Json]]) -> None:
        """Open and warm up, on another thread: requests go on."""
        opened: list[Opened] = []
        error: OnejobError | None = None
        number = ""
        try:
            for version in versions:
                number = version["version"]
                told = one_model(self._told.desired, version)
                opened.append(await asyncio.to_thread(open_all, self._told.folder, told))
        except (InferenceError, UnavailableError) as why:  # the model's fault, in Triton's words
            words = f"load failed for model '{name}': version {number} is at UNAVAILABLE state: {why}"
            error = BadRequestError(words)
        except OnejobError as why:
            error = why
        except Exception as why:
            error = InferenceError(f"{type(why).__name__}: {why}", place=name)
        if error is None:
            self._pending[ticket] = (name, opened)
        else:
            for one in opened:
                one.close()
        self._send({"opened": ticket, "error": error.to_json() if error else None})

    def _put(self, name: str, versions: Sequence[Opened]) -> None:
        routers: dict[str, Router] = {}
        for opened in versions:
            service = self._service(opened)
            routers[service.identity.version] = Router(service)
            opened.start()
        self.registry.put(name, routers)

    def _service(self, opened: Opened) -> Service:
        service = opened.service(self._log, self._told.folder / METRICS, self._process)
        self._opened[service] = opened
        return service

    def _soon(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def give_back_memory() -> None:
    """Return what was freed to the system: an engine's arena lies among other memory, and would stay."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it
    if trim is not None:
        trim(0)
