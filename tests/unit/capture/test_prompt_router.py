"""Which server a call goes to: requests in flight as they come and go, worked out by hand."""

import pytest

from rollout_hooks.capture.prompt_router import PromptRouter, routed_id
from verl_tree.launch.command.composition import prompt_router

SETTINGS = {"max_ratio": 2, "max_lead": 3}


def router(*servers: str, **settings: object) -> PromptRouter:
    return PromptRouter({name: f"handle of {name}" for name in servers}, SETTINGS | settings)


def place(balancer: PromptRouter, session: str, prompt: str) -> str:
    server, handle = balancer.acquire_server(routed_id(session, prompt))
    assert handle == f"handle of {server}"
    return server


def test_sessions_of_a_prompt_share_a_server_until_it_is_busy() -> None:
    balancer = router("a", "b")
    first = place(balancer, "s0", "p")
    # The other server has none: the first is free with up to 3 requests, and so takes a fourth.
    assert {place(balancer, f"s{i}", "p") for i in (1, 2, 3)} == {first}
    other = place(balancer, "s4", "p")
    assert other != first
    # Both have the prompt now, with 4 and 1 requests: the less busy one is taken.
    assert [place(balancer, f"s{i}", "p") for i in (5, 6, 7)] == [other] * 3
    assert balancer.get_inflight_count(first) == balancer.get_inflight_count(other) == 4


def test_the_ratio_counts_beside_the_lead() -> None:
    balancer = router("a", "b")
    for i in range(2):
        balancer.acquire_server(f"plain{i}")  # one for each server, as in verl
    server = place(balancer, "s0", "p")
    # Free while it has at most 2 x 1 + 3 requests: it has 2 now, so four more, with which it has 6.
    assert [place(balancer, f"s{i}", "p") == server for i in range(1, 6)] == [True] * 4 + [False]


def test_another_prompt_goes_to_the_least_busy_server() -> None:
    balancer = router("a", "b", "c")
    servers = [place(balancer, f"s{i}", f"p{i % 3}") for i in range(9)]
    assert set(servers[:3]) == {"a", "b", "c"}
    assert servers == servers[:3] * 3


def test_a_session_stays_where_it_began() -> None:
    balancer = router("a", "b", max_lead=0)
    first = place(balancer, "s0", "p")
    assert place(balancer, "s1", "p") != first  # 1 > 2 x 0 + 0
    # Its next calls find its own history in the cache, however busy the server is.
    assert {place(balancer, "s0", "p") for _ in range(5)} == {first}


def test_a_released_server_is_free_again() -> None:
    balancer = router("a", "b", max_lead=1)
    first = place(balancer, "s0", "p")
    assert place(balancer, "s1", "p") == first
    balancer.release_server(first, routed_id("s1", "p"))
    assert place(balancer, "s2", "p") == first


def test_servers_come_and_go() -> None:
    balancer = router("a")
    place(balancer, "s0", "p")
    balancer.add_servers({"b": "handle of b"})
    balancer.remove_servers(["a"])
    assert place(balancer, "s0", "p") == place(balancer, "s1", "p") == "b"
    balancer.remove_servers(["b"])
    with pytest.raises(RuntimeError, match="No available servers"):
        place(balancer, "s2", "p")


def test_what_is_forgotten() -> None:
    balancer = router("a", "b")
    first = place(balancer, "s0", "p")
    assert balancer.clear_sticky_cache() == {"cleared_entries": 1, "server_loads": balancer.get_status()["servers"]}
    assert place(balancer, "s1", "p") != first  # the least busy


def test_ids_without_a_prompt_are_verls() -> None:
    balancer = router("a", "b", max_lead=100)
    assert {balancer.acquire_server(f"s{i}")[0] for i in range(2)} == {"a", "b"}


@pytest.mark.parametrize("value", [0.5, -1, float("nan"), float("inf"), "2", True, None])
def test_numbers_are_refused_by_name(value: object) -> None:
    with pytest.raises(ValueError, match=f"max_ratio={value!r} in the file of rollout.router_config_path"):
        router("a", max_ratio=value)


def test_the_file_is_that_of_the_class() -> None:
    from verl.workers.rollout.router import _load_router_yaml, _resolve_router_class

    path = prompt_router(False)
    assert path is not None
    assert prompt_router(True) is None
    settings = _load_router_yaml(path)
    assert _resolve_router_class(settings["router_class"]) is PromptRouter
    PromptRouter({}, settings)
