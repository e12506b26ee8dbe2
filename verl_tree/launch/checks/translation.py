"""What a command for verl says in other words: values that mean the same here take the names that they have here.

`translate` runs on a resolved configuration before the checks. It changes values in place and says each change in one
line. What has no meaning here is left alone, and the checks refuse it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from verl_tree import clashes
from verl_tree.configs import FSDP
from verl_tree.launch.checks.capacity import longest_trajectory, team_keys, team_size
from verl_tree.launch.checks.features import settings_of
from verl_tree.launch.checks.refusals import (
    ACTOR,
    ACTOR_ENGINES,
    CORRECTION,
    MODELS,
    OTHER_ENGINES,
    REF,
    ROLLOUT,
    corrections,
    engines_of,
    ranks_of,
    uses_cpu,
    uses_critic,
    uses_reference,
    uses_tree,
    value_of,
)
from verl_tree.launch.checks.values import find_wrong_values
from verl_tree.launch.command.composition import model_engine

Lines = Iterator[str]
Translator = Callable[[DictConfig], Lines]
"""It changes values of a resolved configuration in place and yields a line for each change."""


def translate(config: DictConfig) -> list[str]:
    """Translate a resolved configuration in place; return one line for each change, `key=value: what becomes of it`.

    Nothing is changed where values are wrong that the checks refuse before all others: translators compute with them.
    """
    if any(find_wrong_values(config)):
        return []
    return [line for translator in TRANSLATORS for line in translator(config)]


def _always(_config: DictConfig) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Synonym:
    """Values of some keys that become another value; `because` ends the line."""

    keys: tuple[str, ...]
    values: tuple[Any, ...]
    becomes: Any
    because: str
    applies: Callable[[DictConfig], bool] = _always

    def __call__(self, config: DictConfig) -> Lines:
        """Replace the values; yield one line for all keys, if there are any."""
        found = [key for key in self.keys if self.applies(config) and value_of(config, key) in self.values]
        if found:
            yield f"{', '.join(f'{key}={value_of(config, key)}' for key in found)}: {self.because}"
        for key in found:
            OmegaConf.update(config, key, self.becomes)


def _below(name: str, *parents: str) -> tuple[str, ...]:
    return tuple(f"{parent}.{name}" for parent in parents)


def _tree_with(uses: Callable[[DictConfig], bool]) -> Callable[[DictConfig], bool]:
    return lambda config: uses_tree(config) and uses(config)


def _has_teams(config: DictConfig) -> bool:
    return team_size(config) > 1


WITH_PADS = (ACTOR, REF, *ACTOR_ENGINES, *OTHER_ENGINES)
FOR_TEAMS = ((False,), True, "on, because verl asks for it with Ulysses; a tree has no padding")
SYNONYMS = (
    Synonym(
        _below("use_fused_kernels", *MODELS, ACTOR),
        (True,),
        False,
        "off; a tree's logits are made only where a loss reads them, tree.logits_chunk_size at a time",
        uses_tree,
    ),
    Synonym((f"{ACTOR}.use_prefix_grouper",), (True,), False, "off; tree.enabled=true shares all prefixes"),
    Synonym(_below("pad_to_length", *WITH_PADS), (True,), False, "off; a pack is not padded", uses_tree),
    Synonym(
        _below("use_remove_padding", *MODELS, ACTOR),
        (True,),
        False,
        "off; flash-attn has no kernels for trainer.device=cpu",
        lambda config: uses_cpu(config) and not uses_tree(config) and config.model_engine != "megatron",
    ),
    Synonym((f"{MODELS[0]}.use_remove_padding",), *FOR_TEAMS, _tree_with(_has_teams)),
    Synonym(
        (f"{MODELS[1]}.use_remove_padding",),
        *FOR_TEAMS,
        _tree_with(lambda config: _has_teams(config) and uses_critic(config)),
    ),
)


def train_on_trees(config: DictConfig) -> Lines:
    """Take the tree engine where a command names the engine of verl's on which it is built.

    verl looks it up by the engine config, into which it copies the role's for FSDP only.
    """
    engine = model_engine(config)
    because = f"runs as {engine.tree}: {engine.title} on trees"
    for role, group in engines_of(config).items():
        key = f"{role}.strategy"
        yield from Synonym((key,), engine.flat, engine.tree, because, uses_tree)(config)
        if config.model_engine != FSDP:
            OmegaConf.update(config, f"{group}.strategy", value_of(config, key), force_add=True)


def compute_alone(config: DictConfig) -> Lines:
    """Let each rank compute the calls of a model that teams do not share out; relay cuts what is longer than a call."""
    if not uses_tree(config) or team_size(config) == 1:
        return
    alone = [setting for name in (clashes.RECURRENT, clashes.IMAGES) for setting in settings_of(name, config)]
    if not alone:
        return
    sizes: list[str] = []
    # verl reads a role's other key where the first one says 1.
    while keys := [key for key in team_keys(config) if value_of(config, key) != 1]:
        sizes += [f"{key}={value_of(config, key)}" for key in keys]
        for key in keys:
            OmegaConf.update(config, key, 1)
    _, _, path = alone[0].partition("=")
    yield f"{', '.join(sizes)}: 1, because a rank computes {path} alone; longer paths are relayed"


def name_optim(config: DictConfig) -> Lines:
    """Give options of optimisers the names that they have for the engine; the least rate is a share for FSDP2 only."""
    engine = model_engine(config)
    for role in (ACTOR, "critic") if uses_critic(config) else (ACTOR,):
        optim: Any = value_of(config, f"{role}.optim")
        for of_fsdp, name in engine.optim_names:
            value = optim.get(of_fsdp)
            if value is None:
                continue
            own = value * optim.lr if of_fsdp == "min_lr_ratio" else value
            yield f"{role}.optim.{of_fsdp}={value}: {role}.optim.{name}={own}, as {engine.title} calls it"
            with open_dict(config):
                optim[name] = own
                del optim[of_fsdp]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The keys by which verl cuts a role's micro-batches.

    Attributes:
        by_tokens: Whether they are cut by tokens.
        rows: Otherwise the rows of a rank.
        all_rows: The same for all ranks together; verl's earlier releases read it.
        tokens: The most tokens of a rank.
    """

    by_tokens: str
    rows: str
    all_rows: str
    tokens: str
    applies: Callable[[DictConfig], bool] = _always


