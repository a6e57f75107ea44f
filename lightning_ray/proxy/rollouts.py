"""The rollouts of one proxy: how they are opened, found, finished, and found again after the process died.

Over TCP a rollout is named by a secret token in the path (`/r/TOKEN/...`, 256 bits, compared in constant time, good
for that rollout only and dead once it is finished). On a listener inside a sandbox's network namespace the socket
itself is the identity, and no key is looked at. There is nothing else to reach: no listing, no reward, no control.

With a journal directory, everything survives the process: the captures (`journal.py`) and the listening sockets
(`keeper.py`). A proxy that is started with `restored=True` in the directory of one that died goes on where that one
was; requests that it was answering have lost their connection, and their clients ask again.
"""

import asyncio
import hashlib
import hmac
import logging
import os
import secrets
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path

from aiohttp import web

from lightning_ray.config import ProxyConfig
from lightning_ray.proxy.capture import Capture
from lightning_ray.proxy.codec import Codec
from lightning_ray.proxy.endpoint import Endpoint, OpenRollout, Status, reached_at
from lightning_ray.proxy.engine import Engine
from lightning_ray.proxy.errors import NotFound
from lightning_ray.proxy.gate import Gate
from lightning_ray.proxy.journal import Journal, journals, read
from lightning_ray.proxy.keeper import Keeper
from lightning_ray.proxy.server import BACKLOG, Front, Site, refuse
from lightning_ray.proxy.session import Session, keep_nothing
from lightning_ray.sandbox.network import listen_inside
from lightning_ray.trajectory.call import Call

logger = logging.getLogger(__name__)

TCP = "tcp"
MOST_CONNECTIONS = 1024
"""From inside one sandbox; more are closed as soon as they come."""
FINISHED_S = 120
"""So long the calls of a finished rollout are kept, in case whoever asked for them did not get them."""


@dataclass(slots=True)
class Rollout:
    """One rollout of this proxy."""

    capture: Capture
    token: str
    journal: Journal | None
    sites: dict[int, Site] = field(default_factory=dict)
    """By port, inside its sandbox."""
    calls: list[Call] | None = None
    """Once it is finished."""


