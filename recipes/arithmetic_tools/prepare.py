"""Prepare a run: the two sums and the small model of the demo."""

from recipes.demo.prepare import run_command_line
from recipes.demo.settings import Settings
from recipes.demo.sums import prepare

if __name__ == "__main__":
    run_command_line(prepare, settings=Settings())