def _micro_batch(
    role: str, kind: str, *, switch: str = "use_dynamic_bsz", applies: Callable[[DictConfig], bool] = _always
) -> MicroBatch:
    rows = f"{role}.{kind}_micro_batch_size"
    return MicroBatch(f"{role}.{switch}", f"{rows}_per_gpu", rows, f"{role}.{kind}_max_token_len_per_gpu", applies)


MICRO_BATCHES = (
    _micro_batch(ACTOR, "ppo"),
    _micro_batch(ROLLOUT, "log_prob", switch="log_prob_use_dynamic_bsz"),
    _micro_batch(REF, "log_prob", switch="log_prob_use_dynamic_bsz", applies=uses_reference),
    _micro_batch("critic", "ppo", applies=uses_critic),
)


def cut_by_tokens(config: DictConfig) -> Lines:
    """Turn micro-batches of some rows into packs of as many tokens as the rows have at most."""
    used = [each for each in MICRO_BATCHES if each.applies(config)]
    sizes = {each: (key, rows) for each in used for key, rows in _rows_of_rank(config, each)}
    not_read = [key for each, (key, _) in sizes.items() if value_of(config, each.by_tokens)]
    if not_read:
        keys = ", ".join(f"{key}={value_of(config, key)}" for key in dict.fromkeys(not_read))
        yield f"{keys}: not read, because packs are cut by tokens"
    by_rows = [each for each in used if not value_of(config, each.by_tokens)]
    for each in by_rows:
        line = f"{each.by_tokens}={value_of(config, each.by_tokens)}: packs are cut by tokens"
        if uses_tree(config) and config.tree.capacity is not None:
            yield f"{line}; a pack has at most tree.capacity={config.tree.capacity}"
            continue
        reason = ""
        if each in sizes:
            key, rows = sizes[each]
            longest, named = longest_trajectory(config)
            num_ranks = team_size(config)
            OmegaConf.update(config, each.tokens, -(-rows * longest // num_ranks))
            shared = f", on {num_ranks} ranks" if num_ranks > 1 else ""
            reason = f", for the {rows} rows of {key}, of at most {named}{shared}"
        yield f"{line}; {each.tokens}={value_of(config, each.tokens)}{reason}"
    for each in by_rows:
        OmegaConf.update(config, each.by_tokens, True)


def _rows_of_rank(config: DictConfig, micro_batch: MicroBatch) -> Iterator[tuple[str, int]]:
    """Yield the key that gives the rows of a rank's micro-batch, and their number, if there is one."""
    rows, all_rows = value_of(config, micro_batch.rows), value_of(config, micro_batch.all_rows)
    if isinstance(rows, int):
        yield micro_batch.rows, rows
    elif isinstance(all_rows, int):
        num_teams = ranks_of(config, "trainer") // team_size(config)
        yield micro_batch.all_rows, max(1, all_rows // max(1, num_teams))


def read_critic_tokens(config: DictConfig) -> Lines:
    """Give the critic's most tokens the only name under which verl 0.9.1 reads them."""
    name, read = "critic.ppo_max_token_len_per_gpu", "critic.ppo_infer_max_token_len_per_gpu"
    if uses_critic(config) and value_of(config, read) is None:
        with open_dict(config.critic):
            OmegaConf.update(config, read, value_of(config, name))
        yield f"{name}={value_of(config, name)}: copied to {read}, which verl 0.9.1 reads instead"


def norm_by_width(config: DictConfig) -> Lines:
    """Fix the divisor of `seq-mean-token-sum-norm` where none is given.

    verl divides by the width of the rows' mask (`agg_loss`): by the longest possible response where rows are padded, as
    in its earlier trainer, and by the longest response of the micro-batch in its present one. The first does not depend
    on how a mini-batch is cut, so that is what the mode means here.
    """
    for role in (ACTOR, "critic") if uses_critic(config) else (ACTOR,):
        key = f"{role}.loss_scale_factor"
        is_norm = value_of(config, f"{role}.loss_agg_mode") == "seq-mean-token-sum-norm"
        if is_norm and value_of(config, key) is None:
            OmegaConf.update(config, key, config.actor_rollout_ref.rollout.response_length)
            yield f"{key}=None: data.max_response_length={value_of(config, key)}, the width of verl's padded rows"


def correct_in_the_loss(config: DictConfig) -> Lines:
    """With `bypass_mode`, let the loss weigh and reject rows where nobody asked for another loss.

    verl's earlier trainer does so, too (`verl.trainer.ppo.rollout_corr_helper.apply_bypass_mode`). The present one does
    not, and would leave out what is asked for.
    """
    *others, last = corrections(config) or [""]
    loss, correction = f"{ACTOR}.policy_loss.loss_mode", f"{ACTOR}.policy_loss.rollout_correction"
    if last != "bypass_mode" or value_of(config, correction) is not None:
        return
    if value_of(config, loss) == "bypass_mode" or (others and value_of(config, loss) == "vanilla"):
        asked = ", ".join(f"{name}={value_of(config, f'{CORRECTION}.{name}')}" for name in (*others, last))
        yield f"{CORRECTION}: {asked}: {loss}=bypass_mode reads them, as in verl's earlier trainer"
        with open_dict(config):
            OmegaConf.update(config, loss, "bypass_mode")
            OmegaConf.update(config, correction, value_of(config, CORRECTION))


LEGACY_GROUPS = ("custom_reward_function", "reward_model", "sandbox_fusion")
MOVED = (
    "custom_reward_function",
    "sandbox_fusion",
    "reward_model.num_workers",
    "reward_model.reward_manager",
    "reward_model.reward_loop_source",
    "reward_model.reward_loop_module_path",
    "reward_model.reward_loop_class_name",
    "reward_model.reward_kwargs",
    "reward_model.enable",
    "reward_model.enable_resource_pool",
    "reward_model.n_gpus_per_node",
    "reward_model.nnodes",
    "reward_model.model.path",
    "reward_model.rollout",
)
"""What `verl.experimental.reward_loop.migrate_legacy_reward_impl` (0.9.1) moves below `reward`."""


def move_legacy_rewards(config: DictConfig) -> Lines:
    """Move the reward keys of earlier releases below `reward`; verl 0.9.1 does not read them, but can move them."""
    keys = [key for group in LEGACY_GROUPS for key in _set_keys(config, group)]
    if not keys:
        return
    from verl.experimental.reward_loop import migrate_legacy_reward_impl

    for key in keys:
        is_moved = any(f"{key}.".startswith(f"{each}.") for each in MOVED)
        what = "an earlier release's key, moved below `reward`" if is_moved else "not read by verl 0.9.1"
        yield f"{key}={value_of(config, key)}: {what}"
    function_name = config.reward.custom_reward_function.name
    loop_class = value_of(config, "reward_model.reward_loop_class_name")
    with open_dict(config):
        migrate_legacy_reward_impl(config)
    # What verl's function leaves undone: the default name of a function, and the class's name where verl reads it.
    if config.reward.custom_reward_function.name is None:
        config.reward.custom_reward_function.name = function_name
    if config.reward.reward_manager.source == "importlib" and loop_class is not None:
        config.reward.reward_manager.name = loop_class


def _set_keys(config: DictConfig, key: str) -> Iterator[str]:
    """Yield the keys at or below a key that have a value."""
    value = value_of(config, key)
    if isinstance(value, DictConfig):
        for name in value:
            yield from _set_keys(config, f"{key}.{name}")
    elif value is not None:
        yield key


TRANSLATORS: tuple[Translator, ...] = (
    train_on_trees,
    compute_alone,
    name_optim,
    *SYNONYMS,
    cut_by_tokens,
    read_critic_tokens,
    norm_by_width,
    correct_in_the_loss,
    move_legacy_rewards,
)
