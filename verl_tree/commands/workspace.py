"""Make the dashboards of training runs (docs/dashboards.md).

    verl-tree workspace wandb ENTITY/PROJECT      save a view of the project; needs `wandb login`
    verl-tree workspace tensorboard LOG_DIR       write a layout for the tab "Custom Scalars" of that --logdir
    verl-tree workspace grafana FILE.json         write a dashboard of rollout servers and machines, to be imported

wandb gets a new view each time.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path


def main(arguments: Sequence[str]) -> None:
    """Parse the command line, make the dashboard, print where it is."""
    parser = argparse.ArgumentParser(
        prog="verl-tree workspace", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kinds = parser.add_subparsers(dest="kind", required=True)
    wandb = kinds.add_parser("wandb", help="save a workspace of wandb")
    wandb.add_argument("project", metavar="ENTITY/PROJECT", help="the project is the run's trainer.project_name")
    wandb.add_argument("--name", default="verl_tree", help="name of the view; default: verl_tree")
    tensorboard = kinds.add_parser("tensorboard", help="write a layout of TensorBoard")
    tensorboard.add_argument("log_dir", metavar="LOG_DIR", type=Path, help="what tensorboard --logdir gets")
    grafana = kinds.add_parser("grafana", help="write a dashboard of Grafana")
    grafana.add_argument("out", metavar="FILE.json", type=Path)
    options = parser.parse_args(arguments)
    if options.kind == "wandb":
        entity, slash, project = options.project.partition("/")
        if not (entity and slash and project) or "/" in project:
            parser.error(
                f"{options.project!r} is no ENTITY/PROJECT: give what follows wandb.ai/ in the project's address"
            )
        _save_to_wandb(entity=entity, project=project, name=options.name)
    elif options.kind == "tensorboard":
        # Here and below not at the top: each needs its own packages only.
        from verl_tree.dashboards.tensorboard_layout import write_tensorboard_layout

        print(write_tensorboard_layout(options.log_dir))
    else:
        from verl_tree.dashboards.grafana import grafana_dashboard

        options.out.write_text(json.dumps(grafana_dashboard(), indent=1) + "\n", encoding="utf-8")
        print(options.out)


def _save_to_wandb(*, entity: str, project: str, name: str) -> None:
    import wandb

    from verl_tree.dashboards.wandb_workspace import wandb_workspace

    try:
        print(wandb_workspace(entity=entity, project=project, name=name).save().url)
    except wandb.Error as error:
        sys.exit(f"wandb did not save the workspace of {entity}/{project}: {error}")
