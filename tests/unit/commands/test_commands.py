"""The command `verl-tree`: it finds its commands, needs what the called one needs, and says what is wrong."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from verl_tree.commands.__main__ import COMMANDS, main


def test_the_help_names_every_command_and_imports_nothing() -> None:
    """Not even numpy, so it is there at once."""
    program = "from verl_tree.commands.__main__ import main; main(['--help']); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", f"import sys; {program}"], capture_output=True, text=True, check=True)
    usage, *lines, modules = done.stdout.splitlines()
    assert usage == "usage: verl-tree COMMAND [arguments]"
    assert [line.split()[0] for line in lines if line.startswith("  ")] == list(COMMANDS)
    assert set(COMMANDS) == {"check", "try-agent", "canary", "show", "plot", "workspace"}
    assert not {"numpy", "torch", "pyarrow", "matplotlib", "hydra"} & set(modules.split())


@pytest.mark.parametrize("name", ["canary", "show", "plot", "workspace"])
def test_a_command_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: verl-tree {name} ")


def test_an_unknown_command_is_named() -> None:
    with pytest.raises(SystemExit, match=r"verl-tree shw: no such command; did you mean show\? There are check, "):
        main(["shw"])


def test_a_missing_package_is_said_with_the_extra_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("plot", "workspace_picture"):
        monkeypatch.delitem(sys.modules, f"verl_tree.commands.{module}", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit, match=r"verl-tree plot needs matplotlib: pip install 'verl-tree\[dashboards\]'"):
        main(["plot", "metrics.jsonl"])


def test_the_workspace_of_one_run_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    from verl_tree.commands.workspace_picture import logged_keys
    from verl_tree.dashboards.panels import Panel

    data = [{"tree/por": 0.5, "val-core/a/reward/mean@1": 0.0}, {"tree/por": 0.6, "tree/err": 0.4}]
    lines = [json.dumps({"step": step, "data": each}) for step, each in enumerate(data)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    main(["plot", str(tmp_path / "metrics.jsonl"), "--workspace"])
    assert (tmp_path / "metrics.png").stat().st_size > 10_000
    assert capsys.readouterr().out == f"  plot: {tmp_path}/metrics.png\n"

    metrics = dict(enumerate(data))
    sharing = Panel("sharing", ("tree/err", "tree/compression", "tree/por"))
    assert logged_keys(sharing, metrics) == ["tree/err", "tree/por"]
    assert logged_keys(Panel("validation", pattern="val-core/.+"), metrics) == ["val-core/a/reward/mean@1"]


def test_a_project_of_wandb_has_an_entity(capsys: pytest.CaptureFixture[str]) -> None:
    for wrong in ("project", "a/b/c", "/b"):
        with pytest.raises(SystemExit) as ended:
            main(["workspace", "wandb", wrong])
        assert ended.value.code == 2
        assert f"'{wrong}' is no ENTITY/PROJECT" in capsys.readouterr().err


def test_a_dashboard_of_grafana_is_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["workspace", "grafana", f"{tmp_path}/grafana.json"])
    assert capsys.readouterr().out == f"{tmp_path}/grafana.json\n"
    assert json.loads((tmp_path / "grafana.json").read_text())["title"] == "verl_tree: rollout and machines"
