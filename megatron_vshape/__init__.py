"""Pipeline schedules with controllable activation memory for stock Megatron-Core."""

__version__ = "0.1.0"


def register() -> None:
    """Put `--pipeline-schedule` and the schedules behind it into Megatron.

    Call it before Megatron parses its arguments and builds its model.

    Raises:
        HookError: this Megatron-Core is not one the hooks were written for.
    """
    from megatron_vshape.mcore.hooks import registry

    registry.install()


def unregister() -> None:
    """Leave every attribute of Megatron that `register` replaced as it was."""
    from megatron_vshape.mcore.hooks import registry

    registry.uninstall()