class ProxyServer:
    """All methods are called on one event loop."""

    def __init__(
        self, codec: Codec, engine: Engine, config: ProxyConfig, model: str, journal_dir: Path | None = None
    ) -> None:
        self.codec = codec
        self.engine = engine
        self.config = config
        self.front = Front(codec, config, model)
        self.directory = journal_dir if config.journal else None
        self.life = secrets.token_hex(4)
        self.rollouts: dict[str, Rollout] = {}
        self.tokens: dict[bytes, Rollout] = {}
        """By the hash of their token."""
        self.keeper: Keeper | None = None
        self.address: tuple[str, int] | None = None

    async def start(self, *, restored: bool = False) -> tuple[str, int]:
        """Listen on `proxy.host`. `restored`: go on with what an earlier process left in the journal directory;
        otherwise what lies there is from a run that is over, and is removed.

        OSError where the port is taken.
        """
        kept: dict[str, socket.socket] = {}
        if self.directory is not None:
            self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.keeper = await asyncio.to_thread(Keeper, self.directory, watch=os.getppid())
            kept = self.keeper.sockets()
            if restored:
                self._restore()
            else:
                self._remove_remains(kept)
        listener = kept.pop(TCP, None)
        if listener is None:
            try:
                listener = socket.create_server((self.config.host, self.config.port), backlog=BACKLOG)
            except OSError:
                if self.keeper is not None:
                    self.keeper.quit()
                raise
            if self.keeper is not None:
                self.keeper.hold(TCP, listener)
        self.address = (reached_at(self.config.host), listener.getsockname()[1])
        for name, inside in kept.items():
            await self._take_over(name, inside)
        self._site = await self.front.serve(listener, self._over_tcp)
        return self.address

    def _remove_remains(self, kept: dict[str, socket.socket]) -> None:
        for name in list(kept):
            kept.pop(name).close()
            self.keeper.drop(name)
        for path in journals(self.directory):
            path.unlink()

    def _restore(self) -> None:
        for path in journals(self.directory):
            entries = read(path)
            if not entries or entries[0][0] != "open":
                path.unlink()
                continue
            _, opened, token, began = entries[0]
            rollout = self._add(opened, token, began)
            session = rollout.capture.session
            cut_off = session.replay(entry for entry in entries[1:] if entry[0] not in ("life", "finish"))
            rollout.journal = Journal(self.directory, opened.rollout_id)
            session.log = rollout.journal.append
            if any(entry[0] == "finish" for entry in entries):
                self._finished(rollout)
            else:
                for exchange in cut_off:
                    rollout.journal.append("fail", exchange.ordinal, bool(exchange.choices))
                rollout.capture.recover([entry[1] for entry in entries if entry[0] == "life"])
                rollout.journal.append("life", self.life)
            logger.warning("rollout %s is known again, with %d calls", opened.rollout_id, len(session.records))

    async def _take_over(self, name: str, listener: socket.socket) -> None:
        rollout_id, _, port = name.rpartition(":")
        rollout = self.rollouts.get(rollout_id)
        if rollout is None or rollout.calls is not None:
            listener.close()
            self.keeper.drop(name)
        else:
            await self._serve_inside(rollout, int(port), listener)

    def _add(self, opened: OpenRollout, token: str, began: float) -> Rollout:
        capture = Capture(
            Session(opened), self.codec, self.engine,
            Gate(self.config.max_concurrent_calls, self.front.most_body),
            retry_grace_s=self.config.retry_grace_s, began=began, life=self.life,
        )
        rollout = Rollout(capture, token, None)
        self.rollouts[opened.rollout_id] = rollout
        self.tokens[_hash(token)] = rollout
        return rollout

    def open(self, opened: OpenRollout) -> Endpoint:
        """Make an endpoint for a rollout. The same rollout again gives the same endpoint; ValueError where it differs,
        or has been finished already."""
        if self.address is None:
            raise RuntimeError("the proxy has not been started")
        rollout = self.rollouts.get(opened.rollout_id)
        if rollout is None:
            token, began = secrets.token_urlsafe(32), time.time()
            rollout = self._add(opened, token, began)
            if self.directory is not None:
                rollout.journal = Journal(self.directory, opened.rollout_id)
                rollout.journal.append("open", opened, token, began)
                rollout.journal.append("life", self.life)
                rollout.capture.session.log = rollout.journal.append
        elif rollout.capture.session.opened != opened or rollout.calls is not None:
            raise ValueError(f"rollout {opened.rollout_id} is known already")
        host, port = self.address
        return Endpoint(base_url=f"http://{host}:{port}/r/{rollout.token}")

    async def listen(self, rollout_id: str, pid: int, port: int) -> None:
        """Serve the rollout on 127.0.0.1:port inside the network namespace of `pid`. Done already: nothing happens.

        KeyError for an unknown rollout, OSError where the namespace cannot be entered.
        """
        rollout = self._known(rollout_id)
        if port in rollout.sites:
            return
        listener = await asyncio.to_thread(listen_inside, pid, port)
        if self.keeper is not None:
            self.keeper.hold(f"{rollout_id}:{port}", listener)
        await self._serve_inside(rollout, port, listener)

    async def _serve_inside(self, rollout: Rollout, port: int, listener: socket.socket) -> None:
        async def answer(request: web.BaseRequest) -> web.StreamResponse:
            return await self.front.answer(rollout.capture, request, request.rel_url.raw_path)

        rollout.sites[port] = await self.front.serve(listener, answer, most_connections=MOST_CONNECTIONS)

    async def finish(self, rollout_id: str) -> list[Call]:
        """Revoke the endpoint, cancel what is in flight, and return all calls. KeyError for an unknown rollout.

        The calls can be asked for again for a while.
        """
        rollout = self._known(rollout_id)
        if rollout.calls is None:
            rollout.capture.gate.close()
            await rollout.capture.finish()
            for port, site in rollout.sites.items():
                await site.close()
                if self.keeper is not None:
                    self.keeper.drop(f"{rollout_id}:{port}")
            rollout.sites.clear()
            if rollout.calls is None:
                if rollout.journal is not None:
                    rollout.journal.append("finish")
                self._finished(rollout)
        return rollout.calls

    def _finished(self, rollout: Rollout) -> None:
        """Reduce a rollout to its calls, and forget those after a while."""
        session = rollout.capture.session
        rollout.capture.gate.close()
        session.log = keep_nothing
        rollout.calls = session.calls()
        self.tokens.pop(_hash(rollout.token), None)
        asyncio.get_running_loop().call_later(FINISHED_S, self._forget, session.opened.rollout_id)

    def _forget(self, rollout_id: str) -> None:
        rollout = self.rollouts.pop(rollout_id, None)
        if rollout is not None and rollout.journal is not None:
            rollout.journal.remove()

    def status(self, rollout_id: str) -> Status:
        """Also for a while after the rollout is finished."""
        session = self._known(rollout_id).capture.session
        return Status(session.faults, session.limit)

    async def abandon(self, names: list[str]) -> int:
        """Finish and forget rollouts whose runner died, those among `names` that are known. The tokens sampled for
        them."""
        tokens = 0
        for name in names:
            if name in self.rollouts:
                tokens += sum(len(call.sampled_ids) for call in await self.finish(name))
                self._forget(name)
        return tokens

    def _known(self, rollout_id: str) -> Rollout:
        try:
            return self.rollouts[rollout_id]
        except KeyError:
            raise KeyError(f"rollout {rollout_id} is not known to this proxy") from None

    async def stop(self) -> None:
        """Finish all rollouts, forget them, and stop listening. Nothing is left behind."""
        for rollout_id in list(self.rollouts):
            await self.finish(rollout_id)
            self._forget(rollout_id)
        if self.address is not None:
            await self._site.close()
        if self.keeper is not None:
            self.keeper.quit()

    async def _over_tcp(self, request: web.BaseRequest) -> web.StreamResponse:
        parts = request.rel_url.raw_path.split("/", 3)
        if len(parts) >= 3 and parts[1] == "r":
            rollout = self.tokens.get(_hash(parts[2]))
            if rollout is not None and hmac.compare_digest(rollout.token.encode(), parts[2].encode()):
                return await self.front.answer(rollout.capture, request, "/" + (parts[3] if len(parts) > 3 else ""))
        return refuse(NotFound("There is nothing here."))


def _hash(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
