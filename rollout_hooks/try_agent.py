"""Try an agent without a training run: one session of a loop, its tree as text, and the agent's traceback.

    python -m rollout_hooks.try_agent loops.yaml --row train.parquet:0 --model PATH --answers answers.txt

`--model` gives the tokenizer and the chat template; no weights are read. Answers come from a file, one for each call
with a line `---` between them, from the first again behind the last. Or from a vLLM server: `--url http://HOST:PORT/v1`.
`--config` names the configuration file of a training run, whose limits then hold. Further arguments are settings of
verl, and win: `actor_rollout_ref.rollout.response_length=2048`. The command `verl-tree try-agent` knows `tree_ppo` too.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from rollout_hooks.trial.session import TrialWorker


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one session and print it; return 1 if it failed, 2 if an argument is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m rollout_hooks.try_agent",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("loops", help="the file of agent loops (rollout.agent.agent_loop_config_path)")
    parser.add_argument("--row", required=True, metavar="FILE:NUMBER", help="a row of the data, counted from 0")
    parser.add_argument("--model", required=True, help="the folder of a model")
    parser.add_argument("--agent", help="the loop; needed where neither the row nor a single entry names it")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--answers", type=Path, help="a file of answers")
    source.add_argument("--url", help="a vLLM server of the model, up to /v1")
    parser.add_argument("--config", type=Path, help="the configuration file of a training run")
    parser.add_argument("--timeout", type=float, default=120.0, metavar="S", help="most seconds; default: 120")
    parser.add_argument("overrides", nargs="*", help="settings of verl, KEY=VALUE")
    options = parser.parse_intermixed_args(arguments)
    try:
        return _try(options)
    except (ValueError, OSError, HydraException, OmegaConfBaseException) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2


def _try(options: argparse.Namespace) -> int:
    # Imported here, so that --help and a wrong argument take no seconds.
    file, _, number = options.row.rpartition(":")
    if not file or not number.isdecimal():
        raise ValueError(f"--row {options.row}: give a file and the number of a row, such as train.parquet:0")
    for path in (options.loops, file, options.config):
        if path is not None and not Path(path).is_file():
            raise ValueError(f"{path}: no such file; give one that exists")
    if not options.timeout > 0:
        raise ValueError(f"--timeout {options.timeout}: give seconds above 0")

    from rollout_hooks.trial.clients import ScriptedAnswers, ServedAnswers, read_answers
    from rollout_hooks.trial.session import (
        choose_loop,
        compose_trial,
        read_names,
        read_row,
        run_session,
    )

    names, model = read_names(options.loops), options.model.rstrip("/")  # verl takes no folder that ends in /
    answers = None if options.answers is None else read_answers(options.answers.read_text())
    config = compose_trial(
        loops=options.loops, model=model, data=file, overrides=options.overrides, file=options.config
    )
    worker = _make_worker(config, model=model)
    if answers is None:
        client = ServedAnswers(config, url=options.url)
    else:
        client = ScriptedAnswers(config, answers=answers, tokenizer=worker.tokenizer)
    row = read_row(config, int(number), worker=worker)
    default = config.actor_rollout_ref.rollout.agent.default_agent_loop
    loop = choose_loop(names, asked=options.agent, row=row, default=default)
    session = run_session(config, client, row, loop=loop, worker=worker, timeout_s=options.timeout)
    print(f"loop {loop}, row {number} of {file}")
    print("\n".join(session.describe(decode=worker.tokenizer.decode)))
    return 0 if session.error is None else 1


def _make_worker(config: "DictConfig", *, model: str) -> "TrialWorker":
    from rollout_hooks.trial.session import TrialWorker

    try:
        return TrialWorker(config)
    # transformers takes a path that leads nowhere for a name on the hub; verl makes its model's settings by Hydra.
    except (OSError, HydraException) as error:
        folder = Path(model)
        if (folder / "config.json").is_file():
            raise
        problem = (
            "the folder has no config.json" if folder.is_dir() else "no such folder, and the hub gave no such model"
        )
        raise ValueError(
            f"--model {model}: {problem}; give the folder of a model with its tokenizer, or a name on the hub that can "
            "be loaded (hf download OWNER/MODEL)"
        ) from error


if __name__ == "__main__":
    sys.exit(main())
