"""Sessions of a prompt go to the server that has computed the prompt.

verl's balancer sends the calls of one request id to one server. The sessions of a prompt have an id each, so they are
spread over the servers, and each server computes the prompt anew. `rollout.router_config_path` names this router.
"""

import math
import random
from collections.abc import Mapping
from typing import Any

from typing_extensions import override
from verl.workers.rollout.router import DEFAULT_ROUTING_CACHE_SIZE, GlobalRequestLoadBalancer

_OF_PROMPT = "@prompt:"


def routed_id(request_id: str, prompt: str) -> str:
    """Return a request id that tells the router whose prompt it is; other balancers take it as any other id."""
    return f"{request_id}{_OF_PROMPT}{prompt}"


class PromptRouter(GlobalRequestLoadBalancer):
    """verl's balancer, which chooses among the servers that have the prompt while one of them is free.

    Attributes:
        max_ratio: A server is free while it has at most this many times the requests of the least busy server,
        max_lead: and so many more.
    """

    def __init__(self, servers: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        """Take verl's servers, and the file of `rollout.router_config_path`.

        Raises:
            ValueError: `max_ratio` is below 1, `max_lead` is below 0, or one of them is no number.
        """
        super().__init__(dict(servers))
        self.max_ratio = _at_least(1, config, "max_ratio")
        self.max_lead = _at_least(0, config, "max_lead")
        self._servers_of_prompt: dict[str, list[str]] = {}

    @override
    def acquire_server(self, request_id: str) -> tuple[str, Any]:
        """Return a server as verl's balancer does; a new id gets one that has its prompt."""
        _, _, prompt = request_id.rpartition(_OF_PROMPT)
        is_new = self._request_id_to_server.get(request_id) not in self._inflight_requests
        if prompt != request_id and is_new and self._inflight_requests:
            self._request_id_to_server[request_id] = self._server_for(prompt)
        return super().acquire_server(request_id)

    @override
    def clear_sticky_cache(self) -> dict[str, Any]:
        """Forget which server has which prompt, too."""
        self._servers_of_prompt.clear()
        return super().clear_sticky_cache()

    def _server_for(self, prompt: str) -> str:
        load = self._inflight_requests
        fewest = min(load.values())
        having = [server for server in self._servers_of_prompt.get(prompt, ()) if server in load]
        free = [server for server in having if load[server] <= self.max_ratio * fewest + self.max_lead]
        if free:
            return min(free, key=load.__getitem__)
        # Chance, as in verl: with the first of several, few prompts would always meet the same servers.
        server = random.choice([server for server, requests in load.items() if requests == fewest])
        self._servers_of_prompt[prompt] = [*having, server]
        if len(self._servers_of_prompt) > DEFAULT_ROUTING_CACHE_SIZE:
            del self._servers_of_prompt[next(iter(self._servers_of_prompt))]
        return server


def _at_least(least: float, config: Mapping[str, Any], key: str) -> float:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < least:
        raise ValueError(f"{key}={value!r} in the file of rollout.router_config_path: set a number of at least {least}")
    return value
