"""Dashboards for those who operate a training run: one table of panels, and what shows it.

    trainer/told/metric_table ─▶ panels ─┬─▶ wandb_workspace
                                    ├─▶ tensorboard_layout
                                    └─▶ verl-tree plot --workspace
    metrics of vLLM and Ray ─────────▶ grafana

docs/dashboards.md says what an operator sees.
"""
