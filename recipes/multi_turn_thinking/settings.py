"""What the recipe's data and model are made from: the settings of `arithmetic_tools` with another warm start."""

from recipes.arithmetic_tools.settings import Settings, WarmStartSettings


def default_settings() -> Settings:
    """Returns the settings of the small model.

    Of the solver's habits, `plan` says whether a key is looked up and `go_on` whether a sum is calculated; nothing is
    concluded.
    """
    return Settings(warm_start=WarmStartSettings(num_sessions=10, num_skilled_steps=300))
