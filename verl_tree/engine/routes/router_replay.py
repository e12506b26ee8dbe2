"""Router replay: the experts of a token are those that an earlier pass chose for it, verl's `router_replay.mode`.

With R2 the pass of the old log-probs records the routes, with R3 the rollout has. Rows carry them in `routed_experts`,
(tokens, layers of the model, k) per row, as verl and vLLM write them. Zeros say that a route is not known: such a
token, and every layer without experts, is routed as ever. The update imposes the routes, and with R3 the pass of the
old log-probs, too. A tree token has one route. What becomes of rows that disagree says `route_conflicts`.

A route is imposed without knowing the family of the model: the one `torch.topk` of a router returns the scores of the
given experts. So the scores keep their graph, and what the router makes of them stays its own.

Legend: F_all flat tokens of the mini-batch, F of a micro-batch; T tree tokens of it; L tokens of a model call on this
rank, padding included; N layers of the model, k experts of a token, E experts.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from typing_extensions import override

from verl_tree.engine.routes.route_conflicts import RouteForks, first_known
from verl_tree.engine.rows.columns import jagged
from verl_tree.engine.rows.packs import TreeMicroBatch
from verl_tree.packing.counts import ForestCounts
from verl_tree.relay.calls import RelayCall
from verl_tree.relay.run import Compute
from verl_tree.tree.nodes import IntArray
from verl_tree.tree.plan import AttentionPlan
from verl_tree.tree.sharding import SequenceShard
from verl_tree.tree.transfer import to_device

ROUTES = "routed_experts"
"""verl's column of the rows' routes."""


class RouterReplay:
    """The routers of a model. They route as ever, or as they are told, and say where they routed.

    Attributes:
        num_layers: Layers of the model, with routers or without: N.
        top_k: Experts of a token; 0 before the first model call.
        imposed_LNk: How the model call routes that runs now (int16); None: as ever. An engine that runs other calls
            before the backward of one sets it again where layers are computed anew.
    """

    def __init__(self, *parts: Mapping[int, nn.Module], num_layers: int, name: str, top_k: int = 0) -> None:
        """Watch the routers of a model, by layer; a call runs those of one part."""
        self._name, self.num_layers, self.top_k = name, num_layers, top_k
        self.imposed_LNk: Tensor | None = None
        self._records = False
        self._parts = [set(part) for part in parts]
        self._ran: dict[int, Tensor | None] = {}  # The layers that ran, with routes (L, k) while recording
        for part in parts:
            for layer, router in part.items():
                # FSDP and gradient checkpoints wrap the layers, and these call the router.
                router.forward = partial(self._route, router.forward, layer)

    @classmethod
    def of_model(cls, model: PreTrainedModel) -> Self:
        """Find the routers of a model that nothing wraps.

        Raises:
            ValueError: transformers names no router of the model, or a layer has several.
        """
        num_layers: int = model.config.get_text_config(decoder=True).num_hidden_layers
        return cls(routers_of(model), num_layers=num_layers, name=type(model).__name__)

    def begin(self, routes_LNk: Tensor | None = None, *, records: bool = False) -> None:
        """Say how the next model call routes, and its backward pass: as ever, or as the routes say (int16)."""
        self.imposed_LNk, self._records = routes_LNk, records
        self._ran.clear()

    def check(self) -> None:
        """Refuse a model whose call did not run all routers of a part, for then routes were lost."""
        if set(self._ran) not in self._parts:
            raise ValueError(
                f"{len(self._ran)} of {sum(map(len, self._parts))} routers of {self._name} ran: its layers do not call "
                "them, so routes cannot be replayed; set router_replay.mode=disabled"
            )

    def recorded_LNk(self) -> Tensor | None:
        """Return the routes of the last model call, (L, N, k) int16 on the host, zeros in layers without a router.

        None: no layer of it has one.
        """
        made = {layer: routes_Lk for layer, routes_Lk in self._ran.items() if routes_Lk is not None}
        if not made:
            return None
        some = next(iter(made.values()))
        routes_LNk = some.new_zeros(some.shape[0], self.num_layers, self.top_k)
        for layer, routes_Lk in made.items():
            routes_LNk[:, layer] = routes_Lk
        return self.of_all_tokens(routes_LNk).cpu()

    def of_all_tokens(self, routes_LNk: Tensor) -> Tensor:
        """Return the routes of all tokens of a call that has only some of them on this rank; here all are there."""
        return routes_LNk

    def _route(self, forward: Callable[..., Any], layer: int, *args: Any, **kwargs: Any) -> Any:
        with _OneTopK(None if self.imposed_LNk is None else self.imposed_LNk[:, layer].long()) as choice:
            out = forward(*args, **kwargs)
        self.top_k = choice.routes_Lk.shape[-1]
        if choice.num_calls != 1 or self.top_k < 2:
            raise ValueError(
                f"a router of {self._name} calls torch.topk {choice.num_calls} times, at last for {self.top_k} "
                "experts, and router replay needs one call for at least 2: set router_replay.mode=disabled"
            )
        self._ran[layer] = choice.routes_Lk.to(torch.int16) if self._records else None
        return out


class _OneTopK(TorchFunctionMode):
    """Answers `torch.topk` with given experts where they are known, and keeps the answer.

    Attributes:
        routes_Lk: The experts of the last call.
        num_calls: How many calls there were.
    """

    def __init__(self, imposed_Lk: Tensor | None) -> None:
        super().__init__()
        self._imposed_Lk = imposed_Lk
        self.routes_Lk, self.num_calls = torch.empty(0, 0, dtype=torch.int64), 0

    @override
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func not in (torch.topk, torch.Tensor.topk):
            return out
        self.num_calls += 1
        self.routes_Lk = out.indices.detach()
        if self._imposed_Lk is None:
            return out
        assert self._imposed_Lk.shape == self.routes_Lk.shape, "the routes are those of this call's tokens"
        # No route of two experts or more is all zeros.
        is_known_L1 = self._imposed_Lk.any(dim=-1, keepdim=True)
        self.routes_Lk = torch.where(is_known_L1, self._imposed_Lk, self.routes_Lk)
        scores_LE = args[0] if args else (kwargs or {})["input"]
        return torch.return_types.topk((scores_LE.gather(-1, self.routes_Lk), self.routes_Lk))


def routers_of(model: PreTrainedModel) -> dict[int, nn.Module]:
    """Return the router of each layer that has one, as transformers declares them for `output_router_logits`.

    Raises:
        ValueError: There is none, or a layer has several.
    """
    declared = model.can_record_outputs.get("router_logits")
    recorders = declared if isinstance(declared, list) else [] if declared is None else [declared]
    classes = tuple(each if isinstance(each, type) else each.target_class for each in recorders)
    name, routers = type(model).__name__, {}
    for path, module in model.named_modules():
        if isinstance(module, classes):
            layer = next(int(part) for part in path.split(".") if part.isdigit())
            if routers.setdefault(layer, module) is not module:
                raise ValueError(f"layer {layer} of {name} has several routers: set router_replay.mode=disabled")
    if not routers:
        raise ValueError(
            f"{name} has no routers that transformers names (`can_record_outputs`): set router_replay.mode=disabled"
        )
    return routers


class MiniBatchRoutes:
    """The routes of one mini-batch's rows: recorded, or imposed.

    Attributes:
        counts: How many tree tokens got routes of rows, and of how many the rows disagree.
    """

    def __init__(self, replay: RouterReplay, column: Tensor | None, *, input_ids: Tensor, records: bool) -> None:
        """Start to record routes, or take them from the rows' column `routed_experts`; both are jagged (B, j).

        Raises:
            ValueError: Routes are to be imposed, and the rows carry none, or not one per token and layer.
        """
        self._replay, self._records = replay, records
        self._offsets = jagged(input_ids)[1].cpu()
        self.counts = ForestCounts()
        self._forks: RouteForks | None = None
        self._recorded: list[_Recorded] = []
        self._given = np.zeros((int(self._offsets[-1]), 0, 0), dtype=np.int16)  # (F_all, N, k)
        if records:
            return
        if column is None:
            raise ValueError(
                f"router_replay.mode imposes routes, and the rows carry no {ROUTES}: with R3 the rollout gives them "
                "(actor_rollout_ref.rollout.enable_rollout_routing_replay=true), with R2 compute_log_prob"
            )
        values, offsets = jagged(column)
        if not torch.equal(offsets.cpu(), self._offsets) or values.shape[1:2] != (replay.num_layers,):
            raise ValueError(
                f"{ROUTES} has routes of shape {tuple(values.shape)} for {int(self._offsets[-1])} tokens and "
                f"{replay.num_layers} layers: give each row one per token and layer, zeros where none is known"
            )
        self._given = values.cpu().to(torch.int16).numpy()

    def fork(self, keys: IntArray, *, offsets: IntArray, trained: NDArray[np.bool_]) -> IntArray:
        """Return numbers of the rows' tokens by which rows share what they route alike; see `RouteForks.of_rows`."""
        if self._records:
            return np.zeros_like(keys)
        self._forks = RouteForks.of_rows(keys, offsets=offsets, trained=trained, routes_FNk=self._given)
        self.counts += self._forks.counts
        return self._forks.number_F_all

    def around(self, compute: Compute, micro: TreeMicroBatch, *, is_counted: bool = True) -> Compute:
        """Return the model calls of a micro-batch with its routes imposed, or with their routes recorded."""
        routes_TNk = None if self._records else self._of_tree(micro, is_counted=is_counted)

        def routed(call: RelayCall, plan: AttentionPlan) -> Tensor:
            routes_LNk = None
            if routes_TNk is not None:
                # Padding of a shard is routed like the first token.
                index_L = plan.shard.slice(torch.arange(len(call.token_Q)))
                routes_LNk = routes_TNk[torch.from_numpy(call.token_Q)[index_L]]
                (routes_LNk,) = to_device((routes_LNk,), plan.subtree_end_T.device)
            self._replay.begin(routes_LNk, records=self._records)
            scores_CK = compute(call, plan)
            self._replay.check()
            if self._records and (recorded_LNk := self._replay.recorded_LNk()) is not None:
                self._recorded.append(_Recorded(micro, call, plan.shard, recorded_LNk))
            return scores_CK

        return routed

    def _of_tree(self, micro: TreeMicroBatch, *, is_counted: bool) -> Tensor:
        """Return the routes (T, N, k) of the tree tokens of a micro-batch, on the host, and maybe count them."""
        place_F = micro.flat_index_F.numpy()
        rows_FNk = self._given[place_F]
        if self._forks is not None:
            rows_FNk[~self._forks.is_read_F_all[place_F]] = 0
        routes_TNk, num_conflicts = first_known(
            rows_FNk, tree_index_F=micro.layout.tree_index_F.numpy(), num_tokens=micro.layout.num_tokens
        )
        if self._forks is None and is_counted:
            self.counts += ForestCounts(num_routed_tokens=len(routes_TNk), num_route_conflicts=num_conflicts)
        if self._forks is not None:
            assert num_conflicts == 0, "a forest that forks where rows disagree has none that do"
        return torch.from_numpy(routes_TNk)

    def outputs(self, *, group: dist.ProcessGroup | None, device: torch.device) -> dict[str, Tensor]:
        """Return the recorded routes as a column of all rows, int16, zeros in rows that were not computed.

        Each rank of the group has recorded some of them.
        """
        if not self._records:
            return {}
        rows = np.zeros((int(self._offsets[-1]), self._replay.num_layers, self._replay.top_k), dtype=np.int16)
        for each in self._recorded:
            # Zeros for the tokens of other calls and ranks.
            rows[each.micro.flat_index_F.numpy()] += each.of_tree()[each.micro.layout.tree_index_F.numpy()]
        values = torch.from_numpy(rows)
        if group is not None:
            values = values.to(device, torch.int32)
            dist.all_reduce(values, group=group)
            values = values.cpu().to(torch.int16)
        return {ROUTES: torch.nested.nested_tensor_from_jagged(values, self._offsets)}


@dataclass(frozen=True, slots=True, eq=False)
class _Recorded:
    """The routes of one model call, on the host."""

    micro: TreeMicroBatch
    call: RelayCall
    shard: SequenceShard
    routes_LNk: Tensor

    def of_tree(self) -> np.ndarray:
        """Return the routes (T, N, k) of the micro-batch that this call has computed on this rank."""
        index_M, place_M = self.shard.own(torch.arange(len(self.call.token_Q)))
        routes_MNk = self.routes_LNk[place_M].numpy()
        routes_TNk = np.zeros((self.micro.layout.num_tokens, *routes_MNk.shape[1:]), dtype=np.int16)
        routes_TNk[self.call.token_Q[index_M.numpy()]] = routes_MNk
        return routes_TNk
