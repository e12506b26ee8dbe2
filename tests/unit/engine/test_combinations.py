"""A few draws of the fuzz of combinations (`tests/fuzz/combinations`), and how its features are drawn."""

from collections.abc import Iterator

import pytest

pytest.importorskip("verl")

from process_groups import group_of_one

from tests.fuzz.combinations import api, api_features, engine, engine_features
from tests.fuzz.combinations.drawing import Feature, Space

API_SEEDS = (1000, 1001, 1002, 1003, 1004, 1005, 1006, 1009, 1010, 1011, 1012, 1013)
ENGINE_SEEDS = (
    11,
    16,
    23,
)  # LoRA, checkpoints and a store on the host; R3 with weighed sessions; KL and sums over rows
SPACES = {"api": (api_features.SPACE, {}), "engine": (engine_features.SPACE, {"ranks": 2})}


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    """Be a process group of one, with what verl's workers read."""
    with pytest.MonkeyPatch.context() as variables, group_of_one():
        for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
            variables.setenv(name, value)
        yield


@pytest.mark.parametrize("seed", API_SEEDS)
def test_public_functions_with_drawn_features(seed: int) -> None:
    space = api_features.SPACE
    settings = space.draw(seed)
    outcome = api.run(settings, seed=seed, words=space.words(settings))
    assert outcome.status != "wrong", (settings, outcome.detail)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("seed", ENGINE_SEEDS)
def test_the_engine_with_drawn_features(seed: int) -> None:
    space = engine_features.SPACE
    settings = space.draw(seed, {"ranks": 1})
    outcome = engine.run(settings, seed=seed, words=space.words(settings))
    assert outcome.status == "exact", (settings, outcome.detail)
    assert outcome.num_vacuous < 0.1 * outcome.num_gradients


@pytest.mark.parametrize("level", SPACES)
def test_every_choice_is_drawn_and_no_clash_that_another_level_refuses(level: str) -> None:
    space, fixed = SPACES[level]
    drawn = [space.draw(seed, fixed) for seed in range(1200)]
    facts = [space.facts(settings) for settings in drawn]
    for feature in space.features:
        for value in feature.values(drawn[0]):
            assert any(settings[feature.name] == value for settings in drawn), (feature.name, value)
    names = set().union(*facts)
    for pair, words in space.clashes.items():
        assert names.issuperset(pair), f"{pair} names something that is never drawn"
        assert words or not any(pair in space.clashes_of(settings) for settings in drawn), pair


def test_a_clash_is_kept_now_and_then_and_refused_by_its_words() -> None:
    space = Space(
        (Feature("sport", ("chess", "boxing"), 1.0), Feature("place", ("home", "ring", "club"), 0.5)),
        {"place=home": ("quiet",)},
        {("sport", "quiet"): "not here", ("sport", "place=club"): ""},
    )
    drawn = [space.draw(seed) for seed in range(400)]
    assert {settings["sport"] for settings in drawn} == {"boxing"}
    assert {settings["place"] for settings in drawn} == {"home", "ring"}
    at_home = [settings for settings in drawn if settings["place"] == "home"]
    assert 10 < len(at_home) < 100
    assert space.words(at_home[0]) == ["not here"]
    assert space.words({"sport": "boxing", "place": "ring"}) == []


def test_a_new_feature_changes_no_other_choice() -> None:
    space = api_features.SPACE
    more = Space((Feature("other", (1, 2), 0.5), *space.features), space.kinds, space.clashes)
    for seed in range(50):
        settings = more.draw(seed)
        del settings["other"]
        assert settings == space.draw(seed)
