"""What every engine says of verl's configs: their features, and other values while verl's code reads them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from verl_tree import clashes
from verl_tree.families import has_recurrent_layers, has_token_classifier
from verl_tree.functional.images import reads_images


@contextmanager
def as_verl_expects(owner: Any, **values: Any) -> Iterator[None]:
    """Let the attributes of a config or an engine have other values while active. A config may be frozen."""
    own = {name: getattr(owner, name) for name in values}
    for name, value in values.items():
        object.__setattr__(owner, name, value)
    try:
        yield
    finally:
        for name, value in own.items():
            object.__setattr__(owner, name, value)


def features(model: Any, engine: Any, *, ulysses: int) -> dict[str, str | bool]:
    """Return features of `verl_tree.clashes`, each with its setting, or False if an engine does not use it.

    `model` and `engine` are verl's configs; `ulysses` ranks compute each call together.
    """
    tree, hf_config = engine.tree, model.hf_config
    is_critic, settings = model.model_type == "value_model", hf_config.to_dict()
    path = f"{'critic' if is_critic else 'actor_rollout_ref'}.model.path={model.path}"
    return {
        clashes.TREES: "tree.enabled=true",
        clashes.PROMPT: tree.sharing == "prompt" and clashes.PROMPT,
        clashes.MEAN: tree.shared_tokens != "sum" and f"tree.shared_tokens={tree.shared_tokens}",
        clashes.AUTO: tree.capacity == "auto" and clashes.AUTO,
        clashes.ULYSSES: ulysses > 1 and f"ulysses_sequence_parallel_size={ulysses}",
        clashes.IMAGES: reads_images(hf_config) and path,
        clashes.RECURRENT: has_recurrent_layers(settings) and path,
        clashes.CRITIC: is_critic and path,
        clashes.NO_CLASSIFIER: not has_token_classifier(settings) and path,
        clashes.TRANSFORMERS: "tree.enabled=true",
    }
