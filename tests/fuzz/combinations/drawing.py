"""How settings are drawn from a table of features."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import numpy as np

Settings = dict[str, Any]
"""The value of every feature, by name."""

Clashes = Mapping[tuple[str, ...], str]
"""Facts that do not go together: words of the ValueError that refuses them, or "" if something else than the level
under test refuses them, so that they are not drawn."""

KEPT_CLASHES = 0.15
"""How often a choice stays that clashes with an earlier one, so that the refusal is tested."""


def always(_drawn: Settings) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Feature:
    """Something that can be switched on.

    Attributes:
        name: Its name.
        choices: Its values, or a function of what is drawn that returns them; the first one is the default.
        share: How often another value is drawn. None: all values are equally likely, and none is a default.
        when: Whether it can be drawn, given the features before it in the table; else it has its default.
    """

    name: str
    choices: Sequence[Any] | Callable[[Settings], Sequence[Any]]
    share: float | None = None
    when: Callable[[Settings], bool] = always

    def values(self, drawn: Settings) -> Sequence[Any]:
        return self.choices(drawn) if callable(self.choices) else self.choices

    def is_on(self, settings: Settings) -> bool:
        return self.share is not None and settings[self.name] != self.values(settings)[0]


@dataclass(frozen=True, slots=True)
class Space:
    """A level's features in the order in which they are drawn, what values imply, and what does not go together."""

    features: Sequence[Feature]
    kinds: Mapping[str, Sequence[str]]  # what a fact "name=value" is as well
    clashes: Clashes
    always: Sequence[str] = ()  # facts of every draw

    def draw(self, seed: int, fixed: Mapping[str, Any] | None = None) -> Settings:
        """Draw the settings of a seed. Each feature has random numbers of its own, so a new one changes no other."""
        given = dict(fixed or {})
        names = {feature.name for feature in self.features}
        drawn: Settings = {name: value for name, value in given.items() if name not in names}
        for feature in self.features:
            if feature.name in given:
                drawn[feature.name] = given[feature.name]
                continue
            rng = np.random.default_rng([seed, crc32(feature.name.encode())])
            values = feature.values(drawn)
            value = values[0]
            if feature.when(drawn):
                value = _choice(rng, values, feature.share)
                before = set(self.clashes_of(drawn))
                new = {each: set(self.clashes_of(drawn | {feature.name: each})) - before for each in values}
                is_kept = rng.random() < KEPT_CLASHES and all(self.clashes[pair] for pair in new[value])
                if new[value] and not is_kept:
                    value = next((each for each in values if not new[each]), values[0])
            drawn[feature.name] = value
        return drawn

    def facts(self, settings: Settings) -> set[str]:
        """Return what holds: NAME=VALUE of every feature, NAME of those that are switched on, and their kinds."""
        found: set[str] = set(self.always)
        for feature in self.features:
            if feature.name in settings:
                fact = f"{feature.name}={settings[feature.name]}"
                found |= {fact, *self.kinds.get(fact, ())} | ({feature.name} if feature.is_on(settings) else set())
        return found

    def clashes_of(self, settings: Settings) -> list[tuple[str, ...]]:
        """Return the sets of facts of some settings that clash."""
        facts = self.facts(settings)
        return [pair for pair in self.clashes if facts.issuperset(pair)]

    def words(self, settings: Settings) -> list[str]:
        """Return words of the refusals of which one has to come; none if nothing clashes."""
        return [words for pair in self.clashes_of(settings) if (words := self.clashes[pair])]


def _choice(rng: np.random.Generator, values: Sequence[Any], share: float | None) -> Any:
    if share is None:
        return values[rng.integers(len(values))]
    return values[rng.integers(1, len(values))] if len(values) > 1 and rng.random() < share else values[0]


def differing(space: Space, settings: Settings) -> Iterator[str]:
    """Yield the settings other than the defaults, for a message."""
    for feature in space.features:
        if feature.share is None or feature.is_on(settings):
            yield f"{feature.name}={settings[feature.name]!r}"
