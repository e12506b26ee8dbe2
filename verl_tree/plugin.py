"""What every process of a run learns at the end of `import verl`: one function per registration.

verl's registries are per process. `verl_tree.main_ppo` puts this module's name into `VERL_USE_EXTERNAL_MODULES`
for the driver and for all Ray actors; verl imports it when its own import is almost done, and an error here
ends the process with its traceback. So this module stays light: whoever needs an engine imports it.
"""


def register_cpu_platform() -> None:
    """Adds the platform `cpu`; verl picks it where no accelerator is found or `VERL_PLATFORM=cpu` says so."""
    import verl_tree.platform_cpu  # noqa: F401 - the import registers


def register_all() -> None:
    """Runs every registration of this package that a process may need."""
    register_cpu_platform()


register_all()
