"""Checks of distillation: there is a teacher, it knows the student's tokens, and verl can use the settings."""

import contextlib
import copy
import io
from typing import Any

from omegaconf import DictConfig

from verl_tree.launch.checks.inputs import check_model
from verl_tree.launch.checks.refusals import (
    MODELS,
    TEACHER_PATH,
    Check,
    Finding,
    Findings,
    model_file,
    refusal,
    refusal_here,
    text_settings,
    uses_teacher_here,
    value_of,
)

LOSS, NODES = "distillation.distillation_loss", "distillation.nnodes"


def teacher_keys(config: DictConfig) -> list[str]:
    """Return the keys of the teachers' models. verl drops the entry that it has itself where there are others."""
    if value_of(config, "distillation.enabled") is not True:
        return []
    names = list(config.distillation.teacher_models)
    keys = [f"distillation.teacher_models.{name}.model_path" for name in names]
    return [key for key in keys if key != TEACHER_PATH] or keys


def check_teachers(config: DictConfig) -> Findings:
    """Find teachers that do not exist, and more of them than the ranks of training can hold."""
    keys = teacher_keys(config)
    for key in keys:
        yield from check_model(config, key)
    if len(keys) > 1 and uses_teacher_here(config):
        remedy = f"the training ranks have one teacher, and there are {len(keys)}; give them servers, or leave one"
        yield refusal(config, NODES, remedy)


def check_vocabularies(config: DictConfig) -> Findings:
    """Find teachers for which the student's tokens are others, and more ids than there are (`topk`)."""
    keys, model = teacher_keys(config), MODELS[0]
    if not keys:  # nothing is compared, and a tokenizer has some MB
        return
    tokenizer = value_of(config, f"{model}.tokenizer_path") or value_of(config, f"{model}.path")
    tokens, sizes = _tokens(tokenizer), [text_settings(value_of(config, f"{model}.path")).get("vocab_size")]
    for key in keys:
        path = value_of(config, key)
        sizes.append(text_settings(path).get("vocab_size"))
        known = _tokens(path)
        other = next((token for token, number in tokens.items() if known.get(token) != number), None)
        if known and other is not None:
            numbers = f"{other!r} is its token {known.get(other)} and the student's {tokens[other]}"
            yield refusal_here(config, key, f"{numbers}; give a teacher with the student's tokenizer")
    topk, is_topk = value_of(config, f"{LOSS}.topk"), value_of(config, f"{LOSS}.loss_mode") == "forward_kl_topk"
    least = min((size for size in sizes if size), default=None)
    if is_topk and isinstance(topk, int) and least is not None and topk > least:
        yield refusal(config, f"{LOSS}.topk", f"there are {least} ids in the smallest vocabulary; give fewer")


def _tokens(path: Any) -> dict[str, int]:
    """Return the ids of a tokenizer's tokens; nothing if its file is not on this machine."""
    settings = model_file(path, "tokenizer.json")
    vocab = settings.get("model", {}).get("vocab", {})
    tokens = dict(vocab) if isinstance(vocab, dict) else {each[0]: number for number, each in enumerate(vocab)}
    return tokens | {each["content"]: each["id"] for each in settings.get("added_tokens", [])}


def check_distillation_by_verl(config: DictConfig) -> Findings:
    """Find what verl refuses about the settings, in the workers once the models are loaded."""
    keys = teacher_keys(config)
    if not keys or not all(value_of(config, key) for key in keys):
        return
    from hydra.errors import HydraException
    from verl.utils.config import omega_conf_to_dataclass

    try:
        with contextlib.redirect_stdout(io.StringIO()):
            omega_conf_to_dataclass(copy.deepcopy(config.distillation))
    except (ValueError, AssertionError, NotImplementedError, HydraException) as error:
        yield Finding(f"distillation.enabled=True: verl refuses the settings of distillation: {error}")


CHECKS: tuple[Check, ...] = (check_teachers, check_vocabularies, check_distillation_by_verl)
